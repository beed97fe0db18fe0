"""Destruction of sandboxes without an owner, as ordered by an operator."""

from datetime import datetime, timedelta

import structlog

from sandboxes import audit
from sandboxes.errors import InstallationMismatch, SandboxNotListed
from sandboxes.installation_marks import has_recorded_mismatch
from sandboxes.inventory.ownership import find_ownerless, require_without_row
from sandboxes.lifecycle import checkpoint
from sandboxes.providers.errors import Missing

log = structlog.get_logger(__name__)


def destroy_ownerless(
    provider_name: str, name: str, *, now: datetime, grace: timedelta, actor: audit.Actor, reason: str, dry_run: bool = False
) -> bool:
    """Destroy a sandbox that an engine lists and no row names. Nothing in it is stored. Return whether it existed.

    1. List the engine again. Refuse a sandbox with a row, or younger than `grace`: its row may not be committed yet.
    2. Look for a row once more, immediately before the call: an adoption may have inserted one.
    3. Call the provider. "Missing" is success. The order is recorded before, because no transaction includes the call.

    Refused while the database does not match its store: an unknown sandbox may then belong to a later state of this
    installation. Raise the errors of find_ownerless, InstallationMismatch, and ProviderError if the outcome is unknown."""
    if has_recorded_mismatch():
        raise InstallationMismatch()
    try:
        found = find_ownerless(provider_name, name, now=now, grace=grace)
    except SandboxNotListed:
        return False
    if dry_run:
        return True
    checkpoint("removal checked", found)
    require_without_row(name, found.host_id)
    action, detail = "Destroy sandbox without owner", f"{provider_name} {name}: {reason}"
    with audit.record_order(audit.get_installation_row(), action, detail, actor=actor, now=now) as order:
        try:
            found.provider.destroy(found.listed.ref)
            order.result = "destroyed"
        except Missing:
            order.result = "did not exist any more"
            return False
        checkpoint("removal done", found)
    log.warning(
        "sandbox without an owner destroyed", name=name, provider=provider_name, owner=found.listed.owner,
        created_at=found.listed.created_at.isoformat(), actor=actor, reason=reason,
    )  # fmt: skip
    return True
