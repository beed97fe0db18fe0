"""Thresholds of budgets: the event of each percentage, once a period."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from importlib import import_module
from typing import Any

import pytest
from django.db import connection
from django.db.migrations.loader import MigrationLoader

from billing import budgets
from billing.models import Budget
from sandboxes.db.migration_operations import ChangeRowsInBatches
from sandboxes.models import Event
from tests.conftest import MINUTE, NOW
from tests.support.billing import (
    HOUR,
    create_budget,
    create_time_usage,
    list_budget_events,
    run_billing_sweeps,
    run_command,
    start_run,
)

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.usefixtures("stopped_clock"),
    pytest.mark.postgres("budgets: sums and locks"),
]
AnyCallable = Callable[..., Any]
DAY = timedelta(days=1)
MIDNIGHT = datetime(2026, 11, 22, tzinfo=UTC)


def test_warning_and_exhaustion_are_sent_once_per_period(grant: AnyCallable, memory: Any) -> None:
    lease = grant(now=NOW, ttl=23 * HOUR, sleep_after=DAY)
    run_command(lease)
    budget = create_budget(1, hard=False)
    start_run(lease, timeout=9 * DAY)
    marks = {}
    for minute in range(0, 70, 6):
        run_billing_sweeps(NOW + minute * MINUTE)
        marks[minute] = len(list_budget_events())
    assert [minute for minute in marks if marks[minute] > marks.get(minute - 6, 0)] == [30, 48, 60]
    expected = {"budget": budget.pk, "spent": "1", "amount": "1", "remaining": "0", "resets_at": "2026-11-22T00:00:00Z"}
    assert expected.items() <= Event.objects.get(kind="budget.exhausted").payload.items()
    run_billing_sweeps(MIDNIGHT + 50 * MINUTE), run_billing_sweeps(MIDNIGHT + HOUR)
    assert [percent for _, percent in list_thresholds()] == [50, 80, 100, 100, 80, 100, 100]


def list_thresholds() -> list[tuple[str, int]]:
    events = Event.objects.filter(kind__startswith="budget.").order_by("at", "-kind")
    return [(each.kind.removeprefix("budget."), each.payload["percent"]) for each in events]


@pytest.mark.parametrize(
    ("hours", "sent"),
    [
        ([0.4], []), ([0.5], [50]), ([0.79, 0.01], [50, 80]), ([0.85], [80]), ([0.6, 0.39], [50, 80]), ([0.2, 3], [100]),
        ([0.55, 0.4, 0.4], [50, 80, 100]), ([0.1] * 12, [50, 80, 100]),
    ],
)  # fmt: skip
def test_jump_over_several_thresholds_sends_the_highest(hours: list[float], sent: list[int]) -> None:
    budget = create_budget(1, hard=False)
    for number, used in enumerate(hours):
        create_time_usage(NOW - 11 * HOUR, used * HOUR)
        for _ in range(2):  # a pass that is repeated sends nothing
            budgets.update_spending(budget.pk, now=NOW + number * MINUTE)
    assert [percent for kind, percent in list_thresholds() if kind == "warning"] == sent


@pytest.mark.skipif(
    connection.vendor != "postgresql", reason="SQLite loses the old column when a later migration copies the table"
)
def test_upgrade_keeps_the_warning_of_each_budget() -> None:
    historical: Any = MigrationLoader(connection).project_state(("billing", "0027_budget_scopes")).apps
    rows = historical.get_model("billing", "Budget")._base_manager
    fields = {"scope": "all", "unit": "usd", "amount": 1, "period": "day"}
    warned = rows.create(warn_percent=70, warned_for=MIDNIGHT, **fields)
    rows.create(warn_percent=80, **fields)
    migration = import_module("billing.migrations.0028_carry_warn_percent")
    [operation] = [each for each in migration.Migration.operations if isinstance(each, ChangeRowsInBatches)]
    for _ in range(2):  # a repetition after a crash
        operation.change(rows.filter(operation.condition))
    assert [*Budget.objects.values_list("warn_percents", "warned_percent")] == [([70], 70), ([80], None)]
    assert Budget.objects.get(pk=warned.pk).warned_for == MIDNIGHT


def test_concurrent_passes_send_a_threshold_once(at_checkpoint: AnyCallable) -> None:
    budget = create_budget(1, hard=False)
    create_time_usage(NOW - 11 * HOUR, 0.9 * HOUR)
    at_checkpoint("budget summed", lambda: budgets.update_spending(budget.pk, now=NOW + MINUTE))
    assert budgets.update_spending(budget.pk, now=NOW + MINUTE) == []
    assert list_thresholds() == [("warning", 80)]


def test_interrupted_pass_sends_a_threshold_later(crash_at: AnyCallable) -> None:
    budget = create_budget(1, hard=False)
    create_time_usage(NOW - 11 * HOUR, 0.9 * HOUR)
    with crash_at("budget marked"):
        budgets.update_spending(budget.pk, now=NOW + MINUTE)
    assert list_thresholds() == []
    assert budgets.update_spending(budget.pk, now=NOW + 2 * MINUTE) == ["warned"]
    assert list_thresholds() == [("warning", 80)]
