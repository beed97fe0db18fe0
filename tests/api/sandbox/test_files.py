"""Files of a lease with an awake and with a cold sandbox: reads, ranges, listings, archives."""

import gzip
import io
import tarfile
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from django.utils import timezone

from leases.models import Lease
from sandboxes import eviction
from sandboxes.models import DataObject, Run, Sandbox
from sandboxes.pool import allocation
from sandboxes.providers.memory import File, MemoryProvider
from sandboxes.state import workspace
from sandboxes.storage import get_store
from tests.api.conftest import ApiClient, assert_refused
from tests.support.storage.tars import file, other, pack

pytestmark = pytest.mark.django_db


@pytest.fixture
def lease_url(lease) -> str:
    return f"leases/{lease['id']}"


@pytest.fixture
def filled_url(ada: ApiClient, lease_url: str) -> str:
    """URL of a lease with some files."""
    assert ada.put(f"{lease_url}/files/src/main.py", b"print('hi')\n").status_code == 204
    assert ada.put(f"{lease_url}/files/src/deep/er/x.bin", bytes(range(256))).status_code == 204
    assert ada.put(f"{lease_url}/files/empty", b"").status_code == 204
    assert ada.put(f"{lease_url}/files/memory/notes.md?root=data", b"remember\n").status_code == 204
    ada.post(f"{lease_url}/exec", {"argv": ["ln", "-s", "src/main.py", "/workspace/link"]})
    return lease_url


@pytest.fixture
def evict(lease) -> Callable[[], None]:
    def evict_sandbox() -> None:
        sandbox = allocation.find_by_holder(uuid.UUID(lease["id"]))
        assert sandbox
        assert eviction.evict(sandbox.pk, now=timezone.now(), reason="test")

    return evict_sandbox


@pytest.fixture(params=["sandbox", "snapshot"])
def source(request: pytest.FixtureRequest, filled_url: str, evict) -> str:
    """Source of the files that are read: the awake sandbox, or the snapshot of a cold one."""
    if request.param == "snapshot":
        evict()
    return str(request.param)


def read_content(response: Any) -> bytes:
    return b"".join(response.streaming_content) if response.streaming else response.content


def read_tar(tar: bytes) -> dict[str, bytes | str | None]:
    """Entries of a tar: the content of files, the target of links, None for directories."""
    entries: dict[str, bytes | str | None] = {}
    with tarfile.open(fileobj=io.BytesIO(tar), mode="r:") as opened:
        for member in opened:
            content = opened.extractfile(member) if member.isreg() else None
            entries[member.name] = content.read() if content else member.linkname if member.issym() else None
    return entries


def pack_tar(**files: bytes) -> bytes:
    return pack(*(file(name, content) for name, content in files.items())).getvalue()


# --- one file -----------------------------------------------------------------------------------------------------


def test_a_file_is_written_read_and_deleted(ada: ApiClient, lease_url: str) -> None:
    url, raw = f"{lease_url}/files/notes/a%20b.bin", bytes(range(256))
    assert ada.put(url, raw).status_code == 204
    run = Run.objects.get()
    assert (run.kind, run.argv, run.outcome) == ("file", ["write", "/workspace/notes/a b.bin"], "ok")
    assert Lease.objects.get().last_activity_at >= run.started_at
    response = ada.get(url)
    assert (response.status_code, response.content) == (200, raw)
    assert (response["X-Content-Type-Options"], response["Content-Disposition"]) == ("nosniff", "attachment")
    assert ada.delete(url).status_code == 204
    assert ada.get(url).status_code == 404


def test_root_data_is_the_agents_data_directory(ada: ApiClient, lease_url: str) -> None:
    ada.put(f"{lease_url}/files/memory.json?root=data", b"{}")
    assert ada.post(f"{lease_url}/exec", {"argv": ["cat", "/data/memory.json"]}).json()["stdout"] == "{}"
    assert ada.get(f"{lease_url}/files/memory.json").status_code == 404


