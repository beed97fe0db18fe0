"""What the KV store does when the API is slow, full, wrong or unkind. That it keeps values: tests/conformance/test_store.py."""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sandboxes.storage.base import StoreError, StoreRefused
from sandboxes.storage.cloudflare_kv import MAX_ATTEMPTS, RETRY_DEADLINE_SECONDS, CloudflareKVStore
from tests.support.loopback import Responder, ScriptedServer, drop_connection, respond, run_scripted_server, stall_response

TOKEN = "a-token-that-nobody-may-see"
NOW = 1_795_262_400.0  # Sat, 21 Nov 2026 12:00:00 GMT
BASE = "/accounts/acc/storage/kv/namespaces/ns"


@dataclass
class Clock:
    """Sleeping takes no time here, and is remembered."""

    now: float = NOW
    slept: list[float] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with run_scripted_server() as server:
        yield server


@pytest.fixture
def store(server: ScriptedServer, clock: Clock) -> CloudflareKVStore:
    return kv(server, clock)


def kv(server: ScriptedServer, clock: Clock, **more: Any) -> CloudflareKVStore:
    return CloudflareKVStore(
        "ns",
        account_id="acc",
        api_token=TOKEN,
        api=server.url,
        sleep=clock.sleep,
        clock=lambda: clock.now,
        **{"timeout": (20, 20)} | more,
    )


def good(result: object = None, status: int = 200, **more: object) -> Responder:
    body = {"success": True, "errors": [], "messages": [], "result": result, **more}
    return respond(status, json.dumps(body).encode(), Content_Type="application/json")


def bad(status: int, code: int, **headers: str) -> Responder:
    body = {"success": False, "errors": [{"code": code, "message": "no"}], "messages": [], "result": None}
    return respond(status, json.dumps(body).encode(), Content_Type="application/json", **headers)


def keys(*names: str, cursor: str = "") -> Responder:
    return good([{"name": name} for name in names], result_info={"count": len(names), "cursor": cursor})


# --- how often, and how long ----------------------------------------------------------------------------------------


def test_a_write_that_comes_too_soon_is_made_again_after_as_long_as_was_said(
    server: ScriptedServer, store: CloudflareKVStore, clock: Clock
) -> None:
    server.script = [bad(429, 10048, Retry_After="3"), bad(429, 10048), good()]
    store.set("k", b"value")
    assert clock.slept == [3, 2]
    assert [seen.body for seen in server.seen] == [b"value"] * 3


def test_a_date_says_too_when_to_come_again(server: ScriptedServer, store: CloudflareKVStore, clock: Clock) -> None:
    server.script = [bad(429, 10048, Retry_After="Sat, 21 Nov 2026 12:00:07 GMT"), bad(429, 10048, Retry_After="soon"), good()]
    store.set("k", b"value")
    assert clock.slept == [7, 2]


def test_a_write_that_always_comes_too_soon_is_given_up_in_bounded_time(
    server: ScriptedServer, store: CloudflareKVStore, clock: Clock
) -> None:
    server.script = [bad(429, 10048)]
    with pytest.raises(StoreError, match=r"set of 'k': failed after 5 attempts; .*429"):
        store.set("k", b"value")
    assert len(server.seen) == MAX_ATTEMPTS
    assert sum(clock.slept) <= RETRY_DEADLINE_SECONDS


def test_nobody_waits_longer_than_a_call_may_take(server: ScriptedServer, store: CloudflareKVStore, clock: Clock) -> None:
    server.script = [bad(429, 10048, Retry_After="3600")]
    with pytest.raises(StoreError, match="failed after 1 attempts"):
        store.set("k", b"value")
    assert clock.slept == []


@pytest.mark.parametrize(
    "fault",
    [bad(502, 1), respond(200, b"val", length=9), drop_connection, stall_response],
    ids=["502", "cut", "closed", "stall"],
)
def test_a_fault_is_tried_again_and_then_a_store_error(server: ScriptedServer, clock: Clock, fault: Responder) -> None:
    server.script = [fault, respond(200, b"value")]
    store = kv(server, clock, timeout=(20, 0.3 if fault is stall_response else 20))
    assert store.get("k") == b"value"
    server.script = [fault]
    with pytest.raises(StoreError, match="cloudflare_kv: get of 'k': failed after 5 attempts"):
        store.get("k")
    assert sum(clock.slept) <= RETRY_DEADLINE_SECONDS + 1


def test_a_server_that_is_not_there_is_a_store_error(clock: Clock) -> None:
    with run_scripted_server(stall_response) as server:
        pass
    with pytest.raises(StoreError, match="refused"):
        kv(server, clock).set("k", b"")


# --- who may --------------------------------------------------------------------------------------------------------


