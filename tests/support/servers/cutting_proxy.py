"""TCP proxy that cuts connections after the server has answered."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

CHUNK_BYTES = 1 << 16


class CuttingProxy:
    """Proxy in front of a server. Each entry of `cuts` ends one connection: after that many bytes of the response to a request
    that contains `needle`. The server has served the request by then, or goes on to do so."""

    def __init__(self, upstream: str) -> None:
        split = urlsplit(upstream)
        self._upstream = (split.hostname, split.port)
        self.cuts: list[int] = []
        self.needle = b""
        self.requests: list[bytes] = []  # with the needle
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._relay, args=(client,), daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _relay(self, client: socket.socket) -> None:
        """Relay one connection in both directions."""
        with client, socket.create_connection(self._upstream) as server, suppress(OSError):
            budget: list[int] = []  # bytes of the response before the cut
            back = threading.Thread(target=self._relay_back, args=(server, client, budget), daemon=True)
            back.start()
            while data := client.recv(CHUNK_BYTES):
                if self.needle and self.needle in data:
                    self.requests.append(data)
                    if self.cuts:
                        budget.append(self.cuts.pop(0))
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)
            back.join()

    def _relay_back(self, server: socket.socket, client: socket.socket, budget: list[int]) -> None:
        with suppress(OSError):
            while data := server.recv(CHUNK_BYTES):
                client.sendall(data[: budget[0]] if budget else data)
                if budget:
                    budget[0] -= len(data)
                    if budget[0] <= 0:
                        break
        with suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)


@contextmanager
def run_cutting_proxy(upstream: str) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(upstream)
    threading.Thread(target=proxy.serve, daemon=True).start()
    try:
        yield proxy
    finally:
        proxy.close()
