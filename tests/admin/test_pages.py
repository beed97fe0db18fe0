"""Console pages: content, query counts at two sizes, runs, background processes and escaping of text from agents."""

import io
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.auth import get_user_model
from django.contrib.auth.models import User
from django.test import Client
from django.utils import timezone

from leases import execution, leasing, sweeps, turns
from leases.admin.leases import LeaseAdmin
from leases.admin.timeline import PAGE_SIZE, load_timeline
from leases.agent_runs.recorder import store_message
from leases.models import Agent, AgentRun, EnvironmentType, Lease, LeaseEvent, QueuedRun, Turn
from sandboxes import processes
from sandboxes.admin.base.changelist import CappedPaginator
from sandboxes.admin.sandboxes import SandboxAdmin, compute_time_alive
from sandboxes.identity import signing
from sandboxes.models import AgentData, DataEvent, DataFile, LlmCall, Policy, Pool, Process, Quota, Sandbox, Snapshot, Sweep
from sandboxes.processes import ProcessSpec
from sandboxes.providers.memory import MemoryProvider, ProgramCall, ProgramResult
from sandboxes.runs import operations
from sandboxes.runs.operations import Command
from sandboxes.state import data_editing, run_outputs
from sandboxes.storage.base import StoreError
from sandboxes.storage.memory import MemoryStore
from sandboxes.stores import lease_stores
from sandboxes.webhooks import outbox, subscriptions
from tests.admin.conftest import ADA, NOW, ensure_sandbox, run
from tests.conftest import MINUTE
from tests.support.console import MARKUP, assert_constant_queries, fetch, list_rows, row_url

pytestmark = pytest.mark.django_db


# --- query counts -------------------------------------------------------------------------------------------------


PAGES = [
    "", "fleet/", "leases/lease/", "leases/lease/?slice=history", "leases/turn/", "leases/agentrun/?slice=all",
    "leases/queuedrun/", "leases/environment/", "leases/agent/", "leases/agentkey/",
    "leases/environmenttype/", "sandboxes/sandbox/", "sandboxes/sandbox/?slice=stalled", "sandboxes/run/", "sandboxes/llmcall/",
    "sandboxes/llmcall/?slice=refused&code=no&since=1d&streamed__exact=0", "sandboxes/llmcall/?slice=unpriced",
    "sandboxes/sandbox/?slice=unstored&lasting=5m", "sandboxes/pool/", "sandboxes/host/", "sandboxes/policy/",
    "sandboxes/quota/", "sandboxes/sweep/", "sandboxes/signingkey/", "sandboxes/mintedtoken/", "sandboxes/webhook/",
    "sandboxes/event/", "sandboxes/delivery/", "sandboxes/delivery/?slice=all",
]  # fmt: skip


@pytest.fixture
def turn_argv(db: None) -> None:
    EnvironmentType.objects.filter(name="catan").update(turn_argv=["echo", '{"action": "roll"}'])


def test_a_list_costs_as_many_queries_for_many_rows_as_for_few(
    viewer: Client, grant: Callable[..., Lease], turn_argv: None
) -> None:
    def create(numbers: range) -> None:
        for number in numbers:
            now = timezone.now()
            lease = grant(agent=f"did:plc:a{number}", environment="e", now=now)
            run(lease, "true", now=now)
            turns.take_turn(lease.pk, 1, {}, now=now)
            signing.create_key(lease.agent_did, now=now)
            execution.mint_service_token(lease.pk, aud="did:web:relay.example", lxm="a.b.c", now=now)
            Sweep.objects.create(name=f"sweep {number}")
            AgentRun.objects.create(lease=lease, cli="codex", started_at=now, recorder_deadline=now)
            QueuedRun.objects.create(
                agent_did=lease.agent_did, lease=lease, pool=lease.pool, request={"kind": "exec", "argv": ["true"]},
                queued_at=now, available_at=now, expires_at=now + MINUTE,
            )  # fmt: skip
            Pool.objects.create(name=f"pool-{number}", warm_target=1)
            Policy.objects.create(name=f"policy-{number}")
            subscriptions.add_webhook(f"https://example.com/{number}", now=now)
            outbox.enqueue_event("lease.ended", key=str(number), payload={}, now=now)
            for outcome in ("ok", "refused"):
                LlmCall.objects.create(
                    call_id=f"{outcome}-{number}", started_at=NOW, deadline_at=NOW, ended_at=now, outcome=outcome, code="no",
                    sandbox=ensure_sandbox(lease), holder=lease.pk, agent_did=lease.agent_did,
                )  # fmt: skip

    assert_constant_queries(viewer, PAGES, 9, create)


