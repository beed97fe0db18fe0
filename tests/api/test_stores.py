"""Agents reach the stores of their leases: chat history, artifacts, audit log, session index."""

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from django.conf import settings as configured
from django.db.models import F
from django.utils import timezone

from leases import sweeps
from leases.models import IdempotentRequest, Lease
from sandboxes import storage
from sandboxes.models import Sandbox
from sandboxes.storage.base import StoreError
from sandboxes.storage.memory import MemoryStore
from tests.api.conftest import ADA, ApiClient, expire_lease

pytestmark = pytest.mark.django_db

MESSAGE = {"role": "user", "content": "Good morning"}
ENTRY = {"action": "file.deleted", "path": "/workspace/x"}
WRITES: list[tuple[str, str, Any]] = [
    ("POST", "chat", MESSAGE),
    ("POST", "audit", ENTRY),
    ("PUT", "artifacts/a", b"x"),
    ("DELETE", "artifacts/a", None),
    ("PUT", "sessions/s", {}),
]
READS = ["chat", "audit", "artifacts", "sessions", "artifacts/a", "sessions/s"]


@pytest.fixture(params=["standard", "journaled"])
def mode(request: pytest.FixtureRequest, settings) -> str:
    settings.STORAGE_MODE = request.param
    return str(request.param)


@pytest.fixture
def memory_store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    store = MemoryStore()
    monkeypatch.setattr(storage, "get_store", lambda: store)
    return store


@pytest.fixture
def at(lease) -> Callable[[str], str]:
    return lambda path: f"leases/{lease['id']}/{path}"


def ended_ago(pk: str, ago: timedelta) -> None:
    ended = timezone.now() - ago
    Lease.objects.filter(pk=UUID(pk)).update(ended_at=ended)


# --- chat and audit -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize(("path", "said", "field"), [("chat", MESSAGE, "message"), ("audit", ENTRY, "entry")])
def test_what_is_appended_is_read_back(ada: ApiClient, at, path: str, said: dict[str, Any], field: str) -> None:
    said = said | {"content": [{"type": "text", "text": "ä\0"}, None, 1.5], "x": {"y": []}}
    answer = ada.post(at(path), said)
    shown = answer.json()
    assert (answer.status_code, shown[field]) == (201, said)
    assert shown["actor"].startswith("key ")
    assert ada.get(at(path)).json() == {"results": [shown], "next": None}
    assert ada.get(at(f"{path}/{shown['id']}")).json() == shown
    assert ada.get(at("chat" if path == "audit" else "audit")).json()["results"] == []


def test_content_may_be_null_but_not_missing(ada: ApiClient, at) -> None:
    assert ada.post(at("chat"), {"role": "assistant", "content": None, "tool_calls": []}).status_code == 201
    assert ada.post(at("chat"), {"role": "assistant"}).json()["field"] == "content"


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("order", ["newest", "oldest"])
@pytest.mark.parametrize("path", ["chat", "audit"])
def test_pages_of_events_follow_each_other(ada: ApiClient, at, path: str, order: str) -> None:
    for n in range(5):
        ada.post(at(path), MESSAGE | ENTRY | {"n": n})
    seen, following = [], at(f"{path}?limit=2&order={order}")
    while following:
        page = ada.get(following).json()
        assert 1 <= len(page["results"]) <= 2
        seen += [(event.get("message") or event["entry"])["n"] for event in page["results"]]
        following = page["next"]
    assert seen == ([4, 3, 2, 1, 0] if order == "newest" else [0, 1, 2, 3, 4])


