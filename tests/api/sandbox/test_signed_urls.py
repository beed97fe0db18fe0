"""Signed URLs of files: one method, one path, one lease, without a key."""

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from django.core import signing
from django.utils import timezone

from leases import api_keys
from leases.grants import file_urls
from leases.models import AgentKey, Lease
from sandboxes.models import Run
from sandboxes.providers.errors import ProviderError
from sandboxes.providers.memory import MemoryProvider
from tests.api.conftest import ADA, BOB, ApiClient, assert_refused, expire_lease

pytestmark = pytest.mark.django_db


@pytest.fixture
def create_url(ada: ApiClient, lease) -> Callable[..., str]:
    """Create a signed URL and return its path and query."""

    def create(path: str = "notes/a b.txt", method: str = "GET", client: ApiClient = ada, **fields: Any) -> str:
        response = client.post(f"leases/{lease['id']}/file-urls", {"path": path, "method": method, **fields})
        assert response.status_code == 201, response.content
        assert response["Cache-Control"] == "no-store"
        parts = urlsplit(response.json()["url"])
        assert f"{parts.scheme}://{parts.netloc}" == "http://testserver"
        return f"{parts.path}?{parts.query}"

    return create


@pytest.fixture
def anyone() -> ApiClient:
    """Client without a key."""
    return ApiClient()


def test_a_file_is_uploaded_and_downloaded_without_a_key(anyone: ApiClient, ada: ApiClient, create_url, lease) -> None:
    upload, download = create_url(method="PUT"), create_url()
    assert anyone.get(download).status_code == 404
    renewed_at = Lease.objects.get().last_activity_at
    assert anyone.put(upload, b"content").status_code == 204
    response = anyone.get(download)
    assert (response.status_code, response.content, response["Leasehold-Source"]) == (200, b"content", "sandbox")
    assert (response["Cache-Control"], response["Referrer-Policy"]) == ("no-store", "no-referrer")
    assert anyone.get(download, range="bytes=1-3").content == b"ont"
    assert anyone.client.head(download)["Content-Length"] == "7"
    assert ada.get(f"leases/{lease['id']}/files/notes/a%20b.txt").content == b"content"
    run = Run.objects.get(argv__0="write")
    assert (run.kind, run.argv, run.outcome) == ("file", ["write", "/workspace/notes/a b.txt"], "ok")
    assert Lease.objects.get().last_activity_at > renewed_at


def test_a_url_of_data_reads_data(anyone: ApiClient, create_url) -> None:
    assert anyone.put(create_url("x", "PUT", root="data"), b"1").status_code == 204
    assert anyone.get(create_url("x", root="data")).content == b"1"
    assert anyone.get(create_url("x")).status_code == 404


def test_a_url_permits_no_other_method(anyone: ApiClient, create_url) -> None:
    upload, download = create_url("a", "PUT"), create_url("a")
    assert_refused(anyone, "GET", upload, None, 401)
    assert_refused(anyone, "PUT", download, b"x", 401)
    for method in ("POST", "DELETE"):
        assert anyone(method, upload).status_code == 405


def test_an_upload_has_at_most_its_limit(anyone: ApiClient, create_url, memory: MemoryProvider) -> None:
    url = create_url("a", "PUT", max_bytes=4)
    assert_refused(anyone, "PUT", url, b"12345", 413)
    assert anyone.put(url, b"1234").status_code == 204
    assert anyone.put(create_url("b", "PUT", max_bytes=0), b"").status_code == 204


