"""Who may still spend: what a budget has left, who is refused by it, and who is over it.

Spending is worked out by `settle`, a sweep, from usage and costs. In between a budget is kept in two ways. A grant reserves
the least that a lease costs (LEASEHOLD_MINIMUM_TIME, LEASEHOLD_MINIMUM_USD) for itself and for every active lease in scope,
under the budget's lock, so that so many acquires at once get no more than there is. And what is marked as spent refuses
whatever would go on: one look at an index, which is empty most often.

So a hard budget is overshot by what is used from the moment at which it was spent in truth until its leases have ended:

    overshoot <= leases x rate x (metering + settling + grace + settling + storing) + calls

    leases      active at once in its scope, at most (amount - spent) / minimum when the last of them was granted
    rate        of one lease: 1 hour an hour; or the USD of its sandbox, and of its model calls, in that time
    metering    how old usage is when it is summed up: one pass of `meter` and its price, 1 minute between two. What is priced
                by use is read every 5 minutes
    settling    between two passes of `budgets`: 1 minute until it is marked as spent, and again 1 minute from the end of
                the grace until that is seen. What waits is put to sleep at the first pass, without grace
    grace       of the budget: what runs then may go on for as long
    storing     until the state of one lease's sandbox is stored, for as many as are stored one after another
    calls       what model calls cost that were under way: a call's cost is known when it has ended. And what is collected
                of them late

An account's budget counts what is billed to the account: of an agent that moves what it uses before in one, what it uses
from then on in the other. Who is refused is decided by where it belongs today (UTC).

Sandboxes that nobody holds yet count for everything, and for the house; no lease ends with them, so a pool that warms some
up goes on. While the state of a sandbox cannot be stored it stays, and its lease with it, past any grace: a budget loses no
files. Meanwhile all is refused, so nothing new runs in it."""

from collections import defaultdict
from collections.abc import Collection
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from uuid import UUID

import structlog
from django.conf import settings
from django.db import transaction
from django.db.models import Q, QuerySet, Value
from django.db.models.functions import Coalesce

from billing import derivation
from billing.costs import BILLABLE_STATES, MICROSECOND, TOTAL_DURATION, build_account_filters
from billing.dates import EPOCH, start_of_day, start_of_next_month, to_utc_date
from billing.errors import BudgetExhausted
from billing.models import HOUSE_ACCOUNT_NAME, BillableItem, Budget, CostRecord, Membership, Tab, UsageKind, UsageRecord
from billing.models.budgets import Period, Scope, Unit
from billing.money_sums import nanos_to_decimal, sum_exact
from billing.pricing import format_decimal
from sandboxes.db import sql
from sandboxes.db.clock import format_timestamp
from sandboxes.lifecycle import checkpoint
from sandboxes.models.webhooks import EventType
from sandboxes.webhooks import outbox

log = structlog.get_logger(__name__)
HOUR = timedelta(hours=1)
NINE_PLACES = Decimal("1e-9")
EXHAUSTED_SQL = "exhausted_at IS NOT NULL AND active AND hard"  # as the condition of its index
EXHAUSTED_FOR_LEASE_SQL = (
    f"{EXHAUSTED_SQL} AND (scope IN ('all', 'account') OR subject IN (%s, %s, %s))"  # for a lease, by whatever scope
)
SCOPE_COLUMNS = {Scope.AGENT: "agent_did", Scope.KEY: "key_id", Scope.ENVIRONMENT_TYPE: "environment_type"}  # columns of tabs
GRACE_RESET_FIELDS = ["scope", "subject", "unit", "period", "hard", "active"]  # of these, what decides when its grace began
OPERATOR_FIELDS = ["scope", "subject", "unit", "amount", "period", "hard", "warn_percent", "grace", "active"]  # by operators


def get_period_bounds(period: str, now: datetime) -> tuple[datetime, datetime | None]:
    """When the present one began, and when the next one will: None for ever."""
    day = to_utc_date(now)
    if period == Period.DAY:
        return start_of_day(day), start_of_day(day + timedelta(days=1))
    if period == Period.MONTH:
        return start_of_day(day.replace(day=1)), start_of_day(start_of_next_month(day))
    return EPOCH, None


def get_spent(budget: Budget, now: datetime) -> Decimal:
    """What is known to be spent in the present period: nothing yet in one that has just begun."""
    return budget.spent if budget.period_began == get_period_bounds(budget.period, now)[0] else Decimal(0)


