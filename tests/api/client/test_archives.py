"""Archives of a sandbox that try to write, or to lead, outside of the directory into which they are unpacked."""

import io
import os
import tarfile
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leasehold import LeaseholdError
from leasehold.archives import unpack_archive

DIRECTORY, FILE, LINK, HARD_LINK, PIPE = tarfile.DIRTYPE, tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE
Entry = tuple[bytes, str, str]  # type, name, and the content of a file or the target of a link


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Directory into which archives are unpacked, beside a file of the user."""
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "target").mkdir()
    return tmp_path / "target"


def unpack(target: Path, entries: Iterable[Entry], source: str = "") -> list[str]:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for kind, name, content in entries:
            member = tarfile.TarInfo(name)
            member.type, member.mode = kind, 0o777
            body = content.encode() if kind == FILE else b""
            member.size, member.linkname = len(body), "" if kind == FILE else content
            tar.addfile(member, io.BytesIO(body))
    return unpack_archive(archive, source, target)


def test_files_links_and_modes_are_those_of_the_archive(target: Path) -> None:
    unpack(target, [
        (FILE, "./in/a/tool", "run"), (LINK, "./in/b/to-tool", "../a/tool"), (HARD_LINK, "./in/c", "./in/a/tool"),
        (LINK, "./in/here", "."), (LINK, "./in/later", "not-yet"), (DIRECTORY, "./in/empty", ""), (FILE, "./other", "no"),
    ], "in")  # fmt: skip
    assert sorted(str(path.relative_to(target)) for path in target.rglob("*")) == [
        "a", "a/tool", "b", "b/to-tool", "c", "empty", "here", "later",
    ]  # fmt: skip
    assert [(target / name).read_text() for name in ("b/to-tool", "c", "here/c")] == ["run"] * 3
    assert (os.readlink(target / "b/to-tool"), os.readlink(target / "here")) == ("../a/tool", ".")
    assert ((target / "a/tool").stat().st_mode & 0o7777, (target / "a/tool").stat().st_nlink) == (0o755, 2)


def test_a_file_replaces_what_has_its_name_and_is_not_written_through_it(target: Path) -> None:
    (target / "link").symlink_to("../secret.txt")
    os.link(target.parent / "secret.txt", target / "same")
    unpack(target, [(FILE, "link", "new"), (FILE, "same", "new"), (LINK, "turns", "same"), (FILE, "turns", "file")])
    assert {path.name: path.read_text() for path in target.iterdir()} == {"link": "new", "same": "new", "turns": "file"}
    assert (target.parent / "secret.txt").read_text() == "secret"


ATTACKS: dict[str, list[Entry]] = {
    "dots": [(FILE, "../secret.txt", "x")],
    "dots further down": [(FILE, "a/../../secret.txt", "x")],
    "absolute name": [(FILE, "/tmp/secret.txt", "x")],
    "file through a link": [(LINK, "q", "."), (FILE, "q/x", "x")],
    "hard link out": [(HARD_LINK, "a", "../secret.txt")],
    "hard link to a file of the user": [(HARD_LINK, "a", "mine")],
    "hard link to a link": [(LINK, "l", "mine"), (HARD_LINK, "a", "l")],
    "file below a link of the user": [(FILE, "users/secret.txt", "x")],
    "pipe": [(PIPE, "a", "")],
}
LINKS_OUT: dict[str, tuple[list[Entry], list[str]]] = {  # entries, and the links that are left out
    "absolute": ([(LINK, "python3", "/usr/bin/python3"), (LINK, "python", "python3")], ["python3"]),
    "out": ([(LINK, "a", "../secret.txt")], ["a"]),
    "out of a directory": ([(LINK, "a/b", "../../secret.txt")], ["a/b"]),
    "moved out by another one": ([(LINK, "report", "q/../secret.txt"), (LINK, "q", ".")], ["report"]),
    "through a link to itself": ([(LINK, "q", "."), (LINK, "report", "q/../secret.txt")], ["report"]),
    "below a link": ([(LINK, "q", "r"), (DIRECTORY, "r", ""), (LINK, "q/x", ".")], ["q/x"]),
    "circle": ([(LINK, "a", "b"), (LINK, "b", "a"), (LINK, "c", "a/x")], ["a", "b", "c"]),
    "through a link of the user": ([(LINK, "a", "users/secret.txt")], ["a"]),
    "through a link of the user that is not replaced": (
        [(LINK, "users", "/"), (LINK, "a", "users/secret.txt")], ["a", "users"],
    ),
    "in a circle with a link of the user": (
        [(LINK, "users", "b"), (LINK, "b", "users"), (LINK, "a", "users/secret.txt")], ["a", "b", "users"],
    ),
    "more than a path can hold": (
        [
            *((LINK, f"{'/'.join(['d' * 247] * depth + ['l'])}", "d" * 247) for depth in range(16)),
            (LINK, "long", f"{'l/' * 16}{'../' * 17}secret.txt"), (FILE, "long", "x"),
            (LINK, "e", f"{'l/' * 16}../../secret.txt"),
        ],
        ["e"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_archive_that_leads_outside_is_refused(attack: str, target: Path) -> None:
    (target / "mine").write_text("mine")
    (target / "users").symlink_to("..")
    with pytest.raises(LeaseholdError) as refused:
        unpack(target, ATTACKS[attack])
    assert refused.value.code == "unsafe_archive"
    check_nothing_leads_outside(target, {"users"})


@pytest.mark.parametrize("kind", LINKS_OUT)
def test_links_that_lead_outside_are_left_out_and_named(kind: str, target: Path) -> None:
    (target / "users").symlink_to("..")
    entries, omitted = LINKS_OUT[kind]
    assert unpack(target, [*entries, (FILE, "rest", "x")]) == omitted
    assert (target / "rest").read_text() == "x"
    assert not any((target / name).is_symlink() for name in omitted if name != "users")
    check_nothing_leads_outside(target, {"users"})


@pytest.mark.parametrize("content", [b"no archive", b"x" * 1024, b"\xff" * 5000])
def test_damaged_archive_is_an_error_of_the_client(content: bytes, target: Path) -> None:
    with pytest.raises(LeaseholdError) as failed:
        unpack_archive(io.BytesIO(content), "", target)
    assert failed.value.code == "unpack_failed"


def test_truncated_archive_and_a_name_that_the_disk_refuses_are_errors_of_the_client(target: Path) -> None:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as tar:
        member = tarfile.TarInfo("file")
        member.size = 100_000
        tar.addfile(member, io.BytesIO(bytes(member.size)))
    with pytest.raises(LeaseholdError) as failed:
        unpack_archive(io.BytesIO(whole.getvalue()[:50_000]), "", target)
    assert failed.value.code == "unpack_failed"
    with pytest.raises(LeaseholdError) as failed:
        unpack(target, [(FILE, "n" * 300, "x")])
    assert failed.value.code == "unpack_failed"


def check_nothing_leads_outside(target: Path, own_links: set[str]) -> None:
    assert {path.name: path.is_dir() or path.read_text() for path in target.parent.iterdir()} == {
        "secret.txt": "secret", "target": True,
    }  # fmt: skip
    for folder, folders, files in os.walk(target):
        for name in folders + files:
            path = Path(folder, name)
            if path.is_symlink() and path.name not in own_links:
                assert Path(os.path.realpath(path)).is_relative_to(target), os.readlink(path)


names = st.lists(st.sampled_from(["a", "b", "c", ".", ".."]), min_size=1, max_size=4).map("/".join)
targets = names | names.map(lambda name: f"{name}/secret.txt") | st.just("/etc/passwd")
entries = st.one_of(
    st.tuples(st.just(FILE), names, st.just("x")),
    st.tuples(st.just(DIRECTORY), names, st.just("")),
    st.tuples(st.sampled_from([LINK, LINK, HARD_LINK]), names, targets),
)


@given(st.lists(st.lists(entries, max_size=8), min_size=1, max_size=3))
def test_no_archives_one_after_the_other_lead_outside(archives: list[list[Entry]]) -> None:
    with TemporaryDirectory() as name:
        target = Path(name).resolve() / "target"
        target.mkdir()
        (target.parent / "secret.txt").write_text("secret")
        for archive in archives:
            for entry in archive:  # each alone: one that is refused does not protect from the others
                try:
                    unpack(target, [entry])
                except LeaseholdError:
                    continue
            try:
                unpack(target, archive)
            except LeaseholdError:
                continue
        check_nothing_leads_outside(target, set())