def test_a_changed_or_foreign_token_is_refused(anyone: ApiClient, ada: ApiClient, create_url) -> None:
    url = create_url("a")
    token = parse_qs(urlsplit(url).query)["token"][0]
    fields = signing.Signer(salt=file_urls.SALT).unsign_object(token)
    forged = [
        token[:-1] + ("A" if token[-1] != "A" else "B"), "", "x", ":", "é", token * 200, token.upper(),
        signing.dumps(fields, salt=file_urls.SALT), signing.Signer().sign_object(fields),
        signing.Signer(salt="leasehold.other").sign_object(fields),
        signing.Signer(salt=file_urls.SALT, key="another key").sign_object(fields),
    ]  # fmt: skip
    for each in forged:
        problem = assert_refused(anyone, "GET", f"/api/v1/signed-files?token={each}", None, 401)
        assert problem["code"] == "signed_url_invalid", each
    assert assert_refused(anyone, "GET", "/api/v1/signed-files", None, 401)["code"] == "unauthenticated"
    assert_refused(ada, "GET", "/api/v1/signed-files", None, 401)  # a key is no token


def test_a_url_expires(anyone: ApiClient, create_url, monkeypatch: pytest.MonkeyPatch) -> None:
    url, at = create_url("a", expires_seconds=60), timezone.now()
    for seconds, status in ((58, 404), (61, 401)):
        monkeypatch.setattr("sandboxes.db.database_time.now", lambda seconds=seconds: at + timedelta(seconds=seconds))
        assert anyone.get(url).status_code == status
    assert anyone.get(url).json()["code"] == "signed_url_expired"


def test_a_url_ends_with_its_lease(anyone: ApiClient, ada: ApiClient, create_url, lease) -> None:
    urls = [("GET", create_url("a")), ("PUT", create_url("a", "PUT"))]
    ada.post(f"leases/{lease['id']}/release")
    for method, url in urls:
        assert assert_refused(anyone, method, url, b"x", 410)["code"] == "lease_ended"
    body = {"path": "a", "method": "GET"}
    assert_refused(ada, "POST", f"leases/{lease['id']}/file-urls", body, 410)


def test_a_url_of_an_expired_lease_is_refused_before_a_sweep(anyone: ApiClient, create_url, lease) -> None:
    url = create_url("a", "PUT")
    expire_lease(lease["id"])
    assert anyone.put(url, b"x").status_code == 410


def test_a_url_ends_with_its_key(anyone: ApiClient, create_url, issue) -> None:
    for change in (
        {"revoked_at": timezone.now()}, {"expires_at": timezone.now()}, {"dids": [BOB]}, {"scopes": ["costs"]}
    ):  # fmt: skip
        client = issue(ADA)
        url = create_url("a", "PUT", client=client)
        assert anyone.put(url, b"1").status_code == 204
        AgentKey.objects.filter(prefix=client.key[3:11]).update(**change)
        assert anyone.put(url, b"2").status_code in (401, 403, 404), change
        assert anyone.get(create_url("a")).content == b"1"


def test_a_rotated_key_keeps_its_urls(anyone: ApiClient, create_url) -> None:
    url = create_url("a", "PUT")
    api_keys.rotate_key(AgentKey.objects.get().pk, now=timezone.now())
    assert anyone.put(url, b"1").status_code == 204


def test_only_a_key_with_access_creates_urls(bob: ApiClient, issue, lease) -> None:
    path, body = f"leases/{lease['id']}/file-urls", {"path": "a", "method": "GET"}
    assert_refused(bob, "POST", path, body, 404)
    assert_refused(issue(ADA, scopes=["read"]), "POST", path, body, 403)


def test_a_token_is_in_no_log(
    anyone: ApiClient, create_url, memory: MemoryProvider, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    url = create_url("a", "PUT")
    token = parse_qs(urlsplit(url).query)["token"][0]
    with caplog.at_level(logging.DEBUG):
        anyone.put(url, b"1")
        anyone.get(url)
        with memory.fail("write_file", ProviderError("engine down")):
            anyone.put(url, b"1")
        with memory.fail("write_file", RuntimeError("bug")):
            assert anyone.put(url, b"1").status_code == 500
    written = caplog.text + "".join(capfd.readouterr())
    assert "/api/v1/signed-files" in written  # the failed request was logged
    assert token not in written
    assert not Run.objects.filter(note__contains=token[:40]).exists()
