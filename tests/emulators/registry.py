"""Emulators by vendor."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from controlplane.remote_settings import VENDORS
from sandboxes.providers.remote.configuration import KEY_VARIABLES
from tests.emulators.cloudflare import CloudflareEmulator
from tests.emulators.daytona import DaytonaEmulator
from tests.emulators.langsmith import LangSmithEmulator
from tests.emulators.machine import machine_directory
from tests.emulators.runloop import RunloopEmulator
from tests.emulators.vendor import VendorEmulator

EMULATORS: dict[str, type[VendorEmulator]] = {
    "cloudflare": CloudflareEmulator,
    "daytona": DaytonaEmulator,
    "langsmith": LangSmithEmulator,
    "runloop": RunloopEmulator,
}


def build_environment(name: str, emulator: VendorEmulator) -> dict[str, str]:
    """Return the environment variables with which the provider reaches an emulator."""
    return {KEY_VARIABLES[name]: emulator.key, VENDORS[name].url_variable: emulator.api_url}


@contextmanager
def serve(name: str, parent: Path, port: int = 0) -> Iterator[VendorEmulator]:
    """Run an emulator in threads of this process."""
    with machine_directory(parent) as directory:
        emulator = EMULATORS[name](directory, port)
        threading.Thread(target=emulator.serve_forever, daemon=True).start()
        try:
            yield emulator
        finally:
            emulator.close()
