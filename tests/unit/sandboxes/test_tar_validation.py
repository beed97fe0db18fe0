"""Tars that are accepted without unpacking them in a sandbox."""

import io
import tarfile
from pathlib import Path

import pytest

from sandboxes.image import files
from sandboxes.providers import tar_validation
from sandboxes.providers.errors import Rejected


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


def extended(*records: bytes, padding: bytes = b"") -> bytes:
    """Build a tar with these pax records before its only file."""
    out = b""
    for record in records:
        header = tarfile.TarInfo("././@PaxHeader")
        header.type, header.size = tarfile.XHDTYPE, len(record)
        out += header.tobuf(tarfile.USTAR_FORMAT) + (record + padding).ljust(512, b"\0")
    return out + made()


def test_output_of_pack_is_a_plain_tar_and_its_position_is_restored(tmp_path: Path) -> None:
    (tmp_path / ("two\nlines" * 20)).write_text("")
    tar = io.BytesIO(b"before" + packed(tmp_path))
    tar.seek(6)
    assert tar_validation.is_plain_tar(tar)
    assert tar.tell() == 6
    assert tar_validation.is_plain_tar(io.BytesIO(extended(b"11 path=ab\n")))


NOT_PLAIN = {
    "short": extended(b"9 path=ab\n19 GNU.sparse.size=1\n"),
    "padding": extended(b"11 path=ab\n", padding=b"23 GNU.sparse.map=0,99\n"),
    "inside": extended(b"11 path=a\n23 GNU.sparse.map=0,99\n"),
    "chain": extended(*[b"11 path=ab\n"] * 2),
    "long": extended(b"99 path=ab\n"),
    "none": extended(b"0 path=ab\n"),
    "sparse": made(tarfile.GNUTYPE_SPARSE),
    "long name": made(tarfile.GNUTYPE_LONGNAME, content=b"x" * 600),
    "second name": made(tarfile.LNKTYPE),
    "pipe": made(tarfile.FIFOTYPE),
    "pax sparse": made(headers={"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}),
    "pax size": made(headers={"size": "99999999"}),
    "endless name": made(headers={"path": "x" * (1 << 17)}),
    "cut": made()[:300],
    "no tar": b"no tar at all",
}


@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_other_tars_are_not_plain(kind: str) -> None:
    assert not tar_validation.is_plain_tar(io.BytesIO(NOT_PLAIN[kind]))


@pytest.mark.parametrize("mtime", ["nan", "inf", "-inf", "1e300", "-99999999999"])
def test_time_that_no_file_can_have_is_rejected(mtime: str) -> None:
    with pytest.raises(Rejected, match="time of 'f'"):
        tar_validation.validate_tar(io.BytesIO(made(headers={"mtime": mtime})))


@pytest.mark.parametrize("mtime", ["0", "-1.5", "1764241200.25", "4294967296"])
def test_times_of_files_are_accepted(mtime: str) -> None:
    tar_validation.validate_tar(io.BytesIO(made(headers={"mtime": mtime})))
