"""Console pages of API keys."""

from datetime import datetime, timedelta
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.db.models import Q
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html_join
from django.utils.safestring import SafeString
from unfold.decorators import display
from unfold.widgets import (
    UnfoldAdminCheckboxSelectMultipleWidget,
    UnfoldAdminSelectWidget,
    UnfoldBooleanSwitchWidget,
)

from leases import allow_lists, api_keys
from leases.errors import InvalidRequest
from leases.grants import revocation
from leases.models import Agent, AgentKey, KeyScope, default_key_scopes
from leases.projects import registry
from leases.projects.models import Project
from leases.resource_limits import LIMIT_FIELDS, describe_limits
from leases.tasks import enqueue_reclaim
from sandboxes.admin.base.actions import AdminAction, ReasonForm
from sandboxes.admin.base.changelist import ListTab
from sandboxes.admin.base.fields import DurationOrZeroField
from sandboxes.admin.base.formatting import (
    SummaryField,
    format_time_until,
    render_badge,
    render_time_ago,
    render_timestamp,
    render_two_lines,
)
from sandboxes.admin.base.limits import LIMIT_LABELS
from sandboxes.admin.base.model_admin import ConsoleModelAdmin
from sandboxes.admin.base.registry import get_reference
from sandboxes.audit import Actor
from sandboxes.db import database_time

UNRESTRICTED_TEXT = "all that are not restricted"


class RevokeKeyForm(ReasonForm):
    """Choice of ending the leases of the key with it."""

    field_order = ["end_leases", "reason"]
    end_leases = forms.BooleanField(
        required=False,
        label="End its leases",
        widget=UnfoldBooleanSwitchWidget,
        help_text="Ends the active leases that were granted to this key. Otherwise they go on until their end.",
    )

    def clean_end_leases(self) -> bool:
        end_leases: bool = self.cleaned_data["end_leases"]
        if end_leases and not self.request.user.has_perm("leases.end_lease"):
            raise forms.ValidationError("You may not end leases.")
        return end_leases


def _revoke_key(row: AgentKey, actor: Actor, reason: str, now: datetime, *, end_leases: bool = False) -> bool:
    return revocation.revoke(row, end_leases=end_leases, now=now, actor=actor, reason=reason).revoked


REVOKE_KEY_ACTION = AdminAction(
    title="Revoke key",
    warning="Requests with this key are rejected from now on. Its terminals, previews, file URLs and streams end within two "
    "seconds. A revoked key cannot be restored.",
    done="revoked",
    refusal_reason="already revoked",
    legal=lambda key: key.revoked_at is None,
    verb=_revoke_key,
    form=RevokeKeyForm,
    enqueue=enqueue_reclaim,
    icon="key_off",
    permissions=("leases.revoke_key",),
    danger=True,
    bulk_button="Revoke keys…",
)


class RotateKeyForm(ReasonForm):
    """Overlap of the previous and the new secret."""

    field_order = ["overlap", "reason"]
    overlap = DurationOrZeroField(
        initial=api_keys.ROTATION_OVERLAP,
        help_text="Time for which the previous secret is accepted. 0 ends all earlier secrets at once.",
    )


def _rotate_key(row: AgentKey, actor: Actor, reason: str, now: datetime, *, overlap: timedelta) -> bool:
    row.new_text = api_keys.rotate_key(row.pk, overlap=overlap, now=now, actor=actor)  # type: ignore[attr-defined]
    return True


def _show_key(row: AgentKey, form: ReasonForm) -> str:
    """Show the new text of a rotated key once, and return the URL of the key's page."""
    if key := getattr(row, "new_text", None):
        messages.warning(form.request, format_key_message(key))
    return reverse("admin:leases_agentkey_change", args=[row.pk])


def format_key_message(key: str) -> str:
    return f"Copy the new key now; it is not shown again: {key}"


