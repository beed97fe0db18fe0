"""Stored state in the console: agent data, snapshots and unsaved changes."""

import gc
import io
import os
import re
import tarfile
import tracemalloc
from collections.abc import Callable
from html import unescape

import pytest
from django.contrib.admin.models import LogEntry
from django.core.signals import request_finished
from django.db import close_old_connections
from django.http import StreamingHttpResponse
from django.test import Client
from django.utils import timezone
from django_q.models import OrmQ

from leases import execution, leasing, snapshots, tasks
from leases.admin.timeline import load_timeline
from leases.models import Agent, EnvironmentType, Lease
from sandboxes import runs
from sandboxes.admin import agent_data
from sandboxes.models import Sandbox
from sandboxes.models.state import AgentData, Attachment, DataEvent, DataFile, DataObject, Snapshot
from sandboxes.providers.base import Unavailable
from sandboxes.providers.memory import File, Link, MemoryProvider
from sandboxes.runs import Command
from sandboxes.state import data_editing, data_tree, workspace
from sandboxes.storage import get_store
from sandboxes.storage.base import CHUNK_BYTES
from tests.admin.conftest import NOW, ensure_sandbox
from tests.admin.test_acts import WHY, list_messages
from tests.admin.test_pages import MARKUP, costs
from tests.conftest import MINUTE

pytestmark = pytest.mark.django_db
ADA = "did:plc:ada"


def put(path: str, content: bytes = b"1", agent: str = ADA) -> AgentData:
    data_editing.put_file(agent, path, io.BytesIO(content), now=NOW)
    return AgentData.objects.get(agent_did=agent)


def sh(lease: Lease, line: str, now=NOW) -> None:
    execution.exec_command(lease.pk, Command(argv=["sh", "-c", line], timeout=MINUTE), now=now)


def page(row: AgentData, act: str = "change", **query: str) -> tuple[str, dict[str, str]]:
    return f"/admin/sandboxes/agentdata/{row.pk}/{act}/", query


def names(client: Client, row: AgentData, **query: str) -> dict[str, dict]:
    return {each["name"]: each for each in client.get(*page(row, **query)).context["names"]}


def body(answer: object) -> bytes:
    assert isinstance(answer, StreamingHttpResponse)
    return b"".join(answer.streaming_content)  # type: ignore[arg-type]


# --- an agent's files -------------------------------------------------------------------------------------------------


def test_a_directory_shows_names_and_sizes(viewer: Client) -> None:
    put("memory/one.md", b"x" * 1000)
    put("memory/deep/two.md", b"x" * 1000)
    put("Memory/other")
    row = put("character.json", b"{}")
    top = names(viewer, row)
    assert {name: (each["size"], each["files"]) for name, each in top.items()} == {
        "Memory": ("1 B", "1 file"), "character.json": ("2 B", ""), "memory": ("2.0 KiB", "2 files"),
    }  # fmt: skip
    inside = viewer.get("/admin/sandboxes/agentdata/" + f"{row.pk}/change/" + top["memory"]["href"])
    assert [each["name"] for each in inside.context["names"]] == ["deep", "one.md"]
    assert inside.context["crumbs"] == [("memory", "?path=memory")]
    assert list(names(viewer, row, path="memory/one.md")) == ["one.md"]
    assert b"memory/three does not exist" in viewer.get(*page(row, path="memory/three")).content


def test_a_file_names_the_lease_that_wrote_it_and_a_link_its_target(
    viewer: Client, lease: Lease, memory: MemoryProvider
) -> None:
    memory.files(ensure_sandbox(lease).ref)["/data/latest"] = Link("notes/today")
    sh(lease, "echo hello >/data/note")
    shown = names(viewer, put("by-hand"))
    assert f"/admin/leases/lease/{lease.pk}/change/" in shown["note"]["writer"]
    assert (shown["by-hand"]["writer"], shown["note"]["mode"]) == ("an operator", "0644")
    assert (shown["latest"]["target"], shown["latest"]["size"]) == ("notes/today", "–")


