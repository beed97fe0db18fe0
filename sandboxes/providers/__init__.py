"""Registry of sandbox providers. Rows store the name of the provider that created them.

To add a provider:

1. Implement `Provider` (base.py) in a module or package of this directory. State the class attributes truthfully.
2. Add the class to PROVIDER_CLASSES below.
3. Add its name to the choices of SANDBOX_PROVIDER in controlplane/settings.py.
4. Add it to the conformance suite in tests/conformance/conftest.py, and make every test pass."""

from functools import cache

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from sandboxes.providers.base import Provider
from sandboxes.providers.docker.provider import DockerProvider, is_daemon_available
from sandboxes.providers.memory import MemoryProvider
from sandboxes.providers.observed import refuse_destroy
from sandboxes.providers.process import ProcessProvider

PROVIDER_CLASSES: dict[str, type[Provider]] = {
    provider.name: provider for provider in (DockerProvider, ProcessProvider, MemoryProvider)
}


def get_provider(name: str) -> Provider:
    """Return this process's instance of a provider. In observe mode it refuses to destroy.

    Raise ImproperlyConfigured if the provider does not isolate sandboxes, unless DEBUG or ALLOW_UNISOLATED is set."""
    provider = _create_provider(name)
    return refuse_destroy(provider) if settings.OBSERVE else provider


@cache
def _create_provider(name: str) -> Provider:
    provider = PROVIDER_CLASSES[name]()
    if not provider.isolated and not (settings.DEBUG or settings.ALLOW_UNISOLATED):
        raise ImproperlyConfigured(
            f"The {name} provider does not isolate: agents would act with this user's rights. "
            "Start a Docker daemon, or set LEASEHOLD_ALLOW_UNISOLATED=1."
        )
    return provider


def get_default_provider_name() -> str:
    """Return SANDBOX_PROVIDER. For `auto`: docker if a daemon is available at the first call, else process."""
    return _choose_provider_name() if settings.SANDBOX_PROVIDER == "auto" else str(settings.SANDBOX_PROVIDER)


@cache
def _choose_provider_name() -> str:
    return "docker" if is_daemon_available() else "process"
