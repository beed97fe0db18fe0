"""Commands and servers on a database without tables, or with an earlier version's: one line names `manage.py migrate`."""

import fcntl
import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
from django.apps import apps
from django.core.management import get_commands
from django.db.models.signals import post_migrate, pre_migrate

from sandboxes.db import migrations
from tests.commands.manage import MANAGE, build_environment, run_manage
from tests.support.database import get_sqlite_template

EXPECTED = "Migrations are not applied: run manage.py migrate."
LEASE = "00000000-0000-0000-0000-000000000000"
AGENT = "did:plc:ada"
# Arguments with which each command reads or writes the database, and the exit codes that are not 1.
ARGUMENTS: dict[str, list[str]] = {
    "account": ["list"],
    "acquire": ["--agent", AGENT, "--environment", "game-1", "--type", "catan"],
    "atproto": ["list"],
    "budget": ["list"],
    "catalog": ["list"],
    "condition": ["game-1", "game.finished"],
    "costs": [],
    "create_key": ["--operator"],
    "createsuperuser": ["--username", "ada", "--email", "ada@example.org", "--no-input"],
    "demo": [],
    "egress": ["--proxy", "none"],
    "egress_credential": ["list"],
    "environment": ["list"],
    "environment_type": ["list"],
    "estimate": ["--agents", "1", "--hours-per-day", "1"],
    "exec": [LEASE, "--", "true"],
    "files": ["ls", LEASE],
    "hosts": [],
    "identity": ["list"],
    "installation": [],
    "join": ["game-1", "--agent", AGENT, "--type", "catan"],
    "key": ["list"],
    "lease": ["list"],
    "limits": ["pool", "default"],
    "meter": [],
    "pack": ["list"],
    "policy": ["list"],
    "pool": ["list"],
    "processes": ["list", LEASE],
    "project": ["list"],
    "qcluster": [],
    "quickstart": [],
    "quota": ["list"],
    "rate": ["list"],
    "release": [LEASE],
    "repository": ["list"],
    "restart": [LEASE],
    "revoke_key": ["0badc0de"],
    "rotate_key": ["0badc0de"],
    "run_agent": [LEASE],
    "run_once": ["--agent", AGENT, "--", "true"],
    "runner": [],
    "runs": ["list"],
    "sandboxes": ["list"],
    "second_factor": ["list"],
    "shells": ["list", LEASE],
    "sign_ins": ["--user", "ada"],
    "snapshot": ["take", LEASE],
    "state": ["ls", AGENT],
    "statements": ["list"],
    "stop": ["--all"],
    "sweep": [],
    "sync_schedules": [],
    "template": ["list"],
    "turn": [LEASE, "1"],
    "up": [],
    "webhooks": ["list"],
}
EXIT_CODES = {"run_once": 122}
# Servers, and one command of each way in which commands report errors.
SAMPLE = {"costs", "create_key", "egress", "lease", "qcluster", "run_once", "runner", "sweep", "up"}
OTHERWISE_TESTED = {"build_image", "catan_benchmark", "config", "check", "migrate"}  # need no database, or no migrations
# Each command runs in a child of one process, which has loaded the settings and opened no connection.
RUN_COMMANDS = """
import json, os, sys, tempfile
import manage
import django
os.environ["DJANGO_SETTINGS_MODULE"] = "controlplane.settings"
django.setup()
import controlplane.urls  # as system checks do
from django.core.management import get_commands, load_command_class
for name in json.loads(sys.argv[1]):
    load_command_class(get_commands()[name], name)  # once for all children
results = {}
for name, arguments in json.loads(sys.argv[1]).items():
    with tempfile.TemporaryFile("w+") as output:
        if not (pid := os.fork()):
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
            sys.argv = ["manage.py", name, *arguments]
            os.chdir(os.environ["HOME"])
            manage.main()
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        output.seek(0)
        results[name] = [status, output.read()]
print(json.dumps(results))
"""


