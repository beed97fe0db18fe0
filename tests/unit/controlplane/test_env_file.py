"""The file with the variables of an installation, which has its secrets."""

import subprocess
from pathlib import Path

import pytest

from controlplane import env
from controlplane.checks import check_env_file
from tests.lanes.table import REPO


def test_env_file_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    make = ["sh", "-c", f"umask 022; exec make -s -f {REPO / 'Makefile'} .env"]
    subprocess.run(make, cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / ".env").stat().st_mode & 0o777 == 0o600
    assert "SECRET_KEY=" in (tmp_path / ".env").read_text()


def test_env_file_that_others_may_read_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / ".env"
    monkeypatch.setattr(env, "ENV_FILE", path)
    assert check_env_file(None) == []
    path.write_text("SECRET_KEY=x")
    path.chmod(0o640)
    assert [found.id for found in check_env_file(None)] == ["leasehold.W006"]
    path.chmod(0o600)
    assert check_env_file(None) == []
    monkeypatch.setattr(env, "ENV_FILE", None)
    assert check_env_file(None) == []
