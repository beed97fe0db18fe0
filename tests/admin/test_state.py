"""Stored state in the console: agent data, snapshots and unsaved changes."""

import gc
import io
import os
import re
import tarfile
import tracemalloc
from collections.abc import Callable
from html import escape, unescape
from urllib.parse import urlencode

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
from leases.models import Agent, Lease
from sandboxes.admin import agent_data
from sandboxes.models import Sandbox
from sandboxes.models.state import AgentData, Attachment, DataEvent, DataFile, DataObject, Snapshot
from sandboxes.providers.errors import Unavailable
from sandboxes.providers.memory import File, Link, MemoryProvider
from sandboxes.runs.operations import Command
from sandboxes.state import data_editing, data_tree, workspace
from sandboxes.storage import get_store
from sandboxes.storage.base import CHUNK_BYTES
from tests.admin.conftest import ADA, NOW, ensure_sandbox, list_events
from tests.conftest import MINUTE
from tests.support.billing import run_command
from tests.support.console import MARKUP, WHY, assert_constant_queries, fetch, list_messages, list_rows, row_url

pytestmark = pytest.mark.django_db


def put(path: str, content: bytes = b"1", agent: str = ADA) -> AgentData:
    data_editing.put_file(agent, path, io.BytesIO(content), now=NOW)
    return AgentData.objects.get(agent_did=agent)


def sh(lease: Lease, line: str, now=NOW) -> None:
    execution.exec_command(lease.pk, Command(argv=["sh", "-c", line], timeout=MINUTE), now=now)


def data_url(row: AgentData, act: str = "change", **query: str) -> str:
    return f"{row_url(row, act)}?{urlencode(query)}"


def names(client: Client, row: AgentData, **query: str) -> dict[str, dict]:
    return {each["name"]: each for each in client.get(data_url(row, **query)).context["names"]}


def tar_url(snapshot: Snapshot) -> str:
    return f"/admin/sandboxes/snapshot/{snapshot.pk}/workspace.tar"


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
    inside = viewer.get(row_url(row) + top["memory"]["href"])
    assert [each["name"] for each in inside.context["names"]] == ["deep", "one.md"]
    assert inside.context["crumbs"] == [("memory", "?path=memory")]
    assert list(names(viewer, row, path="memory/one.md")) == ["one.md"]
    assert b"memory/three does not exist" in viewer.get(data_url(row, path="memory/three")).content


def test_a_file_names_the_lease_that_wrote_it_and_a_link_its_target(
    viewer: Client, lease: Lease, memory: MemoryProvider
) -> None:
    memory.files(ensure_sandbox(lease).ref)["/data/latest"] = Link("notes/today")
    sh(lease, "echo hello >/data/note")
    shown = names(viewer, put("by-hand"))
    assert row_url(lease) in shown["note"]["writer"]
    assert (shown["by-hand"]["writer"], shown["note"]["mode"]) == ("an operator", "0644")
    assert (shown["latest"]["target"], shown["latest"]["size"]) == ("notes/today", "–")


def test_conflicts_stand_out(viewer: Client, grant: Callable[..., Lease], memory: MemoryProvider) -> None:
    one, two = grant(environment="one"), grant(environment="two")
    sh(two, "true")
    sh(one, "echo one >/data/note")
    memory.files(ensure_sandbox(two).ref)["/data/note"] = File(b"two")
    sh(two, "true")
    row = AgentData.objects.get()
    shown = viewer.get(data_url(row))
    assert "conflict</span>" in shown.content.decode()
    facts = {fact.label: fact for fact in shown.context["facts"]}
    assert (facts["Conflicts"].value, facts["Conflicts"].href) == ("1 file", "?path=.conflicts")
    assert b"overwritten version" in viewer.get(data_url(row, path=f".conflicts/{one.pk}")).content
    assert "Another sandbox of this agent" in unescape(shown.content.decode())


