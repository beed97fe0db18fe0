"""Identity of this installation. The verbs are in sandboxes.sweeps.installation."""

import uuid

from django.db import models
from django.db.models import Q

from sandboxes.db.message_fields import LongMessageField, MessageField

MARK_NAME = "installation.json"  # of the installation's mark: key in the store, and file name in the state directory


class Installation(models.Model):
    """Identity of the installation that this database belongs to, and its generation. The table has one row."""

    id = models.PositiveSmallIntegerField(primary_key=True, default=1, editable=False)
    identity = models.UUIDField(default=uuid.uuid4, editable=False)
    generation = models.PositiveBigIntegerField(
        default=0, help_text="Increases with each mark written to the store and the state directory. 0: never marked."
    )
    marked_at = models.DateTimeField(null=True, blank=True)
    mismatch = LongMessageField(blank=True, help_text="Why destructive sweeps are refused. Empty: they run.")
    confirmed_at = models.DateTimeField(null=True, blank=True)
    confirmed_by = MessageField(max_length=255, blank=True)

    class Meta:
        default_permissions = ("view",)
        constraints = [models.CheckConstraint(condition=Q(id=1), name="installation_single_row")]

    def __str__(self) -> str:
        return str(self.identity)
