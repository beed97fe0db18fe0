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
from billing.estimate import LAST, outlook
from billing.models import Account, Budget
from billing.models.budgets import Period, Scope, Unit
from sandboxes.admin.base import Act, Fact, Page, Reason, Slice, done_to
from sandboxes.admin.fields import SpanOrNone
from sandboxes.admin.formatting import age, ago, badge, counted, link, rows, since, span, stamp, two, usd
from sandboxes.models import Event
from sandboxes.models.webhooks import Kind

MOST, LINES = 10, 5  # rows of a panel; notices on the first page
PASS = timedelta(minutes=1)  # between two of `meter`, and of `budgets`
READ = timedelta(minutes=5)  # between two of `read`
HELD_UP = 3 * PASS  # beside its grace: usage is summed up, then it is marked as spent; and the end of its grace is seen
PACE = f"at the pace of the last {LAST} days"
CENT, SMALL = Decimal("0.01"), Decimal("0.000001")
LEVELS = {  # colour and word
    "exhausted": ("failed", "exhausted"), "warned": ("late", "warning"),
    "within": ("ok", "within"), "off": ("destroyed", "off"),
}  # fmt: skip

TURN_OFF = Act(
    title="Deactivate budget",
    warning="It refuses nothing, ends nothing and warns of nothing from now on. It can be activated again.",
    done="deactivated",
    illegal="it is off already",
    legal=lambda budget: budget.active,
    verb=lambda budget, actor, why, now: budgets.switch(budget.pk, active=False, now=now),
)
TURN_ON = Act(
    title="Activate budget",
    warning="What has been spent in its present period counts at once, also what was spent while it was off.",
    done="activated",
    illegal="it is on already",
    legal=lambda budget: not budget.active,
    verb=lambda budget, actor, why, now: budgets.switch(budget.pk, active=True, now=now),
)


# --- cells ------------------------------------------------------------------------------------------------------------


def level(budget: Budget, now: datetime) -> str:
    """How far it is: "within", "warned", "exhausted", or "off"."""
    began = budgets.period_of(budget.period, now)[0]
    if not budget.active:
        return "off"
    if budget.exhausted_for == began:
        return "exhausted"
    return "warned" if budget.warned_for == began else "within"


def state(budget: Budget, now: datetime) -> SafeString:
    return badge(*LEVELS[level(budget, now)])


def figure(amount: Decimal, budget: Budget) -> str:
    """Of what is spent: never more than it is, so what looks spent is. In full where the budget is a small one."""
    return usd(amount.quantize(CENT if budget.amount >= CENT * 10 else SMALL, ROUND_DOWN)) if amount else "0"


def unit(budget: Budget) -> str:
    return "USD" if budget.unit == Unit.USD else "hours"


def used(budget: Budget, now: datetime) -> str:
    return f"{figure(budgets.spent_as_of(budget, now), budget)} of {usd(budget.amount)} {unit(budget)}"


def percent(budget: Budget, now: datetime) -> int:
    return int(100 * budgets.spent_as_of(budget, now) / budget.amount)


def gauge(budget: Budget, now: datetime) -> SafeString:
    """How much is spent, as a bar with a mark where it warns. The numbers stand beside it."""
    share = min(budgets.spent_as_of(budget, now) / budget.amount, Decimal(1))
    return format_html(
        '<span class="lh-gauge" style="--warn: {}%"><meter class="lh-meter is-{}" min="0" max="1" value="{}"></meter></span>',
        budget.warn_percent,
        level(budget, now),
        f"{share:.4f}",
    )


def resets(budget: Budget, now: datetime) -> SafeString | str:
    ends = budgets.period_of(budget.period, now)[1]
    return stamp(ends, f"begins anew in {age(ends - now)}") if ends else "does not begin anew"


