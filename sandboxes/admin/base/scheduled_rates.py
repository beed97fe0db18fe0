"""Console action that deletes a rate which has not begun, for each model of rates."""

from datetime import datetime
from typing import Any

from django.core.exceptions import ValidationError
from django.db import IntegrityError
from django.db.models import Model
from django.shortcuts import get_object_or_404
from django.urls import reverse

from sandboxes.admin.base.actions import AdminAction, ReasonForm
from sandboxes.admin.base.formatting import build_changelist_url
from sandboxes.db import database_time


def build_delete_action(model: type[Model], *, dependent: str, refusal_reason: str) -> AdminAction:
    """Build the action for rows with a `valid_from`, whose `delete` refuses those that have begun with ValidationError.

    `dependent` is what the rate determines, such as "price"."""
    name = f"{model._meta.app_label}_{model._meta.model_name}"

    def delete(rate: Any, actor: str, reason: str, now: datetime) -> bool:
        """Delete a fresh copy of the row, so that `rate` keeps its id for the log entry."""
        try:
            get_object_or_404(model, pk=rate.pk).delete()
        except (ValidationError, IntegrityError):  # came into force meanwhile, or another row refers to it
            return False
        return True

    def get_remaining_url(row: Any, form: ReasonForm) -> str:
        """URL of the rate, or of the list if the rate was deleted."""
        if model._base_manager.filter(pk=row.pk).exists():
            return reverse(f"admin:{name}_change", args=[row.pk])
        return build_changelist_url(name)

    return AdminAction(
        title="Delete rate",
        warning=f"The rate is not in force yet, so no {dependent} depends on it. The present rate stays in force.",
        done="deleted",
        refusal_reason=refusal_reason,
        legal=lambda rate: rate.valid_from > database_time.now(),
        verb=delete,
        icon="delete",
        permissions=(f"{model._meta.app_label}.change_{model._meta.model_name}",),
        danger=True,
        button="Delete",
        get_next_url=get_remaining_url,
    )