@pytest.mark.usefixtures("mode")
def test_one_can_read_on_from_the_last_message_one_saw(ada: ApiClient, at) -> None:
    last = ada.post(at("chat"), MESSAGE).json()["id"]
    new = at(f"chat?order=oldest&cursor={last}")
    assert ada.get(new).json()["results"] == []
    following = ada.post(at("chat"), MESSAGE | {"content": "Is anybody there?"}).json()
    assert ada.get(new).json()["results"] == [following]


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("path", ["chat", "audit"])
def test_an_idempotency_key_appends_once(ada: ApiClient, at, path: str) -> None:
    answers = [ada.post(at(path), MESSAGE | ENTRY, idempotency_key="k1") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [201] * 3
    assert len({answer.content for answer in answers}) == 1
    assert len(ada.get(at(path)).json()["results"]) == 1
    ada.post(at(path), MESSAGE | ENTRY, idempotency_key="k2")
    assert len(ada.get(at(path)).json()["results"]) == 2


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        ("chat", {"content": "x"}, 400, "role"),
        ("chat", {"role": "", "content": "x"}, 400, "role"),
        ("chat", {"role": 5, "content": "x"}, 400, "role"),
        ("chat", {"role": "x" * 65, "content": "x"}, 400, "role"),
        ("chat", [], 400, ""),
        ("chat", b"{", 400, ""),
        ("chat", b'{"role": "user", "content": NaN}', 400, ""),
        ("chat", b'{"role": "user", "content": "\\ud800"}', 400, ""),
        ("chat", b'{"role": "user", "content": ' + b"[" * 200 + b"]" * 200 + b"}", 400, ""),
        ("chat", MESSAGE | {"x": "y" * (256 << 10)}, 413, ""),
        ("audit", {}, 400, "action"),
        ("audit", {"action": ["x"]}, 400, "action"),
        ("audit", {"action": "x" * 201}, 400, "action"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_bad_events(ada: ApiClient, at, path: str, body: Any, status: int, field: str) -> None:
    answer = ada.post(at(path), body, idempotency_key="k1")
    assert (answer.status_code, answer.json().get("field", "")) == (status, field)
    assert ada.get(at(path)).json()["results"] == []
    assert not IdempotentRequest.objects.filter(status_code__isnull=False, body__contains='"id": "0').exists()


def test_an_event_that_grows_when_it_is_written_down_is_refused(ada: ApiClient, at) -> None:
    floats = b",".join([b"1e22"] * 52_000)  # Python writes 1e+22
    answer = ada.post(at("chat"), b'{"role": "user", "content": [' + floats + b"]}")
    assert (answer.status_code, answer.json()["code"]) == (400, "store_refused")


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("order=up", "order"),
        ("limit=0", "limit"),
        ("limit=201", "limit"),
        ("limit=x", "limit"),
        ("cursor=x", "cursor"),
        ("cursor=%00", "cursor"),
        ("cursor=000000000000000001-000000000000000z-0000000001", "cursor"),
    ],
)
@pytest.mark.parametrize("path", ["chat", "audit"])
def test_bad_pages_of_events(ada: ApiClient, at, path: str, query: str, field: str) -> None:
    answer = ada.get(at(f"{path}?{query}"))
    assert (answer.status_code, answer.json()["field"]) == (400, field)


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("event_id", ["x", "%00", "..", "0" * 600, "000000000000000001-" + "0" * 16 + "-0000000001"])
@pytest.mark.parametrize("path", ["chat", "audit"])
def test_an_event_that_is_not_there(ada: ApiClient, at, path: str, event_id: str) -> None:
    assert ada.get(at(f"{path}/{event_id}")).status_code == 404


# --- artifacts ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("mode")
def test_an_artifact_comes_back_as_it_was_put(ada: ApiClient, at) -> None:
    content = bytes(range(256)) * 10_000  # more than is held in memory
    answer = ada.put(at("artifacts/map.png"), content, content_type="image/png")
    shown = answer.json()
    assert (answer.status_code, shown["name"], shown["media_type"]) == (201, "map.png", "image/png")
    assert shown["size_bytes"] == len(content)
    found = ada.get(at("artifacts/map.png"))
    assert b"".join(found.streaming_content) == content
    assert (found["Content-Type"], found["Content-Length"]) == ("image/png", str(len(content)))
    assert (found["ETag"], found["X-Content-Type-Options"]) == (f'"{shown["sha256"]}"', "nosniff")
    assert found["Content-Disposition"].startswith("attachment")
    assert ada.get(at("artifacts")).json() == {"results": [shown], "next": None}


@pytest.mark.usefixtures("mode")
def test_an_artifact_is_replaced_and_removed(ada: ApiClient, at) -> None:
    assert ada.put(at("artifacts/a"), b"old", content_type="text/plain").status_code == 201
    assert ada.put(at("artifacts/a"), b"n", content_type="text/plain; charset=utf-8").status_code == 200
    found = ada.get(at("artifacts/a"))
    assert (b"".join(found.streaming_content), found["Content-Type"]) == (b"n", "text/plain; charset=utf-8")
    assert ada.delete(at("artifacts/a")).status_code == 204
    assert ada.delete(at("artifacts/a")).status_code == 404
    assert ada.get(at("artifacts/a")).status_code == 404
    assert ada.get(at("artifacts")).json()["results"] == []


