"""A control plane whose processes run as an ordinary user in the group of the engine's socket."""

import json
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from docker.utils import parse_host

from sandboxes.agent.runs import AgentClient
from sandboxes.providers.docker.engine import Engine
from tests.commands.manage import MANAGE, build_environment, get_runtime_dir
from tests.conftest import DOCKER_IMAGE
from tests.e2e.test_kill import Fleet
from tests.support.database import get_sqlite_template
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.docker]
USER = 61234  # no account has this id
NEEDED_MODULES = ("django", "controlplane.supervisor")


def find_socket_group() -> int:
    """Group id of the engine's socket."""
    return os.stat(parse_host(os.environ.get("DOCKER_HOST")).removeprefix("http+unix://")).st_gid


def find_closed_directory(path: Path) -> Path | None:
    """Return the outermost directory above this one that other users may not enter, for example root's home."""
    return next((parent for parent in reversed(path.parents) if not parent.stat().st_mode & stat.S_IXOTH), None)


def build_namespace_script(scratch: Path) -> str:
    """Shell commands that make Python and the checkout accessible in a mount namespace, wherever they are.

    Each closed directory on the way is covered by an empty one that all may enter, into which the needed ones are moved."""
    needed = sorted({Path(sys.base_prefix), Path(sys.prefix).resolve(), MANAGE.resolve().parent})
    closed = {path: directory for path in needed if (directory := find_closed_directory(path))}
    covers = sorted({str(directory) for directory in closed.values()})
    pairs = [(shlex.quote(str(path)), shlex.quote(str(scratch / f"kept-{number}"))) for number, path in enumerate(closed)]
    keep = [f"mkdir -p {kept}; mount --bind {path} {kept}" for path, kept in pairs]
    cover = [f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote(directory)}" for directory in covers]
    move = [f"mkdir -p {path}; mount --move {kept} {path}" for path, kept in pairs]
    return "\n".join(["set -e", *keep, *cover, *move, ""])


class UserFleet(Fleet):
    """A control plane on SQLite, run by an ordinary user. Its directory belongs to that user."""

    def __init__(self, path: Path, scratch: Path, **env: str) -> None:
        super().__init__(path, **env)
        script = scratch / "as-user"
        identity = f"--reuid {USER} --regid {USER} --groups {find_socket_group()} --inh-caps=-all"
        script.write_text(f'{build_namespace_script(scratch)}exec setpriv {identity} --no-new-privs "$@"\n')
        self.launcher = ("unshare", "--mount", "sh", str(script), sys.executable)

    def require_access(self) -> None:
        """Fail, with the reason, if the user cannot read the program. A start would wait for a minute."""
        script = f"import {', '.join(NEEDED_MODULES)}; open({str(MANAGE)!r}).close()"
        done = subprocess.run([*self.launcher, "-c", script], cwd=MANAGE.parent, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"user {USER} cannot read the checkout or its packages:\n{done.stderr}"

    def wait_for_agents(self) -> None:
        """Wait until the agent of each container is connected. The engine executes a command that waits for it too long."""
        for name in self.list_containers():
            container = Engine().container_id(name)
            assert container
            agent = AgentClient(get_runtime_dir(self.path) / "gateway.sock", container)
            wait_until(lambda agent=agent: agent.responds(timeout=20), f"the agent of {name} is connected", within=60)

    def manage(self, *argv: str) -> str:
        command = [*self.launcher, str(MANAGE), *argv]
        done = subprocess.run(
            command, env=build_environment(self.path, **self.env), capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def fleet(docker_ready: None) -> Iterator[UserFleet]:
    if os.geteuid() != 0:
        pytest.skip("Only root can start processes as another user.")
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="lh-") as name, tempfile.TemporaryDirectory(dir="/tmp") as scratch:
        path = Path(name)
        os.chown(path, USER, USER)
        fleet = UserFleet(
            path,
            Path(scratch),
            DATABASE_URL=f"sqlite:///{path / 'leasehold.sqlite3'}",
            SANDBOX_PROVIDER="docker",
            LEASEHOLD_SANDBOX_MEMORY_MIB="128",
            LEASEHOLD_SANDBOX_IMAGE=DOCKER_IMAGE,
            HOME=str(path),
        )
        shutil.copyfile(get_sqlite_template(), path / "leasehold.sqlite3")
        os.chown(path / "leasehold.sqlite3", USER, USER)
        fleet.update(f"UPDATE sandboxes_pool SET owner = '{uuid.uuid4().hex}'")  # each installation lists its own containers
        fleet.require_access()
        yield fleet
        fleet.remove()


def test_execs_files_processes_and_snapshots_need_no_root(fleet: UserFleet) -> None:
    fleet.up()
    fleet.key = json.loads(fleet.manage("create_key", "--operator", "--json"))["key"]
    assert {os.stat(f"/proc/{pid}").st_uid for pid in fleet.find_processes()} == {USER}
    lease = fleet.join(1)
    fleet.wait_for_agents()

    def call(method: str, path: str, content: Any = None) -> Any:
        status, answer = fleet.request(method, f"/leases/{lease}{path}", content)
        assert 200 <= status < 300, answer
        return answer

    call("PUT", "/files/notes/today.md", b"hello")
    done = call("POST", "/exec", {"argv": ["sh", "-c", "cat notes/today.md; stat -c %u notes/today.md; echo kept >/data/kept"]})
    assert (done["exit_code"], done["stdout"]) == (0, "hello10001\n")
    process = call("POST", "/processes", {"argv": ["sh", "-c", "echo begun; sleep 300"]})
    assert call("GET", f"/processes/{process['process_id']}")["state"] == "running"
    killed = call("POST", "/exec", {"argv": ["sh", "-c", "setsid sleep 300 & sleep 300"], "timeout_seconds": 1})
    assert killed["timed_out"]
    snapshot = call("POST", "/snapshots", {})
    call("POST", "/exec", {"argv": ["rm", "notes/today.md"]})
    call("POST", "/restore", {"snapshot_id": snapshot["id"]})
    assert call("POST", "/exec", {"argv": ["cat", "/data/kept", "notes/today.md"]})["stdout"] == "kept\nhello"
    call("POST", "/release", {})
    assert "exec by the engine" not in fleet.read_log()