def test_conflicts_stand_out(viewer: Client, grant: Callable[..., Lease], memory: MemoryProvider) -> None:
    one, two = grant(environment="one"), grant(environment="two")
    sh(two, "true")
    sh(one, "echo one >/data/note")
    memory.files(ensure_sandbox(two).ref)["/data/note"] = File(b"two")
    sh(two, "true")
    row = AgentData.objects.get()
    shown = viewer.get(*page(row))
    assert "conflict</span>" in shown.content.decode()
    facts = {fact.label: fact for fact in shown.context["facts"]}
    assert (facts["Conflicts"].value, facts["Conflicts"].href) == ("1 file", "?path=.conflicts")
    assert b"overwritten version" in viewer.get(*page(row, path=f".conflicts/{one.pk}")).content
    assert "Another sandbox of this agent" in unescape(shown.content.decode())


def test_a_large_directory_is_shown_in_parts_without_losing_a_name(viewer: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_data, "MAX_NAMES_SHOWN", 3)
    for number in range(8):
        row = put(f"d/{number}")
    seen, url = [], f"/admin/sandboxes/agentdata/{row.pk}/change/?path=d"
    while url:
        shown = viewer.get(url)
        seen += [each["name"] for each in shown.context["names"]]
        assert len(shown.context["names"]) <= 3
        url = shown.context["next_page"] and f"/admin/sandboxes/agentdata/{row.pk}/change/{shown.context['next_page']}"
    assert seen == [str(number) for number in range(8)]


def test_twenty_thousand_files_cost_as_many_queries_as_three(viewer: Client) -> None:
    row = put("memory/0")
    pages = [f"sandboxes/agentdata/{row.pk}/change/?path=memory", f"sandboxes/agentdata/{row.pk}/change/"]
    put("memory/1"), put("memory/2")
    few = costs(viewer, pages)
    stored = DataObject.objects.first()
    DataFile.objects.bulk_create(
        DataFile(data=row, path=f"memory/x{n}", kind="file", mode=0o644, revision=1, at=NOW, stored_in=stored)
        for n in range(20_000)
    )
    assert costs(viewer, pages) == few
    assert max(few.values()) <= 16
    shown = viewer.get(*page(row, path="memory"))
    assert len(shown.context["names"]) == agent_data.MAX_NAMES_SHOWN
    assert len(shown.content) < 400_000


@pytest.mark.parametrize("path", ["../x", "a/../../b", "a//b", ".", "a/./b", "\0", "a\0b", "x" * 1001])
@pytest.mark.parametrize("act", ["change", "file", "tar"])
def test_an_invalid_path_is_not_found(operator: Client, act: str, path: str) -> None:
    row = put("a/b")
    assert operator.get(*page(row, act, path=path)).status_code == 404
    assert operator.get(*page(row, path="a", after=path)).status_code == 404


# --- downloads --------------------------------------------------------------------------------------------------------


def test_a_file_is_downloaded_byte_for_byte_and_never_shown_as_a_page(operator: Client) -> None:
    content = f"<script>{MARKUP}".encode() + os.urandom(3000)
    row = put("memory/evil.html", content)
    answer = operator.get(*page(row, "file", path="memory/evil.html"))
    assert body(answer) == content
    assert answer.headers["Content-Type"] == "application/octet-stream"
    assert answer.headers["Content-Length"] == str(len(content))
    assert answer.headers["Content-Disposition"] == 'attachment; filename="evil.html"'
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert "no-store" in answer.headers["Cache-Control"]
    entry = LogEntry.objects.get()
    assert (entry.user.get_username(), entry.get_change_message()) == ("operator", "Download: memory/evil.html")
    assert b"memory/evil.html" in operator.get(*page(row)).content


def test_a_file_name_cannot_inject_a_header(operator: Client) -> None:
    row = put("a/x\r\nSet-Cookie: a=b\u202e\"'.txt")
    answer = operator.get(*page(row, "file", path="a/x\r\nSet-Cookie: a=b\u202e\"'.txt"))
    assert answer.headers["Content-Disposition"] == 'attachment; filename="x__Set-Cookie_ a=b__\'.txt"'
    assert body(answer) == b"1"


