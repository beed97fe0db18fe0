"""Conformance suite of the key-value stores.

Stores that need a server share it with all other tests, each under a key prefix of its own. .ci/services starts the servers and
sets the environment variables."""

import io
import os
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
import requests
from requests.adapters import HTTPAdapter

from sandboxes.storage.base import Entry, KeyValueStore, StoreError, StoreRefused
from sandboxes.storage.cloudflare_kv import DEFAULT_API_URL, CloudflareKVStore
from sandboxes.storage.filesystem import FilesystemStore
from sandboxes.storage.memory import MemoryStore
from sandboxes.storage.s3 import S3Store
from tests.conftest import run_in_threads
from tests.support.servers.services import require_environment, require_s3
from tests.support.storage.stores import KEY_METHODS, METHODS, keep_none

MIB = 1 << 20
PLAIN_KEYS = [
    "a/b", "a/b.c/d", "a0", ".hidden", "did:plc:ä/ü", "sp ace", "p+q", "%2F", "=", "'\"<>&", "q?x=1&y#z", "é", "\uffff", "😀",
]  # fmt: skip
DIRECTORY_KEYS = ["a", "a+b", "a/b/c", "a/", "a//b", "/lead", "//", "a.value", "x" * 400, "x" * 64, "x" * 64 + "/y", "x" * 65]
DOT_KEYS = ["a/..", "../x", "a/./b"]
CLIENTS: dict[str, Any] = {}
CONTROL_KEYS = ["tab\there", "line\nbreak", "return\rhere", "\x01", "\x7f"]


@dataclass
class StoreCase:
    """A store under test and its properties."""

    kind: str
    store: KeyValueStore
    keys: list[str]
    refused: list[str]


def s3(kind: str) -> S3Store:
    url, bucket, key_id, secret = require_s3("TEST_R2_URL" if kind == "r2" else "TEST_S3_URL")
    store = S3Store(bucket, endpoint=url, access_key_id=key_id, secret_access_key=secret, prefix=f"t-{uuid4().hex}/")
    store.client = CLIENTS.setdefault(kind, store.client)  # creating a client takes longer than most of these tests
    return store


def kv() -> CloudflareKVStore:
    url, namespace = require_environment("stores", "TEST_KV_URL", "TEST_KV_NAMESPACE")

    class Local(HTTPAdapter):
        """Redirects requests to the local API server, whose paths have no account."""

        def send(self, request: requests.PreparedRequest, *args: Any, **options: Any) -> requests.Response:
            assert request.url
            request.url = request.url.replace(f"{DEFAULT_API_URL}/accounts/local", url)
            return super().send(request, *args, **options)

    def session() -> requests.Session:
        session = requests.Session()
        session.mount(f"https://{urlsplit(DEFAULT_API_URL).hostname}/", Local(pool_maxsize=32))
        return session

    return CloudflareKVStore(namespace, account_id="local", api_token="any", prefix=f"t-{uuid4().hex}/", session=session)


def case_fixture(*kinds: str) -> Any:
    @pytest.fixture(params=kinds)
    def fixture(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreCase]:
        kind, all_keys = request.param, PLAIN_KEYS + DIRECTORY_KEYS
        if kind == "filesystem":
            yield StoreCase(kind, FilesystemStore(tmp_path / "store"), all_keys + DOT_KEYS + CONTROL_KEYS, [])
            assert {path.name for path in tmp_path.iterdir()} <= {"store"}  # no key writes outside the root
        elif kind == "memory":
            yield StoreCase(kind, MemoryStore(), all_keys + DOT_KEYS + CONTROL_KEYS, [])
        else:
            case = {
                "r2": lambda: StoreCase(kind, s3(kind), all_keys, DOT_KEYS + CONTROL_KEYS),
                # SeaweedFS stores objects as files: it loses one of a and a/b, and sorts a+b after a/b.
                "seaweedfs": lambda: StoreCase(kind, s3(kind), PLAIN_KEYS, DOT_KEYS + CONTROL_KEYS),
                "kv": lambda: StoreCase(kind, kv(), all_keys + DOT_KEYS + CONTROL_KEYS, []),
            }[kind]()
            yield case
            case.store.clear()

    return fixture


case = case_fixture("filesystem", "memory", "r2", "kv", "seaweedfs")
streaming_case = case_fixture("filesystem", "r2", "seaweedfs")
kv_case = case_fixture("kv")
s3_case = case_fixture("r2", "seaweedfs")
multipart_case = case_fixture("seaweedfs")  # wrangler's R2 cannot list unfinished uploads
quick_case = case_fixture("filesystem", "memory", "seaweedfs")


