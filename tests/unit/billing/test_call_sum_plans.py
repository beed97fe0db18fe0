"""Plans of the sums of an admission: calls that are not metered are found without a read of the others."""

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest
from django.db import connection
from psycopg.sql import Literal

from billing.budgets.call_admission import sum_lease_calls, sum_spent_now
from billing.call_measures import MEASURES
from billing.models import Budget
from billing.models.budgets import Scope
from leases.models import Lease
from sandboxes.models import LlmCall
from tests.bench.history import insert
from tests.conftest import NOW
from tests.support.plans import iterate_nodes

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.postgres("plans"),
    pytest.mark.usefixtures("compact_tables"),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="plans of prepared statements on PostgreSQL"),
]
METERED, UNMETERED = 20_000, 2_000  # more than the 0.5 % of all calls that a range of unknown times is assumed to select


@pytest.fixture
def busy_lease(lease: Lease) -> Lease:
    """Lease with all calls of the installation, one a second."""
    at = f"TIMESTAMPTZ '{NOW}' + INTERVAL '1 second' * n"
    values = {"holder": f"'{lease.pk}'::uuid", "started_at": at, "ended_at": at, "deadline_at": at, "call_id": "'call ' || n"}
    columns = {"agent_did": lease.agent_did, "outcome": "ok", "cost": 1}
    insert(LlmCall, f"generate_series(1, {METERED}) n", values, metered_cost=1, counted=True, **columns)
    insert(LlmCall, f"generate_series({METERED + 1}, {METERED + UNMETERED}) n", values, **columns)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE sandboxes_llmcall")
    return lease


@pytest.fixture
def sums() -> Iterator[list[tuple[str, list[Any]]]]:
    """The executed queries that read model calls, and their parameters."""
    executed = list[tuple[str, list[Any]]]()

    def note(execute: Any, statement: str, values: Any, many: bool, context: Any) -> Any:
        if statement.startswith("SELECT") and LlmCall._meta.db_table in statement:
            executed.append((statement, [*values]))
        return execute(statement, values, many, context)

    with connection.execute_wrapper(note):
        yield executed


def count_calls_read(statement: str, values: list[Any]) -> int:
    """Execute a statement by a plan for unknown values, and return the rows or index entries of calls that it has read."""
    numbers = iter(range(1, len(values) + 1))
    text = re.sub(r"%s|%%", lambda found: f"${next(numbers)}" if found[0] == "%s" else "%", statement)
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL plan_cache_mode = force_generic_plan")
        cursor.execute("PREPARE sum_of_calls AS " + text.replace("%", "%%"), [])
        literals = ", ".join(Literal(value).as_string(cursor.connection) for value in values)
        cursor.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) EXECUTE sum_of_calls({literals})".replace("%", "%%"), [])
        [[content]] = cursor.fetchall()
        cursor.execute("DEALLOCATE sum_of_calls")
    [explained] = content if isinstance(content, list) else json.loads(content)
    calls = [node for node in iterate_nodes(explained["Plan"]) if is_about_calls(node)]
    assert calls
    return max((node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"] for node in calls)


def is_about_calls(node: dict[str, Any]) -> bool:
    """A bitmap is of an index, and does not name its table."""
    return node.get("Relation Name") == LlmCall._meta.db_table or node.get("Index Name", "").startswith("llmcall_")


@pytest.mark.parametrize("unit", MEASURES)
@pytest.mark.parametrize("scope", Scope)
def test_budget_reads_no_metered_call(busy_lease: Lease, sums: list[tuple[str, list[Any]]], scope: Scope, unit: str) -> None:
    subject = {Scope.ALL: "", Scope.AGENT: busy_lease.agent_did}.get(scope, "other")
    sum_spent_now(Budget(scope=scope, subject=subject, unit=unit, amount=Decimal(1), period="month"), now=NOW)
    [executed] = sums
    read = count_calls_read(*executed)
    assert read <= UNMETERED
    assert read or scope not in (Scope.ALL, Scope.AGENT)  # of others the planner may find first that they have no lease


@pytest.mark.parametrize("unit", ["usd", "tokens"])
def test_limit_of_a_lease_reads_no_metered_call(busy_lease: Lease, sums: list[tuple[str, list[Any]]], unit: Any) -> None:
    sum_lease_calls(busy_lease.pk, unit)
    [executed] = sums
    assert count_calls_read(*executed) == UNMETERED
