"""A database that was restored or copied destroys nothing that it does not know."""

import uuid
from pathlib import Path

import pytest
from django.conf import settings
from django.core.management import CommandError, call_command
from django.utils import timezone

from controlplane import health, schedules
from leases import leasing, tasks
from leases.models import Lease
from leases.one_shot import OneShotRequest, run_once
from leases.queue import queue
from leases.queue.models import QueuedRun
from leases.queue.queue import QueueOptions
from leases.queue.runner import Runner
from sandboxes import installation_marks
from sandboxes.models import Attachment, Installation, Pool, Sandbox, Sweep
from sandboxes.models.installation import MARK_NAME
from sandboxes.models.state import format_key_timestamp
from sandboxes.providers import get_provider
from sandboxes.providers.base import SandboxSpec
from sandboxes.providers.observed import DestroyRefused
from sandboxes.storage import get_store
from sandboxes.storage.observed import DeleteRefused
from sandboxes.sweeps import installation
from sandboxes.webhooks import delivery, subscriptions
from tests.conftest import MINUTE, NOW, SimulatedCrash, die
from tests.support.actors import console_user
from tests.support.leases import run, write
from tests.support.storage.stores import keep_none

pytestmark = pytest.mark.django_db


def sweep(name: str) -> str:
    return "\n".join(schedules.run_sweep(name, now=NOW).failures)


def mark_as(**fields: object) -> None:
    """Make the database an older state of the installation, or another one. The store and the directory keep their marks."""
    assert not sweep("mark")
    Installation.objects.filter(pk=1).update(**fields)


@pytest.fixture
def orphan(pool: Pool, memory) -> str:
    """A container that this database does not know, old enough to be destroyed as an orphan."""
    spec = SandboxSpec(name="of-the-lost-hour", owner=str(pool.owner), image="", memory_mib=64, millicpus=100, pids=64)
    memory.create(spec)
    memory._sandboxes[spec.name].created_at = NOW - 60 * MINUTE
    return spec.name


@pytest.fixture
def newer_object() -> str:
    key = f"snapshots/{uuid.uuid4()}/{format_key_timestamp(NOW - 120 * MINUTE)}-{uuid.uuid4().hex}/workspace"
    get_store().set(key, b"state that only a later database knows")
    return key


@pytest.mark.parametrize("fields", [{"generation": 0}, {"identity": uuid.uuid4()}], ids=["restored", "another installation"])
def test_destructive_sweeps_are_refused_and_say_so(
    fields: dict[str, object], pool, memory, grant, orphan, newer_object
) -> None:
    lease = grant(ttl=MINUTE)
    run(lease)
    mark_as(**fields)
    memory.calls.clear()
    for name in schedules.REFUSED_SWEEPS:
        assert "Refused" in sweep(name)
    assert memory.calls == []
    assert "Refused" in Sweep.objects.get(name="prune").last_error
    assert get_store().has(newer_object)
    assert {entry.name for entry in memory.list(str(pool.owner))} == {orphan, Sandbox.objects.get().name}
    lease.refresh_from_db()
    assert lease.status == "active"
    assert any("do not match" in warning for warning in health.check_health(now=timezone.now())["warnings"])
    assert sweep("mark") and not sweep("recount")


def test_every_sweep_that_calls_providers_to_change_something_is_refused(pool, memory, grant) -> None:
    """The others may only look: at engines, logs and the sizes of objects."""
    run(grant())
    Sandbox.objects.update(frozen=True)
    Attachment.objects.update(unsaved_since=NOW)
    mark_as(generation=0)
    memory.calls.clear()
    for name in schedules.SCHEDULE.keys() - {"seal", "watch"}:  # one starts a sandbox of its own, the other waits for changes
        schedules.run_sweep(name, now=NOW + MINUTE)
    assert {verb for verb, *_ in memory.calls} == {"stats"}


def test_store_without_its_mark_is_not_the_one_of_this_database(newer_object) -> None:
    mark_as()
    get_store().remove(MARK_NAME)
    assert "has no mark" in sweep("prune")


def test_new_host_without_a_mark_in_its_state_directory_is_accepted() -> None:
    mark_as()
    (Path(settings.STATE_DIR) / MARK_NAME).unlink()
    assert sweep("prune") == ""


