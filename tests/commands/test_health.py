"""What /livez, /healthz and /readyz say, and with which status."""

from collections.abc import Iterator
from datetime import timedelta

import pytest
from django.db import OperationalError, connection
from django.utils import timezone

from controlplane import health, schedules
from leases import execution
from sandboxes.models import Sandbox, Sweep
from sandboxes.providers.base import Unavailable
from sandboxes.runs import Command
from tests.conftest import MINUTE, NOW

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def memory_probed(memory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A probe that has asked nothing yet, of the memory provider."""
    probe = health.ProviderProbe()
    monkeypatch.setattr(health, "provider_probe", probe)
    monkeypatch.setattr(health.providers, "get_default_provider_name", lambda: "memory")
    yield
    probe.threads.shutdown()


@pytest.fixture
def beating() -> None:
    for name in schedules.SCHEDULE:
        Sweep.objects.create(name=name, every=schedules.get_interval(name), succeeded_at=timezone.now())


def test_livez_asks_nobody(client, django_assert_num_queries) -> None:
    with django_assert_num_queries(0):
        response = client.get("/livez")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


def test_readyz_is_200_when_nothing_is_missing_and_healthz_says_the_same(client, beating) -> None:
    ready, healthy = client.get("/readyz"), client.get("/healthz")
    assert (ready.status_code, healthy.status_code) == (200, 200)
    found = ready.json()
    assert found["missing"] == []
    assert found["provider"] == {"name": "memory", "isolated": True, "answers": True}
    assert set(found["sweeps"]) == set(schedules.SCHEDULE)
    assert not any(sweep["late"] for sweep in found["sweeps"].values())
    assert "no-store" in ready.headers["Cache-Control"]


@pytest.mark.parametrize(("minutes", "late"), [(3.5, False), (4.1, True)])
def test_a_heartbeat_is_late_after_three_periods_and_a_minute(client, beating, minutes: float, late: bool) -> None:
    Sweep.objects.filter(name="heartbeat").update(succeeded_at=timezone.now() - timedelta(minutes=minutes))
    assert client.get("/healthz").status_code == 200
    response = client.get("/readyz")
    assert response.status_code == (503 if late else 200)
    assert response.json()["missing"] == (["The queue has no recent heartbeat, so no sweeps run."] if late else [])


def test_a_late_sweep_is_shown_but_does_not_take_the_api_away(client, beating) -> None:
    Sweep.objects.filter(name="reconcile").update(succeeded_at=None)
    response = client.get("/readyz")
    assert response.status_code == 200
    assert response.json()["sweeps"]["reconcile"] == {"age_seconds": None, "every_seconds": 300.0, "late": True}


def test_a_provider_that_does_not_answer_is_missing_and_asked_again_after_a_while(client, beating, memory) -> None:
    memory.fail("list", Unavailable("secret path"))
    response = client.get("/readyz")
    assert response.status_code == 503
    assert response.json()["missing"] == ["The provider memory does not respond."]
    assert "secret" not in response.content.decode()
    memory.reset()
    assert client.get("/readyz").status_code == 503
    health.provider_probe.queried_at -= health.PROBE_CACHE_SECONDS
    assert client.get("/readyz").status_code == 200


def test_without_a_database_healthz_is_503_and_livez_is_not(client, monkeypatch: pytest.MonkeyPatch) -> None:
    def down() -> None:
        raise OperationalError("password=secret")

    monkeypatch.setattr(connection, "cursor", down)
    for path in ("/healthz", "/readyz"):
        response = client.get(path)
        assert response.status_code == 503
        assert response.json() == {
            "status": "not ready", "missing": ["The database does not respond."], "database": False,
        }  # fmt: skip
    assert client.get("/livez").status_code == 200


def test_a_migration_that_is_not_applied_is_missing(client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "find_unapplied_migrations", lambda: ["leases.0099_later"])
    assert client.get("/healthz").status_code == 200
    assert client.get("/readyz").json()["missing"] == ["Migrations are not applied: run manage.py migrate."]


def test_what_waits_and_what_is_in_quarantine_is_counted(client, beating, grant) -> None:
    lease = grant()
    execution.exec_command(lease.pk, Command(argv=["true"], timeout=MINUTE), now=NOW)
    Sandbox.objects.filter(holder=lease.pk).update(state="destroying", deadline_at=NOW, quarantined_at=NOW)
    schedules.enqueue_all_sweeps()
    found = client.get("/healthz").json()
    assert (found["queue"], found["quarantined"]) == ({"waiting": len(schedules.SCHEDULE)}, 1)


@pytest.mark.parametrize("path", ["/livez", "/healthz", "/readyz"])
def test_probes_are_read_only_and_need_no_host(client, path: str, beating) -> None:
    assert client.post(path).status_code == 405
    assert client.get(path, HTTP_HOST="10.1.2.3").status_code == 200
    assert client.head(path).status_code == 200


def test_a_probe_costs_few_queries(client, beating, django_assert_max_num_queries) -> None:
    client.get("/readyz")
    with django_assert_max_num_queries(6):
        client.get("/readyz")
