"""Operators' pages on what sandboxes may do beyond the rest. `leases.admin.leases` says which environment types ask for it."""

from typing import Any

from django.contrib import admin
from django.db.models import Count, Q
from django.http import HttpRequest
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from unfold.decorators import display

from sandboxes.admin.base import ConsoleModelAdmin, SummaryField
from sandboxes.admin.formatting import build_changelist_url, pluralize, render_admin_link, render_badge, render_two_lines
from sandboxes.models import Policy, Sandbox, SandboxState
from sandboxes.models.policies import SEALED_POLICY_NAME

LIVE_SANDBOX_FILTER = ~Q(state=SandboxState.DESTROYED)
CONFIGURED_MODELS_LABEL = "the configured ones"  # LEASEHOLD_LLM_MODEL and LEASEHOLD_LLM_MODELS


@admin.register(Policy)
class PolicyAdmin(ConsoleModelAdmin):
    list_display = ["what", "root", "allowed_models", "pace", "relay_access", "live"]
    search_fields = ["name__startswith"]
    search_help_text = "Name"
    ordering = ["name"]
    fieldsets: list[tuple[str | None, dict[str, Any]]] = [
        (None, {"fields": ["name", "description"]}),
        ("Its container", {"fields": ["writable_root"]}),
        (
            "Its way out",
            {
                "fields": ["models", "calls_per_minute", "most_calls_at_once", "largest_body_kib", "relay"],
                "description": "Looked up at each call: a change holds from the next one on, also for sandboxes that run.",
            },
        ),
    ]
    labels = {
        "writable_root": "Writable root file system",
        "models": "Models that may be called",
        "most_calls_at_once": "Calls at once",
        "largest_body_kib": "Largest request in KiB",
        "relay": "May use the relay",
    }

    def get_readonly_fields(self, request: HttpRequest, obj: Policy | None = None) -> list[str]:
        return ["name"] if obj else []  # settings and scripts call it by its name

    def has_change_permission(self, request: HttpRequest, obj: Policy | None = None) -> bool:
        """The built-in one says what holds for all that name none: it is the same everywhere."""
        return not (obj and obj.built_in) and bool(super().has_change_permission(request, obj))

    def get_fieldsets(self, request: HttpRequest, obj: Policy | None = None) -> Any:
        """Whoever only reads sees the models one a line, as the form has them."""
        if obj is None or self.has_change_permission(request, obj):
            return self.fieldsets
        return [
            (title, {**said, "fields": ["all_models" if name == "models" else name for name in said["fields"]]})
            for title, said in self.fieldsets
        ]

    @display(description="Models that may be called")
    def all_models(self, row: Policy) -> SafeString | str:
        return (
            format_html_join(SafeString("<br>"), '<span class="lh-command">{}</span>', ((each,) for each in row.models))
            or CONFIGURED_MODELS_LABEL
        )

    def complete(self, rows: list[Policy]) -> None:
        found = Sandbox.objects.filter(LIVE_SANDBOX_FILTER).order_by().values_list("policy").annotate(Count("pk"))
        live = dict(found)
        for row in rows:
            row.live = live.get(None if row.built_in else row.pk, 0)  # type: ignore[attr-defined]

    @display(description="Policy")
    def what(self, row: Policy) -> SafeString | str:
        return render_two_lines(row.name, row.description) if row.description else row.name

    @display(description="Root file system")
    def root(self, row: Policy) -> SafeString:
        return render_root_mode(row)

    @display(description="Models")
    def allowed_models(self, row: Policy) -> SafeString | str:
        return render_allowed_models(row)

    @display(description="Calls")
    def pace(self, row: Policy) -> SafeString:
        return render_two_lines(f"{row.calls_per_minute:,} a minute", f"{row.most_calls_at_once:,} at once")

    @display(description="Relay")
    def relay_access(self, row: Policy) -> str:
        return "yes" if row.relay else "no"

    @display(description="Live sandboxes")
    def live(self, row: Policy) -> str:
        return f"{row.live:,}"  # type: ignore[attr-defined]

    def wanted_by(self, row: Policy) -> list[SummaryField]:
        """`leases.admin.leases` overrides it: this app knows of nobody who wants sandboxes."""
        return []

    def page(self, request: HttpRequest, row: Policy) -> dict[str, Any]:
        theirs: dict[str, Any] = {"policy__isnull": True} if row.built_in else {"policy": row}
        narrowed = {"policy__isnull": "True"} if row.built_in else {"policy__id__exact": row.pk}
        return {
            "facts": [
                SummaryField("Root file system", render_root_mode(row)),
                SummaryField("Models", render_allowed_models(row), note="and the relay" if row.relay else ""),
                *self.wanted_by(row),
                SummaryField(
                    "Live sandboxes",
                    f"{Sandbox.objects.filter(LIVE_SANDBOX_FILTER, **theirs).count():,}",
                    note="those that no policy loosens" if row.built_in else "",
                    href=build_changelist_url("sandboxes_sandbox", slice="live", **narrowed),
                ),
            ]
        }


def render_root_mode(row: Policy) -> SafeString:
    return render_badge("waiting", "writable") if row.writable_root else render_badge("ok", "read-only")


def render_allowed_models(row: Policy) -> SafeString | str:
    """The models that may be called, in the words of a list: the first by name."""
    if not row.models:
        return CONFIGURED_MODELS_LABEL
    more = len(row.models) - 1
    first = format_html('<span class="lh-command">{}</span>', row.models[0])
    return render_two_lines(first, f"and {pluralize(more, 'more', 'more')}") if more > 0 else first


def build_policy_field(policy: Policy | None) -> SummaryField:
    """What a sandbox's page says of it."""
    if policy is None:
        return SummaryField("Policy", SEALED_POLICY_NAME, note="nothing beyond the rest")
    loosened = [word for word, said in (("writable root", policy.writable_root), ("relay", policy.relay)) if said]
    return SummaryField("Policy", render_admin_link("sandboxes_policy", policy.pk, policy), note=", ".join(loosened))
