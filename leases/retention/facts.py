"""Facts from which usage has been derived, once the lease that they belong to is deleted.

Only facts before the horizon (billing.horizon) go, and only those without which the rest has the same usage. A sandbox that is
not destroyed keeps the changes between its starts and stops: its time with a process is counted from them."""

from datetime import datetime, timedelta
from typing import Any

from django.db.models import Exists, OuterRef, Q, QuerySet, Subquery

from billing.horizon import find_facts_end
from leases.models import Lease
from sandboxes.models import DataSize, LlmCall, Reading, Run, Snapshot, Transition
from sandboxes.models.transition_reasons import RUN_REASONS

LATE_PRICE_PERIOD = timedelta(days=90)  # a model call without a price waits so much longer for one


def find_expired() -> dict[str, QuerySet[Any]]:
    """Return the expired rows of each kind."""
    end = find_facts_end()
    without_lease = ~Exists(Lease.objects.filter(pk=OuterRef("holder")))
    of_gone_sandbox = Q(sandbox__destroyed_at__lt=end, sandbox__metered=True)
    of_run = Q(code__in=RUN_REASONS)
    # The indexed search for transitions by time has those of no run: those of runs go up to the last of the others. Ids and
    # times have the same order, but for transitions at the same moment.
    last = Transition.objects.exclude(of_run).filter(at__lt=end).order_by("-at").values("pk")[:1]
    later = Transition.objects.filter(sandbox=OuterRef("sandbox"), pk__gt=OuterRef("pk"), at__lt=end)
    same_objects = Snapshot.objects.filter(Q(forgotten_at__isnull=True) | Q(forgotten_at__gte=end), key=OuterRef("key"))
    later_size = DataSize.objects.filter(agent_did=OuterRef("agent_did"), pk__gt=OuterRef("pk"), at__lt=end)
    later_reading = Reading.objects.filter(sandbox=OuterRef("sandbox"), pk__gt=OuterRef("pk"))
    return {
        "runs": Run.objects.filter(
            of_gone_sandbox, without_lease, metered=True, started_at__lt=end, ended_at__lt=end
        ).order_by("started_at"),
        "transitions of runs": Transition.objects.filter(
            of_run, Exists(later), pk__lt=Subquery(last), at__lt=end
        ).order_by("pk"),
        "transitions": Transition.objects.filter(
            of_gone_sandbox, ~of_run, without_lease, at__lt=end
        ).order_by("at"),
        "readings": Reading.objects.filter(
            of_gone_sandbox | Exists(later_reading), metered=True, at__lt=end
        ).order_by("at"),
        "snapshots without files": Snapshot.objects.filter(
            ~Exists(same_objects), without_lease, forgotten_at__lt=end, metered=True, vendor_snapshot=""
        ).order_by("forgotten_at"),
        "sizes of agents' data": DataSize.objects.filter(Exists(later_size), metered=True, at__lt=end).order_by("at"),
        "model calls": _find_expired_calls(end).filter(without_lease).order_by("started_at", "pk"),
    }  # fmt: skip


def _find_expired_calls(end: datetime) -> QuerySet[LlmCall]:
    """Return the calls before `end` of which no other call of the same usage record waits for its price.

    A late price sums the calls of one lease to one model on one day again. Those of a lease therefore stay together."""
    is_waiting = Q(cost__isnull=True, kind=LlmCall.Kind.LLM, started_at__gte=end - LATE_PRICE_PERIOD)
    unsettled = LlmCall.objects.exclude(outcome=LlmCall.Outcome.REFUSED).filter(is_waiting | Q(counted=False))
    of_same_lease = Exists(unsettled.filter(holder=OuterRef("holder")))
    of_no_lease = Q(Exists(unsettled.filter(holder__isnull=True, model=OuterRef("model"))), holder__isnull=True)
    return LlmCall.objects.filter(~of_same_lease, ~of_no_lease, counted=True, started_at__lt=end, ended_at__lt=end)