def test_a_page_costs_as_many_queries_for_many_related_rows_as_for_few(
    viewer: Client, lease: Lease, grant: Callable[..., Lease], turn_argv: None
) -> None:
    """Related rows are turns, runs, snapshots, actions, agents with data, files, data events, quotas and pools."""
    user, pool, sandbox = User.objects.get(username="viewer"), lease.pool, ensure_sandbox(lease)

    def put(path: str) -> AgentData:
        data_editing.put_file(lease.agent_did, path, io.BytesIO(b"1"), now=NOW)
        return AgentData.objects.get(agent_did=lease.agent_did)

    def create(numbers: range) -> None:
        for number in numbers:
            other = grant(agent=f"did:plc:a{number}", now=NOW)
            run(other, "true")
            data = put(f"memory/{number}")
            DataFile.objects.filter(data=data, path=f"memory/{number}").update(holder=other.pk)
            DataEvent.objects.create(agent_did=ADA, holder=lease.pk, at=NOW, kind="conflict", path=f"memory/{number}")
            Snapshot.objects.create(sandbox=sandbox, incarnation=number, holder=lease.pk, at=NOW, size_bytes=1)
            Quota.objects.create(pool=Pool.objects.create(name=f"p{number}"), agent_did=lease.agent_did, most=1)
            turns.take_turn(lease.pk, number + 1, {}, now=NOW)
            LogEntry.objects.log_actions(user.pk, [sandbox, pool], CHANGE, "Evict: enough")
        run(lease, "true")

    data = put("memory/a")
    rows = (lease, sandbox, pool, Agent.objects.get(did=lease.agent_did), data)
    lists = [f"sandboxes/{name}/" for name in ("agentdata", "dataevent", "quota", "pool", "sandbox", "snapshot")]
    pages = [*map(row_url, rows), f"{row_url(data)}?path=memory", *lists, "sandboxes/snapshot/?slice=history"]
    counts = assert_constant_queries(viewer, pages, 20, create)
    assert max(counts[page] for page in lists) <= 9


def test_a_large_table_is_counted_up_to_a_limit(grant: Callable[..., Lease], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CappedPaginator, "cap", 2)
    for number in range(3):
        grant(environment=f"game-{number}")
    counted = CappedPaginator(Lease.objects.all(), 50)
    assert (counted.count, counted.summary) == (2, "More than 2 leases")
    assert CappedPaginator(Lease.objects.filter(environment_id="game-1"), 50).summary == "1 lease"


# --- lists --------------------------------------------------------------------------------------------------------


def listed(client: Client, query: str) -> set[str]:
    return {row.environment_id for row in list_rows(client, f"/admin/leases/lease/{query}")}


def test_each_tab_of_leases_lists_its_own_rows(viewer: Client, grant: Callable[..., Lease]) -> None:
    now = timezone.now()
    grant(environment="plenty", now=now)
    grant(environment="soon", now=now, ttl=2 * MINUTE)
    grant(environment="late", now=now - 10 * MINUTE, ttl=5 * MINUTE)
    gone = grant(environment="gone", now=now)
    execution.ensure_sandbox_ready(gone.pk, now=now)
    leasing.end(gone.pk, reason="released", now=now)
    shown = {name: listed(viewer, f"?slice={name}") for name in LeaseAdmin.list_tabs}
    active = {"plenty", "soon", "late"}
    assert shown == {
        "active": active, "soon": {"soon"}, "overdue": {"late"}, "undead": {"gone"}, "history": {*active, "gone"},
    }  # fmt: skip
    assert listed(viewer, "") == shown["active"]


def test_the_active_tab_is_marked_and_an_empty_tab_says_so(viewer: Client) -> None:
    for name, part in SandboxAdmin.list_tabs.items():
        assert part.empty_text in fetch(viewer, f"/admin/sandboxes/sandbox/?slice={name}")
    page = fetch(viewer, "/admin/sandboxes/sandbox/?slice=quarantine&q=did")
    tab = page[page.index("tabs-items") :]
    assert "q=did&amp;slice=history" in tab
    assert tab.index("active")
    assert "Quarantine" in tab[tab.index('class="active"') :].split("</a>")[0]