# --- scopes -----------------------------------------------------------------------------------------------------------


def build_scope_filter(budget: Budget, *, now: datetime) -> Q:
    """The tabs that a budget is for. Of an account's those of the agents that belong to it now."""
    if budget.scope == Scope.ACCOUNT:
        return _build_member_filter(budget.subject, now)
    return Q() if budget.scope == Scope.ALL else Q(**{SCOPE_COLUMNS[Scope(budget.scope)]: budget.subject})


def _build_member_filter(account: str, now: datetime) -> Q:
    present = Membership.objects.on(to_utc_date(now))
    if account == HOUSE_ACCOUNT_NAME:
        return ~Q(agent_did__in=present.exclude(account__name=HOUSE_ACCOUNT_NAME).values("agent_did"))
    return Q(agent_did__in=present.filter(account__name=account).values("agent_did"))


def _build_usage_filters(budget: Budget, began: datetime) -> list[Q]:
    """The usage records since then that a budget is for, in parts. Of an account's those of the days on which their agents
    belonged to it."""
    return (
        build_account_filters(budget.subject, to_utc_date(began))
        if budget.scope == Scope.ACCOUNT
        else [_build_usage_filter(budget)]
    )


def _build_cost_filter(budget: Budget) -> Q:
    """The same of cost records: an account's plans, too."""
    return Q(account__name=budget.subject) if budget.scope == Scope.ACCOUNT else _build_usage_filter(budget)


def _build_usage_filter(budget: Budget) -> Q:
    if budget.scope in (Scope.KEY, Scope.ENVIRONMENT_TYPE):
        return Q(holder__in=Tab.objects.filter(**{SCOPE_COLUMNS[Scope(budget.scope)]: budget.subject}).values("holder"))
    return Q(agent_did=budget.subject) if budget.scope == Scope.AGENT else Q()


def build_lease_filter(*, agent_did: str, environment_type: str, key_id: str, now: datetime) -> Q:
    """The budgets that are for such a lease."""
    account = Membership.objects.on(to_utc_date(now)).filter(agent_did=agent_did).values("account__name")
    found = (
        Q(scope=Scope.ALL)
        | Q(scope=Scope.AGENT, subject=agent_did)
        | Q(scope=Scope.ENVIRONMENT_TYPE, subject=environment_type)
        | Q(scope=Scope.ACCOUNT, subject=Coalesce(account, Value(HOUSE_ACCOUNT_NAME)))
    )
    return found | Q(scope=Scope.KEY, subject=key_id) if key_id else found


def find_visible_budgets(key_id: str, dids: Collection[str], *, now: datetime) -> QuerySet[Budget]:
    """The active budgets that are for leases of these agents, or of this key."""
    present = Membership.objects.on(to_utc_date(now)).filter(agent_did__in=dids)
    accounts = dict(present.values_list("agent_did", "account__name"))
    types = Tab.objects.filter(agent_did__in=dids).values("environment_type")
    return Budget.objects.filter(
        Q(scope=Scope.ALL)
        | Q(scope=Scope.AGENT, subject__in=dids)
        | Q(scope=Scope.KEY, subject=key_id)
        | Q(scope=Scope.ENVIRONMENT_TYPE, subject__in=types)
        | Q(scope=Scope.ACCOUNT, subject__in={accounts.get(did, HOUSE_ACCOUNT_NAME) for did in dids}),
        active=True,
    )


def build_marked_filter(mark: str, now: datetime) -> Q:
    """The active budgets whose mark, `warned_for` or `exhausted_for`, is of their present period."""
    present = Q()
    for period in Period:
        present |= Q(period=period, **{mark: get_period_bounds(period, now)[0]})
    return present & Q(active=True)


# --- who is refused ---------------------------------------------------------------------------------------------------


def get_minimum_reservation(unit: str) -> Decimal:
    """What each active lease has reserved: the least that one costs."""
    return _to_hours(settings.MINIMUM_TIME) if unit == Unit.HOURS else settings.MINIMUM_USD


