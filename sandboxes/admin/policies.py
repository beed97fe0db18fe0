"""Console pages of sandbox policies."""

from datetime import datetime
from typing import Any

from django import forms
from django.contrib import admin
from django.db.models import Count, Q
from django.http import HttpRequest
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from unfold.decorators import display
from unfold.widgets import UnfoldAdminSelectWidget

from sandboxes.admin.base.actions import AdminAction, ReasonForm
from sandboxes.admin.base.formatting import (
    SummaryField,
    build_changelist_url,
    render_admin_link,
    render_badge,
    render_time_ago,
    render_two_lines,
)
from sandboxes.admin.base.model_admin import ConsoleModelAdmin
from sandboxes.admin.base.registry import build_registered_fields
from sandboxes.egress.allow_list import credentials
from sandboxes.models import EgressCredential, Policy, Sandbox, SandboxState
from sandboxes.models.policies import SEALED_POLICY_NAME

LIVE_SANDBOX_FILTER = ~Q(state=SandboxState.DESTROYED)
CONFIGURED_MODELS_LABEL = "configured default"  # LEASEHOLD_LLM_MODEL and LEASEHOLD_LLM_MODELS


class RemoveCredentialForm(ReasonForm):
    """Choice of one credential of the policy."""

    field_order = ["domain", "reason"]
    domain = forms.ChoiceField(widget=UnfoldAdminSelectWidget)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        text = str(self.object_id)
        pk = int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else None
        domains = EgressCredential.objects.filter(policy=pk).values_list("domain", flat=True)
        self.fields["domain"].choices = [(domain, domain) for domain in domains]


def _remove_credential(row: Policy, actor: str, reason: str, now: datetime, *, domain: str) -> bool:
    return credentials.remove_credential(row, domain)


REMOVE_CREDENTIAL_ACTION = AdminAction(
    title="Remove credential",
    warning="Requests to the domain are sent without a credential from now on. Open connections keep it until their end.",
    done="updated: the credential is removed",
    refusal_reason="the policy has no such credential any more",
    legal=lambda row: row.egress_credentials.exists(),
    verb=_remove_credential,
    icon="key_off",
    permissions=("sandboxes.change_policy",),
    danger=True,
    apart=True,
    form=RemoveCredentialForm,
)


