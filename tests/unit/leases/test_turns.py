"""Turns: played once, with an action or a skip for every result of the sandbox."""

import json
from datetime import datetime, timedelta

import pytest

from leases import leasing, sweeps, turns
from leases.errors import LeaseEnded, TurnInProgress
from leases.models import EnvironmentType, Lease, Turn
from sandboxes.errors import CapacityExhausted
from sandboxes.models import Pool, Run, Sandbox
from sandboxes.providers.errors import Unavailable
from sandboxes.providers.memory import MemoryProvider
from tests.conftest import MINUTE, NOW

pytestmark = pytest.mark.django_db
STATE = {"legal_actions": ["roll", "end"]}


def take_turn(lease: Lease, now: datetime = NOW) -> Turn:
    return turns.take_turn(lease.pk, 1, STATE, now=now)


def set_turn_argv(*argv: str) -> None:
    """Make turns of this environment type execute `argv` instead of the default turn command."""
    EnvironmentType.objects.filter(name="catan").update(turn_argv=list(argv))


def test_the_printed_object_is_the_action_and_a_repeat_returns_it_and_runs_nothing(lease: Lease) -> None:
    set_turn_argv("echo", '{"action": "roll", "dice": 2}')
    turn = take_turn(lease)
    assert (turn.action, turn.skipped) == ({"action": "roll", "dice": 2}, False)
    assert (turn.run.kind, turn.run.turn_number, turn.run.outcome) == ("turn", 1, "ok")
    set_turn_argv("echo", '{"action": "other"}')
    again = take_turn(lease, now=NOW + MINUTE)
    assert (again.pk, again.action) == (turn.pk, turn.action)
    assert Run.objects.count() == 1
    leasing.release(lease.pk, now=NOW + MINUTE)
    assert take_turn(lease, now=NOW + MINUTE).action == turn.action


def test_the_state_arrives_on_stdin(lease: Lease) -> None:
    set_turn_argv("cat")
    assert take_turn(lease).action == STATE


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["false"], "code 1"),
        (["no-such-program"], "code 127"),
        (["sleep", "600"], "exceeded its timeout of 60 seconds"),
        (["oom"], "out of memory"),
        (["echo", "I would like to roll"], "no JSON: I would like"),
        (["echo", "[1, 2]"], "list, not a JSON object"),
        (["echo", '{"n": NaN}'], "no JSON"),
        (["echo", '{"n": 1e999}'], "no JSON"),
        (["echo", r'{"s": "\ud800"}'], "no JSON"),
        (["echo", "[" * 5000], "no JSON"),
        (["true"], "no JSON"),
        (["head", "-c", "100000", "/dev/zero"], "more than"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)
def test_a_failed_turn_is_skipped_with_the_reason(lease: Lease, argv: list[str], reason: str) -> None:
    set_turn_argv(*argv)
    turn = take_turn(lease)
    assert turn.skipped and turn.action["action"] == "skip_turn"
    assert reason in turn.action["reason"] and len(turn.action["reason"]) <= 500
    assert turn.run and turn.run.ended_at


def test_an_action_with_nul_is_stored_unchanged(lease: Lease) -> None:
    set_turn_argv("echo", r'{"say": "a\u0000b"}')
    assert take_turn(lease).action == {"say": "a\0b"}


def test_a_turn_is_skipped_if_the_provider_does_not_respond(lease: Lease, memory: MemoryProvider) -> None:
    set_turn_argv("echo", "{}")
    with memory.fail("exec", Unavailable("socket closed")):
        turn = take_turn(lease)
    assert turn.skipped and "socket closed" in turn.action["reason"]
    assert turn.run and turn.run.outcome == "error"


def test_a_turn_that_cannot_start_leaves_its_number_free(lease: Lease) -> None:
    set_turn_argv("echo", "{}")
    Pool.objects.filter(pk=lease.pool_id).update(capacity=1, used=1)
    with pytest.raises(CapacityExhausted):
        take_turn(lease)
    Pool.objects.filter(pk=lease.pool_id).update(used=0)
    assert take_turn(lease).action == {}


