"""What the queue runs for this app."""

from django.utils import timezone
from django_q.models import OrmQ
from django_q.tasks import async_task

from leases import sweeps

DEEPEST = 100  # tasks waiting: beyond this the next scheduled sweep is soon enough


def wake_reclaim() -> None:
    """Have the queue destroy what was just given up, rather than wait for the next sweep. Losing this loses only time."""
    if OrmQ.objects.count() < DEEPEST:
        async_task("leases.tasks.reclaim", group="reclaim")


def reclaim() -> str:
    return str(sweeps.reclaim(now=timezone.now()))
