"""An operation whose database fails at any step takes effect once, and its key gives the answer once the database responds."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from django.db import OperationalError
from django.utils import timezone

from leases import turns
from leases.models import EnvironmentType
from sandboxes import claims
from sandboxes.models import Run, Sandbox
from sandboxes.providers.memory import MemoryProvider
from sandboxes.providers.memory.programs import ProgramCall, ProgramResult
from sandboxes.runs import operations
from tests.api.conftest import ApiClient
from tests.conftest import MINUTE
from tests.support.outages import Outage, Weather, any_outage, injected

pytestmark = pytest.mark.django_db(transaction=True)


@dataclass
class Service:
    """The API, with a program that counts its executions by its argument."""

    client: ApiClient
    lease_id: str
    memory: MemoryProvider
    executions: Counter[str]

    def post(self, path: str, body: dict[str, Any], key: str) -> Any:
        return self.client.post(path.format(self.lease_id), body, idempotency_key=key)

    def count_calls(self, verb: str) -> int:
        return sum(called == verb for called, _ in self.memory.calls)


@pytest.fixture
def service(ada: ApiClient, lease: dict[str, Any], memory: MemoryProvider) -> Service:
    executions = Counter[str]()

    def execute(call: ProgramCall) -> ProgramResult:
        executions[call.argv[1]] += 1
        return ProgramResult(3, b'{"action": "roll"}')

    memory.programs["count"] = execute
    return Service(ada, lease["id"], memory, executions)


def exec_counted(service: Service, key: str) -> Any:
    return service.post("leases/{}/exec", {"argv": ["count", key]}, key)


def run_once(service: Service, key: str) -> Any:
    return service.post("runs", {"agent_did": "did:plc:ada", "argv": ["count", key]}, key)


def move(service: Service, key: str) -> Any:
    return service.post("leases/{}/move", {"path": f"from-{key}", "target": f"to-{key}"}, key)


def start_process(service: Service, key: str) -> Any:
    return service.post("leases/{}/processes", {"argv": ["sleep", "300"]}, key)


def fail(*args: Any, **options: Any) -> Any:
    raise OperationalError("the connection is closed")


def survive(service: Service, act: Callable[[Service, str], Any], outage: Outage, key: str) -> Any:
    """Return the answer to the repeated request after an outage, None if the outage has not begun."""
    with injected(outage):
        response = act(service, key)
        if not outage.has_begun:
            return None
        outage.end()
    assert response.status_code < 300 or response.json()["retryable"], response.json()
    claims.HEARTBEAT.beat()
    return act(service, key)


@any_outage
def test_exec_at_any_step(service: Service, failover: Callable[..., Any], weather: Weather) -> None:
    exec_counted(service, "first")
    for step in weather.list_steps():
        response = survive(service, exec_counted, weather.begin(step), str(step))
        if response is None:
            break
        body = response.json()
        assert (step, response.status_code, body.get("exit_code"), service.executions[str(step)]) == (step, 200, 3, 1), body
        assert not Run.objects.filter(ended_at__isnull=True).exists()
        assert Sandbox.objects.get().state == "waiting"
    assert step > 5


@pytest.mark.parametrize("act", [move, start_process])
def test_operation_whose_end_is_not_recorded_is_answered(service: Service, failover: Callable[..., Any], act: Any) -> None:
    if act is move:
        service.post("leases/{}/exec", {"argv": ["sh", "-c", "echo x >from-k"]}, "write")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operations, "close_run", fail)
        response = act(service, "k")
        assert (response.status_code, response.json()["code"]) == (409, "idempotency_in_progress")
        assert act(service, "k").json()["code"] == "idempotency_in_progress"
    claims.HEARTBEAT.beat()
    assert act(service, "k").status_code == (200 if act is move else 201)
    assert service.count_calls("move_file" if act is move else "start") == 1


def test_one_shot_run_whose_end_is_not_recorded_has_its_result(service: Service, failover: Callable[..., Any]) -> None:
    failover(operations, "close_run", 70)  # until the end of the lease is recorded, before which the result is
    response = run_once(service, "k")
    assert (response.status_code, response.json()["exit_code"], response.json()["cleaned_up"]) == (200, 3, True)


def test_turn_whose_end_is_not_recorded_is_not_played_again(service: Service, failover: Callable[..., Any]) -> None:
    EnvironmentType.objects.update(turn_argv=["count", "turn"])
    body = {"turn_number": 1, "state": {}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operations, "close_run", fail)
        codes = [service.client.post(f"leases/{service.lease_id}/turns", body).json()["code"] for _ in range(2)]
    assert codes == ["busy", "busy"]
    claims.HEARTBEAT.beat()
    turns.settle_overdue_turns(now=timezone.now() + MINUTE)
    answer = service.client.post(f"leases/{service.lease_id}/turns", body).json()
    assert (service.executions["turn"], answer["skipped"]) == (1, True)


def test_result_of_a_dead_process_is_obtained_by_the_repeated_request(service: Service, crash_at: Any) -> None:
    with crash_at("run answered"):
        exec_counted(service, "k")
    assert exec_counted(service, "k").json()["code"] == "idempotency_in_progress"
    Run.objects.update(released=True)  # as the start of the next process does
    response = exec_counted(service, "k")
    assert (response.status_code, response.json()["exit_code"], service.executions["k"]) == (200, 3, 1)
