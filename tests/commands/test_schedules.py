"""Schedule rows of the queue against the table in controlplane/schedules.py."""

import ast
from dataclasses import replace
from datetime import datetime, timedelta
from types import SimpleNamespace

import pytest
from django.utils.module_loading import import_string
from django_q.models import Failure, OrmQ, Schedule

from billing import budgets
from billing.admin import overshoot
from controlplane import schedules
from sandboxes.db import clock
from sandboxes.hosts import registry
from sandboxes.models import Host, Sweep
from sandboxes.sweep_log import SweepResult
from sandboxes.sweeps import installation
from tests.commands.manage import call
from tests.conftest import MINUTE, NOW

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("queue: SKIP LOCKED and hand-written SQL")]


def test_the_command_creates_a_row_for_each_sweep_and_a_repeat_changes_nothing() -> None:
    count = len(schedules.SCHEDULE)
    assert call("sync_schedules") == f"schedules: {count} in place, {count} created\n"
    assert {(row.name, row.func, row.args): row.minutes for row in Schedule.objects.all()} == {
        (name, "controlplane.schedules.run", f"'{name}'"): sweep.minutes for name, sweep in schedules.SCHEDULE.items()
    }
    assert call("sync_schedules") == f"schedules: {count} in place, nothing to change\n"


def test_sync_keeps_the_time_of_the_next_run() -> None:
    assert schedules.sync_schedules(now=NOW) == {"created": len(schedules.SCHEDULE), "changed": 0, "removed": 0}
    assert schedules.sync_schedules(now=NOW + timedelta(hours=1)) == {"created": 0, "changed": 0, "removed": 0}
    assert set(Schedule.objects.values_list("next_run", flat=True)) == {NOW}


@pytest.mark.parametrize(
    "change",
    [
        {"minutes": 99}, {"args": "(("}, {"args": "'idle'"}, {"kwargs": "{'name': 'idle'}"}, {"repeats": 0},
        {"next_run": NOW + timedelta(days=9)},
    ],
)  # fmt: skip
def test_sync_repairs_a_changed_row(change: dict[str, object]) -> None:
    schedules.sync_schedules(now=NOW)
    Schedule.objects.filter(name="expire").update(**change)
    assert schedules.sync_schedules(now=NOW) == {"created": 0, "changed": 1, "removed": 0}
    row = Schedule.objects.get(name="expire")
    assert (row.minutes, row.args, row.kwargs, row.repeats, row.next_run) == (1, "'expire'", None, -1, NOW)
    assert row.cluster == registry.get_queue_name()


def test_each_host_that_is_not_lost_has_schedules_of_its_own(memory, django_assert_max_num_queries) -> None:
    for engine in ("engine-a", "engine-b"):
        with memory.on_engine(engine):
            host = registry.get_local_host("memory", now=NOW)
            schedules.sync_schedules(now=NOW)
    assert Schedule.objects.filter(name="idle").count() == 2
    with memory.on_engine("engine-a"), django_assert_max_num_queries(6):  # not for each host
        schedules.sync_schedules(now=NOW)
    Host.objects.filter(pk=host.pk).update(lost_at=NOW)
    with memory.on_engine("engine-a"):
        assert schedules.sync_schedules(now=NOW)["removed"] == len(schedules.SCHEDULE)
    assert not Schedule.objects.filter(cluster=host.queue).exists()


def test_sync_removes_retired_and_duplicate_rows_and_keeps_foreign_ones() -> None:
    schedules.sync_schedules(now=NOW)
    Schedule.objects.create(func="controlplane.schedules.run", args="'retired'", name="retired")
    Schedule.objects.create(func="controlplane.schedules.run", args="'expire'", name="expire")
    Schedule.objects.create(func="somebody.elses", name="expire")
    assert schedules.sync_schedules(now=NOW) == {"created": 0, "changed": 0, "removed": 2}
    assert Schedule.objects.count() == len(schedules.SCHEDULE) + 1
    assert Schedule.objects.filter(func="somebody.elses").exists()


def test_sync_replaces_the_rows_of_a_version_with_one_function_a_sweep() -> None:
    count = len(schedules.SCHEDULE)
    Schedule.objects.bulk_create(Schedule(func=f"controlplane.schedules.{name}", name=name) for name in schedules.SCHEDULE)
    assert schedules.sync_schedules(now=NOW) == {"created": count, "changed": 0, "removed": count}
    assert set(Schedule.objects.values_list("func", flat=True)) == {"controlplane.schedules.run"}


@pytest.mark.parametrize("name", schedules.SCHEDULE)
def test_each_scheduled_call_runs_its_sweep_and_records_the_success(name: str, memory) -> None:
    schedules.sync_schedules(now=NOW)
    row = Schedule.objects.get(name=name)
    assert import_string(row.func)(ast.literal_eval(row.args)) == (
        {"mark": "1 marked", "hosts": "1 hosts seen"}.get(name, "nothing to do")
    )  # the queue parses `args` in the same way
    sweep = Sweep.objects.get(name=name)
    assert sweep.succeeded_at is not None
    assert sweep.every == timedelta(minutes=schedules.SCHEDULE[name].minutes)


def test_enqueue_all_sweeps_queues_one_pass_of_each() -> None:
    schedules.enqueue_all_sweeps()
    tasks = [task.task for task in OrmQ.objects.all()]
    assert [(task["func"], task["args"]) for task in tasks] == [
        ("controlplane.schedules.run", (name,)) for name in schedules.SCHEDULE
    ]


def test_old_failed_tasks_are_deleted(memory) -> None:
    for age in (timedelta(days=29), timedelta(days=31)):
        stopped = NOW - age
        Failure.objects.create(id=str(age.days), name="idle", func="f", started=stopped, stopped=stopped, success=False)
    schedules.run_sweep("retention", now=NOW)
    assert [task.id for task in Failure.objects.all()] == ["29"]


def test_the_documented_overshoot_bound_uses_these_intervals() -> None:
    assert schedules.get_interval("meter") == schedules.get_interval("budgets") == budgets.SWEEP_INTERVAL
    assert schedules.get_interval("read") == overshoot.READING_INTERVAL


def test_a_sweep_begins_after_the_check_of_the_installation(monkeypatch: pytest.MonkeyPatch, memory) -> None:
    elapsed, seen = [0.0], []
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: elapsed[0]))

    def check_slowly() -> str:
        elapsed[0] = 60.0
        return ""

    def record(*, now: datetime) -> SweepResult:
        seen.append(now)
        return SweepResult()

    monkeypatch.setattr(installation, "find_mismatch", check_slowly)
    monkeypatch.setitem(schedules.SCHEDULE, "idle", replace(schedules.SCHEDULE["idle"], sweep=record))
    schedules.run_sweep("idle", now=NOW)
    assert seen == [NOW + MINUTE]
