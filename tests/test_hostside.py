"""The way into a container's files without an exec: whose rights it has, and what it will not unpack."""

import io
import os
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxes.image import files
from sandboxes.providers import hostside

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may act as another user")


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A directory that every user can reach, which tmp_path is not."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def packed(tmp_path: Path) -> bytes:
    long = "a" * 90
    (tmp_path / long / long).mkdir(parents=True)
    (tmp_path / long / long / "f\u00e9").write_bytes(b"x" * 1000)
    (tmp_path / "link").symlink_to("/" + "b" * 200)
    out = io.BytesIO()
    files.pack(str(tmp_path), out)
    return out.getvalue()


def made(kind: bytes = tarfile.REGTYPE, *, content: bytes = b"", headers: dict[str, str] | None = None) -> bytes:
    member, out = tarfile.TarInfo("f"), io.BytesIO()
    member.type, member.size, member.pax_headers = kind, len(content), headers or {}
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


def test_what_pack_writes_is_plain_and_stays_where_it_was(tmp_path: Path) -> None:
    tar = io.BytesIO(b"before" + packed(tmp_path))
    tar.seek(6)
    assert hostside.is_plain(tar)
    assert tar.tell() == 6


@pytest.mark.parametrize(
    "tar",
    [
        made(tarfile.GNUTYPE_SPARSE),
        made(tarfile.GNUTYPE_LONGNAME, content=b"x" * 600),
        made(tarfile.LNKTYPE),
        made(tarfile.FIFOTYPE),
        made(headers={"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}),
        made(headers={"size": "99999999"}),
        made(headers={"path": "x" * (1 << 17)}),
        made()[:300],
        b"no tar at all",
    ],
    ids=["sparse", "long name", "second name", "pipe", "pax sparse", "pax size", "endless name", "cut", "no tar"],
)
def test_anything_else_is_left_to_an_unpacker_inside(tar: bytes) -> None:
    assert not hostside.is_plain(io.BytesIO(tar))


@as_root
def test_files_are_reached_with_that_users_rights_alone(open_path: Path) -> None:
    theirs, ours = open_path / "theirs", open_path / "ours"
    theirs.mkdir()
    os.chown(theirs, NOBODY, NOBODY)
    ours.write_text("secret")
    ours.chmod(0o600)
    with hostside.acting_as(NOBODY):
        (theirs / "f").write_text("x")
        for act in (ours.read_text, lambda: ours.chmod(0o666), lambda: (open_path / "g").write_text("x")):
            with pytest.raises(PermissionError):
                act()
    assert (theirs / "f").stat().st_uid == (theirs / "f").stat().st_gid == NOBODY
    assert ours.read_text() == "secret"  # and afterwards we are ourselves again


def test_a_process_that_is_not_the_containers_opens_nothing() -> None:
    with pytest.raises(ProcessLookupError), hostside.place(os.getpid(), "f" * 64, "/tmp"):
        pass
