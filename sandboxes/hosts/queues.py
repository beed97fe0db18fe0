"""Task queues: one a host, served by this host's worker. A task that calls an engine goes to the queue of its host.

One worker serves one queue. A queue for the whole installation would need a second worker on each host, so a task that any
host can execute goes to a host with a recent heartbeat."""

from typing import Any

import structlog
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db.models import F
from django_q.tasks import async_task

from sandboxes.db import database_time
from sandboxes.hosts import registry
from sandboxes.models import Host
from sandboxes.providers.errors import ProviderError

log = structlog.get_logger(__name__)


def enqueue(function: str, *args: Any, group: str, host: Host | None = None) -> None:
    """Queue a task for the worker of a host, by default of any live host."""
    async_task(function, *args, group=group, cluster=host.queue if host and host.queue else choose_queue())


def choose_queue() -> str:
    """Return a queue whose worker is probably alive.

    This host's queue if its heartbeat is recent, else the queue of the host with the newest heartbeat."""
    try:
        own_queue = registry.get_queue_name()
    except (ProviderError, ImproperlyConfigured) as error:  # the engine has never responded here
        log.warning("queue of this host not known", error=str(error))
        own_queue = ""
    live = registry.find_live_hosts(now=database_time.now())
    reachable = [*live.exclude(queue="").values_list("queue", flat=True)]
    if own_queue in reachable or not reachable:
        return own_queue or _find_last_queue()
    return reachable[0]


def _find_last_queue() -> str:
    last = Host.objects.exclude(queue="").order_by(F("heartbeat_at").desc(nulls_last=True)).first()
    return last.queue if last else str(settings.Q_CLUSTER["name"])
