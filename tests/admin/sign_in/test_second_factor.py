"""Second factor: who needs a code, what a password alone reaches, guesses, reuse, setting up and losing the app."""

from collections.abc import Callable
from ipaddress import ip_network
from pathlib import Path
from types import SimpleNamespace

import pytest
from django.contrib import admin
from django.contrib.auth.models import Group, User
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError
from django.test import Client
from django.urls import get_resolver
from django_otp.oath import TOTP
from django_otp.plugins.otp_static.models import StaticToken
from django_otp.plugins.otp_totp import models as totp_models
from django_otp.plugins.otp_totp.models import TOTPDevice

from controlplane.console.sign_in import configuration
from controlplane.console.sign_in.second_factor import devices
from tests.admin.sign_in.conftest import PASSWORD, Clock, is_signed_in, sign_in
from tests.commands.manage import call, load_settings
from tests.conftest import run_in_threads

ASK, SET_UP = "/admin/second-factor/", "/admin/second-factor/setup/"
SECRET = "3132333435363738393031323334353637383930"


@pytest.fixture
def clock(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(totp_models, "time", SimpleNamespace(time=lambda: clock.now.timestamp()))
    return clock


def show_code(clock: Clock, secret: str = SECRET) -> str:
    """Return the code that the app shows."""
    totp = TOTP(bytes.fromhex(secret))
    totp.time = clock.now.timestamp()
    return f"{totp.token():06d}"


@pytest.fixture
def enrolled(ada: User, configure: Callable[..., None], clock: Clock) -> list[str]:
    """The backup codes of ada, who has an app."""
    configure(second_factor="enrolled")
    result = devices.enroll(ada, SECRET, show_code(clock), now=clock.now)
    assert result
    clock.advance(seconds=60)
    return list(result[1])


@pytest.fixture
def browser(enrolled: list[str]) -> Client:
    """Browser in which the password has been accepted."""
    browser = Client()
    assert sign_in("ada", PASSWORD, browser=browser).status_code == 302
    return browser


# --- a password alone ---------------------------------------------------------------------------------------------


def list_paths() -> list[str]:
    """Paths of the console without parameters, and one with each."""
    pages = [f"/admin/{model._meta.app_label}/{model._meta.model_name}/" for model in admin.site._registry]
    fixed = [
        "fleet/",
        "spending/",
        "inventory/",
        "password_change/",
        "jsi18n/",
        "autocomplete/",
        "auth/user/add/",
        "nothing/",
        "",
    ]
    return [*pages, *[f"/admin/{each}" for each in fixed]]


def test_password_alone_reaches_no_page(browser: Client) -> None:
    for path in list_paths():
        for response in (browser.get(path), browser.post(path, {"_save": "1"})):
            assert response.status_code == 302 and response["Location"].startswith(f"{ASK}?next="), path
    assert get_resolver().resolve(ASK).url_name == "second_factor"


def test_password_alone_does_not_replace_the_app(browser: Client, clock: Clock) -> None:
    for method in (browser.get, browser.post):
        assert method(SET_UP)["Location"].startswith(ASK)
    assert [device.key for device in TOTPDevice.objects.all()] == [SECRET]


def test_code_opens_the_console_in_a_new_session(browser: Client, clock: Clock) -> None:
    key = browser.session.session_key
    response = browser.post(f"{ASK}?next=/admin/password_change/", {"code": show_code(clock)})
    assert (response.status_code, response["Location"]) == (302, "/admin/password_change/")
    assert is_signed_in(browser) and browser.session.session_key != key
    assert browser.get(ASK)["Location"] == "/admin/"


@pytest.mark.parametrize("target", ["https://evil.example/", "//evil.example", "javascript:alert(1)", "\\\\evil.example", ""])
def test_code_leads_to_no_other_host(target: str, browser: Client, clock: Clock) -> None:
    assert browser.post(ASK, {"code": show_code(clock)}, QUERY_STRING=f"next={target}")["Location"] == "/admin/"


@pytest.mark.parametrize("code", ["", "000000", "abcdefgh", "-1", "1" * 100_000, "\x00", "１２３４５６", "1e5", "None", "0x1"])
def test_invalid_code_is_refused(code: str, browser: Client) -> None:
    response = browser.post(ASK, {"code": code})
    assert (response.status_code, b"not valid" in response.content) == (200, True)
    assert not is_signed_in(browser)


def test_a_code_is_accepted_once(browser: Client, clock: Clock) -> None:
    code = show_code(clock)
    assert browser.post(ASK, {"code": code}).status_code == 302
    other = Client()
    sign_in("ada", PASSWORD, browser=other)
    assert other.post(ASK, {"code": code}).status_code == 200
    assert not is_signed_in(other)


def test_a_backup_code_is_accepted_once(browser: Client, enrolled: list[str]) -> None:
    shown = f" {enrolled[0][:4].upper()} {enrolled[0][4:]} "
    assert browser.post(ASK, {"code": shown}).status_code == 302
    assert is_signed_in(browser)
    other = Client()
    sign_in("ada", PASSWORD, browser=other)
    assert other.post(ASK, {"code": enrolled[0]}).status_code == 200
    assert StaticToken.objects.count() == devices.BACKUP_CODES - 1


def test_guesses_of_codes_are_throttled_in_all_sessions_of_the_user(browser: Client, clock: Clock) -> None:
    statuses = []
    for number in range(8):
        sign_in("ada", PASSWORD, browser=browser)
        statuses.append(browser.post(ASK, {"code": f"{number:06d}"}).status_code)
    assert statuses == [200] * 5 + [429] * 3
    assert browser.post(ASK, {"code": show_code(clock)}).status_code == 429
    clock.advance(seconds=2)
    assert browser.post(ASK, {"code": show_code(clock)}).status_code == 302


@pytest.mark.django_db(transaction=True)
@pytest.mark.postgres("race of a code: devices are locked")
def test_parallel_requests_with_one_code_are_accepted_once(browser: Client, clock: Clock) -> None:
    code = show_code(clock)
    browsers = [Client() for _ in range(5)]
    for each in browsers:
        sign_in("ada", PASSWORD, browser=each)
    with run_in_threads(5) as run:
        responses = run(lambda index: browsers[index].post(ASK, {"code": code}))
    assert sorted(response.status_code for response in responses) == [200] * 4 + [302]


def test_a_code_of_another_user_is_refused(browser: Client, clock: Clock) -> None:
    bob = User.objects.create_superuser("bob", password=PASSWORD)
    secret = devices.generate_secret()
    assert devices.enroll(bob, secret, show_code(clock, secret), now=clock.now)
    clock.advance(seconds=60)
    assert browser.post(ASK, {"code": show_code(clock, secret)}).status_code == 200


def test_api_and_health_are_not_asked(browser: Client) -> None:
    assert browser.get("/api/v1/leases").status_code == 401
    assert browser.get("/livez").status_code == 200


# --- who needs one ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "is_superuser", "is_asked"),
    [
        ("off", True, False), ("off", False, False), ("enrolled", True, False), ("enrolled", False, False),
        ("superusers", True, True), ("superusers", False, False), ("all", True, True), ("all", False, True),
    ],
)  # fmt: skip
def test_setting_says_who_has_to_set_one_up(
    mode: str, is_superuser: bool, is_asked: bool, ada: User, configure: Callable[..., None], clock: Clock
) -> None:
    configure(second_factor=mode)
    User.objects.update(is_superuser=is_superuser)
    browser = Client()
    sign_in("ada", PASSWORD, browser=browser)
    assert is_signed_in(browser) is not is_asked
    if is_asked:
        assert browser.get(ASK)["Location"].startswith(SET_UP)


