"""Plans of PostgreSQL: statements that read the whole of a growing table."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from django.db import connection

MIN_ROWS = 2_000  # of a growing table: the planner reads a small one completely, also with an index
EXPLAINED = ("SELECT", "UPDATE", "DELETE", "WITH", "INSERT")


def list_full_reads(captured: Iterable[dict[str, str]]) -> list[str]:
    """Return the full reads of growing tables by the captured statements, each with its statement."""
    growing, partial = find_growing_tables(), find_partial_indexes()
    statements = {query["sql"] for query in captured if query["sql"].lstrip("( ").upper().startswith(EXPLAINED)}
    assert statements
    reads = [(read, statement[:1000]) for statement in statements for read in find_full_reads(statement, growing, partial)]
    return [f"{read[:200]} in {statement}" for read, statement in reads]


def find_growing_tables() -> set[str]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT relname FROM pg_class WHERE relkind = 'r' AND reltuples >= %s", [MIN_ROWS])
        return {name for (name,) in cursor.fetchall()}


def find_partial_indexes() -> set[str]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT indexrelid::regclass::text FROM pg_index WHERE indpred IS NOT NULL")
        return {name for (name,) in cursor.fetchall()}


def iterate_nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for inner in plan.get("Plans", []):
        yield from iterate_nodes(inner)


def find_full_reads(statement: str, growing: set[str], partial: set[str]) -> list[str]:
    """Return the growing tables that a statement reads completely: row by row, or by an index of all rows and a filter."""
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN (FORMAT JSON) {statement}".replace("%", "%%"), [])
        [[content]] = cursor.fetchall()
    [explained] = content if isinstance(content, list) else json.loads(content)
    found = []
    for node in iterate_nodes(explained["Plan"]):
        table, index = node.get("Relation Name"), node.get("Index Name")
        if table not in growing:
            continue
        if node["Node Type"] == "Seq Scan" or (
            index and "Filter" in node and "Index Cond" not in node and index not in partial
        ):
            found.append(f"{node['Node Type']} {table} {index or ''}: {node.get('Filter', '')}")
    return found
