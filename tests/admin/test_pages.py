"""Console pages: content, query counts at two sizes, and escaping of text from agents."""

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.auth import get_user_model
from django.core.cache import cache
from django.test import Client
from django.utils import timezone

from controlplane.console import dashboard
from leases import execution, leasing, sweeps, turns
from leases.admin.leases import LeaseAdmin
from leases.admin.timeline import PAGE_SIZE, load_timeline
from leases.models import EnvironmentType, Lease, LeaseEvent, Turn
from sandboxes import runs
from sandboxes.admin.base.changelist import CappedPaginator
from sandboxes.admin.sandboxes import SandboxAdmin, compute_time_alive
from sandboxes.identity import signing
from sandboxes.models import LlmCall, Policy, Pool, Quota, Run, Sandbox, Sweep
from sandboxes.providers.memory import MemoryProvider, ProgramCall, ProgramResult
from sandboxes.runs import Command
from tests.admin.conftest import NOW, count_queries, ensure_sandbox
from tests.conftest import MINUTE

pytestmark = pytest.mark.django_db
MARKUP = """<img src=x onerror=alert(1)> x-data="alert(2)" {{ 7 }}"""


def run(lease: Lease, *argv: str, now=NOW) -> Run:
    return execution.exec_command(lease.pk, Command(argv=argv, timeout=MINUTE), now=now)[0]


# --- query counts -------------------------------------------------------------------------------------------------


def fill(grant: Callable[..., Lease], first: int, last: int) -> None:
    """Create a lease, its sandbox, a run and a turn for each number."""
    EnvironmentType.objects.filter(name="catan").update(turn_argv=["echo", '{"action": "roll"}'])
    for number in range(first, last):
        lease = grant(agent=f"did:plc:a{number}", environment="e", now=timezone.now())
        run(lease, "true", now=timezone.now())
        turns.take_turn(lease.pk, 1, {}, now=timezone.now())
        signing.create_key(lease.agent_did, now=timezone.now())
        execution.mint_service_token(lease.pk, aud="did:web:relay.example", lxm="a.b.c", now=timezone.now())
        Sweep.objects.create(name=f"sweep {number}")
        Pool.objects.create(name=f"pool-{number}", warm_target=1)
        Policy.objects.create(name=f"policy-{number}")
        known = {"sandbox": ensure_sandbox(lease), "holder": lease.pk, "agent_did": lease.agent_did, "ended_at": timezone.now()}
        for outcome in ("ok", "refused"):
            LlmCall.objects.create(
                call_id=f"{outcome}-{number}", started_at=NOW, deadline_at=NOW, outcome=outcome, code="no", **known
            )


PAGES = [
    "", "fleet/", "leases/lease/", "leases/lease/?slice=history", "leases/turn/", "leases/agent/", "leases/agentkey/",
    "leases/environmenttype/", "sandboxes/sandbox/", "sandboxes/sandbox/?slice=stalled", "sandboxes/run/", "sandboxes/llmcall/",
    "sandboxes/llmcall/?slice=refused&code=no&since=1d&streamed__exact=0", "sandboxes/llmcall/?slice=unpriced",
    "sandboxes/sandbox/?slice=unstored&lasting=5m", "sandboxes/pool/", "sandboxes/policy/", "sandboxes/quota/",
    "sandboxes/sweep/", "sandboxes/signingkey/", "sandboxes/mintedtoken/",
]  # fmt: skip


def costs(client: Client, pages: list[str]) -> dict[str, int]:
    """Count the queries of each page with a warm dashboard cache, as in normal operation."""
    cache.set("fleet", dashboard.build_fleet_summary(), 600)
    for page in pages:  # what is asked for once in a process: the ids of content types
        client.get(f"/admin/{page}")
    return {page: count_queries(client, f"/admin/{page}") for page in pages}


def test_a_list_costs_as_many_queries_for_60_rows_as_for_3(viewer: Client, grant: Callable[..., Lease]) -> None:
    fill(grant, 0, 3)
    few = costs(viewer, PAGES)
    fill(grant, 3, 60)
    assert costs(viewer, PAGES) == few
    assert max(few.values()) <= 9


def test_the_page_of_a_lease_costs_the_same_after_60_turns_as_after_3(viewer: Client, lease: Lease) -> None:
    EnvironmentType.objects.filter(name="catan").update(turn_argv=["echo", '{"action": "roll"}'])
    pages = [f"leases/lease/{lease.pk}/change/", f"sandboxes/sandbox/{ensure_sandbox(lease).pk}/change/"]
    counts = []
    for until in (3, 60):
        for number in range(1, until):
            turns.take_turn(lease.pk, number, {}, now=NOW)
        run(lease, "true")
        counts.append(costs(viewer, pages))
    assert counts[0] == counts[1]
    assert max(counts[0].values()) <= 18


