"""Tables of agents' AT Protocol accounts and of the records created in their repositories."""

import json
import uuid
from typing import Any

from django.db import models
from django.db.models import Q

from sandboxes.db.message_fields import MessageField
from sandboxes.db.prefix_index import PrefixIndex


class Authentication(models.TextChoices):
    """Proof with which the agent writes to its repository."""

    SERVICE_TOKEN = "service_token", "Service token, signed by the agent's key"
    SESSION = "session", "Session, opened with the account's password"


class AtprotoAccount(models.Model):
    """Server of an agent's repository (PDS), and the authentication there. The password never enters a sandbox."""

    agent_did = models.CharField(max_length=255, unique=True, verbose_name="agent")
    service_url = models.CharField(max_length=500, help_text="Base URL of the server, such as https://pds.example.org.")
    service_did = models.CharField(max_length=320, blank=True, help_text="DID of the server: the audience of service tokens.")
    authentication = models.CharField(max_length=16, choices=Authentication)
    sealed_password = models.BinaryField(null=True, editable=False, help_text="Encrypted by sandboxes.db.encryption.")
    changed_at = models.DateTimeField()
    changed_by = MessageField(max_length=255, blank=True)

    class Meta:
        verbose_name = "AT Protocol account"
        default_permissions = ("view",)
        ordering = ["agent_did"]
        constraints = [
            models.CheckConstraint(
                condition=Q(authentication=Authentication.SERVICE_TOKEN, sealed_password__isnull=True) & ~Q(service_did="")
                | Q(authentication=Authentication.SESSION, sealed_password__isnull=False),
                name="atprotoaccount_authentication",
            ),
        ]

    def __str__(self) -> str:
        return self.agent_did


class RecordStatus(models.TextChoices):
    PENDING = "pending"
    CREATED = "created"
    FAILED = "failed"


class AtprotoRecord(models.Model):
    """Record of an agent's repository: stored here first, then created by its server. The key is chosen here.

    Creating a record again under its key has no effect, so every attempt may be repeated."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    lease = models.ForeignKey("leases.Lease", on_delete=models.PROTECT, related_name="atproto_records", db_index=False)
    turn_number = models.BigIntegerField(null=True, blank=True, verbose_name="turn", help_text="Empty: created by the agent.")
    agent_did = models.CharField(max_length=255, verbose_name="agent")
    collection = models.CharField(max_length=317)
    record_key = models.CharField(max_length=512, verbose_name="key")
    value_text = models.TextField(editable=False, help_text="Record as JSON text.")
    status = models.CharField(max_length=8, choices=RecordStatus, default=RecordStatus.PENDING)
    uri = models.CharField(max_length=1200, blank=True, verbose_name="URI")
    cid = models.CharField(max_length=128, blank=True, verbose_name="CID")
    created_at = models.DateTimeField(help_text="Time of the row.")
    ended_at = models.DateTimeField(null=True, blank=True, help_text="Time at which the record was created or given up.")
    attempts = models.PositiveIntegerField(default=0)
    next_attempt_at = models.DateTimeField(null=True, blank=True)
    give_up_at = models.DateTimeField(help_text="An attempt that fails after this time is the last.")
    error = MessageField(max_length=500, blank=True, help_text="Of the last attempt.")

    class Meta:
        verbose_name = "AT Protocol record"
        default_permissions = ("view",)
        permissions = [("manage_atprotorecord", "Can repeat failed AT Protocol records")]
        ordering = ["-created_at", "-pk"]
        constraints = [
            models.UniqueConstraint(fields=["agent_did", "collection", "record_key"], name="atprotorecord_key"),
            models.UniqueConstraint(fields=["lease", "turn_number"], name="atprotorecord_turn"),
            models.CheckConstraint(
                condition=Q(status=RecordStatus.PENDING, next_attempt_at__isnull=False, ended_at__isnull=True)
                | (~Q(status=RecordStatus.PENDING) & Q(next_attempt_at__isnull=True, ended_at__isnull=False)),
                name="atprotorecord_pending_has_attempt",
            ),
            models.CheckConstraint(
                condition=Q(status=RecordStatus.CREATED) & ~Q(uri="") | (~Q(status=RecordStatus.CREATED) & Q(uri="")),
                name="atprotorecord_created_has_uri",
            ),
        ]
        indexes = [
            models.Index(fields=["-created_at", "-id"], name="atprotorecord_newest"),
            models.Index(fields=["lease", "-created_at"], name="atprotorecord_lease"),
            models.Index(fields=["next_attempt_at"], condition=Q(status="pending"), name="atprotorecord_due"),
            PrefixIndex(fields=["agent_did"], name="atprotorecord_agent_prefix"),
            PrefixIndex(fields=["record_key"], name="atprotorecord_key_prefix"),
        ]

    def __str__(self) -> str:
        return f"{self.collection}/{self.record_key}"

    @property
    def value(self) -> dict[str, Any]:
        return json.loads(self.value_text)
