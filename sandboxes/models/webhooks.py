"""Who is told what happens here, and what they were told: columns, constraints and indexes. The verbs are in outbox, which
writes down what happened, and in delivering, which tells."""

import uuid
from ipaddress import ip_address
from typing import Any
from urllib.parse import SplitResult, urlsplit

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import models
from django.db.models import Q

from sandboxes.webhooks.addresses import get_refusal_reason


class EventType(models.TextChoices):
    """What can happen that others want to know."""

    BUDGET_WARNING = "budget.warning"
    BUDGET_EXHAUSTED = "budget.exhausted"
    LEASE_ENDED = "lease.ended"
    SANDBOX_QUARANTINED = "sandbox.quarantined"
    TEST = "webhook.test"  # an operator asked for it; it goes to one webhook, whatever that wants


SUBSCRIBABLE_EVENT_TYPES = [kind.value for kind in EventType if kind != EventType.TEST]  # what a webhook may be for


def parse_webhook_url(url: str) -> SplitResult:
    """The parts of an address to which events may go; ValidationError says why it is none."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        raise ValidationError("This is no URL.") from None
    if parts.scheme not in ("http", "https") or not host or not url.isascii() or not url.isprintable() or " " in url:
        raise ValidationError("A URL such as https://example.com/events.")
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise ValidationError("Without a user, a password and a fragment: who calls is known by the signature.")
    if parts.scheme == "http" and not settings.DEBUG and not is_loopback(host):
        raise ValidationError("https; http is for this machine's own addresses.")
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
        raise ValidationError(f"Of these, each once: {', '.join(SUBSCRIBABLE_EVENT_TYPES)}.")


NOT_REMOVED = Q(removed_at__isnull=True)
ENABLED = NOT_REMOVED & Q(active=True, disabled_at__isnull=True)


class Webhook(models.Model):
    """Somebody's address that is told of what happens. Its secret signs what is sent there, and nothing else."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    url = models.CharField(max_length=500, validators=[check_url], verbose_name="URL")
    description = models.CharField(max_length=200, blank=True, help_text="Who listens there, and for what.")
    kinds = models.JSONField(default=list, blank=True, validators=[check_kinds], help_text="None chosen: all of them.")
    internal = models.BooleanField(
        default=False, help_text="It may have an address that is not public: of this machine, or of a private network."
    )
    sealed = models.BinaryField(null=True, editable=False, help_text="The secret, encrypted; see sealing.")
    sealed_before = models.BinaryField(null=True, editable=False, help_text="The secret before that one, encrypted.")
    before_until = models.DateTimeField(
        null=True, blank=True, editable=False, help_text="Until then the secret before it signs as well."
    )
    active = models.BooleanField(default=True, editable=False, help_text="Not paused by an operator.")
    created_at = models.DateTimeField(editable=False)
    created_by = models.CharField(max_length=255, blank=True, editable=False)
    last_at = models.DateTimeField(null=True, blank=True, editable=False, help_text="When it was tried last.")
    last_status = models.PositiveSmallIntegerField(null=True, blank=True, editable=False)
    last_error = models.CharField(max_length=300, blank=True, editable=False)
    last_delivered_at = models.DateTimeField(null=True, blank=True, editable=False)
    disabled_at = models.DateTimeField(
        null=True, blank=True, editable=False, help_text="When it was given up: it failed for too long, or wanted no more."
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
        """What is wrong with an address that needs no look-up; the others are judged at each delivery."""
        try:
            host = urlsplit(self.url).hostname or ""
            address = ip_address("127.0.0.1" if host == "localhost" else host)
        except ValueError:
            return
        for internal, field in ((True, "url"), (self.internal, "internal")):
            if why := get_refusal_reason(address, internal=internal):
                raise ValidationError({field: f"{host}: {why}"})


class Event(models.Model):
    """Something that happened, once."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    kind = models.CharField(max_length=64)
    key = models.CharField(max_length=255, help_text="What happened, within its kind: it is written down once.")
    payload = models.JSONField()
    at = models.DateTimeField()

    class Meta:
        default_permissions = ("view",)
        ordering = ["-at", "-pk"]
        constraints = [models.UniqueConstraint(fields=["kind", "key"], name="event_once")]
        indexes = [models.Index(fields=["-at", "-id"], name="event_newest")]

    def __str__(self) -> str:
        return f"{self.kind} {self.key}"


class Delivery(models.Model):
    """One event for one webhook: due until it arrived or was given up."""

    event = models.ForeignKey(Event, on_delete=models.CASCADE, related_name="deliveries", db_index=False)
    webhook = models.ForeignKey(Webhook, on_delete=models.CASCADE, related_name="deliveries", db_index=False)
    asked_at = models.DateTimeField(help_text="From when on it is tried.")
    due_at = models.DateTimeField(
        null=True, blank=True, help_text="The next try; while one is made, when whoever makes it passes for dead."
    )
    claim = models.UUIDField(null=True, blank=True, help_text="Whoever tries.")
    tries = models.PositiveIntegerField(default=0)
    delivered_at = models.DateTimeField(null=True, blank=True)
    given_up_at = models.DateTimeField(null=True, blank=True)
    last_status = models.PositiveSmallIntegerField(null=True, blank=True)
    last_error = models.CharField(max_length=300, blank=True)

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
