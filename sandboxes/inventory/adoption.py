"""Adoption of sandboxes without an owner: a row in quarantine, and optionally a snapshot of its /workspace.

An adopted sandbox gets no holder, and no runs. Its egress slot and its tokens are unknown, and its files are those of an agent:
as `warm` without a holder it would be given to the next agent. It is therefore put into quarantine, from which an operator
retries the destroy. Until then no sweep destroys it, it takes a place in its pool, and it is not metered."""

import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta

import structlog
from django.core.exceptions import ImproperlyConfigured
from django.db import IntegrityError, transaction
from django.db.models import F

from sandboxes import audit, providers
from sandboxes.db import dialect
from sandboxes.db.clock import clock_from
from sandboxes.errors import CapacityExhausted, SandboxNotAdoptable, SandboxNotHeld, StoreUnavailable
from sandboxes.hosts import registry
from sandboxes.inventory.ownership import Ownerless, find_ownerless
from sandboxes.lifecycle import DESTROYING, WARMING, advance, checkpoint, insert_warming
from sandboxes.long_calls import LONG_CALLS
from sandboxes.models import Pool, Quota, Sandbox, TransitionReason
from sandboxes.models.names import SandboxName, parse_name
from sandboxes.models.state import Snapshot, SnapshotKind
from sandboxes.pool.allocation import take_place
from sandboxes.state import workspace
from sandboxes.storage.base import StoreError

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Recipient:
    """Holder that gets the files of an adopted sandbox as a snapshot. The caller has checked that it may."""

    holder: uuid.UUID
    agent_did: str
    environment_id: str


@dataclass(frozen=True)
class Adoption:
    """Adopted row, and the snapshot of its files if one was requested."""

    sandbox: Sandbox
    snapshot: Snapshot | None


def adopt(
    provider_name: str,
    name: str,
    *,
    pool: Pool | None = None,
    recipient: Recipient | None = None,
    now: datetime,
    grace: timedelta,
    actor: audit.Actor,
    reason: str,
) -> Adoption:
    """Insert the row of a sandbox that an engine lists and no row names, in quarantine. Idempotent.

    1. List the engine again, with the checks of find_ownerless.
    2. Insert the row, by whose id and incarnation the engine knows the sandbox, and take a place in the pool: by default in the
       pool with the sandbox's owner label.
    3. With a recipient, store /workspace as a snapshot of the recipient, older than its newest one, so that no wake reads the
       snapshot unless an operator or the agent restores it. If this fails, the row stays in quarantine: adopt again.

    Raise SandboxNotAdoptable if its name is not one of this system, another incarnation has a row, or the pool does not fit;
    CapacityExhausted without a free place, StoreUnavailable or ProviderError if the files could not be stored, and the errors
    of find_ownerless."""
    clock = clock_from(now)
    sandbox = _find_adopted(provider_name, name)
    if sandbox is None:
        found = find_ownerless(provider_name, name, now=now, grace=grace)
        sandbox = _insert_row(found, _require_adoptable(found, pool), recipient, now=clock(), actor=actor, reason=reason)
        log.warning("sandbox adopted", sandbox=str(sandbox.pk), name=name, provider=provider_name, actor=actor, reason=reason)
        checkpoint("adopted", sandbox)
    if recipient is None:
        return Adoption(sandbox, None)
    return Adoption(sandbox, _store_files(sandbox, recipient, now=clock()))


def _find_adopted(provider_name: str, name: str) -> Sandbox | None:
    """Return the row of an earlier adoption that is still in quarantine."""
    parts = parse_name(name)
    adopted = Sandbox.objects.select_related("pool").filter(
        provider=provider_name, state=DESTROYING, quarantined_at__isnull=False, transitions__code=TransitionReason.ADOPTED
    )
    return adopted.filter(pk=parts.pk, incarnation=parts.incarnation).first() if parts else None


def _require_adoptable(found: Ownerless, chosen: Pool | None) -> Pool:
    """Return the pool of the new row. Raise SandboxNotAdoptable."""
    parts = parse_name(found.listed.name)
    if parts is None:
        raise SandboxNotAdoptable("Its name is not one that this system gives. It can only be destroyed.")
    if former := Sandbox.objects.filter(pk=parts.pk).first():
        raise SandboxNotAdoptable(
            f"It is incarnation {parts.incarnation} of a sandbox whose row is {former.state} at incarnation "
            f"{former.incarnation}. Reconcile keeps its files as a snapshot of the lease, if there is one."
        )
    if found.listed.is_remnant:
        raise SandboxNotAdoptable("Only its volumes are left. They can only be destroyed.")
    pool = chosen or found.pool
    if pool is None:
        raise SandboxNotAdoptable("No pool has its owner label. Choose a pool.")
    if (pool.provider or providers.get_default_provider_name()) != found.provider.name:
        raise SandboxNotAdoptable(f'The pool "{pool}" is of another provider.')
    return pool


