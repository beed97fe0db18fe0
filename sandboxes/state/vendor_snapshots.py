"""Vendors' own snapshots of workspaces: a cache beside the stored snapshots, for faster wakes at the same vendor.

The stored snapshot stays the authority. Its row names the vendor's snapshot of the same state, which is taken after the row is
committed and before the sandbox is destroyed, and recorded under the claim of the eviction: no run began in between. A wake
restores the vendor's snapshot only if it belongs to the objects that the wake would unpack, and compares the restored files
with the listing from the time of the snapshot. In every other case the stored snapshot is unpacked.

A crash between the vendor's call and the record leaves a snapshot that no row names. The vendor deletes it after
VENDOR_SNAPSHOT_TTL."""

import hashlib
from collections.abc import Mapping
from datetime import datetime, timedelta

import structlog
from django.conf import settings
from django.db import transaction
from django.db.models import Exists, OuterRef, Q, QuerySet

from sandboxes import providers
from sandboxes.claims import Claim, note_progress
from sandboxes.db.clock import Clock
from sandboxes.hosts import registry
from sandboxes.lifecycle import checkpoint
from sandboxes.models import GONE_STATES, Sandbox
from sandboxes.models.state import Snapshot, SnapshotKind
from sandboxes.providers.base import WORKSPACE, FileStat, Provider
from sandboxes.providers.errors import ProviderError, Rejected
from sandboxes.state import workspace

log = structlog.get_logger(__name__)
VENDOR_SNAPSHOT_TTL = timedelta(days=7)  # stated to the vendor; also the net for a snapshot that no row names
EXPIRY_MARGIN = timedelta(hours=1)  # before the vendor's deletion, within which no wake begins to restore
MAX_NAME_CHARS = 100  # of a vendor's snapshot, as in its column
SOURCE = "vendor"  # of the state of a wake


def take(sandbox: Sandbox, provider: Provider, claim: Claim, *, clock: Clock) -> bool:
    """Have the vendor take a snapshot of a workspace whose state is stored, and record it. Return whether one is recorded.

    Best effort: a failure is logged. Raise ClaimLost. The sandbox has been claimed for its eviction. Nothing is taken of a
    workspace below the configured size, of one whose snapshots leave files out, nor in an eviction that a sweep continues: a
    call that hangs must not be repeated for ever."""
    newest = _find_cacheable(sandbox, provider)
    if newest is None:
        return False
    try:
        claim.keep()
        digest = digest_listing(provider.manifest(sandbox.ref, WORKSPACE))
        claim.keep()
        expires_at = clock() + VENDOR_SNAPSHOT_TTL
        taken = provider.snapshot_directory(sandbox.ref, WORKSPACE, ttl=VENDOR_SNAPSHOT_TTL)
    except ProviderError as failed:
        log.warning("vendor's snapshot not taken", sandbox=str(sandbox.pk), error=str(failed))
        return False
    if len(taken) > MAX_NAME_CHARS:  # a longer name cannot be recorded, and a part of it names another snapshot
        log.warning("vendor's snapshot not recorded", sandbox=str(sandbox.pk), name_chars=len(taken))
        _delete(provider, taken)
        return False
    checkpoint("vendor snapshot taken", sandbox)
    unrecorded = Snapshot.objects.filter(pk=newest.pk, forgotten_at__isnull=True, vendor_snapshot="")
    with claim.lock, transaction.atomic():
        recorded = claim.update() and unrecorded.update(
            vendor_snapshot=taken, vendor_host=sandbox.host_id, vendor_digest=digest, vendor_expires_at=expires_at
        )
    if not recorded:
        _delete(provider, taken)
    return bool(recorded)


def _find_cacheable(sandbox: Sandbox, provider: Provider) -> Snapshot | None:
    """Return the snapshot that was stored from this incarnation, if the vendor is to take one of the same state."""
    minimum = provider.min_directory_snapshot_bytes
    if minimum is None or sandbox.holder is None or sandbox.excludes or sandbox.tries > 1:
        return None
    newest = workspace.find_latest(sandbox.holder)
    own = (sandbox.pk, sandbox.incarnation, SnapshotKind.SLEEP, "")
    if newest is None or (newest.sandbox_id, newest.incarnation, newest.kind, newest.vendor_snapshot) != own:
        return None
    return newest if newest.size_bytes >= minimum else None


