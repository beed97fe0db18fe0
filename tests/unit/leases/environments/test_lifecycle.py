"""Environments: written with their first lease, ended with their last one."""

from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal

import pytest
from django.conf import settings

from leases import conditions, leasing, sweeps, turns
from leases.environments import lifecycle, play
from leases.environments.lifecycle import NewEnvironment
from leases.environments.models import Environment
from leases.errors import EnvironmentEnded, EnvironmentNotFound, InvalidRequest
from leases.models import EnvironmentType, Lease, Turn
from leases.retention.sweep import delete_expired
from tests.conftest import MINUTE, NOW
from tests.support.billing import create_llm_call

pytestmark = pytest.mark.django_db
HOUR = timedelta(hours=1)


def read(pk: str = "game-1") -> Environment:
    return Environment.objects.get(pk=pk)


def test_first_lease_writes_the_environment_and_the_second_leaves_it(grant: Callable[..., Lease]) -> None:
    grant()
    grant("did:plc:bob", now=NOW + MINUTE)
    row = read()
    assert (row.type_id, row.created_at, row.started_at, row.ended_at) == ("catan", NOW, NOW, None)
    assert [lease.agent_did for lease in play.list_members(Lease.objects.all(), "game-1")] == ["did:plc:bob", "did:plc:ada"]


def test_refused_lease_leaves_no_environment(grant: Callable[..., Lease]) -> None:
    with pytest.raises(InvalidRequest):
        grant(ttl=timedelta(days=400))
    assert not Environment.objects.exists()


def test_condition_that_ends_the_last_lease_ends_the_environment_with_its_outcome(grant: Callable[..., Lease]) -> None:
    grant(expiry_conditions=["agent.death", "game.finished"])
    grant("did:plc:bob", expiry_conditions=["agent.death", "game.finished"])
    conditions.post_condition("game-1", "agent.death", now=NOW, agents=["did:plc:bob"], outcome={"dead": "bob"})
    assert (read().status, read().outcome) == ("open", None)
    conditions.post_condition("game-1", "game.finished", now=NOW + MINUTE, agents=None, outcome={"winner": "ada"})
    row = read()
    assert (row.ended_at, row.end_reason, row.outcome) == (NOW + MINUTE, "condition:game.finished", {"winner": "ada"})
    conditions.post_condition("game-1", "game.finished", now=NOW + HOUR, agents=None, outcome={"winner": "bob"})
    assert (read().ended_at, read().outcome) == (NOW + MINUTE, {"winner": "ada"})


def test_lease_that_does_not_list_the_condition_keeps_the_environment_open(grant: Callable[..., Lease]) -> None:
    grant(expiry_conditions=["game.finished"])
    grant("did:plc:bob", expiry_conditions=[])
    assert len(conditions.post_condition("game-1", "game.finished", now=NOW, agents=None)) == 1
    assert read().status == "open"


def test_end_ends_every_lease_and_the_first_outcome_stays(grant: Callable[..., Lease]) -> None:
    leases = [grant(), grant("did:plc:bob")]
    other = grant(environment="game-2")
    ended = lifecycle.end("game-1", outcome="draw", now=NOW + MINUTE, actor="eve")
    assert {lease.pk for lease in ended} == {lease.pk for lease in leases}
    reasons = {lease.end_reason for lease in Lease.objects.filter(environment_id="game-1")}
    assert reasons == {"condition:environment.ended"}
    assert leasing.require_active(other.pk, now=NOW + MINUTE)
    assert lifecycle.end("game-1", outcome="other", now=NOW + HOUR) == []
    assert (read().ended_at, read().outcome, read().end_reason) == (NOW + MINUTE, "draw", "operator")


