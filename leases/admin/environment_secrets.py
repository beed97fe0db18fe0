"""Signing secrets of the game server on the page of its environment. A value is shown once, when it is made."""

from datetime import datetime

from django import forms
from django.contrib import messages
from django.contrib.admin.utils import quote
from django.urls import reverse
from django.utils.html import format_html
from unfold.widgets import UnfoldBooleanSwitchWidget

from leases.environments import signing
from leases.environments.models import Environment
from sandboxes.admin.base.actions import AdminAction, ReasonForm
from sandboxes.admin.base.formatting import SummaryField, format_time_until, render_time_ago
from sandboxes.audit import Actor


class SecretForm(ReasonForm):
    """Choice of ending the earlier secrets at once."""

    field_order = ["revoke_previous", "reason"]
    revoke_previous = forms.BooleanField(
        required=False, label="Revoke earlier secrets", widget=UnfoldBooleanSwitchWidget,
        help_text="Events that they sign are rejected from now on. Otherwise they are accepted for another 24 hours.",
    )  # fmt: skip


def _issue_secret(row: Environment, actor: Actor, reason: str, now: datetime, *, revoke_previous: bool) -> bool:
    _, row.new_secret = signing.add_secret(row.pk, revoke_previous=revoke_previous, now=now, actor=actor)  # type: ignore[attr-defined]
    return True


def _show_secret(row: Environment, form: ReasonForm) -> str:
    """Show the new secret once, and return the URL of the environment's page."""
    if secret := getattr(row, "new_secret", None):
        messages.warning(form.request, f"Copy the new secret now; it is not shown again: {secret}")
    return reverse("admin:leases_environment_change", args=[quote(row.pk)])


ISSUE_SECRET_ACTION = AdminAction(
    title="Issue signing secret",
    warning="The game server of the environment signs its events with the secret, in place of an API key. It is shown once.",
    done="given a new signing secret",
    refusal_reason="has ended",
    legal=lambda row: row.ended_at is None,
    verb=_issue_secret,
    icon="key",
    permissions=("leases.manage_environment",),
    form=SecretForm,
    button="Secret",
    get_next_url=_show_secret,
)


def build_secret_fields(row: Environment, *, now: datetime) -> list[SummaryField]:
    """Build the number of valid secrets and the origin of the newest. Nothing without a secret."""
    found = [secret for secret in row.secrets.defer("sealed") if secret.valid_until is None or secret.valid_until > now]
    if not found:
        return []
    newest, ending = found[0], [secret.valid_until for secret in found if secret.valid_until]
    maker = f" by {newest.created_by}" if newest.created_by else ""
    made = format_html("newest made {}{}", render_time_ago(newest.created_at), maker)
    until = format_time_until(min(ending), "earlier one ends", "") if ending else ""
    note = format_html("{}; {}", made, until) if until else made
    return [SummaryField("Signing secrets", f"{len(found)} valid", note=note)]