def test_a_large_table_is_counted_up_to_a_limit(grant: Callable[..., Lease], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CappedPaginator, "cap", 2)
    for number in range(3):
        grant(environment=f"game-{number}")
    counted = CappedPaginator(Lease.objects.all(), 50)
    assert (counted.count, counted.summary) == (2, "More than 2 leases")
    assert CappedPaginator(Lease.objects.filter(environment_id="game-1"), 50).summary == "1 lease"


# --- lists --------------------------------------------------------------------------------------------------------


def listed(client: Client, url: str) -> set[str]:
    return {row.environment_id for row in client.get(url).context["cl"].result_list}


def test_each_tab_of_leases_lists_its_own_rows(viewer: Client, grant: Callable[..., Lease]) -> None:
    now = timezone.now()
    grant(environment="plenty", now=now)
    grant(environment="soon", now=now, ttl=2 * MINUTE)
    grant(environment="late", now=now - 10 * MINUTE, ttl=5 * MINUTE)
    gone = grant(environment="gone", now=now)
    execution.ensure_sandbox_ready(gone.pk, now=now)
    leasing.end(gone.pk, reason="released", now=now)
    shown = {name: listed(viewer, f"/admin/leases/lease/?slice={name}") for name in LeaseAdmin.list_tabs}
    assert shown == {
        "active": {"plenty", "soon", "late"},
        "soon": {"soon"},
        "overdue": {"late"},
        "undead": {"gone"},
        "history": {"plenty", "soon", "late", "gone"},
    }
    assert listed(viewer, "/admin/leases/lease/") == shown["active"]


def test_the_active_tab_is_marked(viewer: Client) -> None:
    page = viewer.get("/admin/sandboxes/sandbox/?slice=quarantine&q=did").content.decode()
    tab = page[page.index("tabs-items") :]
    assert "q=did&amp;slice=history" in tab
    assert tab.index("active")
    assert "Quarantine" in tab[tab.index('class="active"') :].split("</a>")[0]


def test_an_empty_tab_shows_its_empty_text(viewer: Client) -> None:
    for name, part in SandboxAdmin.list_tabs.items():
        assert part.empty_text in viewer.get(f"/admin/sandboxes/sandbox/?slice={name}").content.decode()


def test_search_is_by_prefix_or_by_a_complete_id(viewer: Client, grant: Callable[..., Lease]) -> None:
    ada, _ = grant(agent="did:plc:ada", environment="one"), grant(agent="did:plc:bob", environment="two")
    assert listed(viewer, "/admin/leases/lease/?q=did:plc:a") == {"one"}
    assert listed(viewer, "/admin/leases/lease/?q=tw") == {"two"}
    assert listed(viewer, "/admin/leases/lease/?q=wo") == set()
    assert listed(viewer, f"/admin/leases/lease/?q={ada.pk}") == {"one"}
    assert listed(viewer, "/admin/leases/lease/?slice=history&agent_did=did:plc:bob") == {"two"}


@pytest.mark.parametrize("query", ["slice=none", "p=99", "holder=nonsense", "sandbox=nonsense", "o=7.-3.x"])
def test_an_invalid_query_string_is_no_error(viewer: Client, query: str) -> None:
    assert viewer.get(f"/admin/sandboxes/run/?{query}", follow=True).status_code == 200


def test_stalled_is_in_flight_or_running_past_the_deadline(lease: Lease, grant: Callable[..., Lease]) -> None:
    waiting = ensure_sandbox(lease)
    starting = ensure_sandbox(grant(environment="starting"))
    Sandbox.objects.filter(pk=starting.pk).update(state="warming", deadline_at=NOW)
    stalled = Sandbox.objects.filter(SandboxAdmin.list_tabs["stalled"].get_filter(NOW + 3 * MINUTE))
    assert set(stalled) == {starting}
    runs.open_run(waiting, Command(argv=["sleep"], timeout=timedelta(seconds=1)), now=NOW)
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
    page = viewer.get(f"/admin/sandboxes/run/{run(lease, 'mix', 'two words').pk}/change/").content.decode()
    assert "mix &#x27;two words&#x27;" in page
    assert "exit 3" in page
    assert "\ufffd\\x1b[31m12" in page
    assert "The first 8 of 11 bytes" in page
    assert "No output." in page.split("<h2>stderr</h2>")[1].split("<h2>stdout</h2>")[0]


