"""manage.py state: stored /data is listed, read and changed without a sandbox, and live sandboxes receive changes."""

import gzip
import io
import os
import tarfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from django.core.management import CommandError, execute_from_command_line
from django.db import connection
from django.test.utils import CaptureQueriesContext

from leases import execution, snapshots
from leases.models import Lease
from sandboxes.models.state import AgentData, DataEvent, DataFile, DataObject
from sandboxes.pool.allocation import find_by_holder
from sandboxes.providers.memory import File
from sandboxes.runs.operations import Command
from sandboxes.state import data_editing, data_tree
from sandboxes.storage import get_store
from tests.commands.manage import call
from tests.conftest import MINUTE, NOW, SimulatedCrash
from tests.support.storage.tars import file, pack

pytestmark = pytest.mark.django_db
ADA = "did:plc:ada"


state = partial(call, "state")


def put(path: str, text: str, agent: str = ADA) -> None:
    data_editing.put_file(agent, path, io.BytesIO(text.encode()), now=NOW)


def sh(lease: Lease, line: str) -> str:
    _, result = execution.exec_command(lease.pk, Command(argv=["sh", "-c", line], timeout=MINUTE), now=NOW)
    return result.stdout.decode()


def live(agent: str = ADA) -> dict[str, str]:
    return dict(DataFile.objects.filter(data__agent_did=agent, removed=False).values_list("path", "kind"))


def refused(match: str, *args: object) -> None:
    before = live(), AgentData.objects.values_list("revision", "size_bytes").first()
    with pytest.raises(CommandError, match=match):
        state(*args)
    assert (live(), AgentData.objects.values_list("revision", "size_bytes").first()) == before


def pack_tar(members: dict[str, bytes]) -> io.BytesIO:
    return io.BytesIO(gzip.compress(pack(*(file(name, content) for name, content in members.items())).getvalue()))


# --- ls, get ----------------------------------------------------------------------------------------------------------


def test_a_directory_is_listed_with_the_size_below_each_name() -> None:
    for path, text in {"a/b/c": "x" * 2000, "a/d": "12", "A": "1", "a.txt": "1", "a/b.txt": "1"}.items():
        put(path, text)
    assert state("ls", ADA).split("\n")[:-1] == ["       1 B  A", "   2.0 KiB  a/", "       1 B  a.txt"]
    assert state("ls", ADA, "a/").split("\n")[:-1] == ["   2.0 KiB  b/", "       1 B  b.txt", "       2 B  d"]
    assert state("ls", ADA, "a/d") == "       2 B  d\n"


def test_a_long_listing_shows_mode_lease_and_time_and_escapes_control_characters(grant) -> None:
    lease = grant()
    sh(lease, "echo hello >/data/note")
    line = state("ls", "-l", ADA, "note")
    assert line.startswith(f"-rw-r--r-- {lease.pk}")
    assert line.endswith("6 2026-11-21T12:00:00Z note\n")
    put("odd\n\x1b[31mname", "1")
    assert "       1 B  odd\\n\\x1b[31mname\n" in state("ls", ADA)
    assert "Z odd\\n\\x1b[31mname\n" in state("ls", "-l", ADA)


def test_a_listing_takes_two_queries_whatever_the_number_of_files() -> None:
    put("z", "1")
    data = AgentData.objects.get()
    DataFile.objects.bulk_create(
        DataFile(data=data, path=f"d{number % 7}/{number}", kind="directory", mode=0o755, revision=1, at=NOW)
        for number in range(700)
    )
    with CaptureQueriesContext(connection) as captured:
        assert [line.name for line in data_tree.list_directory(data, "", limit=5)] == ["d0", "d1", "d2", "d3", "d4"]
        assert [line.name for line in data_tree.list_directory(data, "d1", after="6", limit=2)] == ["603", "610"]
    assert len(captured) == 3  # directories without a row need no further query