def test_users_of_a_proxy_have_its_second_factor(enrolled: list[str], ada: User, configure: Callable[..., None]) -> None:
    configure(second_factor="all", user_header="RemoteUser", trusted_proxies=(ip_network("10.0.0.1"),))
    peer = {"REMOTE_ADDR": "10.0.0.1"}
    assert is_signed_in(Client(), HTTP_REMOTEUSER="ada", **peer)
    browser = Client()
    sign_in("ada", PASSWORD, "10.0.0.1", browser)
    assert not is_signed_in(browser, **peer)


# --- setting up ---------------------------------------------------------------------------------------------------


def test_user_sets_up_an_app_and_gets_backup_codes_once(ada: User, configure: Callable[..., None], clock: Clock) -> None:
    configure(second_factor="all")
    browser = Client()
    sign_in("ada", PASSWORD, browser=browser)
    page = browser.get(SET_UP)
    secret = browser.session["second_factor_secret"]
    assert devices.encode_secret(secret) in page.content.decode() and "data:image/svg+xml" in page.content.decode()
    assert "no-store" in page["Cache-Control"]
    assert b"not valid" in browser.post(SET_UP, {"code": "000000"}).content
    assert not TOTPDevice.objects.exists() and not is_signed_in(browser)
    done = browser.post(SET_UP, {"code": show_code(clock, secret)}).content.decode()
    codes = list(StaticToken.objects.values_list("token", flat=True))
    assert len(codes) == 10 and all(code in done for code in codes)
    assert is_signed_in(browser)
    assert secret not in str(dict(browser.session.items()))
    assert not any(code in browser.get(SET_UP).content.decode() for code in codes)


