"""Plans of the console's searches and filters on an installation with a long history, and the rows that they find."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
from django.db import connection
from django.db.models import Q
from django.test import Client
from django.test.utils import CaptureQueriesContext
from pytest_django import DjangoDbBlocker

from billing.models import UsageRecord
from leases.models import Lease, Turn
from sandboxes.admin.base import owner_search
from sandboxes.models import Pool, Reading, Run
from tests.admin.conftest import NOW, run
from tests.bench.history import insert_history
from tests.support.plans import find_growing_tables, list_full_reads

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.postgres("plans"),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="plans of PostgreSQL"),
]
RUNS = 30_000
GROWING = {"billing_usagerecord", "leases_lease", "leases_turn", "sandboxes_reading", "sandboxes_run", "sandboxes_sandbox"}
SUMMED = "billing_costrecord"  # this month's sum in the header, cached for some seconds
BY_SANDBOX = ("sandbox__agent_did", "sandbox__environment_id")
SEARCHED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "sandboxes/run/?slice=all": (Run, ("agent_did", "sandbox__environment_id")),
    "sandboxes/reading/?slice=all": (Reading, BY_SANDBOX),
    "leases/turn/?slice=all": (Turn, ("lease__agent_did", "lease__environment_id")),
    "leases/lease/?slice=history": (Lease, ("agent_did", "environment_id")),
    "billing/usagerecord/?slice=all": (UsageRecord, ("agent_did", "environment_id")),
}
TERMS = ["nothing", "game-17", "game-2", "did:plc:a77", "did:plc:a7", "did:", "did:plc:a77 game-17"]


@pytest.fixture(scope="module", autouse=True)
def compact_tables(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[None]:
    """Remove the dead rows afterwards: a rollback leaves them, and the statistics, to the plans of later tests."""
    yield
    with django_db_blocker.unblock(), connection.cursor() as cursor:
        cursor.execute("VACUUM (FULL, ANALYZE)")


@pytest.fixture
def history(grant: Callable[..., Lease], pool: Pool) -> Lease:
    """Active lease with a sandbox that has run a command, beside a history."""
    lease = grant(environment="open")
    run(lease, "true")
    insert_history(pool, RUNS, now=NOW)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    return lease


def list_page_reads(client: Client, path: str) -> list[str]:
    with CaptureQueriesContext(connection) as captured:
        assert client.get(f"/admin/{path}").status_code == 200, path
    bounded = [query for query in captured if "LIMIT" not in query["sql"] or "WHERE" in query["sql"]]  # of any rows
    return [f"{path}: {read}" for read in list_full_reads(bounded) if SUMMED not in read]


def test_rare_rows_are_found_without_a_read_of_the_history(viewer: Client, history: Lease) -> None:
    assert find_growing_tables() >= GROWING
    paths = [f"{page}&q=nothing" for page in SEARCHED]
    paths += [f"sandboxes/run/?slice=all&outcome__exact={outcome}" for outcome in ("open", "oom", "lost", "error", "timed_out")]
    paths += [
        "sandboxes/run/?slice=all&stop_reason__exact=ttl", "sandboxes/run/?slice=all&agent_did=did:plc:a77",
        f"sandboxes/reading/?holder={history.pk}", "billing/usagerecord/?slice=unpriced", "sandboxes/sandbox/?slice=history",
        "sandboxes/event/", "sandboxes/delivery/?slice=all", "sandboxes/event/?q=nothing",
    ]  # fmt: skip
    reads = [read for path in paths for read in list_page_reads(viewer, path)]
    assert not reads, "\n\n".join(reads)
    for index, path in [
        ("sandbox_environment_prefix", "sandboxes/run/?slice=all&q=nothing"),
        ("run_stopped", "sandboxes/run/?slice=all&stop_reason__exact=ttl"),
    ]:
        with connection.cursor() as cursor:
            cursor.execute(f"DROP INDEX {index}")
        assert list_page_reads(viewer, path), f"a missing index {index} is not noticed"


@pytest.mark.usefixtures("history")
def test_a_search_finds_the_rows_of_the_plain_condition(viewer: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    for owners in (0, owner_search.MAX_OWNERS_LISTED):
        monkeypatch.setattr(owner_search, "MAX_OWNERS_LISTED", owners)
        for page, term in product(SEARCHED, TERMS):
            model, columns = SEARCHED[page]
            condition = Q()
            for word in term.split():
                condition &= Q(*((f"{name}__startswith", word) for name in columns), _connector=Q.OR)
            expected = model.objects.filter(condition)
            changelist = viewer.get(f"/admin/{page}", {**dict([page.partition("?")[2].split("=")]), "q": term}).context["cl"]
            ordered = expected.order_by(*changelist.model_admin.ordering)[:50]
            assert [row.pk for row in changelist.result_list] == [row.pk for row in ordered], (page, term)
            assert changelist.result_count == min(expected.count(), changelist.paginator.cap), (page, term)