def open_tab(holder: UUID, *, agent_did: str, environment_type: str, key_id: str, now: datetime) -> None:
    """Count a new lease against its budgets, or BudgetExhausted. Call it in the transaction that grants the lease.

    Its hard budgets stay locked until that ends, so whoever is granted another one counts this one. Without any there is
    no lock."""
    for_it = build_lease_filter(agent_did=agent_did, environment_type=environment_type, key_id=key_id, now=now)
    hard = Budget.objects.select_for_update(no_key=True, of=("self",)).filter(for_it, active=True, hard=True).order_by("pk")
    others = {budget: find_open_tabs(budget, now=now).count() for budget in hard}
    full = {budget: number for budget, number in others.items() if not _has_room(budget, number, now=now)}
    if full:
        raise _build_refusal(full, now=now)
    sql.insert(
        Tab(holder=holder, agent_did=agent_did, environment_type=environment_type, key_id=key_id, opened_at=now)
    )  # fmt: skip


def _has_room(budget: Budget, others: int, *, now: datetime) -> bool:
    """For one lease more than those."""
    spent = get_spent(budget, now)
    return spent < budget.amount and spent + (others + 1) * get_minimum_reservation(budget.unit) <= budget.amount


def find_open_tabs(budget: Budget, *, now: datetime) -> QuerySet[Tab]:
    """Those of active leases in its scope."""
    return Tab.objects.filter(build_scope_filter(budget, now=now), closed_at__isnull=True)


def close_tab(holder: UUID, *, now: datetime) -> None:
    """A lease's reservation ends. Call it in the transaction that ends the lease."""
    sql.update(Tab, "closed_at = %s WHERE holder = %s AND closed_at IS NULL", now, holder)


def require_budget(holder: UUID, *, now: datetime, after_grace: bool = False) -> None:
    """BudgetExhausted while a hard budget is spent that is for this lease; `graceful`: only once the grace of one is over.
    One look at an index where there is none."""
    over = find_exhausted_for_lease(holder, now=now)
    if after_grace:
        over = [each for each in over if now >= get_grace_deadline(each)]
    if over:
        raise _build_refusal(dict.fromkeys(over, 0), now=now)


def find_exhausted_for_lease(holder: UUID, *, now: datetime) -> list[Budget]:
    """The hard budgets that are spent and for this lease."""
    if sql.find_first(Budget, EXHAUSTED_SQL) is None:
        return []
    tab = sql.find_first(Tab, "holder = %s", holder)
    if tab is None or sql.find_first(Budget, EXHAUSTED_FOR_LEASE_SQL, tab.agent_did, tab.environment_type, tab.key_id) is None:
        return []
    for_it = build_lease_filter(agent_did=tab.agent_did, environment_type=tab.environment_type, key_id=tab.key_id, now=now)
    return find_exhausted(now=now, of=for_it)


def find_exhausted(*, now: datetime, of: Q | None = None) -> list[Budget]:
    """The hard budgets that are spent. One whose period is over, or whose amount was raised since, is not: that counts from
    the moment it happens, not from when a sweep has written so."""
    marked = Budget.objects.filter(of or Q(), exhausted_at__isnull=False, active=True, hard=True).order_by("pk")
    return [each for each in marked if is_exhausted(each, now)]


def is_exhausted(budget: Budget, now: datetime) -> bool:
    """Whether it was seen to be spent, in its present period and with the amount that it has now."""
    return budget.exhausted_for == get_period_bounds(budget.period, now)[0] and budget.spent >= budget.amount


def get_grace_deadline(budget: Budget) -> datetime:
    """Of one that is spent: until when what runs may go on."""
    assert budget.exhausted_at
    return budget.exhausted_at + budget.grace


def _build_refusal(full: dict[Budget, int], *, now: datetime) -> BudgetExhausted:
    """The error for these budgets, each with how many active leases have something reserved in it. It names the strictest:
    that which refuses for the longest time, and of those the one that is spent the furthest."""

    def strictness(budget: Budget) -> tuple[bool, datetime, Decimal]:
        ends = get_period_bounds(budget.period, now)[1]
        return ends is None, ends or EPOCH, get_spent(budget, now) / budget.amount

    budget = max(full, key=strictness)
    spent, kept, ends = (
        get_spent(budget, now),
        full[budget] * get_minimum_reservation(budget.unit),
        get_period_bounds(budget.period, now)[1],
    )
    said = [f"There is a budget of {budget}: {format_decimal(spent)} are spent"]
    said.append(f", and active leases keep {format_decimal(round(kept, 6))} more." if spent < budget.amount and kept else ".")
    said.append(f" It begins anew at {ends:%Y-%m-%d %H:%M} UTC." if ends else " It does not begin anew by itself.")
    return BudgetExhausted(
        "".join(said), spent=format_decimal(spent), limit=format_decimal(budget.amount), unit=budget.unit, resets_at=ends
    )  # fmt: skip


