"""manage.py files: ls, get, put and rm."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from django.core.management import CommandError
from django.utils import timezone

from leases.api.files import content
from leases.management.commands import files
from leases.models import Lease
from sandboxes.models import Run
from tests.commands.manage import call

pytestmark = pytest.mark.django_db
NO_LEASE = "00000000-0000-0000-0000-000000000000"


@pytest.fixture
def lease(grant: Callable[..., Lease]) -> str:
    return str(grant(now=timezone.now()).pk)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(b"\xff\x00text")
    return path


def test_a_file_is_stored_listed_read_and_removed(
    lease: str, source: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert call("files", "put", lease, source, "notes/a.txt") == "/workspace/notes/a.txt stored: 6 bytes\n"
    assert call("files", "ls", lease).endswith(" notes/\n")
    line = call("files", "ls", lease, "/workspace/notes/")
    assert line.split()[1] == "6" and line.endswith(" a.txt\n")
    assert [row.split()[-1] for row in call("files", "ls", lease, "--deep").splitlines()] == [
        "config.json", "notes/", "notes/a.txt",
    ]  # fmt: skip
    entries = json.loads(call("files", "ls", lease, "notes", "--json"))["entries"]
    assert [(entry["name"], entry["size"]) for entry in entries] == [("a.txt", 6)]
    assert call("files", "get", lease, "/workspace/notes/a.txt", tmp_path / "copy") == f"6 bytes in {tmp_path / 'copy'}\n"
    assert (tmp_path / "copy").read_bytes() == b"\xff\x00text"
    call("files", "get", lease, "notes/a.txt")
    assert capfdbinary.readouterr().out == b"\xff\x00text"
    assert call("files", "rm", lease, "notes/a.txt") == "/workspace/notes/a.txt removed\n"
    assert call("files", "ls", lease, "notes") == ""
    assert {(run.kind, run.argv[0]) for run in Run.objects.all()} == {
        ("file", "write"), ("file", "list"), ("file", "read"), ("file", "remove"),
    }  # fmt: skip


def test_a_file_in_data_is_stored_from_stdin(lease: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"memory")))
    assert call("files", "put", lease, "-", "/data/memory.md") == "/data/memory.md stored: 6 bytes\n"
    assert " memory.md\n" in call("files", "ls", lease, "/data")


def test_a_file_above_the_limit_is_neither_stored_nor_read(
    lease: str, source: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    call("files", "put", lease, source, "a.txt")
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 5)
    with pytest.raises(CommandError, match="at most 5 bytes"):
        call("files", "put", lease, source, "b.txt")
    with pytest.raises(CommandError, match=r"The file has 6 bytes\. At most 5 are transferred"):
        call("files", "get", lease, "a.txt")
    assert capfdbinary.readouterr().out == b""
    assert " b.txt\n" not in call("files", "ls", lease)


def test_a_listing_above_the_limit_is_refused(lease: str, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        call("files", "put", lease, source, name)
    monkeypatch.setattr(content, "MAX_LISTING_ENTRIES", 1)
    with pytest.raises(CommandError, match="more than 1 entries"):
        call("files", "ls", lease)


def test_control_characters_of_a_path_are_printed_with_escapes(lease: str, source: Path) -> None:
    assert call("files", "put", lease, source, "b\x1b") == "/workspace/b\\x1b stored: 6 bytes\n"
    assert call("files", "rm", lease, "b\x1b") == "/workspace/b\\x1b removed\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["ls", "LEASE", "/etc"], "must lie under"), (["ls", "LEASE", "../x"], "must not contain"),
        (["ls", "LEASE", "none"], "here is no "), (["get", "LEASE", "none"], "here is no "),
        (["get", "LEASE", "/etc/passwd"], "must lie under"),
        (["get", "LEASE", "/workspace"], "must lie under"), (["put", "LEASE", "/no/such/file", "a"], "No such file"),
        (["put", "LEASE", "SOURCE", "a/../b"], "must not contain"), (["put", "LEASE", "SOURCE", "/data"], "must lie under"),
        (["rm", "LEASE", "none"], "here is no "), (["rm", "LEASE", "/workspace"], "must lie under"),
        (["ls", NO_LEASE], "no such lease"), (["put", NO_LEASE, "SOURCE", "a"], "no such lease"),
        (["ls", "x"], "is not a lease id"), (["put", "LEASE", "SOURCE", "a\udcff"], "^PATH: must be UTF-8"),
        (["ls", "LEASE", "a\udcff"], "^PATH: must be UTF-8"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_named(lease: str, source: Path, args: list[str], message: str) -> None:
    names = {"LEASE": lease, "SOURCE": str(source)}
    with pytest.raises(CommandError, match=message):
        call("files", *[names.get(arg, arg) for arg in args])


@pytest.mark.parametrize(
    "args", [["ls", "LEASE"], ["get", "LEASE", "a"], ["put", "LEASE", "SOURCE", "a"], ["rm", "LEASE", "a"]]
)
def test_an_ended_lease_is_refused(lease: str, source: Path, args: list[str]) -> None:
    call("release", lease)
    names = {"LEASE": lease, "SOURCE": str(source)}
    with pytest.raises(CommandError, match=r"The lease ended \(released\)"):
        call("files", *[names.get(arg, arg) for arg in args])
