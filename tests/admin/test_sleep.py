"""Evict and wake actions: the request only enqueues the work."""

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.auth.models import User
from django.test import Client
from django.utils import timezone
from django_q.models import OrmQ

from leases import execution, leasing, tasks
from leases.models import Lease
from sandboxes import eviction, runs
from sandboxes import pool as pools
from sandboxes.models import Pool, Sandbox, Snapshot
from sandboxes.providers.memory import MemoryProvider
from sandboxes.runs import Command
from sandboxes.state import workspace
from tests.admin.conftest import NOW, ensure_sandbox
from tests.admin.test_acts import WHY, bulk, list_messages, state_of
from tests.admin.test_pages import costs, run
from tests.conftest import MINUTE

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


def page(sandbox: Sandbox, act: str) -> str:
    return f"/admin/sandboxes/sandbox/{sandbox.pk}/{act}/"


def queued() -> list[tuple[str, tuple[str, ...]]]:
    return [(row.task["func"], row.task["args"]) for row in OrmQ.objects.all()]


def events(lease: Lease) -> list[tuple[str, str, str]]:
    return [(each.kind, each.actor, each.reason) for each in lease.events.exclude(kind="granted")]


# --- evict --------------------------------------------------------------------------------------------------------


def test_an_evicted_sandbox_is_put_to_sleep_by_the_queue_and_not_by_the_request(
    operator: Client, lease: Lease, waiting: Sandbox, memory: MemoryProvider
) -> None:
    asked = len(memory.calls)
    assert list_messages(operator.post(page(waiting, "evict"), WHY)) == ["1 sandbox scheduled for eviction."]
    assert (state_of(waiting), len(memory.calls)) == ("waiting", asked)
    assert queued() == [("leases.tasks.sweep_idle", ())]
    assert tasks.sweep_idle() == "1 put to sleep"
    assert state_of(waiting) == "cold"
    assert events(lease) == [("sleep_asked_for", "operator", "it mines coins")]
    assert LogEntry.objects.get().get_change_message() == "Evict: it mines coins"
    assert b"Sleep asked for" in operator.get(f"/admin/leases/lease/{lease.pk}/change/").content


def test_a_warm_sandbox_is_evicted_too(operator: Client, lease: Lease) -> None:
    assert list_messages(operator.post(page(ensure_sandbox(lease), "evict"), WHY)) == ["1 sandbox scheduled for eviction."]
    assert tasks.sweep_idle() == "1 put to sleep"


def test_a_running_sandbox_is_not_evicted(operator: Client, lease: Lease, waiting: Sandbox) -> None:
    assert runs.open_run(waiting, TRUE, now=timezone.now())
    assert list_messages(operator.post(page(waiting, "evict"), WHY)) == ["Nothing changed: a run has started."]
    assert tasks.sweep_idle() == "nothing to do"
    assert (state_of(waiting), queued(), events(lease), LogEntry.objects.count()) == ("running", [], [], 0)


def test_a_use_after_the_request_cancels_the_eviction(operator: Client, lease: Lease, waiting: Sandbox) -> None:
    operator.post(page(waiting, "evict"), WHY)
    run(lease, "true", now=timezone.now())
    assert tasks.sweep_idle() == "nothing to do"
    assert state_of(waiting) == "waiting"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"state": "cold"}, "the sandbox is cold"),
        ({"lost_at": NOW}, "the provider has lost the sandbox"),
        ({"state": "warm", "holder": None}, "the sandbox is unclaimed"),
    ],
)
def test_an_eviction_is_refused_in_other_states(operator: Client, waiting: Sandbox, changes: dict, why: str) -> None:
    Sandbox.objects.filter(pk=waiting.pk).update(**changes)
    assert "Evict…" not in operator.get(page(waiting, "change")).content.decode()
    assert list_messages(operator.post(page(waiting, "evict"), WHY)) == [f"Nothing changed: {why}."]
    assert not queued()


def test_a_bulk_eviction_skips_sandboxes_that_do_not_wait(
    operator: Client, lease: Lease, waiting: Sandbox, grant: Callable[..., Lease]
) -> None:
    warm = ensure_sandbox(grant(environment="warm", sleep_after=timedelta(hours=1)))
    asked = bulk(operator, "sandboxes/sandbox", "evict_all", [waiting.pk, warm.pk])
    assert b"applies to 1 of 2 now" in asked.content
    assert not queued()
    done = bulk(operator, "sandboxes/sandbox", "evict_all", [waiting.pk, warm.pk], confirm="1", **WHY)
    assert list_messages(done) == ["1 sandbox scheduled for eviction. 1 skipped: not waiting."]
    tasks.sweep_idle()
    assert (state_of(waiting), state_of(warm)) == ("cold", "warm")


