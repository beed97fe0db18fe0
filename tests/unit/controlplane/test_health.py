"""Warnings of the health report: failed starts, counter drift, quarantined, lost and stalled sandboxes."""

from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane import health, schedules
from leases import execution
from sandboxes import sweeps as below
from sandboxes.models import Pool, Sandbox, Sweep
from sandboxes.providers.base import Rejected
from sandboxes.runs import Command
from tests.conftest import MINUTE, NOW

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def all_is_well(monkeypatch: pytest.MonkeyPatch, db: None) -> None:
    Sweep.objects.create(name="egress", every=MINUTE, succeeded_at=timezone.now())
    monkeypatch.setattr(health.provider_probe, "get_status", lambda: {"name": "memory", "isolated": True, "answers": True})


@pytest.fixture
def sandbox(grant) -> Sandbox:
    lease = grant()
    execution.exec_command(lease.pk, Command(argv=["true"], timeout=MINUTE), now=NOW)
    return Sandbox.objects.get(holder=lease.pk)


def warnings(client) -> list[str]:
    found = client.get("/readyz").json()
    assert found["warnings"] == client.get("/healthz").json()["warnings"]
    assert not any("did:" in warning or "secret" in warning for warning in found["warnings"])
    return found["warnings"]


def test_when_all_is_well_there_is_nothing_to_say(client, sandbox) -> None:
    found = client.get("/healthz").json()
    assert (found["warnings"], found["quarantined"], found["stalled"], found["lost"], found["drift"]) == ([], 0, 0, 0, 0)
    assert found["warming"] == {}


def test_an_open_circuit_says_which_pool_and_until_when_but_not_why(client, pool, memory) -> None:
    Pool.objects.filter(pk=pool.pk).update(warm_target=2)
    with memory.fail("create", Rejected("secret registry"), times=99):
        below.warm_pools(now=timezone.now())
    until = Pool.objects.get(pk=pool.pk).warm_paused_until
    assert warnings(client) == [f'Pool "{pool}" starts no warm sandboxes until {until:%H:%M:%S} UTC, after failed starts.']
    shown = client.get("/healthz").json()["warming"][pool.name]
    assert (shown["target"], shown["ready"], shown["paused_until"][:19]) == (2, 0, f"{until:%Y-%m-%dT%H:%M:%S}")


def test_drift_is_said_until_a_recount_finds_none(client, pool, sandbox) -> None:
    Pool.objects.filter(pk=pool.pk).update(used=7)
    schedules.run_sweep("recount", now=NOW)
    assert warnings(client) == ["Pool or quota counters corrected by the last recount: 1."]
    schedules.run_sweep("recount", now=NOW)
    assert warnings(client) == []


TROUBLES = {
    "Sandboxes in quarantine after failed destroy attempts: 1.": {
        "state": "destroying", "deadline_at": NOW, "quarantined_at": NOW,
    },
    "Sandboxes stalled past their deadline: 1.": {"state": "destroying", "deadline_at": NOW - timedelta(days=5000)},
    "Sandboxes lost by their provider while a lease held them: 1.": {"lost_at": NOW},
}  # fmt: skip


@pytest.mark.parametrize(("said", "fields"), TROUBLES.items(), ids=["quarantined", "stalled", "lost"])
def test_sandboxes_that_need_an_operator_are_warned_about(client, sandbox, said: str, fields: dict[str, object]) -> None:
    Sandbox.objects.filter(pk=sandbox.pk).update(**fields)
    assert warnings(client) == [said]
    assert client.get("/healthz").status_code == 200


@pytest.mark.parametrize(("minutes", "late"), [(3.9, False), (4.1, True), (None, True)])
def test_a_late_egress_heartbeat_is_warned_about(client, minutes: float | None, late: bool) -> None:
    rows = Sweep.objects.filter(name="egress")
    rows.update(succeeded_at=timezone.now() - minutes * MINUTE) if minutes else rows.delete()
    said = "The egress proxy has no recent heartbeat, so sandboxes reach no model. Is manage.py egress running?"
    assert warnings(client) == [said] * late
    assert client.get("/healthz").json()["egress"]["late"] is late
