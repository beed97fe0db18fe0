"""Status and report of /livez, /healthz and /readyz."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.db import OperationalError, ProgrammingError, connection
from django.utils import timezone

from controlplane import health, schedules
from sandboxes.db import database_time, pooler
from sandboxes.models import Host, Sweep
from sandboxes.providers.errors import Unavailable
from tests.conftest import NOW

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def memory_probed(memory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An unused probe of the memory provider."""
    probe = health.ProviderProbe()
    monkeypatch.setattr(health, "provider_probe", probe)
    monkeypatch.setattr(health.providers, "get_default_provider_name", lambda: "memory")
    yield
    probe.threads.shutdown()


@pytest.fixture
def heartbeats() -> None:
    rows = {name: schedules.get_interval(name) for name in schedules.SCHEDULE}
    Sweep.objects.bulk_create(Sweep(name=name, every=every, succeeded_at=timezone.now()) for name, every in rows.items())


def test_readyz_is_200_if_nothing_is_missing_with_the_report_of_healthz(client, heartbeats) -> None:
    ready, healthy = client.get("/readyz"), client.get("/healthz")
    assert (ready.status_code, healthy.status_code) == (200, 200)
    report = ready.json()
    assert report["missing"] == []
    assert report["provider"] == {"name": "memory", "isolated": True, "answers": True}
    assert set(report["sweeps"]) == set(schedules.SCHEDULE)
    assert not any(sweep["late"] for sweep in report["sweeps"].values())
    assert "no-store" in ready.headers["Cache-Control"]


@pytest.mark.parametrize(("minutes", "late"), [(3.5, False), (4.1, True)])
def test_a_heartbeat_is_late_after_three_intervals_and_a_minute(client, heartbeats, minutes: float, late: bool) -> None:
    Sweep.objects.filter(name="heartbeat").update(succeeded_at=timezone.now() - timedelta(minutes=minutes))
    assert client.get("/healthz").status_code == 200
    response = client.get("/readyz")
    assert response.status_code == (503 if late else 200)
    assert response.json()["missing"] == (["The queue has no recent heartbeat, so no sweeps run."] if late else [])


def test_a_late_sweep_is_reported_but_does_not_fail_readyz(client, heartbeats) -> None:
    Sweep.objects.filter(name="reconcile").update(succeeded_at=None)
    response = client.get("/readyz")
    assert response.status_code == 200
    assert response.json()["sweeps"]["reconcile"] == {"age_seconds": None, "every_seconds": 300.0, "late": True}


def test_a_provider_that_does_not_respond_is_missing_and_queried_again_later(client, heartbeats, memory) -> None:
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
    report = {"status": "not ready", "missing": ["The database does not respond."], "database": False}
    for path in ("/healthz", "/readyz"):
        response = client.get(path)
        assert (response.status_code, response.json()) == (503, report)
    response = client.get("/livez")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