def running_out(budget: Budget, now: datetime) -> Fact:
    """On which day it is spent if days go on as the last ones went."""
    if not budget.active:
        return Fact("Runs out", "–", note="it is off")
    day, pace = outlook(budget, now)
    if budgets.is_spent(budget, now):
        return Fact("Ran out", f"on {day}", note="when that was seen")
    if pace is None and day is None:
        return Fact("Runs out", "not known yet", note="nothing was used on a day that is over")
    not_soon = "not foreseen" if budget.period == Period.EVER else "not in this period"
    return Fact("Runs out", f"on {day}" if day else not_soon, note=PACE)


# --- notices ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Notice:
    """A line on other pages about a budget that is past its warning level."""

    level: str
    state: SafeString
    href: str
    budget: str
    said: SafeString


def notices(budgets_: Iterable[Budget], now: datetime) -> list[Notice]:
    """Those of these budgets that have something to say, what is exhausted first."""
    loud = [each for each in budgets_ if level(each, now) in ("warned", "exhausted")]
    loud.sort(key=lambda each: (level(each, now) != "exhausted", not each.hard, each.pk))
    return [
        Notice(
            level(each, now),
            state(each, now),
            reverse("admin:billing_budget_change", args=[each.pk]),
            str(each),
            format_html("{} spent ({} %){}; {}", used(each, now), percent(each, now), _means(each, now), resets(each, now)),
        )
        for each in loud
    ]


def _means(budget: Budget, now: datetime) -> str:
    if level(budget, now) != "exhausted":
        return ""
    return ", leases are refused and ended" if budget.hard else ", it only warns"


def everywhere(now: datetime) -> list[Notice]:
    """Of all budgets as many as fit, and where the others are. One query."""
    loud = Budget.objects.filter(budgets.marked("warned_for", now))
    found = [*loud.order_by(F("exhausted_for").asc(nulls_last=True), "-hard", "pk")[: LINES + 1]]
    said = notices(found[:LINES], now)
    if len(found) > LINES:
        where = rows("billing_budget", slice="exhausted" if found[-1].exhausted_for else "warned")
        said.append(Notice("warned", badge("late", "more"), where, "More budgets are past their warning level", SafeString()))
    return said


# --- pages ------------------------------------------------------------------------------------------------------------