@pytest.fixture
def store(case: StoreCase) -> KeyValueStore:
    return case.store


class GeneratedFile(io.RawIOBase):
    """A file generated while it is read, in distinct blocks. Some reads are short."""

    BLOCK = 4096

    def __init__(self, size: int) -> None:
        self.size, self.at = size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.size}[whence]
        return self.at

    def read(self, size: int = -1) -> bytes:
        size = min(self.size - self.at, size if size >= 0 else self.size, 3 * MIB)
        first, skipped = divmod(self.at, self.BLOCK)
        numbers = range(first, first + size // self.BLOCK + 2)
        self.at += size
        return b"".join(number.to_bytes(8, "big") * (self.BLOCK // 8) for number in numbers)[skipped : skipped + size]


class ComparingTarget(io.RawIOBase):
    """A write target that stores nothing and compares the content with an expected file."""

    def __init__(self, expected: GeneratedFile) -> None:
        self.expected = expected

    def write(self, content: Any) -> int:
        expected = b""
        while len(expected) < len(content):
            expected += self.expected.read(len(content) - len(expected))
        assert expected == content
        return len(content)


@contextmanager
def assert_peak_memory_below(limit: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


# --- values -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [b"", b"\x00\xff\r\n", bytes(range(256)) * 999], ids=["empty", "binary", "256 KB"])
def test_set_value_is_returned_unchanged_until_removed(store: KeyValueStore, value: bytes) -> None:
    store.set("a/b", b"something else")
    store.set("a/b", value)
    assert store.get("a/b") == value
    assert store.has("a/b")
    for _ in range(2):  # remove is idempotent
        store.remove("a/b")
        assert store.is_empty()


def test_missing_key_is_none(store: KeyValueStore) -> None:
    assert store.get("k") is None
    assert not store.has("k")
    assert not store.download("k", io.BytesIO())
    assert not store.download("k", io.BytesIO(), start=1, length=0)
    assert store.is_empty()
    assert store.size() == 0


def test_has_does_not_fetch_the_value_or_match_a_prefix(store: KeyValueStore) -> None:
    store.set("big", b"x" * 8 * MIB)
    assert store.has("big")  # opens the connection
    with assert_peak_memory_below(MIB):
        assert store.has("big")
    assert not store.has("bi")  # a prefix


def test_upload_starts_at_the_file_position_and_keeps_the_file_open(store: KeyValueStore, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("source") / "file"
    path.write_bytes(b"head|rest of it")
    with path.open("rb") as source:
        source.seek(5)
        store.upload("k", source)
        assert not source.closed
    store.upload("none left", io.BytesIO())
    assert store.get("k") == b"rest of it"
    assert store.get("none left") == b""


RANGES: list[tuple[int, int | None]] = [(0, None), (0, 3), (4, None), (4, 2), (9, 5), (10, None), (11, 7), (3, 0)]


@pytest.mark.parametrize("value", [b"0123456789", b""], ids=["ten bytes", "empty"])
def test_range_returns_exactly_its_bytes(store: KeyValueStore, value: bytes) -> None:
    store.set("k", value)
    for start, length in RANGES:
        target = io.BytesIO()
        assert store.download("k", target, start=start, length=length)
        assert target.getvalue() == value[start : None if length is None else start + length]
    for start, length in ((-1, None), (0, -1)):
        with pytest.raises(StoreRefused):
            store.download("k", io.BytesIO(), start=start, length=length)


def test_large_value_is_streamed(streaming_case: StoreCase) -> None:
    store, size = streaming_case.store, 50 * MIB + 12345
    limit = 4 * MIB if streaming_case.kind == "filesystem" else 40 * MIB  # two parts in transfer, and one being read
    store.set("k", b"small")
    with assert_peak_memory_below(limit + 4 * MIB):  # memory of the generated source
        store.upload("k", GeneratedFile(size))  # type: ignore[arg-type]
    assert next(store.entries()).size == size
    with assert_peak_memory_below(limit):
        assert store.download("k", ComparingTarget(GeneratedFile(size)))  # type: ignore[arg-type]
    part = GeneratedFile(size)
    part.seek(30 * MIB)
    assert store.download("k", ComparingTarget(part), start=30 * MIB, length=9 * MIB)  # type: ignore[arg-type]
    assert part.tell() == 39 * MIB


def test_failing_source_keeps_the_old_value(store: KeyValueStore) -> None:
    class Broken(GeneratedFile):
        def read(self, size: int = -1) -> bytes:
            if self.at > 9 * MIB:
                raise OSError("the disk is gone")
            return super().read(size)

    store.set("k", b"old")
    with pytest.raises(StoreError, match=r"upload of 'k': .*the disk is gone"):
        store.upload("k", Broken(20 * MIB))  # type: ignore[arg-type]
    assert store.get("k") == b"old"
    assert list(store.list()) == ["k"]


def test_failing_target_raises_store_error(store: KeyValueStore) -> None:
    store.set("k", b"value")
    with Path("/dev/full").open("wb", buffering=0) as target, pytest.raises(StoreError, match="No space left"):
        store.download("k", target)


def test_value_of_the_maximum_size_is_stored(kv_case: StoreCase) -> None:
    assert kv_case.store.max_value_bytes == 25 * MIB
    kv_case.store.set("k", bytes(25 * MIB))
    target = io.BytesIO()
    assert kv_case.store.download("k", target, start=25 * MIB - 2)
    assert target.getvalue() == bytes(2)


def test_old_unfinished_upload_is_aborted(multipart_case: StoreCase) -> None:
    store, now = multipart_case.store, datetime.now(UTC)
    assert isinstance(store, S3Store)
    store.client().create_multipart_upload(Bucket=store.bucket, Key=f"{store.prefix}unfinished")
    assert store.is_empty()
    assert store.sweep_leftovers(now - timedelta(hours=1), find_kept=keep_none) == 0
    assert store.sweep_leftovers(now + timedelta(hours=1), find_kept=lambda keys: {*keys} & {"unfinished"}) == 0
    assert store.sweep_leftovers(now + timedelta(hours=1), find_kept=keep_none) == 1
    assert store.sweep_leftovers(now + timedelta(hours=1), find_kept=keep_none) == 0


def test_missing_bucket_and_wrong_keys_are_reported(s3_case: StoreCase) -> None:
    working = s3_case.store
    assert isinstance(working, S3Store)
    missing_bucket = S3Store("no-such-bucket", endpoint=working.endpoint, access_key_id="-", secret_access_key="-")
    missing_bucket.client = working.client
    wrong_keys = S3Store(working.bucket, endpoint=working.endpoint, access_key_id="test-key", secret_access_key="wrong")
    for method in ("get", "has", "set", "page"):
        with pytest.raises(StoreError, match="bucket 'no-such-bucket' does not exist"):
            METHODS[method](missing_bucket, "k")
        with pytest.raises(StoreError, match="rejects these credentials"):
            METHODS[method](wrong_keys, "k")


def test_concurrent_sets_store_one_complete_value(store: KeyValueStore) -> None:
    values = [bytes([65 + at]) * 300_000 for at in range(4)]
    with run_in_threads(4) as run:
        assert run(lambda at: store.set("k", values[at])) == [None] * 4
    assert store.get("k") in values
    assert store.size() == 1


def test_concurrent_writes_of_sibling_keys_are_independent(store: KeyValueStore) -> None:
    turns = 60 if isinstance(store, FilesystemStore) else 5

    def work(at: int) -> bytes | None:
        for turn in range(turns):  # one directory, which removes delete and sets create again
            store.set(f"deep/er/{at}", f"{at}.{turn}".encode())
            value = store.get(f"deep/er/{at}")
            store.remove(f"deep/er/{at}")
        return value

    with run_in_threads(4) as run:
        assert run(work) == [f"{at}.{turns - 1}".encode() for at in range(4)]
    assert store.is_empty()


def test_forked_child_has_its_own_connection(store: KeyValueStore) -> None:
    store.set("k", b"parent's")
    child = os.fork()
    if not child:
        good = False
        try:
            good = all(store.get("k") == b"parent's" for _ in range(20))
        finally:
            os._exit(0 if good else 1)
    assert all(store.get("k") == b"parent's" for _ in range(20))
    assert os.waitpid(child, 0)[1] == 0


# --- keys ---------------------------------------------------------------------------------------------------------


def test_all_kinds_of_keys_are_distinct_and_ordered(case: StoreCase) -> None:
    store, keys = case.store, case.keys
    for key in keys:
        store.set(key, key.encode())
    assert {key: store.get(key) for key in keys} == {key: key.encode() for key in keys}
    assert all(store.has(key) for key in keys[::5])
    assert list(store.list()) == sorted(keys, key=str.encode)
    for start in ("a", "a/", "a/b", ".", "é", "x" * 64):
        assert list(store.list(start)) == sorted((key for key in keys if key.startswith(start)), key=str.encode)
    for key in keys[::5]:
        store.remove(key)
    assert list(store.list()) == sorted({*keys} - {*keys[::5]}, key=str.encode)
    store.remove_many(keys)
    assert store.is_empty()


def test_longest_key_is_stored_and_a_longer_one_refused(case: StoreCase) -> None:
    store = case.store
    longest = "é" * (store.max_key_bytes // 2) + "x" * (store.max_key_bytes % 2)
    if case.kind == "seaweedfs":  # path elements have at most 255 bytes, including the prefix
        longest = "/".join(["é" * 100] * 9)[: store.max_key_bytes // 2]
    store.set(longest, b"x")
    assert store.get(longest) == b"x"
    assert list(store.list(longest[:-1])) == [longest]
    with pytest.raises(StoreRefused):
        store.set("x" * (store.max_key_bytes + 1), b"x")


@pytest.mark.parametrize("method", KEY_METHODS)
def test_invalid_key_is_refused_by_every_method(case: StoreCase, method: str) -> None:
    for key in ["", "a\0b", "x" * 1025, "\ud800", *case.refused]:
        with pytest.raises(StoreRefused) as refused:
            KEY_METHODS[method](case.store, key)
        assert refused.value.backend == case.store.name
        assert refused.value.method in (method, "remove")
        assert str(refused.value).startswith(f"{case.store.name}: {refused.value.method}")
    assert case.store.is_empty()


# --- listings -----------------------------------------------------------------------------------------------------


def test_prefix_may_end_within_an_element_of_listed_and_cleared_keys(store: KeyValueStore) -> None:
    for key in ("agents/a/1", "agents/a/2", "agents/ab/1", "other"):
        store.set(key, b"x")
    assert list(store.list("agents/a/")) == ["agents/a/1", "agents/a/2"]
    assert list(store.list("agents/a")) == ["agents/a/1", "agents/a/2", "agents/ab/1"]
    assert list(store.list("agents/a/2/")) == []
    assert store.size("agents/") == 3
    assert not store.is_empty("o")
    assert store.is_empty("p")
    store.clear("agents/a/")
    assert list(store.list()) == ["agents/ab/1", "other"]
    store.clear("nothing")
    store.clear()
    assert store.is_empty()


def test_pages_contain_every_key_once_in_order(store: KeyValueStore) -> None:
    names = (*"defghijklmn", "ö", "😀", "a.b", "ab/c", "ab/d", "abc", "b", "b0", "c/d/e", "c/d/f", "p.q")
    keys = [f"p/{name}" for name in names]
    for key in [*keys, "o/before", "q/after"]:
        store.set(key, b"x")
    for limit in (1, 4, 10, 11, 22):
        keys_found, cursor, more = list[str](), "", True
        while more:
            page = store.page("p/", cursor=cursor, limit=limit)
            assert 0 < len(page.entries) <= limit
            keys_found += [entry.key for entry in page.entries]
            cursor, more = page.next_cursor, bool(page.next_cursor)
        assert keys_found == sorted(keys, key=str.encode)
    for limit in (0, 1001):
        with pytest.raises(StoreRefused, match="page"):
            store.page(limit=limit)


def test_removals_between_pages_hide_no_other_key(store: KeyValueStore) -> None:
    keys = [f"{at:02}" for at in range(15)]
    for key in keys:
        store.set(key, b"x")
    first = store.page(limit=4)
    for key in ("00", "01", "03", "05"):
        store.remove(key)
    assert [entry.key for entry in store.page(cursor=first.next_cursor, limit=4).entries] == ["04", "06", "07", "08"]


def test_entries_have_size_and_time_where_supported(case: StoreCase) -> None:
    before = datetime.now(UTC) - timedelta(seconds=2)
    case.store.set("k", b"12345")
    (entry,) = case.store.entries()
    if case.kind == "kv":
        assert entry == Entry("k", None, None)
    else:
        assert entry.size == 5
        assert entry.modified_at is not None
        assert before < entry.modified_at < datetime.now(UTC) + timedelta(seconds=2)


def test_thousands_of_keys_are_listed_and_removed(quick_case: StoreCase) -> None:
    store = quick_case.store
    keys = [f"many/{at % 7}/{at:05}" for at in range(1010)]
    with run_in_threads(10) as run:
        run(lambda at: [store.set(key, b"x") for key in keys[at::10]])
    store.set("other", b"x")
    assert list(store.list("many/")) == sorted(keys)
    page = store.page()
    assert len(page.entries) == 1000
    assert page.next_cursor
    store.clear("many/")
    assert list(store.list()) == ["other"]
