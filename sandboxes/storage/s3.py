"""A bucket as a store, through boto3: R2, and whatever else speaks S3.

Keys are object keys as they are, behind the prefix. A server that keeps objects as files cannot hold both `a` and `a/b`,
and may lose one without a word; R2 and S3 can."""

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

from sandboxes.storage.base import (
    CHUNK_BYTES,
    MAX_PAGE_SIZE,
    Entry,
    KeyValueStore,
    OncePerProcess,
    Page,
    RemainderReader,
    StoreError,
    StoreRefused,
)

PART_BYTES = 8 << 20  # bytes; R2 wants all parts but the last to have one size
MAX_PARALLEL_PARTS = 2  # each is held in memory
AUTH_ERROR_CODES = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "Unauthorized"}


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
        """Nothing is sent before the first call. Timeouts are in seconds, and of each attempt."""
        self.bucket, self.endpoint, self.prefix = bucket, endpoint, prefix
        self.max_key_bytes = 1024 - len(prefix.encode())
        config = Config(
            signature_version="s3v4",
            # Otherwise bodies go out in chunks with a trailing checksum, over https alone, and R2 refuses these.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            retries={"mode": "standard", "total_max_attempts": attempts},
            connect_timeout=connect_timeout,
            read_timeout=read_timeout,
            max_pool_connections=32,
            s3={"addressing_style": "path" if endpoint else "auto"},
        )
        self.client = OncePerProcess[Any](
            lambda: Session().client(  # a session of its own: boto3's default one is not for many threads
                "s3",
                endpoint_url=endpoint or None,
                region_name=region,
                aws_access_key_id=access_key_id,
                aws_secret_access_key=secret_access_key,
                config=config,
            )
        )
        self._transfer = TransferConfig(
            multipart_threshold=PART_BYTES,
            multipart_chunksize=PART_BYTES,
            max_concurrency=MAX_PARALLEL_PARTS,
            preferred_transfer_client="classic",
        )
        self._transfer.max_in_memory_upload_chunks = MAX_PARALLEL_PARTS

    def get(self, key: str) -> bytes | None:
        found: list[bytes] = []
        return b"".join(found) if self._fetch("get", key, found.append) else None

    def set(self, key: str, value: bytes) -> None:
        name = self._name(key, "set")
        with self._asking("set", key) as client:
            client.put_object(Bucket=self.bucket, Key=name, Body=value)

    def remove(self, key: str) -> None:
        name = self._name(key, "remove")
        with self._asking("remove", key) as client:
            client.delete_object(Bucket=self.bucket, Key=name)

    def has(self, key: str) -> bool:
        name = self._name(key, "has")
        with self._asking("has", key) as client:
            try:
                client.head_object(Bucket=self.bucket, Key=name)
            except ClientError as refused:
                if _http_status(refused) != 404:
                    raise
                client.head_bucket(Bucket=self.bucket)  # the answer to a HEAD does not say which of the two is missing
                return False
        return True

    def page(self, prefix: str = "", *, following: str = "", limit: int = MAX_PAGE_SIZE) -> Page:
        self.check_page(prefix, limit)
        ask = {"Bucket": self.bucket, "Prefix": self.prefix + prefix, "MaxKeys": limit}
        if following:
            ask["StartAfter"] = self.prefix + self.check_text(following, "page")
        with self._asking("page", prefix) as client:
            answer = client.list_objects_v2(**ask)
        found = [
            Entry(found["Key"].removeprefix(self.prefix), found["Size"], found["LastModified"])
            for found in answer.get("Contents", [])
        ]
        if answer.get("IsTruncated") and not found:
            raise StoreError(self.name, "page", "the answer is empty and says that there is more", key=prefix)
        return Page(found, found[-1].key if answer.get("IsTruncated") else "")

    def upload(self, key: str, source: BinaryIO, metadata: dict[str, str] | None = None) -> None:
        name, rest, extra = self._name(key, "upload"), RemainderReader(source), {"Metadata": metadata or {}}
        with self._asking("upload", key) as client:
            if rest.size < PART_BYTES:  # else threads are started, for longer than a small value takes
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
        """`remove` for each, up to 1000 in one call; one by one what such a call did not take."""
        left = iter(keys)
        while some := [*islice(left, 1000)]:
            for key in self._remove_batch({self._name(key, "remove_many"): key for key in some}):
                self.remove(key)

    def sweep_leftovers(self, older_than: datetime) -> int:
        """Give up multipart uploads that nobody finished, up to 1000 a call. R2 does so by itself after a week."""
        with self._asking("sweep_leftovers") as client:
            try:
                answer = client.list_multipart_uploads(Bucket=self.bucket, Prefix=self.prefix)
            except ClientError as refused:
                if _http_status(refused) == 501:
                    return 0
                raise
            old = [upload for upload in answer.get("Uploads", []) if upload["Initiated"] < older_than]
            for upload in old:
                client.abort_multipart_upload(Bucket=self.bucket, Key=upload["Key"], UploadId=upload["UploadId"])
        return len(old)

    def check_text(self, text: str, method: str) -> str:
        super().check_text(text, method)
        if any(letter < " " or letter == "\x7f" for letter in text):
            raise StoreRefused(self.name, method, "a key has no control characters: XML and proxies change them", key=text)
        return text

    def _name(self, key: str, method: str) -> str:
        name = self.prefix + self.check_key(key, method)
        if any(part in (".", "..") for part in name.split("/")):
            raise StoreRefused(self.name, method, "no element of a key is . or ..: in a URL they name another key", key=key)
        return name

    def _remove_batch(self, names: dict[str, str]) -> list[str]:
        with self._asking("remove_many") as client:
            objects = {"Objects": [{"Key": name} for name in names], "Quiet": True}
            try:
                answer = client.delete_objects(Bucket=self.bucket, Delete=objects)
            except ClientError:  # not every server knows it; why it refused is seen when the first is removed alone
                return [*names.values()]
        return [names[failed["Key"]] for failed in answer.get("Errors", [])]

    def _fetch(self, method: str, key: str, write: Any, span: str = "") -> bool:
        """Hand the value, or the span of it, to write(bytes); False if there is none."""
        name = self._name(key, method)
        with self._asking(method, key) as client:
            try:
                answer = client.get_object(Bucket=self.bucket, Key=name, **({"Range": span} if span else {}))
            except ClientError as refused:
                if _error_code(refused) == "NoSuchKey":
                    return False
                if _http_status(refused) == 416:  # it begins behind the end
                    return True
                raise
            with answer["Body"] as body:
                if span and not answer.get("ContentRange", "").startswith(f"bytes {span[6:].split('-')[0]}-"):
                    raise StoreError(self.name, method, f"the answer is not the part that was asked for: {span}", key=key)
                left = answer.get("ContentLength", -1)
                while chunk := body.read(CHUNK_BYTES):
                    write(chunk)
                    left -= len(chunk)
                if left:
                    raise StoreError(self.name, method, "the answer is not as long as it should be", key=key)
        return True

    @contextmanager
    def _asking(self, method: str, key: str = "") -> Iterator[Any]:
        try:
            yield self.client()
        except ClientError as refused:
            raise StoreError(self.name, method, self._said(refused), key=key) from refused
        except (BotoCoreError, Boto3Error, HTTPError, OSError) as failed:
            raise StoreError(self.name, method, f"{type(failed).__name__}: {failed}", key=key) from failed

    def _said(self, refused: ClientError) -> str:
        code, status = _error_code(refused), _http_status(refused)
        if code == "NoSuchBucket" or (status == 404 and refused.operation_name == "HeadBucket"):
            return f"there is no bucket {self.bucket!r} at {self.endpoint or 'this region'}"
        if status in (401, 403) or code in AUTH_ERROR_CODES:
            return f"the server refuses these credentials, or what they may do in bucket {self.bucket!r} ({code})"
        return f"{code}, HTTP status {status}: {refused.response.get('Error', {}).get('Message', '')}"


def _error_code(refused: ClientError) -> str:
    return str(refused.response.get("Error", {}).get("Code", ""))


def _http_status(refused: ClientError) -> int:
    return int(refused.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
