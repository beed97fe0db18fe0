"""Identity of a process that connects to the gateway, from the kernel: its container, and whether it is process 1 there.

A command in a sandbox can reach the same socket as the agent. The kernel states the process that connected, in the gateway's
pid namespace, so a command cannot pass for process 1. A pid is used again once the counter has come round: the process is held
by a pidfd where the kernel has them for peers, and its mounts show for which slot its container was made, so a container cannot
pass for another one."""

import errno
import os
import re
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

AGENT_DIRECTORY = "/run/leasehold-agent"  # mount point of a slot's directory in its container
SO_PEERPIDFD = 77  # Linux 6.5
_CREDENTIALS, _DESCRIPTOR = struct.Struct("3i"), struct.Struct("i")  # pid, uid, gid
_CONTAINER_PATTERN = re.compile(r"[0-9a-f]{64}")
_ESCAPE_PATTERN = re.compile(r"\\([0-7]{3})")  # of spaces and backslashes in mountinfo


class UnknownPeer(Exception):
    """The process that connected is not process 1 of a container of this slot that is visible from here."""


class Mount(NamedTuple):
    """Line of mountinfo (proc_pid_mountinfo(5)): file system, path within the file system, and mount point."""

    device: str
    root: str
    point: str


def identify_container(connection: socket.socket, directory: Path) -> str:
    """Return the id of the container whose process 1 opened this connection. Raise UnknownPeer.

    The container has the directory of the connection's socket at AGENT_DIRECTORY. Process 1 must be one level below this
    process's pid namespace: a nested namespace inside a container has a process 1 as well. Under gVisor the peer is the
    runtime's process on the host, which is no process 1."""
    with _peer(connection) as pid:
        process = Path(f"/proc/{pid}")
        try:
            status, cgroup = (process / "status").read_text(), (process / "cgroup").read_text()
            levels = next((line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")), [])
            containers = {*_CONTAINER_PATTERN.findall(cgroup)}
            if len(levels) != 2 or levels[1] != "1" or len(containers) != 1:
                raise UnknownPeer(f"Process {pid} is not process 1 of a container.")
            sources = [(mount.device, mount.root) for mount in read_mounts(process) if mount.point == AGENT_DIRECTORY]
        except OSError as error:
            raise UnknownPeer(f"Process {pid} cannot be inspected: {error}") from error
    if sources[-1:] != [find_source(directory)]:
        raise UnknownPeer(f"Process {pid} is process 1 of a container of another slot.")
    return containers.pop()


@contextmanager
def _peer(connection: socket.socket) -> Iterator[int]:
    """Yield the pid of the process that connected. Raise UnknownPeer, also if the process has ended during the block."""
    pidfd = _open_peer(connection)
    if pidfd is None:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, _, _ = _CREDENTIALS.unpack(credentials)
        if pid <= 0:  # not visible in this pid namespace
            raise UnknownPeer("The process is not visible from here.")
        yield pid
        return
    try:
        pid = _read_pid(pidfd)
        if pid <= 0:
            raise UnknownPeer("The process is not visible from here, or has ended.")
        yield pid
        if _read_pid(pidfd) != pid:
            raise UnknownPeer(f"Process {pid} has ended.")
    finally:
        os.close(pidfd)


def _open_peer(connection: socket.socket) -> int | None:
    """Return a pidfd of the process that connected, None if the kernel does not have them. Raise UnknownPeer."""
    try:
        content = connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, _DESCRIPTOR.size)
    except OSError as error:
        if error.errno == errno.ENOPROTOOPT:
            return None
        raise UnknownPeer(f"The process has ended: {error}") from error
    (descriptor,) = _DESCRIPTOR.unpack(content)
    return int(descriptor)


def _read_pid(pidfd: int) -> int:
    """Return the pid of a process; -1 once it has ended, 0 if it is not visible in this pid namespace."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines() if ":" in line)
    return int(fields.get("Pid", "0"))


def find_source(directory: Path) -> tuple[str, str]:
    """Return the device and path that a bind mount of a directory has in mountinfo."""
    path = os.path.realpath(directory)
    own = [mount for mount in read_mounts(Path("/proc/self")) if f"{path}/".startswith(f"{mount.point.rstrip('/')}/")]
    longest = max(len(mount.point) for mount in own)
    mount = [mount for mount in own if len(mount.point) == longest][-1]  # the last one covers those before it
    relative = path[len(mount.point.rstrip("/")) :]
    return mount.device, f"{mount.root.rstrip('/')}{relative}" or "/"


def read_mounts(process: Path) -> list[Mount]:
    """Return the mounts of a process, in their order. Raise OSError."""
    lines = [line.split(" ") for line in (process / "mountinfo").read_text().splitlines()]
    return [Mount(fields[2], _unescape(fields[3]), _unescape(fields[4])) for fields in lines]


def _unescape(text: str) -> str:
    return _ESCAPE_PATTERN.sub(lambda match: chr(int(match[1], 8)), text)
