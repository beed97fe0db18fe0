"""What an S3 server can do wrong is a StoreError in bounded time, and nothing is left half written."""

import io
import socket
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from boto3.session import Session
from botocore.awsrequest import AWSRequest, AWSResponse
from urllib3 import HTTPResponse

from sandboxes.storage.base import Entry, StoreError
from sandboxes.storage.s3 import PART_BYTES, S3Store
from tests.support.loopback import (
    Handler,
    Responder,
    ScriptedServer,
    drop_connection,
    respond,
    run_scripted_server,
    stall_after_body,
    stall_response,
)

SECRET = "a-secret-access-key"
SESSION = Session()


def s3(url: str, **more: Any) -> S3Store:
    options: dict[str, Any] = {"connect_timeout": 20, "read_timeout": 20, "attempts": 2} | more
    return S3Store("shelf", endpoint=url, access_key_id="a-key-id", secret_access_key=SECRET, **options)


@pytest.fixture(autouse=True)
def one_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads boto3's descriptions of S3 for a tenth of a second."""
    monkeypatch.setattr("sandboxes.storage.s3.Session", lambda: SESSION)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with run_scripted_server() as server:
        yield server


@pytest.fixture
def store(server: ScriptedServer) -> S3Store:
    return s3(server.url)


@pytest.fixture
def impatient(server: ScriptedServer) -> S3Store:
    """A store that does not wait for a server that stalls. A busy machine's is as slow now and then."""
    return s3(server.url, read_timeout=0.3)


def error(status: int, code: str) -> Responder:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>so it says</Message></Error>"
    return respond(status, body.encode(), Content_Type="application/xml")