# --- what is spent ----------------------------------------------------------------------------------------------------


def update_spending(pk: int, *, now: datetime) -> list[str]:
    """Work out what an active budget has spent in its present period, and what follows from that: "warned of", "spent",
    "open again". It may stop anywhere, and run twice, or beside itself: an event is said once.

    While usage and costs are derived anew their sums say too little: what is known to be spent stays until they are there."""
    budget = Budget.objects.filter(pk=pk, active=True).first()
    if budget is None or derivation.is_rebuilding():
        return []
    began, ends = get_period_bounds(budget.period, now)
    spent = sum_spending(budget, began, ends)  # before its lock: a grant waits for that
    checkpoint("budget summed", budget)
    same = {field: getattr(budget, field) for field in ("scope", "subject", "unit", "period", "spent_at")}
    with transaction.atomic():
        locked = Budget.objects.select_for_update(no_key=True).filter(pk=pk, active=True, **same).first()
        # Changed meanwhile, or worked out by somebody else, who may know of more: the next pass has it.
        said = _apply_thresholds(locked, spent, began, now=now) if locked and not derivation.is_rebuilding() else []
        checkpoint("budget marked", budget)
    checkpoint("budget settled", budget)
    return said


def _apply_thresholds(budget: Budget, spent: Decimal, began: datetime, *, now: datetime) -> list[str]:
    """Write what is spent, and an event where that has come to a mark: once in a period, unless the amount is changed."""
    said = []
    budget.spent, budget.spent_at, budget.period_began = spent, now, began
    if spent * 100 < budget.amount * budget.warn_percent:
        budget.warned_for = None
    elif budget.warned_for != began:
        budget.warned_for = began
        _emit_event(budget, EventType.BUDGET_WARNING, now=now)
        said.append("warned of")
    if spent < budget.amount:
        if budget.exhausted_at is not None:
            said.append("open again")
        budget.exhausted_for = budget.exhausted_at = None
    elif budget.exhausted_for != began:
        budget.exhausted_for, budget.exhausted_at = began, now
        _emit_event(budget, EventType.BUDGET_EXHAUSTED, now=now)
        said.append("spent")
    budget.save(update_fields=["spent", "spent_at", "period_began", "warned_for", "exhausted_for", "exhausted_at"])
    return said


def _emit_event(budget: Budget, event: EventType, *, now: datetime) -> None:
    """Once for each period, amount and whom it is for, whatever becomes of what is spent in between."""
    began, ends = get_period_bounds(budget.period, now)
    payload = {
        "budget": budget.pk, "scope": budget.scope, "subject": budget.subject, "unit": budget.unit, "period": budget.period,
        "amount": format_decimal(budget.amount), "spent": format_decimal(budget.spent), "warn_percent": budget.warn_percent,
        "hard": budget.hard, "period_began": format_timestamp(began), "resets_at": format_timestamp(ends) if ends else None,
    }  # fmt: skip
    outbox.enqueue_event(event, key=f"{budget.pk} {began:%Y-%m-%d} {budget}"[:255], payload=payload, now=now)
    log.info(event.value, budget=budget.pk, what=str(budget), spent=format_decimal(budget.spent), hard=budget.hard)


def sum_spending(budget: Budget, began: datetime, ends: datetime | None) -> Decimal:
    """What is derived so far of what was used in its scope in one period: usage up to the watermark, and its costs."""
    if budget.unit == Unit.USD:
        return nanos_to_decimal(_find_cost_records(budget, began, ends).aggregate(nano=sum_exact("usd"))["nano"])
    lasted = [part.aggregate(sum=TOTAL_DURATION)["sum"] for part in _find_time_records(budget, began, ends)]
    return _to_hours(sum(filter(None, lasted), timedelta(0))).quantize(NINE_PLACES)


