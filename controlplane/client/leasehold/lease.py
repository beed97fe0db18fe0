"""Lease of a sandbox while its block is open: join, renewal in a thread, release on every path."""

from __future__ import annotations

import logging
import os
import queue
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from . import api, cleanup, schemas
from .errors import ApiError, LeaseholdError, RenewalFailed, SandboxClosed
from .exchange import Operation, RetryPolicy
from .settings import Settings
from .transports import Transport

log = logging.getLogger("leasehold")
DEFAULT_TTL_SECONDS = 120  # of a lease that its program releases: the time for which it outlives a killed program
RENEWALS_PER_TTL = 3
FINAL_RETRY_SECONDS = 5.0  # outage that a release at the end of the process waits for; after it the ttl ends the lease
FINAL_RESPONSE_SECONDS = 10.0
FINAL_STATUSES = frozenset({401, 403, 404, 410})  # a renewal that is refused with one of them will be refused again


@dataclass(frozen=True)
class LeaseOptions:
    """Fields of the join. `release`: at the end; None: if the join granted the lease."""

    environment_type: str
    agent: str | None
    environment: str | None  # None: one of its own, with a generated name
    release: bool | None
    fields: Mapping[str, Any]


class HeldLease:
    """Lease of one sandbox object. Has no reference to that object, so that garbage collection can release the lease."""

    def __init__(self, settings: Settings, options: LeaseOptions) -> None:
        self.settings, self.options = settings, options
        self.agent = options.agent
        self.environment = options.environment or f"script-{uuid.uuid4().hex}"
        self.document: schemas.Lease | None = None
        self.must_release = options.release is not False
        self.failure: LeaseholdError | None = None
        self._process_id = os.getpid()
        self._keeper: LeaseKeeper | None = None

    def open(self) -> Operation[schemas.Lease]:
        """Join the environment, and begin to renew the lease."""
        policy = self.settings.retries
        if self.agent is None:
            self.agent = yield from api.find_agent(policy)
        if self.must_release:
            cleanup.register(self)
        lease = yield from api.join(self.environment, self._build_join(self.agent), policy)
        if self.options.release is None and self.options.environment and not lease["is_new"]:
            self.must_release = False  # another program has opened it
            cleanup.unregister(self)
        keeper = LeaseKeeper(self, lease)  # reads the lease: one that cannot be read is not held
        self.document, self._keeper = lease, keeper
        keeper.start()
        return lease

    def close(self) -> Operation[None]:
        """Stop the renewal, and release the lease if this object is to. Idempotent."""
        self.stop()
        yield from self._release(self.settings.retries)
        cleanup.unregister(self)

    def release_now(self) -> None:
        """Release the lease over a connection of its own: from a signal handler, at exit, or in the thread of the renewal.

        A failure is logged: the lease then ends by its ttl."""
        self.stop()
        transport = Transport(self.settings, response_seconds=FINAL_RESPONSE_SECONDS)
        retries = self.settings.retries
        try:
            transport.run(self._release(replace(retries, period_seconds=min(FINAL_RETRY_SECONDS, retries.period_seconds))))
        except LeaseholdError as error:
            log.warning("The lease in the environment %s was not released and ends by its ttl: %s", self.environment, error)
        finally:
            transport.close()
            cleanup.unregister(self)

    def release_after(self, error: BaseException) -> None:
        """Release the lease that an interrupted or failed join may have granted. A join that was refused grants none."""
        if isinstance(error, ApiError) and error.status is not None and error.status < 500:
            cleanup.unregister(self)
        else:
            self.release_now()

    def stop(self) -> None:
        """Stop the renewal."""
        if self._keeper is not None:
            self._keeper.stop()

    def abandon(self) -> None:
        """Let the thread of the renewal release the lease. Takes no lock: a finalizer may run while any lock is held."""
        if self._keeper is not None:
            self._keeper.inbox.put("release")

    def _build_join(self, agent: str) -> schemas.JoinRequest:
        ttl = DEFAULT_TTL_SECONDS if self.must_release else None
        fields = {"ttl_seconds": ttl} | api.drop_none(**self.options.fields)
        named = {"agent_did": agent, "environment_type": self.options.environment_type}
        return cast(schemas.JoinRequest, named | api.drop_none(**fields))

    def _release(self, policy: RetryPolicy) -> Operation[None]:
        """End the lease. After an interrupted join, find it first: an environment with a generated name has no other lease.

        A forked child leaves the lease to its parent."""
        if not self.must_release or os.getpid() != self._process_id:
            return
        if self.document is not None:
            yield from api.LeaseApi(self.document["id"], policy).release()
        elif self.options.environment is None and self.agent is not None:
            for lease in (yield from api.find_leases(self.agent, self.environment, policy)):
                yield from api.LeaseApi(lease["id"], policy).release()
        self.must_release = False

    def require_open(self) -> schemas.Lease:
        """Return the lease as the join returned it. Raise SandboxClosed, or RenewalFailed if the lease was lost."""
        if self.failure is not None:
            raise RenewalFailed(str(self.failure.detail), problem=self.failure.problem) from self.failure
        if self.document is None:
            raise SandboxClosed("The sandbox is not open. Use it in a `with` block, or call open().")
        return self.document


class LeaseKeeper(cleanup.ExitingThread):
    """Thread that renews a lease. A thread also for AsyncSandbox: code that blocks the event loop does not lose the lease."""

    def __init__(self, held: HeldLease, lease: schemas.Lease) -> None:
        super().__init__(name=f"leasehold-{lease['id']}")
        self.inbox: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._held = held
        self._interval_seconds = lease["ttl_seconds"] / RENEWALS_PER_TTL
        retries = replace(held.settings.retries, period_seconds=self._interval_seconds)
        self._api = api.LeaseApi(lease["id"], retries)

    def stop(self) -> None:
        self.inbox.put("stop")

    def run(self) -> None:
        transport: Transport | None = None  # most scripts end before the first renewal
        try:
            while self._held.failure is None:
                try:
                    message = self.inbox.get(timeout=self._interval_seconds)
                except queue.Empty:
                    transport = transport or Transport(self._held.settings, response_seconds=FINAL_RESPONSE_SECONDS)
                    self._renew(transport)
                    continue
                if message == "release":
                    self._held.release_now()
                return
        finally:
            if transport is not None:
                transport.close()

    def _renew(self, transport: Transport) -> None:
        """Renew the lease. Only a final refusal is a failure: an outage may end before the lease does."""
        try:
            transport.run(self._api.renew())
        except LeaseholdError as error:
            if error.status in FINAL_STATUSES:
                self._held.failure = error
            else:
                log.warning("The lease was not renewed and is tried again: %s", error)
