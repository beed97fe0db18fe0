"""Clients of the HTTP API: real requests through middleware, routes and views, repeated until an answer arrives.

An answer may be lost, or the web process killed before it is sent. The client then repeats the request with the same
Idempotency-Key. Promise 11: what the request executes is executed once, and a final answer arrives."""

import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from django.core.handlers.base import BaseHandler
from django.http import HttpResponse
from django.test import RequestFactory

from leases.api_keys import hash_key
from leases.models import AgentKey
from sandboxes.providers.base import DATA, WORKSPACE
from tests.simulation.ports import PROGRAM
from tests.simulation.scheduler import EPOCH

if TYPE_CHECKING:
    from tests.simulation.workload import Seat, Workload

SECRET = f"lh_{'0' * 8}_{'s' * 43}"
MAX_REFUSALS = 3  # after that many 429 or 503 the client does not repeat the request
IN_PROGRESS = {"idempotency_in_progress", "turn_in_progress"}
REFUSED = {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}
# Final answers besides success that a correct request may get.
EXPECTED_STATUSES = REFUSED | {HTTPStatus.PAYMENT_REQUIRED, HTTPStatus.CONFLICT, HTTPStatus.GONE}


@dataclass
class ClientRequest:
    """Request of one client. `on_answer` is called with a successful answer, `on_end` once after the last attempt."""

    name: str
    method: str
    path: str
    body: bytes
    on_answer: Callable[[HttpResponse], object]
    on_end: Callable[[], object]
    is_missing_allowed: Callable[[], bool] = bool  # whether a 404 is a successful answer
    refusals: int = 0


def read_json(response: HttpResponse) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(response.content)
    return body


