"""The lists of few runs among many are read from an index, in their order."""

import uuid
from typing import Any

import pytest
from django.db import connection
from django.db.models import Q

from sandboxes.admin.runs import RunAdmin
from sandboxes.models import Run
from tests.conftest import MINUTE, NOW
from tests.support.billing import create_sandbox

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("plans: SQLite does not compare values with an index's condition")]


def build_run(number: int, **fields: Any) -> Run:
    at = NOW - number * MINUTE
    times = {"started_at": at, "deadline_at": at + MINUTE, "ended_at": at + MINUTE}
    return Run(**{"id": uuid.uuid4(), "argv": ["true"], "outcome": "ok", "kind": "exec", "metered": True, **times, **fields})


@pytest.mark.parametrize(
    ("condition", "index", "failed"),
    [
        (RunAdmin.list_tabs["failed"].get_filter(NOW), "run_not_ok", 0),
        (Q(outcome="oom"), "run_rare_outcome", 1500),
        (Q(kind="file"), "run_not_exec", 0),
    ],
)
@pytest.mark.skipif(connection.vendor != "postgresql", reason="plans of PostgreSQL")
def test_few_runs_among_many_are_found_by_an_index(condition: Q, index: str, failed: int) -> None:
    sandbox = create_sandbox()
    runs = [build_run(number, sandbox=sandbox, outcome="failed" if number < failed else "ok") for number in range(2000)]
    for run in runs[-100:]:
        run.outcome, run.kind = "oom", "file"
    Run.objects.bulk_create(runs, batch_size=500)
    with connection.cursor() as cursor:
        cursor.execute("REINDEX TABLE sandboxes_run")  # rows that earlier tests have rolled back make an index look large
        cursor.execute("ANALYZE sandboxes_run")
    plan = Run.objects.filter(condition).order_by("-started_at", "-pk")[:20].explain()
    assert index in plan and "Sort" not in plan, plan