def test_created_environment_starts_once_has_a_phase_and_ends(grant: Callable[..., Lease]) -> None:
    row, is_new = lifecycle.create(NewEnvironment("game-1", "catan", phase="setup"), now=NOW)
    assert (is_new, row.status) == (True, "created")
    assert lifecycle.create(NewEnvironment("game-1", "catan", phase="other"), now=NOW) == (row, False)
    with pytest.raises(InvalidRequest):
        lifecycle.create(NewEnvironment("game-2", "chess"), now=NOW)
    grant()
    assert read().status == "created"  # a lease does not start what an operator is to start
    assert lifecycle.start("game-1", now=NOW + MINUTE) and not lifecycle.start("game-1", now=NOW + HOUR)
    assert lifecycle.set_phase("game-1", "combat", now=NOW) and not lifecycle.set_phase("game-1", "combat", now=NOW)
    assert (read().started_at, read().phase) == (NOW + MINUTE, "combat")
    lifecycle.end("game-1", now=NOW + HOUR)
    for act in (lambda: lifecycle.start("game-1", now=NOW), lambda: lifecycle.set_phase("game-1", "town", now=NOW)):
        with pytest.raises(EnvironmentEnded):
            act()
    with pytest.raises(EnvironmentNotFound):
        lifecycle.end("no-game", now=NOW)


def test_environment_whose_last_lease_ended_an_hour_ago_is_ended_by_the_sweep(grant: Callable[..., Lease]) -> None:
    leasing.release(grant().pk, now=NOW + MINUTE)
    grant(environment="game-2", ttl=timedelta(hours=4))
    sweeps.expire_due_leases(now=NOW + HOUR)
    assert read().status == "open"
    sweeps.expire_due_leases(now=NOW + HOUR + 2 * MINUTE)
    assert (read().status, read().end_reason, read("game-2").status) == ("ended", "unused", "open")


def test_turn_keeps_its_state_until_the_retention_and_a_long_state_is_played_but_not_kept(lease: Lease) -> None:
    EnvironmentType.objects.update(turn_argv=["echo", "{}"])
    long = {"text": "x" * turns.MAX_STATE_BYTES}
    turns.take_turn(lease.pk, 1, {"n": 1}, now=NOW)
    turns.take_turn(lease.pk, 2, {"text": "é"}, now=NOW)
    assert turns.take_turn(lease.pk, 3, long, now=NOW).action == {}
    states = dict(Turn.objects.values_list("number", "state"))
    assert states == {1: '{"n": 1}', 2: '{"text": "\\u00e9"}', 3: ""}
    leasing.release(lease.pk, now=NOW + MINUTE)
    assert delete_expired(now=NOW + settings.KEEP_STATE).counts == {}
    assert delete_expired(now=NOW + settings.KEEP_STATE + MINUTE).counts == {"states of turns cleared": 2}
    assert set(Turn.objects.values_list("state", flat=True)) == {""}


def test_lists_of_turns_do_not_read_the_state(lease: Lease) -> None:
    EnvironmentType.objects.update(turn_argv=["cat"])
    turns.take_turn(lease.pk, 1, {"n": 1}, now=NOW)
    [turn] = Turn.objects.all()
    assert turn.get_deferred_fields() == {"state"}


def test_moves_have_their_costs_and_skip_reasons(lease: Lease, grant: Callable[..., Lease]) -> None:
    bob = grant("did:plc:bob")
    EnvironmentType.objects.update(turn_argv=["cat"])
    first = turns.take_turn(lease.pk, 1, {"action": "wave"}, now=NOW)
    EnvironmentType.objects.update(turn_argv=["false"])
    turns.take_turn(bob.pk, 1, {}, now=NOW + MINUTE)
    create_llm_call(lease, run_id=first.run_id, cost=Decimal("0.25"))
    members = play.list_members(Lease.objects.all(), "game-1")
    moves = play.list_moves(members, limit=10)
    assert [(move.lease.agent_did, move.model_cost) for move in moves] == [
        ("did:plc:bob", Decimal(0)),
        ("did:plc:ada", Decimal("0.25")),
    ]
    assert "code 1" in moves[0].skip_reason and moves[1].skip_reason == ""
    assert play.list_moves(members, limit=10, until=first) == moves[1:]
    counts = play.count_turns(members)
    assert (counts[bob.pk].turns, counts[bob.pk].skipped, counts[lease.pk].skipped) == (1, 1, 0)
    assert play.sum_costs(play.calculate_costs(members)).model_calls == Decimal("0.25")
    assert play.find_neighbours(members, first) == (None, moves[0].turn.pk)