def test_downloads_need_permission_to_read_agent_data(viewer: Client, administrator: Client, lease: Lease) -> None:
    row = put("note")
    sh(lease, "echo 1 >/workspace/x")
    copy = snapshots.take_snapshot(lease.pk, now=NOW)
    tar = f"/admin/sandboxes/snapshot/{copy.pk}/workspace.tar"
    for url in ("{}?path=note".format(page(row, "file")[0]), page(row, "tar")[0], tar):
        assert viewer.get(url).status_code == 403
        assert Client().get(url).status_code == 302
        assert administrator.get(url).status_code == 200
    for shown in (viewer.get(*page(row)), viewer.get(f"/admin/sandboxes/snapshot/{copy.pk}/change/")):
        assert not re.search(rb"/file/|/tar/|\.tar", shown.content)


def test_a_directory_is_downloaded_as_a_tar_with_all_that_is_below_it(operator: Client) -> None:
    put("memory/deep/one", b"11")
    put("memory2/x")
    row = put("memory/two", b"2")
    with tarfile.open(fileobj=io.BytesIO(body(operator.get(*page(row, "tar", path="memory"))))) as tar:
        assert tar.getnames() == ["memory", "memory/deep", "memory/deep/one", "memory/two"]
        whole = tar.extractfile("memory/deep/one")
        assert whole and whole.read() == b"11"
    answer = operator.get(*page(row, "tar"))
    assert answer.headers["Content-Disposition"] == 'attachment; filename="did_plc_ada.tar"'
    with tarfile.open(fileobj=io.BytesIO(body(answer))) as tar:
        assert len(tar.getnames()) == 6
    assert operator.get(*page(row, "tar", path="nothing")).status_code == 404
    assert operator.get(*page(row, "file", path="memory")).status_code == 404
    assert operator.get("/admin/sandboxes/agentdata/99/tar/").status_code == 404


def test_a_large_file_is_never_held_in_memory(operator: Client) -> None:
    size = 30 << 20
    row = put("large", os.urandom(1 << 20) * 30)
    tracemalloc.start()
    answer = operator.get(*page(row, "file", path="large"))
    assert isinstance(answer, StreamingHttpResponse)
    lengths = [len(chunk) for chunk in answer.streaming_content]  # type: ignore[arg-type]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (sum(lengths), max(lengths)) == (size, CHUNK_BYTES)
    assert peak < 8 << 20


def test_an_aborted_download_closes_its_file(operator: Client, lease: Lease) -> None:
    row = put("large", os.urandom(3 << 20))
    sh(lease, "echo 1 >/workspace/x")
    copy = snapshots.take_snapshot(lease.pk, now=NOW)
    for url in (
        "{}?path=large".format(page(row, "file")[0]),
        page(row, "tar")[0],
        f"/admin/sandboxes/snapshot/{copy.pk}/workspace.tar",
    ):
        gc.collect()
        before = set(os.listdir("/proc/self/fd"))
        answer = operator.get(url)
        assert len(os.listdir("/proc/self/fd")) > len(before)
        request_finished.disconnect(close_old_connections)  # as the client does: this test's connection stays
        try:
            answer.close()
        finally:
            request_finished.connect(close_old_connections)
        assert set(os.listdir("/proc/self/fd")) <= before  # what another thread has closed meanwhile is not ours


def test_a_corrupt_object_is_reported_and_not_sent(operator: Client) -> None:
    row = put("note", b"hello")
    key = DataObject.objects.get().key
    get_store().set(key, b"\0" * len(get_store().get(key) or b""))
    for url in ("{}?path=note".format(page(row, "file")[0]), page(row, "tar")[0]):
        answer = operator.get(url)
        assert answer.headers["Location"] == f"/admin/sandboxes/agentdata/{row.pk}/change/?path="
        assert "does not match its digest" in list_messages(answer)[-1]
    get_store().remove(key)
    shown = operator.get(*page(row, "file", path="note"), follow=True)
    assert "is missing" in unescape(shown.content.decode())
    assert DataEvent.objects.filter(kind="corrupt").count() == 2
    assert not LogEntry.objects.exists()


# --- copies of workspaces ---------------------------------------------------------------------------------------------


@pytest.fixture
def used(lease: Lease) -> Sandbox:
    sh(lease, "echo first >/workspace/x")
    return ensure_sandbox(lease)


def act(row: Sandbox | Snapshot, name: str) -> str:
    return f"/admin/{row._meta.label_lower.replace('.', '/')}/{row.pk}/{name}/"