def test_a_directory_is_created_and_entries_are_moved(ada: ApiClient, lease_url: str, memory: MemoryProvider) -> None:
    created = ada.post(f"{lease_url}/mkdir", {"path": "a/b"}, idempotency_key="k1")
    assert (created.status_code, created.json()) == (201, {"root": "workspace", "path": "a/b"})
    assert ada.post(f"{lease_url}/mkdir", {"path": "a/b"}).status_code == 201
    ada.put(f"{lease_url}/files/a/file", b"1")
    moved = ada.post(f"{lease_url}/move", {"path": "a", "target": "c/d"}, idempotency_key="k2")
    assert (moved.status_code, moved.json()) == (200, {"root": "workspace", "path": "c/d"})
    again = ada.post(f"{lease_url}/move", {"path": "a", "target": "c/d"}, idempotency_key="k2")
    assert (again.status_code, again.headers["Idempotent-Replayed"]) == (200, "true")
    names = [entry["name"] for entry in ada.get(f"{lease_url}/files?deep=1").json()["entries"]]
    assert names == ["c", "c/d", "c/d/b", "c/d/file", "config.json"]
    runs = Run.objects.filter(argv__0__in=["mkdir", "move"]).order_by("started_at")
    assert [(run.kind, run.outcome) for run in runs] == [("file", "ok")] * 3
    assert runs[2].argv == ["move", "/workspace/a", "/workspace/c/d"]


def test_a_move_is_refused_by_name(ada: ApiClient, filled_url: str) -> None:
    url = f"{filled_url}/move"
    for body, status, code, field in (
        ({"path": "empty", "target": "src/main.py"}, 409, "file_exists", "target"),
        ({"path": "gone", "target": "b"}, 404, "file_not_found", "path"),
        ({"path": "empty", "target": "src", "overwrite": True}, 400, "bad_path", "path"),
        ({"path": "src", "target": "src/deep/below"}, 400, "bad_path", "path"),
        ({"path": "empty", "target": "b", "target_root": "data"}, 400, "invalid", "target_root"),
    ):
        problem = ada.post(url, body).json()
        assert (problem["status"], problem["code"], problem["field"]) == (status, code, field), body
    assert ada.post(url, {"path": "empty", "target": "src/main.py", "overwrite": True}).status_code == 200
    assert ada.get(f"{filled_url}/files/src/main.py").content == b""
    assert ada.post(url, {"root": "data", "path": "memory", "target": "m"}).status_code == 200
    assert ada.get(f"{filled_url}/files/m/notes.md?root=data").content == b"remember\n"


RANGES = [
    ("bytes=0-3", 206, b"\x00\x01\x02\x03", "bytes 0-3/256"),
    ("bytes=250-", 206, bytes(range(250, 256)), "bytes 250-255/256"),
    ("bytes=250-9999", 206, bytes(range(250, 256)), "bytes 250-255/256"),
    ("bytes=-2", 206, b"\xfe\xff", "bytes 254-255/256"),
    ("bytes=-9999", 206, bytes(range(256)), "bytes 0-255/256"),
    ("Bytes = 255-255", 206, b"\xff", "bytes 255-255/256"),
    *[(unsatisfiable, 416, None, "bytes */256") for unsatisfiable in ("bytes=256-", "bytes=999999999999999999-", "bytes=-0")],
    *[
        (ignored, 200, bytes(range(256)), None)
        for ignored in (
            "bytes=0-1,5-6", "bytes=5-3", "bytes=-", "bytes=a-b", "lines=1-2", "", "bytes=²-", "bytes=" + "9" * 40 + "-",
        )
    ],
]  # fmt: skip


def test_byte_ranges_are_returned(source: str, ada: ApiClient, filled_url: str) -> None:
    for result, status, content, content_range in RANGES:
        response = ada.get(f"{filled_url}/files/src/deep/er/x.bin", range=result)
        assert (response.status_code, response.headers.get("Content-Range")) == (status, content_range), result
        if content is None:
            assert (response.json()["code"], response.json()["field"]) == ("range_not_satisfiable", "Range")
        else:
            assert (response.content, response["Content-Length"]) == (content, str(len(content)))
            assert response["Accept-Ranges"] == "bytes"
            assert response["Leasehold-Source"] == source
    assert ada.get(f"{filled_url}/files/empty", range="bytes=0-").status_code == 416
    assert ada.get(f"{filled_url}/files/src/main.py", range="bytes=0-1", if_range='"x"').content == b"print('hi')\n"
    assert Sandbox.objects.get().state == ("cold" if source == "snapshot" else "waiting")


