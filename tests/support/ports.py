"""Ports for servers that are started a moment later: `python -m tests.support.ports COUNT`."""

import random
import socket
import sys
from contextlib import ExitStack, suppress
from pathlib import Path


def find_free_ports(count: int = 1) -> list[int]:
    """Ports on which nobody listens. None is of those that the kernel gives to whoever asks for any, or connects: one of them
    might have been given away before it is used."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: list[int] = []
    with ExitStack() as held:
        while len(found) < count:
            port = random.SystemRandom().randrange(10_000, max(lowest, 20_000))
            with suppress(OSError):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
                found.append(port)
    return found


if __name__ == "__main__":
    print(*find_free_ports(int(sys.argv[1])))
