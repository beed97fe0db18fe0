"""One public address: signed URLs, cookies, redirects, HSTS and trusted origins follow LEASEHOLD_PUBLIC_URL."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.exceptions import ImproperlyConfigured
from django.test import Client

from controlplane.application import _build_headers
from controlplane.checks import check_public_url
from tests.api.conftest import ADA, ApiClient
from tests.commands.manage import load_settings

pytestmark = pytest.mark.django_db
PUBLIC = "https://leasehold.example.com"
FORGED = {
    "HTTP_X_FORWARDED_PROTO": "http", "HTTP_X_FORWARDED_HOST": "evil.example", "HTTP_FORWARDED": "proto=http;host=evil.example",
    "HTTP_X_FORWARDED_PORT": "81", "HTTP_X_FORWARDED_SCHEME": "http", "HTTP_X_ORIGINAL_HOST": "evil.example",
}  # fmt: skip


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Any) -> Callable[..., None]:
    """Function that applies the settings of an installation with these variables."""

    def apply(**variables: str) -> None:
        module = load_settings(monkeypatch, tmp_path, **variables)
        for name in vars(module):
            if name.startswith(("PUBLIC_", "ALLOWED_", "CSRF_", "SESSION_", "SECURE_", "COOKIE_")):
                setattr(settings, name, getattr(module, name))

    return apply


@pytest.fixture
def behind_tls(install: Callable[..., None]) -> None:
    install(LEASEHOLD_PUBLIC_URL=PUBLIC, ALLOWED_HOSTS="testserver,web.internal")


@pytest.fixture
def browser() -> Client:
    User.objects.create_superuser("ada", password="a password for tests")
    return Client(enforce_csrf_checks=True)


def sign_in(browser: Client, **headers: str) -> Any:
    page = browser.get("/admin/login/?next=/admin/", headers={"Host": headers.get("HTTP_HOST", "testserver")})
    token = page.context["csrf_token"]
    fields = {"username": "ada", "password": "a password for tests", "csrfmiddlewaretoken": str(token), "next": "/admin/"}
    return browser.post("/admin/login/", fields, **headers)


@pytest.mark.usefixtures("behind_tls")
@pytest.mark.parametrize("host", ["leasehold.example.com", "leasehold.example.com:8000", "testserver", "web.internal:80"])
@pytest.mark.parametrize("forged", [{}, FORGED])
def test_a_signed_url_has_the_public_address_by_whatever_name_it_was_requested(
    ada: ApiClient, lease: dict[str, Any], host: str, forged: dict[str, str]
) -> None:
    body = {"path": "a", "method": "GET"}
    headers = {"Authorization": f"Bearer {ada.key}"}
    url = f"/api/v1/leases/{lease['id']}/file-urls"
    response = Client().post(url, body, "application/json", headers=headers, HTTP_HOST=host, **forged)
    assert response.status_code == 201, response.content
    assert response.json()["url"].startswith(f"{PUBLIC}/api/v1/signed-files?token=")


@pytest.mark.usefixtures("behind_tls")
def test_the_url_of_the_next_page_has_no_host_of_its_own(ada: ApiClient, lease: dict[str, Any]) -> None:
    ada.post("leases", {"agent_did": ADA, "environment_id": "task-2", "environment_type": "coding"})
    page = (
        Client()
        .get("/api/v1/leases?limit=1", headers={"Authorization": f"Bearer {ada.key}"}, HTTP_HOST="web.internal", **FORGED)
        .json()
    )
    assert page["next"].startswith("/api/v1/leases?limit=1&cursor=")


@pytest.mark.usefixtures("behind_tls")
def test_an_unknown_host_is_refused_and_decides_nothing(ada: ApiClient) -> None:
    for path in ("/api/v1/pool", "/admin/login/", "/admin/"):
        response = Client().get(path, headers={"Authorization": f"Bearer {ada.key}"}, HTTP_HOST="evil.example", **FORGED)
        assert response.status_code == 400, path
        assert b"evil.example" not in response.content
    assert Client().get("/livez", HTTP_HOST="10.1.2.3:8000").status_code == 200  # a probe


@pytest.mark.usefixtures("behind_tls")
def test_cookies_are_secure_and_of_this_host_alone(browser: Client) -> None:
    response = sign_in(browser, HTTP_ORIGIN=PUBLIC)
    assert (response.status_code, response["Location"]) == (302, "/admin/")
    assert sorted(browser.cookies) == ["__Host-csrftoken", "__Host-leasehold_browser", "__Host-sessionid"]
    for cookie in browser.cookies.values():
        assert (cookie["secure"], cookie["httponly"], cookie["path"], cookie["domain"]) == (True, True, "/", "")
    assert browser.get("/admin/").status_code == 200
    assert browser.get("/admin/")["Strict-Transport-Security"] == "max-age=31536000"


@pytest.mark.usefixtures("behind_tls")
def test_cookies_that_another_host_of_the_site_can_set_are_none_of_the_console(browser: Client) -> None:
    sign_in(browser, HTTP_ORIGIN=PUBLIC)
    key = browser.cookies["__Host-sessionid"].value
    stranger = Client()
    stranger.cookies["sessionid"] = key
    assert stranger.get("/admin/").status_code == 302  # not signed in
    browser.cookies["sessionid"], browser.cookies["csrftoken"] = "zzzz", "zzzz"
    assert browser.get("/admin/").status_code == 200


@pytest.mark.usefixtures("behind_tls")
@pytest.mark.parametrize(
    "headers",
    [
        {"HTTP_ORIGIN": "http://leasehold.example.com"}, {"HTTP_ORIGIN": "https://evil.example"}, {"HTTP_ORIGIN": "null"},
        {"HTTP_ORIGIN": "https://leasehold.example.com:8443"}, {"HTTP_ORIGIN": "http://testserver"},
        {"HTTP_ORIGIN": "https://testserver"}, {"HTTP_ORIGIN": "https://web.internal", "HTTP_HOST": "web.internal"},
        {"HTTP_REFERER": "https://evil.example/x"}, {"HTTP_REFERER": "http://leasehold.example.com/admin/login/"},
        {"HTTP_REFERER": "https://preview.leasehold.example.com/"}, {"HTTP_REFERER": ""}, {},
        {"HTTP_ORIGIN": "http://leasehold.example.com", **FORGED},
        {"HTTP_ORIGIN": "https://evil.example", "HTTP_X_FORWARDED_HOST": "evil.example"},
    ],
    ids=str,
)  # fmt: skip
def test_a_post_of_another_origin_is_refused(browser: Client, headers: dict[str, str]) -> None:
    assert sign_in(browser, **headers).status_code == 403


@pytest.mark.usefixtures("behind_tls")
@pytest.mark.parametrize("headers", [{"HTTP_ORIGIN": PUBLIC}, {"HTTP_REFERER": f"{PUBLIC}/admin/login/"}], ids=str)
@pytest.mark.parametrize("host", ["leasehold.example.com", "testserver"])
def test_a_post_of_the_public_origin_is_accepted_by_whatever_name_the_proxy_calls(
    browser: Client, headers: dict[str, str], host: str
) -> None:
    assert sign_in(browser, HTTP_HOST=host, **headers).status_code == 302


def test_a_newcomer_signs_in_over_plain_http_on_loopback(install: Callable[..., None], browser: Client) -> None:
    for variables in ({}, {"LEASEHOLD_PUBLIC_URL": "http://127.0.0.1:8000"}):
        install(**variables)
        browser.cookies.clear()
        response = sign_in(browser, HTTP_HOST="127.0.0.1:8000", HTTP_ORIGIN="http://127.0.0.1:8000")
        assert response.status_code == 302
        assert sorted(browser.cookies) == ["csrftoken", "leasehold_browser", "sessionid"]
        assert not any(cookie["secure"] for cookie in browser.cookies.values())
        assert "Strict-Transport-Security" not in response


def test_renewals_have_the_headers_of_every_response(install: Callable[..., None], ada: ApiClient) -> None:
    for variables in ({}, {"LEASEHOLD_PUBLIC_URL": PUBLIC}):
        install(ALLOWED_HOSTS="testserver", **variables)
        usual = Client().get("/api/v1/pool", headers={"Authorization": f"Bearer {ada.key}"})
        names = {name for name, _ in _build_headers("/api/v1/leases")}
        assert names - {"Vary"} == set(usual.headers) - {"Content-Length", "Allow", "Vary"}


def test_hsts_is_not_sent_for_a_name_that_all_servers_of_a_machine_share(install: Callable[..., None], settings: Any) -> None:
    for host in ("localhost:8443", "127.0.0.1", "127.8.0.1:1", "[::1]:8443"):
        install(LEASEHOLD_PUBLIC_URL=f"https://{host}")
        assert settings.SECURE_HSTS_SECONDS == 0
        assert settings.SESSION_COOKIE_SECURE


@pytest.mark.parametrize(
    ("stated", "url", "host"),
    [
        ("https://Leasehold.Example.com", PUBLIC, "leasehold.example.com"), (f"{PUBLIC}/", PUBLIC, "leasehold.example.com"),
        (f"{PUBLIC}:443", PUBLIC, "leasehold.example.com"), (f"{PUBLIC}:8443", f"{PUBLIC}:8443", "leasehold.example.com"),
        ("http://10.0.0.5:80", "http://10.0.0.5", "10.0.0.5"), ("http://[::1]:8000", "http://[::1]:8000", "[::1]"),
    ],
)  # fmt: skip
def test_the_public_host_is_allowed_without_being_listed(
    install: Callable[..., None], settings: Any, stated: str, url: str, host: str
) -> None:
    install(LEASEHOLD_PUBLIC_URL=stated, ALLOWED_HOSTS="web.internal")
    assert (url, ["web.internal", host]) == (settings.PUBLIC_URL, settings.ALLOWED_HOSTS)


@pytest.mark.parametrize(
    "url",
    [
        "leasehold.example.com", "//leasehold.example.com", "ftp://x.example", "https://", "https:///x", f"{PUBLIC}/path",
        f"{PUBLIC}?q", f"{PUBLIC}/?q", f"{PUBLIC}#f", "https://user@x.example", "https://user:word@x.example", "https://x.example:0x1",
        "https://x.example:65536", "https://x.example:", "https://*.example", "https://x example", "https://x.example\n",
        "https://-x.example-", "https://[::1", "https://[1::2::3]", "https://x.example\\@evil.example",
    ],
)  # fmt: skip
def test_a_malformed_public_url_is_refused(install: Callable[..., None], url: str) -> None:
    with pytest.raises(ImproperlyConfigured, match="LEASEHOLD_PUBLIC_URL"):
        install(LEASEHOLD_PUBLIC_URL=url)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"DEBUG": False}, ["leasehold.E015"]), ({"DEBUG": True}, []), ({"PUBLIC_URL": PUBLIC}, []),
        ({"PUBLIC_URL": "http://127.0.0.1:8000"}, []), ({"PUBLIC_URL": "http://leasehold.lan"}, ["leasehold.W007"]),
        ({"PUBLIC_URL": PUBLIC, "STREAM_URL": "http://streams.example.com"}, ["leasehold.E015"]),
        ({"PUBLIC_URL": PUBLIC, "STREAM_URL": "https://streams.example.com"}, []),
        ({"PUBLIC_URL": PUBLIC, "CSRF_TRUSTED_ORIGINS": ["http://leasehold.example.com"]}, ["leasehold.E015"]),
    ],
    ids=str,
)  # fmt: skip
def test_the_check_before_production_demands_a_public_url(changes: dict[str, Any], found: list[str], settings: Any) -> None:
    settings.PUBLIC_URL, settings.DEBUG = "", False
    for name, value in changes.items():
        setattr(settings, name, value)
    assert [problem.id for problem in check_public_url(None)] == found
