"""Table of the sandbox providers. Reading it imports no provider: settings, models and billing take the names from here."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ProviderEntry:
    """Class of a provider, imported when the provider is first used.

    `extra` names the optional dependency of this package that the class needs; empty: none. A provider that is not for
    production is refused as SANDBOX_PROVIDER with DEBUG off, unless LEASEHOLD_ALLOW_UNISOLATED is set."""

    module: str
    class_name: str
    for_production: bool = True
    extra: str = ""
    proves_isolation: bool = False  # as the attribute of the class
    has_quotas: bool = False  # as the attribute of the class
    has_runtimes: bool = False  # SandboxSpec.runtime chooses what runs the processes of a sandbox

    @property
    def install_command(self) -> str:
        return f"pip install 'leasehold[{self.extra}]'"


PROVIDERS: Mapping[str, ProviderEntry] = {
    "docker": ProviderEntry("sandboxes.providers.docker.provider", "DockerProvider", has_runtimes=True),
    "kubernetes": ProviderEntry(
        "sandboxes.providers.kubernetes.provider",
        "KubernetesProvider",
        extra="kubernetes",
        proves_isolation=True,
        has_quotas=True,
        has_runtimes=True,
    ),
    "cloudflare": ProviderEntry("sandboxes.providers.cloudflare.provider", "CloudflareProvider"),
    "daytona": ProviderEntry("sandboxes.providers.daytona.provider", "DaytonaProvider", extra="daytona"),
    "langsmith": ProviderEntry("sandboxes.providers.langsmith.provider", "LangSmithProvider", extra="langsmith"),
    "modal": ProviderEntry("sandboxes.providers.modal.provider", "ModalProvider", extra="modal"),
    "runloop": ProviderEntry("sandboxes.providers.runloop.provider", "RunloopProvider", extra="runloop"),
    "process": ProviderEntry("sandboxes.providers.process.provider", "ProcessProvider", for_production=False),
    "memory": ProviderEntry("sandboxes.providers.memory.provider", "MemoryProvider", for_production=False),
}
RUNTIME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}"  # names of OCI runtimes; a RuntimeClass has at most 253 characters
MAX_RUNTIME_CHARS = 253
RUNTIME_PROVIDERS = tuple(name for name, entry in PROVIDERS.items() if entry.has_runtimes)
DEVELOPMENT_PROVIDERS = tuple(name for name, entry in PROVIDERS.items() if not entry.for_production)