@admin.register(Budget)
class BudgetAdmin(Page):
    list_display = ["what", "whom", "spending", "period_shown", "strictness", "condition"]
    list_filter = [
        ("scope", ChoicesRadioFilter), ("unit", ChoicesRadioFilter), ("period", ChoicesRadioFilter), "hard",
    ]  # fmt: skip
    search_fields = ["subject__startswith"]
    search_help_text = "Agent, key, environment type or account, or its beginning"
    ordering = ["pk"]
    slices = {
        "all": Slice("All", "There is no budget: nothing limits what is spent."),
        "warned": Slice(
            "Warning",
            "No budget is past its warning level, beside those that are exhausted.",
            lambda now: budgets.marked("warned_for", now) & Q(exhausted_for__isnull=True),
        ),
        "exhausted": Slice("Exhausted", "No budget is exhausted.", lambda now: budgets.marked("exhausted_for", now)),
        "off": Slice("Off", "Every budget is active.", lambda now: Q(active=False)),
    }
    fieldsets = [
        ("Whose leases", {"fields": ["scope", "subject"]}),
        ("How much", {"fields": ["amount", "unit", "period"]}),
        ("What then", {"fields": ["hard", "warn_percent", "grace"]}),
    ]
    formfield_overrides = {**Page.formfield_overrides, models.DurationField: {"form_class": SpanOrNone}}
    labels = {"hard": "Hard", "warn_percent": "Warn at percent"}
    change_form_outer_before_template = "admin/billing/budget/page.html"
    acts = {"turn_off": TURN_OFF, "turn_on": TURN_ON}
    actions_detail = ["turn_off", "turn_on"]

    def save_model(self, request: HttpRequest, obj: Budget, form: Any, change: bool) -> None:
        budgets.save(obj, now=timezone.now())

    def complete(self, rows: list[Budget]) -> None:
        subjects = self.subjects(rows)
        for row in rows:
            row.shown = subjects.get(row.pk, row.subject)  # type: ignore[attr-defined]

    def subjects(self, rows: Collection[Budget]) -> Mapping[int, Any]:
        """Whom each of them is for; `leases` overrides it, which has pages for most."""
        names = {row.subject for row in rows if row.scope == Scope.ACCOUNT}
        found = Account.objects.filter(name__in=names) if names else []
        known = {each.name: link("billing_account", each.pk, each) for each in found}
        return {row.pk: known.get(row.subject, row.subject) for row in rows if row.scope == Scope.ACCOUNT}

    def holders(self, pks: Collection[UUID]) -> Mapping[UUID, Any]:
        """Each of these in the words of a table; `leases` overrides it."""
        return {pk: str(pk) for pk in pks}

    @display(description="Budget")
    def what(self, row: Budget) -> SafeString:
        often = {Period.DAY: "a day", Period.MONTH: "a month", Period.EVER: "in all"}[Period(row.period)]
        return two(f"{usd(row.amount)} {unit(row)}", often)

    @display(description="For")
    def whom(self, row: Budget) -> SafeString | str:
        return two(capfirst(Scope(row.scope).label), row.shown) if row.subject else "Everything"  # type: ignore[attr-defined]

    @display(description="Spent")
    def spending(self, row: Budget) -> SafeString:
        now = timezone.now()
        return two(gauge(row, now), f"{used(row, now)}, {percent(row, now)} %")

    @display(description="Period")
    def period_shown(self, row: Budget) -> SafeString:
        return two(row.get_period_display(), resets(row, timezone.now()))

    @display(description="Once it is spent")
    def strictness(self, row: Budget) -> SafeString | str:
        return two("refuses and ends", f"{span(row.grace)} of grace") if row.hard else "only warns"

    @display(description="State")
    def condition(self, row: Budget) -> SafeString:
        return state(row, timezone.now())

    def page(self, request: HttpRequest, row: Budget) -> dict[str, Any]:
        now = timezone.now()
        found = budgets.spenders(row, now=now, most=MOST)
        count = budgets.open_tabs(row, now=now).count()
        names = self.holders([tab.holder for tab, _ in found])
        return {
            "facts": self.facts(row, count, now),
            "within": [(names[tab.holder], tab, since(tab.opened_at), figure(amount, row)) for tab, amount in found],
            "unit": unit(row),
            "open_tabs": count,
            "overshoot": overshoot(row, count, now),
            "said": told(row),
            "done": done_to(row, MOST),
        }

    def facts(self, row: Budget, count: int, now: datetime) -> list[Fact]:
        began, ends = budgets.period_of(row.period, now)
        spent = budgets.spent_as_of(row, now)
        left = max(row.amount - spent, Decimal(0))
        known = format_html("worked out {}", ago(row.spent_at)) if row.spent_at else "not worked out yet"
        whom = self.subjects([row]).get(row.pk, row.subject)
        whose = capfirst(Scope(row.scope).label) if row.subject else "every lease, and what nobody holds yet"
        kept = f"{usd(settings.MINIMUM_USD)} USD" if row.unit == Unit.USD else span(settings.MINIMUM_TIME)
        return [
            Fact("State", state(row, now), note=ago(row.exhausted_at) if level(row, now) == "exhausted" else ""),
            Fact("For", whom or "everything", note=whose),
            Fact(
                "Spent",
                used(row, now),
                note=format_html("{} {} %, {}", gauge(row, now), percent(row, now), known),
                alarm=level(row, now) == "exhausted",
            ),
            Fact("Left", f"{figure(left, row)} {unit(row)}", note=f"of {usd(row.amount)}"),
            running_out(row, now),
            Fact(
                "Period",
                f"{row.get_period_display()}, UTC" if ends else "ever",
                note=format_html("since {}, {}", f"{began:%Y-%m-%d}", resets(row, now)) if ends else resets(row, now),
            ),
            Fact("Warns", f"at {row.warn_percent} %", note=f"{usd(row.amount * row.warn_percent / 100)} {unit(row)}"),
            Fact(
                "Once it is spent",
                "leases are refused and ended" if row.hard else "it only warns",
                note=f"what runs may go on for {span(row.grace)}" if row.hard else "nothing is refused, no lease ends",
            ),
            Fact("Leases in it now", f"{count:,}", note=f"each has {kept} reserved" if row.hard else ""),
        ]  # fmt: skip

    def has_switch_permission(self, request: HttpRequest, object_id: str | None = None) -> bool:
        return request.user.has_perm("billing.change_budget")

    @action(description="Deactivate…", permissions=["switch"], icon="toggle_off", dialog=TURN_OFF.dialog)
    def turn_off(self, request: HttpRequest, form: Reason, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, TURN_OFF, form)

    @action(description="Activate…", permissions=["switch"], icon="toggle_on", dialog=TURN_ON.dialog)
    def turn_on(self, request: HttpRequest, form: Reason, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, TURN_ON, form)


