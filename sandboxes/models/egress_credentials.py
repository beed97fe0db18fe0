"""Credentials that the forward proxy adds to requests for domains of a policy's allow list."""

from django.db import models


class EgressCredential(models.Model):
    """Value of the Authorization header for one domain. Programs in the sandbox never see it."""

    policy = models.ForeignKey("sandboxes.Policy", on_delete=models.CASCADE, related_name="egress_credentials", db_index=False)
    domain = models.CharField(max_length=253)
    sealed_authorization = models.BinaryField(editable=False, help_text="Encrypted by sandboxes.db.encryption.")
    writes = models.BooleanField(default=False, db_default=False, help_text="Sent with every method, not only with downloads.")
    changed_at = models.DateTimeField()

    class Meta:
        verbose_name = "egress credential"
        default_permissions = ()
        ordering = ["policy", "domain"]
        constraints = [models.UniqueConstraint(fields=["policy", "domain"], name="egresscredential_once")]

    def __str__(self) -> str:
        return self.domain