def test_search_is_by_prefix_or_by_a_complete_id(viewer: Client, grant: Callable[..., Lease]) -> None:
    ada, _ = grant(agent="did:plc:ada", environment="one"), grant(agent="did:plc:bob", environment="two")
    assert listed(viewer, "?q=did:plc:a") == {"one"}
    assert listed(viewer, "?q=tw") == {"two"}
    assert listed(viewer, "?q=wo") == set()
    assert listed(viewer, f"?q={ada.pk}") == {"one"}
    assert listed(viewer, "?slice=history&agent_did=did:plc:bob") == {"two"}


@pytest.mark.parametrize("query", ["slice=none", "p=99", "holder=nonsense", "sandbox=nonsense", "o=7.-3.x"])
def test_an_invalid_query_string_is_no_error(viewer: Client, query: str) -> None:
    assert viewer.get(f"/admin/sandboxes/run/?{query}", follow=True).status_code == 200


def test_stalled_is_in_flight_or_running_past_the_deadline(lease: Lease, grant: Callable[..., Lease]) -> None:
    waiting = ensure_sandbox(lease)
    starting = ensure_sandbox(grant(environment="starting"))
    Sandbox.objects.filter(pk=starting.pk).update(state="warming", deadline_at=NOW)
    stalled = Sandbox.objects.filter(SandboxAdmin.list_tabs["stalled"].get_filter(NOW + 3 * MINUTE))
    assert set(stalled) == {starting}
    operations.open_run(waiting, Command(argv=["sleep"], timeout=timedelta(seconds=1)), now=NOW)
    assert set(stalled.all()) == {starting, waiting}


def test_time_alive_counts_time_with_a_process(lease: Lease) -> None:
    sandbox = ensure_sandbox(lease)
    assert compute_time_alive(sandbox, NOW + MINUTE) >= timedelta(seconds=59)
    leasing.end(lease.pk, reason="released", now=NOW + MINUTE)
    sweeps.reclaim(now=NOW + 2 * MINUTE)
    assert timedelta(seconds=119) <= compute_time_alive(sandbox, NOW + timedelta(days=1)) <= timedelta(seconds=121)


# --- a run --------------------------------------------------------------------------------------------------------


def test_a_run_shows_its_command_and_output(viewer: Client, lease: Lease, memory: MemoryProvider, settings) -> None:
    settings.RUN_OUTPUT_KEPT = 8
    memory.programs["mix"] = lambda call: ProgramResult(3, stdout=b"\xff\x1b[31m12345")
    page = fetch(viewer, row_url(run(lease, "mix", "two words")))
    assert "mix &#x27;two words&#x27;" in page
    assert "exit 3" in page
    assert "\ufffd\\x1b[31m12" in page
    assert "The first 8 of 11 bytes" in page
    assert "No output." in page.split("<h2>stderr</h2>")[1].split("<h2>stdout</h2>")[0]


def test_output_is_downloaded_byte_for_byte_and_never_shown_as_a_page(viewer: Client, lease: Lease) -> None:
    answer = viewer.get(row_url(run(lease, "echo", MARKUP), "stdout"))
    assert answer.content == MARKUP.encode() + b"\n"
    assert answer.headers["Content-Type"].startswith("text/plain")
    assert answer.headers["Content-Disposition"].startswith("attachment")
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert Client().get(answer.wsgi_request.path).status_code == 302
    assert viewer.get(f"/admin/sandboxes/run/{lease.pk}/stdout/").status_code == 404


def test_moved_output_is_shown_and_downloaded_or_the_page_says_why_not(
    viewer: Client, lease: Lease, memory_store: MemoryStore
) -> None:
    row = run(lease, "echo", "x" * 10_000)
    assert run_outputs.move_large_outputs(now=timezone.now() + timedelta(hours=2)).counts == {"outputs moved": 1}
    assert "x" * 10_000 in fetch(viewer, row_url(row))
    assert viewer.get(row_url(row, "stdout")).content == b"x" * 10_000 + b"\n"
    with memory_store.fail("download", StoreError("memory", "download", "away")):
        assert "The output cannot be read: memory: download: away" in fetch(viewer, row_url(row))
        refused = viewer.get(row_url(row, "stdout"), follow=True)
    assert "Download failed: memory: download: away" in refused.content.decode()


