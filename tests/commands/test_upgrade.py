"""Migrations of rows of earlier versions: existing games go on, and tasks are closed."""

import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.matrix("two sets of migrations take 12 s of CPU")
MANAGE = Path(__file__).resolve().parents[2] / "manage.py"
BEFORE = "0031_queued_run_attempts"  # last migration without projects
THEN = "2026-01-01 00:00:00"
EMPTY_VALUES = {"integer": 0, "bigint": 0, "bool": 0, "real": 0.0, "datetime": THEN, "text": "[]", "blob": b""}


def migrate(path: Path, *target: str) -> None:
    environment = os.environ | {"DATABASE_URL": f"sqlite:///{path}"}
    subprocess.run([sys.executable, str(MANAGE), "migrate", "--verbosity", "0", *target], env=environment, check=True)


def insert(database: sqlite3.Connection, table: str, **values: Any) -> None:
    """Insert a row. Columns that must have a value, and are not given, get an empty one of their type."""
    for _, name, kind, is_required, default, is_key in database.execute(f"PRAGMA table_info({table})"):
        if is_required and default is None and not is_key and name not in values:
            values[name] = EMPTY_VALUES.get(kind.split("(")[0].split()[0].lower(), "")
    columns, places = ", ".join(f'"{name}"' for name in values), ", ".join("?" * len(values))
    database.execute(f"INSERT INTO {table} ({columns}) VALUES ({places})", [*values.values()])


@pytest.fixture(scope="module")
def upgraded(tmp_path_factory: pytest.TempPathFactory) -> sqlite3.Connection:
    """Database of an earlier version, migrated: an open game, an ended one, and a coding task."""
    path = tmp_path_factory.mktemp("upgrade") / "leasehold.sqlite3"
    migrate(path, "leases", BEFORE)
    database = sqlite3.connect(path)
    ended = {"ended_at": THEN, "end_reason": "operator"}
    insert(database, "leases_environment", id="game", type_id="catan", outcome_text="")
    insert(database, "leases_environment", id="over", type_id="catan", outcome_text='{"winner": "a"}', **ended)
    insert(database, "leases_environment", id="draw", type_id="catan", outcome_text="", **ended)
    insert(database, "leases_environment", id="task", type_id="coding", outcome_text="")
    insert(database, "leases_environmenttype", name="fixes", ttl=1, max_ttl=1)
    insert(database, "leases_environment", id="fix", type_id="fixes", outcome_text="")
    insert(database, "leases_repository", id=1, name="calc", project="owner/calc")
    insert(database, "leases_codingtask", id="1" * 32, environment_id="fix", repository_id=1, status="open")
    [[pool]] = database.execute("SELECT id FROM sandboxes_pool LIMIT 1")
    leases = (("did:plc:a", "game"), ("did:plc:a", "game"), ("did:plc:b", "game"), ("did:plc:a", "task"), ("did:plc:b", "over"))
    for number, (did, environment) in enumerate(leases):
        insert(
            database, "leases_lease", id=f"{number:032}", agent_did=did, environment_id=environment, pool_id=pool,
            environment_type_id="catan", status="expired", **ended,
        )  # fmt: skip
    insert(database, "leases_agentkey", prefix="p", digest="d", first_digest="d", dids='["did:plc:a", "did:plc:b"]')
    database.commit()
    database.close()
    migrate(path)
    return sqlite3.connect(path)


def test_games_and_their_types_are_open_and_tasks_are_not(upgraded: sqlite3.Connection) -> None:
    types = dict(upgraded.execute("SELECT name, open_to_project FROM leases_environmenttype"))
    assert types == {"catan": 1, "rpg": 1, "coding": 0, "run": 0, "fixes": 0}
    environments = dict(upgraded.execute("SELECT id, open_to_project FROM leases_environment"))
    assert environments == {"game": 1, "over": 1, "draw": 1, "task": 0, "fix": 0}


def test_agents_with_a_lease_are_participants(upgraded: sqlite3.Connection) -> None:
    rows = upgraded.execute("SELECT environment_id, agent_did FROM leases_participant ORDER BY 1, 2").fetchall()
    assert rows == [("game", "did:plc:a"), ("game", "did:plc:b"), ("over", "did:plc:b"), ("task", "did:plc:a")]


def test_outcomes_become_rows(upgraded: sqlite3.Connection) -> None:
    rows = upgraded.execute("SELECT environment_id, ended_at, text FROM leases_environmentoutcome").fetchall()
    assert rows == [("over", THEN, '{"winner": "a"}')]


def test_everything_belongs_to_the_default_project(upgraded: sqlite3.Connection) -> None:
    projects = "SELECT project_id FROM leases_environment UNION SELECT project_id FROM leases_agentkey"
    assert upgraded.execute(f"{projects} UNION SELECT project_id FROM leases_repository").fetchall() == [(1,)]
    assert upgraded.execute("SELECT id, name FROM leases_project").fetchall() == [(1, "default")]
    assert upgraded.execute("SELECT forge_project FROM leases_repository").fetchall() == [("owner/calc",)]