def sum_spending_by_day(budget: Budget, since: datetime, ends: datetime | None) -> dict[date, tuple[Fraction, Fraction]]:
    """The same of each day on which something was used, not rounded: all of it, and what is no plan. One query, or
    two."""
    if budget.unit == Unit.USD:
        costs = _find_cost_records(budget, since, ends).order_by().values_list("day")
        sums = costs.annotate(all=sum_exact("usd"), used=sum_exact("usd", ~Q(item=BillableItem.PLAN)))
        return {day: (Fraction(nanos_to_decimal(all_)), Fraction(nanos_to_decimal(used))) for day, all_, used in sums}
    lasted: dict[date, timedelta] = defaultdict(timedelta)
    for part in _find_time_records(budget, since, ends):
        for day, sum_ in part.order_by().values_list("day").annotate(sum=TOTAL_DURATION):
            lasted[day] += sum_
    return {day: (Fraction(sum_ // MICROSECOND, HOUR // MICROSECOND),) * 2 for day, sum_ in lasted.items()}


def find_top_spenders(budget: Budget, *, now: datetime, most: int) -> list[tuple[Tab, Decimal]]:
    """Its open tabs that have spent the most in its present period, and what each has; the newest of those with nothing."""
    began, ends = get_period_bounds(budget.period, now)
    open_ = find_open_tabs(budget, now=now)
    if budget.unit == Unit.USD:
        costs = _find_cost_records(budget, began, ends).filter(holder__in=open_.values("holder")).order_by()
        nano = costs.values_list("holder").annotate(sum=sum_exact("usd")).order_by("-sum", "holder")[:most]
        spent = {holder: nanos_to_decimal(sum_) for holder, sum_ in nano}
    else:
        used = [part.filter(holder__in=open_.values("holder")).order_by() for part in _find_time_records(budget, began, ends)]
        lasted = [each for part in used for each in part.values_list("holder").annotate(sum=TOTAL_DURATION)]
        spent = {holder: _to_hours(sum_) for holder, sum_ in sorted(lasted, key=lambda each: (-each[1], each[0]))[:most]}
    tabs = {tab.holder: tab for tab in Tab.objects.filter(holder__in=spent)}
    found = [(tabs[holder], amount) for holder, amount in spent.items()]
    if len(found) < most:
        rest = open_.exclude(holder__in=spent).order_by("-opened_at", "holder")[: most - len(found)]
        found += [(tab, Decimal(0)) for tab in rest]
    return found


def _build_day_filter(began: datetime, ends: datetime | None) -> Q:
    return Q(day__gte=began.date()) & (Q(day__lt=ends.date()) if ends else Q())


def _find_cost_records(budget: Budget, began: datetime, ends: datetime | None) -> QuerySet[CostRecord]:
    return CostRecord.objects.filter(_build_cost_filter(budget), _build_day_filter(began, ends))


def _find_time_records(budget: Budget, began: datetime, ends: datetime | None) -> list[QuerySet[UsageRecord]]:
    time_ = UsageRecord.objects.filter(_build_day_filter(began, ends), item=UsageKind.TIME, state__in=BILLABLE_STATES)
    return [time_.filter(part) for part in _build_usage_filters(budget, began)]


def _to_hours(lasted: timedelta) -> Decimal:
    return Decimal(lasted // MICROSECOND) / (HOUR // MICROSECOND)


# --- for operators ----------------------------------------------------------------------------------------------------


def save_budget(budget: Budget, *, now: datetime) -> None:
    """State a budget, or state it anew, and work out at once what that means. ValidationError names the field."""
    budget.full_clean()
    with transaction.atomic():
        if budget.pk is None:
            budget.created_at = now
            budget.save()
        else:
            same = {field: getattr(budget, field) for field in GRACE_RESET_FIELDS}
            # It was spent for others, or ended nothing yet: whom it is for from now on has all of its grace.
            Budget.objects.filter(pk=budget.pk).exclude(**same).update(exhausted_for=None, exhausted_at=None)
            budget.save(update_fields=OPERATOR_FIELDS)
    update_spending(budget.pk, now=now)
    budget.refresh_from_db()


def set_active(pk: int, *, active: bool, now: datetime) -> bool:
    """Turn a budget on or off; whether this call did. What it has spent is worked out as soon as it is on, and its grace
    begins then."""
    anew = {"exhausted_for": None, "exhausted_at": None}
    if not Budget.objects.filter(pk=pk, active=not active).update(active=active, **anew):
        return False
    update_spending(pk, now=now)
    return True
