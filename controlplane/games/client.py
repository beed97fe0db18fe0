"""HTTP client of the game hosts: joins, turns, conditions and the final tables."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import requests

RETRY_INTERVAL_SECONDS = 0.5
MAX_REJOINS = 3  # for one turn


class ApiError(Exception):
    """The control plane responded with a problem document."""

    def __init__(self, message: str, problem: Mapping[str, Any]) -> None:
        self.code = str(problem.get("code", ""))
        super().__init__(message)


class RetryableError(ApiError):
    """The same request may succeed later."""


@dataclass
class Client:
    """HTTP client for agents and the game host, with one API key.

    A request that may succeed later, or whose server is gone, is repeated for `patience_seconds`. All requests of a game are
    idempotent: a lease by agent and environment, a turn by its number, the end by its condition."""

    base: str
    key: str
    patience_seconds: float = 0.0

    def call(self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout: float = 300) -> dict[str, Any]:
        deadline = time.monotonic() + self.patience_seconds
        while True:
            try:
                return self._send(method, path, body, timeout)
            except (requests.ConnectionError, requests.Timeout, RetryableError):
                if time.monotonic() > deadline:
                    raise
            time.sleep(RETRY_INTERVAL_SECONDS)

    def _send(self, method: str, path: str, body: dict[str, Any] | None, timeout: float) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.key}"}
        response = requests.request(method, f"{self.base}/api/v1{path}", json=body, timeout=timeout, headers=headers)
        document: dict[str, Any] = response.json()
        if response.status_code < 400:
            return document
        error = RetryableError if document.get("retryable") else ApiError
        raise error(f"{method} {path}: {response.status_code} {document.get('detail', '')}", document)


@dataclass
class Player:
    """An agent in a game: its lease, and its turns so far. `skipped` counts turns without a legal action."""

    did: str
    client: Client
    lease: dict[str, Any] = field(default_factory=dict)
    turns: int = 0
    skipped: int = 0
    seconds: float = 0.0
    lost_leases: list[str] = field(default_factory=list)
    environment: str = ""
    environment_type: str = ""

    @property
    def label(self) -> str:
        """Name of the player in the game."""
        return self.did

    def join(self, environment: str, environment_type: str) -> None:
        """Acquire a lease and start its sandbox, with the agent's /data. Idempotent."""
        self.environment, self.environment_type = environment, environment_type
        body = {"agent_did": self.did, "environment_type": environment_type}
        self.lease = self.client.call("POST", f"/environments/{environment}/join", body)

    def take_turn(self, state: dict[str, Any]) -> dict[str, Any]:
        """Play the turn `turn_number` of the state, and return the turn. Raise ApiError.

        If the sandbox is lost in the turn, the agent joins again, and plays the turn in a new sandbox. The game has not seen an
        action of the lost turn, so no action is executed twice."""
        turn = self._request_turn({"turn_number": state["turn_number"], "state": state})
        self.turns, self.seconds = state["turn_number"], self.seconds + turn["duration_seconds"]
        return turn

    def _request_turn(self, body: dict[str, Any]) -> dict[str, Any]:
        for _ in range(MAX_REJOINS):
            try:
                return self.client.call("POST", f"/leases/{self.lease['id']}/turns", body)
            except ApiError as error:
                lease = self.client.call("GET", f"/leases/{self.lease['id']}")
                if error.code not in ("lease_ended", "sandbox_lost") or lease["end_reason"] != "lost":
                    raise
            self.lost_leases.append(self.lease["id"])
            self.join(self.environment, self.environment_type)
        return self.client.call("POST", f"/leases/{self.lease['id']}/turns", body)


def post_condition(
    host: Client, environment: str, condition: str, *, agents: list[str] | None = None, outcome: str = ""
) -> list[str]:
    """Post a condition for these agents, None for all, and return the ids of the leases that it ended.

    `outcome` is recorded if the environment ends with its last lease."""
    body: dict[str, Any] = {"condition": condition}
    if agents is not None:
        body["agent_did"] = agents
    if outcome:
        body["outcome"] = outcome
    return list(host.call("POST", f"/environments/{environment}/conditions", body)["ended"])


def build_result_rows(players: list[Player]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the final table, the heading first."""
    yield ("agent", "lease", "status", "provider", "turns", "skipped", "seconds alive")
    for player in players:
        lease = player.client.call("GET", f"/leases/{player.lease['id']}")
        yield (
            player.did,
            player.lease["id"],
            f"{lease['status']} ({lease['end_reason']})" if lease["end_reason"] else lease["status"],
            player.lease["sandbox"]["provider"],
            str(player.turns),
            str(player.skipped),
            f"{lease['seconds_alive']:.1f}",
        )


def build_cost_rows(host: Client, environment: str) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the cost table, the heading first: sandboxes and model calls of an environment, by agent."""
    report = host.call("GET", f"/costs?by=agent&environment={environment}")
    yield ("agent", "hours", "USD")
    for total in report["results"]:
        yield (total["key"], total["hours"] or "", total["usd"])
    yield ("total", "", report["total_usd"])
