"""Model-call spending on the pages of leases and agents, and the action that sets a lease's limit."""

from datetime import datetime
from decimal import Decimal
from typing import Any

from django.contrib.admin.utils import unquote
from django.db.models import Count, F, Sum
from django.http import HttpRequest
from django.utils.html import format_html
from unfold.widgets import UnfoldAdminTextInputWidget

from billing import budgets
from leases import spend_limits
from leases.models import Lease, LeaseStatus
from sandboxes.admin.base.actions import AdminAction, ReasonForm
from sandboxes.admin.base.changelist import parse_uuid
from sandboxes.admin.base.fields import NormalizedDecimalField
from sandboxes.admin.base.formatting import SummaryField, format_usd, render_meter
from sandboxes.admin.egress_connections import build_connections_url
from sandboxes.admin.llm_calls import StartedWithinFilter, build_calls_field, build_model_cost_field, build_tokens_field
from sandboxes.db import database_time
from sandboxes.egress.totals import calculate_totals
from sandboxes.formatting import format_bytes
from sandboxes.models import EgressConnection, LlmCall

LIMIT_FIELD = Lease._meta.get_field("llm_limit")
RECENT_PERIOD = "30d"  # bounds the query: an agent may have any number of older calls


class SpendLimitForm(ReasonForm):
    """New spend limit of a lease."""

    field_order = ["limit", "reason"]
    form_before_template = "admin/leases/lease/spend_limit.html"
    limit = NormalizedDecimalField(
        required=False,
        min_value=0,
        max_digits=LIMIT_FIELD.max_digits,
        decimal_places=LIMIT_FIELD.decimal_places,
        label="Spend limit (USD)",
        widget=UnfoldAdminTextInputWidget({"autofocus": True, "autocomplete": "off", "inputmode": "decimal"}),
        help_text="Total for all model calls of this lease, past ones included. Leave empty for no limit. 0 blocks all calls.",
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        pk = parse_uuid(unquote(self.object_id or ""))
        self.lease = Lease.objects.filter(pk=pk).first() if pk else None
        self.fields["limit"].initial = self.lease and self.lease.llm_limit  # an empty form would remove the limit

    def get_before_template_context(self, request: HttpRequest, object_id: str | None = None) -> dict[str, Any]:
        if self.lease is None:
            return {}
        return {
            "lease": self.lease,
            "limit": format_spend_limit(self.lease.llm_limit),
            "spent": format_usd(budgets.sum_lease_calls(self.lease.pk)),
        }


def _set_spend_limit(lease: Lease, actor: str, reason: str, now: datetime, limit: Decimal | None) -> bool:
    return spend_limits.set_spend_limit(lease.pk, limit, now=now, actor=actor, detail=reason)


SET_SPEND_LIMIT_ACTION = AdminAction(
    title="Set spend limit",
    warning="The limit applies from the next model call. Calls in progress continue.",
    done="updated with the new spend limit",
    refusal_reason="no longer active",
    legal=lambda lease: lease.status == LeaseStatus.ACTIVE,
    verb=_set_spend_limit,
    explain_refusal=lambda lease: (
        "the lease already has that limit" if lease.status == LeaseStatus.ACTIVE else "no longer active"
    ),
    icon="savings",
    permissions=("leases.end_lease",),
    button="Spend limit",
    form=SpendLimitForm,
)


def format_spend_limit(limit: Decimal | None) -> str:
    return "no limit" if limit is None else f"{format_usd(limit)} USD"


def build_lease_spending_fields(lease: Lease) -> list[SummaryField]:
    """Build calls, tokens and cost of the lease's model calls. One query."""
    total, limit = calculate_totals(LlmCall.objects.filter(holder=lease.pk)), lease.llm_limit
    bar = format_html('{}<span class="lh-line"></span>of ', render_meter(total.spent, limit)) if limit is not None else ""
    over = limit is not None and total.spent >= limit
    spending = build_model_cost_field(total, format_html("{}{}", bar, format_spend_limit(limit)), alarm=over, holder=lease.pk)
    return [build_calls_field(total, holder=lease.pk), build_tokens_field(total), spending]


def build_lease_network_fields(lease: Lease) -> list[SummaryField]:
    """Build the number and bytes of the lease's connections to allowed domains, if there are any. One query."""
    rows = EgressConnection.objects.filter(holder=lease.pk)
    total = rows.aggregate(count=Count("pk"), bytes=Sum(F("sent_bytes") + F("received_bytes"), default=0))
    if not total["count"]:
        return []
    href = build_connections_url(q=lease.pk)
    return [SummaryField("Connections", f"{total['count']:,}", note=format_bytes(total["bytes"]), href=href)]


def build_agent_spending_fields(did: str) -> list[SummaryField]:
    """Build calls, tokens and cost of the agent's model calls in the last 30 days, under any lease. One query."""
    total = calculate_totals(
        LlmCall.objects.filter(agent_did=did, started_at__gte=database_time.now() - StartedWithinFilter.lengths[RECENT_PERIOD])
    )
    calls = build_calls_field(total, "Model calls, last 30 days", agent_did=did, since=RECENT_PERIOD)
    return [calls, build_tokens_field(total), build_model_cost_field(total, "last 30 days", agent_did=did, since=RECENT_PERIOD)]