def test_a_file_is_printed_unchanged(tmp_path: Path, capfdbinary) -> None:
    data_editing.put_file(ADA, "bin", io.BytesIO(b"\xff\x00\n"), now=NOW)
    assert state("get", ADA, "bin") == ""
    assert capfdbinary.readouterr().out == b"\xff\x00\n"
    target = tmp_path / "out"
    assert state("get", ADA, "/bin", target) == f"3 bytes in {target}\n"
    assert target.read_bytes() == b"\xff\x00\n"


def test_a_corrupt_file_is_not_printed(tmp_path: Path) -> None:
    put("note", "hello")
    key = DataObject.objects.get().key
    get_store().set(key, b"\0" * len(get_store().get(key) or b""))
    refused("does not match its digest", "get", ADA, "note", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert DataEvent.objects.get().kind == "corrupt"


@pytest.mark.parametrize("args", [["get", ADA, "nothing"], ["ls", ADA, "nothing"], ["rm", ADA, "nothing"], ["get", ADA, "a"]])
def test_a_missing_path_is_an_error_in_one_line(args: list[str]) -> None:
    put("a/b", "1")
    refused(r"'nothing'|is a directory", *args)


def test_an_agent_must_be_a_did_with_stored_data(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("1")
    refused("'ada' is not a DID", "put", "ada", tmp_path / "f", "x")
    refused("No such file", "put", ADA, tmp_path / "nothing", "x")
    for args in (["ls"], ["get", "x"], ["rm", "x"], ["export", tmp_path / "out"], ["keep", "mount"]):
        refused("did:plc:bob", args[0], "did:plc:bob", *args[1:])
    assert not AgentData.objects.exists()


# --- put, rm ----------------------------------------------------------------------------------------------------------


def test_a_live_sandbox_receives_a_put_file_at_its_next_use(grant, tmp_path: Path) -> None:
    lease, source = grant(), tmp_path / "note"
    sh(lease, "true")
    source.write_text("hello")
    source.chmod(0o750)
    assert state("put", ADA, source, "memory/deep/note") == "memory/deep/note stored: revision 2\n"
    assert sh(lease, "cat /data/memory/deep/note") == "hello"
    row = DataFile.objects.get(path="memory/deep/note")
    assert (row.mode, row.holder, live()["memory/deep"]) == (0o750, None, "directory")
    assert state("put", ADA, source, "memory/deep/note") == "memory/deep/note unchanged: revision 2\n"


def test_put_from_stdin_replaces_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    put("note", "old")
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"new")))
    assert state("put", ADA, "-", "note") == "note stored: revision 2\n"
    assert DataObject.objects.count() == len(list(get_store().list("agents/"))) == 1  # the replaced object is deleted
    assert AgentData.objects.get().size_bytes == 3


def test_a_removed_file_disappears_from_a_live_sandbox(grant) -> None:
    lease = grant()
    sh(lease, "echo 1 >/data/one; echo 2 >/data/two")
    assert state("rm", ADA, "one") == "1 removed: revision 2\n"
    assert sh(lease, "cat /data/two; cat /data/one") == "2\n"


def test_a_directory_is_removed_only_with_the_recursive_option() -> None:
    put("a/b/c", "1")
    put("a1", "1")
    refused("non-empty", "rm", ADA, "a")
    assert state("rm", "-r", ADA, "a").startswith("3 removed")
    assert live() == {"a1": "file"}
    assert AgentData.objects.get().files == 1


def test_a_concurrent_put_and_change_keep_both_versions(grant, memory) -> None:
    lease = grant()
    sh(lease, "echo first >/data/note")
    put("note", "an operator's")
    sandbox = find_by_holder(lease.pk)
    assert sandbox
    memory.files(sandbox.ref)["/data/note"] = File(b"the agent's")
    assert sh(lease, "cat /data/note") == "the agent's"
    assert DataEvent.objects.get().kind == "conflict"
    assert live()[".conflicts/operator/note"] == "file"


