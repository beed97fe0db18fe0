"""Evict and wake actions: the request only enqueues the work."""

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client
from django.utils import timezone
from django_q.models import OrmQ

from leases import execution, leasing, tasks
from leases.models import Lease
from sandboxes import eviction
from sandboxes.models import Pool, Sandbox
from sandboxes.pool import allocation
from sandboxes.providers.errors import Unavailable
from sandboxes.providers.memory import MemoryProvider
from sandboxes.runs.operations import Command
from sandboxes.state import workspace
from tests.admin.conftest import NOW, ensure_sandbox, get_state, list_events, run
from tests.conftest import MINUTE
from tests.support.console import WHY, fetch, get_fields, list_messages, list_rows, row_url, submit_bulk

pytestmark = pytest.mark.django_db
TRUE = Command(argv=["true"], timeout=MINUTE)


@pytest.fixture
def waiting(lease: Lease) -> Sandbox:
    run(lease, "true")
    return ensure_sandbox(lease)


@pytest.fixture
def cold(waiting: Sandbox) -> Sandbox:
    assert eviction.evict(waiting.pk, now=NOW + MINUTE, reason="idle", actor="sweep")
    return Sandbox.objects.get(pk=waiting.pk)


def queued() -> list[tuple[str, tuple[str, ...]]]:
    return [(row.task["func"], row.task["args"]) for row in OrmQ.objects.all()]


# --- evict --------------------------------------------------------------------------------------------------------


def test_an_evicted_sandbox_is_put_to_sleep_by_the_queue_and_not_by_the_request(
    operator: Client, lease: Lease, waiting: Sandbox, memory: MemoryProvider
) -> None:
    asked = len(memory.calls)
    assert list_messages(operator.post(row_url(waiting, "evict"), WHY)) == ["1 sandbox scheduled for eviction."]
    assert (get_state(waiting), len(memory.calls)) == ("waiting", asked)
    assert queued() == [("leases.tasks.sweep_idle", ())]
    assert tasks.sweep_idle() == "1 put to sleep"
    assert get_state(waiting) == "cold"
    assert list_events(lease) == [("sleep_asked_for", "operator", "it was agreed")]
    assert LogEntry.objects.get().get_change_message() == "Evict: it was agreed"
    assert "Sleep asked for" in fetch(operator, row_url(lease))
    entries = operator.get(row_url(waiting)).context["timeline"]
    assert [each.reason for each in entries] == ["persisted: stored", "idle", "it was agreed", "ready", "requested"]
    assert (entries[2].action, entries[2].actor) == ("Evict", "operator")


def test_a_use_after_the_request_cancels_the_eviction(operator: Client, lease: Lease, waiting: Sandbox) -> None:
    operator.post(row_url(waiting, "evict"), WHY)
    run(lease, "true", now=timezone.now())
    assert tasks.sweep_idle() == "nothing to do"
    assert get_state(waiting) == "waiting"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"state": "cold"}, "the sandbox is cold"), ({"lost_at": NOW}, "the provider has lost the sandbox"),
        ({"state": "warm", "holder": None}, "the sandbox is unclaimed"),
        ({"state": "running", "open_runs": 1}, "a run has started"),
    ],
)  # fmt: skip
def test_an_eviction_is_refused_in_other_states(
    operator: Client, lease: Lease, waiting: Sandbox, changes: dict, why: str
) -> None:
    Sandbox.objects.filter(pk=waiting.pk).update(**changes)
    assert "Evict…" not in fetch(operator, row_url(waiting))
    assert list_messages(operator.post(row_url(waiting, "evict"), WHY)) == [f"Nothing changed: {why}."]
    assert tasks.sweep_idle() == "nothing to do"
    assert (queued(), list_events(lease), LogEntry.objects.count()) == ([], [], 0)


def test_a_bulk_eviction_skips_sandboxes_that_do_not_wait(
    operator: Client, lease: Lease, waiting: Sandbox, grant: Callable[..., Lease]
) -> None:
    warm = ensure_sandbox(grant(environment="warm", sleep_after=timedelta(hours=1)))
    asked = submit_bulk(operator, "sandboxes/sandbox/", "evict_all", [waiting.pk, warm.pk])
    assert b"applies to 1 of 2 now" in asked.content
    assert not queued()
    done = submit_bulk(operator, "sandboxes/sandbox/", "evict_all", [waiting.pk, warm.pk], confirm="1", **WHY)
    assert list_messages(done) == ["1 sandbox scheduled for eviction. 1 skipped: not waiting."]
    tasks.sweep_idle()
    assert (get_state(waiting), get_state(warm)) == ("cold", "warm")
    assert list_messages(operator.post(row_url(warm, "evict"), WHY))[-1] == "1 sandbox scheduled for eviction."
    assert tasks.sweep_idle() == "1 put to sleep"


