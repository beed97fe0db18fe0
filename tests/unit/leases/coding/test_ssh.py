"""Clone and push over ssh, with a real server on this host."""

import getpass
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from leases.coding import repositories
from leases.coding.checkout import fetch_base
from leases.coding.models import Repository
from leases.errors import RepositoryUnavailable
from tests.conftest import NOW
from tests.support.repositories import create_project, git
from tests.support.servers.ports import find_free_ports
from tests.support.servers.services import require_program
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.django_db]


@dataclass
class SshServer:
    port: int
    key: Path  # that the server accepts
    bare: Path

    @property
    def clone_url(self) -> str:
        return f"ssh://{getpass.getuser()}@127.0.0.1:{self.port}{self.bare}"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SshServer]:
    """Server with a project. Its host key is in the known hosts of the home directory."""
    sshd = require_program("sshd", "sshd", path="/usr/sbin")
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)
    [port] = find_free_ports()
    settings = {
        "Port": port, "ListenAddress": "127.0.0.1", "HostKey": tmp_path / "host_key", "PidFile": "none", "UsePAM": "no",
        "AuthorizedKeysFile": tmp_path / "user_key.pub", "StrictModes": "no", "PermitRootLogin": "prohibit-password",
        "PasswordAuthentication": "no",
    }  # fmt: skip
    (tmp_path / "sshd_config").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    (tmp_path / ".ssh").mkdir()
    host_key = " ".join((tmp_path / "host_key.pub").read_text().split()[:2])
    (tmp_path / ".ssh/known_hosts").write_text(f"[127.0.0.1]:{port} {host_key}\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    log = tmp_path / "sshd.log"
    process = subprocess.Popen([sshd, "-D", "-f", str(tmp_path / "sshd_config"), "-E", str(log)])
    try:
        wait_until(lambda: log.exists() and "listening" in log.read_text(), "the ssh server listens", within=20.0)
        yield SshServer(port, tmp_path / "user_key", create_project(tmp_path))
    finally:
        process.terminate()
        process.wait()


def save(server: SshServer, key: Path) -> Repository:
    return repositories.save("calc", clone_url=server.clone_url, ssh_key_path=str(key), now=NOW)[0]


def test_repository_is_cloned_and_a_branch_pushed(server: SshServer) -> None:
    row = save(server, server.key)
    with repositories.open_repository_git(row) as own:
        head = fetch_base(own, row, "main", depth=5)
        assert head == git(server.bare, "rev-parse", "main")
        own.run("push", "--quiet", row.clone_url, f"{head}:refs/heads/leasehold/task")
    assert git(server.bare, "rev-parse", "leasehold/task") == head


def test_another_key_and_an_unknown_host_are_refused(server: SshServer, tmp_path: Path) -> None:
    row = save(server, tmp_path / "host_key")
    with repositories.open_repository_git(row) as own, pytest.raises(RepositoryUnavailable, match="Permission denied"):
        fetch_base(own, row, "main", depth=5)
    (tmp_path / ".ssh/known_hosts").write_text("")
    row = save(server, server.key)
    with repositories.open_repository_git(row) as own, pytest.raises(RepositoryUnavailable, match="Host key verification"):
        fetch_base(own, row, "main", depth=5)
