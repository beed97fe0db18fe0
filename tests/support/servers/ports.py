"""Free TCP ports for servers to be started: `python -m tests.support.servers.ports COUNT`."""

import random
import socket
import sys
from contextlib import ExitStack, suppress
from pathlib import Path


def find_free_ports(count: int = 1) -> list[int]:
    """Return free ports outside the ephemeral range, so that the kernel does not assign them before they are used."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports: list[int] = []
    with ExitStack() as sockets:
        while len(ports) < count:
            port = random.SystemRandom().randrange(10_000, max(lowest, 20_000))
            with suppress(OSError):
                sockets.enter_context(socket.create_server(("127.0.0.1", port)))
                ports.append(port)
    return ports


if __name__ == "__main__":
    print(*find_free_ports(int(sys.argv[1])))