ROTATE_KEY_ACTION = AdminAction(
    title="Rotate key",
    warning="A new secret is issued and shown once. The previous secret is accepted until the end of the overlap.",
    done="rotated",
    refusal_reason="revoked or expired",
    legal=lambda key: key.revoked_at is None and not api_keys.is_expired(key, database_time.now()),
    verb=_rotate_key,
    icon="autorenew",
    permissions=("leases.change_agentkey",),
    form=RotateKeyForm,
    get_next_url=_show_key,
)


class AgentKeyForm(forms.ModelForm):
    """Agents, role, scopes, allow lists and expiry of a key. Agents and role are those of a new key only."""

    scopes = forms.MultipleChoiceField(
        choices=KeyScope.choices,
        initial=default_key_scopes,
        widget=UnfoldAdminCheckboxSelectMultipleWidget,
        help_text="Requests that the key permits. leases includes read.",
    )

    project = forms.ModelChoiceField(
        Project.objects.all(), required=False, widget=UnfoldAdminSelectWidget,
        help_text="Project of the agents. Empty: the default project.",
    )  # fmt: skip

    def clean_project(self) -> Project:
        return self.cleaned_data["project"] or registry.find("")

    def clean_dids(self) -> list[str]:
        dids: list[str] = self.cleaned_data["dids"]
        for did in dids:
            get_reference("agent").clean(did)
        return dids

    def clean_expires_at(self) -> datetime | None:
        expires_at: datetime | None = self.cleaned_data["expires_at"]
        if expires_at and "expires_at" in self.changed_data and expires_at <= database_time.now():
            raise forms.ValidationError("The expiry must be in the future. Revoke the key to end it now.")
        return expires_at

    def clean_allowed_environment_types(self) -> list[str]:
        return self._clean_names("environment_types", self.cleaned_data["allowed_environment_types"])

    def clean_allowed_pools(self) -> list[str]:
        return self._clean_names("pools", self.cleaned_data["allowed_pools"])

    def _clean_names(self, field: str, names: list[str]) -> list[str]:
        try:
            allow_lists.require_known(field, names)
        except InvalidRequest as error:
            raise forms.ValidationError(error.detail) from None
        return list(dict.fromkeys(names))

    def clean(self) -> dict[str, Any] | None:
        cleaned = super().clean() or {}
        if "dids" in self.fields and not self.errors and not cleaned.get("dids") and not cleaned.get("operator"):
            self.add_error("dids", "Enter at least one agent, or make this an operator key.")
        if "dids" in self.fields and not self.errors:
            foreign = Agent.objects.filter(did__in=cleaned["dids"]).exclude(project=cleaned["project"])
            if other := foreign.select_related("project").first():
                self.add_error("dids", f"{other.did} belongs to the project {other.project}.")
        return cleaned


def build_valid_filter(now: datetime) -> Q:
    """Build the filter of keys that are neither revoked nor expired."""
    return Q(revoked_at__isnull=True) & (Q(expires_at__isnull=True) | Q(expires_at__gt=now))


def render_key_state(row: AgentKey, now: datetime) -> SafeString:
    if row.revoked_at:
        return render_badge("expired", "revoked")
    return render_badge("expired") if api_keys.is_expired(row, now) else render_badge("ok", "valid")


