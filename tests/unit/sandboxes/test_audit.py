"""Record of operator actions: the kind of the actor decides, orders have a result, and rows expire."""

import copy
import pickle
from collections.abc import Callable
from datetime import datetime, timedelta

import pytest
from django.conf import settings
from django.db.models import Model

from leases.retention.sweep import delete_expired
from sandboxes import audit
from sandboxes.audit import COMMAND_LINE, CONTROL_PLANE, Actor, ActorKind
from sandboxes.models import OperatorAction, Pool
from tests.conftest import NOW, SimulatedCrash

SECOND = timedelta(seconds=1)
pytestmark = pytest.mark.django_db
Record = Callable[[Model, Actor, datetime], None]


def record(row: Model, actor: Actor, now: datetime) -> None:
    audit.record(row, "Drain pool", actor=actor, now=now)


def record_each(row: Model, actor: Actor, now: datetime) -> None:
    audit.record_each([(row, "")], "Drain pool", actor=actor, now=now)


def record_order(row: Model, actor: Actor, now: datetime) -> None:
    with audit.record_order(row, "Drain pool", actor=actor, now=now):
        pass


@pytest.mark.parametrize("act", [record, record_each, record_order])
@pytest.mark.parametrize("name", ["key 1a2b3c4d", "command line", "olga"])
@pytest.mark.parametrize("kind", ActorKind)
def test_the_kind_of_the_actor_decides_and_not_its_name(kind: ActorKind, name: str, act: Record, pool: Pool) -> None:
    act(pool, Actor(name, kind), NOW)
    recorded = [*OperatorAction.objects.values_list("object_id", "actor")]
    assert recorded == ([(str(pool.pk), name)] if kind in (ActorKind.KEY, ActorKind.COMMAND) else [])


@pytest.mark.parametrize("repeat", [copy.copy, copy.deepcopy, lambda actor: pickle.loads(pickle.dumps(actor))])
def test_a_copy_of_an_actor_is_of_the_same_kind(repeat: Callable[[Actor], Actor]) -> None:
    assert (repeat(COMMAND_LINE), repeat(COMMAND_LINE).kind) == ("command line", ActorKind.COMMAND)


def test_an_order_is_recorded_before_its_effect_and_has_its_result_after_it(pool: Pool) -> None:
    with audit.record_order(pool, "Stop", "all", actor=COMMAND_LINE, now=NOW) as order:
        assert OperatorAction.objects.get().summary == "all; result: not known"
        order.result = "3 stopped"
    assert OperatorAction.objects.get().summary == "all; result: 3 stopped"


def test_an_order_that_fails_has_the_error_as_its_result(pool: Pool) -> None:
    with (
        pytest.raises(ValueError, match="no engine"),
        audit.record_order(pool, "Stop", actor=COMMAND_LINE, now=NOW),
    ):
        raise ValueError("no engine")
    assert OperatorAction.objects.get().summary == "result: failed: no engine"


def test_the_result_of_an_order_whose_process_dies_is_not_known(pool: Pool) -> None:
    with pytest.raises(SimulatedCrash), audit.record_order(pool, "Stop", "all", actor=COMMAND_LINE, now=NOW):
        raise SimulatedCrash
    recorded = OperatorAction.objects.get()
    assert (recorded.is_order, recorded.result, recorded.summary) == (True, "", "all; result: not known")


def test_an_order_that_is_not_recorded_is_carried_out(pool: Pool) -> None:
    with audit.record_order(pool, "Stop", actor=CONTROL_PLANE, now=NOW) as order:
        order.result = "3 stopped"
    assert not OperatorAction.objects.exists()


def test_texts_that_are_too_long_are_cut(pool: Pool) -> None:
    with audit.record_order(pool, "Stop", "d" * 2000, actor=Actor("k" * 300, ActorKind.KEY), now=NOW) as order:
        order.result = "r" * 2000
    recorded = OperatorAction.objects.get()
    assert [len(text) for text in (recorded.detail, recorded.result, recorded.actor)] == [1000, 1000, 200]


def test_an_action_is_deleted_after_its_retention(pool: Pool) -> None:
    for now in (NOW, NOW + 2 * SECOND):
        audit.record(pool, "Drain pool", actor=COMMAND_LINE, now=now)
    assert not delete_expired(now=NOW + settings.KEEP_OPERATOR_ACTIONS).counts
    assert delete_expired(now=NOW + settings.KEEP_OPERATOR_ACTIONS + SECOND).counts == {"operator actions deleted": 1}
    assert OperatorAction.objects.get().at == NOW + 2 * SECOND
