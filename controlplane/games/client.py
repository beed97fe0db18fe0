"""HTTP client of the game hosts: joins, turns, conditions and the final tables."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import requests


class ApiError(Exception):
    """The control plane responded with a problem document."""

    def __init__(self, message: str, *, status: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass
class Client:
    """HTTP client for agents and the game host, with one API key."""

    base: str
    key: str

    def call(self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout: float = 300) -> dict[str, Any]:
        response = requests.request(
            method, f"{self.base}/api/v1{path}", json=body, timeout=timeout, headers={"Authorization": f"Bearer {self.key}"}
        )
        if response.status_code >= 400:
            problem = response.json()
            raise ApiError(
                f"{method} {path}: {response.status_code} {problem.get('detail', '')}",
                status=response.status_code,
                code=str(problem.get("code", "")),
            )
        return dict(response.json())


@dataclass
class Player:
    """An agent in a game: its lease, and its turns so far. `skipped` counts turns without a legal action."""

    did: str
    client: Client
    lease: dict[str, Any] = field(default_factory=dict)
    turns: int = 0
    skipped: int = 0
    seconds: float = 0.0

    @property
    def label(self) -> str:
        """Name of the player in the game."""
        return self.did

    def join(self, environment: str, environment_type: str) -> None:
        self.lease = self.client.call(
            "POST", f"/environments/{environment}/join", {"agent_did": self.did, "environment_type": environment_type}
        )

    def take_turn(self, state: dict[str, Any]) -> dict[str, Any]:
        """Play the turn `turn_number` of the state, and return the turn. Raise ApiError."""
        number = state["turn_number"]
        turn = self.client.call("POST", f"/leases/{self.lease['id']}/turns", {"turn_number": number, "state": state})
        self.turns, self.seconds = number, self.seconds + turn["duration_seconds"]
        return turn


def post_condition(host: Client, environment: str, condition: str, *, agents: list[str] | None = None) -> list[str]:
    """Post a condition for these agents, None for all, and return the ids of the leases that it ended."""
    body = {"condition": condition} | ({} if agents is None else {"agent_did": agents})
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
