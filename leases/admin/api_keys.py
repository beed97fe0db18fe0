"""Console pages of API keys."""

from typing import Any

from django import forms
from django.contrib import admin, messages
from django.db.models import Q
from django.http import HttpRequest
from django.utils import timezone
from django.utils.html import format_html_join
from django.utils.safestring import SafeString
from unfold.decorators import display

from leases import allow_lists, api_keys
from leases.errors import InvalidRequest
from leases.models import AgentKey
from sandboxes.admin.base.actions import AdminAction
from sandboxes.admin.base.changelist import ListTab
from sandboxes.admin.base.formatting import SummaryField, render_badge, render_time_ago, render_timestamp, render_two_lines
from sandboxes.admin.base.model_admin import ConsoleModelAdmin
from sandboxes.admin.base.registry import get_reference

UNRESTRICTED_TEXT = "all that are not restricted"
REVOKE_KEY_ACTION = AdminAction(
    title="Revoke key",
    warning="Requests with this key are rejected from now on. A revoked key cannot be restored.",
    done="revoked",
    refusal_reason="already revoked",
    legal=lambda key: key.revoked_at is None,
    verb=lambda key, actor, why, now: api_keys.revoke_key(key.pk, now=now),
    icon="key_off",
    permissions=("leases.revoke_key",),
    danger=True,
    bulk_button="Revoke keys…",
)


class AgentKeyForm(forms.ModelForm):
    """Agents, role and allow lists of a key. Agents and role are those of a new key only."""

    def clean_dids(self) -> list[str]:
        dids: list[str] = self.cleaned_data["dids"]
        for did in dids:
            get_reference("agent").clean(did)
        return dids

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
        return cleaned


@admin.register(AgentKey)
class AgentKeyAdmin(ConsoleModelAdmin):
    form = AgentKeyForm
    list_display = ["shown", "name", "agents_summary", "state", "last_used", "created"]
    list_filter = ["operator"]
    search_fields = ["prefix__startswith", "name__startswith", "dids__icontains"]
    search_help_text = "Prefix, name (prefix) or DID"
    ordering = ["-created_at", "-pk"]
    list_tabs = {
        "valid": ListTab("Valid", "No valid keys. Add one to let agents call the API.", lambda now: Q(revoked_at__isnull=True)),
        "history": ListTab("History", "No keys yet. Add one to let agents call the API."),
    }
    readonly_fields = ["agents"]
    labels = {"allowed_environment_types": "Allowed environment types", "allowed_pools": "Allowed pools"}
    row_actions = {"revoke": REVOKE_KEY_ACTION}
    bulk_actions = {"revoke_all": REVOKE_KEY_ACTION}

    def has_change_permission(self, request: HttpRequest, obj: AgentKey | None = None) -> bool:
        return super().has_change_permission(request, obj) and not (obj and obj.revoked_at)

    def get_fields(self, request: HttpRequest, obj: AgentKey | None = None) -> list[str]:
        return ["name", *(["agents"] if obj else ["dids", "operator"]), "allowed_environment_types", "allowed_pools"]

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
        return render_badge("expired", "revoked") if row.revoked_at else render_badge("ok", "valid")

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
                SummaryField("State", self.state(row), note=render_time_ago(row.revoked_at, "")),
                SummaryField("Last used", self.last_used(row)),
                SummaryField("Issued", self.created(row), note=render_timestamp(row.created_at)),
                SummaryField("Environment types", ", ".join(row.allowed_environment_types) or UNRESTRICTED_TEXT),
                SummaryField("Pools", ", ".join(row.allowed_pools) or UNRESTRICTED_TEXT),
            ]
        }

    def save_model(self, request: HttpRequest, obj: AgentKey, form: Any, change: bool) -> None:
        if change:
            super().save_model(request, obj, form, change)
            return
        row, key = api_keys.issue_key(
            obj.dids,
            operator=obj.operator,
            name=obj.name,
            environment_types=obj.allowed_environment_types,
            pools=obj.allowed_pools,
            now=timezone.now(),
        )
        obj.pk, obj.prefix = row.pk, row.prefix
        messages.warning(request, f"Copy the new key now; it is not shown again: {key}")
