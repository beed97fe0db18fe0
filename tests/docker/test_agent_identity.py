"""Identity of agents: which processes the gateway of a slot accepts."""

import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from sandboxes.agent import identity
from sandboxes.agent.identity import UnknownPeer, identify_container
from sandboxes.providers.base import AGENT_DIRECTORY
from tests.conftest import DOCKER_IMAGE
from tests.lanes.table import REPO

pytestmark = pytest.mark.docker
# Process 1 of a container: connects to the socket of another slot, and stays.
CONNECT_ELSEWHERE = """
import socket, time
connection = socket.socket(socket.AF_UNIX)
connection.connect("/elsewhere/agent.sock")
time.sleep(600)
"""


@pytest.fixture
def slots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[socket.socket, Path, Path]]:
    """Listener of a slot, its directory, and the directory of another slot."""
    own, other = tmp_path_factory.mktemp("own slot"), tmp_path_factory.mktemp("other")
    for directory in (own, other):
        directory.chmod(0o755)
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(own / "agent.sock"))
        (own / "agent.sock").chmod(0o666)
        listener.settimeout(30)
        listener.listen()
        yield listener, own, other


def start_container(script: str, mounts: dict[str, Path]) -> str:
    command = ["docker", "run", "-d", "--name", f"lh-identity-{uuid.uuid4().hex[:8]}", "--network", "none"]
    for point, directory in mounts.items():
        command += ["-v", f"{directory}:{point}:ro"]
    done = subprocess.run([*command, DOCKER_IMAGE, "python3", "-c", script], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.mark.parametrize("has_pidfds", [True, False])
@pytest.mark.parametrize("is_own", [True, False])
def test_process_1_is_accepted_on_the_socket_of_its_own_slot_alone(
    slots: tuple[socket.socket, Path, Path], is_own: bool, has_pidfds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the pid of a command that has connected were used again by process 1 of another sandbox."""
    listener, own, other = slots
    if not has_pidfds:
        monkeypatch.setattr(identity, "_open_peer", lambda connection: None)
    container = start_container(CONNECT_ELSEWHERE, {"/elsewhere": own, AGENT_DIRECTORY: own if is_own else other})
    try:
        connection, _ = listener.accept()
        if is_own:
            assert identify_container(connection, own) == container
        else:
            with pytest.raises(UnknownPeer, match="another slot"):
                identify_container(connection, own)
    finally:
        subprocess.run(["docker", "rm", "-f", container], check=True, stdout=subprocess.DEVNULL)


# In a pid namespace of its own: a command connects, leaves the socket to its child and ends, and process 1 of another container
# is started with its pid. A cgroup and a pid namespace are all that the container has.
STEERED = """
import os, socket, subprocess, sys, time
from pathlib import Path
from sandboxes.agent import identity

directory, container = Path(sys.argv[1]), sys.argv[2]
roots = [Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup")]  # of both versions of cgroups
cgroup = next(root / container for root in roots if (root / "cgroup.procs").exists())
cgroup.mkdir()
try:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(directory / "agent.sock"))
    listener.listen()
    connected, connecting = os.pipe()
    last_pid = Path("/proc/sys/kernel/ns_last_pid")
    last_pid.write_text("99")
    command = os.fork()
    if command == 0:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(directory / "agent.sock"))
        if os.fork() == 0:
            os.write(connecting, b"x")
            time.sleep(600)
        os._exit(0)
    os.read(connected, 1)
    os.waitpid(command, 0)
    last_pid.write_text(str(command - 2))  # the pid before is for the shell, whose fork is process 1 of the new namespace
    victim = subprocess.Popen(["sh", "-c", f"echo 0 > {cgroup}/cgroup.procs; exec unshare --pid --fork sleep 600"])
    children = Path(f"/proc/{victim.pid}/task/{victim.pid}/children")
    while not children.read_text():
        time.sleep(0.01)
    assert children.read_text().split() == [str(command)], (children.read_text(), command)
    accepted, _ = listener.accept()
    try:
        print("accepted as", identity.identify_container(accepted, directory))
    except identity.UnknownPeer as refused:
        print("refused:", refused)
    print("peer", identity._CREDENTIALS.unpack(accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0] == command)
finally:
    for process in cgroup.joinpath("cgroup.procs").read_text().split():
        os.kill(int(process), 9)
    for _ in range(200):
        try:
            cgroup.rmdir()
            break
        except OSError:
            time.sleep(0.05)
"""


@pytest.mark.parametrize("has_pidfds", [True, False])
def test_command_whose_pid_is_used_again_does_not_pass_for_another_container(tmp_path: Path, has_pidfds: bool) -> None:
    script = (
        STEERED
        if has_pidfds
        else STEERED.replace("\ndirectory", "\nidentity._open_peer = lambda connection: None\ndirectory", 1)
    )
    argv = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", script, str(tmp_path), uuid.uuid4().hex * 2]
    done = subprocess.run(argv, cwd=REPO, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "refused: The process is not visible from here, or has ended." if has_pidfds
        else next(line for line in done.stdout.splitlines() if line.endswith("is process 1 of a container of another slot.")),
        "peer True",
    ]  # fmt: skip