# --- background processes -----------------------------------------------------------------------------------------


def start_process(lease: Lease, *argv: str, name: str = "") -> Process:
    now = timezone.now()
    return processes.start_process(
        execution.build_sandbox_request(lease, now=now), ProcessSpec(argv, {"TOKEN": "s3cret"}, name=name), now=now
    )


def test_processes_are_listed_with_their_results_and_without_secrets(viewer: Client, lease: Lease) -> None:
    process = start_process(lease, "sleep", "300", name="relay <watcher>")
    start_process(lease, "no-such-program")
    listing = "/admin/sandboxes/process/"
    running = fetch(viewer, listing)
    assert "sleep 300" in running and "relay &lt;watcher&gt;" in running and "no-such-program" not in running
    assert "exit 127" in fetch(viewer, f"{listing}?slice=all")
    sandbox = fetch(viewer, row_url(process.sandbox))
    assert "Background processes" in sandbox
    assert f"{listing}?slice=all&amp;sandbox={process.sandbox_id}" in sandbox
    assert "sleep 300" in fetch(viewer, f"{listing}?slice=all&sandbox={process.sandbox_id}")
    processes.kill_process(process, now=timezone.now())
    page = fetch(viewer, row_url(process))
    assert "killed" in page and row_url(lease) in page
    assert "TOKEN" in page and "s3cret" not in page


def test_restarts_of_a_process_are_counted_and_the_next_one_announced(viewer: Client, lease: Lease) -> None:
    process = start_process(lease, "sleep", "300")
    Process.objects.filter(pk=process.pk).update(
        restart="always", restarts=7, state="exited", exit_code=3, ended_at=NOW, restart_at=NOW + MINUTE
    )
    listing = fetch(viewer, "/admin/sandboxes/process/?slice=all")
    assert ">7<" in "".join(listing.split()) and "next restart due" in listing and "exit 3" in listing
    assert "Always" in fetch(viewer, row_url(process))


# --- the timeline -------------------------------------------------------------------------------------------------


def test_a_leases_timeline_lists_its_events(viewer: Client, lease: Lease, turn_argv: None) -> None:
    run(lease, "false", now=NOW + MINUTE)
    turns.take_turn(lease.pk, 1, {}, now=NOW + 2 * MINUTE)
    leasing.end(lease.pk, reason="operator", now=NOW + 3 * MINUTE, actor="eve", detail="enough")
    entries, older = load_timeline(lease)
    assert [entry.title for entry in entries] == ["Ended", "Sandbox", "Turn 1", "Run", "Sandbox", "Sandbox", "Granted"]
    assert (entries[0].actor, entries[0].detail, entries[2].detail) == ("eve", "operator: enough", '{"action": "roll"}')
    assert older is None
    only, _ = load_timeline(lease, only="turn")
    assert [entry.title for entry in only] == ["Turn 1"]
    assert "operator: enough" in fetch(viewer, f"{row_url(lease)}?only=lease")
    for query in ("before=yesterday", "before=2026-01-01", "only=nothing"):
        assert "Granted" in fetch(viewer, f"{row_url(lease)}?{query}"), query