def test_the_token_is_in_one_header_alone_and_in_no_error(
    server: ScriptedServer, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login someone password else\n")
    monkeypatch.setenv("NETRC", str(netrc))
    store = kv(server, clock)
    for answer in (bad(403, 10000), bad(401, 10000), bad(500, 1), drop_connection, respond(200, b"no JSON"), bad(404, 10013)):
        server.script = [answer]
        with pytest.raises(StoreError) as failed:
            store.remove("k")
        for shown in (str(failed.value), repr(failed.value), repr(store), repr(vars(store))):
            assert TOKEN not in shown
    for seen in server.seen:
        assert seen.headers.pop("Authorization") == f"Bearer {TOKEN}"
        assert TOKEN not in f"{seen.path} {seen.headers} {seen.body!r}"


def test_a_token_that_is_refused_is_said_so_at_once(server: ScriptedServer, store: CloudflareKVStore, clock: Clock) -> None:
    server.script = [bad(403, 10000)]
    with pytest.raises(StoreError, match="rejects this token"):
        store.get("k")
    assert len(server.seen) == 1


def test_a_redirect_is_not_followed(server: ScriptedServer, store: CloudflareKVStore) -> None:
    server.script = [respond(302, Location=f"{server.url}/elsewhere"), respond(200, b"value")]
    with pytest.raises(StoreError, match="302"):
        store.get("k")
    assert len(server.seen) == 1


def test_a_namespace_that_is_not_there_is_no_missing_key(server: ScriptedServer, store: CloudflareKVStore) -> None:
    server.script = [bad(404, 10009)]
    assert store.get("k") is None
    server.script = [bad(404, 10013)]
    with pytest.raises(StoreError, match=r"404, codes \[10013\]"):
        store.get("k")
    server.script = [respond(404, b"page not found")]
    with pytest.raises(StoreError, match="404"):
        store.get("k")


# --- what is sent ---------------------------------------------------------------------------------------------------


def test_what_the_api_would_not_take_is_refused_before_anything_is_sent(
    server: ScriptedServer, store: CloudflareKVStore
) -> None:
    for key in (".", "..", "", "x" * 513):
        for act in (store.get, store.has, store.remove, lambda key: store.set(key, b"x"), lambda key: store.remove_many([key])):
            with pytest.raises(StoreRefused):
                act(key)
    with pytest.raises(StoreRefused, match=r"set of 'k': the value has 26214401 bytes; the limit is 26214400"):
        store.set("k", bytes((25 << 20) + 1))
    with pytest.raises(StoreRefused, match=r"upload of 'k'"):
        store.upload("k", io.BytesIO(bytes((25 << 20) + 1)))
    assert server.seen == []


def test_a_key_is_one_segment_of_the_url_and_behind_the_prefix(server: ScriptedServer, clock: Clock) -> None:
    server.script = [good()]
    store = kv(server, clock, prefix="ours/")
    store.set("a b/ü?#%2F", b"x")
    store.set("..", b"x")  # with the prefix it is an ordinary key
    assert [seen.path for seen in server.seen] == [
        f"{BASE}/values/ours%2Fa%20b%2F%C3%BC%3F%23%252F",
        f"{BASE}/values/ours%2F..",
    ]
    assert server.seen[0].headers["Content-Type"] == "application/octet-stream"
    with pytest.raises(StoreRefused):
        store.set("x" * 508, b"x")


def test_has_asks_for_names_and_never_for_a_value(server: ScriptedServer, store: CloudflareKVStore) -> None:
    server.script = [keys("key", "key/more"), keys("key/more")]
    assert store.has("key")
    assert not store.has("key")
    assert server.calls == [f"GET {BASE}/keys?prefix=key&limit=10"] * 2


def test_a_page_smaller_than_theirs_goes_on_where_it_ended(server: ScriptedServer, store: CloudflareKVStore) -> None:
    theirs = keys("a", "b", "c", "d", "e", cursor="next")
    server.script = [theirs, theirs, keys("f"), keys("f")]
    first = store.page("", limit=2)
    assert [entry.key for entry in first.entries] == ["a", "b"]
    assert first.entries[0].size is None
    second = store.page("", cursor=first.next_cursor, limit=3)
    assert [entry.key for entry in second.entries] == ["c", "d", "e"]
    third = store.page("", cursor=second.next_cursor, limit=3)
    assert ([entry.key for entry in third.entries], third.next_cursor) == (["f"], "")
    assert [path.partition("?")[2] for path in server.calls] == ["limit=10", "limit=10", "limit=10&cursor=next"]


def test_a_page_without_keys_is_not_the_end_while_there_is_a_cursor(server: ScriptedServer, store: CloudflareKVStore) -> None:
    server.script = [keys(cursor="c1"), keys(cursor="c2"), keys("a")]
    assert not store.is_empty()
    server.script = [keys(cursor="c1")]
    with pytest.raises(StoreError, match="returned the same cursor again"):
        store.page()


@pytest.mark.parametrize("cursor", ["junk", "[1, 2]", "{}", '["a"]'])
def test_a_cursor_from_elsewhere_is_refused(server: ScriptedServer, store: CloudflareKVStore, cursor: str) -> None:
    with pytest.raises(StoreRefused, match="cursor"):
        store.page(cursor=cursor)


def test_keys_that_a_removal_of_many_left_are_removed_alone(server: ScriptedServer, clock: Clock) -> None:
    server.script = [good({"successful_key_count": 2, "unsuccessful_keys": ["ours/b"]}), good()]
    kv(server, clock, prefix="ours/").remove_many(["a", "b", "c"])
    assert server.calls == [f"POST {BASE}/bulk/delete", f"DELETE {BASE}/values/ours%2Fb"]
    assert json.loads(server.seen[0].body) == ["ours/a", "ours/b", "ours/c"]


@pytest.mark.parametrize("body", [b"", b"[]", b'{"result": []}', b'{"success": true}', b'{"success": true, "result": [1]}'])
def test_a_listing_that_makes_no_sense_is_a_store_error(server: ScriptedServer, store: CloudflareKVStore, body: bytes) -> None:
    server.script = [respond(200, body)]
    with pytest.raises(StoreError, match="the response is"):
        store.page()


def test_a_range_is_cut_from_the_value(server: ScriptedServer, store: CloudflareKVStore) -> None:
    server.script = [respond(200, b"0123456789")]
    target = io.BytesIO()
    assert store.download("k", target, start=3, length=4)
    assert target.getvalue() == b"3456"
