"""The providers by name. `get` answers one instance per process; a row remembers the name it was created with."""

from functools import cache

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from sandboxes.providers.base import Provider
from sandboxes.providers.docker.provider import DockerProvider, is_daemon_available
from sandboxes.providers.memory import MemoryProvider
from sandboxes.providers.process import ProcessProvider

PROVIDER_CLASSES: dict[str, type[Provider]] = {"docker": DockerProvider, "process": ProcessProvider, "memory": MemoryProvider}


@cache
def get_provider(name: str) -> Provider:
    """The provider of this name. ImproperlyConfigured if it does not isolate and that was not allowed."""
    made = PROVIDER_CLASSES[name]()
    if not made.isolated and not (settings.DEBUG or settings.ALLOW_UNISOLATED):
        raise ImproperlyConfigured(
            f"The {name} provider does not isolate: agents would act with this user's rights. "
            "Start a Docker daemon, or set LEASEHOLD_ALLOW_UNISOLATED=1."
        )
    return made


@cache
def get_default_provider_name() -> str:
    """What SANDBOX_PROVIDER says; for auto, docker if a daemon answers now, else process."""
    if settings.SANDBOX_PROVIDER != "auto":
        return str(settings.SANDBOX_PROVIDER)
    return "docker" if is_daemon_available() else "process"
