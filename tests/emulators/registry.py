"""Emulators by vendor."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from controlplane.remote_settings import VENDORS
from sandboxes.providers.remote.configuration import KEY_VARIABLES, OPTION_VARIABLES
from tests.emulators.base import Emulator
from tests.emulators.cloudflare import CloudflareEmulator
from tests.emulators.daytona import DaytonaEmulator
from tests.emulators.kubernetes.emulator import KubernetesEmulator
from tests.emulators.langsmith import LangSmithEmulator
from tests.emulators.machine import machine_directory
from tests.emulators.modal import ModalEmulator
from tests.emulators.runloop import RunloopEmulator

EMULATORS: dict[str, Callable[[Path, int], Emulator]] = {
    "cloudflare": CloudflareEmulator,
    "daytona": DaytonaEmulator,
    "langsmith": LangSmithEmulator,
    "modal": ModalEmulator,
    "runloop": RunloopEmulator,
}


def build_environment(name: str, emulator: Emulator) -> dict[str, str]:
    """Return the environment variables with which the provider reaches an emulator."""
    options = {variable: emulator.options[option] for option, variable in OPTION_VARIABLES.get(name, {}).items()}
    return {KEY_VARIABLES[name]: emulator.key, VENDORS[name].url_variable: emulator.api_url, **options}


@contextmanager
def serve(name: str, parent: Path, port: int = 0) -> Iterator[Emulator]:
    """Run an emulator in threads of this process."""
    with machine_directory(parent) as directory:
        emulator = EMULATORS[name](directory, port)
        threading.Thread(target=emulator.serve_forever, daemon=True).start()
        try:
            yield emulator
        finally:
            emulator.close()


@contextmanager
def serve_kubernetes(parent: Path, port: int = 0, *, has_agent_sandbox: bool = False) -> Iterator[KubernetesEmulator]:
    """Run a Kubernetes emulator in threads of this process. It needs a Docker Engine."""
    with machine_directory(parent) as directory:
        cluster = KubernetesEmulator(directory, port, has_agent_sandbox=has_agent_sandbox)
        threading.Thread(target=cluster.serve_forever, daemon=True).start()
        try:
            yield cluster
        finally:
            cluster.close()