@dataclass(frozen=True)
class Told:
    """An event that was said of a budget."""

    href: str
    kind: str
    what: SafeString
    at: datetime
    spent: str


def told(budget: Budget) -> list[Told]:
    """What was said of it, newest first."""
    kinds = {Kind.BUDGET_WARNING: badge("late", "warning"), Kind.BUDGET_EXHAUSTED: badge("failed", "exhausted")}
    events = Event.objects.filter(kind__in=[*kinds], key__startswith=f"{budget.pk} ").order_by("-at", "kind")[:MOST]
    return [
        Told(
            reverse("admin:sandboxes_event_change", args=[event.pk]),
            event.kind,
            kinds[Kind(event.kind)],
            event.at,
            f"{figure(Decimal(event.payload['spent']), budget)} of {event.payload['amount']} {unit(budget)}",
        )
        for event in events
    ]


def overshoot(budget: Budget, count: int, now: datetime) -> list[str]:
    """In words and in this budget's numbers, how far it may be overspent: the bound that billing.budgets derives."""
    if not budget.active:
        return ["It is off. Nothing is refused and no lease is ended, so there is no bound."]
    if not budget.hard:
        return ["It only warns. Nothing is refused and no lease is ended, so there is no bound."]
    lasts, open_ = HELD_UP + budget.grace, counted(count, "lease is", "leases are")
    parts = (
        f"{span(PASS)} until usage is summed up, {span(PASS)} until that is marked as spent, {span(budget.grace)} of grace "
        f"and {span(PASS)} until its end is seen"
    )
    if budget.unit == Unit.HOURS:
        hours = usd((count * Decimal(lasts // PASS) / 60).quantize(CENT)) if count else "0"
        most = f"so by {count:,} x {span(lasts)} = {hours} hours"
    else:
        most = f"so by what {counted(count, 'sandbox costs', 'sandboxes cost')} in {span(lasts)}, and their model calls then"
    said = [f"{open_} open. Once it is spent, what runs goes on for at most {span(lasts)}: {parts}; {most}."]
    said.append(
        "Added to that is the time in which the states of sandboxes are stored, one after another, and what model calls "
        "cost that are under way then. What waits is put to sleep without grace."
    )
    if budget.unit == Unit.USD:
        said.append(f"CPU and memory that are priced by use are known up to {span(READ)} later: so much more of them, too.")
    room = _room(budget, now)
    if room > count:
        said.append(f"Of what is left, up to {room:,} leases may be open at once; the bound grows with each.")
    return said


def _room(budget: Budget, now: datetime) -> int:
    """So many leases may be open at once: each has the least that one costs reserved."""
    least = budgets.minimum(budget.unit)
    left = max(budget.amount - budgets.spent_as_of(budget, now), Decimal(0))
    return int(round(left / least, 6)) if least else 0  # a minute is no decimal number of hours
