"""Tars of a workspace: what a restore brings back, what is listed as not kept, and which tars the host indexes."""

import io
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandboxes.image import files
from sandboxes.models.state import Snapshot
from sandboxes.state import exact_tars
from sandboxes.state.file_tree import StoredWorkspace
from tests.conftest import NOW

NANOSECONDS = 10**9
NAMES = st.one_of(
    st.binary(min_size=1, max_size=12).filter(
        lambda name: b"/" not in name and b"\0" not in name and name not in (b".", b"..")
    ),
    st.sampled_from([b"-rf", b"a" * 255, b"\n", b"GNUSparseFile.0", b" ", b"12 path=x"]),
)
MODES = st.integers(0, 0o777) | st.sampled_from([0o1777, 0o1000])
TIMES = st.integers(-NANOSECONDS, 2**33 * NANOSECONDS) | st.sampled_from([-1, 0, 1, NANOSECONDS, 15032385535 * NANOSECONDS])
CONTENTS = st.lists(st.tuples(st.integers(0, 1 << 22), st.binary(min_size=1, max_size=9)), max_size=4)  # (offset, bytes)
TARGETS = st.sampled_from([b"nowhere", b"/etc/passwd", b"\xff\n", b"t" * 4095, b"."])
ENTRIES = st.lists(
    st.tuples(st.sampled_from(["file", "file", "directory", "symlink", "hardlink"]), NAMES, MODES, TIMES, CONTENTS, TARGETS),
    max_size=12,
)


def create(root: bytes, entries: list[tuple[Any, ...]]) -> None:
    """Create entries, each in one of the directories so far. Names that exist already are skipped."""
    directories, regular, attributes = [root], list[bytes](), list[tuple[bytes, int, int]]()
    for kind, name, mode, mtime, contents, target in entries:
        path = os.path.join(directories[mode % len(directories)], name)
        if os.path.lexists(path) or (kind == "hardlink" and not regular):
            continue
        match kind:
            case "directory":
                os.mkdir(path)
                directories.append(path)
            case "symlink":
                os.symlink(target, path)
            case "hardlink":
                os.link(regular[mtime % len(regular)], path)
            case "file":
                regular.append(path)
                with open(path, "wb") as file:
                    for offset, content in contents:
                        file.seek(offset)
                        file.write(content)
                    file.truncate(max(file.seek(0, os.SEEK_END), mode << 12))
        attributes.append((path, mode, mtime))
    for path, mode, mtime in reversed(attributes):
        os.utime(path, ns=(0, mtime), follow_symlinks=False)
        if not os.path.islink(path):
            os.chmod(path, mode)


def describe(root: bytes) -> dict[bytes, tuple[Any, ...]]:
    """All that a restore has to bring back of each entry. The blocks are those of a copy with the same holes."""
    entries, first_paths = {}, dict[int, bytes]()
    for folder, folders, names in os.walk(root):
        for path in sorted(os.path.join(folder, name) for name in folders + names):
            status = os.lstat(path)
            content: Any = None
            if os.path.islink(path):
                content = os.readlink(path)
            elif os.path.isfile(path):
                with open(path, "rb") as file:
                    content = file.read(), first_paths.setdefault(status.st_ino, path.removeprefix(root)), status.st_nlink
            entries[path.removeprefix(root)] = status.st_mode, status.st_mtime_ns, content
    return entries


def measure_blocks(root: bytes) -> int:
    return sum(os.lstat(os.path.join(folder, name)).st_blocks for folder, _, names in os.walk(root) for name in names)


def pack(root: bytes | str | Path, *, exact: bool = True) -> io.BytesIO:
    out = io.BytesIO()
    files.pack(os.fsdecode(root), out, exact=exact)
    out.seek(0)
    return out


@contextmanager
def spooled(tar: io.BytesIO) -> Iterator[StoredWorkspace]:
    with tempfile.TemporaryFile() as file:
        file.write(tar.getvalue())
        file.seek(0)
        yield StoredWorkspace(file, {}, max_tar_bytes=1 << 40, now=NOW)  # type: ignore[arg-type]


