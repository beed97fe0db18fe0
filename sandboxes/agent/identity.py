"""Identity of a process that connects to the gateway, from the kernel: its container, and whether it is process 1 there.

A command in a sandbox can reach the same socket as the agent. The kernel states the pid of the process that connected, in the
gateway's pid namespace, so a command cannot pass for process 1, and a container not for another one."""

import re
import socket
import struct
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_CONTAINER_PATTERN = re.compile(r"[0-9a-f]{64}")


class UnknownPeer(Exception):
    """The process that connected is not process 1 of a container that is visible from here."""


def identify_container(connection: socket.socket) -> str:
    """Return the id of the container whose process 1 opened this connection. Raise UnknownPeer.

    Process 1 must be one level below this process's pid namespace: a nested namespace inside a container has a process 1 as
    well. Under gVisor the peer is the runtime's process on the host, which is no process 1."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, _, _ = _CREDENTIALS.unpack(credentials)
    if pid <= 0:  # not visible in this pid namespace
        raise UnknownPeer("The process is not visible from here.")
    process = Path(f"/proc/{pid}")
    try:
        status, cgroup = (process / "status").read_text(), (process / "cgroup").read_text()
    except OSError as error:
        raise UnknownPeer(f"Process {pid} cannot be inspected: {error}") from error
    levels = next((line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")), [])
    containers = {*_CONTAINER_PATTERN.findall(cgroup)}
    if len(levels) != 2 or levels[1] != "1" or len(containers) != 1:
        raise UnknownPeer(f"Process {pid} is not process 1 of a container.")
    return containers.pop()