def test_an_artifact_without_a_media_type_is_octets(ada: ApiClient, at) -> None:
    assert ada.put(at("artifacts/a"), b"x", content_type="").json()["media_type"] == "application/octet-stream"


@pytest.mark.usefixtures("mode")
def test_pages_of_artifacts_are_by_name(ada: ApiClient, at) -> None:
    for name in "cab":
        ada.put(at(f"artifacts/{name}"), b"x")
    first = ada.get(at("artifacts?limit=2")).json()
    rest = ada.get(first["next"]).json()
    assert [[one["name"] for one in page["results"]] for page in (first, rest)] == [["a", "b"], ["c"]]
    assert rest["next"] is None


@pytest.mark.parametrize("name", [".hidden", "-", "a%20b", "%C3%A4", "a%00", "a%0A", "x" * 129, "%ED%A0%80"])
def test_bad_names(ada: ApiClient, at, name: str) -> None:
    for method, path in [("PUT", "artifacts"), ("GET", "artifacts"), ("DELETE", "artifacts")]:
        answer = ada(method, at(f"{path}/{name}"), b"")
        assert (answer.status_code, answer.json()["field"]) == (400, "name")
    for method in ("PUT", "GET"):
        answer = ada(method, at(f"sessions/{name}"), b"{}")
        assert (answer.status_code, answer.json()["field"]) == (400, "session_id")
    for path in ("artifacts", "sessions"):
        assert ada.get(at(f"{path}?cursor={name}")).json()["field"] == "cursor"
        assert ada.get(at(path)).json()["results"] == []


@pytest.mark.parametrize("kind", ["text", "text/html, text/plain", "a/b" * 100, "text/plain;\tx=y"])
def test_bad_media_types(ada: ApiClient, at, kind: str) -> None:
    answer = ada.put(at("artifacts/a"), b"x", content_type=kind)
    assert (answer.status_code, answer.json()["field"]) == (400, "Content-Type")


def test_an_artifact_that_is_too_large(ada: ApiClient, at) -> None:
    answer = ada.put(at("artifacts/a"), b"x" * ((64 << 20) + 1))
    assert (answer.status_code, answer.json()["code"]) == (413, "too_large")
    assert ada.get(at("artifacts")).json()["results"] == []


# --- sessions -----------------------------------------------------------------------------------------------------


def test_a_session_is_what_was_put_last(ada: ApiClient, at) -> None:
    ada.put(at("sessions/s1"), json.dumps({"title": "first"}).encode())
    answer = ada.put(at("sessions/s1"), json.dumps({"title": "ä", "turns": 3}).encode())
    shown = answer.json()
    assert (answer.status_code, shown["session"], shown["session_id"]) == (200, {"title": "ä", "turns": 3}, "s1")
    assert ada.get(at("sessions/s1")).json() == shown
    assert ada.get(at("sessions")).json() == {"results": [shown], "next": None}
    assert ada.get(at("sessions/s2")).status_code == 404


@pytest.mark.parametrize(
    ("body", "status"), [(b"[]", 400), (b"{", 400), (b'{"x": "' + b"y" * (64 << 10) + b'"}', 413)], ids=["list", "no", "large"]
)
def test_bad_sessions(ada: ApiClient, at, body: bytes, status: int) -> None:
    assert ada.put(at("sessions/s"), body).status_code == status
    assert ada.get(at("sessions/s")).status_code == 404


# --- whose, and until when ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path", "body"), [*WRITES, *[("GET", path, None) for path in READS]])
def test_another_keys_lease_is_not_there(
    ada: ApiClient, bob: ApiClient, operator: ApiClient, at, method: str, path: str, body: Any
) -> None:
    ada.put(at("artifacts/a"), b"x")
    ada.put(at("sessions/s"), b"{}")
    assert bob(method, at(path), body).json()["detail"] == "There is no such lease."
    assert ApiClient()(method, at(path), body).status_code == 401
    assert operator(method, at(path), body).status_code < 300


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("over", ["released", "run out"])
def test_an_ended_lease_is_read_but_not_written(ada: ApiClient, at, lease, over: str) -> None:
    for method, path, body in WRITES:
        if method != "DELETE":
            ada(method, at(path), body)
    before = [ada.get(at(path)).json() for path in ("chat", "audit", "artifacts", "sessions")]
    assert [len(page["results"]) for page in before] == [1, 1, 1, 1]
    if over == "released":
        ada.post(at("release"))
    else:
        expire_lease(lease["id"])
    for method, path, body in WRITES:
        answer = ada(method, at(path), body)
        assert (answer.status_code, answer.json()["code"]) == (410, "lease_ended")
        assert answer.json()["end_reason"] == ("released" if over == "released" else "ttl")
    assert [ada.get(at(path)).json() for path in ("chat", "audit", "artifacts", "sessions")] == before
    assert b"".join(ada.get(at("artifacts/a")).streaming_content) == b"x"


