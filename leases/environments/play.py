"""Members, play-by-play, totals and costs of an environment."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from django.db.models import Count, Max, Min, Q, QuerySet, Sum

from billing.models import CostRecord
from billing.money_sums import nanos_to_decimal, sum_exact
from billing.uncertainty import Uncertainty
from leases.models import Lease, Turn
from sandboxes.models import LlmCall

MAX_MEMBERS = 200  # leases of one environment that are shown and summed, newest first


@dataclass(frozen=True)
class Move:
    """Turn with the cost of its model calls."""

    turn: Turn
    lease: Lease
    model_cost: Decimal

    @property
    def duration(self) -> timedelta | None:
        return self.turn.ended_at - self.turn.started_at if self.turn.ended_at else None

    @property
    def skip_reason(self) -> str:
        return str(self.turn.action.get("reason", "")) if self.turn.skipped else ""


@dataclass(frozen=True)
class TurnTotals:
    """Counts of the turns of some leases."""

    turns: int = 0
    skipped: int = 0
    in_progress: int = 0


@dataclass(frozen=True)
class Costs:
    """Costs of some leases in USD. `total` includes the model calls that are priced and metered.

    `uncertainty` is the one of `total`."""

    total: Decimal
    model_calls: Decimal
    uncertainty: Uncertainty


def list_members(leases: QuerySet[Lease], environment_id: str) -> list[Lease]:
    """Return the leases of an environment among `leases`, ended ones too, newest first, at most MAX_MEMBERS."""
    return list(leases.filter(environment_id=environment_id).order_by("-leased_at", "-pk")[:MAX_MEMBERS])


def list_moves(members: Sequence[Lease], *, limit: int, until: Turn | None = None) -> list[Move]:
    """Return the newest turns of some leases, newest first, without their states. `until` is the first of them."""
    leases = {lease.pk: lease for lease in members}
    turns = Turn.objects.filter(lease__in=leases)
    if until is not None:
        turns = turns.filter(Q(started_at__lt=until.started_at) | Q(started_at=until.started_at, pk__lte=until.pk))
    page = list(turns.order_by("-started_at", "-pk")[:limit])
    costs = _sum_model_costs([turn.run_id for turn in page if turn.run_id])
    return [Move(turn, leases[turn.lease_id], costs.get(turn.run_id, Decimal(0))) for turn in page]


def _sum_model_costs(runs: Sequence[UUID]) -> dict[Any, Decimal]:
    calls = LlmCall.objects.filter(run__in=runs).order_by().values_list("run")
    return dict(calls.annotate(usd=Sum("cost", default=Decimal(0))))


def find_shown_turn(members: Sequence[Lease], turn_id: int | None) -> Turn | None:
    """Return the turn of these leases with this id and its state, else the newest turn with a stored state."""
    turns = Turn.objects.filter(lease__in=[lease.pk for lease in members]).select_related("lease").defer(None)
    if turn_id is not None and (chosen := turns.filter(pk=turn_id).first()):
        return chosen
    return turns.exclude(state="").order_by("-started_at", "-pk").first()


def find_neighbours(members: Sequence[Lease], turn: Turn) -> tuple[int | None, int | None]:
    """Return the ids of the turns before and after one turn."""
    turns = Turn.objects.filter(lease__in=[lease.pk for lease in members])
    before = Q(started_at__lt=turn.started_at) | Q(started_at=turn.started_at, pk__lt=turn.pk)
    after = Q(started_at__gt=turn.started_at) | Q(started_at=turn.started_at, pk__gt=turn.pk)
    return (
        turns.filter(before).order_by("-started_at", "-pk").values_list("pk", flat=True).first(),
        turns.filter(after).order_by("started_at", "pk").values_list("pk", flat=True).first(),
    )


def count_turns(members: Sequence[Lease]) -> dict[UUID, TurnTotals]:
    """Return the totals of the turns by lease. Leases without a turn are left out."""
    rows = (
        Turn.objects.filter(lease__in=[lease.pk for lease in members])
        .order_by()
        .values_list("lease")
        .annotate(
            turns=Count("pk"),
            skips=Count("pk", filter=Q(skipped=True)),
            in_progress=Count("pk", filter=Q(ended_at__isnull=True)),
        )
    )
    return {pk: TurnTotals(*counts) for pk, *counts in rows}


def measure_playing_time(members: Sequence[Lease]) -> timedelta:
    """Return the time from the beginning of the first turn to the end of the last one."""
    turns = Turn.objects.filter(lease__in=[lease.pk for lease in members])
    period = turns.aggregate(first=Min("started_at"), last=Max("ended_at"))
    return period["last"] - period["first"] if period["first"] and period["last"] else timedelta(0)


def calculate_costs(members: Sequence[Lease]) -> dict[UUID, Costs]:
    """Return the costs by lease: cost records, and model calls also before they are metered. Two queries."""
    pks = [lease.pk for lease in members]
    rows = CostRecord.objects.filter(holder__in=pks).order_by().values_list("holder")
    records = rows.annotate(a=sum_exact("usd"), b=Sum("unpriced"), c=sum_exact("estimated_usd"))
    calls = LlmCall.objects.filter(holder__in=pks).order_by().values_list("holder").annotate(nano=sum_exact("cost"))
    totals, spent = {pk: amounts for pk, *amounts in records}, dict(calls)
    return {pk: _build_costs(totals.get(pk, [0, 0, 0]), spent.get(pk, 0)) for pk in pks}


def _build_costs(amounts: Sequence[int], model_calls: int) -> Costs:
    nano, unpriced, estimated = map(int, amounts)
    uncertainty = Uncertainty(unpriced, nanos_to_decimal(estimated))
    return Costs(nanos_to_decimal(nano), nanos_to_decimal(model_calls), uncertainty)


def sum_costs(costs: dict[UUID, Costs]) -> Costs:
    return Costs(
        sum((each.total for each in costs.values()), Decimal(0)),
        sum((each.model_calls for each in costs.values()), Decimal(0)),
        Uncertainty.sum(each.uncertainty for each in costs.values()),
    )
