"""PostgreSQL behind PgBouncer. In transaction mode each transaction of a client may run on another connection."""

import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest

from tests.support.servers.ports import find_free_ports
from tests.support.servers.services import require_environment, require_program
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.matrix("installation behind PgBouncer")]
SERVER_CONNECTIONS = 2  # fewer than the clients, so that they take turns
CONFIGURATION = """
[databases]
* = host=127.0.0.1 port={server_port} user={user}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = {mode}
default_pool_size = {connections}
"""


@pytest.fixture
def pooled_url() -> Iterator[str]:
    with run_pooler("transaction", SERVER_CONNECTIONS) as url:
        yield url


@contextmanager
def run_pooler(mode: str, connections: int) -> Iterator[str]:
    """URL of a new database behind a PgBouncer of this test."""
    [server_url] = require_environment("postgres", "TEST_POSTGRES_URL")
    program = require_program("pgbouncer", "pgbouncer", path="/usr/sbin")
    server, [port] = urlsplit(server_url), find_free_ports()
    name = f"pooled_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    directory = Path(tempfile.mkdtemp(prefix="lh-pooler-"))
    directory.chmod(0o755)
    configuration = directory / "pgbouncer.ini"
    configuration.write_text(
        CONFIGURATION.format(server_port=server.port, user=server.username, port=port, mode=mode, connections=connections)
    )
    as_user = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []  # PgBouncer refuses to run as root
    process = subprocess.Popen([*as_user, str(program), str(configuration)], stderr=subprocess.DEVNULL)
    url = f"postgres://{server.username}@127.0.0.1:{port}/{name}"
    try:
        wait_until(lambda: responds(url), "PgBouncer responds")
        yield url
    finally:
        process.terminate()
        process.wait(30)
        shutil.rmtree(directory)
        with psycopg.connect(server_url, autocommit=True) as connection:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


def responds(url: str) -> bool:
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return False
    return True


@pytest.mark.parametrize(("mode", "works"), [("transaction", True), ("session", False)])
def test_leases_behind_a_pooler_in_transaction_mode_need_the_setting(
    pooled_url: str, tmp_path: Path, mode: str, works: bool
) -> None:
    ended = run_program("-m", "tests.e2e.pooled_workload", url=pooled_url, mode=mode, directory=tmp_path)
    if works:
        assert (ended.returncode, ended.stdout) == (0, "ok\n"), ended.stderr
    else:
        assert ended.returncode and "prepared statement" in ended.stderr


def run_program(*argv: str, url: str, mode: str, directory: Path) -> "subprocess.CompletedProcess[str]":
    own = ("LEASEHOLD_", "TEST_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    env = {
        **inherited, "LEASEHOLD_ENV_FILE": "", "SECRET_KEY": "for-tests-only-" + "0" * 50, "DATABASE_URL": url,
        "LEASEHOLD_DATABASE_POOLER": mode, "SANDBOX_PROVIDER": "memory", "LEASEHOLD_ALLOW_UNISOLATED": "1",
        "LEASEHOLD_STATE_DIR": str(directory / "state"), "LEASEHOLD_RUNTIME_DIR": str(directory / "run"),
        "DJANGO_SETTINGS_MODULE": "controlplane.settings",
    }  # fmt: skip
    return subprocess.run([sys.executable, *argv], env=env, capture_output=True, text=True, timeout=300)


CHECK = ("manage.py", "check", "--tag", "configuration")


@pytest.mark.parametrize(("pool_mode", "connections"), [("transaction", 1), ("transaction", 2), ("session", 1), ("session", 2)])
def test_a_pooler_in_transaction_mode_that_is_not_stated_is_refused(tmp_path: Path, pool_mode: str, connections: int) -> None:
    with run_pooler(pool_mode, connections) as url:
        ended = run_program(*CHECK, url=url, mode="session", directory=tmp_path)
        assert (ended.returncode, "leasehold.E019" in ended.stderr) == ((1, True) if pool_mode == "transaction" else (0, False))
        stated = run_program(*CHECK, url=url, mode="transaction", directory=tmp_path)
        assert stated.returncode == 0, stated.stderr


def test_a_direct_connection_is_accepted(tmp_path: Path) -> None:
    [url] = require_environment("postgres", "TEST_POSTGRES_URL")
    ended = run_program(*CHECK, url=url, mode="session", directory=tmp_path)
    assert ended.returncode == 0, ended.stderr