def test_the_next_lease_in_the_environment_starts_with_empty_stores(ada: ApiClient, at, ask) -> None:
    ada.post(at("chat"), MESSAGE)
    ada.post(at("release"))
    new = ada.post("leases", ask()).json()["id"]
    assert ada.get(f"leases/{new}/chat").json()["results"] == []
    assert len(ada.get(at("chat")).json()["results"]) == 1


@pytest.mark.usefixtures("mode")
def test_writing_starts_no_sandbox_and_renews_nothing(ada: ApiClient, at, lease) -> None:
    for method, path, body in WRITES:
        assert ada(method, at(path), body).status_code < 300
    now = ada.get(f"leases/{lease['id']}").json()
    assert (now["expires_at"], now["last_activity"]) == (lease["expires_at"], lease["last_activity"])
    assert not Sandbox.objects.exists()


@pytest.mark.usefixtures("mode")
def test_what_was_stored_is_kept_for_a_while_after_the_end(ada: ApiClient, at, lease, ask, now) -> None:
    for method, path, body in WRITES:
        if method != "DELETE":
            ada(method, at(path), body)
    other = ada.post("leases", ask(environment_id="game-2")).json()["id"]
    ada.post(f"leases/{other}/chat", MESSAGE)
    ada.post(at("release"))
    moment = timezone.now()
    ended_ago(lease["id"], configured.KEEP_STATE - timedelta(minutes=1))
    sweeps.prune_stores(now=moment)
    assert len(ada.get(at("chat")).json()["results"]) == 1
    ended_ago(lease["id"], configured.KEEP_STATE + timedelta(minutes=1))
    swept = sweeps.prune_stores(now=moment)
    assert swept.counts["stored entries removed"] >= 5
    assert swept.counts["bytes with them"] > 100
    assert not swept.failures
    assert [ada.get(at(path)).json()["results"] for path in ("chat", "audit", "artifacts", "sessions")] == [[]] * 4
    assert not any(UUID(lease["id"]).hex in key for key in storage.get_store().list(f"stores/{ADA}/"))
    assert len(ada.get(f"leases/{other}/chat").json()["results"]) == 1
    assert sweeps.prune_stores(now=moment).counts.get("stored entries removed", 0) == 0


def test_a_lease_that_is_due_but_has_not_been_swept_keeps_its_stores(ada: ApiClient, at, lease) -> None:
    ada.post(at("chat"), MESSAGE)
    Lease.objects.update(expires_at=F("expires_at") - timedelta(days=30), leased_at=F("leased_at") - timedelta(days=30))
    sweeps.prune_stores(now=timezone.now())
    assert len(ada.get(at("chat")).json()["results"]) == 1


# --- a store in trouble -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize(("method", "path", "body"), [*WRITES, *[("GET", path, None) for path in READS]])
def test_a_store_that_does_not_answer_is_unavailable(
    ada: ApiClient, at, memory_store: MemoryStore, method: str, path: str, body: Any, caplog
) -> None:
    for call in ("get", "set", "page", "upload", "download"):
        memory_store.fail(call, StoreError("memory", call, "disk /dev/sdz is gone", key="secret"))
    answer = ada(method, at(path), body)
    assert (answer.status_code, answer.json()["code"], answer["Retry-After"]) == (503, "store_unavailable", "5")
    assert "sdz" not in answer.content.decode()
    assert "disk /dev/sdz is gone" in caplog.text


@pytest.mark.usefixtures("mode")
def test_after_a_failed_append_its_idempotency_key_is_free(ada: ApiClient, at, memory_store: MemoryStore) -> None:
    with memory_store.fail("set", StoreError("memory", "set", "away")):
        assert ada.post(at("chat"), MESSAGE, idempotency_key="k1").status_code == 503
    assert ada.post(at("chat"), MESSAGE, idempotency_key="k1").status_code == 201
    assert len(ada.get(at("chat")).json()["results"]) == 1