@admin.register(Policy)
class PolicyAdmin(ConsoleModelAdmin):
    list_display = ["policy_label", "root", "allowed_models", "pace", "relay_access", "live"]
    search_fields = ["name__startswith"]
    search_help_text = "Name (prefix)"
    ordering = ["name"]
    fieldsets: list[tuple[str | None, dict[str, Any]]] = [
        (None, {"fields": ["name", "description"]}),
        ("Container", {"fields": ["writable_root"]}),
        (
            "Egress",
            {
                "fields": [
                    "models",
                    "calls_per_minute",
                    "most_calls_at_once",
                    "largest_body_kib",
                    "relay",
                    "mcp_tools",
                    "record_collections",
                ],
                "description": "Evaluated on every call. A change takes effect from the next call, also for running sandboxes.",
            },
        ),
        (
            "Network",
            {
                "fields": ["allowed_domains", "max_connections", "max_connection_mib", "max_lease_mib"],
                "description": "Evaluated on every connection. Only Docker sandboxes. A change takes effect from the next "
                "connection; commands that started before an allow list was added have no proxy variables.",
            },
        ),
        (
            "Ingress",
            {
                "fields": ["previews"],
                "description": "Evaluated on every connection. A change takes effect within seconds.",
            },
        ),
        (
            "Agent CLIs",
            {
                "fields": ["agent_tools", "agent_denied_commands", "agent_max_turns", "agent_max_cost"],
                "description": "Passed to the CLI and checked on its messages. A violation interrupts the run. A change "
                "applies to runs that start afterwards.",
            },
        ),
    ]
    labels = {
        "agent_tools": "Allowed tools",
        "agent_denied_commands": "Denied commands",
        "agent_max_turns": "Maximum turns",
        "agent_max_cost": "Maximum cost (USD)",
        "writable_root": "Writable root file system",
        "models": "Allowed models",
        "most_calls_at_once": "Concurrent calls",
        "largest_body_kib": "Maximum request size (KiB)",
        "allowed_domains": "Allowed domains",
        "max_connections": "Concurrent connections",
        "max_connection_mib": "Maximum bytes of a connection (MiB)",
        "max_lease_mib": "Maximum bytes of a lease (MiB)",
        "relay": "Relay access",
        "previews": "Preview URLs",
        "mcp_tools": "Control plane tools (MCP)",
        "record_collections": "AT Protocol collections",
    }
    row_actions = {"remove_credential": REMOVE_CREDENTIAL_ACTION}

    def get_readonly_fields(self, request: HttpRequest, obj: Policy | None = None) -> list[str]:
        return ["name"] if obj else []  # settings and scripts refer to a policy by name

    def has_change_permission(self, request: HttpRequest, obj: Policy | None = None) -> bool:
        """The built-in policy is read-only: it applies wherever no policy is named."""
        return not (obj and obj.built_in) and bool(super().has_change_permission(request, obj))

    def get_fieldsets(self, request: HttpRequest, obj: Policy | None = None) -> Any:
        """Show the allowed models one per line to users without change permission."""
        if obj is None or self.has_change_permission(request, obj):
            return self.fieldsets
        return [
            (title, {**options, "fields": ["all_models" if name == "models" else name for name in options["fields"]]})
            for title, options in self.fieldsets
        ]

    @display(description="Allowed models")
    def all_models(self, row: Policy) -> SafeString | str:
        return (
            format_html_join(SafeString("<br>"), '<span class="lh-command">{}</span>', ((each,) for each in row.models))
            or CONFIGURED_MODELS_LABEL
        )

    def annotate_rows(self, rows: list[Policy]) -> None:
        counts = Sandbox.objects.filter(LIVE_SANDBOX_FILTER).order_by().values_list("policy").annotate(Count("pk"))
        live = dict(counts)
        for row in rows:
            row.live = live.get(None if row.built_in else row.pk, 0)  # type: ignore[attr-defined]

    @display(description="Policy")
    def policy_label(self, row: Policy) -> SafeString | str:
        return render_two_lines(row.name, row.description) if row.description else row.name

    @display(description="Root file system")
    def root(self, row: Policy) -> SafeString:
        return render_root_mode(row)

    @display(description="Models")
    def allowed_models(self, row: Policy) -> SafeString | str:
        return render_allowed_models(row)

    @display(description="Calls")
    def pace(self, row: Policy) -> SafeString:
        return render_two_lines(f"{row.calls_per_minute:,} per minute", f"{row.most_calls_at_once:,} concurrent")

    @display(description="Relay")
    def relay_access(self, row: Policy) -> str:
        return "yes" if row.relay else "no"

    @display(description="Live sandboxes")
    def live(self, row: Policy) -> str:
        return f"{row.live:,}"  # type: ignore[attr-defined]

    def get_page_context(self, request: HttpRequest, row: Policy) -> dict[str, Any]:
        filters: dict[str, Any] = {"policy__isnull": True} if row.built_in else {"policy": row}
        params = {"policy__isnull": "True"} if row.built_in else {"policy__id__exact": row.pk}
        return {
            "facts": [
                SummaryField("Root file system", render_root_mode(row)),
                SummaryField("Models", render_allowed_models(row), note="and relay access" if row.relay else ""),
                SummaryField(
                    "Network",
                    "allow list" if row.allowed_domains else "none",
                    note=", ".join(row.allowed_domains[:3]) + (", …" if len(row.allowed_domains) > 3 else ""),
                ),
                *build_credential_fields(row),
                *build_registered_fields(row),
                SummaryField(
                    "Live sandboxes",
                    f"{Sandbox.objects.filter(LIVE_SANDBOX_FILTER, **filters).count():,}",
                    note="sandboxes without a policy of their own" if row.built_in else "",
                    href=build_changelist_url("sandboxes_sandbox", slice="live", **params),
                ),
            ]
        }


def render_root_mode(row: Policy) -> SafeString:
    return render_badge("waiting", "writable") if row.writable_root else render_badge("ok", "read-only")


def render_allowed_models(row: Policy) -> SafeString | str:
    """Render the first allowed model and the number of further ones."""
    if not row.models:
        return CONFIGURED_MODELS_LABEL
    more = len(row.models) - 1
    first = format_html('<span class="lh-command">{}</span>', row.models[0])
    return render_two_lines(first, f"and {more:,} more") if more > 0 else first


def build_credential_fields(row: Policy) -> list[SummaryField]:
    """Build the domains with a credential of their own, the use and the age of each. Never a value."""
    found = list(row.egress_credentials.defer("sealed_authorization"))
    if not found:
        return []
    lines = [
        (credential.domain, "every method" if credential.writes else "downloads", render_time_ago(credential.changed_at))
        for credential in found
    ]
    text = format_html_join(SafeString("<br>"), "{}, {}, set {}", lines)
    return [SummaryField("Credentials", text, note="added by the proxy; set by manage.py egress_credential")]


def build_policy_field(policy: Policy | None) -> SummaryField:
    """Build the policy of a sandbox and its exceptions from the sealed default."""
    if policy is None:
        return SummaryField("Policy", SEALED_POLICY_NAME, note="no exceptions")
    allowances = (
        ("writable root", policy.writable_root), ("relay", policy.relay), ("preview URLs", policy.previews),
        ("tools", policy.mcp_tools), ("AT Protocol records", policy.record_collections),
        ("network by allow list", policy.allowed_domains),
    )  # fmt: skip
    exceptions = [label for label, is_allowed in allowances if is_allowed]
    return SummaryField("Policy", render_admin_link("sandboxes_policy", policy.pk, policy), note=", ".join(exceptions))