def test_a_fault_of_the_schema_is_not_reported_as_a_database_that_does_not_respond(
    client, heartbeats, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ProgrammingError("column secret does not exist")

    monkeypatch.setattr(health, "_load_sweeps", fail)
    response = client.get("/readyz")
    assert (response.status_code, response.json()["missing"]) == (503, ["The database reports an error. The log has it."])
    assert client.get("/healthz").status_code == 200


def record_migration(name: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO django_migrations (app, name, applied) VALUES ('leases', %s, CURRENT_TIMESTAMP)", [name])


def test_an_unapplied_migration_is_missing_although_none_was_before(client, heartbeats) -> None:
    assert client.get("/readyz").status_code == 200
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM django_migrations WHERE id = (SELECT MAX(id) FROM django_migrations WHERE app = 'leases')")
    assert client.get("/healthz").status_code == 200
    assert client.get("/readyz").json()["missing"] == ["Migrations are not applied: run manage.py migrate."]


def test_a_newer_database_is_a_warning_since_the_version_before_serves_on_it(client, heartbeats) -> None:
    record_migration("9999_later")
    response = client.get("/readyz")
    assert (response.status_code, response.json()["missing"]) == (200, [])
    assert response.json()["warnings"][0].startswith(
        "The database is newer than this version, which does not know the migration leases.9999_later."
    )


def test_a_database_of_another_history_is_missing(client, heartbeats) -> None:
    record_migration("0002_other")
    response = client.get("/readyz")
    assert response.status_code == 503
    assert response.json()["missing"][0].startswith("The migrations of this database are not those of this version")


def test_queued_tasks_are_counted(client, heartbeats) -> None:
    schedules.enqueue_all_sweeps()
    assert client.get("/healthz").json()["queue"] == {"waiting": len(schedules.SCHEDULE)}


@pytest.mark.parametrize("path", ["/livez", "/healthz", "/readyz"])
def test_probes_are_read_only_and_need_no_host(client, path: str, heartbeats) -> None:
    assert client.post(path).status_code == 405
    assert client.get(path, HTTP_HOST="10.1.2.3").status_code == 200
    assert client.head(path).status_code == 200


@pytest.mark.django_db(transaction=True)
def test_a_database_that_refuses_writes_is_not_ready(client, heartbeats) -> None:
    on, off = (
        ("SET default_transaction_read_only = on", "SET default_transaction_read_only = off")
        if connection.vendor == "postgresql"
        else ("PRAGMA query_only = ON", "PRAGMA query_only = OFF")
    )
    with connection.cursor() as cursor:
        cursor.execute(on)
        try:
            response = client.get("/readyz")
        finally:
            cursor.execute(off)
    assert (response.status_code, response.json()["missing"]) == (503, ["The database refuses writes."])
    assert client.get("/readyz").status_code == 200


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("ahead", "others", "wrong"),
    [
        (timedelta(hours=1), [], "synchronize both."),
        (timedelta(hours=-1), [timedelta(0)], "by -3600 s: synchronize it."),
        (timedelta(hours=1), [timedelta(hours=1), timedelta(0)], "The clock of this host differs"),
        (timedelta(hours=1), [timedelta(hours=1), timedelta(hours=1, seconds=1)], "The clocks of all 3 hosts differ"),
    ],
)
def test_a_wrong_clock_is_ready_and_says_whose_it_is(
    client, heartbeats, monkeypatch: pytest.MonkeyPatch, ahead: timedelta, others: list[timedelta], wrong: str
) -> None:
    own = create_host("0", queue="a")
    create_host("also of this machine", queue="a", clock_offset=ahead)
    create_host("lost", queue="z", clock_offset=timedelta(0), lost_at=NOW)
    for number, offset in enumerate(others):
        create_host(f"other {number}", queue=f"b{number}", clock_offset=offset)
    monkeypatch.setattr(health.registry, "get_remembered_host_id", lambda: own.pk)
    host_time = timezone.now
    monkeypatch.setattr(database_time, "meter", database_time.SkewMeter())
    monkeypatch.setattr(timezone, "now", lambda: host_time() + ahead)
    monkeypatch.setattr(database_time, "measure_skew", lambda: -ahead)
    response = client.get("/readyz")
    assert (response.status_code, response.json()["missing"]) == (200, [])
    [warning] = [each for each in response.json()["warnings"] if "clock" in each]
    assert wrong in warning


def create_host(name: str, **fields: Any) -> Host:
    defaults: dict[str, Any] = {"provider": "memory", "engine_id": name, "created_at": NOW, "heartbeat_at": timezone.now()}
    return Host.objects.create(id=uuid4(), name=name, **defaults | fields)


def test_a_probe_costs_few_queries(client, heartbeats, django_assert_max_num_queries) -> None:
    client.get("/readyz")
    with django_assert_max_num_queries(12):
        client.get("/readyz")


def test_readyz_reports_a_pooler_in_transaction_mode(client, heartbeats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooler, "PROBE", pooler.PoolerProbe())
    monkeypatch.setattr(pooler, "is_undeclared", lambda: True)
    response = client.get("/readyz")
    assert (response.status_code, response.json()["missing"]) == (503, [pooler.UNDECLARED])
