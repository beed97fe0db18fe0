"""HTTP client of the load: idempotency keys, retries, and a record of every attempt."""

import http.client
import json
import random
import threading
import time
import uuid
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

ATTEMPT_TIMEOUT_SECONDS = 60.0
GIVE_UP_SECONDS = 300.0  # a request without a final answer after this time is stuck
RETRY_SECONDS = (0.2, 2.0)  # without a Retry-After
MAX_RETRY_SECONDS = 5.0
RETRIED_CONFLICTS = ("busy", "idempotency_in_progress")


class Stuck(Exception):
    """No final answer within GIVE_UP_SECONDS."""


class LeaseEnded(Exception):
    """410: the lease has ended. The argument is its end reason."""


class BudgetExhausted(Exception):
    """402: a budget of the agent is exhausted."""


@dataclass(frozen=True)
class Attempt:
    """One HTTP request. Times are of the monotonic clock; the status is 0 if there was no answer."""

    kind: str
    started_at: float
    ended_at: float
    status: int
    code: str


@dataclass(frozen=True)
class Answer:
    """Final answer of a request."""

    status: int
    body: Any

    @property
    def ok(self) -> bool:
        return self.status < 300

    @property
    def code(self) -> str:
        return str(self.body.get("code", "")) if isinstance(self.body, dict) else ""


@dataclass
class AttemptLog:
    """Attempts of all clients."""

    attempts: list[Attempt] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, attempt: Attempt) -> None:
        with self.lock:
            self.attempts.append(attempt)


@dataclass
class Client:
    """Client of one agent, used by one thread. A POST keeps its idempotency key over all attempts."""

    port: int
    key: str
    log: AttemptLog
    random: random.Random

    def post(self, kind: str, path: str, body: dict[str, Any] | None = None) -> Answer:
        """Send until there is a final answer. Raise LeaseEnded, BudgetExhausted and Stuck."""
        headers = {"Content-Type": "application/json", "Idempotency-Key": uuid.UUID(int=self.random.getrandbits(128)).hex}
        return self._request(kind, "POST", path, json.dumps(body or {}), headers)

    def get(self, kind: str, path: str) -> Answer:
        """Send until there is a final answer. Raise LeaseEnded, BudgetExhausted and Stuck."""
        return self._request(kind, "GET", path, None, {})

    def _request(self, kind: str, method: str, path: str, content: str | None, headers: dict[str, str]) -> Answer:
        give_up_at = time.monotonic() + GIVE_UP_SECONDS
        answer = Answer(0, "no attempt")
        while time.monotonic() < give_up_at:
            answer, retry_after = self._attempt(kind, method, path, content, headers)
            if answer.status == 410:
                raise LeaseEnded(answer.body.get("end_reason") or answer.code)
            if answer.status == 402:
                raise BudgetExhausted(answer.code)
            is_temporary = answer.status in (0, 429, 503) or (answer.status == 500 and answer.code == "internal")
            if not is_temporary and not (answer.status == 409 and answer.code in RETRIED_CONFLICTS):
                return answer
            time.sleep(min(retry_after or self.random.uniform(*RETRY_SECONDS), MAX_RETRY_SECONDS))
        raise Stuck(f"{kind} {method} {path}: {answer}")

    def _attempt(
        self, kind: str, method: str, path: str, content: str | None, headers: dict[str, str]
    ) -> tuple[Answer, float | None]:
        started_at, retry_after = time.monotonic(), None
        try:
            with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=ATTEMPT_TIMEOUT_SECONDS)) as connection:
                authorized = {"Authorization": f"Bearer {self.key}", **headers}
                connection.request(method, f"/api/v1{quote(path, safe='/?=&')}", content, authorized)
                response = connection.getresponse()
                answer = Answer(response.status, _decode(response.read()))
                retry_after = response.getheader("Retry-After")
        except (OSError, http.client.HTTPException) as error:
            answer = Answer(0, f"{type(error).__name__}: {error}")
        self.log.add(Attempt(kind, started_at, time.monotonic(), answer.status, answer.code))
        return answer, float(retry_after) if retry_after else None


def _decode(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return content.decode(errors="replace")
