"""State machine: legal edges and reasons, guarded updates, one Transition row for each move."""

import uuid
from datetime import datetime
from typing import Any

import pytest
from django.db import IntegrityError, transaction
from django.db.models import Q

from sandboxes import lifecycle
from sandboxes.db.sql import Statement
from sandboxes.errors import IllegalTransition
from sandboxes.lifecycle import Finished
from sandboxes.models import Pool, Run, Sandbox, SandboxState, TransitionReason
from sandboxes.runs import operations
from sandboxes.runs.operations import Command
from tests.conftest import MINUTE, NOW

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("hand-written SQL")]


def build_sandbox(pool: Pool, holder: uuid.UUID) -> Sandbox:
    return Sandbox(
        pool=pool, provider="memory", memory_mib=64, millicpus=100, pids=16, holder=holder,
        last_used_at=NOW, created_at=NOW, deadline_at=NOW + MINUTE,
    )  # fmt: skip


@pytest.fixture
def sandbox(pool: Pool) -> Sandbox:
    created = build_sandbox(pool, uuid.uuid4())
    lifecycle.insert_warming(created, now=NOW, code=TransitionReason.REQUESTED)
    return created


def become_warm(sandbox: Sandbox, **more: Any) -> bool:
    return lifecycle.advance(
        sandbox.pk, SandboxState.WARMING, SandboxState.WARM, **{"now": NOW, "code": TransitionReason.READY} | more
    )


def test_advance_writes_state_and_transition_together(sandbox: Sandbox) -> None:
    assert become_warm(sandbox, now=NOW + MINUTE, actor="test")
    sandbox.refresh_from_db()
    assert (sandbox.state, sandbox.state_since) == ("warm", NOW + MINUTE)
    last = sandbox.transitions.first()
    assert (last.was, last.to, last.at, last.holder, last.code, last.reason, last.actor) == (
        "warming", "warm", NOW + MINUTE, sandbox.holder, "ready", "ready", "test",
    )  # fmt: skip


def test_second_advance_along_the_same_edge_returns_false(sandbox: Sandbox) -> None:
    assert become_warm(sandbox)
    assert not become_warm(sandbox)
    assert sandbox.transitions.count() == 2


def test_advance_with_a_failing_guard_moves_nothing(sandbox: Sandbox) -> None:
    assert not become_warm(sandbox, guard=Q(holder=uuid.uuid4()))
    sandbox.refresh_from_db()
    assert sandbox.state == "warming"


def test_no_more_rows_are_moved_than_a_slice_has(pool: Pool) -> None:
    for _ in range(7):
        created = build_sandbox(pool, uuid.uuid4())
        lifecycle.insert_warming(created, now=NOW, code=TransitionReason.REQUESTED)
        assert become_warm(created, idle_at=NOW)
    idle = Sandbox.objects.filter(state=SandboxState.WARM, idle_at__lte=NOW).order_by("idle_at")
    moved = lifecycle.advance_many(
        idle[:2], SandboxState.WARM, SandboxState.EVICTING, now=NOW, code=TransitionReason.IDLE, claim=uuid.uuid4(),
        deadline_at=NOW + MINUTE,
    )  # fmt: skip
    assert moved == Sandbox.objects.filter(state=SandboxState.EVICTING).count() == 2


@pytest.mark.parametrize(
    ("was", "to"),
    [(a, b) for a in SandboxState for b in SandboxState if (a, b) not in lifecycle.EDGES],
    ids=lambda s: str(s.value),
)
def test_transition_that_is_not_an_edge_is_refused(was: SandboxState, to: SandboxState) -> None:
    with pytest.raises(IllegalTransition):
        lifecycle.advance(uuid.uuid4(), was, to, now=NOW, code=TransitionReason.OPERATOR)


@pytest.mark.parametrize(("was", "to"), lifecycle.EDGES, ids=str)
def test_reason_that_the_edge_does_not_list_is_refused(was: SandboxState, to: SandboxState) -> None:
    for code in set(TransitionReason) - set(lifecycle.EDGES[was, to]):
        with pytest.raises(IllegalTransition):
            lifecycle.advance(uuid.uuid4(), was, to, now=NOW, code=code)


def test_every_reason_is_used_by_an_edge() -> None:
    used = {code for reasons in lifecycle.EDGES.values() for code in reasons}
    assert used | set(lifecycle.START_REASONS) == set(TransitionReason)


