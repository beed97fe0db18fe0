"""Key-value store in an S3-compatible bucket (R2 included), through boto3.

Object keys are the store's keys with a prefix. A server that stores objects as files cannot hold both `a` and `a/b`, and may
lose one of them silently; R2 and S3 hold both."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from itertools import islice
from typing import Any, BinaryIO

from boto3.exceptions import Boto3Error
from boto3.s3.transfer import TransferConfig
from boto3.session import Session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

from sandboxes.answer_limits import limit_answers
from sandboxes.redaction.texts import quote_answer
from sandboxes.storage.base import (
    CHUNK_BYTES,
    MAX_PAGE_SIZE,
    Entry,
    FindKept,
    KeyValueStore,
    ListingPage,
    OncePerProcess,
    RemainderReader,
    StoreError,
    StoreRefused,
    guard_answers,
)

PART_BYTES = 8 << 20  # R2 requires all parts but the last to have the same size
MAX_PARALLEL_PARTS = 2  # parts held in memory
CLOCK_ERROR_CODES = {"RequestTimeTooSkewed", "RequestExpired"}
AUTH_ERROR_CODES = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "Unauthorized"}


@guard_answers
class S3Store(KeyValueStore):
    name = "s3"

    def __init__(
        self,
        bucket: str,
        *,
        endpoint: str = "",
        access_key_id: str,
        secret_access_key: str,
        region: str = "auto",
        prefix: str = "",
        connect_timeout: float = 5,
        read_timeout: float = 60,
        attempts: int = 3,
    ) -> None:
        """Create a client without sending a request. Timeouts are per attempt, in seconds.

        `read_timeout` is that of the answer, see answer_limits."""
        self.bucket, self.endpoint, self.prefix = bucket, endpoint, prefix
        self.max_key_bytes = 1024 - len(prefix.encode())
        config = Config(
            signature_version="s3v4",
            # Otherwise boto3 sends bodies over https in chunks with a trailing checksum, which R2 rejects.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            retries={"mode": "standard", "total_max_attempts": attempts},
            connect_timeout=connect_timeout,
            read_timeout=read_timeout,
            max_pool_connections=32,
            s3={"addressing_style": "path" if endpoint else "auto"},
        )

        def create_client() -> Any:
            client = Session().client(  # a separate session: boto3's default session is not thread-safe
                "s3",
                endpoint_url=endpoint or None,
                region_name=region,
                aws_access_key_id=access_key_id,
                aws_secret_access_key=secret_access_key,
                config=config,
            )
            _limit_answers(client)
            return client

        self.client = OncePerProcess[Any](create_client)
        self._transfer = TransferConfig(
            multipart_threshold=PART_BYTES,
            multipart_chunksize=PART_BYTES,
            max_concurrency=MAX_PARALLEL_PARTS,
            preferred_transfer_client="classic",
        )
        self._transfer.max_in_memory_upload_chunks = MAX_PARALLEL_PARTS

    def get(self, key: str) -> bytes | None:
        chunks: list[bytes] = []
        return b"".join(chunks) if self._fetch("get", key, chunks.append) else None

    def set(self, key: str, value: bytes) -> None:
        name = self._name(key, "set")
        with self._client("set", key) as client:
            client.put_object(Bucket=self.bucket, Key=name, Body=value)

    def remove(self, key: str) -> None:
        name = self._name(key, "remove")
        with self._client("remove", key) as client:
            client.delete_object(Bucket=self.bucket, Key=name)

    def has(self, key: str) -> bool:
        name = self._name(key, "has")
        with self._client("has", key) as client:
            try:
                client.head_object(Bucket=self.bucket, Key=name)
            except ClientError as error:
                if _http_status(error) != 404:
                    raise
                client.head_bucket(Bucket=self.bucket)  # raises if the bucket is missing, which looks like a missing key
                return False
        return True

    def page(self, prefix: str = "", *, cursor: str = "", limit: int = MAX_PAGE_SIZE) -> ListingPage:
        self.check_page(prefix, limit)
        query = {"Bucket": self.bucket, "Prefix": self.prefix + prefix, "MaxKeys": limit}
        if cursor:
            query["StartAfter"] = self.prefix + self.check_text(cursor, "page")
        with self._client("page", prefix) as client:
            response = client.list_objects_v2(**query)
        entries = [
            Entry(entry["Key"].removeprefix(self.prefix), entry["Size"], entry["LastModified"])
            for entry in response.get("Contents", [])
        ]
        if response.get("IsTruncated") and not entries:
            raise StoreError(self.name, "page", "the server returned an empty page that is not the last", key=prefix)
        return ListingPage(entries, entries[-1].key if response.get("IsTruncated") else "")

    def upload(self, key: str, source: BinaryIO, metadata: dict[str, str] | None = None) -> None:
        name, rest, extra = self._name(key, "upload"), RemainderReader(source), {"Metadata": metadata or {}}
        with self._client("upload", key) as client:
            if rest.size < PART_BYTES:  # a multipart transfer starts threads, which takes longer than a small upload
                client.put_object(Bucket=self.bucket, Key=name, Body=rest.read(), **extra)
            else:
                client.upload_fileobj(rest, self.bucket, name, ExtraArgs=extra, Config=self._transfer)

    def download(self, key: str, target: BinaryIO, *, start: int = 0, length: int | None = None) -> bool:
        self.check_range(key, start, length)
        if length == 0:
            return self.has(key)
        last = "" if length is None else start + length - 1
        return self._fetch("download", key, target.write, f"bytes={start}-{last}" if start or length else "")

    def remove_many(self, keys: Iterable[str]) -> None:
        """Remove keys in batches of 1000; keys that a batch does not remove are removed one by one."""
        remaining = iter(keys)
        while batch := [*islice(remaining, 1000)]:
            for key in self._remove_batch({self._name(key, "remove_many"): key for key in batch}):
                self.remove(key)

    def sweep_leftovers(self, older_than: datetime, *, find_kept: FindKept) -> int:
        """Abort unfinished multipart uploads, page by page. R2 aborts them by itself after a week."""
        aborted = 0
        with self._client("sweep_leftovers") as client:
            for page in self._list_unfinished(client):
                old = [(upload["Key"], upload["UploadId"]) for upload in page if upload["Initiated"] < older_than]
                kept = find_kept({name.removeprefix(self.prefix) for name, _ in old})
                for name, upload_id in old:
                    if name.removeprefix(self.prefix) not in kept:
                        aborted += self._abort(client, name, upload_id)
        return aborted

    def _list_unfinished(self, client: Any) -> Iterator[list[dict[str, Any]]]:
        query = {"Bucket": self.bucket, "Prefix": self.prefix}
        while True:
            try:
                response = client.list_multipart_uploads(**query)
            except ClientError as error:
                if _http_status(error) == 501:
                    return
                raise
            yield response.get("Uploads", [])
            markers = {"KeyMarker": response.get("NextKeyMarker", ""), "UploadIdMarker": response.get("NextUploadIdMarker", "")}
            if not response.get("IsTruncated"):
                return
            if {**query, **markers} == query or not markers["KeyMarker"]:
                raise StoreError(self.name, "sweep_leftovers", "the server returned the same page again")
            query |= markers

    def _abort(self, client: Any, name: str, upload_id: str) -> bool:
        """Abort an upload. Return False if it was completed or aborted meanwhile."""
        try:
            client.abort_multipart_upload(Bucket=self.bucket, Key=name, UploadId=upload_id)
        except ClientError as error:
            if _error_code(error) != "NoSuchUpload":
                raise
            return False
        return True

    def check_text(self, text: str, method: str) -> str:
        super().check_text(text, method)
        if any(letter < " " or letter == "\x7f" for letter in text):
            raise StoreRefused(
                self.name, method, "a key must not contain control characters: XML and proxies change them", key=text
            )
        return text

    def _name(self, key: str, method: str) -> str:
        name = self.prefix + self.check_key(key, method)
        if any(part in (".", "..") for part in name.split("/")):
            raise StoreRefused(
                self.name, method, 'no element of a key may be "." or "..": in a URL they name another key', key=key
            )
        return name

    def _remove_batch(self, names: dict[str, str]) -> list[str]:
        with self._client("remove_many") as client:
            objects = {"Objects": [{"Key": name} for name in names], "Quiet": True}
            try:
                response = client.delete_objects(Bucket=self.bucket, Delete=objects)
            except ClientError:  # not every server supports batches; the cause is reported by the first single removal
                return [*names.values()]
        return [names[error["Key"]] for error in response.get("Errors", [])]

    def _fetch(self, method: str, key: str, write: Any, byte_range: str = "") -> bool:
        """Pass the value, or only `byte_range`, to `write` in chunks. Return False if the key does not exist."""
        name = self._name(key, method)
        with self._client(method, key) as client:
            try:
                response = client.get_object(Bucket=self.bucket, Key=name, **({"Range": byte_range} if byte_range else {}))
            except ClientError as error:
                if _error_code(error) == "NoSuchKey":
                    return False
                if _http_status(error) == 416:  # the range begins after the end of the value
                    return True
                raise
            with response["Body"] as body:
                if byte_range and not response.get("ContentRange", "").startswith(f"bytes {byte_range[6:].split('-')[0]}-"):
                    raise StoreError(self.name, method, f"the server did not return the requested range {byte_range}", key=key)
                remaining = response.get("ContentLength", -1)
                while chunk := body.read(CHUNK_BYTES):
                    write(chunk)
                    remaining -= len(chunk)
                if remaining:
                    raise StoreError(self.name, method, "the response does not match its Content-Length", key=key)
        return True

    @contextmanager
    def _client(self, method: str, key: str = "") -> Iterator[Any]:
        try:
            yield self.client()
        except ClientError as error:
            raise StoreError(self.name, method, self._describe_failure(error), key=key) from error
        except (BotoCoreError, Boto3Error, HTTPError, OSError) as error:
            raise StoreError(self.name, method, f"{type(error).__name__}: {quote_answer(error)}", key=key) from error

    def _describe_failure(self, error: ClientError) -> str:
        code, status = _error_code(error), _http_status(error)
        if code == "NoSuchBucket" or (status == 404 and error.operation_name == "HeadBucket"):
            return f"bucket {self.bucket!r} does not exist at {self.endpoint or 'this region'}"
        if code in CLOCK_ERROR_CODES:
            return f"the clock of this host differs too much from the server's: synchronize it ({code})"
        if code == "403":  # of HEAD, whose answers have no body
            return f"the server rejects these credentials, their permissions in {self.bucket!r}, or this host's clock (403)"
        if status in (401, 403) or code in AUTH_ERROR_CODES:
            return f"the server rejects these credentials or their permissions in bucket {self.bucket!r} ({code})"
        return f"{code}, HTTP status {status}: {quote_answer(error.response.get('Error', {}).get('Message', ''))}"


def _limit_answers(client: Any) -> None:
    """Limit the time of each answer. Relies on attributes of botocore 1.44; test_answer_limits.py fails without effect."""
    session = client._endpoint.http_session
    limit_answers(session._manager)
    session._pool_classes_by_scheme = session._manager.pool_classes_by_scheme  # of the managers for proxies


def _error_code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _http_status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