def work() -> list[str]:
    """Run the queued tasks and return their results."""
    done = []
    for row in OrmQ.objects.all():
        verb = row.task["func"].rpartition(".")[2]
        done.append(getattr(tasks, verb)(*row.task["args"]))
        row.delete()
    return done


def events(lease: Lease) -> list[tuple[str, str, str]]:
    return [(each.kind, each.actor, each.reason) for each in lease.events.exclude(kind="granted")]


def in_workspace(lease: Lease) -> str:
    _, result = execution.exec_command(lease.pk, Command(argv=["cat", "/workspace/x"], timeout=MINUTE), now=timezone.now())
    return result.stdout.decode().strip()


def test_a_snapshot_is_taken_by_the_queue_and_not_by_the_request(
    operator: Client, lease: Lease, used: Sandbox, memory: MemoryProvider
) -> None:
    calls = len(memory.calls)
    assert list_messages(operator.post(act(used, "take_snapshot"), {**WHY, "name": "before the exam"})) == [
        "1 sandbox queued for a snapshot."
    ]
    assert (len(memory.calls), Snapshot.objects.count()) == (calls, 0)
    work()
    copy = Snapshot.objects.get()
    assert (copy.kind, copy.name, copy.holder) == ("asked", "before the exam", lease.pk)
    assert events(lease) == [
        ("snapshot", "operator", f"{copy.pk} before the exam"), ("snapshot_asked_for", "operator", "it mines coins"),
    ]  # fmt: skip
    assert LogEntry.objects.get().get_change_message() == "Take snapshot: it mines coins"
    shown = operator.get(act(used, "change")).content.decode()
    for words in ("before the exam", "on request", "local copy and store", act(copy, "restore"), act(copy, "fork")):
        assert words in shown, words


def test_an_earlier_copy_is_restored_and_the_present_state_is_kept(operator: Client, lease: Lease, used: Sandbox) -> None:
    copy = snapshots.take_snapshot(lease.pk, now=NOW)
    sh(lease, "echo second >/workspace/x", now=timezone.now())
    asked = operator.get(act(copy, "restore")).content.decode()
    assert f"{copy.at:%Y-%m-%d %H:%M:%S}" in asked
    assert "can be undone" in asked
    answer = operator.post(act(copy, "restore"), WHY)
    assert answer.headers["HX-Redirect"] == act(used, "change")
    assert list_messages(answer) == ["1 snapshot being restored."]
    work()
    newest, present, *_ = workspace.find_by_holder(lease.pk)
    assert (newest.kind, newest.key, present.kind) == ("restored", copy.key, "sleep")
    assert in_workspace(lease) == "first"
    assert ("restore_asked_for", "operator", "it mines coins") in events(lease)


def test_a_failed_task_is_recorded_in_the_timeline(operator: Client, lease: Lease, used: Sandbox) -> None:
    copy = snapshots.take_snapshot(lease.pk, now=NOW)
    operator.post(act(copy, "restore"), WHY)
    runs.open_run(used, Command(argv=["sleep"], timeout=MINUTE), now=timezone.now())
    assert work() == ["A run is open in the sandbox. Restore the snapshot after the run has ended."]
    assert events(lease)[0] == (
        "restore_failed",
        "operator",
        "A run is open in the sandbox. Restore the snapshot after the run has ended.",
    )


def test_snapshots_of_an_ended_lease_are_not_taken_or_restored(operator: Client, lease: Lease, used: Sandbox) -> None:
    copy = snapshots.take_snapshot(lease.pk, now=NOW)
    for url in (act(used, "take_snapshot"), act(copy, "restore")):
        assert operator.get(url).status_code == 200
    leasing.end(lease.pk, reason="released", now=NOW)
    assert list_messages(operator.post(act(copy, "restore"), WHY)) == ["Nothing changed: its lease has ended."]
    assert "Nothing changed" in list_messages(operator.post(act(used, "take_snapshot"), {**WHY, "name": ""}))[0]
    assert not OrmQ.objects.exists()
    shown = operator.get(act(copy, "change")).content.decode()
    assert "Restore…" not in shown
    assert "Fork into…" in shown