class HttpClients:
    """API clients of one history."""

    def __init__(self, workload: "Workload") -> None:
        self.workload, self.world, self.random = workload, workload.world, workload.random
        self.expectations = self.world.promises.expectations
        self.unanswered: dict[str, ClientRequest] = {}
        self.factory = RequestFactory(headers={"Authorization": f"Bearer {SECRET}", "Host": "localhost"})
        self.handler = BaseHandler()
        self.handler.load_middleware()
        digest = hash_key(SECRET)
        AgentKey.objects.create(prefix="0" * 8, digest=digest, first_digest=digest, operator=True, created_at=EPOCH)

    # --- transport --------------------------------------------------------------------------------------------------

    def send(self, request: ClientRequest) -> None:
        """Send a request, and repeat it until it has its final answer."""
        self.unanswered[request.name] = request
        received: list[HttpResponse] = []

        def act() -> None:
            response = self._call(request)
            if not self.world.occurs("answer lost"):
                received.append(response)

        self.workload.spawn("web", request.name, act, lambda: self._settle(request, received))

    def _call(self, request: ClientRequest) -> HttpResponse:
        headers = {"Idempotency-Key": request.name} if request.method == "POST" else {}
        content_type = "application/octet-stream" if request.method == "PUT" else "application/json"
        sent = self.factory.generic(request.method, f"/api/v1{request.path}", request.body, content_type, headers=headers)
        response = self.handler.get_response(sent)
        assert isinstance(response, HttpResponse)
        return response

    def _settle(self, request: ClientRequest, received: list[HttpResponse]) -> None:
        if not received or not self._is_final(request, received[0]):
            scheduler = self.world.scheduler
            scheduler.call_at(scheduler.seconds + self.random.uniform(1, 40), lambda: self.send(request))
            return
        del self.unanswered[request.name]
        [response] = received
        found = response.status_code < 300 or (response.status_code == HTTPStatus.NOT_FOUND and request.is_missing_allowed())
        if found:
            request.on_answer(response)
        elif response.status_code not in EXPECTED_STATUSES:
            self.world.promises.violate(11, f"{request.name} is answered {response.status_code}: {response.content[:300]!r}")
        request.on_end()

    def _is_final(self, request: ClientRequest, response: HttpResponse) -> bool:
        if response.status_code == HTTPStatus.CONFLICT:
            return read_json(response).get("code") not in IN_PROGRESS
        request.refusals += response.status_code in REFUSED
        return response.status_code not in REFUSED or request.refusals >= MAX_REFUSALS

    def check_answered(self) -> None:
        """Check, after all faults have ended, that every client has its final answer."""
        for name in self.unanswered:
            self.world.promises.violate(11, f"the request {name} gets no final answer")

    def _post(
        self, name: str, path: str, body: Mapping[str, Any], on_answer: Callable[[dict[str, Any]], object],
        on_end: Callable[[], object],
    ) -> None:  # fmt: skip
        encoded = json.dumps(body).encode()
        self.send(ClientRequest(name, "POST", path, encoded, lambda response: on_answer(read_json(response)), on_end))

    # --- requests ---------------------------------------------------------------------------------------------------

    def join(self, seat: "Seat", name: str) -> None:
        def joined(lease: dict[str, Any]) -> None:
            seat.lease = uuid.UUID(lease["id"])
            self.expectations.get(seat.lease, seat.agent)

        body = self._describe_lease(seat) | {"wait_seconds": self.random.choice((None, 0, 30))}
        self._post(name, f"/environments/{seat.environment}/join", body, joined, seat.hold(exclusive=True))

    def exec(self, seat: "Seat", name: str) -> None:
        order, accept = self._order(seat, name)
        body = {"argv": [PROGRAM, json.dumps(order)], "timeout_seconds": int(order["timeout"])}

        def executed(result: dict[str, Any]) -> None:
            if result["exit_code"] == 0 and not result["timed_out"]:
                accept()

        self._post(name, f"/leases/{seat.lease}/exec", body, executed, seat.hold())

    def turn(self, seat: "Seat", name: str) -> None:
        order, accept = self._order(seat, name)
        body = {"turn_number": self.workload.count, "state": order}
        self._post(
            name, f"/leases/{seat.lease}/turns", body, lambda turn: None if turn["skipped"] else accept(), seat.hold()
        )  # fmt: skip

    def process(self, seat: "Seat", name: str) -> None:
        """Start a background process, which changes no files."""
        order, _ = self._order(seat, name)
        order |= {"write": {}, "remove": [], "seconds": 0}
        self._post(
            name, f"/leases/{seat.lease}/processes", {"argv": [PROGRAM, json.dumps(order)]}, lambda process: None, seat.hold()
        )  # fmt: skip

    def one_shot(self, seat: "Seat", name: str) -> None:
        """Run a command in a sandbox of its own. The order names no lease: the new sandbox has no earlier files."""
        order, _ = self._order(seat, name)
        order |= {"lease": None, "remove": []}
        body = {
            "agent_did": seat.agent, "argv": [PROGRAM, json.dumps(order)], "pool": self.workload.options.pool,
            "limits": {"timeout_seconds": int(order["timeout"])},
        }  # fmt: skip
        self._post(name, "/runs", body, lambda run: None, seat.hold())

    def put(self, seat: "Seat", name: str) -> None:
        lease, path = seat.lease, f"{WORKSPACE}/f{name}"
        assert lease
        written = lambda response: self.expectations.get(lease).add(path, name, stored=False)  # noqa: E731
        self.send(ClientRequest(name, "PUT", f"/leases/{lease}/files/f{name}", name.encode(), written, seat.hold()))

    def get(self, seat: "Seat", name: str) -> None:
        """Read a file that an acknowledged request has written."""
        assert seat.lease
        expected = self.expectations.get(seat.lease)
        if not expected.workspace:
            return
        path, text = self.random.choice([*expected.workspace.items()])
        losses = expected.losses

        def read(response: HttpResponse) -> None:
            changed = expected.workspace.get(path) != text or expected.discarded or expected.losses != losses
            content = response.content.decode()
            if not changed and not expected.vanished and (response.status_code, content) != (HTTPStatus.OK, text):
                self.world.promises.violate(8, f"{path} of lease {seat.lease} is {text}, and is answered as {content[:200]}")

        url = f"/leases/{seat.lease}/files/{path.removeprefix(f'{WORKSPACE}/')}"
        self.send(ClientRequest(name, "GET", url, b"", read, seat.hold(), lambda: True))

    def release(self, seat: "Seat", name: str) -> None:
        self._post(name, f"/leases/{seat.lease}/release", {}, lambda lease: None, seat.hold(exclusive=True))

    def fork(self, source: "Seat", target: "Seat", name: str) -> None:
        assert source.lease
        expected = self.expectations.get(source.lease)
        copied = {**expected.workspace}
        ends = [source.hold(exclusive=True), target.hold(exclusive=True)]

        def forked(response: HttpResponse) -> None:
            if response.status_code == HTTPStatus.CREATED:  # else the lease of an earlier fork
                self.expectations.get(uuid.UUID(read_json(response)["id"]), target.agent).workspace |= copied

        body = json.dumps(self._describe_lease(target) | {"environment_id": target.environment}).encode()
        end_both = lambda: [end() for end in ends]  # noqa: E731
        # An ended lease that has written nothing may have no stored state. That of a lost or discarded sandbox is gone.
        gone = lambda: not copied or expected.vanished or expected.discarded  # noqa: E731
        self.send(ClientRequest(name, "POST", f"/leases/{source.lease}/fork", body, forked, end_both, gone))

    def _describe_lease(self, seat: "Seat") -> dict[str, Any]:
        options = self.workload.options
        return {
            "agent_did": seat.agent, "environment_type": options.environment_type, "pool": options.pool,
            "ttl_seconds": int(options.ttl.total_seconds()), "sleep_after": int(options.sleep_after.total_seconds()),
        }  # fmt: skip

    def _order(self, seat: "Seat", name: str) -> tuple[dict[str, Any], Callable[[], None]]:
        """Return an order of the simulated program, and the function that records its files as acknowledged.

        Only /workspace is written: a late answer would not tell whether /data has been stored since."""
        assert seat.lease
        expected = self.expectations.get(seat.lease, seat.agent)
        order, losses = self.workload.build_order(expected, seat.lease, name), expected.losses
        order["write"] = {path: text for path, text in order["write"].items() if not path.startswith(DATA)}

        def accept() -> None:
            if expected.losses == losses:
                expected.vanished = False
            for path, text in order["write"].items():
                expected.add(path, text, stored=False)

        return order, accept
