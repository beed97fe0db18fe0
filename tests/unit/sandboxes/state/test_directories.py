"""Round trip of a local directory: changes made to the sandbox's copy are applied, and nothing else."""

import io
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandboxes.image import files
from sandboxes.providers.errors import Rejected
from sandboxes.state import directories
from sandboxes.state.spool import open_spool


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with files, a program, a link out of the directory and a nested directory."""
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
def round_trip(root: Path, tmp_path: Path) -> Iterator[Callable[[Callable[[Path], object]], int]]:
    """Copy the directory, change the copy, and apply the changes. Afterwards, nothing outside the directory has changed."""

    def copy_and_apply(act: Callable[[Path], object]) -> int:
        copy = tmp_path / "sandbox"
        copy.mkdir()
        with open_spool() as sent, open_spool() as back:
            directories.pack(root, sent)
            files.unpack(str(copy), sent)
            act(copy)
            files.pack(str(copy), back)
            return directories.apply_changes(root, sent, back)

    yield copy_and_apply
    assert sorted(path.name for path in (tmp_path / "outside").iterdir()) == ["secret"]
    assert (tmp_path / "outside" / "secret").read_text() == "untouched"


def read_tree(root: Path) -> dict[str, tuple[int, bytes | str | None]]:
    return {
        path.relative_to(root).as_posix(): (
            path.lstat().st_mode,
            os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None,
        )
        for path in root.rglob("*")
    }


def test_unchanged_files_are_not_touched(root: Path, round_trip) -> None:
    before, times = read_tree(root), {path: path.lstat().st_ctime_ns for path in root.rglob("*")}
    assert round_trip(lambda copy: None) == 0
    assert read_tree(root) == before
    assert {path: path.lstat().st_ctime_ns for path in root.rglob("*")} == times


def test_changes_of_content_mode_existence_and_type_are_applied(root: Path, round_trip) -> None:
    (root / "flat").write_text("file\n")
    (root / "gone").mkdir()

    def act(copy: Path) -> None:
        (copy / "README").write_text("HELLO\n")
        (copy / "new" / "dir").mkdir(parents=True)
        (copy / "new" / "dir" / "file").write_text("x")
        (copy / "src" / "deep" / "data").unlink()
        (copy / "src" / "deep").rmdir()
        (copy / "src" / "deep").write_text("flat")
        (copy / "src" / "run").chmod(0o700)
        (copy / "ln").symlink_to("README")
        (copy / "gone").rmdir()
        (copy / "flat").unlink()
        (copy / "flat").mkdir()
        (copy / "flat" / "part").write_text("1")
        (copy / "link").unlink()
        (copy / "link").mkdir()
        (copy / "link" / "secret").write_text("changed")
        (root / "meanwhile").write_text("kept")

    assert round_trip(act) == 13
    after = read_tree(root)
    contents = {"README": b"HELLO\n", "new/dir/file": b"x", "ln": "README", "src/deep": b"flat", "flat/part": b"1",
                "link/secret": b"changed", "meanwhile": b"kept"}  # fmt: skip
    assert {path: after[path][1] for path in contents} == contents
    assert (root / "src" / "run").stat().st_mode & 0o777 == 0o700
    assert not (root / "link").is_symlink() and not (root / "gone").exists()


def test_home_is_not_copied_in_either_direction(root: Path, round_trip) -> None:
    (root / ".home").mkdir()
    (root / ".home" / "mine").write_text("kept")

    def act(copy: Path) -> None:
        assert not (copy / ".home").exists()
        (copy / ".home").mkdir()
        (copy / ".home" / "junk").write_text("x")

    assert round_trip(act) == 0
    assert [path.name for path in (root / ".home").iterdir()] == ["mine"]


def tar_of(*members: tuple[str, bytes, str]) -> io.BytesIO:
    """Build a tar of members: name, type, content or link target."""
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
def test_tar_that_would_write_outside_is_rejected(root: Path, tmp_path: Path, members: list) -> None:
    with open_spool() as sent:
        directories.pack(root, sent)
        with pytest.raises(Rejected):
            directories.apply_changes(root, sent, tar_of(("link", tarfile.SYMTYPE, str(tmp_path / "outside")), *members))
    assert not [path for path in tmp_path.rglob("*") if path.name in ("escaped", "hard", "null", "pipe")]
    assert [(path.name, path.stat().st_nlink) for path in (tmp_path / "outside").iterdir()] == [("secret", 1)]
    assert not Path("/tmp/escaped").exists()


def test_truncated_tar_removes_nothing(root: Path) -> None:
    before = read_tree(root)
    with open_spool() as sent:
        directories.pack(root, sent)
        for cut in (0, 512, 1024):
            with pytest.raises(Rejected):
                directories.apply_changes(root, sent, io.BytesIO(sent.read()[:cut]))
            sent.seek(0)
    assert read_tree(root) == before
