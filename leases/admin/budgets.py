"""Operators' pages on budgets as seen from here: agents, keys, environment types and leases have pages, and say which
budgets they are in."""

from collections.abc import Collection, Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any

from django import forms
from django.contrib import admin
from django.core.exceptions import ValidationError
from django.db.models import Q
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.text import capfirst

from billing import budgets
from billing.admin.budgets import BudgetAdmin, BudgetNotice, build_notices, format_amount, get_unit_label
from billing.models import HOUSE_ACCOUNT_NAME, Account, Budget, Tab
from billing.models.budgets import Scope
from leases.admin.formatting import LeaseHolderMixin
from leases.budget_enforcement import END_REASON
from leases.models import DID_DESCRIPTION, Agent, AgentKey, EnvironmentType, Lease, LeaseStatus, validate_did
from sandboxes.admin.base import SummaryField
from sandboxes.admin.formatting import pluralize, render_admin_link


class BudgetForm(forms.ModelForm):
    """A budget whose subject is there; only an agent may come later."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "scope" in self.fields:  # it is not where somebody only reads
            scope: Any = self.fields["scope"]
            scope.choices = [(value, capfirst(label)) for value, label in scope.choices]
            self.fields[
                "subject"
            ].help_text = (
                "A DID, an API key's number or prefix, the name of an environment type or of an account. Of everything: none."
            )

    def clean_subject(self) -> str:
        said, scope = self.cleaned_data["subject"].strip(), self.cleaned_data.get("scope")
        if not said or scope is None:
            return said
        if scope == Scope.AGENT:
            try:
                validate_did(said)
            except ValidationError:
                raise ValidationError(f"{said[:80]!r} is not {DID_DESCRIPTION}.") from None
        elif scope == Scope.KEY:
            return self._key(said)
        elif scope == Scope.ENVIRONMENT_TYPE and not EnvironmentType.objects.filter(name=said).exists():
            raise ValidationError("There is no such environment type.")
        elif scope == Scope.ACCOUNT and said != HOUSE_ACCOUNT_NAME and not Account.objects.filter(name=said).exists():
            raise ValidationError("There is no such account.")
        return said

    def _key(self, said: str) -> str:
        """Its number, also of one that is called as lists show it: "lh_3f9a1c20_…"."""
        number = Q(pk=int(said)) if said.isascii() and said.isdecimal() and len(said) < 19 else Q()
        prefix = said.removeprefix("lh_").split("_")[0]
        key = AgentKey.objects.filter(number | Q(prefix=prefix)).order_by("pk").first()
        if key is None:
            raise ValidationError("There is no such API key.")
        return str(key.pk)


admin.site.unregister(Budget)


@admin.register(Budget)
class LeasedBudgetAdmin(LeaseHolderMixin, BudgetAdmin):
    form = BudgetForm

    def subjects(self, rows: Collection[Budget]) -> Mapping[int, SafeString | str]:
        """Each with a link to its page, if it has one. A query for each scope that there is."""
        of = {scope: {row.subject for row in rows if row.scope == scope} for scope in Scope}
        found: dict[tuple[str, str], Any] = {}
        if dids := of[Scope.AGENT]:
            for agent in Agent.objects.filter(did__in=dids):
                found[Scope.AGENT, agent.did] = render_admin_link("leases_agent", agent.pk, agent.did)
        if keys := of[Scope.KEY]:
            for key in AgentKey.objects.filter(pk__in=[int(each) for each in keys if len(each) < 19]):
                found[Scope.KEY, str(key.pk)] = render_admin_link("leases_agentkey", key.pk, key.name or f"lh_{key.prefix}_…")
        if types := of[Scope.ENVIRONMENT_TYPE]:
            for kind in EnvironmentType.objects.filter(name__in=types):
                found[Scope.ENVIRONMENT_TYPE, kind.name] = render_admin_link("leases_environmenttype", kind.pk, kind.name)
        rest = super().subjects(rows)
        return {row.pk: rest.get(row.pk) or found.get((row.scope, row.subject), row.subject) for row in rows}


# --- on other pages ---------------------------------------------------------------------------------------------------


def can_view_budgets(request: HttpRequest) -> bool:
    return request.user.has_perm("billing.view_budget")


def _build_lease_filter(lease: Lease, at: datetime) -> Q:
    by_key = Tab.objects.filter(holder=lease.pk).exclude(key_id="").values("key_id")
    whole = budgets.build_lease_filter(agent_did=lease.agent_did, environment_type=lease.environment_type_id, key_id="", now=at)
    return whole | Q(scope=Scope.KEY, subject__in=by_key)


def summarize_lease_budgets(request: HttpRequest, lease: Lease, now: datetime) -> tuple[list[BudgetNotice], list[SummaryField]]:
    """Which budgets it counts against, and what is left of the tightest; of an ended one that which ended it."""
    if not can_view_budgets(request):
        return [], []
    if lease.status != LeaseStatus.ACTIVE:
        return [], [_build_ended_by_field(lease)] if lease.end_reason == END_REASON else []
    within = [*Budget.objects.filter(_build_lease_filter(lease, now), active=True).order_by("pk")]
    return build_notices(within, now), [_build_tightest_budget_field([each for each in within if each.hard], now)]


def _build_tightest_budget_field(hard: list[Budget], now: datetime) -> SummaryField:
    if not hard:
        return SummaryField("Hard budgets", "none", note="nothing ends it for what it costs")
    first = max(hard, key=lambda each: budgets.get_spent(each, now) / each.amount)
    left = max(first.amount - budgets.get_spent(first, now), Decimal(0))
    return SummaryField(
        pluralize(len(hard), "hard budget", "hard budgets").capitalize(),
        f"{format_amount(left, first)} {get_unit_label(first)} left",
        note=format_html("of {}", render_admin_link("billing_budget", first.pk, first)),
        alarm=left == 0,
    )


def _build_ended_by_field(lease: Lease) -> SummaryField:
    """As its end says it: it may have been changed since."""
    said = lease.end_detail or "unknown"
    assert lease.ended_at
    within = Budget.objects.filter(_build_lease_filter(lease, lease.ended_at)).order_by("pk")
    budget = next((each for each in within if str(each) == said), None)
    return SummaryField("Ended by the budget", render_admin_link("billing_budget", budget.pk, said) if budget else said)


def build_agent_notices(request: HttpRequest, did: str, now: datetime) -> list[BudgetNotice]:
    """What there is to say of the budgets that it, or a lease that it holds now, counts against. One query."""
    if not can_view_budgets(request):
        return []
    mine = Tab.objects.filter(agent_did=did, closed_at__isnull=True)
    within = (
        budgets.build_lease_filter(agent_did=did, environment_type="", key_id="", now=now)
        | Q(scope=Scope.ENVIRONMENT_TYPE, subject__in=mine.values("environment_type"))
        | Q(scope=Scope.KEY, subject__in=mine.exclude(key_id="").values("key_id"))
    )
    return build_notices(Budget.objects.filter(within, budgets.build_marked_filter("warned_for", now)), now)