def test_an_invalid_or_occupied_path_is_refused(tmp_path: Path) -> None:
    put("a/b", "1")
    (tmp_path / "f").write_text("2")
    for path in ("../x", "a/../../x", "a//b", ".", "a/./b", "x\0y", "x" * 1001, ""):
        refused("cannot be stored", "put", ADA, tmp_path / "f", path)
    refused("'a' cannot be stored: it is currently a directory", "put", ADA, tmp_path / "f", "a")
    refused("'a/b' is a file", "put", ADA, tmp_path / "f", "a/b/c")


def test_put_respects_the_limits_of_data(settings, tmp_path: Path) -> None:
    put("a", "12345")
    settings.DATA_MOST_BYTES = 8
    (tmp_path / "f").write_text("12345")
    refused("/data would have 2 paths and 10 bytes", "put", ADA, tmp_path / "f", "b")
    (tmp_path / "f").write_text("123456789")
    refused("limit of 8 bytes", "put", ADA, tmp_path / "f", "b")
    settings.DATA_MOST_BYTES, settings.DATA_MOST_FILES = 100, 2
    refused("4 paths", "put", ADA, tmp_path / "f", "c/d/e")


def test_mounted_data_is_not_changed(tmp_path: Path) -> None:
    put("a", "1")
    AgentData.objects.update(keeping="mount")
    (tmp_path / "f").write_text("1")
    for args in (["ls", ADA], ["put", ADA, tmp_path / "f", "b"], ["rm", ADA, "a"], ["export", ADA, tmp_path / "out"]):
        refused("is mounted", *args)


def test_the_mode_is_changed_only_if_the_backend_supports_it() -> None:
    put("note", "hello")
    assert state("keep", ADA, "sync") == f"{ADA} already uses mode sync\n"
    refused("cannot be mounted", "keep", ADA, "mount")  # the filesystem backend cannot be mounted
    assert live() == {"note": "file"}


def test_a_crash_between_the_object_and_the_rows_changes_nothing(at_checkpoint, tmp_path: Path) -> None:
    put("note", "old")
    at_checkpoint("edit stored")
    with pytest.raises(SimulatedCrash):
        put("note", "new")
    assert data_editing.get_synced_data(ADA).revision == 1
    put("note", "new")
    assert (data_editing.get_synced_data(ADA).revision, DataObject.objects.count()) == (2, 1)


# --- export, import ---------------------------------------------------------------------------------------------------


def trees(root: Path) -> dict[str, object]:
    def describe(path: Path) -> object:
        if path.is_symlink():
            return os.readlink(path)
        status = path.stat()
        return oct(status.st_mode) if path.is_dir() else (oct(status.st_mode), path.read_bytes(), int(status.st_mtime))

    return {str(path.relative_to(root)): describe(path) for path in root.rglob("*")}


@pytest.mark.parametrize("middle", ["out", "out.tar"])
def test_an_export_can_be_imported_unchanged(tmp_path: Path, middle: str) -> None:
    root = tmp_path / "in"
    (root / "memory/empty").mkdir(parents=True)
    (root / "memory/run.sh").write_text("#!/bin/sh\n")
    (root / "memory/run.sh").chmod(0o755)
    (root / "big").write_bytes(os.urandom(3 << 20))
    (root / "latest").symlink_to("memory/run.sh")
    (root / "away").symlink_to("/etc/passwd")
    (root / "memory").chmod(0o555)
    assert state("import", ADA, root) == "6 paths new or changed: revision 1\n"
    assert state("import", ADA, root) == "0 paths new or changed: revision 1\n"
    assert state("export", ADA, tmp_path / middle) == f"6 paths in {tmp_path / middle}: revision 1\n"
    state("import", "did:plc:bob", tmp_path / middle)
    state("export", "did:plc:bob", tmp_path / "again")
    assert trees(tmp_path / "again") == trees(root)