def test_head_returns_the_size(source: str, ada: ApiClient, filled_url: str) -> None:
    url, key = f"/api/v1/{filled_url}/files/src/deep/er/x.bin", {"Authorization": f"Bearer {ada.key}"}
    response = ada.client.head(url, headers=key)
    assert (response.status_code, response["Content-Length"], response["Accept-Ranges"]) == (200, "256", "bytes")
    assert (response["Leasehold-Source"], response["Content-Type"]) == (source, "application/octet-stream")
    assert response.content == b""
    assert ada.client.head(f"{url}x", headers=key).status_code == 404


def test_a_large_file_is_read_in_ranges(source: str, ada: ApiClient, filled_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leases.api.files.content.MAX_FILE_BYTES", 100)
    url = f"{filled_url}/files/src/deep/er/x.bin"
    problem = ada.get(url).json()
    assert (problem["status"], problem["field"], "256 bytes" in problem["detail"]) == (413, "path", True)
    parts = [ada.get(url, range=f"bytes={start}-") for start in (0, 100, 200)]
    assert [(part.status_code, len(part.content)) for part in parts] == [(206, 100), (206, 100), (206, 56)]
    assert b"".join(part.content for part in parts) == bytes(range(256))
    assert len(ada.get(url, range="bytes=-200").content) == 100


def test_workspace_operations_do_not_wait_for_the_agents_data(ada: ApiClient, lease_url: str, memory: MemoryProvider) -> None:
    ada.put(f"{lease_url}/files/a", b"x")
    ada.get(f"{lease_url}/files/a")
    assert [verb for verb, _ in memory.calls] == ["create", "wait_ready", "write_file", "write_file", "read_range"]
    ada.get(f"{lease_url}/files/a?root=data")
    assert "seed" in [verb for verb, _ in memory.calls]


# --- cold sandboxes -------------------------------------------------------------------------------------------------------


PATHS = [
    "files/src/main.py", "files/memory/notes.md?root=data", "files", "files?deep=1", "files?path=src", "files?path=src&deep=1",
    "files?path=src/deep/er", "archive", "archive?path=src",
]  # fmt: skip
INVALID_PATHS = {
    (404, "file_not_found"): [
        "files/none", "files/src/none/x", "files/none?root=data", "files?path=none", "archive?path=none",
    ],
    (400, "bad_path"): [
        "files/src", "files/link", "files/src/main.py/x", "files/link/x", "files?path=link", "files?path=src/main.py",
        "archive?path=empty",
    ],
}  # fmt: skip


def test_a_cold_sandbox_returns_the_same_files_and_is_not_woken(
    ada: ApiClient, filled_url: str, evict, memory: MemoryProvider
) -> None:
    def read_all(source: str) -> list[Any]:
        for status_and_code, paths in INVALID_PATHS.items():
            for path in paths:
                problem = ada.get(f"{filled_url}/{path}").json()
                assert ((problem["status"], problem["code"]), problem["field"]) == (status_and_code, "path"), path
        responses = [ada.get(f"{filled_url}/{path}") for path in PATHS]
        assert {(response.status_code, response["Leasehold-Source"]) for response in responses} == {(200, source)}
        contents = [read_content(response) for response in responses]
        return [read_tar(each) if path.startswith("archive") else each for path, each in zip(PATHS, contents, strict=True)]

    awake = read_all("sandbox")
    evict()
    calls, runs, before = len(memory.calls), Run.objects.count(), ada.get(filled_url).json()["expires_at"]
    assert read_all("snapshot") == awake
    assert (Sandbox.objects.get().state, len(memory.calls), Run.objects.count()) == ("cold", calls, runs)
    assert ada.get(filled_url).json()["expires_at"] > before


def test_files_of_a_cold_and_of_an_evicted_sandbox_are_read_from_stored_state(ada: ApiClient, filled_url: str, evict) -> None:
    evict()
    listed = ada.get(f"{filled_url}/files?root=data&path=memory").json()
    assert [(entry["name"], entry["size"]) for entry in listed["entries"]] == [("notes.md", 9)]
    tar = read_tar(read_content(ada.get(f"{filled_url}/archive?root=data&path=memory")))
    assert {name: content for name, content in tar.items() if name != "memory"} == {"memory/notes.md": b"remember\n"}
    eviction.release_cold(Sandbox.objects.get().pk, now=timezone.now(), reason="test")
    response = ada.get(f"{filled_url}/files/src/main.py")
    assert (response.content, response["Leasehold-Source"]) == (b"print('hi')\n", "snapshot")
    assert Sandbox.objects.count() == 1


def test_a_lease_without_a_sandbox_lists_its_initial_files(ada: ApiClient, lease_url: str, memory: MemoryProvider) -> None:
    listed, content = ada.get(f"{lease_url}/files?deep=1"), ada.get(f"{lease_url}/files/config.json")
    assert [(entry["name"], entry["kind"]) for entry in listed.json()["entries"]] == [("config.json", "file")]
    assert (content["Leasehold-Source"], ada.get(f"{lease_url}/files?root=data").json()["entries"]) == ("snapshot", [])
    assert set(read_tar(read_content(ada.get(f"{lease_url}/archive")))) == {"config.json"}
    assert memory.calls == []
    ada.post(f"{lease_url}/exec", {"argv": ["true"]})
    assert ada.get(f"{lease_url}/files/config.json").content == content.content


def test_a_fork_lists_its_own_config_before_its_first_start(ada: ApiClient, filled_url: str) -> None:
    fork = ada.post(f"{filled_url}/fork", {"environment_id": "fork-1"}).json()
    content = ada.get(f"leases/{fork['id']}/files/config.json")
    assert (content["Leasehold-Source"], fork["id"] in content.content.decode()) == ("snapshot", True)
    tar = read_tar(read_content(ada.get(f"leases/{fork['id']}/archive")))
    assert (tar["config.json"], tar["src/main.py"]) == (content.content, b"print('hi')\n")


def test_a_corrupted_copy_wakes_the_sandbox(ada: ApiClient, filled_url: str, lease, evict) -> None:
    evict()
    ada.put(f"{filled_url}/files/src/main.py", b"newer")
    evict()
    snapshot = workspace.find_latest(uuid.UUID(lease["id"]))
    assert snapshot
    get_store().set(f"{snapshot.key}/workspace", b"corrupt")
    (workspace.local_directory(snapshot) / "workspace").write_bytes(b"corrupt")
    response = ada.get(f"{filled_url}/files/src/main.py")
    assert (response.content, response["Leasehold-Source"]) == (b"print('hi')\n", "sandbox")
    assert Sandbox.objects.get().source == "local"


def test_a_copy_that_is_no_tar_wakes_the_sandbox(ada: ApiClient, lease_url: str, memory, evict, monkeypatch) -> None:
    ada.put(f"{lease_url}/files/a", b"x")
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        tar.addfile(tarfile.TarInfo("n" * 150))
    with monkeypatch.context() as patched:
        patched.setattr(memory, "get_files", lambda *args, **options: iter([out.getvalue()]))
        evict()
    response = ada.get(f"{lease_url}/files/{'n' * 150}")
    assert (response.status_code, response["Leasehold-Source"]) == (200, "sandbox")


def test_data_lost_by_the_store_is_unavailable(ada: ApiClient, filled_url: str, evict) -> None:
    evict()
    for stored in DataObject.objects.all():
        get_store().remove(stored.key)
    response = ada.get(f"{filled_url}/files/memory/notes.md?root=data")
    assert (response.status_code, response.json()["code"]) == (503, "store_unavailable")


# --- listings -----------------------------------------------------------------------------------------------------


def test_a_listing_has_all_attributes_of_its_entries(ada: ApiClient, filled_url: str, memory: MemoryProvider) -> None:
    memory.files(Sandbox.objects.get().ref)["/workspace/caf\udce9"] = File(b"", mtime_ns=10**21)  # no UTF-8
    result = ada.get(f"{filled_url}/files").json()
    assert (result["root"], result["path"]) == ("workspace", "")
    shown = {entry["name"]: (entry["kind"], entry["size"], entry["mode"], entry["target"]) for entry in result["entries"]}
    assert shown == {
        "caf\N{REPLACEMENT CHARACTER}": ("file", 0, "0644", ""),
        "config.json": ("file", shown["config.json"][1], "0644", ""),
        "empty": ("file", 0, "0644", ""),
        "link": ("link", 0, "0777", "src/main.py"),
        "src": ("directory", 0, "0755", ""),
    }
    assert [entry["mtime"] for entry in result["entries"] if entry["name"].startswith("caf")] == ["9999-12-31T00:00:00Z"]
    deep = [entry["name"] for entry in ada.get(f"{filled_url}/files?path=src&deep=1").json()["entries"]]
    assert deep == ["deep", "deep/er", "deep/er/x.bin", "main.py"]


@pytest.mark.usefixtures("source")
def test_a_long_listing_is_refused(ada: ApiClient, filled_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leases.api.files.content.MAX_LISTING_ENTRIES", 4)
    assert ada.get(f"{filled_url}/files").status_code == 200
    problem = ada.get(f"{filled_url}/files?deep=1").json()
    assert (problem["status"], problem["field"]) == (413, "path")


# --- archives -----------------------------------------------------------------------------------------------------


def test_an_archive_is_a_tar_that_can_be_unpacked_again(ada: ApiClient, filled_url: str, lease) -> None:
    response = ada.get(f"{filled_url}/archive?path=src")
    tar = read_content(response)
    assert (response["Content-Type"], response["Content-Length"]) == ("application/x-tar", str(len(tar)))
    assert response["Content-Disposition"] == 'attachment; filename="src.tar"'
    assert read_tar(tar) == {
        "src": None, "src/deep": None, "src/deep/er": None, "src/deep/er/x.bin": bytes(range(256)),
        "src/main.py": b"print('hi')\n",
    }  # fmt: skip
    ada.put(f"{filled_url}/files/src/main.py", b"changed")
    ada.put(f"{filled_url}/files/src/other.py", b"stays")
    assert ada.put(f"{filled_url}/archive", tar).status_code == 204
    assert ada.get(f"{filled_url}/files/src/main.py").content == b"print('hi')\n"
    assert ada.get(f"{filled_url}/files/src/other.py").content == b"stays"
    run = Run.objects.get(argv__0="unpack")
    assert (run.kind, run.argv, run.outcome) == ("file", ["unpack", "/workspace"], "ok")


def get_raw(client: ApiClient, url: str, **headers: str) -> Any:
    """Send a GET whose response is not compared with the media type that the OpenAPI document lists first."""
    return client.client.get(f"/api/v1/{url}", headers={"Authorization": f"Bearer {client.key}", **headers})


def test_an_archive_is_compressed_on_request(source: str, ada: ApiClient, filled_url: str) -> None:
    plain = read_content(ada.get(f"{filled_url}/archive?path=src"))
    for query, accept in (("&compression=gzip", "*/*"), ("", "application/gzip"), ("", "text/html, Application/X-GZIP;q=0.5")):
        response = get_raw(ada, f"{filled_url}/archive?path=src{query}", Accept=accept)
        assert (response["Content-Type"], response["Leasehold-Source"]) == ("application/gzip", source)
        assert response["Content-Disposition"] == 'attachment; filename="src.tar.gz"'
        assert "Content-Length" not in response
        assert gzip.decompress(read_content(response)) == plain
    for query, accept in (("&compression=none", "application/gzip"), ("", "application/gzip;q=0"), ("", "*/*")):
        response = get_raw(ada, f"{filled_url}/archive?path=src{query}", Accept=accept)
        assert (response["Content-Type"], read_content(response)) == ("application/x-tar", plain)


def test_a_compressed_archive_is_unpacked(ada: ApiClient, lease_url: str) -> None:
    parts = [pack_tar(a=b"1")[:700], pack_tar(a=b"1")[700:]]
    several_members = b"".join(map(gzip.compress, parts)) + bytes(512)
    for number, (body, headers) in enumerate((
        (gzip.compress(pack_tar(a=b"1")), {"content_type": "application/gzip"}),
        (gzip.compress(pack_tar(a=b"1")), {"content_type": "application/x-tar", "content_encoding": "gzip"}),
        (several_members, {"content_type": "application/x-gzip; charset=binary"}),
        (pack_tar(a=b"1"), {"content_type": "application/x-tar", "content_encoding": "identity"}),
    )):  # fmt: skip
        assert ada.put(f"{lease_url}/archive", body, **headers).status_code == 204, number
        assert ada.get(f"{lease_url}/files/a").content == b"1"
        assert ada.delete(f"{lease_url}/files/a").status_code == 204


def test_a_compressed_archive_that_is_invalid_or_too_large_is_refused(
    ada: ApiClient, lease_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, url = gzip.compress(pack_tar(a=b"1")), f"{lease_url}/archive"
    for body in (packed[:-1], packed[:40], b"", b"\x1f\x8b", packed + b"x", pack_tar(a=b"1"), gzip.compress(b"no tar")):
        assert_refused(ada, "PUT", url, body, 400, "body", content_type="application/gzip")
    assert_refused(ada, "PUT", url, packed, 415, "Content-Encoding", content_encoding="br")
    monkeypatch.setattr("leases.api.files.archives.MAX_ARCHIVE_BYTES", 1 << 20)
    bomb = gzip.compress(bytes(64 << 20))
    assert len(bomb) < 1 << 17
    assert_refused(ada, "PUT", url, bomb, 413, "body", content_type="application/gzip")


def test_an_archive_is_unpacked_into_the_agents_data_and_wakes_the_sandbox(ada: ApiClient, filled_url: str, evict) -> None:
    evict()
    assert ada.put(f"{filled_url}/archive?root=data", pack_tar(a=b"1", **{"memory/b": b"2"})).status_code == 204
    assert Sandbox.objects.get().state == "waiting"
    evict()
    assert ada.get(f"{filled_url}/files/memory/b?root=data").content == b"2"


def test_tars_of_other_programs_are_accepted(ada: ApiClient, lease_url: str) -> None:
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=form) as tar:
            member, content = file("./" + "/".join(["n" * 60] * 2), b"text")
            member.mtime = 1700000000.5 if form == tarfile.PAX_FORMAT else 1700000000
            tar.addfile(member, content)
        assert ada.put(f"{lease_url}/archive", out.getvalue()).status_code == 204
        assert ada.get(f"{lease_url}/files/{'/'.join(['n' * 60] * 2)}").content == b"text"


def build_tar(name: str, kind: bytes = tarfile.REGTYPE, target: str = "", **headers: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        member = other(name, kind, target)[0]
        member.pax_headers = headers
        tar.addfile(member)
    return out.getvalue()


INVALID_TARS = [
    b"", b"no tar", b"x" * 2000, b"\x1f\x8b" + bytes(600), pack_tar(a=b"x" * 2000)[:1000], pack_tar(a=b"x" * 2000)[:2560],
    build_tar("/etc/passwd"), build_tar("../x"), build_tar("a/../../x"), build_tar("a/" + "b" * 256),
    build_tar("a", tarfile.LNKTYPE, "../../etc/passwd"), build_tar("a", tarfile.LNKTYPE, "/etc/passwd"),
    build_tar("a", tarfile.CHRTYPE), build_tar("a", tarfile.FIFOTYPE), build_tar("a", comment="x" * (1 << 17)),
    build_tar("a", size="5"),
]  # fmt: skip


def test_an_invalid_tar_changes_nothing(ada: ApiClient, lease_url: str) -> None:
    for body in INVALID_TARS:
        assert_refused(ada, "PUT", f"{lease_url}/archive", body, 400)
    assert ada.put(f"{lease_url}/archive", bytes(1024)).status_code == 204  # without members
    assert [entry["name"] for entry in ada.get(f"{lease_url}/files").json()["entries"]] == ["config.json"]


def test_a_tar_with_too_many_members_is_refused(ada: ApiClient, lease_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandboxes.providers.tar_validation.MAX_MEMBERS", 2)
    assert_refused(ada, "PUT", f"{lease_url}/archive", pack_tar(a=b"", b=b"", c=b""), 413)
