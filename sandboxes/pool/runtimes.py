"""Runtime of a pool's sandboxes: the OCI runtime or RuntimeClass that runs their processes, such as gVisor."""

from sandboxes import providers
from sandboxes.models import Pool, Sandbox
from sandboxes.providers.errors import Rejected
from sandboxes.providers.registry import RUNTIME_PROVIDERS


def get_runtime(pool: Pool, provider_name: str) -> str:
    """Return the runtime of the pool's sandboxes at their next start. Empty: the engine's default."""
    return pool.runtime or providers.get_default_runtime(provider_name, pool.name)


def require_runtime(sandbox: Sandbox) -> str:
    """Return the runtime that a sandbox starts with. Raise Rejected if its provider cannot choose one."""
    if sandbox.runtime and sandbox.provider not in RUNTIME_PROVIDERS:
        raise Rejected(
            f"The pool {sandbox.pool} names a runtime ({sandbox.runtime}), and the {sandbox.provider} provider has none."
        )
    return sandbox.runtime