METHODS: dict[str, Callable[[S3Store], object]] = {
    "get": lambda store: store.get("k"),
    "set": lambda store: store.set("k", b"value"),
    "has": lambda store: store.has("k"),
    "remove": lambda store: store.remove("k"),
    "page": lambda store: store.page("k"),
    "upload": lambda store: store.upload("k", io.BytesIO(b"value")),
    "download": lambda store: store.download("k", io.BytesIO()),
    "sweep_leftovers": lambda store: store.sweep_leftovers(datetime.now(UTC)),
}
FAULTS: dict[str, tuple[Responder, str]] = {
    "500": (error(500, "InternalError"), "500"),
    "503": (error(503, "SlowDown"), "503"),
    "stall": (stall_response, "[Tt]imeout"),
    "hang up": (drop_connection, "closed"),
    "wrong credentials": (error(403, "SignatureDoesNotMatch"), "rejects these credentials"),
    "unknown key": (error(401, "Unauthorized"), "rejects these credentials"),
    "no rights": (error(403, "AccessDenied"), "rejects these credentials"),
    "no bucket": (error(404, "NoSuchBucket"), "bucket 'shelf' does not exist"),
    "no S3": (respond(418, b"<html>a teapot"), "418"),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_a_store_error_in_every_method(
    server: ScriptedServer, store: S3Store, impatient: S3Store, method: str, fault: str
) -> None:
    store = impatient if fault == "stall" else store
    answer, words = FAULTS[fault]
    server.script = [answer]
    began = time.monotonic()
    with pytest.raises(StoreError, match=words) as failed:
        METHODS[method](store)
    assert time.monotonic() - began < 20  # two attempts of 0.3 seconds, up to a second between them; and a slow machine
    assert str(failed.value).startswith(f"s3: {method}")
    assert SECRET not in repr(failed.value)


def test_a_server_that_is_not_there_is_a_store_error() -> None:
    with socket.socket() as taken:  # bound and never listened on
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(StoreError, match="Could not connect"):
            s3(f"http://127.0.0.1:{taken.getsockname()[1]}").get("k")


def test_one_bad_moment_is_tried_again(server: ScriptedServer, store: S3Store) -> None:
    server.script = [error(500, "InternalError"), respond(200, b"value")]
    assert store.get("k") == b"value"
    server.script = [drop_connection, respond(200)]
    store.set("k", b"again")
    assert [seen.body for seen in server.seen] == [b"", b"", b"again", b"again"]


@pytest.mark.parametrize(
    "answer", [respond(200, b"0123", length=10), stall_after_body(b"0123", length=10)], ids=["cut", "stalled"]
)
def test_a_body_that_ends_early_is_no_value(server: ScriptedServer, impatient: S3Store, answer: Responder) -> None:
    server.script = [answer]
    with pytest.raises(StoreError):
        impatient.get("k")
    with pytest.raises(StoreError):
        impatient.download("k", io.BytesIO())


def test_a_range_that_the_server_did_not_heed_is_no_answer(server: ScriptedServer, store: S3Store) -> None:
    server.script = [respond(200, b"0123456789")]
    target = io.BytesIO()
    with pytest.raises(StoreError, match="did not return the requested range"):
        store.download("k", target, start=2, length=3)
    assert target.getvalue() == b""


def test_a_key_that_is_not_there_is_told_from_a_bucket_that_is_not(server: ScriptedServer, store: S3Store) -> None:
    server.script = [error(404, "NoSuchKey")]
    assert store.get("k") is None
    assert not store.download("k", io.BytesIO())
    server.script = [respond(404), respond(200)]  # HEAD of the key, HEAD of the bucket: no words
    assert not store.has("k")
    server.script = [respond(404)]
    with pytest.raises(StoreError, match="bucket 'shelf' does not exist"):
        store.has("k")


def test_an_upload_that_breaks_off_is_given_up_on_the_server(server: ScriptedServer, store: S3Store) -> None:
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
    assert "POST /shelf/k?uploadId=u1" not in server.calls  # which would have made it visible
    assert not source.closed


def test_uploads_that_a_crash_left_are_given_up_once_they_are_old(server: ScriptedServer, store: S3Store) -> None:
    upload = "<Upload><Key>{}</Key><UploadId>{}</UploadId><Initiated>{}</Initiated></Upload>"
    uploads = upload.format("a", "u1", "2026-11-20T12:00:00Z") + upload.format("b", "u2", "2026-11-21T12:00:00Z")
    listing = f"<ListMultipartUploadsResult>{uploads}</ListMultipartUploadsResult>".encode()
    server.script = [respond(200, listing), respond(204)]
    assert store.sweep_leftovers(datetime(2026, 11, 21, tzinfo=UTC)) == 1
    assert server.calls[1:] == ["DELETE /shelf/a?uploadId=u1"]
    server.script = [error(501, "NotImplemented")]  # then the server sees to it itself, or nobody can
    assert store.sweep_leftovers(datetime.now(UTC) - timedelta(days=1)) == 0


def test_keys_are_removed_one_by_one_where_many_at_once_are_refused(server: ScriptedServer, store: S3Store) -> None:
    server.script = [error(501, "NotImplemented"), respond(204)]
    store.remove_many(["a", "b"])
    assert server.calls == ["POST /shelf?delete", "DELETE /shelf/a", "DELETE /shelf/b"]


def test_keys_that_a_removal_of_many_left_are_removed_alone(server: ScriptedServer, store: S3Store) -> None:
    left = b"<DeleteResult><Error><Key>b</Key><Code>InternalError</Code></Error></DeleteResult>"
    server.script = [respond(200, left), respond(204)]
    store.remove_many(["a", "b", "c"])
    assert server.calls == ["POST /shelf?delete", "DELETE /shelf/b"]


def test_a_listing_that_makes_no_sense_is_a_store_error(server: ScriptedServer, store: S3Store) -> None:
    server.script = [respond(200, b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>")]
    with pytest.raises(StoreError, match="empty page that is not the last"):
        store.page()
    server.script = [respond(200, b"no XML <<")]
    with pytest.raises(StoreError, match="page"):
        store.page()


def test_a_prefix_is_before_every_key_on_the_server_and_in_no_answer(server: ScriptedServer) -> None:
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


def test_a_body_over_https_goes_out_plain_and_signed() -> None:
    """Chunked, with a trailing checksum, R2 refuses it; over http it never is, so a server on this machine shows nothing."""
    sent: list[AWSRequest] = []

    def instead_of_sending(request: AWSRequest, **more: object) -> AWSResponse:
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


def test_the_client_is_what_r2_needs_and_never_waits_for_ever() -> None:
    config = S3Store("shelf", access_key_id="i", secret_access_key="s", endpoint="https://x.invalid").client().meta.config
    assert config.request_checksum_calculation == "when_required"
    assert config.response_checksum_validation == "when_required"
    assert config.signature_version == "s3v4"
    assert config.s3 == {"addressing_style": "path"}
    assert config.retries == {"mode": "standard", "total_max_attempts": 3}
    assert (config.connect_timeout, config.read_timeout) == (5, 60)
    assert config.region_name == "auto"
