"""Large outputs of ended runs, kept in the object store. The verbs are in sandboxes.state.run_outputs."""

from django.db import models

from sandboxes.models.runs import Run
from sandboxes.models.state import StoredObject


class OutputObject(StoredObject):
    """One object in the store with the outputs of several runs, one after the other."""


class StoredOutput(models.Model):
    """Place of one run's output in an object: the bytes of stdout from `offset` on, then those of stderr."""

    run = models.OneToOneField(Run, on_delete=models.CASCADE, primary_key=True, related_name="stored_output")
    stored_in = models.ForeignKey(OutputObject, on_delete=models.PROTECT, related_name="outputs")
    offset = models.PositiveBigIntegerField(help_text="Bytes before stdout in the object.")
    stdout_bytes = models.PositiveIntegerField()
    stderr_bytes = models.PositiveIntegerField()

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return f"output of {self.run_id}"
