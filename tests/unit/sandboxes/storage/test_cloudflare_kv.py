"""Cloudflare KV store against slow, rate-limiting, failing and invalid responses of the API.

Its storage semantics are tested in tests/conformance/test_store.py."""

import io
import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sandboxes.storage.base import StoreError, StoreRefused
from sandboxes.storage.cloudflare_kv import MAX_ATTEMPTS, RETRY_DEADLINE_SECONDS, CloudflareKVStore
from tests.emulators.base import UNREADABLE_ANSWERS
from tests.support.servers.loopback import (
    Responder,
    ScriptedServer,
    drop_connection,
    respond,
    run_scripted_server,
    stall_response,
)
from tests.support.storage.stores import KEY_METHODS, METHODS

TOKEN = "a-token-that-nobody-may-see"
NOW = 1_795_262_400.0  # Sat, 21 Nov 2026 12:00:00 GMT
BASE = "/accounts/acc/storage/kv/namespaces/ns"


@dataclass
class FakeClock:
    """Simulated clock: sleeping takes no time and is recorded."""

    now: float = NOW
    slept: list[float] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(server: ScriptedServer, clock: FakeClock) -> CloudflareKVStore:
    return kv(server, clock)


def kv(server: ScriptedServer, clock: FakeClock, **options: Any) -> CloudflareKVStore:
    options: dict[str, Any] = {"timeout": (20, 20), "sleep": clock.sleep, "clock": lambda: clock.now} | options
    return CloudflareKVStore("ns", account_id="acc", api_token=TOKEN, api=server.url, **options)


def success(result: object = None, status: int = 200, **options: object) -> Responder:
    body = {"success": True, "errors": [], "messages": [], "result": result, **options}
    return respond(status, json.dumps(body).encode(), Content_Type="application/json")


def failure(status: int, code: int, **headers: str) -> Responder:
    body = {"success": False, "errors": [{"code": code, "message": "no"}], "messages": [], "result": None}
    return respond(status, json.dumps(body).encode(), Content_Type="application/json", **headers)


def keys(*names: str, cursor: str = "") -> Responder:
    return success([{"name": name} for name in names], result_info={"count": len(names), "cursor": cursor})


# --- retries ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("retry_after", "seconds"), [("3", 3), ("Sat, 21 Nov 2026 12:00:07 GMT", 7), ("soon", 1)], ids=["3 s", "date", "invalid"]
)
def test_rate_limited_write_is_retried_after_retry_after(
    server: ScriptedServer, store: CloudflareKVStore, clock: FakeClock, retry_after: str, seconds: int
) -> None:
    server.script = [
        failure(429, 10048, Retry_After=retry_after, Date="Sat, 21 Nov 2026 12:00:00 GMT"),
        failure(429, 10048),
        success(),
    ]
    store.set("k", b"value")
    assert clock.slept == [seconds, 2]
    assert [request.body for request in server.seen] == [b"value"] * 3


@pytest.mark.parametrize(("headers", "attempts"), [({}, MAX_ATTEMPTS), ({"Retry_After": "3600"}, 1)], ids=["none", "too late"])
def test_persistent_rate_limit_fails_in_bounded_time(
    server: ScriptedServer, store: CloudflareKVStore, clock: FakeClock, headers: dict[str, str], attempts: int
) -> None:
    server.script = [failure(429, 10048, **headers)]
    with pytest.raises(StoreError, match=rf"set of 'k': failed after {attempts} attempts; .*429"):
        store.set("k", b"value")
    assert (len(server.seen), len(clock.slept)) == (attempts, attempts - 1)
    assert sum(clock.slept) <= RETRY_DEADLINE_SECONDS