def run_commands(home: Path, commands: Mapping[str, list[str]], **variables: str) -> dict[str, Any]:
    """Run commands on the SQLite database of `home`. Return exit code and output of each."""
    environment = build_environment(home, PYTHONPATH=str(MANAGE.parent), HOME=str(home), **variables)
    process = subprocess.run(
        [sys.executable, "-c", RUN_COMMANDS, json.dumps(commands)], env=environment, capture_output=True, text=True,
        timeout=300, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    results: dict[str, Any] = json.loads(process.stdout)
    return results


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(SAMPLE, id="sample"),
        pytest.param([*ARGUMENTS.keys() - SAMPLE], id="others", marks=pytest.mark.matrix("0.7 s of CPU for each command")),
    ],
)
def test_a_database_without_tables_is_explained_in_one_line(names: Collection[str], tmp_path: Path) -> None:
    in_children = {name: ARGUMENTS[name] for name in names if name != "up"}
    variables = {"LEASEHOLD_SECOND_FACTOR": "enrolled", "DJANGO_SUPERUSER_PASSWORD": "long-4-secret"}
    results = run_commands(tmp_path, in_children, **variables)
    if "up" in names:  # executes itself again, which a child of the script would not survive
        up = run_manage(tmp_path, "up")
        results["up"] = [up.returncode, up.stdout + up.stderr]
    assert results.keys() == {*names}
    for name, (status, output) in results.items():
        assert (status, output.count("\n")) == (EXIT_CODES.get(name, 1), 1), (name, output)
        assert EXPECTED in output, name


def test_every_command_of_the_project_is_listed() -> None:
    own = {name for name, app in get_commands().items() if "site-packages" not in (find_app_path(app) or "site-packages")}
    assert own - OTHERWISE_TESTED == set(ARGUMENTS)


def find_app_path(app: Any) -> str:
    return next((config.path for config in apps.get_app_configs() if config.name == app), "")


def test_a_database_that_lacks_the_last_migrations_is_explained_in_one_line(tmp_path: Path) -> None:
    shutil.copyfile(get_sqlite_template(), tmp_path / "leasehold.sqlite3")
    with sqlite3.connect(tmp_path / "leasehold.sqlite3") as database:
        database.execute("ALTER TABLE sandboxes_pool DROP COLUMN max_starting")
        last = "SELECT MAX(id) FROM django_migrations WHERE app = 'sandboxes'"
        database.execute(f"DELETE FROM django_migrations WHERE id >= ({last})")
    ran = run_commands(tmp_path, {"limits": ["pool", "default"], "sweep": [], "runs": ["stats"]})
    for name in ("limits", "sweep"):
        assert ran[name][0] == 1 and ran[name][1].count("\n") == 1 and EXPECTED in ran[name][1], ran[name]
    assert ran["runs"][0] == 0  # needs none of the missing tables and columns


def test_migrations_that_another_process_applies_are_named(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    with (tmp_path / "state" / migrations.LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for arguments in (["create_key", "--operator"], ["up"]):
            process = run_manage(tmp_path, *arguments)
            assert (process.returncode, process.stderr) == (1, f"CommandError: {migrations.MIGRATIONS_IN_PROGRESS}\n")
    process = run_manage(tmp_path, "create_key", "--operator")
    assert process.stderr == f"CommandError: {EXPECTED}\n"


def test_migrate_holds_its_lock_until_it_ends(settings: Any, tmp_path: Path) -> None:
    settings.STATE_DIR = tmp_path
    for signal in (pre_migrate, post_migrate):
        assert signal.has_listeners(apps.get_app_config("sandboxes"))
    migrations.note_begin()
    with (tmp_path / migrations.LOCK_FILE).open() as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    assert not migrations.is_in_progress()  # in this process
    migrations.note_end()
    with (tmp_path / migrations.LOCK_FILE).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert migrations.is_in_progress()
        migrations.note_begin()  # does not wait, and holds nothing
    assert not migrations.is_in_progress()
