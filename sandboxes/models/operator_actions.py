"""Operator actions of API keys and commands: columns and indexes. The verb is in sandboxes.audit."""

from uuid import uuid4

from django.db import models

from sandboxes.db.message_fields import MessageField


class OperatorAction(models.Model):
    """Change of a row by an operator's API key or a command, kept when the row is deleted.

    Changes by users of the console are log entries of Django's admin, which have a user. An action whose effect is not one
    transaction is an order: it is recorded before its effect, and its result once that is known. Nothing else changes."""

    id = models.UUIDField(primary_key=True, default=uuid4, editable=False)
    kind = models.CharField(max_length=100, help_text='Label of the changed row\'s model, such as "billing.budget".')
    object_id = models.CharField(max_length=64, help_text="Primary key of the changed row.")
    object_text = MessageField("object", max_length=300, help_text="Description of the row after the change.")
    action = MessageField(max_length=60)
    detail = MessageField(max_length=1000, blank=True)
    is_order = models.BooleanField(
        "order", default=False, db_default=False, help_text="Recorded before its effect, which is not one transaction."
    )
    result = MessageField(
        max_length=1000, blank=True, default="", db_default="",
        help_text="Of an order. Empty: not known, its process ended first.",
    )  # fmt: skip
    actor = MessageField("by", max_length=200, help_text="API key, or the command line.")
    at = models.DateTimeField()

    class Meta:
        default_permissions = ("view",)
        ordering = ["-at", "-pk"]
        indexes = [
            models.Index(fields=["-at", "-id"], name="operatoraction_newest"),
            models.Index(fields=["kind", "object_id", "-at"], name="operatoraction_object"),
        ]

    def __str__(self) -> str:
        return f"{self.action}: {self.object_text}"

    @property
    def summary(self) -> str:
        """Return the detail, and the result of an order."""
        return "; ".join(filter(None, [self.detail, f"result: {self.result or 'not known'}" if self.is_order else ""]))
