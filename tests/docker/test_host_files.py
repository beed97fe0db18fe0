"""Host access to container files: permissions, process checks and accepted tars."""

import io
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest

from sandboxes.image import files
from sandboxes.providers import tar_validation
from sandboxes.providers.base import SandboxSpec
from sandboxes.providers.docker import host_files
from sandboxes.providers.docker.provider import DockerProvider

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may act as another user")


@pytest.fixture
def open_path() -> Iterator[Path]:
    """Directory accessible to every user, unlike tmp_path."""
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


@as_root
def test_files_are_accessed_with_the_agents_permissions_only(open_path: Path) -> None:
    theirs, ours = open_path / "theirs", open_path / "ours"
    theirs.mkdir()
    os.chown(theirs, NOBODY, NOBODY)
    ours.write_text("secret")
    ours.chmod(0o600)
    with host_files.impersonate_user(NOBODY):
        (theirs / "f").write_text("x")
        for act in (ours.read_text, lambda: ours.chmod(0o666), lambda: (open_path / "g").write_text("x")):
            with pytest.raises(PermissionError):
                act()
    assert (theirs / "f").stat().st_uid == (theirs / "f").stat().st_gid == NOBODY
    assert ours.read_text() == "secret"  # the thread's own permissions are restored


@as_root
def test_supplementary_groups_are_dropped(open_path: Path) -> None:
    groups, ours = os.getgroups(), open_path / "ours"
    ours.write_text("secret")
    os.chown(ours, 0, 4242)
    ours.chmod(0o640)
    os.setgroups([4242])
    try:
        with host_files.impersonate_user(NOBODY), pytest.raises(PermissionError):
            ours.read_text()
        assert os.getgroups() == [4242]
    finally:
        os.setgroups(groups)


def test_process_of_another_container_is_refused() -> None:
    with pytest.raises(ProcessLookupError), host_files.open_container_directory(os.getpid(), "f" * 64, "/tmp"):
        pass


@as_root
@pytest.mark.docker
@pytest.mark.usefixtures("docker_ready")
def test_only_process_1_of_a_container_is_accepted() -> None:
    provider, name = DockerProvider(), f"lhd-{uuid4().hex[:16]}"
    try:
        provider.create(SandboxSpec(name, owner=name))
        provider.wait_ready(name, timeout=timedelta(seconds=30))
        found = provider._engine.call("GET", f"/containers/{name}/json")
        first, container = found["State"]["Pid"], found["Id"]
        with host_files.open_container_directory(first, container, "/data") as place:
            assert os.listdir(place) == []
        with pytest.raises(OSError), host_files.open_container_directory(first, container, "/etc/passwd"):
            pass
        with pytest.raises(OSError), host_files.open_container_directory(first, container, "/bin"):  # a symbolic link
            pass
        cgroup = provider._engine.cgroup(name)
        assert cgroup
        subprocess.run(["docker", "exec", "-d", name, "sleep", "300"], check=True)
        [other] = {int(pid) for pid in cgroup.processes.read_text().split()} - {first}
        with pytest.raises(ProcessLookupError), host_files.open_container_directory(other, container, "/data"):
            pass
    finally:
        provider.destroy(name)