def digest_listing(manifest: Mapping[str, FileStat]) -> str:
    """Return the SHA-256 (hexadecimal) of the paths, kinds, modes and link targets, and of the sizes and times of files.

    Without stamps, which differ between two copies of the same files."""
    digest = hashlib.sha256()
    for path in sorted(manifest):
        stat = manifest[path]
        content = f"{stat.size} {stat.mtime}" if stat.kind == "file" else stat.target
        digest.update(f"{path}\0{stat.kind}\0{stat.mode:o}\0{content}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()


def restore(snapshot: Snapshot, sandbox: Sandbox, provider: Provider, *, now: datetime) -> bool:
    """Restore the vendor's snapshot of the same state into a new sandbox. Return whether /workspace has this state.

    False: /workspace is as after `clear`, or untouched, and the caller unpacks the stored snapshot. Raise ProviderError if the
    outcome is not known; the next start then uses the stored snapshot."""
    found = _find_restorable(snapshot, sandbox, provider, now=now)
    if found is None:
        return False
    try:
        provider.restore_directory(sandbox.ref, WORKSPACE, found.vendor_snapshot)
        note_progress()
        restored = digest_listing(provider.manifest(sandbox.ref, WORKSPACE))
        problem = "" if restored == found.vendor_digest else "The restored files are not those of the snapshot."
    except Rejected as rejected:
        problem = str(rejected)
    except ProviderError:
        _expire(found, now=now)
        raise
    if not problem:
        return True
    log.warning("vendor's snapshot not used", sandbox=str(sandbox.pk), snapshot=str(found.pk), error=problem)
    _expire(found, now=now)
    note_progress()
    provider.clear(sandbox.ref, WORKSPACE)
    return False


def _find_restorable(snapshot: Snapshot, sandbox: Sandbox, provider: Provider, *, now: datetime) -> Snapshot | None:
    """Return the row with the vendor's snapshot of the same objects, in the account of the sandbox."""
    if provider.min_directory_snapshot_bytes is None:
        return None
    same_state = Snapshot.objects.filter(key=snapshot.key, holder=snapshot.holder, forgotten_at__isnull=True)
    usable = same_state.filter(vendor_host=sandbox.host_id, vendor_expires_at__gt=now + EXPIRY_MARGIN)
    return usable.exclude(vendor_snapshot="").first()


def _expire(snapshot: Snapshot, *, now: datetime) -> None:
    """Let no further wake use the vendor's snapshot. The next sweep deletes it."""
    Snapshot.objects.filter(pk=snapshot.pk, vendor_snapshot=snapshot.vendor_snapshot).update(vendor_expires_at=now)


def find_unneeded(*, now: datetime) -> QuerySet[Snapshot]:
    """Select the snapshots whose copies at vendors are expired, superseded, or of a holder without a sandbox.

    Those of the accounts that this process reaches."""
    newer = Snapshot.objects.filter(holder=OuterRef("holder"), at__gt=OuterRef("at"), forgotten_at__isnull=True)
    held = Sandbox.objects.filter(holder=OuterRef("holder")).exclude(state__in=GONE_STATES)
    unneeded = (
        Q(vendor_expires_at__lte=now)
        | Q(forgotten_at__isnull=False)
        | Exists(newer.exclude(key=OuterRef("key")))
        | ~Exists(held)
    )
    recorded = Snapshot.objects.exclude(vendor_snapshot="").filter(vendor_host__in=registry.find_local_host_ids())
    return recorded.filter(unneeded).select_related("vendor_host").order_by("at")


def remove_unneeded(*, now: datetime, limit: int = 500) -> int:
    """Delete the vendors' snapshots that no wake needs. Return the number deleted. A failure is left to the next sweep."""
    removed = 0
    for snapshot in [] if settings.OBSERVE else find_unneeded(now=now).order_by("?")[:limit]:
        assert snapshot.vendor_host
        if _delete(providers.get_provider(snapshot.vendor_host.provider), snapshot.vendor_snapshot):
            removed += Snapshot.objects.filter(pk=snapshot.pk, vendor_snapshot=snapshot.vendor_snapshot).update(
                vendor_snapshot="", vendor_host=None, vendor_digest="", vendor_expires_at=None
            )
    return removed


def _delete(provider: Provider, identifier: str) -> bool:
    try:
        provider.delete_directory_snapshot(identifier)
    except ProviderError as failed:
        log.warning("vendor's snapshot not deleted", snapshot=identifier, error=str(failed))
        return False
    return True
