"""Model-call spending on the pages of leases and agents, and the action that sets the limits of a lease."""

from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

from django import forms
from django.contrib.admin.utils import unquote
from django.db.models import Count, F, Sum
from django.http import HttpRequest
from django.utils.html import format_html
from unfold.widgets import UnfoldAdminTextInputWidget

from billing import budgets
from leases import call_limits
from leases.call_limits import REQUEST_FIELDS
from leases.models import Lease, LeaseStatus
from sandboxes.admin.base.actions import AdminAction, ReasonForm
from sandboxes.admin.base.changelist import parse_uuid
from sandboxes.admin.base.fields import NormalizedDecimalField
from sandboxes.admin.base.formatting import SummaryField, format_usd, render_meter
from sandboxes.admin.egress_connections import build_connections_url
from sandboxes.admin.llm_calls import StartedWithinFilter, build_calls_field, build_model_cost_field, build_tokens_field
from sandboxes.audit import Actor
from sandboxes.call_limits import MAX_TOKENS, CallLimits
from sandboxes.db import database_time
from sandboxes.egress.totals import calculate_totals
from sandboxes.formatting import format_bytes
from sandboxes.models import EgressConnection, LlmCall

USD_FIELD = Lease._meta.get_field("llm_limit")
RECENT_PERIOD = "30d"  # bounds the query: an agent may have any number of older calls


class CallLimitsForm(ReasonForm):
    """New limits on the model calls of a lease."""

    field_order = ["limit", "token_limit", "reason"]
    form_before_template = "admin/leases/lease/call_limits.html"
    limit = NormalizedDecimalField(
        required=False,
        min_value=0,
        max_digits=USD_FIELD.max_digits,
        decimal_places=USD_FIELD.decimal_places,
        show_hidden_initial=True,
        label="Spend limit (USD)",
        widget=UnfoldAdminTextInputWidget({"autofocus": True, "autocomplete": "off", "inputmode": "decimal"}),
        help_text="Total for all model calls of this lease, past ones included. Leave empty for no limit. 0 blocks all calls.",
    )
    token_limit = forms.IntegerField(
        required=False,
        min_value=0,
        max_value=MAX_TOKENS,
        show_hidden_initial=True,
        label="Token limit",
        widget=UnfoldAdminTextInputWidget({"autocomplete": "off", "inputmode": "numeric"}),
        help_text="Input and output of all model calls of this lease, past ones included. Leave empty for no limit.",
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        pk = parse_uuid(unquote(self.object_id or ""))
        self.lease = Lease.objects.filter(pk=pk).first() if pk else None
        limits = CallLimits.of(self.lease) if self.lease else CallLimits()
        for name, unit in REQUEST_FIELDS.items():  # an empty form would remove the limits
            self.fields[name].initial = getattr(limits, unit)

    @property
    def arguments(self) -> dict[str, Any]:
        """The reason, and the limits that the operator has changed: others keep concurrent changes."""
        changes = {REQUEST_FIELDS[name]: self.cleaned_data[name] for name in self.changed_data if name in REQUEST_FIELDS}
        return {"reason": self.cleaned_data["reason"], "changes": changes}

    def get_before_template_context(self, request: HttpRequest, object_id: str | None = None) -> dict[str, Any]:
        if self.lease is None:
            return {}
        pk = self.lease.pk
        return {
            "lease": self.lease,
            "spent": _format_part(f"{format_usd(budgets.sum_lease_calls(pk))} USD", self.lease.llm_limit, format_spend_limit),
            "used": _format_part(
                f"{budgets.sum_lease_calls(pk, 'tokens'):,.0f} tokens", self.lease.llm_token_limit, format_token_limit
            ),
        }


def _change_call_limits(lease: Lease, actor: Actor, reason: str, now: datetime, changes: dict[str, Any]) -> bool:
    return call_limits.change_call_limits(lease.pk, changes, now=now, actor=actor, detail=reason)


SET_CALL_LIMITS_ACTION = AdminAction(
    title="Set limits on model calls",
    warning="The limits apply from the next model call. Calls in progress continue.",
    done="updated with the new limits",
    refusal_reason="the lease already has these limits",
    legal=lambda lease: lease.status == LeaseStatus.ACTIVE,
    verb=_change_call_limits,
    icon="savings",
    permissions=("leases.end_lease",),
    button="Call limits",
    form=CallLimitsForm,
)


def format_spend_limit(limit: Decimal | None) -> str:
    return "no limit" if limit is None else f"{format_usd(limit)} USD"


def format_token_limit(limit: int | None) -> str:
    return "no limit" if limit is None else f"{limit:,} tokens"


def _format_part(spent: str, limit: Any, format_limit: Callable[[Any], str]) -> str:
    return f"{spent} (no limit)" if limit is None else f"{spent} of {format_limit(limit)}"


def build_lease_spending_fields(lease: Lease) -> list[SummaryField]:
    """Build calls, tokens and cost of the lease's model calls. Two queries with a token limit, otherwise one."""
    total, limit = calculate_totals(LlmCall.objects.filter(holder=lease.pk)), lease.llm_limit
    bar = format_html('{}<span class="lh-line"></span>of ', render_meter(total.spent, limit)) if limit is not None else ""
    over = limit is not None and total.spent >= limit
    spending = build_model_cost_field(total, format_html("{}{}", bar, format_spend_limit(limit)), alarm=over, holder=lease.pk)
    fields = [build_calls_field(total, holder=lease.pk), build_tokens_field(total), spending]
    return fields if lease.llm_token_limit is None else [*fields, _build_token_limit_field(lease.pk, lease.llm_token_limit)]


def _build_token_limit_field(holder: UUID, limit: int) -> SummaryField:
    used = budgets.sum_lease_calls(holder, "tokens")  # with estimates and reservations, as an admission counts
    note = format_html('{}<span class="lh-line"></span>of {}', render_meter(used, limit), format_token_limit(limit))
    return SummaryField("Tokens counted", f"{used:,.0f}", note=note, alarm=used >= limit)


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
