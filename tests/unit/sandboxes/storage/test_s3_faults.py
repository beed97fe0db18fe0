"""Faults of an S3 server: each is a StoreError in bounded time and leaves no partial value."""

import io
import socket
import time
import uuid
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote

import pytest
from boto3.session import Session
from botocore.awsrequest import AWSRequest, AWSResponse
from urllib3 import HTTPResponse

from sandboxes.state import pruning, uploads
from sandboxes.storage.base import Entry, StoreError
from sandboxes.storage.s3 import PART_BYTES, S3Store
from tests.support.servers.loopback import (
    Handler,
    Responder,
    ScriptedServer,
    drop_connection,
    respond,
    stall_after_body,
    stall_response,
)
from tests.support.storage.stores import METHODS, keep_none

SECRET = "a-secret-access-key"
SESSION = Session()


def s3(url: str, **options: Any) -> S3Store:
    options: dict[str, Any] = {"connect_timeout": 20, "read_timeout": 20, "attempts": 2} | options
    return S3Store("shelf", endpoint=url, access_key_id="a-key-id", secret_access_key=SECRET, **options)


@pytest.fixture(autouse=True)
def one_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share one boto3 session: creating one takes a tenth of a second."""
    monkeypatch.setattr("sandboxes.storage.s3.Session", lambda: SESSION)


@pytest.fixture
def store(server: ScriptedServer) -> S3Store:
    return s3(server.url)


def error(status: int, code: str) -> Responder:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>so it says</Message></Error>"
    return respond(status, body.encode(), Content_Type="application/xml")


FAULTS: dict[str, tuple[Responder, str]] = {
    "500": (error(500, "InternalError"), "500"),
    "503": (error(503, "SlowDown"), "503"),
    "stall": (stall_response, "[Tt]imeout"),
    "hang up": (drop_connection, "closed"),
    "wrong credentials": (error(403, "SignatureDoesNotMatch"), "rejects these credentials"),
    "unknown key": (error(401, "Unauthorized"), "rejects these credentials"),
    "no rights": (error(403, "AccessDenied"), "rejects these credentials"),
    "wrong clock": (error(403, "RequestTimeTooSkewed"), "the clock of this host|this host's clock"),
    "no bucket": (error(404, "NoSuchBucket"), "bucket 'shelf' does not exist"),
    "no S3": (respond(418, b"<html>a teapot"), "418"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_raises_store_error_in_every_method(server: ScriptedServer, fault: str) -> None:
    store = s3(server.url, attempts=1, read_timeout=0.3 if fault == "stall" else 20)  # a busy machine may need longer
    response, message = FAULTS[fault]
    server.script = [response]
    for method in METHODS.keys() - {"remove_many"}:  # the cause is reported by the removal of one key
        start = time.monotonic()
        with pytest.raises(StoreError, match=message) as failed:
            METHODS[method](store, "k")
        assert time.monotonic() - start < 20  # an attempt of 0.3 s, and a margin for a slow machine
        assert str(failed.value).startswith(f"s3: {method}")
        assert SECRET not in repr(failed.value)


def test_refused_connection_raises_store_error() -> None:
    with socket.socket() as taken:  # bound, not listening
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(StoreError, match="Could not connect"):
            s3(f"http://127.0.0.1:{taken.getsockname()[1]}").get("k")


def test_transient_error_is_retried(server: ScriptedServer, store: S3Store) -> None:
    server.script = [error(500, "InternalError"), respond(200, b"value")]
    assert store.get("k") == b"value"
    server.script = [drop_connection, respond(200)]
    store.set("k", b"again")
    assert [request.body for request in server.seen] == [b"", b"", b"again", b"again"]


@pytest.mark.parametrize(
    "response", [respond(200, b"0123", length=10), stall_after_body(b"0123", length=10)], ids=["cut", "stalled"]
)
def test_truncated_body_raises_store_error(server: ScriptedServer, response: Responder) -> None:
    store = s3(server.url, read_timeout=0.3)
    server.script = [response]
    for method in ("get", "download", "set", "upload"):
        with pytest.raises(StoreError):
            METHODS[method](store, "k")


def test_ignored_range_raises_store_error(server: ScriptedServer, store: S3Store) -> None:
    server.script = [respond(200, b"0123456789")]
    target = io.BytesIO()
    with pytest.raises(StoreError, match="did not return the requested range"):
        store.download("k", target, start=2, length=3)
    assert target.getvalue() == b""


def test_missing_key_is_distinguished_from_missing_bucket(server: ScriptedServer, store: S3Store) -> None:
    server.script = [error(404, "NoSuchKey")]
    assert store.get("k") is None
    assert not store.download("k", io.BytesIO())
    server.script = [respond(404), respond(200)]  # HEAD of the key, HEAD of the bucket; neither has a body
    assert not store.has("k")
    server.script = [respond(200)]
    assert store.has("k")
    server.script = [respond(404)]
    with pytest.raises(StoreError, match="bucket 'shelf' does not exist"):
        store.has("k")


def test_failed_multipart_upload_is_aborted(server: ScriptedServer, store: S3Store) -> None:
    def parts(handler: Handler) -> None:
        if handler.command == "POST" and handler.path.endswith("?uploads"):
            respond(200, b"<InitiateMultipartUploadResult><UploadId>u1</UploadId></InitiateMultipartUploadResult>")(handler)
        elif handler.command == "DELETE":
            respond(204)(handler)
        elif "partNumber=2" in handler.path:
            error(500, "InternalError")(handler)
        else:
            respond(200, ETag='"e"')(handler)

    server.script = [parts]
    source = io.BytesIO(bytes(2 * PART_BYTES + 1))
    with pytest.raises(StoreError, match=r"upload of 'k': InternalError"):
        store.upload("k", source)
    assert server.calls[0] == "POST /shelf/k?uploads"
    assert server.calls[-1] == "DELETE /shelf/k?uploadId=u1"
    assert "POST /shelf/k?uploadId=u1" not in server.calls  # completion would have made the upload visible
    assert not source.closed


def test_server_that_lists_no_unfinished_uploads_has_no_leftovers(server: ScriptedServer, store: S3Store) -> None:
    server.script = [error(501, "NotImplemented")]  # the server cleans up by itself, or never
    assert store.sweep_leftovers(datetime.now(UTC), find_kept=keep_none) == 0


def list_unfinished(*keys: str, next_marker: str = "") -> Responder:
    uploads = "".join(
        f"<Upload><Key>{key}</Key><UploadId>u</UploadId><Initiated>2026-11-21T12:00:00Z</Initiated></Upload>" for key in keys
    )
    marker = f"<NextKeyMarker>{next_marker}</NextKeyMarker><NextUploadIdMarker>u</NextUploadIdMarker>" if next_marker else ""
    truncated = f"<IsTruncated>{'true' if next_marker else 'false'}</IsTruncated>"
    return respond(200, f"<ListMultipartUploadsResult>{uploads}{marker}{truncated}</ListMultipartUploadsResult>".encode())


def test_unfinished_uploads_are_aborted_page_by_page_but_for_those_to_keep(server: ScriptedServer) -> None:
    store = s3(server.url, prefix="p/")
    pages = [list_unfinished("p/a", "p/b", next_marker="p/b"), list_unfinished("p/c")]
    no_upload = error(404, "NoSuchUpload")  # completed since the listing
    server.script = [pages[0], respond(204), pages[1], no_upload]
    assert store.sweep_leftovers(datetime.now(UTC), find_kept=lambda keys: {*keys} & {"b"}) == 1
    assert [call for call in server.calls if call.startswith("DELETE")] == [
        "DELETE /shelf/p/a?uploadId=u", "DELETE /shelf/p/c?uploadId=u",
    ]  # fmt: skip
    assert "key-marker=p%2Fb" in server.calls[2]
    server.script = [list_unfinished(next_marker="p/b")]
    with pytest.raises(StoreError, match="same page"):
        store.sweep_leftovers(datetime.now(UTC), find_kept=keep_none)


@pytest.mark.django_db
def test_prune_keeps_uploads_with_a_claim_and_those_of_other_applications(
    server: ScriptedServer, store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = datetime.now(UTC)
    claimed, abandoned = (f"agents/did:plc:x/20261121T120000Z-{uuid.uuid4().hex}.tar" for _ in range(2))
    artifact = f"stores/did:plc:x/{uuid.uuid4().hex}/artifacts/content/a"
    listed = list_unfinished(claimed, abandoned, "backups/database.tar", "agents/did:plc:x/files/video", artifact)
    empty = respond(200, b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>")

    def answer(handler: Handler) -> None:
        (respond(204) if handler.command == "DELETE" else listed if "uploads" in handler.path else empty)(handler)

    server.script = [answer]
    monkeypatch.setattr("sandboxes.storage.FilesystemStore", lambda root: store)
    with uploads.claim_keys([claimed], clock=lambda: now):
        result = pruning.remove_orphans(now=now)
    assert (result.counts, result.failures) == ({"unfinished writes": 2}, [])
    aborted = [unquote(call) for call in server.calls if call.startswith("DELETE")]
    assert aborted == [f"DELETE /shelf/{key}?uploadId=u" for key in (abandoned, artifact)]


ONE_ERROR = b"<DeleteResult><Error><Key>b</Key><Code>InternalError</Code></Error></DeleteResult>"


@pytest.mark.parametrize(
    ("response", "remaining"), [(error(501, "NotImplemented"), "ab"), (respond(200, ONE_ERROR), "b")], ids=["501", "one error"]
)
def test_keys_that_a_batch_did_not_remove_are_removed_singly(
    server: ScriptedServer, store: S3Store, response: Responder, remaining: str
) -> None:
    server.script = [response, respond(204)]
    store.remove_many(["a", "b"])
    assert server.calls == ["POST /shelf?delete", *[f"DELETE /shelf/{key}" for key in remaining]]


def test_invalid_listing_raises_store_error(server: ScriptedServer, store: S3Store) -> None:
    server.script = [respond(200, b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>")]
    with pytest.raises(StoreError, match="empty page that is not the last"):
        store.page()
    server.script = [respond(200, b"no XML <<")]
    with pytest.raises(StoreError, match="page"):
        store.page()


@pytest.mark.parametrize("field", ["<Size>many</Size>", "<Size>1</Size><LastModified>yesterday</LastModified>", "", "<Size/>"])
def test_listing_with_unreadable_fields_raises_store_error(server: ScriptedServer, store: S3Store, field: str) -> None:
    server.script = [respond(200, f"<ListBucketResult><Contents><Key>k</Key>{field}</Contents></ListBucketResult>".encode())]
    with pytest.raises(StoreError, match="page"):
        store.page()


def test_prefix_is_added_on_the_server_and_removed_from_results(server: ScriptedServer) -> None:
    store = s3(server.url, prefix="our own/")
    content = "<Contents><Key>our%20own/a%2Bb</Key><Size>1</Size><LastModified>2026-11-21T12:00:00Z</LastModified></Contents>"
    listing = f"<ListBucketResult><EncodingType>url</EncodingType>{content}</ListBucketResult>".encode()
    server.script = [respond(200, listing), respond(204)]
    assert store.page("a", cursor="a").entries == [Entry("a+b", 1, datetime(2026, 11, 21, 12, tzinfo=UTC))]
    assert "prefix=our%20own%2Fa&" in server.seen[0].path
    assert "start-after=our%20own%2Fa&" in server.seen[0].path
    store.remove("a+b")
    assert server.calls[1] == "DELETE /shelf/our%20own/a%2Bb"
    assert store.max_key_bytes == 1024 - len("our own/")


def test_body_over_https_is_not_chunked() -> None:
    """R2 rejects chunked bodies with a trailing checksum. boto3 sends them over https only, so a local http server cannot show
    it."""
    sent: list[AWSRequest] = []

    def instead_of_sending(request: AWSRequest, **options: object) -> AWSResponse:
        sent.append(request)
        return AWSResponse(request.url, 200, {}, HTTPResponse(io.BytesIO(), preload_content=False))

    store = s3("https://account.invalid")
    store.client().meta.events.register("before-send.s3", instead_of_sending)
    store.set("k", b"value")
    store.upload("k", io.BytesIO(b"value"))
    for request in sent:
        names = {name.lower() for name in request.headers}
        assert "content-encoding" not in names
        assert not {name for name in names if "checksum" in name or "trailer" in name}
        assert request.url == "https://account.invalid/shelf/k"
    assert len(sent) == 2


def test_client_configuration_suits_r2_and_has_timeouts() -> None:
    config = S3Store("shelf", access_key_id="i", secret_access_key="s", endpoint="https://x.invalid").client().meta.config
    assert config.request_checksum_calculation == "when_required"
    assert config.response_checksum_validation == "when_required"
    assert config.signature_version == "s3v4"
    assert config.s3 == {"addressing_style": "path"}
    assert config.retries == {"mode": "standard", "total_max_attempts": 3}
    assert (config.connect_timeout, config.read_timeout) == (5, 60)
    assert config.region_name == "auto"
