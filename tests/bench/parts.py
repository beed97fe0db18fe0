"""The parts of the benchmark, each run in its own process with its own database."""

import importlib
import os
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.bench.server import REPO_DIR

# The parts, with their environment. The web servers of `places` and `lease_pages` have few threads:
# each plans every statement once.
PARTS: dict[str, dict[str, str]] = {
    "cases": {},
    "lease_pages": {"LEASEHOLD_WEB_WORKERS": "1", "LEASEHOLD_WEB_THREADS": "2"},
    "rates": {},
    "execs": {"LEASEHOLD_WEB_WORKERS": "1", "LEASEHOLD_WEB_THREADS": "48"},
    "streams": {"LEASEHOLD_WEB_WORKERS": "1", "LEASEHOLD_MAX_STREAMS_PER_LEASE": "500"},
    "files": {"LEASEHOLD_WEB_WORKERS": "1"},
    "places": {"LEASEHOLD_WEB_WORKERS": "1", "LEASEHOLD_WEB_THREADS": "2"},
    "release": {"LEASEHOLD_PARKED_NETWORKS": "0"},  # replacing them would compete with the deletes
    "api_overhead": {"SANDBOX_PROVIDER": "memory"},
    "footprint": {},
    "pool": {},
    "queue": {"SANDBOX_PROVIDER": "memory"},
    "hostile": {"LEASEHOLD_PARKED_NETWORKS": "0"},
    "egress": {"LEASEHOLD_LLM_MODEL": "gpt", "LEASEHOLD_LLM_RECORDS": "", "LEASEHOLD_RELAY_URL": ""},
    "state": {"LEASEHOLD_DATA_MOST_MIB": "1024"},
    "billing": {},
    "calls": {"SANDBOX_PROVIDER": "memory"},
    "growth": {"SANDBOX_PROVIDER": "memory"},
    "density": {"LEASEHOLD_WEB_THREADS": "32", "LEASEHOLD_MAX_SANDBOXES": "1000"},
}
DEFAULT_PARTS = ("cases", "rates", "lease_pages", "execs", "files", "places", "release")
DOCKER_PARTS = {"execs", "streams", "files", "places", "release", "hostile", "egress", "density"}
MAX_DESTROY_THREADS = 4


def run_part(part: str, name: str, database_url: str, directory: Path) -> None:
    configure(database_url, directory, **PARTS[part])
    from sandboxes import providers

    if part in DOCKER_PARTS and providers.get_default_provider_name() != "docker":
        print(f"\n{part}: skipped, no Docker daemon responds")
        return
    print(f"\n===== {part}, {name}, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores =====", flush=True)
    try:
        importlib.import_module(f"tests.bench.{'docker.' * (part in DOCKER_PARTS)}{part}").main()
    finally:
        destroy_sandboxes()


def configure(database_url: str, directory: Path, **env: str) -> None:
    """Set the environment for this process and its children, migrate the database and set up Django.

    The benchmark modules import models, so they are imported afterwards."""
    os.environ |= {
        "LEASEHOLD_ENV_FILE": "",
        "SECRET_KEY": uuid.uuid4().hex,
        "DEBUG": "0",
        "DATABASE_URL": database_url,
        "LEASEHOLD_STATE_DIR": str(directory / "state"),
        "LEASEHOLD_RUNTIME_DIR": str(directory / "run"),
        "LEASEHOLD_CREATES_PER_MINUTE": "0",
        "LEASEHOLD_LOG_LEVEL": "WARNING",
        "LEASEHOLD_ALLOW_UNISOLATED": "1",
        "DJANGO_SETTINGS_MODULE": "controlplane.settings",
        **env,
    }
    subprocess.run([sys.executable, str(REPO_DIR / "manage.py"), "migrate", "--verbosity", "0"], check=True)
    import django

    django.setup()


def destroy_sandboxes() -> None:
    """Destroy the sandboxes of all pools at their providers."""
    from django.test import override_settings

    from sandboxes import providers
    from sandboxes.models import Pool

    for pool in Pool.objects.all():
        provider = providers.get_provider(pool.provider or providers.get_default_provider_name())
        refs = [sandbox.ref for sandbox in provider.list(str(pool.owner))]
        with ThreadPoolExecutor(MAX_DESTROY_THREADS) as threads:
            list(threads.map(provider.destroy, refs))
        with override_settings(PARKED_NETWORKS=0):
            provider.prepare_starts()