def test_a_large_directory_is_shown_in_parts_at_constant_cost(viewer: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def create(numbers: range) -> None:
        for number in numbers:
            put(f"d/{number}")

    monkeypatch.setattr(agent_data, "MAX_NAMES_SHOWN", 3)
    row = put("first")
    assert_constant_queries(viewer, [row_url(row), data_url(row, path="d")], 16, create)
    seen, url = [], data_url(row, path="d")
    while url:
        shown = viewer.get(url)
        seen += [each["name"] for each in shown.context["names"]]
        assert len(shown.context["names"]) <= 3
        url = shown.context["next_page"] and row_url(row) + shown.context["next_page"]
    assert seen == [str(number) for number in range(8)]


def test_an_invalid_path_is_not_found(operator: Client) -> None:
    row = put("a/b")
    for path in ("../x", "a/../../b", "a//b", ".", "a/./b", "\0", "a\0b", "x" * 1001):
        urls = [data_url(row, act, path=path) for act in ("change", "file", "tar")] + [data_url(row, path="a", after=path)]
        assert [operator.get(url).status_code for url in urls] == [404] * 4, path


# --- downloads --------------------------------------------------------------------------------------------------------


def test_a_file_is_downloaded_byte_for_byte_and_never_shown_as_a_page(operator: Client) -> None:
    content = f"<script>{MARKUP}".encode() + os.urandom(3000)
    row = put("memory/evil.html", content)
    answer = operator.get(data_url(row, "file", path="memory/evil.html"))
    assert body(answer) == content
    assert answer.headers["Content-Type"] == "application/octet-stream"
    assert answer.headers["Content-Length"] == str(len(content))
    assert answer.headers["Content-Disposition"] == 'attachment; filename="evil.html"'
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert "no-store" in answer.headers["Cache-Control"]
    entry = LogEntry.objects.get()
    assert (entry.user.get_username(), entry.get_change_message()) == ("operator", "Download: memory/evil.html")
    assert b"memory/evil.html" in operator.get(data_url(row)).content


def test_a_file_name_cannot_inject_a_header(operator: Client) -> None:
    row = put("a/x\r\nSet-Cookie: a=b\u202e\"'.txt")
    answer = operator.get(data_url(row, "file", path="a/x\r\nSet-Cookie: a=b\u202e\"'.txt"))
    assert answer.headers["Content-Disposition"] == 'attachment; filename="x__Set-Cookie_ a=b__\'.txt"'
    assert body(answer) == b"1"


def test_downloads_need_permission_to_read_agent_data(viewer: Client, administrator: Client, lease: Lease) -> None:
    row = put("note")
    sh(lease, "echo 1 >/workspace/x")
    copy = snapshots.take_snapshot(lease.pk, now=NOW)
    for url in (data_url(row, "file", path="note"), data_url(row, "tar"), tar_url(copy)):
        assert viewer.get(url).status_code == 403
        assert Client().get(url).status_code == 302
        assert administrator.get(url).status_code == 200
    for shown in (viewer.get(data_url(row)), viewer.get(row_url(copy))):
        assert not re.search(rb"/file/|/tar/|\.tar", shown.content)


def test_a_directory_is_downloaded_as_a_tar_with_all_that_is_below_it(operator: Client) -> None:
    put("memory/deep/one", b"11")
    put("memory2/x")
    row = put("memory/two", b"2")
    with tarfile.open(fileobj=io.BytesIO(body(operator.get(data_url(row, "tar", path="memory"))))) as tar:
        assert tar.getnames() == ["memory", "memory/deep", "memory/deep/one", "memory/two"]
        whole = tar.extractfile("memory/deep/one")
        assert whole and whole.read() == b"11"
    answer = operator.get(data_url(row, "tar"))
    assert answer.headers["Content-Disposition"] == 'attachment; filename="did_plc_ada.tar"'
    with tarfile.open(fileobj=io.BytesIO(body(answer))) as tar:
        assert len(tar.getnames()) == 6
    assert operator.get(data_url(row, "tar", path="nothing")).status_code == 404
    assert operator.get(data_url(row, "file", path="memory")).status_code == 404
    assert operator.get(f"/admin/sandboxes/agentdata/{row.pk + 1}/tar/").status_code == 404


def test_a_large_file_is_never_held_in_memory(operator: Client) -> None:
    size = 16 << 20
    row = put("large", os.urandom(1 << 20) * 16)
    tracemalloc.start()
    answer = operator.get(data_url(row, "file", path="large"))
    assert isinstance(answer, StreamingHttpResponse)
    lengths = [len(chunk) for chunk in answer.streaming_content]  # type: ignore[arg-type]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (sum(lengths), max(lengths)) == (size, CHUNK_BYTES)
    assert peak < size // 2


def test_an_aborted_download_closes_its_file(operator: Client, lease: Lease) -> None:
    row = put("large", os.urandom(3 << 20))
    sh(lease, "echo 1 >/workspace/x")
    copy = snapshots.take_snapshot(lease.pk, now=NOW)
    for url in (data_url(row, "file", path="large"), data_url(row, "tar"), tar_url(copy)):
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
    for url in (data_url(row, "file", path="note"), data_url(row, "tar")):
        answer = operator.get(url)
        assert answer.headers["Location"] == f"{row_url(row)}?path="
        assert "does not match its digest" in list_messages(answer)[-1]
    get_store().remove(key)
    shown = operator.get(data_url(row, "file", path="note"), follow=True)
    assert "is missing" in unescape(shown.content.decode())
    assert DataEvent.objects.filter(kind="corrupt").count() == 2
    assert not LogEntry.objects.exists()


# --- copies of workspaces ---------------------------------------------------------------------------------------------


@pytest.fixture
def used(lease: Lease) -> Sandbox:
    sh(lease, "echo first >/workspace/x")
    return ensure_sandbox(lease)


def work() -> list[str]:
    """Run the queued tasks and return their results."""
    done = []
    for row in OrmQ.objects.all():
        verb = row.task["func"].rpartition(".")[2]
        done.append(getattr(tasks, verb)(*row.task["args"]))
        row.delete()
    return done


def test_page_of_a_snapshot_lists_what_is_not_kept(operator: Client, lease: Lease, used: Sandbox) -> None:
    copy = snapshots.take_snapshot(lease.pk, now=NOW)
    assert "nothing" in operator.get(row_url(copy, "change")).content.decode().split("Not kept")[1][:300]
    omitted = [{"kind": "pipe", "count": 1200, "paths": ["a\nb"]}, {"kind": "set_id_bit", "count": 1, "paths": [MARKUP]}]
    Snapshot.objects.update(omitted=omitted)
    page = operator.get(row_url(copy, "change")).content.decode()
    assert "1,200 named pipes, 1 set-ID bits" in page
    assert escape(f"a\\nb, {MARKUP}") in page


def test_a_snapshot_is_taken_by_the_queue_and_not_by_the_request(
    operator: Client, lease: Lease, used: Sandbox, memory: MemoryProvider
) -> None:
    calls = len(memory.calls)
    answer = operator.post(row_url(used, "take_snapshot"), {**WHY, "name": "before the exam"})
    assert list_messages(answer) == ["1 sandbox queued for a snapshot."]
    assert (len(memory.calls), Snapshot.objects.count()) == (calls, 0)
    work()
    copy = Snapshot.objects.get()
    assert (copy.kind, copy.name, copy.holder) == ("asked", "before the exam", lease.pk)
    assert list_events(lease) == [
        ("snapshot", "operator", f"{copy.pk} before the exam"), ("snapshot_asked_for", "operator", "it was agreed"),
    ]  # fmt: skip
    assert LogEntry.objects.get().get_change_message() == "Take snapshot: it was agreed"
    shown = fetch(operator, row_url(used))
    for words in ("before the exam", "on request", "local copy and store", row_url(copy, "restore"), row_url(copy, "fork")):
        assert words in shown, words


def test_an_earlier_copy_is_restored_by_the_queue(operator: Client, lease: Lease, used: Sandbox) -> None:
    copy = snapshots.take_snapshot(lease.pk, now=NOW)
    sh(lease, "echo second >/workspace/x", now=timezone.now())
    asked = fetch(operator, row_url(copy, "restore"))
    assert f"{copy.at:%Y-%m-%d %H:%M:%S}" in asked
    assert "can be undone" in asked
    answer = operator.post(row_url(copy, "restore"), WHY)
    assert answer.headers["HX-Redirect"] == row_url(used)
    assert list_messages(answer) == ["1 snapshot being restored."]
    work()
    newest, *_ = workspace.find_by_holder(lease.pk)
    assert (newest.kind, newest.key) == ("restored", copy.key)
    assert ("restore_asked_for", "operator", "it was agreed") in list_events(lease)


def test_snapshots_of_an_ended_lease_are_not_taken_or_restored(operator: Client, lease: Lease, used: Sandbox) -> None:
    copy = snapshots.take_snapshot(lease.pk, now=NOW)
    for url in (row_url(used, "take_snapshot"), row_url(copy, "restore")):
        assert operator.get(url).status_code == 200
    leasing.end(lease.pk, reason="released", now=NOW)
    assert list_messages(operator.post(row_url(copy, "restore"), WHY)) == ["Nothing changed: its lease has ended."]
    assert "Nothing changed" in list_messages(operator.post(row_url(used, "take_snapshot"), {**WHY, "name": ""}))[0]
    assert not OrmQ.objects.exists()
    shown = fetch(operator, row_url(copy))
    assert "Restore…" not in shown
    assert "Fork into…" in shown


def test_a_lease_is_forked_from_a_copy_into_another_environment(
    operator: Client, lease: Lease, used: Sandbox, grant: Callable[..., Lease]
) -> None:
    copy = snapshots.take_snapshot(lease.pk, now=NOW)
    grant(environment="game-9")
    for environment, why in (("a b", "Not 1 to 200 letters"), ("", "required"), ("game-9", "holds a lease")):
        refused = operator.post(row_url(copy, "fork"), {**WHY, "environment": environment})
        assert refused.status_code == 200 and "HX-Redirect" not in refused.headers
        assert why in refused.content.decode() and b'id="dialog-form"' in refused.content
        assert [*refused.context["form"].errors] == ["environment"]
    assert (Lease.objects.count(), LogEntry.objects.count()) == (2, 0)
    answer = operator.post(row_url(copy, "fork"), {**WHY, "environment": "game-2"})
    forked = Lease.objects.get(environment_id="game-2")
    assert answer.headers["HX-Redirect"] == row_url(forked)
    assert (forked.agent_did, forked.environment_type_id, forked.pool_id) == (ADA, "catan", lease.pool_id)
    assert run_command(forked, "cat", "/workspace/x", now=timezone.now()) == b"first\n"
    assert [kind for kind, *_ in list_events(lease)][:2] == ["forked", "fork_asked_for"]
    again = operator.post(row_url(copy, "fork"), {**WHY, "environment": "game-2"})
    assert list_messages(again)[-1] == "Nothing changed: that environment already has a lease forked from this snapshot."


def test_a_copy_is_downloaded_as_it_was_stored(operator: Client, lease: Lease, used: Sandbox) -> None:
    copy = snapshots.take_snapshot(lease.pk, now=NOW)
    url = tar_url(copy)
    answer = operator.get(url)
    with tarfile.open(fileobj=io.BytesIO(body(answer))) as tar:
        assert "x" in tar.getnames()
    assert answer.headers["Content-Disposition"].endswith('workspace.tar"')
    assert LogEntry.objects.get().get_change_message() == "Download: workspace"
    assert operator.get(url.replace("workspace", "data")).status_code == 404
    workspace.forget_local(copy)
    get_store().set(f"{copy.key}/workspace", b"rubbish")
    answer = operator.get(url)
    assert answer.headers["Location"] == row_url(copy)
    assert "does not match its digest" in list_messages(answer)[-1]
    Snapshot.objects.update(forgotten_at=NOW)
    assert "was deleted" in list_messages(operator.get(url))[-1]
    assert "deleted" in fetch(operator, row_url(copy))


# --- unsaved data and errors ------------------------------------------------------------------------------------------


@pytest.fixture
def unsaved(lease: Lease, memory: MemoryProvider) -> Sandbox:
    sh(lease, "true")
    with memory.fail("get_files", Unavailable("no route to the engine")):
        sh(lease, "echo x >/data/note")
    return ensure_sandbox(lease)


def test_unsaved_changes_are_shown_on_every_related_page(viewer: Client, lease: Lease, unsaved: Sandbox) -> None:
    since = Attachment.objects.get().unsaved_since
    assert since
    shown = fetch(viewer, row_url(unsaved))
    assert f"{since:%Y-%m-%d %H:%M:%S}" in shown.split("Unsaved changes in /data since")[1].split("</h2>")[0]
    tabs = [f"/admin/sandboxes/{model}/?slice=unsaved" for model in ("sandbox", "agentdata")]
    assert "Data not stored</span>" in fetch(viewer, tabs[0]) and "1 sandbox" in fetch(viewer, tabs[1])
    page = row_url(AgentData.objects.get())
    assert "unsaved changes" in fetch(viewer, page)
    for url in (row_url(unsaved), tabs[0], page):
        assert "no route to the engine" in fetch(viewer, url), url
    health = Client().get("/healthz").json()
    assert health["unsaved"] == 1
    assert "Sandboxes with unsaved changes in /data: 1." in health["warnings"]
    assert not any("engine" in each or "did:" in each for each in health["warnings"])
    sh(lease, "true")
    assert "Unsaved changes in /data" not in fetch(viewer, row_url(unsaved))
    assert [list_rows(viewer, url) for url in tabs] == [[], []]


def test_data_events_are_in_the_leases_timeline(viewer: Client, lease: Lease, memory: MemoryProvider) -> None:
    memory.files(ensure_sandbox(lease).ref)["/data/" + "long/" * 220 + "x"] = File(b"1")
    sh(lease, "true")
    only, _ = load_timeline(lease, only="state")
    assert [(entry.source, "Skipped" in entry.state, "longer than" in entry.detail) for entry in only] == [
        ("state", True, False)
    ]
    assert "Skipped" in fetch(viewer, f"{row_url(lease)}?only=state")
    assert len(load_timeline(lease)[0]) > 1


def test_events_are_listed_with_their_lease_and_narrowed_to_an_agent(viewer: Client, lease: Lease) -> None:
    now = timezone.now()
    DataEvent.objects.create(agent_did=ADA, holder=lease.pk, at=now, kind="conflict", path="note", detail="kept")
    DataEvent.objects.create(agent_did="did:plc:bob", at=now, kind="corrupt")
    queries = ("", "slice=conflicts", "slice=lost", f"agent_did={ADA}", "kind=full")
    assert [len(list_rows(viewer, f"/admin/sandboxes/dataevent/?{query}")) for query in queries] == [2, 1, 1, 1, 0]
    assert row_url(lease) in fetch(viewer, "/admin/sandboxes/dataevent/")


# --- other pages ------------------------------------------------------------------------------------------------------


def test_an_agents_page_leads_to_its_data(viewer: Client, lease: Lease) -> None:
    agent = Agent.objects.get(did=ADA)
    assert "none yet" in fetch(viewer, row_url(agent))
    row = put("note", b"x" * 2048)
    shown = fetch(viewer, row_url(agent))
    assert row_url(row) in shown
    assert "2.0 KiB" in shown


def test_mounted_data_lists_no_files(operator: Client) -> None:
    row = put("note")
    AgentData.objects.update(keeping="mount")
    DataFile.objects.update(removed=True, stored_in=None)
    shown = fetch(operator, data_url(row))
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
    rows = (row, copy, event, lease, used)
    lists = ("agentdata/", "snapshot/", "dataevent/", "sandbox/?slice=unsaved")
    acts = (row_url(copy, "restore"), row_url(copy, "fork"))
    for url in (*map(row_url, rows), *acts, *(f"/admin/sandboxes/{each}" for each in lists)):
        assert "<img src=x" not in fetch(superuser, url), url
    assert "&lt;img src=x" in fetch(superuser, row_url(row))


def test_tables_have_column_headers_and_icon_links_have_labels(operator: Client) -> None:
    row = put("note")
    put("dir/x")
    shown = fetch(operator, data_url(row))
    table = shown[shown.index("lh-files") :].split("</table>")[0]
    assert table.count('<th scope="col"') == 5
    assert 'aria-label="Download note"' in table
    assert re.search(r'<a class="lh-link" href="\?path=dir">dir<span class="lh-unseen"> \(directory\)</span>', table)
    assert shown.count('aria-current="page"') >= 1
    assert data_tree.list_directory(row, "")[0].name == "dir"