def test_an_export_overwrites_nothing_and_writes_nothing_outside_its_directory(tmp_path: Path) -> None:
    put("a", "1")
    (tmp_path / "there.tar").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").write_text("mine")
    refused("File exists", "export", ADA, tmp_path / "there.tar")
    refused("is not empty", "export", ADA, tmp_path / "full")
    assert (tmp_path / "there.tar").read_text() == "mine"
    DataFile.objects.update(path="../evil")
    refused("would be written outside", "export", ADA, tmp_path / "out")
    assert not (tmp_path / "evil").exists()


def test_an_import_adds_and_replaces_but_removes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    put("kept", "1")
    put("note", "old")
    tar = pack_tar({"note": b"new", "memory/x": b"1"})
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=tar))
    assert state("import", ADA, "-") == "3 paths new or changed: revision 3\n"
    assert live() == {"kept": "file", "note": "file", "memory": "directory", "memory/x": "file"}


def test_a_hard_link_in_a_tar_becomes_a_file(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a").write_text("same")
    os.link(tmp_path / "in/a", tmp_path / "in/b")
    with tarfile.open(tmp_path / "x.tgz", "w:gz") as tar:
        tar.add(tmp_path / "in", arcname=".")
    state("import", ADA, tmp_path / "x.tgz")
    state("get", ADA, "b", tmp_path / "out")
    assert (tmp_path / "out").read_text() == "same"


def test_an_import_with_one_invalid_path_is_refused_as_a_whole(tmp_path: Path) -> None:
    put("a", "1")
    source = tmp_path / "x.tar"
    for name in ("../evil", "/etc/passwd", "a/../../b"):
        source.write_bytes(pack_tar({"good": b"1", name: b"2"}).getvalue())
        refused("cannot be stored", "import", ADA, source)
    with tarfile.open(source, "w") as tar:
        member = tarfile.TarInfo("null")
        member.type = tarfile.CHRTYPE
        tar.addfile(member)
    refused("not a regular file", "import", ADA, source)
    source.write_bytes(pack_tar({"good": os.urandom(9999)}).getvalue()[:5000])
    refused("invalid or truncated", "import", ADA, source)
    source.write_text("this is no tar")
    refused("invalid or truncated", "import", ADA, source)
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a").write_text("1")
    os.mkfifo(tmp_path / "in/pipe")
    refused("'pipe' cannot be stored", "import", ADA, tmp_path / "in")


# --- snapshots --------------------------------------------------------------------------------------------------------


def test_snapshots_are_listed_by_lease_id_sandbox_id_or_name(grant) -> None:
    lease = grant()
    sh(lease, "echo 1 >/workspace/x")
    taken = snapshots.take_snapshot(lease.pk, name="before the exam", now=NOW)
    for name in (lease.pk, taken.sandbox_id, f"{ADA}::game-1"):
        line = state("snapshots", name)
        assert line.startswith(f"{taken.pk} 2026-11-21T12:00:00Z ")
        assert line.endswith(" asked    local,store before the exam\n")
    refused("neither an id", "snapshots", "nonsense")
    refused("No such lease or sandbox", "snapshots", "00000000-0000-0000-0000-000000000000")


def test_the_exit_code_reports_success_or_failure(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("django.core.management.base.connections.close_all", lambda: None)
    # A second setup would bind the root logger to this test's stderr, which is closed when later tests log.
    monkeypatch.setattr("django.setup", lambda: None)
    put("note", "1")
    execute_from_command_line(["manage.py", "state", "ls", ADA])
    assert capsys.readouterr() == ("       1 B  note\n", "")
    with pytest.raises(SystemExit, match="1"):
        execute_from_command_line(["manage.py", "state", "get", ADA, "other"])
    assert capsys.readouterr() == ("", "CommandError: No such file in /data: 'other'.\n")