def test_code_of_the_setup_does_not_sign_in_as_well(ada: User, configure: Callable[..., None], clock: Clock) -> None:
    configure(second_factor="enrolled")
    code = show_code(clock)
    assert devices.enroll(ada, SECRET, code, now=clock.now)
    browser = Client()
    sign_in("ada", PASSWORD, browser=browser)
    assert browser.post(ASK, {"code": code}).status_code == 200


@pytest.mark.parametrize("code", ["", "12", "x", "-1", "９" * 6, "1" * 5000])
def test_setup_with_an_invalid_code_changes_nothing(code: str, browser: Client, clock: Clock, enrolled: list[str]) -> None:
    browser.post(ASK, {"code": show_code(clock)})
    browser.get(SET_UP)
    assert browser.post(SET_UP, {"code": code}).status_code == 200
    assert [device.key for device in TOTPDevice.objects.all()] == [SECRET]
    assert StaticToken.objects.count() == len(enrolled)


def test_a_new_app_replaces_the_present_one_in_a_proved_session(browser: Client, clock: Clock) -> None:
    browser.post(ASK, {"code": show_code(clock)})
    assert b"replaces the present one" in browser.get(SET_UP).content
    secret = browser.session["second_factor_secret"]
    browser.post(SET_UP, {"code": show_code(clock, secret)})
    assert [device.key for device in TOTPDevice.objects.all()] == [secret]
    assert is_signed_in(browser)


def test_removing_the_app_ends_the_proof_of_open_sessions(
    browser: Client, clock: Clock, configure: Callable[..., None]
) -> None:
    configure(second_factor="all")
    browser.post(ASK, {"code": show_code(clock)})
    assert is_signed_in(browser)
    assert call("second_factor", "reset", "ada") == "The app and the backup codes are removed.\n"
    assert not is_signed_in(browser)
    assert not StaticToken.objects.exists()


def test_command_lists_users_and_renews_backup_codes(browser: Client, enrolled: list[str]) -> None:
    User.objects.create_user("bob")
    assert call("second_factor", "list") == "ada: app\nbob: none\n"
    codes = call("second_factor", "codes", "ada").split()
    assert len(codes) == 10 and not set(codes) & set(enrolled)
    assert browser.post(ASK, {"code": enrolled[0]}).status_code == 200
    assert browser.post(ASK, {"code": codes[0]}).status_code == 302
    for arguments in (("codes", "bob"), ("reset", "nobody")):
        with pytest.raises(CommandError):
            call("second_factor", *arguments)


def test_console_shows_no_secret_of_a_device(browser: Client, clock: Clock) -> None:
    browser.post(ASK, {"code": show_code(clock)})
    assert [model for model in admin.site._registry if model._meta.app_label.startswith("otp")] == []
    assert Group.objects.filter(permissions__content_type__app_label__startswith="otp").count() == 0


# --- without the packages -----------------------------------------------------------------------------------------


def test_without_the_setting_nothing_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loaded = load_settings(monkeypatch, tmp_path)
    assert not [app for app in loaded.INSTALLED_APPS if "otp" in app or "second_factor" in app]
    assert not [each for each in loaded.MIDDLEWARE if "second_factor" in each]
    assert "ACCOUNT" not in loaded.UNFOLD


def test_with_the_setting_the_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(configuration, "find_spec", lambda name: None)
    load_settings(monkeypatch, tmp_path)
    with pytest.raises(ImproperlyConfigured, match=r"needs django_otp and segno.*leasehold\[second-factor\]"):
        load_settings(monkeypatch, tmp_path, LEASEHOLD_SECOND_FACTOR="all")