def test_output_is_downloaded_byte_for_byte_and_never_shown_as_a_page(viewer: Client, lease: Lease) -> None:
    answer = viewer.get(f"/admin/sandboxes/run/{run(lease, 'echo', MARKUP).pk}/stdout/")
    assert answer.content == MARKUP.encode() + b"\n"
    assert answer.headers["Content-Type"].startswith("text/plain")
    assert answer.headers["Content-Disposition"].startswith("attachment")
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert Client().get(answer.wsgi_request.path).status_code == 302
    assert viewer.get(f"/admin/sandboxes/run/{lease.pk}/stdout/").status_code == 404


# --- the timeline -------------------------------------------------------------------------------------------------


def test_a_leases_timeline_lists_its_events(viewer: Client, lease: Lease) -> None:
    run(lease, "false", now=NOW + MINUTE)
    EnvironmentType.objects.filter(name="catan").update(turn_argv=["echo", '{"action": "roll"}'])
    turns.take_turn(lease.pk, 1, {}, now=NOW + 2 * MINUTE)
    leasing.end(lease.pk, reason="operator", now=NOW + 3 * MINUTE, actor="eve", detail="enough")
    entries, older = load_timeline(lease)
    assert [entry.title for entry in entries] == ["Ended", "Sandbox", "Turn 1", "Run", "Sandbox", "Sandbox", "Granted"]
    assert (entries[0].actor, entries[0].detail, entries[2].detail) == ("eve", "operator: enough", '{"action": "roll"}')
    assert older is None
    only, _ = load_timeline(lease, only="turn")
    assert [entry.title for entry in only] == ["Turn 1"]
    assert b"operator: enough" in viewer.get(f"/admin/leases/lease/{lease.pk}/change/?only=lease").content


def test_a_timeline_is_read_page_by_page_without_losing_a_moment(lease: Lease) -> None:
    LeaseEvent.objects.bulk_create(
        LeaseEvent(lease=lease, at=NOW + (number // 7) * MINUTE, kind=f"event {number}") for number in range(200)
    )
    read, before = [], None
    while True:
        entries, before = load_timeline(lease, before=before)
        assert len(entries) <= PAGE_SIZE
        read += entries
        if before is None:
            break
    assert len(read) == len({(entry.title, entry.href, entry.state) for entry in read}) == 203  # and granted, warming, warm
    assert [entry.at for entry in read] == sorted((entry.at for entry in read), reverse=True)


def test_a_command_that_ran_again_is_named_once(lease: Lease) -> None:
    for minute, argv in enumerate([["true"], ["true"], ["false"], ["true"]]):
        run(lease, *argv, now=NOW + minute * MINUTE)
    entries, _ = load_timeline(lease, only="run")
    assert [entry.detail for entry in entries] == ["true", "false", "", "true"]


@pytest.mark.parametrize("query", ["before=yesterday", "before=2026-01-01", "only=nothing"])
def test_a_timeline_ignores_an_invalid_query_string(viewer: Client, lease: Lease, query: str) -> None:
    assert b"Granted" in viewer.get(f"/admin/leases/lease/{lease.pk}/change/?{query}").content


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
    agent = superuser.get("/admin/leases/agent/").context["cl"].result_list[0]
    for page in (
        "", "fleet/", "leases/lease/", f"leases/lease/{lease.pk}/change/",
        "leases/turn/", f"leases/turn/{turn.pk}/change/", "leases/agent/", f"leases/agent/{agent.pk}/change/",
        "sandboxes/sandbox/", f"sandboxes/sandbox/{sandbox.pk}/change/",
        f"sandboxes/sandbox/{lost.pk}/change/", "sandboxes/run/", f"sandboxes/run/{ran.pk}/change/", "sandboxes/sweep/",
        f"sandboxes/sweep/{sweep.pk}/change/", f"sandboxes/sandbox/{sandbox.pk}/destroy_now/",
        f"sandboxes/sandbox/{sandbox.pk}/evict/", "sandboxes/pool/", f"sandboxes/pool/{pool.pk}/change/",
        f"sandboxes/pool/{pool.pk}/warm_again/", "sandboxes/quota/", f"sandboxes/quota/{quota.pk}/change/",
    ):  # fmt: skip
        shown = superuser.get(f"/admin/{page}")
        assert shown.status_code == 200, page
        assert "<img src=x" not in shown.content.decode(), page
    assert "&lt;img src=x" in superuser.get(f"/admin/sandboxes/run/{ran.pk}/change/").content.decode()
