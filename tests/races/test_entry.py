"""Entry into an environment at the same time as its end, the removal of the participant, or the move of the agent."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connections

from leases import api_keys, leasing
from leases.allow_lists import AllowLists
from leases.environments import lifecycle, participants
from leases.environments.lifecycle import NewEnvironment
from leases.environments.models import Environment, Participant
from leases.errors import Conflict, EnvironmentEnded, EnvironmentNotFound
from leases.leasing import GrantBasis, LeaseRequest
from leases.models import Agent, EnvironmentType, Lease, LeaseStatus
from leases.projects import registry
from sandboxes.models import Pool
from tests.conftest import NOW
from tests.support.billing import ADA, BOB
from tests.support.waiting import wait_until_blocked

pytestmark = pytest.mark.django_db(transaction=True)


def end() -> Any:
    return lifecycle.end("task-1", now=NOW)


def remove() -> Any:
    return participants.remove("task-1", ADA, now=NOW)


def restrict() -> Any:
    return participants.set_access("task-1", False, now=NOW)


def move() -> Any:
    return registry.move_agents("acme", [ADA], now=NOW)


def reopen_for_another() -> Any:
    lifecycle.end("task-1", now=NOW)
    return lifecycle.create(NewEnvironment("task-1", "run", agents=[BOB], reopen=True), now=NOW)


@pytest.fixture(autouse=True)
def environment(pool: Pool) -> None:
    registry.create("acme", now=NOW)
    lifecycle.create(NewEnvironment("task-1", "coding", agents=[ADA]), now=NOW)


def join(pool: Pool, **options: Any) -> Lease:
    request = LeaseRequest(ADA, "task-1", "coding", pool=pool.name, allowed=AllowLists())
    return leasing.acquire(request, now=NOW, **options)[0]


class Rival(threading.Thread):
    """Thread that calls a verb, and keeps its result or error."""

    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__()
        self.act, self.result = act, None

    def run(self) -> None:
        try:
            self.result = self.act()
        except Exception as failed:
            self.result = failed
        finally:
            connections.close_all()


def change_after_reading(monkeypatch: pytest.MonkeyPatch, act: Callable[[], Any]) -> list[Any]:
    """Let another thread change the rows once a grant has read them, before its transaction. Return the verb's result."""
    read, changed = leasing.read_basis, list[Any]()

    def read_and_change(request: LeaseRequest) -> GrantBasis:
        basis = read(request)
        if not changed:
            rival = Rival(act)
            rival.start()
            rival.join()
            changed.append(rival.result)
        return basis

    monkeypatch.setattr(leasing, "read_basis", read_and_change)
    return changed


@pytest.mark.parametrize("act", [end, remove])
def test_lease_that_is_being_granted_is_found_by_what_ends_it(act: Callable[[], Any], pool: Pool) -> None:
    rival = Rival(act)

    def start_rival() -> None:
        rival.start()
        wait_until_blocked(rival)

    lease = join(pool, admit=start_rival)
    rival.join()
    assert rival.result == [lease]
    assert Lease.objects.get().status != LeaseStatus.ACTIVE


def test_agent_that_is_being_granted_a_lease_does_not_move(pool: Pool) -> None:
    rival = Rival(move)

    def start_rival() -> None:
        rival.start()
        wait_until_blocked(rival)

    join(pool, admit=start_rival)
    rival.join()
    assert isinstance(rival.result, Conflict)
    assert Agent.objects.get(did=ADA).project.name == "default"


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (end, EnvironmentEnded),
        (remove, EnvironmentNotFound),
        (move, EnvironmentNotFound),
        (reopen_for_another, EnvironmentNotFound),
    ],
)  # fmt: skip
def test_entry_that_was_permitted_when_it_was_read_is_compared_again(
    act: Callable[[], Any], error: type[Exception], pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = change_after_reading(monkeypatch, act)
    with pytest.raises(error):
        join(pool)
    assert changed and not isinstance(changed[0], Exception)
    assert not Lease.objects.exists()


def test_restricted_environment_is_compared_again(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    Participant.objects.all().delete()
    Environment.objects.update(open_to_project=True)
    changed = change_after_reading(monkeypatch, restrict)
    with pytest.raises(EnvironmentNotFound):
        join(pool)
    assert changed == [True] and not Lease.objects.exists()


def test_key_is_issued_in_the_project_of_an_agent_that_moves_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rival, generate = Rival(move), api_keys._generate_key

    def start_rival(prefix: str) -> str:
        rival.start()
        wait_until_blocked(rival)
        return generate(prefix)

    monkeypatch.setattr(api_keys, "_generate_key", start_rival)
    key, _ = api_keys.issue_key([ADA], now=NOW)
    rival.join()
    key.refresh_from_db()
    assert rival.result == 1
    assert key.project.name == Agent.objects.get(did=ADA).project.name == "acme"


def test_agents_that_create_one_environment_at_once_do_not_share_it(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not EnvironmentType.objects.get(name="coding").open_to_project
    barrier, read, met = threading.Barrier(2), leasing.read_basis, threading.local()

    def meet(request: LeaseRequest) -> GrantBasis:
        basis = read(request)
        if not hasattr(met, "once"):  # the one that comes second reads again
            met.once = True
            barrier.wait(timeout=30)
        return basis

    monkeypatch.setattr(leasing, "read_basis", meet)

    def acquire(did: str) -> Any:
        request = LeaseRequest(did, "task-2", "coding", pool=pool.name, allowed=AllowLists())
        return leasing.acquire(request, now=NOW)[0]

    rivals = [Rival(lambda did=did: acquire(did)) for did in (ADA, BOB)]  # type: ignore[misc]
    for rival in rivals:
        rival.start()
    for rival in rivals:
        rival.join()
    [lease] = [rival.result for rival in rivals if isinstance(rival.result, Lease)]
    assert [type(rival.result) for rival in rivals if not isinstance(rival.result, Lease)] == [EnvironmentNotFound]
    assert Participant.objects.get(environment="task-2").agent_did == lease.agent_did