# --- wake ---------------------------------------------------------------------------------------------------------


def test_a_woken_sandbox_is_started_by_the_queue_and_not_by_the_request(
    operator: Client, lease: Lease, cold: Sandbox, memory: MemoryProvider
) -> None:
    asked = len(memory.calls)
    assert list_messages(operator.post(row_url(cold, "wake"), WHY)) == ["1 sandbox being woken."]
    assert (get_state(cold), len(memory.calls)) == ("cold", asked)
    [(name, args)] = queued()
    assert (name, args) == ("leases.tasks.wake_sandbox", (str(lease.pk), "operator"))
    assert tasks.wake_sandbox(*args) == "warm"
    assert tasks.wake_sandbox(*args) == "warm"  # a task may be delivered twice
    after = Sandbox.objects.get(pk=cold.pk)
    assert (after.state, after.source, after.incarnation) == ("warm", "local", 2)
    assert {each.actor for each in after.transitions.all()[:2]} == {"operator"}
    assert list_events(lease) == [("wake_asked_for", "operator", "it was agreed")]


def test_a_sandbox_woken_in_the_meantime_or_without_a_lease_is_left_alone(
    operator: Client, lease: Lease, cold: Sandbox
) -> None:
    operator.post(row_url(cold, "wake"), WHY)
    leasing.end(lease.pk, reason="released", now=timezone.now())
    assert "released" in tasks.wake_sandbox(str(lease.pk), "operator")
    assert get_state(cold) == "destroying"
    Sandbox.objects.filter(pk=cold.pk).update(state="warm")
    assert list_messages(operator.post(row_url(cold, "wake"), WHY))[-1] == "Nothing changed: the sandbox is warm."
    assert (len(queued()), len(list_events(lease))) == (1, 2)


# --- restart ------------------------------------------------------------------------------------------------------


def test_a_restart_is_carried_out_by_the_queue_once(
    operator: Client, lease: Lease, waiting: Sandbox, memory: MemoryProvider
) -> None:
    assert list_messages(operator.post(row_url(waiting, "restart"), WHY)) == ["1 sandbox being restarted."]
    [(name, args)] = queued()
    assert (name, "restart" in dict(memory.calls)) == ("leases.tasks.restart_sandbox", False)
    assert [tasks.restart_sandbox(*args) for _ in range(2)] == ["waiting", "waiting"]  # a task may be delivered twice
    assert [verb for verb, _ in memory.calls].count("restart") == 1
    assert [event[:2] for event in list_events(lease)] == [("restarted", "operator"), ("restart_asked_for", "operator")]


def test_a_restart_that_fails_is_recorded(operator: Client, lease: Lease, waiting: Sandbox, memory: MemoryProvider) -> None:
    operator.post(row_url(waiting, "restart"), WHY)
    [(_, args)] = queued()
    memory.fail("restart", Unavailable("no engine"), times=1)
    assert "no engine" in tasks.restart_sandbox(*args)
    assert list_events(lease)[0][:2] == ("restart_failed", "operator")
    assert get_state(waiting) == "waiting"


# --- the page -----------------------------------------------------------------------------------------------------


def shown(client: Client, sandbox: Sandbox) -> tuple[dict[str, str], str]:
    """Return the summary as text by label, and the HTML of the page."""
    answer = client.get(row_url(sandbox))
    return {fact.label: f"{fact.value} | {fact.note}" for fact in answer.context["facts"]}, answer.content.decode()


def test_a_page_shows_the_source_of_the_next_wake(viewer: Client, lease: Lease, waiting: Sandbox) -> None:
    assert "no stored state" in shown(viewer, waiting)[0]["Next wake from"]
    eviction.evict(waiting.pk, now=timezone.now(), reason="idle")
    assert "the local copy" in shown(viewer, waiting)[0]["Next wake from"]
    newest = workspace.find_latest(lease.pk)
    assert newest
    workspace.forget_local(newest)
    assert "the store" in shown(viewer, waiting)[0]["Next wake from"]
    execution.ensure_sandbox_ready(lease.pk, now=timezone.now())
    facts, _ = shown(viewer, waiting)
    assert "incarnation 2, state from the store" in facts["Provider name"]
    assert facts["Wakes"] == "1 | 1 from store"