def test_a_turn_renews_the_lease(grant) -> None:
    lease = grant(ttl=10 * MINUTE)
    set_turn_argv("echo", "{}")
    take_turn(lease, now=NOW + 5 * MINUTE)
    lease.refresh_from_db()
    assert lease.expires_at >= NOW + 15 * MINUTE


def test_a_turn_of_an_ended_lease_is_refused(lease: Lease) -> None:
    leasing.release(lease.pk, now=NOW)
    with pytest.raises(LeaseEnded):
        take_turn(lease)
    assert not Turn.objects.exists()


def test_a_turn_being_played_is_not_played_twice(lease: Lease, at_checkpoint) -> None:
    set_turn_argv("echo", "{}")

    def rival() -> None:
        with pytest.raises(TurnInProgress):
            take_turn(lease)

    at_checkpoint("run opened", rival)
    take_turn(lease)
    assert Run.objects.count() == 1


def test_a_turn_whose_process_died_after_its_command_gets_the_retained_result(lease: Lease, crash_at) -> None:
    set_turn_argv("echo", '{"action": "roll"}')
    with crash_at("run answered"):
        take_turn(lease)
    assert sweeps.recover_stalled(now=NOW + timedelta(hours=1)).counts["runs closed"] == 1
    turn = take_turn(lease, now=NOW + timedelta(hours=1))
    assert (turn.skipped, turn.action) == (False, {"action": "roll"})


def test_a_turn_whose_process_died_mid_run_is_skipped_after_its_deadline(lease: Lease, crash_at) -> None:
    set_turn_argv("echo", '{"action": "roll"}')
    with crash_at("run opened"):
        take_turn(lease)
    assert sweeps.recover_stalled(now=NOW + timedelta(hours=1)).counts == {"runs closed": 1, "turns skipped": 1}
    turn = take_turn(lease, now=NOW + timedelta(hours=1))
    assert turn.skipped and "interrupted" in turn.action["reason"]
    assert Sandbox.objects.get().state == "waiting"


def test_a_turn_whose_run_was_lost_is_settled_without_waiting_for_its_own_deadline(lease: Lease, crash_at) -> None:
    set_turn_argv("echo", "{}")
    with crash_at("run answered"):
        take_turn(lease)
    Run.objects.update(outcome="lost", ended_at=NOW)  # as after the death of its instance
    assert take_turn(lease, now=NOW + timedelta(seconds=6)).skipped


def test_a_refused_attempt_does_not_settle_a_later_one(lease: Lease, at_checkpoint) -> None:
    set_turn_argv("echo", '{"action": "roll"}')
    take_turn(lease)
    Turn.objects.all().delete()  # as after a refusal by a full workspace: the Run has ended, the number is free
    Run.objects.update(outcome="failed", exit_code=None)
    later = NOW + timedelta(minutes=1)
    at_checkpoint("turn claimed", lambda: sweeps.recover_stalled(now=later + timedelta(seconds=10)))
    assert take_turn(lease, now=later).action == {"action": "roll"}


def test_a_turn_whose_process_died_after_the_run_returns_the_printed_action(lease: Lease, crash_at) -> None:
    set_turn_argv("echo", '{"action": "roll"}')
    with crash_at("turn answered"):
        take_turn(lease)
    turn = take_turn(lease, now=NOW + timedelta(hours=1))
    assert json.loads(turn.answer) == {"action": "roll"}


def test_join_makes_the_sandbox_ready_with_its_config(pool: Pool, memory: MemoryProvider) -> None:
    request = leasing.LeaseRequest("did:plc:ada", "game-1", "catan", pool=pool.name)
    lease, is_new, _ = turns.join_environment(request, now=NOW)
    sandbox = Sandbox.objects.get(holder=lease.pk)
    assert (is_new, sandbox.state) == (True, "warm")
    config = json.loads(memory.read_file(sandbox.ref, "/workspace/config.json", limit=10_000))
    assert config["environmentType"] == "catan" and config["agentDid"] == "did:plc:ada"
    assert turns.join_environment(request, now=NOW)[1] is False
    assert Sandbox.objects.count() == 1
