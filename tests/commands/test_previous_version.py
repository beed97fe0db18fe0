"""Processes of the version before on the migrated schema: they serve until each of them is replaced.

The version before is the last commit of the remote branch (`TEST_BASE` names another one)."""

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.conf import settings

from tests.commands.manage import build_environment
from tests.lint.base import NO_BASE, REPO, find_base
from tests.support import previous_version
from tests.support.database import build_database_url, connect_to_server, copy_postgres_template, get_sqlite_template
from tests.support.servers.services import skip_or_fail

pytestmark = [
    pytest.mark.matrix("7 s of CPU; tests/unit/lint/test_migrations.py has the rules that keep the version before working"),
    pytest.mark.postgres("the schema of the database in production"),
    pytest.mark.django_db,  # the part of the database that the lane has
]


@pytest.fixture
def previous_tree(tmp_path: Path) -> Path:
    """Files of the version before. Without a remote branch the test is skipped, or fails where all services are required."""
    if not (base := find_base()):
        skip_or_fail(NO_BASE)
    archive = subprocess.run(["git", "archive", base], cwd=REPO, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(tmp_path / "tree", filter="data")
    return tmp_path / "tree"


@pytest.fixture
def database_url(tmp_path: Path) -> Iterator[str]:
    """URL of a database with the schema of this version."""
    if not settings.ON_POSTGRES:
        path = tmp_path / "leasehold.sqlite3"
        path.write_bytes(get_sqlite_template().read_bytes())
        yield f"sqlite:///{path}"
        return
    name = f"previous_version_{os.getpid()}"
    copy_postgres_template(name)
    yield build_database_url(name)
    with connect_to_server() as server:
        server.execute(f"DROP DATABASE {name} WITH (FORCE)")


def test_the_version_before_serves_on_the_migrated_schema(previous_tree: Path, database_url: str, tmp_path: Path) -> None:
    variables = {"DATABASE_URL": database_url, "LEASEHOLD_LOG_LEVEL": "ERROR"}
    paths = f"{previous_tree}{os.pathsep}{previous_tree / 'controlplane' / 'client'}"
    process = subprocess.run(
        [sys.executable, "-c", Path(previous_version.__file__).read_text()], cwd=previous_tree, text=True, capture_output=True,
        env=build_environment(tmp_path, PYTHONPATH=paths, HOME=str(tmp_path), **variables), timeout=300,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-4000:]
    failures = json.loads(process.stdout.splitlines()[-1])
    assert failures == [], process.stderr[-4000:]
