"""Runs manage.py as a separate process with a minimal environment."""

import os
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

MANAGE = Path(__file__).resolve().parents[2] / "manage.py"


def get_runtime_dir(home: Path) -> Path:
    """Return a short, unique directory for unix sockets."""
    return Path(tempfile.gettempdir(), f"lh-{zlib.crc32(str(home).encode()):08x}")


def build_environment(home: Path, **env: str) -> dict[str, str]:
    """Environment of a development installation on SQLite with the process provider, with all state below `home`."""
    return {
        "PATH": os.environ["PATH"],
        "LEASEHOLD_ENV_FILE": "",
        "SECRET_KEY": "for-tests-only-0123456789abcdef0123456789abcdef",
        "DEBUG": "1",
        "SANDBOX_PROVIDER": "process",
        "LEASEHOLD_STATE_DIR": str(home / "state"),
        "LEASEHOLD_RUNTIME_DIR": str(get_runtime_dir(home)),
        "DATABASE_URL": f"sqlite:///{home / 'leasehold.sqlite3'}",
        **env,
    }


def run_manage(home: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(MANAGE), *args], env=build_environment(home, **env), capture_output=True, text=True, timeout=120
    )
