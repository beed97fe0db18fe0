"""What leases may spend on calls to models, on operators' pages, and the act that changes it for one."""

from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from django import forms
from django.contrib.admin.utils import unquote
from django.http import HttpRequest
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.widgets import UnfoldAdminTextInputWidget

from leases import leasing
from leases.models import Lease, Status
from sandboxes.admin_calls import called, without_price
from sandboxes.cells import meter, usd
from sandboxes.egress.gate import spent
from sandboxes.egress.totals import Totals, totals
from sandboxes.models import LlmCall
from sandboxes.pages import Act, Fact, Reason, uuid_of

LIMIT = Lease._meta.get_field("llm_limit")
RECENT = timedelta(days=30)  # of an agent's calls: it may have any number of older ones


class Limit(Reason):
    """How much it may be from now on."""

    field_order = ["limit", "reason"]
    form_before_template = "admin/leases/lease/spent.html"
    limit = forms.DecimalField(
        required=False,
        min_value=0,
        max_digits=LIMIT.max_digits,
        decimal_places=LIMIT.decimal_places,
        label="Spend limit in USD",
        widget=UnfoldAdminTextInputWidget({"autofocus": True, "autocomplete": "off", "inputmode": "decimal"}),
        help_text="For all its model calls together, those before included. Empty: no limit. 0: none is let out.",
    )

    def get_before_template_context(self, request: HttpRequest, object_id: str | None = None) -> dict[str, Any]:
        pk = uuid_of(unquote(object_id or ""))
        lease = Lease.objects.filter(pk=pk).first() if pk else None
        return {"lease": lease, "limit": shown(lease.llm_limit), "spent": usd(spent(lease.pk))} if lease else {}


def _limit(lease: Lease, actor: str, why: str, now: datetime, limit: Decimal | None) -> bool:
    return leasing.limit_spending(lease.pk, limit, now=now, actor=actor, why=why)


SPENDING = Act(
    title="Set spend limit",
    warning="It holds from the next model call on. What is under way goes on.",
    done="given another spend limit",
    illegal="not active any more",
    legal=lambda lease: lease.status == Status.ACTIVE,
    verb=_limit,
    because=lambda lease: "it has that limit" if lease.status == Status.ACTIVE else "not active any more",
    form=Limit,
)


def shown(limit: Decimal | None) -> str:
    return "no limit" if limit is None else f"{usd(limit)} USD"


def of_lease(lease: Lease) -> list[Fact]:
    """What its sandboxes asked their models, and what that took. One query."""
    total = totals(LlmCall.objects.filter(holder=lease.pk))
    over = lease.llm_limit is not None and total.spent >= lease.llm_limit
    return [
        called(total, holder=lease.pk),
        tokens(total),
        Fact(
            "Spent on models",
            f"{usd(total.spent)} USD",
            note=format_html("{} {}", used(total.spent, lease.llm_limit), without_price(total, holder=lease.pk)),
            alarm=over,
        ),
    ]


def used(amount: Decimal, limit: Decimal | None) -> SafeString | str:
    """How much of its limit that is, as a bar and in words."""
    if limit is None:
        return "no limit"
    return format_html('{}<span class="lh-line">of {} USD</span>', meter(amount, limit), usd(limit))


def tokens(total: Totals) -> Fact:
    note = f"{total.cached_tokens:,} of those in cached" if total.cached_tokens else ""
    return Fact("Tokens in / out", f"{total.input_tokens:,} / {total.output_tokens:,}", note=note)


def of_agent(did: str) -> list[Fact]:
    """What it asked models lately, under any lease. One query."""
    narrowed = {"agent_did": did, "since": "30d"}
    total = totals(LlmCall.objects.filter(agent_did=did, started_at__gte=timezone.now() - RECENT))
    return [
        called(total, **narrowed),
        tokens(total),
        Fact(
            "Spent on models",
            f"{usd(total.spent)} USD",
            note=format_html("in 30 days {}", without_price(total, **narrowed)),
        ),
    ]
