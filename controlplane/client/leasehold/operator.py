"""Operator: requests with an operator's API key that concern more than one lease."""

from __future__ import annotations

from types import TracebackType
from typing import Self
from urllib.parse import quote

from . import schemas
from .exchange import Operation, RetryPolicy, build_post, send
from .settings import Settings
from .transports import Transport


class Operator:
    """Stop of all work of an agent, an environment or the installation.

    with Operator() as operator:
        stopped = operator.stop_agent("did:web:agent.example")
        for failure in stopped["failures"]: ...

    Work that begins afterwards is not affected, unless `end_leases` ends the leases, too."""

    def __init__(self, *, url: str | None = None, api_key: str | None = None, retries: RetryPolicy | None = None) -> None:
        self._settings = Settings.load(url, api_key, retries)
        self._transport = Transport(self._settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._transport.close()

    def stop_agent(self, did: str, *, end_leases: bool = False) -> schemas.Stopped:
        return self._stop(f"/agents/{quote(did, safe='')}/stop", end_leases)

    def stop_environment(self, environment: str, *, end_leases: bool = False) -> schemas.Stopped:
        return self._stop(f"/environments/{quote(environment, safe='')}/stop", end_leases)

    def stop_all(self, *, end_leases: bool = False) -> schemas.Stopped:
        """Stop the work of all agents. The key must have no list of pools."""
        return self._stop("/stop", end_leases)

    def _stop(self, path: str, end_leases: bool) -> schemas.Stopped:
        def send_request() -> Operation[schemas.Stopped]:
            answer: schemas.Stopped = (
                yield from send(build_post(path, {"end_leases": end_leases}), self._settings.retries)
            ).json()
            return answer

        return self._transport.run(send_request())