def _insert_row(
    found: Ownerless, pool: Pool, recipient: Recipient | None, *, now: datetime, actor: audit.Actor, reason: str
) -> Sandbox:
    """Insert the row and move it to quarantine in one transaction: no sweep sees it in `warming`, whose deadline destroys."""
    host = registry.get_local_host(found.provider.name, now=now)
    parts = parse_name(found.listed.name)
    assert parts
    sandbox = _build_row(found, parts, pool, now=now)
    sandbox.host = host
    if recipient:
        sandbox.agent_did, sandbox.environment_id = recipient.agent_did, recipient.environment_id
    text = f"adopted: {reason}"
    try:
        with transaction.atomic(durable=True):
            insert_warming(sandbox, now=now, code=TransitionReason.ADOPTED, actor=actor)
            advance(
                sandbox.pk, WARMING, DESTROYING, now=now, code=TransitionReason.ADOPTED, reason=text, actor=actor,
                quarantined_at=now, claim=None, last_error="Adopted. Retry the destroy once its files are not needed.",
            )  # fmt: skip
            audit.record(sandbox, "Adopt sandbox", reason, actor=actor, now=now)
            if recipient:
                Quota.objects.filter(pool=pool, agent_did=recipient.agent_did).update(used=F("used") + 1)
            if not take_place(pool):
                raise CapacityExhausted(f'The pool "{pool}" has no free place, or is being drained. Nothing was changed.')
    except IntegrityError as error:
        dialect.raise_unless_unique(error)
        raise SandboxNotAdoptable("Another operator has just adopted it.") from None
    return Sandbox.objects.select_related("pool").get(pk=sandbox.pk)


def _build_row(found: Ownerless, parts: SandboxName, pool: Pool, *, now: datetime) -> Sandbox:
    """Build the row. Without a size of the engine, it has the size of the pool."""
    listed = found.listed
    return Sandbox(
        pk=parts.pk, incarnation=parts.incarnation, pool=pool, provider=found.provider.name, ref=listed.ref,
        isolated=found.provider.isolated, measured=found.provider.measures_usage, image=pool.image,
        memory_mib=listed.memory_mib or pool.memory_mib, millicpus=listed.millicpus or pool.millicpus, pids=pool.pids,
        last_used_at=now, created_at=now, deadline_at=now, source="fresh",
    )  # fmt: skip


def _store_files(sandbox: Sandbox, recipient: Recipient, *, now: datetime) -> Snapshot:
    """Store /workspace as a snapshot of the recipient, unless that was done before."""
    stored = workspace.find_by_holder(recipient.holder).filter(sandbox=sandbox, incarnation=sandbox.incarnation).first()
    if stored:
        return stored
    sandbox.holder = recipient.holder  # of the snapshot; the row has none, because the lease does not depend on this sandbox
    try:
        with LONG_CALLS.admit():
            provider, name = registry.get_sandbox_provider(sandbox), f"adopted {sandbox.name}"[:100]
            with workspace.persist(sandbox, provider, kind=SnapshotKind.ASKED, name=name, now=now) as snapshot:
                _insert_snapshot(snapshot, sandbox, recipient)
    except (StoreError, ImproperlyConfigured) as failed:
        raise StoreUnavailable(f"Its files could not be stored: {failed} It is in quarantine; adopt it again.") from failed
    checkpoint("adopted files stored", snapshot)
    return snapshot


def _insert_snapshot(snapshot: Snapshot, sandbox: Sandbox, recipient: Recipient) -> None:
    with transaction.atomic(durable=True):
        quarantined = Sandbox.objects.select_for_update(no_key=True, of=("self",)).filter(
            pk=sandbox.pk, state=DESTROYING, quarantined_at__isnull=False
        )
        if quarantined.values_list("pk", flat=True).first() is None:
            raise SandboxNotHeld("The sandbox was released from quarantine while its files were being stored.")
        workspace.date_before_newest(snapshot)
        workspace.insert(snapshot)
