"""Operators' pages on budgets. `leases.admin.budgets` names whom they are for, and who is in them."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import ROUND_DOWN, Decimal
from typing import Any
from uuid import UUID

from django.conf import settings
from django.contrib import admin
from django.db import models
from django.db.models import F, Q
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.text import capfirst
from unfold.contrib.filters.admin import ChoicesRadioFilter
from unfold.decorators import action, display

from billing import budgets
from billing.forecast import FORECAST_WINDOW_DAYS, forecast_budget
from billing.models import Account, Budget
from billing.models.budgets import Period, Scope, Unit
from sandboxes.admin.base import AdminAction, ConsoleModelAdmin, ListTab, ReasonForm, SummaryField, list_audit_entries
from sandboxes.admin.fields import DurationOrZeroField
from sandboxes.admin.formatting import (
    build_changelist_url,
    format_age,
    format_duration,
    format_usd,
    pluralize,
    render_admin_link,
    render_badge,
    render_time_ago,
    render_time_since,
    render_timestamp,
    render_two_lines,
)
from sandboxes.models import Event
from sandboxes.models.webhooks import EventType

MAX_PANEL_ROWS, MAX_NOTICES = 10, 5  # rows of a panel; notices on the first page
SWEEP_INTERVAL = timedelta(minutes=1)  # between two of `meter`, and of `budgets`
READING_INTERVAL = timedelta(minutes=5)  # between two of `read`
MAX_DETECTION_DELAY = (
    3 * SWEEP_INTERVAL
)  # beside its grace: usage is summed up, then it is marked as spent; and the end of its grace is seen
PACE_NOTE = f"at the pace of the last {FORECAST_WINDOW_DAYS} days"
CENT, SMALL_QUANTUM = Decimal("0.01"), Decimal("0.000001")
LEVEL_BADGES = {  # colour and word
    "exhausted": ("failed", "exhausted"), "warned": ("late", "warning"),
    "within": ("ok", "within"), "off": ("destroyed", "off"),
}  # fmt: skip

DEACTIVATE_ACTION = AdminAction(
    title="Deactivate budget",
    warning="It refuses nothing, ends nothing and warns of nothing from now on. It can be activated again.",
    done="deactivated",
    refusal_reason="it is off already",
    legal=lambda budget: budget.active,
    verb=lambda budget, actor, why, now: budgets.set_active(budget.pk, active=False, now=now),
)
ACTIVATE_ACTION = AdminAction(
    title="Activate budget",
    warning="What has been spent in its present period counts at once, also what was spent while it was off.",
    done="activated",
    refusal_reason="it is on already",
    legal=lambda budget: not budget.active,
    verb=lambda budget, actor, why, now: budgets.set_active(budget.pk, active=True, now=now),
)


# --- cells ------------------------------------------------------------------------------------------------------------


def get_level(budget: Budget, now: datetime) -> str:
    """How far it is: "within", "warned", "exhausted", or "off"."""
    began = budgets.get_period_bounds(budget.period, now)[0]
    if not budget.active:
        return "off"
    if budget.exhausted_for == began:
        return "exhausted"
    return "warned" if budget.warned_for == began else "within"


def render_budget_state(budget: Budget, now: datetime) -> SafeString:
    return render_badge(*LEVEL_BADGES[get_level(budget, now)])


def format_amount(amount: Decimal, budget: Budget) -> str:
    """Of what is spent: never more than it is, so what looks spent is. In full where the budget is a small one."""
    return format_usd(amount.quantize(CENT if budget.amount >= CENT * 10 else SMALL_QUANTUM, ROUND_DOWN)) if amount else "0"


def get_unit_label(budget: Budget) -> str:
    return "USD" if budget.unit == Unit.USD else "hours"


def format_usage(budget: Budget, now: datetime) -> str:
    return f"{format_amount(budgets.get_spent(budget, now), budget)} of {format_usd(budget.amount)} {get_unit_label(budget)}"


def compute_percent_spent(budget: Budget, now: datetime) -> int:
    return int(100 * budgets.get_spent(budget, now) / budget.amount)


def render_gauge(budget: Budget, now: datetime) -> SafeString:
    """How much is spent, as a bar with a mark where it warns. The numbers stand beside it."""
    share = min(budgets.get_spent(budget, now) / budget.amount, Decimal(1))
    return format_html(
        '<span class="lh-gauge" style="--warn: {}%"><meter class="lh-meter is-{}" min="0" max="1" value="{}"></meter></span>',
        budget.warn_percent,
        get_level(budget, now),
        f"{share:.4f}",
    )


def render_reset_time(budget: Budget, now: datetime) -> SafeString | str:
    ends = budgets.get_period_bounds(budget.period, now)[1]
    return render_timestamp(ends, f"begins anew in {format_age(ends - now)}") if ends else "does not begin anew"


def build_forecast_field(budget: Budget, now: datetime) -> SummaryField:
    """On which day it is spent if days go on as the last ones went."""
    if not budget.active:
        return SummaryField("Runs out", "–", note="it is off")
    day, pace = forecast_budget(budget, now)
    if budgets.is_exhausted(budget, now):
        return SummaryField("Ran out", f"on {day}", note="when that was seen")
    if pace is None and day is None:
        return SummaryField("Runs out", "not known yet", note="nothing was used on a day that is over")
    not_soon = "not foreseen" if budget.period == Period.EVER else "not in this period"
    return SummaryField("Runs out", f"on {day}" if day else not_soon, note=PACE_NOTE)


# --- notices ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BudgetNotice:
    """A line on other pages about a budget that is past its warning level."""

    level: str
    state: SafeString
    href: str
    budget: str
    said: SafeString


def build_notices(budgets_: Iterable[Budget], now: datetime) -> list[BudgetNotice]:
    """Those of these budgets that have something to say, what is exhausted first."""
    loud = [each for each in budgets_ if get_level(each, now) in ("warned", "exhausted")]
    loud.sort(key=lambda each: (get_level(each, now) != "exhausted", not each.hard, each.pk))
    return [
        BudgetNotice(
            get_level(each, now),
            render_budget_state(each, now),
            reverse("admin:billing_budget_change", args=[each.pk]),
            str(each),
            format_html(
                "{} spent ({} %){}; {}",
                format_usage(each, now),
                compute_percent_spent(each, now),
                _describe_consequence(each, now),
                render_reset_time(each, now),
            ),
        )
        for each in loud
    ]


def _describe_consequence(budget: Budget, now: datetime) -> str:
    if get_level(budget, now) != "exhausted":
        return ""
    return ", leases are refused and ended" if budget.hard else ", it only warns"


def build_all_notices(now: datetime) -> list[BudgetNotice]:
    """Of all budgets as many as fit, and where the others are. One query."""
    loud = Budget.objects.filter(budgets.build_marked_filter("warned_for", now))
    found = [*loud.order_by(F("exhausted_for").asc(nulls_last=True), "-hard", "pk")[: MAX_NOTICES + 1]]
    said = build_notices(found[:MAX_NOTICES], now)
    if len(found) > MAX_NOTICES:
        where = build_changelist_url("billing_budget", slice="exhausted" if found[-1].exhausted_for else "warned")
        said.append(
            BudgetNotice(
                "warned", render_badge("late", "more"), where, "More budgets are past their warning level", SafeString()
            )
        )
    return said


# --- pages ------------------------------------------------------------------------------------------------------------


@admin.register(Budget)
class BudgetAdmin(ConsoleModelAdmin):
    list_display = ["what", "whom", "spending", "period_label", "strictness", "condition"]
    list_filter = [
        ("scope", ChoicesRadioFilter), ("unit", ChoicesRadioFilter), ("period", ChoicesRadioFilter), "hard",
    ]  # fmt: skip
    search_fields = ["subject__startswith"]
    search_help_text = "Agent, key, environment type or account, or its beginning"
    ordering = ["pk"]
    slices = {
        "all": ListTab("All", "There is no budget: nothing limits what is spent."),
        "warned": ListTab(
            "Warning",
            "No budget is past its warning level, beside those that are exhausted.",
            lambda now: budgets.build_marked_filter("warned_for", now) & Q(exhausted_for__isnull=True),
        ),
        "exhausted": ListTab(
            "Exhausted", "No budget is exhausted.", lambda now: budgets.build_marked_filter("exhausted_for", now)
        ),
        "off": ListTab("Off", "Every budget is active.", lambda now: Q(active=False)),
    }
    fieldsets = [
        ("Whose leases", {"fields": ["scope", "subject"]}),
        ("How much", {"fields": ["amount", "unit", "period"]}),
        ("What then", {"fields": ["hard", "warn_percent", "grace"]}),
    ]
    formfield_overrides = {**ConsoleModelAdmin.formfield_overrides, models.DurationField: {"form_class": DurationOrZeroField}}
    labels = {"hard": "Hard", "warn_percent": "Warn at percent"}
    change_form_outer_before_template = "admin/billing/budget/page.html"
    acts = {"turn_off": DEACTIVATE_ACTION, "turn_on": ACTIVATE_ACTION}
    actions_detail = ["turn_off", "turn_on"]

    def save_model(self, request: HttpRequest, obj: Budget, form: Any, change: bool) -> None:
        budgets.save_budget(obj, now=timezone.now())

    def complete(self, rows: list[Budget]) -> None:
        subjects = self.subjects(rows)
        for row in rows:
            row.shown = subjects.get(row.pk, row.subject)  # type: ignore[attr-defined]

    def subjects(self, rows: Collection[Budget]) -> Mapping[int, Any]:
        """Whom each of them is for; `leases` overrides it, which has pages for most."""
        names = {row.subject for row in rows if row.scope == Scope.ACCOUNT}
        found = Account.objects.filter(name__in=names) if names else []
        known = {each.name: render_admin_link("billing_account", each.pk, each) for each in found}
        return {row.pk: known.get(row.subject, row.subject) for row in rows if row.scope == Scope.ACCOUNT}

    def holders(self, pks: Collection[UUID]) -> Mapping[UUID, Any]:
        """Each of these in the words of a table; `leases` overrides it."""
        return {pk: str(pk) for pk in pks}

    @display(description="Budget")
    def what(self, row: Budget) -> SafeString:
        often = {Period.DAY: "a day", Period.MONTH: "a month", Period.EVER: "in all"}[Period(row.period)]
        return render_two_lines(f"{format_usd(row.amount)} {get_unit_label(row)}", often)

    @display(description="For")
    def whom(self, row: Budget) -> SafeString | str:
        return render_two_lines(capfirst(Scope(row.scope).label), row.shown) if row.subject else "Everything"  # type: ignore[attr-defined]

    @display(description="Spent")
    def spending(self, row: Budget) -> SafeString:
        now = timezone.now()
        return render_two_lines(render_gauge(row, now), f"{format_usage(row, now)}, {compute_percent_spent(row, now)} %")

    @display(description="Period")
    def period_label(self, row: Budget) -> SafeString:
        return render_two_lines(row.get_period_display(), render_reset_time(row, timezone.now()))

    @display(description="Once it is spent")
    def strictness(self, row: Budget) -> SafeString | str:
        return render_two_lines("refuses and ends", f"{format_duration(row.grace)} of grace") if row.hard else "only warns"

    @display(description="State")
    def condition(self, row: Budget) -> SafeString:
        return render_budget_state(row, timezone.now())

    def page(self, request: HttpRequest, row: Budget) -> dict[str, Any]:
        now = timezone.now()
        found = budgets.find_top_spenders(row, now=now, limit=MAX_PANEL_ROWS)
        count = budgets.find_open_tabs(row, now=now).count()
        names = self.holders([tab.holder for tab, _ in found])
        return {
            "facts": self.facts(row, count, now),
            "within": [
                (names[tab.holder], tab, render_time_since(tab.opened_at), format_amount(amount, row)) for tab, amount in found
            ],
            "unit": get_unit_label(row),
            "open_tabs": count,
            "overshoot": describe_overshoot(row, count, now),
            "said": list_budget_events(row),
            "done": list_audit_entries(row, MAX_PANEL_ROWS),
        }

    def facts(self, row: Budget, count: int, now: datetime) -> list[SummaryField]:
        began, ends = budgets.get_period_bounds(row.period, now)
        spent = budgets.get_spent(row, now)
        left = max(row.amount - spent, Decimal(0))
        known = format_html("worked out {}", render_time_ago(row.spent_at)) if row.spent_at else "not worked out yet"
        whom = self.subjects([row]).get(row.pk, row.subject)
        whose = capfirst(Scope(row.scope).label) if row.subject else "every lease, and what nobody holds yet"
        kept = f"{format_usd(settings.MINIMUM_USD)} USD" if row.unit == Unit.USD else format_duration(settings.MINIMUM_TIME)
        return [
            SummaryField(
                "State",
                render_budget_state(row, now),
                note=render_time_ago(row.exhausted_at) if get_level(row, now) == "exhausted" else "",
            ),
            SummaryField("For", whom or "everything", note=whose),
            SummaryField(
                "Spent",
                format_usage(row, now),
                note=format_html("{} {} %, {}", render_gauge(row, now), compute_percent_spent(row, now), known),
                alarm=get_level(row, now) == "exhausted",
            ),
            SummaryField("Left", f"{format_amount(left, row)} {get_unit_label(row)}", note=f"of {format_usd(row.amount)}"),
            build_forecast_field(row, now),
            SummaryField(
                "Period",
                f"{row.get_period_display()}, UTC" if ends else "ever",
                note=format_html("since {}, {}", f"{began:%Y-%m-%d}", render_reset_time(row, now))
                if ends
                else render_reset_time(row, now),
            ),
            SummaryField(
                "Warns",
                f"at {row.warn_percent} %",
                note=f"{format_usd(row.amount * row.warn_percent / 100)} {get_unit_label(row)}",
            ),
            SummaryField(
                "Once it is spent",
                "leases are refused and ended" if row.hard else "it only warns",
                note=f"what runs may go on for {format_duration(row.grace)}"
                if row.hard
                else "nothing is refused, no lease ends",
            ),
            SummaryField("Leases in it now", f"{count:,}", note=f"each has {kept} reserved" if row.hard else ""),
        ]

    def has_switch_permission(self, request: HttpRequest, object_id: str | None = None) -> bool:
        return request.user.has_perm("billing.change_budget")

    @action(description="Deactivate…", permissions=["switch"], icon="toggle_off", dialog=DEACTIVATE_ACTION.dialog)
    def turn_off(self, request: HttpRequest, form: ReasonForm, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, DEACTIVATE_ACTION, form)

    @action(description="Activate…", permissions=["switch"], icon="toggle_on", dialog=ACTIVATE_ACTION.dialog)
    def turn_on(self, request: HttpRequest, form: ReasonForm, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, ACTIVATE_ACTION, form)


@dataclass(frozen=True)
class BudgetEventRow:
    """An event that was said of a budget."""

    href: str
    kind: str
    what: SafeString
    at: datetime
    spent: str


def list_budget_events(budget: Budget) -> list[BudgetEventRow]:
    """What was said of it, newest first."""
    kinds = {
        EventType.BUDGET_WARNING: render_badge("late", "warning"),
        EventType.BUDGET_EXHAUSTED: render_badge("failed", "exhausted"),
    }
    events = Event.objects.filter(kind__in=[*kinds], key__startswith=f"{budget.pk} ").order_by("-at", "kind")[:MAX_PANEL_ROWS]
    return [
        BudgetEventRow(
            reverse("admin:sandboxes_event_change", args=[event.pk]),
            event.kind,
            kinds[EventType(event.kind)],
            event.at,
            f"{format_amount(Decimal(event.payload['spent']), budget)} of {event.payload['amount']} {get_unit_label(budget)}",
        )
        for event in events
    ]


def describe_overshoot(budget: Budget, count: int, now: datetime) -> list[str]:
    """In words and in this budget's numbers, how far it may be overspent: the bound that billing.budgets derives."""
    if not budget.active:
        return ["It is off. Nothing is refused and no lease is ended, so there is no bound."]
    if not budget.hard:
        return ["It only warns. Nothing is refused and no lease is ended, so there is no bound."]
    lasts, open_ = MAX_DETECTION_DELAY + budget.grace, pluralize(count, "lease is", "leases are")
    parts = (
        f"{format_duration(SWEEP_INTERVAL)} until usage is summed up, "
        f"{format_duration(SWEEP_INTERVAL)} until that is marked as spent, "
        f"{format_duration(budget.grace)} of grace "
        f"and {format_duration(SWEEP_INTERVAL)} until its end is seen"
    )
    if budget.unit == Unit.HOURS:
        hours = format_usd((count * Decimal(lasts // SWEEP_INTERVAL) / 60).quantize(CENT)) if count else "0"
        most = f"so by {count:,} x {format_duration(lasts)} = {hours} hours"
    else:
        costs = pluralize(count, "sandbox costs", "sandboxes cost")
        most = f"so by what {costs} in {format_duration(lasts)}, and their model calls then"
    said = [f"{open_} open. Once it is spent, what runs goes on for at most {format_duration(lasts)}: {parts}; {most}."]
    said.append(
        "Added to that is the time in which the states of sandboxes are stored, one after another, and what model calls "
        "cost that are under way then. What waits is put to sleep without grace."
    )
    if budget.unit == Unit.USD:
        said.append(
            f"CPU and memory that are priced by use are known up to {format_duration(READING_INTERVAL)} later: "
            "so much more of them, too."
        )
    room = _count_lease_headroom(budget, now)
    if room > count:
        said.append(f"Of what is left, up to {room:,} leases may be open at once; the bound grows with each.")
    return said


def _count_lease_headroom(budget: Budget, now: datetime) -> int:
    """So many leases may be open at once: each has the least that one costs reserved."""
    least = budgets.get_minimum_reservation(budget.unit)
    left = max(budget.amount - budgets.get_spent(budget, now), Decimal(0))
    return int(round(left / least, 6)) if least else 0  # a minute is no decimal number of hours