def test_every_live_state_can_go_to_destroying() -> None:
    # `destroying` itself: an operator discards the state that could not be stored.
    assert {was for was, to in lifecycle.EDGES if to == SandboxState.DESTROYING} == set(SandboxState) - {SandboxState.DESTROYED}


@pytest.mark.parametrize(
    "wrong",
    [
        {"state": "bogus"}, {"state": "running", "open_runs": 0}, {"state": "warm", "open_runs": 1},
        {"state": "destroyed", "destroyed_at": None}, {"state": "destroying", "deadline_at": None},
    ],
    ids=str,
)  # fmt: skip
def test_schema_rejects_inconsistent_rows(sandbox: Sandbox, wrong: dict[str, object]) -> None:
    with pytest.raises(IntegrityError), transaction.atomic():
        Sandbox.objects.filter(pk=sandbox.pk).update(**wrong)


def test_holder_has_at_most_one_live_sandbox(sandbox: Sandbox) -> None:
    second = build_sandbox(sandbox.pool, sandbox.holder)
    with pytest.raises(IntegrityError), transaction.atomic():
        lifecycle.insert_warming(second, now=NOW, code=TransitionReason.REQUESTED)
    was, to = SandboxState.WARMING, SandboxState.DESTROYING
    assert lifecycle.advance(sandbox.pk, was, to, now=NOW, code=lifecycle.EDGES[was, to][0])
    lifecycle.insert_warming(second, now=NOW, code=TransitionReason.REQUESTED)  # a sandbox in `destroying` does not count


def open_run(sandbox: Sandbox) -> Run:
    sandbox.refresh_from_db()
    run = operations.open_run(sandbox, Command(argv=["true"], timeout=MINUTE), now=NOW)
    assert run
    return run


def finish_run(run: Run, *, now: datetime, incarnation: int = 1) -> Finished:
    close = Statement(
        "UPDATE sandboxes_run SET outcome = 'ok', ended_at = %s WHERE id = %s AND ended_at IS NULL", (now, run.pk)
    )
    return lifecycle.finish_run(run.sandbox_id, incarnation, idle_after=MINUTE, close=close, now=now)


def test_sandbox_is_running_exactly_while_runs_are_open(sandbox: Sandbox) -> None:
    become_warm(sandbox)
    holder = sandbox.holder
    first, second = open_run(sandbox), open_run(sandbox)
    assert finish_run(first, now=NOW) == Finished(closed=True, renewed=False)
    sandbox.refresh_from_db()
    assert (sandbox.state, sandbox.open_runs) == ("running", 1)
    assert finish_run(first, now=NOW) == Finished(closed=False, renewed=False)
    sandbox.refresh_from_db()
    assert (sandbox.state, sandbox.open_runs) == ("running", 1)
    assert finish_run(second, now=NOW + MINUTE) == Finished(closed=True, renewed=False)
    sandbox.refresh_from_db()
    assert (sandbox.state, sandbox.open_runs, sandbox.state_since) == ("waiting", 0, NOW + MINUTE)
    assert lifecycle.start_run(sandbox.pk, 1, holder=holder, now=NOW) == SandboxState.WAITING


def test_run_of_another_holder_is_not_started(sandbox: Sandbox) -> None:
    become_warm(sandbox)
    assert lifecycle.start_run(sandbox.pk, 1, holder=uuid.uuid4(), now=NOW) is None


def test_run_is_not_started_in_a_later_incarnation(sandbox: Sandbox) -> None:
    """The caller has read the row before the sandbox was evicted and woken, and would execute in one that is gone."""
    become_warm(sandbox)
    Sandbox.objects.update(incarnation=2)
    assert lifecycle.start_run(sandbox.pk, 1, holder=sandbox.holder, now=NOW) is None
    assert lifecycle.start_run(sandbox.pk, 2, holder=sandbox.holder, now=NOW) == SandboxState.WARM
    assert lifecycle.start_run(sandbox.pk, 1, holder=sandbox.holder, now=NOW) is None


def test_finish_run_of_an_earlier_incarnation_changes_nothing(sandbox: Sandbox) -> None:
    become_warm(sandbox)
    finish_run(open_run(sandbox), now=NOW, incarnation=7)
    sandbox.refresh_from_db()
    assert sandbox.open_runs == 1