def test_a_lease_is_forked_from_a_copy_into_another_environment(operator: Client, lease: Lease, used: Sandbox) -> None:
    copy = snapshots.take_snapshot(lease.pk, now=NOW)
    answer = operator.post(act(copy, "fork"), {**WHY, "environment": "game-2"})
    forked = Lease.objects.get(environment_id="game-2")
    assert answer.headers["HX-Redirect"] == f"/admin/leases/lease/{forked.pk}/change/"
    assert (forked.agent_did, forked.environment_type_id, forked.pool_id) == (ADA, "catan", lease.pool_id)
    assert in_workspace(forked) == "first"
    assert [kind for kind, *_ in events(lease)][:2] == ["fork_asked_for", "forked"]
    again = operator.post(act(copy, "fork"), {**WHY, "environment": "game-2"})
    assert list_messages(again)[-1] == "Nothing changed: that environment already has a lease forked from this snapshot."


@pytest.mark.parametrize(
    ("environment", "why"), [("a b", "Not 1 to 200 letters"), ("", "required"), ("game-9", "holds a lease")]
)
def test_a_refused_fork_is_explained_in_the_dialog(
    operator: Client, lease: Lease, used: Sandbox, grant: Callable[..., Lease], environment: str, why: str
) -> None:
    copy = snapshots.take_snapshot(lease.pk, now=NOW)
    grant(environment="game-9")
    answer = operator.post(act(copy, "fork"), {**WHY, "environment": environment})
    assert answer.status_code == 200
    assert "HX-Redirect" not in answer.headers
    assert why in answer.content.decode()
    assert b'id="dialog-form"' in answer.content
    assert Lease.objects.count() == 2
    assert not LogEntry.objects.exists()


@pytest.mark.parametrize("name", ["take_snapshot", "restore", "fork"])
def test_snapshot_actions_need_the_role_a_token_and_a_post(
    viewer: Client, operator: Client, as_role: Callable[..., Client], lease: Lease, used: Sandbox, name: str
) -> None:
    copy = snapshots.take_snapshot(lease.pk, now=NOW)
    url = act(used if name == "take_snapshot" else copy, name)
    given = {**WHY, "environment": "game-2", "name": "x"}
    assert viewer.post(url, given).status_code == 403
    assert as_role("Operator", enforce_csrf_checks=True).post(url, given).status_code == 403
    assert operator.get(url, given).status_code == 200
    assert operator.post(url, given | {"reason": ""}).status_code == 200
    assert (OrmQ.objects.count(), Lease.objects.count(), LogEntry.objects.count()) == (0, 1, 0)
    assert "Restore…" not in viewer.get(act(used, "change")).content.decode()


@pytest.mark.parametrize("object_id", ["00000000-0000-0000-0000-000000000000", "no-id", "_5F"])
@pytest.mark.parametrize("name", ["restore", "fork"])
def test_a_missing_snapshot_is_not_found(operator: Client, name: str, object_id: str) -> None:
    url = f"/admin/sandboxes/snapshot/{object_id}/{name}/"
    assert operator.get(url).status_code == 200
    assert operator.post(url, {**WHY, "environment": "game-2"}).status_code == 404


def test_a_copy_is_downloaded_as_it_was_stored(operator: Client, lease: Lease, used: Sandbox) -> None:
    copy = snapshots.take_snapshot(lease.pk, now=NOW)
    url = f"/admin/sandboxes/snapshot/{copy.pk}/workspace.tar"
    answer = operator.get(url)
    with tarfile.open(fileobj=io.BytesIO(body(answer))) as tar:
        assert "x" in tar.getnames()
    assert answer.headers["Content-Disposition"].endswith('workspace.tar"')
    assert LogEntry.objects.get().get_change_message() == "Download: workspace"
    assert operator.get(url.replace("workspace", "data")).status_code == 404
    workspace.forget_local(copy)
    get_store().set(f"{copy.key}/workspace", b"rubbish")
    answer = operator.get(url)
    assert answer.headers["Location"] == act(copy, "change")
    assert "does not match its digest" in list_messages(answer)[-1]
    Snapshot.objects.update(forgotten_at=NOW)
    assert "was deleted" in list_messages(operator.get(url))[-1]
    assert "deleted" in operator.get(act(copy, "change")).content.decode()


# --- unsaved data and errors ------------------------------------------------------------------------------------------


@pytest.fixture
def unsaved(lease: Lease, memory: MemoryProvider) -> Sandbox:
    sh(lease, "true")
    with memory.fail("get_files", Unavailable("no route to the engine")):
        sh(lease, "echo x >/data/note")
    return ensure_sandbox(lease)


