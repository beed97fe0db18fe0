"""Sign-in by a trusted proxy: who may name a user, what a user is given, and when the session ends."""

from collections.abc import Callable
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.exceptions import ImproperlyConfigured
from django.test import Client

from tests.admin.sign_in.conftest import PASSWORD, Clock, is_signed_in, sign_in
from tests.commands.manage import load_settings

PROXY = "10.0.0.1"
HEADER = "HTTP_REMOTEUSER"


@pytest.fixture
def proxied(configure: Callable[..., None], db: None) -> None:
    configure(user_header="RemoteUser", trusted_proxies=(ip_network("10.0.0.0/24"),))


def open_console(name: str | None, peer: str = PROXY, browser: Client | None = None, **extra: Any) -> bool:
    """Return whether a request that names this user is served as one of a signed-in user."""
    headers = {} if name is None else {HEADER: name}
    return is_signed_in(browser or Client(), REMOTE_ADDR=peer, **headers, **extra)


def test_trusted_proxy_signs_a_user_in(proxied: None, ada: User) -> None:
    assert open_console("ada")
    assert not open_console(None)


@pytest.mark.parametrize("peer", ["192.0.2.1", "127.0.0.1", "::1", "10.0.1.1", ""])
def test_header_of_anyone_else_is_ignored(peer: str, proxied: None, ada: User) -> None:
    assert not open_console("ada", peer)
    assert not open_console("ada", peer, HTTP_X_FORWARDED_FOR=PROXY)
    assert not open_console("mallory", peer)
    assert User.objects.count() == 1


def test_without_the_setting_the_header_is_ignored(configure: Callable[..., None], ada: User) -> None:
    configure(trusted_proxies=(ip_network("10.0.0.0/24"),))
    assert not open_console("ada")


@pytest.mark.parametrize(
    "name", ["REMOTE_USER", "HTTP_REMOTE_USER", "HTTP_X_REMOTE_USER", "HTTP_X_FORWARDED_USER", "HTTP_REMOTE_USERS"]
)
def test_other_headers_name_nobody(name: str, proxied: None, ada: User) -> None:
    """REMOTE_USER without HTTP_ is a variable that a server sets, which granian does not."""
    assert not is_signed_in(Client(), REMOTE_ADDR=PROXY, **{name: "ada"})


@pytest.mark.parametrize("name", ["", " ", "ada,ada", "ada, mallory", "x" * 151, "a\nb", "ada\x00", "a b", "<b>", "ädä"])
def test_unusual_names_are_nobody(name: str, proxied: None, ada: User) -> None:
    assert not open_console(name)
    assert User.objects.count() == 1


def test_an_unknown_user_gets_no_right(proxied: None) -> None:
    assert not open_console("bob")
    bob = User.objects.get()
    assert (bob.username, bob.is_staff, bob.is_superuser, bob.groups.count()) == ("bob", False, False, 0)
    assert not bob.has_usable_password()
    User.objects.update(is_staff=True)  # as an administrator does
    assert open_console("bob")
    browser = Client()
    assert browser.get("/admin/leases/lease/", REMOTE_ADDR=PROXY, **{HEADER: "bob"}).status_code == 403


def test_an_inactive_user_stays_out(proxied: None, ada: User) -> None:
    User.objects.update(is_active=False)
    assert not open_console("ada")


def test_session_ends_without_the_header_and_elsewhere(proxied: None, ada: User) -> None:
    for name, peer in ((None, PROXY), ("ada", "192.0.2.1"), (None, "192.0.2.1")):
        browser = Client()
        assert open_console("ada", browser=browser)
        stolen = Client()
        stolen.cookies["sessionid"] = browser.cookies["sessionid"].value
        assert not open_console(name, peer, stolen)
        assert not open_console(name, peer, browser)


def test_an_operator_of_the_proxy_is_signed_in_again_after_the_idle_time(proxied: None, ada: User, clock: Clock) -> None:
    browser = Client()
    assert open_console("ada", browser=browser)
    key = browser.session.session_key
    clock.advance(hours=2)
    assert open_console("ada", browser=browser)
    assert browser.session.session_key != key


def test_another_user_of_the_proxy_replaces_the_first(proxied: None, ada: User) -> None:
    User.objects.create_user("bob", is_staff=True)
    browser = Client()
    open_console("ada", browser=browser)
    open_console("bob", browser=browser)
    assert browser.session["_auth_user_id"] == str(User.objects.get(username="bob").pk)


def test_passwords_work_beside_the_header(proxied: None, ada: User) -> None:
    browser = Client()
    assert sign_in("ada", PASSWORD, browser=browser).status_code == 302
    assert is_signed_in(browser)


def test_api_ignores_the_header(proxied: None, ada: User) -> None:
    assert Client().get("/api/v1/leases", REMOTE_ADDR=PROXY, **{HEADER: "ada"}).status_code == 401
    assert Client().get("/api/v1/leases", REMOTE_ADDR=PROXY, **{HEADER: "mallory"}).status_code == 401
    assert User.objects.count() == 1


def test_requests_that_change_something_need_the_csrf_token(proxied: None, ada: User) -> None:
    browser = Client(enforce_csrf_checks=True)
    assert browser.post("/admin/auth/user/add/", REMOTE_ADDR=PROXY, **{HEADER: "ada"}).status_code == 403


@pytest.mark.parametrize("name", ["Remote-User", "Remote_User", "X-Forwarded-User", "Remote User", "RemoteUser:"])
def test_header_with_a_second_spelling_is_refused(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In WSGI a client could send Remote_User beside the Remote-User of the proxy, and either may win."""
    with pytest.raises(ImproperlyConfigured, match="LEASEHOLD_USER_HEADER"):
        load_settings(monkeypatch, tmp_path, LEASEHOLD_USER_HEADER=name, LEASEHOLD_TRUSTED_PROXIES="127.0.0.1")


def test_header_without_trusted_proxies_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ImproperlyConfigured, match="LEASEHOLD_TRUSTED_PROXIES is not"):
        load_settings(monkeypatch, tmp_path, LEASEHOLD_USER_HEADER="RemoteUser")