@given(ENTRIES)
@settings(max_examples=60)
def test_any_tree_is_restored_as_it_was(entries: list[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory() as source, tempfile.TemporaryDirectory() as target:
        root, copy = os.fsencode(source), os.fsencode(target)
        create(root, entries)
        tar = pack(root)
        assert exact_tars.is_exact_tar(tar)
        assert exact_tars.read_omissions(tar) == []
        files.unpack(target, tar)
        before = describe(root)
        assert describe(copy) == before
        parts = sum(len(contents) + 1 for *_, contents, _ in entries)
        assert measure_blocks(copy) <= measure_blocks(root) + parts * files.MIN_HOLE_BYTES // 512  # shorter holes are filled
        assert pack(root).getvalue() == tar.getvalue()  # a copy may have one hole less: short ones are filled
        tar.seek(0)
        with spooled(tar) as stored:
            read = {
                path: (
                    stat.kind,
                    stat.mode,
                    stored.read_range(path, start=0, length=1 << 30)[0] if stat.kind == "file" else b"",
                )
                for path, stat in stored.list_entries("", deep=True, limit=1000).items()
            }
        kinds = {0o040000: "directory", 0o100000: "file", 0o120000: "link"}
        assert read == {
            os.fsdecode(path[1:]): (
                kinds[mode & 0o170000], mode & 0o777, content[0] if isinstance(content, tuple) else b"",
            )
            for path, (mode, _, content) in before.items()
        }  # fmt: skip


def test_archive_of_a_stored_workspace_has_plain_copies(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"content")
    (tmp_path / "two").hardlink_to(tmp_path / "one")
    with (tmp_path / "sparse").open("wb") as file:
        file.write(b"begin")
        file.seek(1 << 20)
        file.write(b"end")
    out = io.BytesIO()
    with spooled(pack(tmp_path)) as stored:
        stored.pack("", out)
        assert stored.read_range("sparse", start=3, length=4) == (b"in\0\0", (1 << 20) + 3)
        assert stored.read_range("sparse", start=(1 << 20) - 1, length=9)[0] == b"\0end"
    out.seek(0)
    with tarfile.open(fileobj=out) as tar:
        members = {member.name: member for member in tar}
        assert {name: (member.isreg(), member.issparse(), member.size) for name, member in members.items()} == {
            "one": (True, False, 7), "two": (True, False, 7), "sparse": (True, False, (1 << 20) + 3),
        }  # fmt: skip


def test_tar_of_an_earlier_version_is_indexed_and_restored(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    (source / "one").write_bytes(b"content")
    (source / "two").hardlink_to(source / "one")
    tar = pack(source, exact=False)
    assert exact_tars.is_exact_tar(tar)
    assert exact_tars.read_omissions(tar) == []
    files.unpack(str(target), tar)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == {"one": b"content", "two": b"content"}


def test_file_with_more_parts_than_are_listed_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_EXTENTS", 3)
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    with (source / "sparse").open("wb") as file:
        for number in range(9):
            file.seek(number << 18)
            file.write(b"x")
        file.truncate(4 << 20)
    tar = pack(source)
    with tarfile.open(fileobj=io.BytesIO(tar.getvalue())) as members:
        assert len(members.getmember("sparse").sparse) == 3  # type: ignore[attr-defined]
    files.unpack(str(target), tar)
    assert (target / "sparse").read_bytes() == (source / "sparse").read_bytes()


def test_inode_of_a_removed_file_makes_no_hard_link(tmp_path: Path) -> None:
    """A program replaces its lock file by one with the same inode, between the two reads of a snapshot."""
    statuses = [os.stat_result((0o100644, 7, 1, 2, 0, 0, 5, 0, 0, 0), {"st_ctime_ns": changed}) for changed in (1, 1, 2)]
    linked = files._LinkedFiles()
    assert linked.find_first(statuses[0]) is None
    linked.add(statuses[0], "lock")
    assert linked.find_first(statuses[2]) is None
    assert linked.find_first(statuses[1]) == "lock"


def test_too_many_linked_files_are_stored_as_copies_and_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_LINKED_FILES", 1)
    for name in "abcd":
        (tmp_path / f"{name}1").write_text(name)
        os.link(tmp_path / f"{name}1", tmp_path / f"z{name}")
    tar = pack(tmp_path)
    assert [(each["kind"], each["count"]) for each in exact_tars.read_omissions(tar)] == [("hard_link", 5)]


def test_file_system_without_hard_links_gets_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    (source / "one").write_text("content")
    (source / "one").chmod(0o640)
    os.utime(source / "one", ns=(0, 123456789))
    os.link(source / "one", source / "two")
    tar = pack(source)

    def refuse(*args: Any, **options: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    files.unpack(str(target), tar)
    copied = (target / "two").stat()
    assert ((target / "two").read_text(), copied.st_mode & 0o777, copied.st_mtime_ns) == ("content", 0o640, 123456789)


def test_extended_attributes_are_listed(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    try:
        os.setxattr(tmp_path / "d", "user.note", b"1")
    except OSError:
        pytest.skip("the file system has no extended attributes")
    assert exact_tars.read_omissions(pack(tmp_path)) == [{"kind": "extended_attribute", "count": 1, "paths": ["d"]}]


# --- untrusted tars ------------------------------------------------------------------------------------------------------


def made(kind: bytes = tarfile.REGTYPE, *, content: bytes = b"", headers: dict[str, str] | None = None) -> bytes:
    member, out = tarfile.TarInfo("f"), io.BytesIO()
    member.type, member.size, member.pax_headers = kind, len(content), headers or {}
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


def sparse(table: str, *, data: bytes = b"", apparent_size: str = "100", **headers: str) -> bytes:
    content = table.encode() + bytes(-len(table) % 512) + data
    named = {"major": "1", "minor": "0", "name": "f", "realsize": apparent_size} | headers
    return made(content=content, headers={f"GNU.sparse.{name}": value for name, value in named.items()})


def test_map_of_a_sparse_file_is_accepted() -> None:
    assert exact_tars.is_exact_tar(io.BytesIO(sparse("2\n10\n5\n100\n0\n", data=b"12345")))
    long = "".join(f"{number * 10}\n5\n" for number in range(4000))
    assert exact_tars.is_exact_tar(io.BytesIO(sparse(f"4000\n{long}", data=b"x" * 20000, apparent_size="40000")))


INVALID: dict[str, Callable[[], bytes]] = {
    "more parts than are written": lambda: sparse("4098\n" + "0\n0\n" * 4098),
    "a count without end": lambda: sparse("9" * 2000),
    "a negative length": lambda: sparse("1\n0\n-5\n", data=b"12345"),
    "overlapping parts": lambda: sparse("2\n10\n5\n12\n5\n", data=b"1234512345"),
    "a part beyond the end": lambda: sparse("1\n98\n5\n", data=b"12345"),
    "a part without data": lambda: sparse("1\n0\n50\n", data=b"12345"),
    "a cut map": lambda: sparse("1\n0\n5\n", data=b"12345")[:1536],
    "no number": lambda: sparse("1\nx\n5\n", data=b"12345"),
    "another version": lambda: sparse("1\n0\n5\n", data=b"12345", minor="1"),
    "a map in the header": lambda: sparse("1\n0\n5\n", data=b"12345", map="0,99"),
    "a size in the header": lambda: made(headers={"size": "99999999"}),
    "a time that is no number": lambda: made(headers={"mtime": "nan"}),
    "a second name with content": lambda: made(tarfile.LNKTYPE, content=b"x"),
    "a pipe": lambda: made(tarfile.FIFOTYPE),
    "an unknown record": lambda: made(headers={"comment": "x"}),
    "an old sparse file": lambda: made(tarfile.GNUTYPE_SPARSE),
    "no end": lambda: made()[:512],
    "no tar": lambda: b"no tar at all",
}


@pytest.mark.parametrize("kind", INVALID)
def test_other_tars_are_not_indexed_and_state_nothing(kind: str) -> None:
    tar = io.BytesIO(INVALID[kind]())
    assert not exact_tars.is_exact_tar(tar)
    assert exact_tars.read_omissions(tar) == []


@pytest.mark.parametrize(
    "stated",
    ["[", "[]", "7", '{"pipe": 1}', '{"pipe": [0, []]}', '{"pipe": [-1, ["a"]]}', '{"pipe": [1, [2]]}', "[" * 40000],
)
def test_malformed_report_states_nothing(stated: str) -> None:
    assert exact_tars.read_omissions(io.BytesIO(made(headers={files.OMISSIONS_RECORD: stated}))) == []


def test_report_of_a_sandbox_is_bounded_and_printable() -> None:
    stated = '{"pipe": [7, ["a\\u0000b\\udcff", "' + "x" * 999 + '", "c", "d", "e", "f"]], "unknown": [1, []]}'
    [omitted] = exact_tars.read_omissions(io.BytesIO(made(headers={files.OMISSIONS_RECORD: stated})))
    assert omitted == {"kind": "pipe", "count": 7, "paths": ["ab\ufffd", "x" * 200, "c", "d", "e"]}
    assert Snapshot(omitted=[omitted]).omitted == [omitted]