def test_unsaved_changes_are_shown_on_every_related_page(viewer: Client, unsaved: Sandbox) -> None:
    shown = viewer.get(act(unsaved, "change")).content.decode()
    since = Attachment.objects.get().unsaved_since
    assert since
    assert f"{since:%Y-%m-%d %H:%M:%S}" in shown.split("Unsaved changes in /data since")[1].split("</h2>")[0]
    assert "no route to the engine" in shown
    listed = viewer.get("/admin/sandboxes/sandbox/?slice=unsaved").content.decode()
    assert "Data not stored</span>" in listed
    assert "no route to the engine" in listed
    row = AgentData.objects.get()
    assert "1 sandbox" in viewer.get("/admin/sandboxes/agentdata/?slice=unsaved").content.decode()
    shown = viewer.get(*page(row)).content.decode()
    assert "unsaved changes" in shown
    assert "no route to the engine" in shown


def test_stored_changes_are_not_shown_as_unsaved(viewer: Client, lease: Lease, unsaved: Sandbox) -> None:
    sh(lease, "true")
    assert "Unsaved changes in /data" not in viewer.get(act(unsaved, "change")).content.decode()
    for model in ("sandbox", "agentdata"):
        assert viewer.get(f"/admin/sandboxes/{model}/?slice=unsaved").context["cl"].result_count == 0


def test_health_counts_unsaved_sandboxes_without_names(client: Client, unsaved: Sandbox) -> None:
    found = client.get("/healthz").json()
    assert found["unsaved"] == 1
    assert "Sandboxes with unsaved changes in /data: 1." in found["warnings"]
    assert not any("engine" in each or "did:" in each for each in found["warnings"])


def test_data_events_are_in_the_leases_timeline(viewer: Client, lease: Lease, memory: MemoryProvider) -> None:
    memory.files(ensure_sandbox(lease).ref)["/data/" + "long/" * 220 + "x"] = File(b"1")
    sh(lease, "true")
    only, _ = load_timeline(lease, only="state")
    assert [(entry.source, "Skipped" in entry.state, "longer than" in entry.detail) for entry in only] == [
        ("state", True, False)
    ]
    assert "Skipped" in viewer.get(f"/admin/leases/lease/{lease.pk}/change/?only=state").content.decode()
    assert len(load_timeline(lease)[0]) > 1


def test_events_are_listed_with_their_lease_and_narrowed_to_an_agent(viewer: Client, lease: Lease) -> None:
    now = timezone.now()
    DataEvent.objects.create(agent_did=ADA, holder=lease.pk, at=now, kind="conflict", path="note", detail="kept")
    DataEvent.objects.create(agent_did="did:plc:bob", at=now, kind="corrupt")
    counts = {
        query: viewer.get(f"/admin/sandboxes/dataevent/?{query}").context["cl"].result_count
        for query in ("", "slice=conflicts", "slice=lost", f"agent_did={ADA}", "kind=full")
    }
    assert list(counts.values()) == [2, 1, 1, 1, 0]
    assert f"/admin/leases/lease/{lease.pk}/change/" in viewer.get("/admin/sandboxes/dataevent/").content.decode()


def test_a_page_costs_the_same_for_60_rows_as_for_3(viewer: Client, grant: Callable[..., Lease]) -> None:
    lease = grant(now=timezone.now())
    sh(lease, "true", now=timezone.now())
    row = put("memory/a")
    pages = [
        "sandboxes/agentdata/", "sandboxes/snapshot/?slice=history", "sandboxes/dataevent/", "sandboxes/sandbox/",
        f"sandboxes/agentdata/{row.pk}/change/?path=memory", f"leases/lease/{lease.pk}/change/",
    ]  # fmt: skip
    counts = []
    for numbers in (range(3), range(3, 60)):
        for number in numbers:
            other = grant(agent=f"did:plc:a{number}", now=timezone.now())
            sh(other, "true", now=timezone.now())
            DataFile.objects.filter(path=put(f"memory/{number}").entries.last().path).update(holder=other.pk)
            DataEvent.objects.create(agent_did=ADA, holder=lease.pk, at=NOW, kind="conflict", path=f"memory/{number}")
            Snapshot.objects.create(sandbox=ensure_sandbox(lease), incarnation=number, holder=lease.pk, at=NOW, size_bytes=1)
        counts.append(costs(viewer, pages))
    assert counts[0] == counts[1]
    assert max(counts[0].values()) <= 18
    assert max(counts[0][each] for each in pages[:4]) <= 9


