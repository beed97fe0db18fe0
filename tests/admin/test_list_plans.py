"""Plans of the console's searches and filters on an installation with a long history, and the rows that they find."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models import Q
from django.test import Client
from django.test.utils import CaptureQueriesContext

from billing.admin.usage import UsageRecordAdmin
from billing.models import UsageRecord
from leases.atproto.models import AtprotoRecord
from leases.coding.models import CodingTask, Repository
from leases.models import Environment, Lease, QueuedRun, Turn
from sandboxes.admin.base import owner_search
from sandboxes.models import (
    DataEvent,
    Delivery,
    EgressConnection,
    LlmCall,
    MintedToken,
    Pool,
    Reading,
    Run,
    SigningKey,
    Webhook,
)
from tests.admin.conftest import NOW, run
from tests.bench.history import IN_GAME, RUNS_PER_LEASE, SANDBOX_ID, insert, insert_history
from tests.support.plans import find_growing_tables, list_full_reads

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.postgres("plans"),
    pytest.mark.usefixtures("compact_tables"),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="plans of PostgreSQL"),
]
RUNS = 30_000
GROWING = {
    "billing_costrecord", "billing_usagerecord", "leases_atprotorecord", "leases_codingtask", "leases_lease",
    "leases_queuedrun", "leases_turn", "sandboxes_dataevent", "sandboxes_delivery", "sandboxes_egressconnection",
    "sandboxes_event", "sandboxes_llmcall", "sandboxes_mintedtoken", "sandboxes_reading", "sandboxes_run", "sandboxes_sandbox",
}  # fmt: skip
BY_SANDBOX = ("sandbox__agent_did", "sandbox__environment_id")
SEARCHED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "sandboxes/run/?slice=all": (Run, ("agent_did", "sandbox__environment_id")),
    "sandboxes/reading/?slice=all": (Reading, BY_SANDBOX),
    "leases/turn/?slice=all": (Turn, ("lease__agent_did", "lease__environment_id")),
    "leases/lease/?slice=history": (Lease, ("agent_did", "environment_id")),
    "billing/usagerecord/?slice=all": (UsageRecord, ("agent_did", "environment_id")),
}
# Pages without result, and the indexes by which that is found. A read by another index takes the place of the two that are
# not here: `run_rare_outcome` is in test_run_lists, `usage_unpriced` in a test below.
INDEXES = {
    "sandboxes/run/?slice=all&q=nothing": ["sandbox_environment_prefix"],
    "sandboxes/run/?slice=all&stop_reason__exact=ttl": ["run_stopped"],
    "sandboxes/event/?q=nothing": ["event_key_prefix"],
    "sandboxes/llmcall/?slice=all&q=nothing": ["llmcall_agent_prefix", "llmcall_environment_prefix", "llmcall_model_prefix"],
    "sandboxes/egressconnection/?slice=all&q=nothing": [
        "egressconn_agent_prefix", "egressconn_environment_prefix", "egressconn_domain_prefix"
    ],
    "leases/lease/?slice=history&q=nothing": ["lease_agent_prefix", "lease_environment_prefix"],
    "billing/usagerecord/?slice=all&q=nothing": ["usage_agent_prefix", "usage_environment_prefix"],
    "billing/costrecord/?slice=all&q=nothing": ["cost_agent_prefix", "cost_environment_prefix"],
    "sandboxes/dataevent/?slice=all&q=nothing": ["dataevent_path_prefix"],
    "sandboxes/mintedtoken/?slice=all&q=nothing": [
        "mintedtoken_agent_prefix", "mintedtoken_aud_prefix", "mintedtoken_lxm_prefix"
    ],
    "sandboxes/delivery/?slice=all&q=nothing": ["event_key_prefix"],
    "leases/queuedrun/?slice=all&q=nothing": ["queuedrun_agent_prefix"],
    "leases/atprotorecord/?slice=all&q=nothing": ["atprotorecord_agent_prefix", "atprotorecord_key_prefix"],
    "leases/codingtask/?slice=all&q=nothing": ["codingtask_title_prefix", "codingtask_branch_prefix"],
}  # fmt: skip
TERMS = ["nothing", "game-17", "game-2", "did:plc:a77", "did:plc:a7", "did:", "did:plc:a77 game-17"]


@pytest.fixture
def history(grant: Callable[..., Lease], pool: Pool) -> Lease:
    """Active lease with a sandbox that has run a command, beside a history."""
    lease = grant(environment="open")
    run(lease, "true")
    insert_history(pool, RUNS, now=NOW)
    rows, at = f"generate_series(1, {RUNS // RUNS_PER_LEASE}) n", f"TIMESTAMPTZ '{NOW}' - INTERVAL '1 hour' * n"
    calls = {"sandbox_id": SANDBOX_ID, **IN_GAME, "started_at": at, "deadline_at": at, "ended_at": at}
    insert(LlmCall, rows, {**calls, "call_id": "'call ' || n", "model": "'model-' || mod(n, 50)"}, outcome="ok", cost=1)
    connections = {**calls, "connection_id": "'connection ' || n", "domain": "'host-' || mod(n, 50)"}
    insert(EgressConnection, rows, connections, port=443, outcome="ok")
    insert_side_tables(lease, rows, at)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    return lease


def insert_side_tables(lease: Lease, rows: str, at: str) -> None:
    """Insert rows of the tables that the history of the benchmarks does not have."""
    agent, uuid = "'did:plc:a' || mod(n, 500)", "md5('row ' || n)::uuid"
    insert(DataEvent, rows, {"agent_did": agent, "at": at, "path": "'memory/' || n"}, kind="conflict")
    key = SigningKey.objects.create(agent_did="did:plc:key", public_key="zkey", sealed=b"", created_at=NOW)
    token = {"jti": uuid, "agent_did": agent, "at": at, "expires_at": f"{at} + INTERVAL '1 minute'", "aud": "'did:web:' || n"}
    insert(MintedToken, rows, token, key_id=key.pk, lxm="app.game.move")
    for number in range(10):
        webhook = Webhook.objects.create(url=f"https://receiver{number}.test/", created_at=NOW, sealed=b"")
        insert(Delivery, "sandboxes_event n", {"event_id": "n.id"}, webhook_id=webhook.pk, asked_at=NOW, delivered_at=NOW)
    queued = {"id": uuid, "agent_did": agent, "queued_at": at, "available_at": at, "expires_at": f"{at} + INTERVAL '1 minute'"}
    insert(QueuedRun, rows, queued, pool_id=lease.pool_id, request={}, state="failed", ended_at=NOW)
    record = {"id": uuid, "agent_did": agent, "created_at": at, "record_key": "'key-' || n", "give_up_at": at}
    insert(AtprotoRecord, rows, record, lease_id=lease.pk, collection="game.move", status="failed", ended_at=NOW)
    repository = Repository.objects.create(name="repository", clone_url="https://forge.test/a.git")
    environment = {"id": "'task-' || n", "created_at": at, "started_at": at, "ended_at": at}
    insert(Environment, rows, environment, type_id=lease.environment_type_id, end_reason="unused", project_id=1)
    task = {
        "id": uuid,
        "environment_id": "'task-' || n",
        "created_at": at,
        "title": "'title ' || n",
        "branch": "'branch-' || n",
    }
    insert(CodingTask, rows, task, repository_id=repository.pk, base_branch="main")


def list_page_reads(client: Client, path: str) -> list[str]:
    with CaptureQueriesContext(connection) as captured:
        assert client.get(f"/admin/{path}").status_code == 200, path
    bounded = [query for query in captured if "LIMIT" not in query["sql"] or "WHERE" in query["sql"]]  # of any rows
    return [f"{path}: {read}" for read in list_full_reads(bounded) if not is_cached_sum(read)]


def is_cached_sum(read: str) -> bool:
    """Return whether a read is that of this month's costs in the header, which are cached for some seconds."""
    return "billing_costrecord" in read and "SUM(" in read


