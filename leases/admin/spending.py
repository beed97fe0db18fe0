"""What leases may spend on calls to models, on operators' pages, and the act that changes it for one."""

from datetime import datetime
from decimal import Decimal
from typing import Any

from django.contrib.admin.utils import unquote
from django.http import HttpRequest
from django.utils import timezone
from django.utils.html import format_html
from unfold.widgets import UnfoldAdminTextInputWidget

from leases import leasing
from leases.models import Lease, Status
from sandboxes.admin.base import Act, Fact, Reason, uuid_of
from sandboxes.admin.fields import Amount
from sandboxes.admin.formatting import meter, usd
from sandboxes.admin.llm_calls import Since, called, cost, tokens_of
from sandboxes.egress.authorization import spent
from sandboxes.egress.totals import totals
from sandboxes.models import LlmCall

LIMIT = Lease._meta.get_field("llm_limit")
RECENT = "30d"  # of an agent's calls: it may have any number of older ones


class Limit(Reason):
    """How much it may be from now on."""

    field_order = ["limit", "reason"]
    form_before_template = "admin/leases/lease/spent.html"
    limit = Amount(
        required=False,
        min_value=0,
        max_digits=LIMIT.max_digits,
        decimal_places=LIMIT.decimal_places,
        label="Spend limit in USD",
        widget=UnfoldAdminTextInputWidget({"autofocus": True, "autocomplete": "off", "inputmode": "decimal"}),
        help_text="For all its model calls together, those before included. Empty: no limit. 0: none is let out.",
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        pk = uuid_of(unquote(self.object_id or ""))
        self.lease = Lease.objects.filter(pk=pk).first() if pk else None
        self.fields["limit"].initial = self.lease and self.lease.llm_limit  # so that it is not lifted by mistake

    def get_before_template_context(self, request: HttpRequest, object_id: str | None = None) -> dict[str, Any]:
        if self.lease is None:
            return {}
        return {"lease": self.lease, "limit": shown(self.lease.llm_limit), "spent": usd(spent(self.lease.pk))}


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
    total, limit = totals(LlmCall.objects.filter(holder=lease.pk)), lease.llm_limit
    bar = format_html('{}<span class="lh-line"></span>of ', meter(total.spent, limit)) if limit is not None else ""
    over = limit is not None and total.spent >= limit
    spending = cost(total, format_html("{}{}", bar, shown(limit)), alarm=over, holder=lease.pk)
    return [called(total, holder=lease.pk), tokens_of(total), spending]


def of_agent(did: str) -> list[Fact]:
    """What it asked models lately, under any lease. One query."""
    total = totals(LlmCall.objects.filter(agent_did=did, started_at__gte=timezone.now() - Since.lengths[RECENT]))
    asked = called(total, "Model calls in 30 days", agent_did=did, since=RECENT)
    return [asked, tokens_of(total), cost(total, "in 30 days", agent_did=did, since=RECENT)]
