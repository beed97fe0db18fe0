"""Listings of all engines that this process reaches, requested at the same time.

An engine that fails, cannot list or is on another host has a state of its own: its listing is never shown as empty."""

import contextvars
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from uuid import UUID

import structlog
from django.core.exceptions import ImproperlyConfigured

from sandboxes import providers
from sandboxes.hosts import registry
from sandboxes.hosts.bound_provider import require_engine
from sandboxes.lifecycle import COLD, DESTROYED
from sandboxes.models import Host, Sandbox
from sandboxes.providers.base import ProviderSandbox
from sandboxes.providers.errors import FailureCause, ProviderError

log = structlog.get_logger(__name__)
LISTING_TIMEOUT_SECONDS = 20.0  # of all listings together; a vendor may take minutes


class ListingState(StrEnum):
    """Result of the attempt to list one engine."""

    LISTED = "listed"
    UNAVAILABLE = "unavailable"  # the engine did not respond
    NOT_CONFIGURED = "not_configured"  # the provider lacks a package, a key or a permission on this server
    NOT_SUPPORTED = "not_supported"  # the provider cannot list
    OTHER_HOST = "other_host"  # only servers of another host reach the engine


WITHOUT_RESPONSE = (ListingState.UNAVAILABLE, ListingState.NOT_CONFIGURED)  # no statement about the sandboxes there


@dataclass(frozen=True)
class EngineListing:
    """Sandboxes that one engine or vendor's account lists. `host` is None until the engine has run a sandbox."""

    provider: str
    host: Host | None
    state: ListingState
    error: str = ""
    host_state: str = ""  # as by registry.get_state; "" without a host
    sandboxes: tuple[ProviderSandbox, ...] = field(default=(), repr=False)

    @property
    def name(self) -> str:
        return self.host.name if self.host else self.provider


def list_engines(*, now: datetime) -> list[EngineListing]:
    """List the engines of this process and of all other hosts that are in use. Engines are in the order of their providers.

    An engine is in use if a pool names its provider, or if a sandbox with a process has a row there. Takes a few queries, and
    at most LISTING_TIMEOUT_SECONDS for the engines."""
    hosts = {host.pk: host for host in Host.objects.order_by("provider", "name")}
    pool_providers = registry.find_provider_names()
    used_host_ids = set(Sandbox.objects.exclude(state__in=(COLD, DESTROYED)).values_list("host", flat=True).distinct())
    used_providers = {hosts[pk].provider for pk in used_host_ids if pk in hosts}
    names = sorted({*pool_providers, *used_providers, *registry.find_local_provider_names()})
    listings = [_attach_host(listing, hosts, now) for listing in _list_local(names)]
    local_ids = {listing.host.pk for listing in listings if listing.host}
    others = [
        EngineListing(host.provider, host, ListingState.OTHER_HOST, host_state=registry.get_state(host, now=now))
        for pk, host in hosts.items()
        if pk not in local_ids and (pk in used_host_ids or not registry.is_unreachable(host, now=now))
    ]
    return sorted([*listings, *others], key=lambda each: (each.provider, each.name))


def list_engine(provider_name: str) -> EngineListing:
    """List one engine of this process. The host is not set."""
    return _list_local([provider_name])[0]


def _attach_host(listing: EngineListing, hosts: dict[UUID, Host], now: datetime) -> EngineListing:
    host = None
    with suppress(ProviderError, ImproperlyConfigured):
        host = hosts.get(registry.get_local_host_id(listing.provider))
    state = registry.get_state(host, now=now) if host else ""
    return EngineListing(listing.provider, host, listing.state, listing.error, state, listing.sandboxes)


def _list_local(names: list[str]) -> list[EngineListing]:
    """List the engine of each provider in a thread of its own, so that a slow vendor delays no other listing.

    A thread that is still waiting at the timeout ends with the timeout of its provider's call."""
    results: dict[str, EngineListing] = {}

    def list_one(name: str) -> None:
        results[name] = _list_provider(name)

    threads = [_start_thread(list_one, name) for name in names]
    deadline = time.monotonic() + LISTING_TIMEOUT_SECONDS
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
    overdue = f"No complete listing within {LISTING_TIMEOUT_SECONDS:.0f} seconds."
    return [results.get(name) or EngineListing(name, None, ListingState.UNAVAILABLE, overdue) for name in names]


def _start_thread(target: Callable[[str], None], name: str) -> threading.Thread:
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(target, name), name=f"listing {name}", daemon=True)
    thread.start()
    return thread


def _list_provider(name: str) -> EngineListing:
    try:
        provider = providers.get_provider(name)
        if not provider.can_list:
            return EngineListing(name, None, ListingState.NOT_SUPPORTED)
        host_id = registry.get_local_host_id(name)
        listed = provider.list_all()
        require_engine(provider, host_id)  # after the listing: that of another engine would show orphans and losses
        return EngineListing(name, None, ListingState.LISTED, sandboxes=tuple(listed))
    except ProviderError as error:
        is_supported = error.cause != FailureCause.NOT_SUPPORTED
        return EngineListing(
            name, None, ListingState.UNAVAILABLE if is_supported else ListingState.NOT_SUPPORTED, str(error) or error.code
        )
    except ImproperlyConfigured as error:
        return EngineListing(name, None, ListingState.NOT_CONFIGURED, str(error))
    except Exception as error:  # a defect in one provider must not hide the other engines
        log.exception("listing failed", provider=name, exc_info=error)
        return EngineListing(name, None, ListingState.UNAVAILABLE, f"Internal error, see the log: {type(error).__name__}")
