"""Admission queue of a pool: columns and constraints. The verbs are in sandboxes.pool.admission_queue."""

from django.db import models


class AdmissionRequest(models.Model):
    """Request that waits for a place in a full pool. It holds neither a place nor a lease.

    The client extends `expires_at` while it waits. After that time the request counts as abandoned and is ignored."""

    pool = models.ForeignKey("sandboxes.Pool", on_delete=models.CASCADE, related_name="admission_requests")
    agent_did = models.CharField(max_length=255, verbose_name="agent")
    environment_id = models.CharField(max_length=200, verbose_name="environment")
    enqueued_at = models.DateTimeField(help_text="Kept when the client returns before expires_at.")
    expires_at = models.DateTimeField()

    class Meta:
        default_permissions = ("view",)
        constraints = [
            # Not the pool first: a request that leaves is looked up without its pool.
            models.UniqueConstraint(fields=["agent_did", "environment_id", "pool"], name="admission_request_once"),
        ]

    def __str__(self) -> str:
        return f"{self.agent_did}::{self.environment_id}"
