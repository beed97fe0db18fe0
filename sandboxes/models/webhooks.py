"""Webhooks, outbox events and deliveries: columns, constraints and indexes. The verbs are in sandboxes.webhooks."""

import uuid
from ipaddress import ip_address
from typing import Any
from urllib.parse import SplitResult, urlsplit

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import models
from django.db.models import Q

from sandboxes.db.message_fields import MessageField
from sandboxes.db.prefix_index import PrefixIndex
from sandboxes.webhooks.addresses import get_refusal_reason


class EventType(models.TextChoices):
    """Types of events that webhooks and event streams receive."""

    BUDGET_WARNING = "budget.warning"
    BUDGET_EXHAUSTED = "budget.exhausted"
    LEASE_ENDED = "lease.ended"
    AGENT_RUN_ENDED = "agent_run.ended"
    QUEUED_RUN_QUEUED = "queued_run.queued"
    QUEUED_RUN_STARTED = "queued_run.started"
    QUEUED_RUN_ENDED = "queued_run.ended"
    SANDBOX_QUARANTINED = "sandbox.quarantined"
    TEST = "webhook.test"  # sent on request of an operator, to one webhook, regardless of its subscription


SUBSCRIBABLE_EVENT_TYPES = [kind.value for kind in EventType if kind != EventType.TEST]


def parse_webhook_url(url: str) -> SplitResult:
    """Split the URL of a webhook. Raise ValidationError if events may not be sent there."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        raise ValidationError("Enter a valid URL.") from None
    if parts.scheme not in ("http", "https") or not host or not url.isascii() or not url.isprintable() or " " in url:
        raise ValidationError("Enter a URL such as https://example.com/events.")
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise ValidationError("Remove the user, password and fragment. Receivers authenticate events by their signature.")
    if parts.scheme == "http" and not settings.DEBUG and not is_loopback(host):
        raise ValidationError("Use https. http is accepted for loopback addresses only.")
    return parts


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_url(url: str) -> None:
    parse_webhook_url(url)


def check_kinds(value: Any) -> None:
    if (
        not isinstance(value, list)
        or len(set(map(str, value))) < len(value)
        or not set(map(str, value)) <= {*SUBSCRIBABLE_EVENT_TYPES}
    ):
        raise ValidationError(f"Choose from {', '.join(SUBSCRIBABLE_EVENT_TYPES)}, each once.")


NOT_REMOVED = Q(removed_at__isnull=True)
ENABLED = NOT_REMOVED & Q(active=True, disabled_at__isnull=True)


class Webhook(models.Model):
    """Subscription of one URL to events, with the secret that signs them."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    url = models.CharField(max_length=500, validators=[check_url], verbose_name="URL")
    description = models.CharField(max_length=200, blank=True, help_text="Receiver and purpose.")
    kinds = models.JSONField(default=list, blank=True, validators=[check_kinds], help_text="Event types. None selected: all.")
    internal = models.BooleanField(default=False, help_text="Internal address: loopback and private networks are allowed.")
    sealed = models.BinaryField(null=True, editable=False, help_text="Secret, encrypted by sandboxes.db.encryption.")
    sealed_before = models.BinaryField(null=True, editable=False, help_text="Previous secret, encrypted.")
    before_until = models.DateTimeField(
        null=True, blank=True, editable=False, help_text="End of the rotation overlap, in which both secrets sign."
    )
    active = models.BooleanField(default=True, editable=False, help_text="Off: paused by an operator.")
    created_at = models.DateTimeField(editable=False)
    created_by = MessageField(max_length=255, blank=True, editable=False)
    last_at = models.DateTimeField(null=True, blank=True, editable=False, help_text="Time of the last attempt.")
    last_status = models.PositiveSmallIntegerField(null=True, blank=True, editable=False)
    last_error = MessageField(max_length=300, blank=True, editable=False)
    last_delivered_at = models.DateTimeField(null=True, blank=True, editable=False)
    failures = models.PositiveIntegerField(
        default=0, db_default=0, editable=False, help_text="Failed attempts since the last delivery."
    )
    failing_since = models.DateTimeField(null=True, blank=True, editable=False)
    retry_at = models.DateTimeField(
        null=True, blank=True, editable=False, help_text="No attempt before: the last one failed. Empty: at once."
    )
    disabled_at = models.DateTimeField(
        null=True, blank=True, editable=False, help_text="Disabled after failing for too long, or by a 410 response."
    )
    removed_at = models.DateTimeField(null=True, blank=True, editable=False)

    class Meta:
        default_permissions = ("view",)
        permissions = [
            ("send_webhook", "Can test, pause and resume webhooks and send events again"),
            ("manage_webhook", "Can add, change and remove webhooks and rotate their secrets"),
        ]
        ordering = ["-created_at", "-pk"]
        constraints = [
            models.CheckConstraint(
                condition=Q(sealed__isnull=False, removed_at__isnull=True)
                | Q(sealed__isnull=True, sealed_before__isnull=True, removed_at__isnull=False),
                name="webhook_secret_iff_current",
            ),
            models.CheckConstraint(
                condition=Q(sealed_before__isnull=True) | Q(before_until__isnull=False), name="webhook_old_secret_ends"
            ),
        ]

    def __str__(self) -> str:
        return self.url

    @property
    def state(self) -> str:
        if self.removed_at:
            return "removed"
        if self.disabled_at:
            return "disabled"
        return "active" if self.active else "paused"

    def clean(self) -> None:
        """Reject a literal address that is not allowed. Host names are resolved and checked at each delivery."""
        try:
            host = urlsplit(self.url).hostname or ""
            address = ip_address("127.0.0.1" if host == "localhost" else host)
        except ValueError:
            return
        for internal, field in ((True, "url"), (self.internal, "internal")):
            if reason := get_refusal_reason(address, internal=internal):
                raise ValidationError({field: f"{host}: {reason}"})


