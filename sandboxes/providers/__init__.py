"""Providers of this process. Rows store the name of the provider that created them.

To add a provider:

1. Implement `Provider` (base.py) in a module or package of this directory. State the class attributes truthfully.
2. Add a line to PROVIDERS in registry.py.
3. Add its name to the conformance suite in tests/conformance/conftest.py, and make every test pass."""

from functools import cache
from importlib import import_module

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from sandboxes.providers.base import Provider
from sandboxes.providers.observed import refuse_destroy
from sandboxes.providers.registry import PROVIDERS


def get_provider(name: str) -> Provider:
    """Return this process's instance of a provider. In observe mode it refuses to destroy.

    Raise ImproperlyConfigured if its packages are not installed, or if it does not isolate sandboxes, unless DEBUG or
    ALLOW_UNISOLATED is set."""
    provider = _create_provider(name)
    return refuse_destroy(provider) if settings.OBSERVE else provider


@cache
def _create_provider(name: str) -> Provider:
    provider = load_class(name)()
    # One that proves its isolation needs an instance for that. Starts are refused until then (sandboxes.hosts.registry).
    may_run = provider.proves_isolation or provider.isolated
    if not may_run and not (settings.DEBUG or settings.ALLOW_UNISOLATED):
        raise ImproperlyConfigured(
            f"The {name} provider does not isolate: agents would act with this user's rights. "
            "Start a Docker daemon, or set LEASEHOLD_ALLOW_UNISOLATED=1."
        )
    return provider


def load_class(name: str) -> type[Provider]:
    """Import the class of a provider. Raise ImproperlyConfigured with the command that installs what is missing."""
    entry = PROVIDERS[name]
    try:
        found: type[Provider] = getattr(import_module(entry.module), entry.class_name)
    except ModuleNotFoundError as error:
        if not entry.extra or (error.name or "").startswith("sandboxes"):
            raise
        raise ImproperlyConfigured(
            f"The {name} provider needs the package {error.name}, which is not installed: {entry.install_command}"
        ) from None
    return found


def get_default_provider_name() -> str:
    """Return SANDBOX_PROVIDER. For `auto`: docker if a daemon is available at the first call, else process."""
    return _choose_provider_name() if settings.SANDBOX_PROVIDER == "auto" else str(settings.SANDBOX_PROVIDER)


@cache
def _choose_provider_name() -> str:
    from sandboxes.providers.docker.provider import is_daemon_available

    return "docker" if is_daemon_available() else "process"


def get_default_image(name: str) -> str:
    """Return the image of sandboxes of a provider whose pool names none. Empty: the default of the vendor."""
    if name in settings.REMOTE_PROVIDERS:
        return str(settings.REMOTE_PROVIDERS[name].image)
    return str(settings.SANDBOX_IMAGE)


def get_default_runtime(name: str, pool: str) -> str:
    """Return the runtime of sandboxes of a pool that names none, of a provider with runtimes. Empty: the engine's default."""
    if name == "kubernetes":
        return str(settings.KUBERNETES.find_runtime_class(pool))
    return str(settings.DOCKER_RUNTIME) if name == "docker" else ""