def test_rare_rows_are_found_without_a_read_of_the_history(viewer: Client, history: Lease) -> None:
    assert find_growing_tables() >= GROWING
    paths = [*INDEXES, *(f"{page}&q=nothing" for page in SEARCHED)]
    paths += [f"sandboxes/run/?slice=all&outcome__exact={outcome}" for outcome in ("open", "oom", "lost", "error", "timed_out")]
    paths += [
        "sandboxes/run/?slice=all&agent_did=did:plc:a77", f"sandboxes/reading/?holder={history.pk}",
        "billing/usagerecord/?slice=unpriced", "sandboxes/sandbox/?slice=history", "sandboxes/event/",
        "sandboxes/delivery/?slice=all",
    ]  # fmt: skip
    reads = [read for path in paths for read in list_page_reads(viewer, path)]
    assert not reads, "\n\n".join(reads)
    indexes = {f"sandboxes/reading/?holder={history.pk}": ["reading_holder"], **INDEXES}
    for path, index in [(path, index) for path, names in indexes.items() for index in names]:
        with transaction.atomic():
            with connection.cursor() as cursor:
                cursor.execute(f"DROP INDEX {index}")
            assert list_page_reads(viewer, path), f"a missing index {index} is not noticed"
            transaction.set_rollback(True)


@pytest.mark.usefixtures("history")
def test_unpriced_usage_is_found_by_the_index_of_its_few_rows() -> None:
    """Without it PostgreSQL reads the entries of all days in another index: a full read with a condition."""
    condition = UsageRecordAdmin.list_tabs["unpriced"].get_filter(NOW)
    plan = UsageRecord.objects.filter(condition).order_by(*UsageRecordAdmin.ordering)[:50].explain()
    assert "usage_unpriced" in plan and "usage_day" not in plan, plan


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
