"""Console pages of environment types."""

from typing import Any

from django import forms
from django.contrib import admin
from django.db.models import Model
from django.http import HttpRequest
from django.utils.safestring import SafeString
from unfold.admin import TabularInline
from unfold.decorators import display

from leases.admin import spending
from leases.models import AlternativePool, EnvironmentType, LeaseStatus
from leases.placement import list_pools
from leases.resource_limits import describe_limits
from sandboxes.admin.base.changelist import ListTab
from sandboxes.admin.base.fields import DurationOrZeroField
from sandboxes.admin.base.formatting import (
    SummaryField,
    build_changelist_url,
    format_duration,
    render_admin_link,
    render_two_lines,
)
from sandboxes.admin.base.limits import LIMIT_LABELS
from sandboxes.admin.base.model_admin import ConsoleModelAdmin
from sandboxes.models import PackVersion
from sandboxes.models.policies import SEALED_POLICY_NAME

PER_NEW_LEASE = "on model calls, per new lease"


class AlternativePoolForm(forms.ModelForm):
    """Row of the list of pools. The page posts the values that it showed, so that an unchanged row is not written."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for field in self.fields.values():
            field.show_hidden_initial = self.instance.pk is not None


class AlternativePoolInline(TabularInline):
    """Further pools of an environment type. The permission to change the type includes its list."""

    model = AlternativePool
    form = AlternativePoolForm
    fields = ["position", "pool"]
    extra = 1
    verbose_name, verbose_name_plural = "alternative pool", "Alternative pools, tried in order after the pool above"

    def has_view_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return request.user.has_perm("leases.view_environmenttype")

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return request.user.has_perm("leases.change_environmenttype")

    def has_add_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return self.has_change_permission(request)

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return self.has_change_permission(request)


@admin.register(EnvironmentType)
class EnvironmentTypeAdmin(ConsoleModelAdmin):
    list_display = ["name", "lifetime_limits", "sleeps", "conditions", "pool_label", "spends"]
    list_select_related = ["pool", "policy"]
    search_fields = ["name__startswith"]
    search_help_text = "Name (prefix)"
    ordering = ["name"]
    list_tabs = {"all": ListTab("All", "No environment types yet. Add one to let agents acquire leases of it.")}
    fieldsets = [
        (None, {"fields": ["name", "pool", "cheapest_pool", "policy", "restricted", "open_to_project"]}),
        ("Lease lifetime", {"fields": ["ttl", "max_ttl", "expiry_conditions"]}),
        (
            "Turns, suspension and eviction",
            {"fields": ["turn_argv", "turn_timeout", "turn_collection", "suspend_after", "sleep_after", "snapshot_excludes"]},
        ),
        (
            "Resources by request",
            {
                "fields": [*LIMIT_LABELS],
                "description": "Limits of what new leases of this type may request, besides those of their pools.",
            },
        ),
        (
            "Remote sandboxes",
            {
                "fields": ["auto_stop", "auto_delete"],
                "description": "For the case that no control plane runs any more. Applies to new leases of this type.",
            },
        ),
        (
            "Model calls",
            {
                "fields": ["llm_limit", "llm_token_limit"],
                "description": "Limits of new leases of this type. Those of an existing lease are changed on its own page.",
            },
        ),
    ]
    inlines = [AlternativePoolInline]
    labels = {
        **LIMIT_LABELS,
        "cheapest_pool": "Cheapest pool first",
        "ttl": "Idle limit",
        "max_ttl": "Hard limit",
        "expiry_conditions": "End conditions",
        "turn_argv": "Turn command",
        "turn_collection": "Collection of turns",
        "suspend_after": "Suspend after",
        "sleep_after": "Evict after",
        "auto_stop": "Stopped by the vendor after",
        "auto_delete": "Deleted by the vendor after",
        "snapshot_excludes": "Excluded from snapshots",
        "llm_limit": "Spend limit (USD)",
        "llm_token_limit": "Token limit",
    }

    def get_readonly_fields(self, request: HttpRequest, obj: EnvironmentType | None = None) -> list[str]:
        return ["name"] if obj else []  # leases refer to an environment type by name

    def formfield_for_dbfield(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        if db_field.name in ("auto_stop", "auto_delete"):
            kwargs["form_class"] = DurationOrZeroField
        return super().formfield_for_dbfield(db_field, request, **kwargs)

    @display(description="Lease limits")
    def lifetime_limits(self, row: EnvironmentType) -> SafeString:
        return render_two_lines(f"{format_duration(row.ttl)} idle", f"{format_duration(row.max_ttl)} in total")

    @display(description="Evict after")
    def sleeps(self, row: EnvironmentType) -> SafeString:
        suspended = f"suspended after {format_duration(row.suspend_after)}" if row.suspend_after else "not suspended"
        return render_two_lines(row.sleep_after or "default", suspended)

    @display(description="End conditions")
    def conditions(self, row: EnvironmentType) -> str:
        return ", ".join(row.expiry_conditions) or "–"

    @display(description="Pool and policy")
    def pool_label(self, row: EnvironmentType) -> SafeString:
        return render_two_lines(row.pool or "default pool", row.policy or SEALED_POLICY_NAME)

    @display(description="Model calls")
    def spends(self, row: EnvironmentType) -> str:
        if row.llm_limit is None and row.llm_token_limit is None:
            return "no limit"
        return render_two_lines(spending.format_spend_limit(row.llm_limit), spending.format_token_limit(row.llm_token_limit))

    def get_page_context(self, request: HttpRequest, row: EnvironmentType) -> dict[str, Any]:
        active = row.leases.filter(status=LeaseStatus.ACTIVE).count()
        href = build_changelist_url("leases_lease", slice="active", environment_type__name__exact=row.name)
        assigned = PackVersion.objects.filter(assignments__environment_type=row.name).only("pack", "version").first()
        pack = render_admin_link("sandboxes_packversion", assigned.pk, str(assigned)) if assigned else "none"
        return {
            "facts": [
                SummaryField("Pack", pack, note="skill of its sandboxes; changed by manage.py pack upgrade"),
                SummaryField("Active leases", active, href=href),
                SummaryField("Pools", ", ".join(pool.name for pool in list_pools(row)), note=describe_pool_order(row)),
                SummaryField("Spend limit", spending.format_spend_limit(row.llm_limit), note=PER_NEW_LEASE),
                SummaryField("Token limit", spending.format_token_limit(row.llm_token_limit), note=PER_NEW_LEASE),
                SummaryField("Resources by request", "; ".join(describe_limits(row)) or "limited by the pools alone"),
            ]
        }


def describe_pool_order(row: EnvironmentType) -> str:
    return "tried by hourly price" if row.cheapest_pool else "tried in this order when a sandbox is needed"
