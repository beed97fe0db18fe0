"""Runs management commands: in this process, or manage.py as a separate process with a minimal environment."""

import importlib.util
import os
import subprocess
import sys
import tempfile
import zlib
from io import StringIO
from pathlib import Path
from types import ModuleType

import pytest
from django.core.management import call_command

from controlplane import env as environment

MANAGE = Path(__file__).resolve().parents[2] / "manage.py"


def get_runtime_dir(home: Path) -> Path:
    """Return a short, unique directory for unix sockets."""
    return Path(tempfile.gettempdir(), f"lh-{zlib.crc32(str(home).encode()):08x}")


def build_environment(home: Path, **env: str) -> dict[str, str]:
    """Environment of a development installation on SQLite with the process provider, with all state below `home`."""
    return {
        "PATH": os.environ["PATH"], "LEASEHOLD_ENV_FILE": "", "DEBUG": "1", "SANDBOX_PROVIDER": "process",
        "LEASEHOLD_PARKED_NETWORKS": "0",
        "SECRET_KEY": "for-tests-only-0123456789abcdef0123456789abcdef",
        "LEASEHOLD_STATE_DIR": str(home / "state"), "LEASEHOLD_RUNTIME_DIR": str(get_runtime_dir(home)),
        "DATABASE_URL": f"sqlite:///{home / 'leasehold.sqlite3'}", **env,
    }  # fmt: skip


def run_manage(home: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(MANAGE), *args], env=build_environment(home, **env), capture_output=True, text=True, timeout=120
    )


def load_settings(monkeypatch: pytest.MonkeyPatch, home: Path, **env: str) -> ModuleType:
    """Execute the settings module under the environment of `run_manage`. Django's settings stay as they are."""
    variables = build_environment(home, **env)
    monkeypatch.setattr(os, "environ", variables)
    monkeypatch.setattr(environment, "ENV_VARIABLES", {})
    monkeypatch.setattr(environment, "PROCESS_VARIABLE_NAMES", frozenset(variables))
    spec = importlib.util.find_spec("controlplane.settings")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call(*args: object) -> str:
    """Run a management command in this process. Return what it writes to stdout."""
    out = StringIO()
    call_command(*map(str, args), stdout=out)
    return out.getvalue()