def test_a_timeline_is_read_page_by_page_without_losing_a_moment(lease: Lease) -> None:
    LeaseEvent.objects.bulk_create(
        LeaseEvent(lease=lease, at=NOW + (number // 7) * MINUTE, kind=f"event {number}") for number in range(2 * PAGE_SIZE)
    )
    read, before = [], None
    while True:
        entries, before = load_timeline(lease, before=before)
        assert len(entries) <= PAGE_SIZE
        read += entries
        if before is None:
            break
    distinct = {(entry.title, entry.href, entry.state) for entry in read}
    assert len(read) == len(distinct) == 2 * PAGE_SIZE + 3  # and granted, warming, warm
    assert [entry.at for entry in read] == sorted((entry.at for entry in read), reverse=True)


def test_each_run_of_a_repeated_command_names_it(lease: Lease) -> None:
    for minute, argv in enumerate([["true"], ["true"], ["false"], ["true"]]):
        run(lease, *argv, now=NOW + minute * MINUTE)
    entries, _ = load_timeline(lease, only="run")
    assert [entry.detail for entry in entries] == ["true", "false", "true", "true"]


# --- escaping -----------------------------------------------------------------------------------------------------


def test_markup_from_agents_and_providers_is_escaped(
    superuser: Client, grant: Callable[..., Lease], memory: MemoryProvider, pool: Pool
) -> None:
    def shout(call: ProgramCall) -> ProgramResult:
        return ProgramResult(0, stdout=b'{"action": "%s"}' % MARKUP.replace('"', "'").encode(), stderr=MARKUP.encode())

    memory.programs["shout"] = shout
    EnvironmentType.objects.filter(name="catan").update(turn_argv=["shout", MARKUP])
    lease = grant(agent=MARKUP, environment=MARKUP, now=timezone.now())
    ran = run(lease, "shout", MARKUP, now=timezone.now())
    turns.take_turn(lease.pk, 1, {}, now=timezone.now())
    sandbox = ensure_sandbox(lease)
    Sandbox.objects.filter(pk=sandbox.pk).update(last_error=MARKUP, tries=1)
    lost = ensure_sandbox(grant(agent="did:plc:lost", environment=MARKUP, now=timezone.now()))
    Sandbox.objects.filter(pk=lost.pk).update(
        state="destroying", last_error=MARKUP, quarantined_at=NOW, deadline_at=NOW, image=MARKUP
    )
    sweep = Sweep.objects.create(name="reconcile", last_error=MARKUP, counts={MARKUP: 1})
    LeaseEvent.objects.create(lease=lease, at=NOW, kind=MARKUP[:32], actor=MARKUP, reason=MARKUP)
    LogEntry.objects.log_actions(get_user_model().objects.get().pk, [pool, sandbox], CHANGE, f"{MARKUP}: {MARKUP}")
    Pool.objects.filter(pk=pool.pk).update(
        image=MARKUP, warm_error=MARKUP, warm_failures=3, warm_paused_until=timezone.now() + MINUTE
    )
    Sandbox.objects.filter(pk=sandbox.pk).update(workspace_bytes=1, ref=MARKUP, lost_at=NOW)
    quota, _ = Quota.objects.get_or_create(pool=pool, agent_did=MARKUP)
    turn = Turn.objects.get()
    agent = list_rows(superuser, "/admin/leases/agent/")[0]
    rows = (lease, turn, agent, sandbox, lost, ran, sweep, pool, quota)
    lists = ("leases/lease/", "leases/turn/", "leases/agent/", *(
        f"sandboxes/{name}/" for name in ("sandbox", "run", "sweep", "pool", "quota")
    ))  # fmt: skip
    acts = (row_url(sandbox, "destroy_now"), row_url(sandbox, "evict"), row_url(pool, "warm_again"))
    for page in ("/admin/", "/admin/fleet/", *(f"/admin/{name}" for name in lists), *map(row_url, rows), *acts):
        assert "<img src=x" not in fetch(superuser, page), page
    assert "&lt;img src=x" in fetch(superuser, row_url(ran))


def test_page_of_an_agent_run_shows_its_newest_messages_and_refreshes_while_it_runs(viewer: Client, lease: Lease) -> None:
    now = timezone.now()
    row = AgentRun.objects.create(lease=lease, cli="claude-code", model="sonnet", started_at=now, recorder_deadline=now)
    other = AgentRun.objects.create(lease=lease, cli="claude-code", started_at=now, recorder_deadline=now)
    stores = lease_stores.open_stores(lease.agent_did, lease.pk)
    tool = {"type": "tool_use", "name": "Bash", "input": {"command": f"echo {MARKUP}"}}
    answer = {"type": "assistant", "message": {"id": "m", "content": [{"type": "text", "text": "I look."}, tool]}}
    store_message(stores, other, "user", "of another run", 0, now=now)
    store_message(stores, row, "user", "Fix it.", 0, now=now)
    store_message(stores, row, "assistant", answer, 1, now=now)
    page = fetch(viewer, row_url(row))
    assert page.index("Fix it.") < page.index("I look.\nBash echo")
    assert MARKUP not in page and "of another run" not in page
    assert 'http-equiv="refresh"' in page
    AgentRun.objects.update(state="completed", ended_at=now)
    assert 'http-equiv="refresh"' not in fetch(viewer, row_url(row))
