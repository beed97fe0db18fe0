"""Clients: each thread sends the requests of its own leases, on one connection for each host."""

import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

REQUEST_TIMEOUT_SECONDS = 120.0
RETRIED_STATUSES = (429, 503)
MAX_ATTEMPTS = 20
BULK_SIZE = 1000  # leases in one request to renew many


@dataclass
class Lease:
    """Lease of one sandbox. `host` is the index of the host to which its requests go."""

    number: int
    host: int
    pk: str = ""


@dataclass
class Outcomes:
    """Durations of successful requests in seconds, and answers other than success, of one kind of request."""

    seconds: list[float] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)  # answered with success after a repetition
    failures: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def get_percentile(self, share: float) -> float:
        ordered = sorted(self.seconds)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else float("nan")


class Connections(threading.local):
    """Open connections of one thread, by host."""

    def __init__(self, ports: Sequence[int], key: str) -> None:
        self.ports, self.headers = ports, {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self.open: dict[int, http.client.HTTPConnection] = {}

    def send(self, host: int, path: str, body: dict[str, Any] | None) -> tuple[int, dict[str, Any]]:
        """Send one POST. Return status and body; status 0 if there was no answer."""
        connection = self.open.get(host)
        if connection is None:
            connection = http.client.HTTPConnection("127.0.0.1", self.ports[host], timeout=REQUEST_TIMEOUT_SECONDS)
            self.open[host] = connection
        try:
            connection.request("POST", f"/api/v1{path}", json.dumps(body or {}), self.headers)
            response = connection.getresponse()
            content = json.loads(response.read() or b"{}")
            return response.status, content
        except (OSError, http.client.HTTPException, ValueError) as error:
            connection.close()
            del self.open[host]
            return 0, {"code": type(error).__name__}


class Clients:
    """Requests by `count` threads."""

    def __init__(self, ports: Sequence[int], key: str, count: int) -> None:
        self.connections, self.count = Connections(ports, key), count

    def post(self, outcomes: Outcomes, host: int, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send until the answer is final, and record it. Return the body, which is empty after a failure."""
        began = time.perf_counter()
        for _ in range(MAX_ATTEMPTS):
            status, content = self.connections.send(host, path, body)
            code = f"{status} {content.get('code', '')}".strip()
            if 200 <= status < 300:
                with outcomes.lock:
                    outcomes.seconds.append(time.perf_counter() - began)
                return content
            if status and status not in RETRIED_STATUSES:
                break
            with outcomes.lock:
                outcomes.refusals[code] += 1
            time.sleep(random.uniform(0.1, 1.0))
        with outcomes.lock:
            outcomes.failures[code] += 1
        return {}

    def for_each(self, leases: Iterable[Lease], act: Callable[[Lease], object]) -> None:
        with ThreadPoolExecutor(self.count) as executor:
            for _ in executor.map(act, leases):
                pass

    def acquire(self, outcomes: Outcomes, lease: Lease) -> None:
        body = {
            "agent_did": f"did:web:agent-{lease.number}.invalid", "environment_type": "catan",
            "environment_id": f"game-{lease.number // 4}",
        }  # fmt: skip
        lease.pk = str(self.post(outcomes, lease.host, "/leases", body).get("id", ""))

    def execute(self, outcomes: Outcomes, lease: Lease) -> None:
        if lease.pk:
            self.post(outcomes, lease.host, f"/leases/{lease.pk}/exec", {"argv": ["true"]})

    def renew(self, outcomes: Outcomes, lease: Lease) -> None:
        if lease.pk:
            self.post(outcomes, lease.host, f"/leases/{lease.pk}/renew")

    def release(self, outcomes: Outcomes, lease: Lease) -> None:
        if lease.pk:
            self.post(outcomes, lease.host, f"/leases/{lease.pk}/release")

    def renew_many(self, outcomes: Outcomes, leases: Sequence[Lease], *, hosts: int) -> None:
        """Renew all leases with as few requests as possible."""
        held = [lease.pk for lease in leases if lease.pk]
        for number, first in enumerate(range(0, len(held), BULK_SIZE)):
            self.post(outcomes, number % hosts, "/leases/renew", {"ids": held[first : first + BULK_SIZE]})
