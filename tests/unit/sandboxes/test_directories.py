"""A directory on its way into a sandbox and back: what was changed there is changed here, and nothing else is."""

import io
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandboxes.image import files
from sandboxes.providers.base import Rejected
from sandboxes.state import directories
from sandboxes.state.spool import open_spool


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """What a person has: files, a program, a link out of the directory, something nested."""
    root = tmp_path / "project"
    (root / "src" / "deep").mkdir(parents=True)
    (root / "README").write_text("hello\n")
    (root / "src" / "run").write_text("#!/bin/sh\n")
    (root / "src" / "run").chmod(0o755)
    (root / "src" / "deep" / "data").write_bytes(bytes(range(256)))
    (root / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("untouched")
    return root


@pytest.fixture
def travel(root: Path, tmp_path: Path) -> Iterator[Callable[[Callable[[Path], object]], int]]:
    """Take the directory elsewhere, have something done to it there, and bring that back."""

    def there_and_back(act: Callable[[Path], object]) -> int:
        there = tmp_path / "sandbox"
        there.mkdir()
        with open_spool() as sent, open_spool() as back:
            directories.pack(root, sent)
            files.unpack(str(there), sent)
            act(there)
            files.pack(str(there), back)
            return directories.apply_changes(root, sent, back)

    yield there_and_back
    assert sorted(path.name for path in (tmp_path / "outside").iterdir()) == ["secret"]
    assert (tmp_path / "outside" / "secret").read_text() == "untouched"


def seen(root: Path) -> dict[str, tuple[int, bytes | str | None]]:
    return {
        path.relative_to(root).as_posix(): (
            path.lstat().st_mode,
            os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None,
        )
        for path in root.rglob("*")
    }


def test_what_nobody_touched_stays_as_it_is(root: Path, travel) -> None:
    before, times = seen(root), {path: path.lstat().st_ctime_ns for path in root.rglob("*")}
    assert travel(lambda there: None) == 0
    assert seen(root) == before
    assert {path: path.lstat().st_ctime_ns for path in root.rglob("*")} == times


def test_what_was_written_made_removed_and_made_executable_is_so_here(root: Path, travel) -> None:
    def act(there: Path) -> None:
        (there / "README").write_text("HELLO\n")
        (there / "new" / "dir").mkdir(parents=True)
        (there / "new" / "dir" / "file").write_text("x")
        (there / "src" / "deep" / "data").unlink()
        (there / "src" / "deep").rmdir()
        (there / "src" / "run").chmod(0o700)
        (there / "ln").symlink_to("README")

    assert travel(act) == 8
    after = seen(root)
    assert (after["README"][1], after["new/dir/file"][1], after["ln"][1]) == (b"HELLO\n", b"x", "README")
    assert (root / "src" / "run").stat().st_mode & 0o777 == 0o700
    assert not (root / "src" / "deep").exists()


def test_what_became_something_else_takes_its_place(root: Path, travel) -> None:
    def act(there: Path) -> None:
        (there / "README").unlink()
        (there / "README").mkdir()
        (there / "README" / "part").write_text("1")
        (there / "src" / "deep" / "data").unlink()
        (there / "src" / "deep").rmdir()
        (there / "src" / "deep").write_text("flat")
        (there / "link").unlink()
        (there / "link").mkdir()
        (there / "link" / "secret").write_text("changed")

    travel(act)
    assert (root / "README" / "part").read_text() == "1"
    assert (root / "src" / "deep").read_text() == "flat"
    assert ((root / "link").is_symlink(), (root / "link" / "secret").read_text()) == (False, "changed")


def test_what_was_made_here_meanwhile_stays(root: Path, travel) -> None:
    travel(lambda there: (root / "meanwhile").write_text("kept"))
    assert (root / "meanwhile").read_text() == "kept"


def test_a_home_stays_on_its_side(root: Path, travel) -> None:
    (root / ".home").mkdir()
    (root / ".home" / "mine").write_text("kept")

    def act(there: Path) -> None:
        assert not (there / ".home").exists()
        (there / ".home").mkdir()
        (there / ".home" / "junk").write_text("x")

    assert travel(act) == 0
    assert [path.name for path in (root / ".home").iterdir()] == ["mine"]


def tar_of(*members: tuple[str, bytes, str]) -> io.BytesIO:
    """(name, type, content or target) of each."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, kind, content in members:
            member = tarfile.TarInfo(name)
            member.type = kind
            if kind == tarfile.REGTYPE:
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content.encode()))
            else:
                member.linkname = content
                tar.addfile(member)
    return out


@pytest.mark.parametrize(
    "members",
    [
        [("../escaped", tarfile.REGTYPE, "x")],
        [("/tmp/escaped", tarfile.REGTYPE, "x")],
        [("link/escaped", tarfile.REGTYPE, "x")],
        [("out", tarfile.SYMTYPE, ".."), ("out/escaped", tarfile.REGTYPE, "x")],
        [("hard", tarfile.LNKTYPE, "link/secret")],
        [("hard", tarfile.LNKTYPE, "../outside/secret")],
        [("null", tarfile.CHRTYPE, "")],
        [("pipe", tarfile.FIFOTYPE, "")],
    ],
    ids=lambda members: " ".join(name for name, _, _ in members),
)
def test_a_tar_that_would_write_elsewhere_is_refused(root: Path, tmp_path: Path, members: list) -> None:
    with open_spool() as sent:
        directories.pack(root, sent)
        with pytest.raises(Rejected):
            directories.apply_changes(root, sent, tar_of(("link", tarfile.SYMTYPE, str(tmp_path / "outside")), *members))
    assert not [path for path in tmp_path.rglob("*") if path.name in ("escaped", "hard", "null", "pipe")]
    assert [(path.name, path.stat().st_nlink) for path in (tmp_path / "outside").iterdir()] == [("secret", 1)]
    assert not Path("/tmp/escaped").exists()


def test_half_a_tar_removes_nothing(root: Path) -> None:
    before = seen(root)
    with open_spool() as sent:
        directories.pack(root, sent)
        for cut in (0, 512, 1024):
            with pytest.raises(Rejected):
                directories.apply_changes(root, sent, io.BytesIO(sent.read()[:cut]))
            sent.seek(0)
    assert seen(root) == before
