"""Usage of model calls by lease, model and day, with the limit on the cost of a lease and day."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple
from uuid import UUID

from django.db.models import Count, Sum

from billing.models import UsageKind, UsageRecord
from billing.money_sums import MAX_RECORD_USD, NANOS_PER_UNIT, sum_exact

FETCH_SIZE = 2000  # rows fetched at a time
MAX_RECORD_NANOS = int(MAX_RECORD_USD) * NANOS_PER_UNIT


class Owner(NamedTuple):
    """Lease to which model calls belong."""

    agent_did: str
    environment_id: str
    holder: UUID | None
    provider: str


class ModelUsage(NamedTuple):
    """Sums of model calls, with the names of the columns of ModelTotal. `usd` and `estimated_usd` are billionths."""

    records: int = 0
    calls: int = 0
    unpriced: int = 0
    usd: int = 0
    estimated_usd: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    cache_written_tokens: int = 0
    output_tokens: int = 0
    estimated_tokens: int = 0

    def plus(self, other: "ModelUsage") -> "ModelUsage":
        return ModelUsage(*(a + b for a, b in zip(self, other, strict=True)))

    def minus(self, other: "ModelUsage") -> "ModelUsage":
        return ModelUsage(*(a - b for a, b in zip(self, other, strict=True)))


NO_USAGE = ModelUsage()


def sum_usage(parts: Iterable[ModelUsage]) -> ModelUsage:
    return ModelUsage(*map(sum, zip(NO_USAGE, *parts, strict=True)))


@dataclass(frozen=True)
class LeaseUsage:
    """Usage of one lease on one day, by model. `stated_usd` is its cost before the limit, in billionths."""

    models: Mapping[str, ModelUsage]
    stated_usd: int

    @property
    def total(self) -> ModelUsage:
        return sum_usage(self.models.values())


def iter_model_usage(days: Iterable[date]) -> Iterator[tuple[date, list[tuple[Owner, LeaseUsage]]]]:
    """Yield the days with usage, in order, each with the usage of its leases by model. One query.

    The cost of a lease and day is limited to MAX_RECORD_USD. The models are cut that exceed the limit in the order of their
    names, so that they always add up to the cost record."""
    rows = UsageRecord.objects.filter(day__in=sorted(days), item=UsageKind.TOKENS).order_by("day")
    sums = rows.values_list("day", *Owner._fields, "model").annotate(
        a=Count("pk"), b=Sum("calls"), c=Sum("unpriced"), d=sum_exact("usd"), e=sum_exact("estimated_usd"),
        f=Sum("input_tokens"), g=Sum("cached_tokens"), h=Sum("cache_written_tokens"), i=Sum("output_tokens"),
        j=Sum("estimated_tokens"),
    )  # fmt: skip
    size = 1 + len(Owner._fields)
    for day, of_day in groupby(sums.iterator(chunk_size=FETCH_SIZE), itemgetter(0)):
        owners = defaultdict[Owner, dict[str, ModelUsage]](dict)
        for row in of_day:
            owners[Owner(*row[1:size])][row[size]] = ModelUsage(*map(int, row[size + 1 :]))
        yield (
            day,
            [
                (owner, LeaseUsage(_limit_cost(models), sum(usage.usd for usage in models.values())))
                for owner, models in owners.items()
            ],
        )


def _limit_cost(models: Mapping[str, ModelUsage]) -> dict[str, ModelUsage]:
    left, limited = MAX_RECORD_NANOS, {}
    for model, usage in sorted(models.items()):
        usd = min(usage.usd, left)
        left -= usd
        limited[model] = usage._replace(usd=usd, estimated_usd=min(usage.estimated_usd, usd))
    return limited
