"""Registry of hosts: known engines, the engines that this process reaches, and the provider of a sandbox.

A sandbox belongs to the engine that runs it. Only a process that reaches this engine may act on the sandbox: another engine
does not know the sandbox, and its "no such sandbox" proves nothing."""

import json
import os
import socket
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import structlog
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import IntegrityError, transaction
from django.db.models import Q, QuerySet

from sandboxes import providers
from sandboxes.db import dialect
from sandboxes.errors import HostLost, NotIsolated, WrongHost
from sandboxes.hosts.bound_provider import bind_provider, compute_host_id
from sandboxes.models import Host, Pool, Sandbox
from sandboxes.providers.base import Provider
from sandboxes.providers.errors import FailureCause, ProviderError, Unavailable
from sandboxes.providers.registry import PROVIDERS

log = structlog.get_logger(__name__)
ENGINES_FILE = "engines.json"  # in the state directory: provider -> engine id, used while the engine does not respond


def get_local_host_id(provider_name: str) -> uuid.UUID:
    """Return the id of the host whose engine this process reaches through a provider, without a query.

    Until the engine has responded to this process, the id is that of the engine which last responded to a process with this
    state directory. Raise Unavailable if none has, and ImproperlyConfigured as `get_provider` does."""
    provider = providers.get_provider(provider_name)
    try:
        return compute_host_id(provider_name, provider.last_engine_id())
    except Unavailable:
        if remembered := _read_engines().get(provider_name):
            return compute_host_id(provider_name, remembered)
        raise


def is_engine_known(provider_name: str) -> bool:
    """Return whether an engine of this provider has responded to a process with this state directory. Asks no engine."""
    return provider_name in _read_engines()


def get_local_host(provider_name: str, *, now: datetime) -> Host:
    """Return the row of the host whose engine this process reaches, and create it at the first use.

    Raise the errors of get_local_host_id."""
    host_id = get_local_host_id(provider_name)
    host = Host.objects.filter(pk=host_id).first()
    return host or _register(providers.get_provider(provider_name), now=now)


def get_placement_host(provider_name: str, *, now: datetime) -> Host:
    """Return the host on which this process starts sandboxes. Raise HostLost if an operator has declared it lost.

    Raise NotIsolated if its provider has to prove its isolation and has not, unless DEBUG or ALLOW_UNISOLATED is set."""
    host = get_local_host(provider_name, now=now)
    if host.lost_at:
        raise HostLost(f'The host "{host}" was declared lost and is not cleaned up yet. Its worker does so.', host=host.name)
    if PROVIDERS[provider_name].proves_isolation and not (host.sealed or settings.DEBUG or settings.ALLOW_UNISOLATED):
        raise NotIsolated(host=host.name)
    return host


def find_worker_host(*, now: datetime) -> Host | None:
    """Return the host of the default provider, after which the worker's queue is named; None if the host is not known."""
    try:
        return get_local_host(providers.get_default_provider_name(), now=now)
    except (ProviderError, ImproperlyConfigured):
        return None


def find_live_hosts(*, now: datetime) -> QuerySet[Host]:
    """Select the hosts that are neither unreachable nor lost, the newest heartbeat first."""
    return Host.objects.filter(lost_at__isnull=True, heartbeat_at__gt=now - settings.HOST_TIMEOUT).order_by("-heartbeat_at")


def is_unreachable(host: Host, *, now: datetime) -> bool:
    """Return whether no worker has reached the host's engine within LEASEHOLD_HOST_TIMEOUT."""
    return (host.heartbeat_at or host.created_at) <= now - settings.HOST_TIMEOUT


def get_state(host: Host, *, now: datetime) -> str:
    """Return "live", "unreachable" (no recent heartbeat) or "lost" (declared by an operator)."""
    return "lost" if host.lost_at else "unreachable" if is_unreachable(host, now=now) else "live"


def count_by_state(hosts: Iterable[Host], *, now: datetime) -> dict[str, int]:
    """Return the number of hosts in each state of get_state."""
    counts = dict.fromkeys(("live", "unreachable", "lost"), 0)
    for host in hosts:
        counts[get_state(host, now=now)] += 1
    return counts


def find_local_host_ids() -> list[uuid.UUID]:
    """Return the ids of all known hosts whose engine this process reaches, at most one per provider."""
    known = Host.objects.order_by("provider").values_list("provider", flat=True).distinct()
    return list(_iter_reachable(known))