def test_other_copy_is_refused_once_this_one_is_confirmed(capsys, pool, memory, orphan, newer_object) -> None:
    mark_as(generation=0)
    with pytest.raises(CommandError, match="refused"):
        call_command("installation")
    with pytest.raises(CommandError, match="Nothing was changed"):
        call_command("installation", "confirm")
    listed = capsys.readouterr().out
    assert orphan in listed and newer_object in listed
    other_copy = Installation.objects.get().generation + 1  # the database that wrote the marks
    call_command("installation", "confirm", "--yes")
    assert sweep("reconcile") == ""
    assert not memory.list(str(pool.owner))
    Installation.objects.update(generation=other_copy)
    assert "later state" in sweep("reconcile")


@pytest.mark.parametrize("writes", [0, 1, 2])
def test_crash_before_any_mark_is_written_is_no_mismatch(monkeypatch: pytest.MonkeyPatch, writes: int) -> None:
    """The first two writes are those of the first marking."""
    store, written = get_store(), [0] * writes
    write = store.set

    def write_or_die(key: str, value: bytes) -> None:
        if not written:
            die()
        written.pop()
        write(key, value)

    monkeypatch.setattr(store, "set", write_or_die)
    with pytest.raises(SimulatedCrash):
        _ = [installation.mark_places(now=NOW) for _ in range(2)]
    assert installation_marks.find_mismatch() == ""


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("reader", ["read_store_mark", "read_directory_mark"])
def test_mark_that_another_host_writes_during_the_check_is_no_mismatch(
    monkeypatch: pytest.MonkeyPatch, is_first: bool, reader: str
) -> None:
    installation_marks.get_installation()
    if not is_first:
        mark_as()
    read = getattr(installation_marks, reader)

    def mark_elsewhere_and_read() -> installation_marks.Mark | None:
        installation_marks.write_marks(now=NOW)
        return read()

    monkeypatch.setattr(installation_marks, reader, mark_elsewhere_and_read)
    assert installation_marks.find_mismatch() == ""


def test_unreadable_mark_refuses(newer_object) -> None:
    mark_as()
    get_store().set(MARK_NAME, b"not json")
    assert "cannot be read" in sweep("prune")


def test_observe_mode_counts_and_destroys_nothing(settings, pool, memory, grant, orphan, newer_object) -> None:
    settings.OBSERVE = True
    ended, idle = grant(), grant(environment="idle")
    write(ended), write(idle)
    leasing.release(ended.pk, now=NOW)
    Sandbox.objects.filter(holder=idle.pk).update(idle_at=NOW)
    counts = {name: schedules.run_sweep(name, now=NOW + MINUTE).counts for name in ("reclaim", "idle", "reconcile", "prune")}
    assert counts == {
        "reclaim": {"observed: would destroy sandbox": 1}, "idle": {"observed: would put sandbox to sleep": 1},
        "reconcile": {"observed: would destroy orphan": 1}, "prune": {"observed: would delete unreferenced object": 1},
    }  # fmt: skip
    assert len(memory.list(str(pool.owner))) == 3
    assert get_store().has(newer_object)


def test_observe_mode_refuses_each_destroy_and_delete_and_does_not_wait_for_them(settings, pool, memory, newer_object) -> None:
    settings.OBSERVE = True
    get_store.cache_clear()
    result = run_once(OneShotRequest("did:plc:ada", ["true"], MINUTE, pool=pool.name), now=NOW)
    assert (result.outcome, result.cleaned_up) == ("ok", False)
    sandbox = Sandbox.objects.get()
    assert (sandbox.state, sandbox.tries) == ("destroying", 1)  # refused at once, and tried again by the sweep
    assert ("kill_all", sandbox.ref) not in memory.calls
    with pytest.raises(DestroyRefused):
        get_provider("memory").destroy(sandbox.ref)
    for delete in (
        lambda: get_store().remove(newer_object),
        lambda: get_store().remove_many([newer_object]),
        lambda: get_store().clear("snapshots/"),
        lambda: get_store().sweep_leftovers(NOW, find_kept=keep_none),
    ):
        with pytest.raises(DeleteRefused):
            delete()
    assert memory.list(str(pool.owner)) and get_store().has(newer_object)