@pytest.mark.parametrize(
    "fault",
    [failure(502, 1), respond(200, b"val", length=9), drop_connection, stall_response],
    ids=["502", "cut", "closed", "stall"],
)
def test_fault_is_retried_then_raises_store_error(server: ScriptedServer, clock: FakeClock, fault: Responder) -> None:
    server.script = [fault, respond(200, b"value")]
    store = kv(server, clock, timeout=(20, 0.3 if fault is stall_response else 20))
    assert store.get("k") == b"value"
    server.script = [fault]
    with pytest.raises(StoreError, match="cloudflare_kv: get of 'k': failed after 5 attempts"):
        store.get("k")
    assert sum(clock.slept) <= RETRY_DEADLINE_SECONDS + 1


def test_refused_connection_raises_store_error(clock: FakeClock) -> None:
    with run_scripted_server(stall_response) as server:
        pass
    with pytest.raises(StoreError, match="refused"):
        kv(server, clock).set("k", b"")


# --- authentication ---------------------------------------------------------------------------------------------


def test_token_is_only_in_the_authorization_header(
    server: ScriptedServer, clock: FakeClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login someone password else\n")
    monkeypatch.setenv("NETRC", str(netrc))
    store = kv(server, clock)
    statuses = [failure(*error) for error in ((403, 10000), (401, 10000), (500, 1), (404, 10013))]
    for response in (*statuses, drop_connection, respond(200, b"no JSON")):
        server.script = [response]
        with pytest.raises(StoreError) as failed:
            store.remove("k")
        for text in (str(failed.value), repr(failed.value), repr(store), repr(vars(store))):
            assert TOKEN not in text
    for request in server.seen:
        assert request.headers.pop("Authorization") == f"Bearer {TOKEN}"
        assert TOKEN not in f"{request.path} {request.headers} {request.body!r}"


def test_rejected_token_and_redirect_fail_without_retry(server: ScriptedServer, store: CloudflareKVStore) -> None:
    for response, message in (failure(403, 10000), "rejects this token"), (respond(302, Location=server.url), "302"):
        server.script, server.seen = [response, respond(200, b"value")], []
        with pytest.raises(StoreError, match=message):
            store.get("k")
        assert len(server.seen) == 1


def test_missing_namespace_is_distinguished_from_missing_key(server: ScriptedServer, store: CloudflareKVStore) -> None:
    server.script = [failure(404, 10009)]
    assert store.get("k") is None
    for response, message in (failure(404, 10013), r"404, codes \[10013\]"), (respond(404, b"page not found"), "404"):
        server.script = [response]
        with pytest.raises(StoreError, match=message):
            store.get("k")


# --- requests -----------------------------------------------------------------------------------------------------


def test_values_and_keys_beyond_the_limits_are_refused_before_a_request(
    server: ScriptedServer, store: CloudflareKVStore
) -> None:
    for key in (".", "..", "", "x" * 513):
        for act in KEY_METHODS.values():
            with pytest.raises(StoreRefused):
                act(store, key)
    with pytest.raises(StoreRefused, match=r"set of 'k': the value has 26214401 bytes; the limit is 26214400"):
        store.set("k", bytes((25 << 20) + 1))
    with pytest.raises(StoreRefused, match=r"upload of 'k'"):
        store.upload("k", io.BytesIO(bytes((25 << 20) + 1)))
    assert server.seen == []


def test_a_key_is_one_segment_of_the_url_and_behind_the_prefix(server: ScriptedServer, clock: FakeClock) -> None:
    server.script = [success()]
    store = kv(server, clock, prefix="ours/")
    store.set("a b/ü?#%2F", b"x")
    store.set("..", b"x")  # valid with the prefix
    paths = ["ours%2Fa%20b%2F%C3%BC%3F%23%252F", "ours%2F.."]
    assert [request.path for request in server.seen] == [f"{BASE}/values/{path}" for path in paths]
    assert server.seen[0].headers["Content-Type"] == "application/octet-stream"
    with pytest.raises(StoreRefused):
        store.set("x" * 508, b"x")


def test_has_lists_keys_and_fetches_no_value(server: ScriptedServer, store: CloudflareKVStore) -> None:
    server.script = [keys("key", "key/more"), keys("key/more")]
    assert store.has("key")
    assert not store.has("key")
    assert server.calls == [f"GET {BASE}/keys?prefix=key&limit=10"] * 2


def test_page_smaller_than_the_api_page_continues_where_it_ended(server: ScriptedServer, store: CloudflareKVStore) -> None:
    api_page = keys("a", "b", "c", "d", "e", cursor="next")
    server.script = [api_page, api_page, keys("f"), keys("f")]
    first = store.page("", limit=2)
    assert [entry.key for entry in first.entries] == ["a", "b"]
    assert first.entries[0].size is None
    second = store.page("", cursor=first.next_cursor, limit=3)
    assert [entry.key for entry in second.entries] == ["c", "d", "e"]
    third = store.page("", cursor=second.next_cursor, limit=3)
    assert ([entry.key for entry in third.entries], third.next_cursor) == (["f"], "")
    assert [path.partition("?")[2] for path in server.calls] == ["limit=10", "limit=10", "limit=10&cursor=next"]


def test_empty_api_page_with_a_cursor_is_not_the_end(server: ScriptedServer, store: CloudflareKVStore) -> None:
    server.script = [keys(cursor="c1"), keys(cursor="c2"), keys("a")]
    assert not store.is_empty()
    server.script = [keys(cursor="c1")]
    with pytest.raises(StoreError, match="returned the same cursor again"):
        store.page()


def test_invalid_cursor_is_refused(store: CloudflareKVStore) -> None:
    for cursor in ("junk", "[1, 2]", "{}", '["a"]'):
        with pytest.raises(StoreRefused, match="cursor"):
            store.page(cursor=cursor)


def test_keys_that_a_batch_did_not_remove_are_removed_singly(server: ScriptedServer, clock: FakeClock) -> None:
    server.script = [success({"successful_key_count": 2, "unsuccessful_keys": ["ours/b"]}), success()]
    kv(server, clock, prefix="ours/").remove_many(["a", "b", "c"])
    assert server.calls == [f"POST {BASE}/bulk/delete", f"DELETE {BASE}/values/ours%2Fb"]
    assert json.loads(server.seen[0].body) == ["ours/a", "ours/b", "ours/c"]


def test_invalid_listing_raises_store_error(server: ScriptedServer, store: CloudflareKVStore) -> None:
    for body in (b"", b"[]", b'{"result": []}', b'{"success": true}', b'{"success": true, "result": [1]}'):
        server.script = [respond(200, body)]
        with pytest.raises(StoreError, match="the response is"):
            store.page()


@pytest.mark.parametrize("body", [answer.body for answer in UNREADABLE_ANSWERS.values()])
@pytest.mark.parametrize("method", ["set", "has", "remove", "remove_many", "upload", "page"])
def test_answer_that_cannot_be_read_is_a_store_error(
    server: ScriptedServer, store: CloudflareKVStore, method: str, body: bytes
) -> None:
    server.script = [respond(200, body)]
    with pytest.raises(StoreError, match=method):
        METHODS[method](store, "k")


@pytest.mark.parametrize("result", ["text", [1], {"unsuccessful_keys": 1}, {"unsuccessful_keys": [1]}])
def test_result_of_another_form_raises_no_other_error(server: ScriptedServer, store: CloudflareKVStore, result: Any) -> None:
    server.script = [success(result)]
    for method in ("set", "has", "remove", "remove_many", "page"):
        with suppress(StoreError):
            METHODS[method](store, "k")
    assert len(server.seen) >= 5


def test_range_is_cut_from_the_value(server: ScriptedServer, store: CloudflareKVStore) -> None:
    server.script = [respond(200, b"0123456789")]
    target = io.BytesIO()
    assert store.download("k", target, start=3, length=4)
    assert target.getvalue() == b"3456"
