"""Usage of model calls by lease, model and day, with the limit on the cost of a lease and day."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from typing import NamedTuple
from uuid import UUID

from django.db.models import Count, Sum

from billing.models import UsageKind, UsageRecord
from billing.money_sums import MAX_RECORD_USD, NANOS_PER_UNIT, sum_exact

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


def iter_model_usage(day: date) -> Iterator[tuple[Owner, LeaseUsage]]:
    """Yield the usage of each lease on a day, by model. One query.

    The cost of a lease and day is limited to MAX_RECORD_USD. The models are cut that exceed the limit in the order of their
    names, so that they always add up to the cost record."""
    rows = UsageRecord.objects.filter(day=day, item=UsageKind.TOKENS).order_by().values_list(*Owner._fields, "model")
    sums = rows.annotate(
        a=Count("pk"), b=Sum("calls"), c=Sum("unpriced"), d=sum_exact("usd"), e=sum_exact("estimated_usd"),
        f=Sum("input_tokens"), g=Sum("cached_tokens"), h=Sum("cache_written_tokens"), i=Sum("output_tokens"),
    )  # fmt: skip
    size, owners = len(Owner._fields), defaultdict[Owner, dict[str, ModelUsage]](dict)
    for row in sums:
        owners[Owner(*row[:size])][row[size]] = ModelUsage(*map(int, row[size + 1 :]))
    for owner, models in owners.items():
        yield owner, LeaseUsage(_limit_cost(models), sum(usage.usd for usage in models.values()))


def _limit_cost(models: Mapping[str, ModelUsage]) -> dict[str, ModelUsage]:
    left, limited = MAX_RECORD_NANOS, {}
    for model, usage in sorted(models.items()):
        usd = min(usage.usd, left)
        left -= usd
        limited[model] = usage._replace(usd=usd, estimated_usd=min(usage.estimated_usd, usd))
    return limited