def test_confirmation_lists_what_is_deleted_after_its_grace_period(capsys, pool, memory, orphan) -> None:
    """A container that was started just before the restore is destroyed two minutes after its start."""
    mark_as(generation=0)
    memory._sandboxes[orphan].created_at = timezone.now()
    with pytest.raises(CommandError, match="Nothing was changed"):
        call_command("installation", "confirm")
    assert f"would destroy orphan {orphan} in up to 120 s, once its grace period is over\n" in capsys.readouterr().out


@pytest.fixture
def restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has just started."""
    monkeypatch.setattr(installation_marks, "FIRST_CHECK", installation_marks.FirstCheck())


def enqueue_run(lease: Lease, pool: Pool) -> QueuedRun:
    request = {"kind": "exec", "argv": ["true"], "cwd": "/workspace", "shell": None, "timeout_seconds": 60}
    return queue.enqueue(
        uuid.uuid4(), agent_did=lease.agent_did, lease=lease, pool=pool, request=request, secrets={"env": {}},
        options=QueueOptions(), now=NOW,
    )  # fmt: skip


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("fields", [{"generation": 0}, {"identity": uuid.uuid4()}], ids=["restored", "another installation"])
def test_runner_executes_nothing_until_the_installation_is_confirmed(
    fields: dict[str, object], pool, memory, grant, restarted
) -> None:
    """The mismatch is found by the runner's first look: the sweep `mark` may not have run since the restore."""
    row = enqueue_run(grant(), pool)
    mark_as(**fields)
    runner = Runner(1, now=lambda: NOW, start_thread=lambda name, act: act())
    assert [runner.run_pending(), runner.run_pending()] == [0, 0]
    assert (QueuedRun.objects.get().state, QueuedRun.objects.get().attempt) == ("queued", 0)
    assert any("no queued run" in warning for warning in health.check_health(now=NOW)["warnings"])
    installation.confirm(now=NOW, actor=console_user("test"))
    assert runner.run_pending() == 1
    row.refresh_from_db()
    assert row.state == "completed"


@pytest.mark.django_db(transaction=True)
def test_runner_of_observe_mode_and_of_a_store_that_cannot_be_read_executes_nothing(
    settings, pool, memory, grant, restarted
) -> None:
    enqueue_run(grant(), pool)
    mark_as()
    runner = Runner(1, now=lambda: NOW, start_thread=lambda name, act: act())
    settings.OBSERVE = True
    assert runner.run_pending() == 0
    settings.OBSERVE = False
    mark = get_store().get(MARK_NAME)
    get_store().set(MARK_NAME, b"not json")
    assert runner.run_pending() == 0
    get_store().set(MARK_NAME, mark)
    assert runner.run_pending() == 1


def test_tasks_of_a_restored_queue_do_nothing(pool, memory, grant, receiver, restarted) -> None:
    """The copied database has the tasks, events and ended leases of the original."""
    lease = grant()
    run(lease)
    subscriptions.add_webhook(receiver.url, now=NOW, internal=True)
    mark_as(generation=0)
    leasing.release(lease.pk, now=NOW)
    tasks.begin_reclaim([Lease.objects.get(pk=lease.pk)])
    acts = [
        tasks.reclaim, tasks.sweep_idle, delivery.run_delivery_task, lambda: tasks.build_template(str(uuid.uuid4())),
        lambda: tasks.wake_sandbox(str(lease.pk), "ada"), lambda: tasks.restart_sandbox(str(lease.pk), "", "ada", 1),
        lambda: tasks.take_snapshot(str(lease.pk), "one", "ada", 1),
        lambda: tasks.restore_snapshot(str(lease.pk), str(uuid.uuid4()), "ada", 1),
    ]  # fmt: skip
    assert all(act().startswith("Refused: ") for act in acts)
    assert (len(memory.list(str(pool.owner))), receiver.received) == (1, [])
    installation.confirm(now=NOW, actor=console_user("test"))
    assert tasks.reclaim() == "1 destroyed, 1 leases closed"
