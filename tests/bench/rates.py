"""Rates of short calls through HTTP: renew against a bare Django view on the same server, batch renewal, pages of leases.

The clients are the connections of one process, each with a request in flight and a lease of its own, so that the clients take
little of the machine. The threads and processes of the web server are the defaults of the database, or the environment's."""

import json
import os
import re
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

from django.conf import settings
from django.utils import timezone

from leases import api_keys
from tests.bench import bare_view
from tests.bench.cases import list_database_pids
from tests.bench.measure import Timing, list_process_tree, print_report, read_cpu_seconds, refresh_statistics
from tests.bench.server import ApiClient, run_control_plane
from tests.bench.table import Aim

SECONDS_PER_ROUND = float(os.environ.get("BENCH_SECONDS", "2"))
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "5"))
WARMUP_SECONDS = 0.5
CONNECTION_COUNTS = (1, 8, 32)
BATCH_SIZES = (100, 1000)
MIN_RENEWALS_PER_SECOND = 2000  # if the bare view reaches BARE_VIEW_RATE calls a second
BARE_VIEW_RATE = 2400
DID = "did:web:bench.invalid"
RECEIVE_BYTES = 1 << 18
RECEIVE_TIMEOUT_SECONDS = 60.0
LAST_CHUNK = b"0\r\n\r\n"
CONTENT_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")


@dataclass
class LoadCase(Timing):
    """One request per connection, repeated. A call does `units` units of work, which `rate` counts."""

    requests: Sequence[bytes]
    units: int = 1
    elapsed: float = field(default=0.0, init=False)

    @property
    def rate(self) -> float:
        return self.units * len(self.seconds) / self.elapsed


def main() -> None:
    with run_control_plane(settings_module=bare_view.SETTINGS_MODULE) as (up, port):
        print(f"{settings.WEB_WORKERS} web processes with {settings.WEB_THREADS} threads each", flush=True)
        key = api_keys.issue_key([DID], now=timezone.now())[1]
        api = ApiClient(port, key)
        leases = [acquire(api, f"held-{number}") for number in range(max(BATCH_SIZES))]

        def list_pids() -> Sequence[int]:
            return [*list_process_tree(up.pid), *list_database_pids()]

        refresh_statistics()
        for count in CONNECTION_COUNTS:
            bench_renewals(port, api, leases[:count], list_pids)
        for size in BATCH_SIZES:
            bench_batch(port, api, leases[:size], list_pids)


def acquire(api: ApiClient, environment: str) -> str:
    request = {"agent_did": DID, "environment_type": "catan", "environment_id": environment}
    return str(api.post("/leases", request)["id"])


def bench_renewals(port: int, api: ApiClient, leases: Sequence[str], list_pids: Callable[[], Iterable[int]]) -> None:
    alone = LoadCase("bare view alone", [api.build_request("POST", f"/alone/{pk}") for pk in leases])
    behind = LoadCase("bare view, product's middleware", [api.build_request("POST", f"/api/v1/bare/{pk}") for pk in leases])
    renew = LoadCase("renew", [api.build_request("POST", f"/api/v1/leases/{pk}/renew") for pk in leases])
    cases = [alone, behind, renew]
    run_loads(cases, port, list_pids)
    if len(leases) == max(CONNECTION_COUNTS):
        least = MIN_RENEWALS_PER_SECOND if alone.rate >= BARE_VIEW_RATE else None
        renew.aim = Aim(f"renew, {len(leases)} connections : bare view", rate_ratio=0.85, rate=least)
    print_report(f"renew, {len(leases)} connections, one lease each", cases, raw=alone)


def bench_batch(port: int, api: ApiClient, leases: Sequence[str], list_pids: Callable[[], Iterable[int]]) -> None:
    """Measure batches on one connection. The rates are renewals per second, of the single renewal as well."""
    single = LoadCase("renew", [api.build_request("POST", f"/api/v1/leases/{leases[0]}/renew")])
    request = api.build_request("POST", "/api/v1/leases/renew", json.dumps({"ids": leases}).encode())
    batch = LoadCase(f"batch of {len(leases)}", [request], units=len(leases))
    batch.aim = Aim(f"renewals in batches of {len(leases)}", rate=15_000)
    run_loads([single, batch], port, list_pids)
    print_report(f"renew {len(leases)} leases in one call", [single, batch], raw=single)


def run_loads(cases: Sequence[LoadCase], port: int, list_pids: Callable[[], Iterable[int]]) -> None:
    """Run the cases in turn, each for a short time per round, so that changes of the machine's speed affect all of them."""
    with ExitStack() as stack:
        loads = [(case, stack.enter_context(closing(Load(port, case.requests)))) for case in cases]
        for _, load in loads:
            load.run(WARMUP_SECONDS)
        for _ in range(ROUNDS):
            for case, load in loads:
                pids = list(list_pids())
                cpu, started = read_cpu_seconds(pids), time.perf_counter()
                case.seconds += load.run(SECONDS_PER_ROUND)
                case.elapsed += time.perf_counter() - started
                case.cpu += read_cpu_seconds(pids) - cpu


class Load:
    """Connections of one process. Each repeats its request and sends the next one after the answer."""

    def __init__(self, port: int, requests: Sequence[bytes]) -> None:
        self._selector = selectors.DefaultSelector()
        for request in requests:
            connection = socket.create_connection(("127.0.0.1", port), timeout=RECEIVE_TIMEOUT_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(connection, selectors.EVENT_READ, Exchange(connection, request))

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            key.data.connection.close()
        self._selector.close()

    def run(self, seconds: float) -> list[float]:
        """Repeat the requests for this time, and return the durations of all calls."""
        durations, deadline = [], time.perf_counter() + seconds
        exchanges = [key.data for key in self._selector.get_map().values()]
        for exchange in exchanges:
            exchange.send()
        open_count = len(exchanges)
        while open_count:
            for key, _ in self._selector.select(RECEIVE_TIMEOUT_SECONDS):
                exchange = key.data
                if not exchange.receive():
                    continue
                now = time.perf_counter()
                durations.append(now - exchange.sent_at)
                if now < deadline:
                    exchange.send()
                else:
                    open_count -= 1
        return durations


class Exchange:
    """Request and answer on one connection."""

    def __init__(self, connection: socket.socket, request: bytes) -> None:
        self.connection, self.sent_at = connection, 0.0
        self._request, self._received = request, b""

    def send(self) -> None:
        self._received, self.sent_at = b"", time.perf_counter()
        self.connection.sendall(self._request)

    def receive(self) -> bool:
        """Receive the next bytes. Return whether the answer is complete."""
        received = self.connection.recv(RECEIVE_BYTES)
        self._received += received
        head, separator, body = self._received.partition(b"\r\n\r\n")
        if not received or not self._received.startswith(b"HTTP/1.1 200 "):
            raise SystemExit(f"unexpected answer: {self._received[:500]!r}")
        if not separator:
            return False
        length = CONTENT_LENGTH.search(head)
        return len(body) == int(length[1]) if length else body.endswith(LAST_CHUNK)
