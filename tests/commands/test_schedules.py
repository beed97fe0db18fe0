"""The queue's schedules are those of the table, whatever was in the rows before."""

import pydoc
from datetime import timedelta

import pytest
from django.core.management import call_command
from django_q.models import OrmQ, Schedule

from billing.admin import overshoot
from controlplane import schedules
from sandboxes.models import Sweep
from tests.conftest import NOW

pytestmark = pytest.mark.django_db


def rows() -> dict[str, int | None]:
    return dict(Schedule.objects.values_list("func", "minutes"))


def test_sync_makes_a_row_for_each_line_of_the_table_and_a_repeat_changes_nothing() -> None:
    assert schedules.sync_schedules(now=NOW) == {"created": len(schedules.INTERVAL_MINUTES), "changed": 0, "removed": 0}
    assert rows() == {f"controlplane.schedules.{name}": minutes for name, minutes in schedules.INTERVAL_MINUTES.items()}
    assert schedules.sync_schedules(now=NOW) == {"created": 0, "changed": 0, "removed": 0}


@pytest.mark.parametrize(
    "spoilt",
    [{"minutes": 99}, {"args": "(("}, {"repeats": 0}, {"cluster": "other"}, {"next_run": NOW + timedelta(days=9)}],
)
def test_sync_repairs_a_row_that_was_changed(spoilt: dict[str, object]) -> None:
    schedules.sync_schedules(now=NOW)
    Schedule.objects.filter(name="expire").update(**spoilt)
    assert schedules.sync_schedules(now=NOW) == {"created": 0, "changed": 1, "removed": 0}
    row = Schedule.objects.get(name="expire")
    assert (row.minutes, row.args, row.repeats, row.cluster, row.next_run) == (1, None, -1, None, NOW)


def test_sync_keeps_the_time_of_the_next_run() -> None:
    schedules.sync_schedules(now=NOW)
    schedules.sync_schedules(now=NOW + timedelta(hours=1))
    assert set(Schedule.objects.values_list("next_run", flat=True)) == {NOW}


def test_sync_removes_what_is_gone_and_twins_and_leaves_the_rows_of_others() -> None:
    schedules.sync_schedules(now=NOW)
    Schedule.objects.create(func="controlplane.schedules.retired", name="retired")
    Schedule.objects.create(func="controlplane.schedules.expire", name="expire")
    Schedule.objects.create(func="somebody.elses", name="expire")
    assert schedules.sync_schedules(now=NOW) == {"created": 0, "changed": 0, "removed": 2}
    assert len(rows()) == len(schedules.INTERVAL_MINUTES) + 1
    assert "somebody.elses" in rows()


@pytest.mark.parametrize("name", schedules.INTERVAL_MINUTES)
def test_each_scheduled_path_is_a_function_that_leaves_a_row_saying_when_it_succeeded(name: str, memory) -> None:
    function = pydoc.locate(schedules.TASK_PREFIX + name)  # as the queue finds it
    assert callable(function)
    assert function() == "nothing to do"
    row = Sweep.objects.get(name=name)
    assert row.succeeded_at is not None
    assert row.every == timedelta(minutes=schedules.INTERVAL_MINUTES[name])


def test_run_now_queues_one_pass_of_everything() -> None:
    schedules.enqueue_all_sweeps()
    assert {task.func() for task in OrmQ.objects.all()} == {schedules.TASK_PREFIX + name for name in schedules.INTERVAL_MINUTES}


def test_the_command_says_what_it_changed(capsys) -> None:
    count = len(schedules.INTERVAL_MINUTES)
    call_command("sync_schedules")
    call_command("sync_schedules")
    assert capsys.readouterr().out.splitlines() == [
        f"schedules: {count} in place, {count} created",
        f"schedules: {count} in place, nothing to change",
    ]


def test_the_bound_that_operators_are_told_is_of_these_periods() -> None:
    """How far a budget may be overspent follows from how often its sweeps run."""
    periods = {name: timedelta(minutes=schedules.INTERVAL_MINUTES[name]) for name in ("meter", "budgets", "read")}
    assert periods == {
        "meter": overshoot.SWEEP_INTERVAL,
        "budgets": overshoot.SWEEP_INTERVAL,
        "read": overshoot.READING_INTERVAL,
    }