def find_local_provider_names() -> list[str]:
    """Return the providers of all known hosts whose engine this process reaches."""
    reached = set(find_local_host_ids())
    return sorted(Host.objects.filter(pk__in=reached).values_list("provider", flat=True))


def _iter_reachable(provider_names: object) -> Iterator[uuid.UUID]:
    for name in provider_names:  # type: ignore[attr-defined]
        with suppress(ProviderError, ImproperlyConfigured):
            yield get_local_host_id(name)


def filter_local(prefix: str = "") -> Q:
    """Return the condition that a sandbox is on a host whose engine this process reaches.

    `prefix` is the path from the filtered model to the sandbox, such as "sandbox__"."""
    return Q(**{f"{prefix}host__in": find_local_host_ids()})


def is_local(sandbox: Sandbox) -> bool:
    """Return whether this process reaches the sandbox's engine, without a query."""
    try:
        return sandbox.host_id is not None and sandbox.host_id == get_local_host_id(sandbox.provider)
    except (ProviderError, ImproperlyConfigured):
        return False


def require_local(sandbox: Sandbox) -> None:
    """Raise WrongHost unless this process reaches the sandbox's engine."""
    if not is_local(sandbox):
        message = f"{_describe_location(sandbox)}, which this server does not reach. Nothing was changed."
        error = WrongHost(message, host=_name(sandbox))
        error.provider = sandbox.provider
        raise error


def get_sandbox_provider(sandbox: Sandbox) -> Provider:
    """Return the provider of a sandbox. Its calls reach the sandbox's own engine, or raise Unavailable.

    Raise Unavailable, never Missing, for a sandbox of a host that this process does not reach, and ImproperlyConfigured as
    `get_provider` does."""
    provider = providers.get_provider(sandbox.provider)
    if sandbox.host_id is None or sandbox.host_id != get_local_host_id(sandbox.provider):
        message = f"{_describe_location(sandbox)}, which this process does not reach."
        raise Unavailable(message, cause=FailureCause.ENGINE_UNREACHABLE, provider=sandbox.provider)
    return bind_provider(provider, sandbox.host_id)


def _describe_location(sandbox: Sandbox) -> str:
    name = _name(sandbox)
    return f'The sandbox is on the host "{name}"' if name else "The sandbox is not assigned to a host yet"


def _name(sandbox: Sandbox) -> str:
    return sandbox.host.name if sandbox.host else ""


def find_provider_names() -> list[str]:
    """Return the providers that pools use, the default one first."""
    default = providers.get_default_provider_name()
    return [default, *sorted(set(Pool.objects.values_list("provider", flat=True)) - {"", default})]


def get_queue_name() -> str:
    """Return the name of the task queue of this host's worker. Raise the errors of get_local_host_id."""
    return f"host-{get_local_host_id(providers.get_default_provider_name()).hex}"


def _register(provider: Provider, *, now: datetime) -> Host:
    engine_id = provider.last_engine_id()
    pk = compute_host_id(provider.name, engine_id)
    values = {"provider": provider.name, "engine_id": engine_id, "queue": get_queue_name(), "created_at": now}
    base, number = socket.gethostname()[:80], 1
    while True:
        name = base if number == 1 else f"{base}-{number}"
        try:
            with transaction.atomic():
                host, created = Host.objects.get_or_create(pk=pk, defaults={**values, "name": name})
        except IntegrityError as error:  # the name is taken by another engine of this machine
            dialect.raise_unless_unique(error)
            number += 1
            continue
        if created:
            log.info("host registered", host=host.name, provider=host.provider, engine=host.engine_id)
        return host


def remember_engine(provider_name: str, engine_id: str) -> None:
    """Store the engine's id in the state directory, unless it is stored. A failure is logged."""
    engines = _read_engines()
    if engines.get(provider_name) == engine_id:
        return
    path = Path(settings.STATE_DIR) / ENGINES_FILE
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(engines | {provider_name: engine_id}))
        os.replace(temporary, path)
    except OSError as error:
        log.warning("engine id not stored", path=str(path), error=str(error))


def get_remembered_host_id() -> uuid.UUID | None:
    """Return the id of this machine's host as its worker last stored it, without a call that may wait for the engine."""
    name = providers.get_default_provider_name()
    return compute_host_id(name, engine_id) if (engine_id := _read_engines().get(name)) else None


def _read_engines() -> dict[str, str]:
    try:
        return dict(json.loads((Path(settings.STATE_DIR) / ENGINES_FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return {}