def test_deleted_snapshots_are_listed_as_deleted(viewer: Client, lease: Lease, cold: Sandbox, settings) -> None:
    settings.KEEP_SNAPSHOTS = 1
    execution.exec_command(lease.pk, TRUE, now=timezone.now())
    eviction.evict(cold.pk, now=timezone.now(), reason="idle")
    listed = [each["snapshot"] for each in viewer.get(row_url(cold)).context["snapshots"]]
    assert [(one.incarnation, one.local, bool(one.forgotten_at)) for one in listed] == [(2, True, False), (1, False, True)]
    eviction.release_cold(cold.pk, now=timezone.now(), reason="room")
    fresh = execution.ensure_sandbox_ready(lease.pk, now=timezone.now())
    assert fresh.pk != cold.pk
    of_the_cold_one = f'incarnation 2 of <a class="lh-link" href="{row_url(cold)}">another sandbox'
    assert of_the_cold_one in shown(viewer, fresh)[1]  # a wake reads the newest of its holder


def test_a_page_shows_the_workspace_size_the_next_eviction_and_a_loss(viewer: Client, waiting: Sandbox) -> None:
    for size, alarm in ((2048 << 20, False), ((2048 << 20) + 1, True)):
        Sandbox.objects.filter(pk=waiting.pk).update(workspace_bytes=size, measured_at=NOW)
        fact = get_fields(viewer, row_url(waiting))["Workspace"]
        assert (fact.alarm, str(fact.value)) == (alarm, "2.0 GiB of 2.0 GiB")
    Sandbox.objects.filter(pk=waiting.pk).update(idle_at=timezone.now() + timedelta(minutes=4, seconds=59))
    assert "evicted in 4 m 5" in shown(viewer, waiting)[0]["Last used"]
    assert "evicted in 4 m 5" in fetch(viewer, "/admin/sandboxes/sandbox/")
    Sandbox.objects.filter(pk=waiting.pk).update(idle_at=NOW)
    assert "eviction due" in shown(viewer, waiting)[0]["Last used"]
    eviction.mark_lost(waiting, "no such container", now=timezone.now())
    facts, whole = shown(viewer, waiting)
    assert "Lost" in facts
    assert "no such container" in whole
    assert "evict" not in facts["Last used"]


# --- the list -----------------------------------------------------------------------------------------------------


def listed(client: Client, query: str) -> set[str]:
    return {row.environment_id for row in list_rows(client, f"/admin/sandboxes/sandbox/?{query}")}


def test_each_tab_and_each_age_filter_lists_its_own_rows(viewer: Client, grant: Callable[..., Lease], pool: Pool) -> None:
    boxes = {name: ensure_sandbox(grant(environment=name)) for name in ("cold", "evicting", "waiting", "lost", "unstored")}
    for name in ("cold", "evicting", "waiting"):
        Sandbox.objects.filter(pk=boxes[name].pk).update(state=name, deadline_at=NOW, state_since=NOW - timedelta(days=2))
    Sandbox.objects.filter(pk=boxes["lost"].pk).update(lost_at=NOW, state_since=timezone.now())
    Sandbox.objects.filter(pk=boxes["unstored"].pk).update(state="waiting", last_error="store down", state_since=timezone.now())
    pool.warm_target = 1
    pool.save(update_fields=["warm_target"])
    assert allocation.start_warm(pool, now=timezone.now() - 10 * MINUTE)
    tabs = {name: {name} for name in ("cold", "evicting", "lost", "unstored")}
    tabs |= {"waiting": {"waiting", "unstored"}, "unclaimed": {""}}
    assert {name: listed(viewer, f"slice={name}") for name in tabs} == tabs
    old = {"cold", "evicting", "waiting"}
    assert listed(viewer, "lasting=1d") == listed(viewer, "lasting=1h") == old
    assert listed(viewer, "lasting=5m") == old | {""}
    assert listed(viewer, "lasting=nonsense") == listed(viewer, "")
