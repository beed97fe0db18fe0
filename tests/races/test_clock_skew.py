"""Hosts whose clocks differ: claims and deadlines follow the clock of the database."""

from datetime import timedelta

import pytest
from django.db import OperationalError, connection, transaction
from django.utils import timezone

from controlplane import health, schedules
from leases.models import Lease
from sandboxes import lifecycle
from sandboxes.db import database_time
from sandboxes.models import Run
from tests.conftest import MINUTE
from tests.support.leases import run

pytestmark = pytest.mark.django_db(transaction=True)
HOST_TIME = timezone.now


@pytest.fixture
def set_skew(monkeypatch: pytest.MonkeyPatch):
    """Return a function that sets the clock of this host ahead of the database's, as for another host."""
    monkeypatch.setattr(database_time, "meter", database_time.SkewMeter())

    def set_ahead(ahead: timedelta) -> None:
        monkeypatch.setattr(timezone, "now", lambda: HOST_TIME() + ahead)
        monkeypatch.setattr(database_time, "measure_skew", lambda: -ahead)
        database_time.meter.tried = None

    return set_ahead


def test_host_whose_clock_is_ahead_does_not_close_a_live_run(grant, set_skew) -> None:
    lease: Lease = grant(now=database_time.now())

    def sweep_on_another_host(name: str, subject: object) -> None:
        if name == "run opened":
            set_skew(10 * MINUTE)
            schedules.run("stalled")
            schedules.run("expire")

    lifecycle.CHECKPOINT_HOOKS.append(sweep_on_another_host)
    try:
        assert run(lease, now=database_time.now()).exit_code == 0
    finally:
        lifecycle.CHECKPOINT_HOOKS.remove(sweep_on_another_host)
    assert Run.objects.get().outcome == "ok"


def test_skew_is_measured_once_a_minute_shown_and_tolerated_below_a_second(set_skew, django_assert_num_queries) -> None:
    set_skew(timedelta(seconds=0.5))
    assert abs(database_time.now() - timezone.now()) < timedelta(seconds=0.1)
    set_skew(timedelta(seconds=-40))
    assert abs(database_time.now() - HOST_TIME()) < timedelta(seconds=1)
    report = health.check_health(now=database_time.now())
    assert report["clock_skew_seconds"] == -40.0
    assert any("differs from the database's by -40 s" in warning for warning in report["warnings"])
    with django_assert_num_queries(0):
        database_time.now()


@pytest.mark.parametrize("ahead", [timedelta(hours=1), timedelta(hours=-1), timedelta(days=1)])
def test_a_clock_that_is_set_is_noticed_at_the_next_look(
    set_skew, monkeypatch: pytest.MonkeyPatch, ahead: timedelta, django_assert_num_queries
) -> None:
    set_skew(timedelta(0))
    assert abs(database_time.now() - HOST_TIME()) < timedelta(seconds=1)
    monkeypatch.setattr(timezone, "now", lambda: HOST_TIME() + ahead)
    monkeypatch.setattr(database_time, "measure_skew", lambda: -ahead)
    assert abs(database_time.now() - HOST_TIME()) < timedelta(seconds=1)
    with django_assert_num_queries(0):
        assert abs(database_time.now_without_query() - HOST_TIME()) < timedelta(seconds=1)


@pytest.mark.parametrize("ahead", [timedelta(hours=1), timedelta(days=-1)])
def test_a_use_that_does_not_measure_is_right_at_once_after_the_clock_was_set(
    set_skew, monkeypatch: pytest.MonkeyPatch, ahead: timedelta
) -> None:
    """Inside a transaction, on an event loop, and while the database refuses the measurement."""
    set_skew(timedelta(0))
    database_time.now()
    monkeypatch.setattr(timezone, "now", lambda: HOST_TIME() + ahead)
    assert abs(database_time.now_without_query() - HOST_TIME()) < timedelta(seconds=1)
    with transaction.atomic():
        assert abs(database_time.now() - HOST_TIME()) < timedelta(seconds=1)

    def refuse() -> timedelta:
        raise OperationalError("The database does not respond.")

    monkeypatch.setattr(database_time, "measure_skew", refuse)
    for _ in range(2):  # the second use finds the clock as the failed measurement found it
        assert abs(database_time.now() - HOST_TIME()) < timedelta(seconds=1)
    set_skew(ahead)
    assert abs(database_time.now() - HOST_TIME()) < timedelta(seconds=1)


def test_a_clock_that_is_set_during_a_measurement_is_measured_again(set_skew, monkeypatch: pytest.MonkeyPatch) -> None:
    set_skew(timedelta(0))
    shift = [timedelta(0)]
    monkeypatch.setattr(timezone, "now", lambda: HOST_TIME() + shift[0])

    def measure() -> timedelta:
        """Measure between two readings of the clock, of which the first one is before the clock is set."""
        before = timezone.now()
        shift[0] = timedelta(hours=1)
        return HOST_TIME() - before

    monkeypatch.setattr(database_time, "measure_skew", measure)
    assert abs(database_time.now() - HOST_TIME()) < timedelta(seconds=1)
    assert abs(database_time.get_skew() + timedelta(hours=1)) < timedelta(seconds=1)


def test_a_process_is_right_after_a_suspension_of_its_machine(set_skew, monkeypatch: pytest.MonkeyPatch) -> None:
    """The monotonic clock stands still meanwhile, the uptime and the clock do not."""
    set_skew(timedelta(0))
    database_time.now()
    uptime, suspended = database_time.read_uptime, timedelta(hours=8)
    monkeypatch.setattr(database_time, "read_uptime", lambda: uptime() + suspended.total_seconds())
    assert abs(database_time.now_without_query() - HOST_TIME() - suspended) < timedelta(seconds=1)


@pytest.mark.skipif(connection.vendor != "postgresql", reason="SQLite has no clock of its own")
def test_clock_of_the_database_is_read() -> None:
    assert abs(database_time.measure_skew()) < timedelta(seconds=1)