# --- other pages ------------------------------------------------------------------------------------------------------


def test_an_agents_page_leads_to_its_data(viewer: Client, lease: Lease) -> None:
    agent = Agent.objects.get(did=ADA)
    assert b"none yet" in viewer.get(f"/admin/leases/agent/{agent.pk}/change/").content
    row = put("note", b"x" * 2048)
    shown = viewer.get(f"/admin/leases/agent/{agent.pk}/change/").content.decode()
    assert f"/admin/sandboxes/agentdata/{row.pk}/change/" in shown
    assert "2.0 KiB" in shown


def test_snapshot_excludes_are_edited_one_pattern_per_line(administrator: Client) -> None:
    kind = EnvironmentType.objects.get(name="catan")
    url = f"/admin/leases/environmenttype/{kind.pk}/change/"
    fields = {"ttl": "4h", "max_ttl": "1d", "expiry_conditions": "", "turn_argv": "python3", "turn_timeout": "", "pool": ""}
    fields |= {"sleep_after": "5m", "snapshot_excludes": "node_modules\n*.pyc\n\n"}
    assert administrator.post(url, fields).status_code == 302
    kind.refresh_from_db()
    assert kind.snapshot_excludes == ["node_modules", "*.pyc"]
    assert "node_modules\n*.pyc</textarea>" in administrator.get(url).content.decode()
    assert b"at most 64" in administrator.post(url, fields | {"snapshot_excludes": "x\n" * 65}).content


def test_mounted_data_lists_no_files(operator: Client) -> None:
    row = put("note")
    AgentData.objects.update(keeping="mount")
    DataFile.objects.update(removed=True, stored_in=None)
    shown = operator.get(*page(row)).content.decode()
    assert "one mounted directory" in shown
    assert "as tar" not in shown


def test_markup_in_names_is_escaped(superuser: Client, lease: Lease, used: Sandbox) -> None:
    copy = snapshots.take_snapshot(lease.pk, name=MARKUP[:100], now=NOW)
    row = put(MARKUP)
    DataFile.objects.create(
        data=row, path=f"l{MARKUP}", kind="link", mode=0, target=MARKUP, revision=1, at=NOW, holder=lease.pk
    )
    event = DataEvent.objects.create(agent_did=ADA, holder=lease.pk, at=NOW, kind="left_out", path=MARKUP, detail=MARKUP)
    Attachment.objects.update(unsaved_since=NOW, last_error=MARKUP)
    for url in (
        f"sandboxes/agentdata/{row.pk}/change/", "sandboxes/agentdata/", f"sandboxes/snapshot/{copy.pk}/change/",
        f"sandboxes/snapshot/{copy.pk}/restore/", f"sandboxes/snapshot/{copy.pk}/fork/", "sandboxes/snapshot/",
        "sandboxes/dataevent/", f"sandboxes/dataevent/{event.pk}/change/", f"leases/lease/{lease.pk}/change/",
        f"sandboxes/sandbox/{used.pk}/change/", "sandboxes/sandbox/?slice=unsaved",
    ):  # fmt: skip
        shown = superuser.get(f"/admin/{url}")
        assert shown.status_code == 200, url
        assert "<img src=x" not in shown.content.decode(), url
    assert "&lt;img src=x" in superuser.get(f"/admin/sandboxes/agentdata/{row.pk}/change/").content.decode()


def test_tables_have_column_headers_and_icon_links_have_labels(operator: Client) -> None:
    row = put("note")
    put("dir/x")
    shown = operator.get(*page(row)).content.decode()
    table = shown[shown.index("lh-files") :].split("</table>")[0]
    assert table.count('<th scope="col"') == 5
    assert 'aria-label="Download note"' in table
    assert re.search(r'<a class="lh-link" href="\?path=dir">dir<span class="lh-unseen"> \(directory\)</span>', table)
    assert shown.count('aria-current="page"') >= 1
    assert data_tree.list_directory(row, "")[0].name == "dir"