# --- wake ---------------------------------------------------------------------------------------------------------


def test_a_woken_sandbox_is_started_by_the_queue_and_not_by_the_request(
    operator: Client, lease: Lease, cold: Sandbox, memory: MemoryProvider
) -> None:
    asked = len(memory.calls)
    assert list_messages(operator.post(page(cold, "wake"), WHY)) == ["1 sandbox being woken."]
    assert (state_of(cold), len(memory.calls)) == ("cold", asked)
    [(name, args)] = queued()
    assert (name, args) == ("leases.tasks.wake_sandbox", (str(lease.pk), "operator"))
    assert tasks.wake_sandbox(*args) == "warm"
    assert tasks.wake_sandbox(*args) == "warm"  # a task may be delivered twice
    after = Sandbox.objects.get(pk=cold.pk)
    assert (after.state, after.source, after.incarnation) == ("warm", "local", 2)
    assert {each.actor for each in after.transitions.all()[:2]} == {"operator"}
    assert events(lease) == [("wake_asked_for", "operator", "it mines coins")]


def test_a_sandbox_woken_in_the_meantime_is_left_alone(operator: Client, lease: Lease, cold: Sandbox) -> None:
    execution.ensure_sandbox_ready(lease.pk, now=timezone.now())
    assert list_messages(operator.post(page(cold, "wake"), WHY)) == ["Nothing changed: the sandbox is warm."]
    assert (queued(), events(lease)) == ([], [])


def test_a_lease_ended_before_the_task_ran_is_not_woken(operator: Client, lease: Lease, cold: Sandbox) -> None:
    operator.post(page(cold, "wake"), WHY)
    leasing.end(lease.pk, reason="released", now=timezone.now())
    assert "released" in tasks.wake_sandbox(str(lease.pk), "operator")
    assert state_of(cold) == "destroying"


# --- permissions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", ["evict", "wake"])
def test_a_viewer_a_get_and_a_post_without_a_token_change_nothing(
    act: str, viewer: Client, operator: Client, as_role: Callable[..., Client], waiting: Sandbox, cold: Sandbox
) -> None:
    sandbox = cold if act == "wake" else waiting
    before = Sandbox.objects.filter(pk=sandbox.pk).values().get()
    assert viewer.post(page(sandbox, act), WHY).status_code == 403
    assert b"Recorded in the history" in operator.get(page(sandbox, act), WHY).content
    assert as_role("Operator", enforce_csrf_checks=True).post(page(sandbox, act), WHY).status_code == 403
    bulk(viewer, "sandboxes/sandbox", "evict_all", [sandbox.pk], confirm="1", **WHY)
    assert Sandbox.objects.filter(pk=sandbox.pk).values().get() == before
    assert not queued()


def test_the_log_says_who_retried_a_destroy(operator: Client, lease: Lease, caplog: pytest.LogCaptureFixture) -> None:
    sandbox = ensure_sandbox(lease)
    Sandbox.objects.filter(pk=sandbox.pk).update(state="destroying", quarantined_at=NOW, deadline_at=NOW)
    with caplog.at_level("INFO"):
        operator.post(page(sandbox, "retry_destroy"), WHY)
    assert any("destroy retried" in line and "'actor': 'operator'" in line for line in caplog.messages)


# --- the page -----------------------------------------------------------------------------------------------------


def shown(client: Client, sandbox: Sandbox) -> tuple[dict[str, str], str]:
    """Return the summary as text by label, and the HTML of the page."""
    answer = client.get(page(sandbox, "change"))
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
    answer = viewer.get(page(cold, "change"))
    listed = [
        (each["snapshot"].incarnation, each["snapshot"].local, bool(each["snapshot"].forgotten_at))
        for each in answer.context["snapshots"]
    ]
    assert listed == [(2, True, False), (1, False, True)]
    eviction.release_cold(cold.pk, now=timezone.now(), reason="room")
    fresh = execution.ensure_sandbox_ready(lease.pk, now=timezone.now())
    assert fresh.pk != cold.pk
    of_the_cold_one = f'incarnation 2 of <a class="lh-link" href="{page(cold, "change")}">another sandbox'
    assert of_the_cold_one in shown(viewer, fresh)[1]  # a wake reads the newest of its holder