class Event(models.Model):
    """One event of the outbox, unique by kind and key."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    kind = models.CharField(max_length=64)
    key = models.CharField(max_length=255, help_text="Deduplication key within the kind.")
    payload = models.JSONField()
    at = models.DateTimeField()
    position = models.BigIntegerField(
        null=True, unique=True, editable=False, help_text="Order of event streams, assigned after the commit of the event."
    )

    class Meta:
        default_permissions = ("view",)
        ordering = ["-at", "-pk"]
        constraints = [models.UniqueConstraint(fields=["kind", "key"], name="event_once")]
        indexes = [
            models.Index(fields=["-at", "-id"], name="event_newest"),
            PrefixIndex(fields=["key"], name="event_key_prefix"),
            models.Index(fields=["at", "id"], condition=Q(position__isnull=True), name="event_without_position"),
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.key}"


class Delivery(models.Model):
    """Delivery of one event to one webhook: due until it is delivered or abandoned."""

    event = models.ForeignKey(Event, on_delete=models.CASCADE, related_name="deliveries", db_index=False)
    webhook = models.ForeignKey(Webhook, on_delete=models.CASCADE, related_name="deliveries", db_index=False)
    asked_at = models.DateTimeField(help_text="Start of the retry window.")
    due_at = models.DateTimeField(
        null=True, blank=True, help_text="Next attempt; during an attempt, the deadline of its worker."
    )
    claim = models.UUIDField(null=True, blank=True, help_text="Token of the worker that makes the attempt.")
    tries = models.PositiveIntegerField(default=0)
    delivered_at = models.DateTimeField(null=True, blank=True)
    given_up_at = models.DateTimeField(null=True, blank=True)
    last_status = models.PositiveSmallIntegerField(null=True, blank=True)
    last_error = MessageField(max_length=300, blank=True)

    class Meta:
        default_permissions = ("view",)
        verbose_name_plural = "deliveries"
        ordering = ["-pk"]
        constraints = [
            models.UniqueConstraint(fields=["event", "webhook"], name="delivery_once"),
            models.CheckConstraint(
                condition=Q(due_at__isnull=False, delivered_at__isnull=True, given_up_at__isnull=True)
                | Q(due_at__isnull=True, claim__isnull=True, delivered_at__isnull=False, given_up_at__isnull=True)
                | Q(due_at__isnull=True, claim__isnull=True, delivered_at__isnull=True, given_up_at__isnull=False),
                name="delivery_due_until_its_end",
            ),
        ]
        indexes = [
            models.Index(fields=["webhook", "due_at"], condition=Q(due_at__isnull=False), name="delivery_due"),
            models.Index(fields=["webhook", "-id"], name="delivery_webhook"),
        ]

    def __str__(self) -> str:
        return f"delivery {self.pk}"
