"""Decision whether a sandbox that an engine lists has an owner, made anew before each act on it."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from sandboxes import providers
from sandboxes.errors import SandboxHasOwner, SandboxNotListed, SandboxTooYoung
from sandboxes.hosts import registry
from sandboxes.hosts.bound_provider import bind_provider
from sandboxes.inventory.listings import ListingState, list_engine
from sandboxes.inventory.names import has_row
from sandboxes.models import Pool
from sandboxes.providers.base import Provider, ProviderSandbox
from sandboxes.providers.errors import Unavailable


@dataclass(frozen=True)
class Ownerless:
    """Sandbox at an engine without a row, with the provider bound to this engine. `pool` has its owner label, if any does."""

    listed: ProviderSandbox
    provider: Provider
    host_id: UUID
    pool: Pool | None


def find_ownerless(provider_name: str, name: str, *, now: datetime, grace: timedelta) -> Ownerless:
    """List an engine again, and return the sandbox of this name if no row names it.

    Raise SandboxNotListed, SandboxHasOwner, SandboxTooYoung, and Unavailable if the engine has no complete listing. Raise
    ImproperlyConfigured for a provider that cannot be used here."""
    host_id = registry.get_local_host_id(provider_name)
    engine = list_engine(provider_name)
    if engine.state != ListingState.LISTED:
        raise Unavailable(engine.error or f"The {provider_name} provider cannot list sandboxes.", provider=provider_name)
    listed = next((each for each in engine.sandboxes if each.name == name), None)
    if listed is None:
        raise SandboxNotListed(f"The {provider_name} provider lists no sandbox {name[:80]}.")
    require_without_row(name, host_id)
    if listed.created_at > now - grace:
        raise SandboxTooYoung()
    pool = next((pool for pool in Pool.objects.all() if str(pool.owner) == listed.owner), None)
    provider = bind_provider(providers.get_provider(provider_name), host_id)
    return Ownerless(listed, provider, host_id, pool)


def require_without_row(name: str, host_id: UUID) -> None:
    """Raise SandboxHasOwner if a row of this host names the sandbox."""
    if has_row(name, host_id):
        raise SandboxHasOwner()