@admin.register(AgentKey)
class AgentKeyAdmin(ConsoleModelAdmin):
    form = AgentKeyForm
    list_display = ["shown", "name", "agents_summary", "state", "last_used", "created"]
    list_filter = ["operator"]
    search_fields = ["prefix__startswith", "name__startswith", "dids__icontains"]
    search_help_text = "Prefix, name (prefix) or DID"
    ordering = ["-created_at", "-pk"]
    list_tabs = {
        "valid": ListTab("Valid", "No valid keys. Add one to let agents call the API.", build_valid_filter),
        "history": ListTab("History", "No keys yet. Add one to let agents call the API."),
    }
    readonly_fields = ["agents"]
    labels = {**LIMIT_LABELS, "allowed_environment_types": "Allowed environment types", "allowed_pools": "Allowed pools"}
    row_actions = {"rotate": ROTATE_KEY_ACTION, "revoke": REVOKE_KEY_ACTION}
    bulk_actions = {"revoke_all": REVOKE_KEY_ACTION}

    def has_change_permission(self, request: HttpRequest, obj: AgentKey | None = None) -> bool:
        return super().has_change_permission(request, obj) and not (obj and obj.revoked_at)

    def get_fields(self, request: HttpRequest, obj: AgentKey | None = None) -> list[str]:
        agents = ["agents"] if obj else ["dids", "operator", "project"]
        return ["name", *agents, "scopes", "allowed_environment_types", "allowed_pools", "expires_at", *LIMIT_LABELS]

    @display(description="Agents")
    def agents(self, row: AgentKey) -> SafeString | str:
        return "all agents (operator)" if row.operator else format_html_join("", "<div>{}</div>", ([did] for did in row.dids))

    @display(description="Key")
    def shown(self, row: AgentKey) -> str:
        return f"lh_{row.prefix}_…"

    @display(description="Agents")
    def agents_summary(self, row: AgentKey) -> SafeString | str:
        if row.operator:
            return "all agents (operator)"
        rest = f"and {len(row.dids) - 1:,} more" if len(row.dids) > 1 else ""
        return render_two_lines(row.dids[0], rest) if rest else row.dids[0] if row.dids else "none"

    @display(description="State")
    def state(self, row: AgentKey) -> SafeString:
        return render_key_state(row, database_time.now())

    @display(description="Last used")
    def last_used(self, row: AgentKey) -> SafeString | str:
        return render_time_ago(row.last_used_at)

    @display(description="Issued")
    def created(self, row: AgentKey) -> SafeString | str:
        return render_time_ago(row.created_at)

    def get_page_context(self, request: HttpRequest, row: AgentKey) -> dict[str, Any]:
        return {
            "facts": [
                SummaryField("Key", self.shown(row), note="stored as a digest; cannot be shown again"),
                SummaryField("State", self.state(row), note=self._describe_expiry(row)),
                SummaryField("Last used", self.last_used(row)),
                SummaryField("Issued", self.created(row), note=render_timestamp(row.created_at)),
                SummaryField("Rotated", render_time_ago(row.rotated_at), note=self._describe_overlap(row)),
                SummaryField("Project", row.project.name, note="without effect: all projects" if row.operator else ""),
                SummaryField("Scopes", ", ".join(row.scopes)),
                SummaryField("Environment types", ", ".join(row.allowed_environment_types) or UNRESTRICTED_TEXT),
                SummaryField("Pools", ", ".join(row.allowed_pools) or UNRESTRICTED_TEXT),
                SummaryField("Resources by request", "; ".join(describe_limits(row)) or "limited by the pools alone"),
            ]
        }

    def _describe_expiry(self, row: AgentKey) -> SafeString | str:
        if row.revoked_at:
            return render_time_ago(row.revoked_at)
        if api_keys.is_expired(row, database_time.now()):
            return render_time_ago(row.expires_at)
        return format_time_until(row.expires_at, "expires", "") or "does not expire"

    def _describe_overlap(self, row: AgentKey) -> str:
        return format_time_until(row.previous_valid_until, "previous secret expires", "previous secret expired")

    def save_model(self, request: HttpRequest, obj: AgentKey, form: Any, change: bool) -> None:
        if change:
            super().save_model(request, obj, form, change)
            return
        row, key = api_keys.issue_key(
            obj.dids,
            operator=obj.operator,
            name=obj.name,
            scopes=obj.scopes,
            environment_types=obj.allowed_environment_types,
            pools=obj.allowed_pools,
            limits={name: getattr(obj, name) for name in LIMIT_FIELDS},
            expires_at=obj.expires_at,
            project=obj.project.name,
            now=database_time.now(),
        )
        obj.pk, obj.prefix = row.pk, row.prefix
        messages.warning(request, format_key_message(key))