def test_a_workspace_over_its_limit_is_red(viewer: Client, waiting: Sandbox) -> None:
    for size, alarm in ((2048 << 20, False), ((2048 << 20) + 1, True)):
        Sandbox.objects.filter(pk=waiting.pk).update(workspace_bytes=size, measured_at=NOW)
        fact = next(each for each in viewer.get(page(waiting, "change")).context["facts"] if each.label == "Workspace")
        assert (fact.alarm, str(fact.value)) == (alarm, "2.0 GiB of 2.0 GiB")


def test_a_page_shows_the_next_eviction_and_a_loss(viewer: Client, waiting: Sandbox) -> None:
    Sandbox.objects.filter(pk=waiting.pk).update(idle_at=timezone.now() + timedelta(minutes=4, seconds=59))
    assert "evicted in 4 m 5" in shown(viewer, waiting)[0]["Last used"]
    assert "evicted in 4 m 5" in viewer.get("/admin/sandboxes/sandbox/").content.decode()
    Sandbox.objects.filter(pk=waiting.pk).update(idle_at=NOW)
    assert "eviction due" in shown(viewer, waiting)[0]["Last used"]
    eviction.mark_lost(waiting, "no such container", now=timezone.now())
    facts, whole = shown(viewer, waiting)
    assert "Lost" in facts
    assert "no such container" in whole
    assert "evict" not in facts["Last used"]


def test_a_timeline_includes_operator_actions_with_reasons(operator: Client, waiting: Sandbox) -> None:
    operator.post(page(waiting, "evict"), WHY)
    tasks.sweep_idle()
    timeline_entries = [
        (each.action, each.reason, each.actor) for each in operator.get(page(waiting, "change")).context["timeline"]
    ]
    assert [why for _, why, _ in timeline_entries] == ["persisted: stored", "idle", "it mines coins", "ready", "requested"]
    assert timeline_entries[2] == ("Evict", "it mines coins", "operator")


# --- the list -----------------------------------------------------------------------------------------------------


def listed(client: Client, query: str) -> set[str]:
    return {row.environment_id for row in client.get(f"/admin/sandboxes/sandbox/?{query}").context["cl"].result_list}


def test_each_tab_and_each_age_filter_lists_its_own_rows(viewer: Client, grant: Callable[..., Lease], pool: Pool) -> None:
    boxes = {name: ensure_sandbox(grant(environment=name)) for name in ("cold", "evicting", "waiting", "lost", "unstored")}
    for name in ("cold", "evicting", "waiting"):
        Sandbox.objects.filter(pk=boxes[name].pk).update(state=name, deadline_at=NOW, state_since=NOW - timedelta(days=2))
    Sandbox.objects.filter(pk=boxes["lost"].pk).update(lost_at=NOW, state_since=timezone.now())
    Sandbox.objects.filter(pk=boxes["unstored"].pk).update(state="waiting", last_error="store down", state_since=timezone.now())
    pool.warm_target = 1
    pool.save(update_fields=["warm_target"])
    assert pools.start_warm(pool, now=timezone.now() - 10 * MINUTE)
    slices = {
        name: listed(viewer, f"slice={name}") for name in ("cold", "evicting", "waiting", "lost", "unstored", "unclaimed")
    }
    assert slices == {
        "cold": {"cold"}, "evicting": {"evicting"}, "waiting": {"waiting", "unstored"}, "lost": {"lost"},
        "unstored": {"unstored"}, "unclaimed": {""},
    }  # fmt: skip
    old = {"cold", "evicting", "waiting"}
    assert listed(viewer, "lasting=1d") == listed(viewer, "lasting=1h") == old
    assert listed(viewer, "lasting=5m") == old | {""}
    assert listed(viewer, "lasting=nonsense") == listed(viewer, "")


def test_another_snapshot_costs_no_further_query(viewer: Client, lease: Lease, waiting: Sandbox) -> None:
    counts, user = [], User.objects.get(username="viewer")
    for numbers in (range(3), range(3, 60)):
        for number in numbers:
            Snapshot.objects.create(sandbox=waiting, incarnation=number, holder=lease.pk, at=NOW, size_bytes=1)
            LogEntry.objects.log_actions(user.pk, [waiting], CHANGE, "Evict: enough")
        counts.append(costs(viewer, [f"sandboxes/sandbox/{waiting.pk}/change/"]))
    assert counts[0] == counts[1]
    assert max(counts[0].values()) <= 16
