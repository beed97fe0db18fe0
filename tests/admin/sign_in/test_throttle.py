"""Guesses of passwords: how many are verified, from one address, from many, in parallel, and what the operator notices."""

import io
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth import authenticate
from django.contrib.auth.models import User
from django.test import Client
from django.test.client import FakePayload

from controlplane.console.sign_in import throttle
from controlplane.console.sign_in.browsers import get_cookie_name
from controlplane.console.sign_in.models import SignInThrottle
from controlplane.console.sign_in.throttle import FREE_ATTEMPTS, Kind, SignInThrottled
from tests.admin.sign_in.conftest import LOGIN, PASSWORD, Clock, is_signed_in, sign_in
from tests.commands.manage import call
from tests.conftest import NOW, run_in_threads

DAY = timedelta(days=1)


def guess_all_day(keys_of_guess: Any, *, every: timedelta) -> int:
    """Guess at this interval for a day. Return the number of guesses that are verified."""
    verified, now, number = 0, NOW, 0
    while now < NOW + DAY:
        try:
            throttle.admit(keys_of_guess(number), now=now)
            verified += 1
        except SignInThrottled:
            pass
        number += 1
        now += every
    return verified


# --- attacks ------------------------------------------------------------------------------------------------------


def test_five_guesses_for_one_name_from_many_addresses_are_verified(ada: User, clock: Clock, hashes: list[str]) -> None:
    del hashes[:]
    statuses = [sign_in("ada", f"guess {number}", f"198.51.100.{number}").status_code for number in range(40)]
    assert statuses == [200] * 5 + [429] * 35
    assert hashes == [f"guess {number}" for number in range(5)]


def test_ten_guesses_for_many_names_from_one_address_are_verified(ada: User, clock: Clock, hashes: list[str]) -> None:
    del hashes[:]
    statuses = [sign_in(f"user{number}", "guess").status_code for number in range(40)]
    assert statuses == [200] * 10 + [429] * 30
    assert len(hashes) == 10


@pytest.mark.parametrize(
    "names", [["ada", "Ada", "ADA", "ａｄａ"], ["nobody", "NOBODY", "nobody", "nobody"]], ids=["existing", "unknown"]
)  # fmt: skip
def test_spellings_of_a_name_and_unknown_names_are_throttled_alike(ada: User, clock: Clock, names: list[str]) -> None:
    statuses = [sign_in(name, "guess", f"198.51.100.{number}").status_code for number, name in enumerate(names * 2)]
    assert statuses == [200] * 5 + [429] * 3


def test_addresses_of_one_ipv6_network_are_one_client(ada: User, clock: Clock) -> None:
    statuses = [sign_in(f"user{number}", "guess", f"2001:db8::{number:x}").status_code for number in range(12)]
    assert statuses == [200] * 10 + [429] * 2
    assert sign_in("ada", PASSWORD, "2001:db8:0:1::1").status_code == 302


def test_a_stated_address_is_not_believed(ada: User, clock: Clock) -> None:
    headers = [{"x-forwarded-for": f"198.51.100.{number}", "x-real-ip": f"198.51.100.{number}"} for number in range(12)]
    statuses = [sign_in(f"user{number}", "guess", **each).status_code for number, each in enumerate(headers)]
    assert statuses == [200] * 10 + [429] * 2


@pytest.mark.django_db
def test_a_day_of_guesses_for_one_name_from_new_addresses_verifies_few() -> None:
    def keys(number: int) -> list[Any]:
        return [throttle.build_name_key("ada"), throttle.build_address_key(f"2001:db8:{number:x}::1")]

    assert guess_all_day(keys, every=timedelta(seconds=30)) < 120


@pytest.mark.django_db
def test_a_day_of_guesses_for_new_names_from_one_address_verifies_few() -> None:
    def keys(number: int) -> list[Any]:
        return [throttle.build_name_key(f"user{number}"), throttle.build_address_key("192.0.2.1")]

    assert guess_all_day(keys, every=timedelta(seconds=30)) < 120


@pytest.mark.django_db
def test_delay_doubles_up_to_a_quarter_of_an_hour() -> None:
    keys, now, delays = [throttle.build_name_key("ada")], NOW, list[float]()
    for _ in range(18):
        throttle.admit(keys, now=now)
        retry_at = SignInThrottle.objects.get().next_allowed_at
        delays.append((retry_at - now).total_seconds())
        if retry_at > now:
            with pytest.raises(SignInThrottled):
                throttle.admit(keys, now=retry_at - timedelta(microseconds=1))
        now = retry_at
    assert delays == [0] * 4 + [1, 2, 4, 8, 16, 32, 64, 128, 256, 512] + [900] * 4


def test_own_sign_ins_between_guesses_do_not_free_the_address(ada: User, clock: Clock) -> None:
    """A user with an account of his own guesses the passwords of others, and signs in himself after each guess."""
    verified = 0
    for number in range(30):
        verified += sign_in(f"user{number}", "guess").status_code == 200
        sign_in("ada", PASSWORD)
    assert verified == FREE_ATTEMPTS[Kind.ADDRESS]


def test_the_current_password_is_not_guessed_in_a_session(ada: User, clock: Clock, hashes: list[str]) -> None:
    browser = Client()
    browser.force_login(ada)
    del hashes[:]
    form = {"new_password1": "another good password", "new_password2": "another good password"}
    statuses = [
        browser.post("/admin/password_change/", form | {"old_password": f"guess {number}"}).status_code for number in range(12)
    ]
    assert statuses == [200] * 5 + [429] * 7
    assert sum(each.startswith("guess") for each in hashes) == 5
    clock.advance(minutes=15)
    assert browser.post("/admin/password_change/", form | {"old_password": PASSWORD}).status_code == 302
    assert not SignInThrottle.objects.filter(kind=Kind.USER, failures__gt=0).exists()


@pytest.mark.parametrize("path", [LOGIN, "/admin/", "/admin/password_change/", "/nothing"])
def test_a_large_form_of_a_stranger_is_not_read(path: str, ada: User, hashes: list[str]) -> None:
    class Unread(io.BytesIO):
        def read(self, *args: Any) -> bytes:
            raise AssertionError("The body was read.")

    del hashes[:]
    body = FakePayload(b"username=ada&password=" + b"x" * (64 << 10))
    request = {"REQUEST_METHOD": "POST", "PATH_INFO": path, "CONTENT_TYPE": "application/x-www-form-urlencoded"}
    response = Client().request(**request, CONTENT_LENGTH=str(len(body)), **{"wsgi.input": Unread()})
    assert (response.status_code, hashes) == (413, [])


@pytest.mark.django_db(transaction=True)
@pytest.mark.postgres("race of guesses: rows are locked and read again")
@pytest.mark.parametrize("is_known", [True, False], ids=["known name", "unknown name"])
def test_parallel_guesses_get_no_more_than_the_permitted_number(is_known: bool, clock: Clock, hashes: list[str]) -> None:
    if is_known:
        User.objects.create_superuser("ada", password=PASSWORD)
        sign_in("ada", "first guess", "203.0.113.1")
    del hashes[:]
    with run_in_threads(16) as run:
        responses = run(lambda number: sign_in("ada", "guess", f"198.51.100.{number}"))
    left = FREE_ATTEMPTS[Kind.NAME] - is_known
    assert sorted(response.status_code for response in responses) == [200] * left + [429] * (16 - left)
    assert len(hashes) == left


@pytest.mark.django_db(transaction=True)
@pytest.mark.postgres("race of guesses: two rows are locked")
def test_parallel_guesses_for_crossing_names_and_addresses_do_not_deadlock(clock: Clock) -> None:
    pairs = [(f"user{name}", f"198.51.100.{address}") for name in range(4) for address in range(4)]
    with run_in_threads(16) as run:
        responses = run(lambda index: sign_in(pairs[index][0], "guess", pairs[index][1]))
    assert {response.status_code for response in responses} == {200}


@pytest.mark.django_db(transaction=True)
@pytest.mark.postgres("race of guesses and deletion of old rows")
def test_parallel_guesses_on_old_rows_are_counted_or_throttled(clock: Clock) -> None:
    pairs = [(f"user{name}", f"198.51.100.{address}") for name in range(4) for address in range(4)]
    for pair in pairs:
        sign_in(pair[0], "guess", pair[1])
    clock.advance(days=3)
    with run_in_threads(16) as run:
        responses = run(lambda index: sign_in(pairs[index][0], "guess", pairs[index][1]))
    assert {response.status_code for response in responses} <= {200, 429}
    assert not SignInThrottle.objects.filter(last_attempt_at__lt=clock.now - DAY).exists()


# --- what the operator notices ------------------------------------------------------------------------------------


def test_throttled_attempt_says_when_to_try_again(ada: User, clock: Clock) -> None:
    for _ in range(8):
        response = sign_in("ada", "guess")
        clock.advance(seconds=0.5)
    assert (response.status_code, response["Retry-After"]) == (429, "2")
    page = response.content.decode()
    assert "Try again at" in page and "12:00:05 UTC</time>, in 2 seconds." in page
    assert "Content-Security-Policy" in response and response["Cache-Control"] == "no-store"
    clock.advance(seconds=1)
    assert sign_in("ada", PASSWORD).status_code == 302


def test_a_right_password_is_not_accepted_while_throttled(ada: User, clock: Clock) -> None:
    browser = Client()
    for _ in range(5):
        sign_in("ada", "guess")
    assert sign_in("ada", PASSWORD, browser=browser).status_code == 429
    assert not is_signed_in(browser)


def test_a_stranger_does_not_keep_the_operator_out_of_a_browser_that_signed_in_before(ada: User, clock: Clock) -> None:
    """The stranger takes each permitted attempt for weeks, from everywhere, also from the operator's address."""
    browser = Client()
    assert sign_in("ada", PASSWORD, browser=browser).status_code == 302
    for number in range(40):
        sign_in("ada", "guess", f"198.51.100.{number}")
        sign_in(f"user{number}", "guess")
    clock.advance(days=20)
    for number in range(40):
        sign_in("ada", "guess", f"198.51.100.{number}")
        sign_in(f"user{number}", "guess")
    assert sign_in("ada", PASSWORD).status_code == 429
    assert sign_in("ada", PASSWORD, browser=browser).status_code == 302


@pytest.mark.parametrize("name", ["ada", "bob"])
def test_a_browser_that_signed_in_before_guesses_no_more_than_others(name: str, ada: User, clock: Clock) -> None:
    User.objects.create_user("bob", password="x")
    browser = Client()
    sign_in("ada", PASSWORD, browser=browser)
    browser.cookies.pop("sessionid")
    statuses = [sign_in(name, "guess", browser=browser).status_code for _ in range(10)]
    assert statuses == [200] * 5 + [429] * 5


@pytest.mark.parametrize("cookie", ["", "x", "eyJpZCI6IngifQ:1:x", "é" * 3000])
def test_a_forged_mark_of_a_browser_counts_for_the_name(cookie: str, ada: User, clock: Clock) -> None:
    statuses = []
    for number in range(8):
        browser = Client()
        browser.cookies[get_cookie_name()] = cookie
        statuses.append(sign_in("ada", "guess", f"198.51.100.{number}", browser).status_code)
    assert statuses == [200] * 5 + [429] * 3


def test_a_sign_in_forgets_the_failures_of_its_name(ada: User, clock: Clock) -> None:
    for _ in range(4):
        sign_in("ada", "typing error")
    assert sign_in("ada", PASSWORD).status_code == 302
    assert [sign_in("ada", "typing error").status_code for _ in range(4)] == [200] * 4


@pytest.mark.django_db
def test_failures_are_forgotten_after_a_day_and_their_rows_deleted() -> None:
    keys, now = [throttle.build_name_key("ada")], NOW
    for _ in range(5):
        throttle.admit(keys, now=now)
    for _ in range(5):
        throttle.admit(keys, now=now + DAY + timedelta(seconds=1))
    throttle.admit([throttle.build_name_key("bob")], now=now + 3 * DAY)
    assert [row.digest for row in SignInThrottle.objects.all()] == [throttle.build_name_key("bob").digest]


def test_command_forgets_the_failures_of_a_user_and_of_an_address(ada: User, clock: Clock) -> None:
    for number in range(12):
        sign_in("ada", "guess", "198.51.100.1")
        sign_in(f"user{number}", "guess")
    assert sign_in("ada", PASSWORD).status_code == 429
    assert call("sign_ins", "--user", "ada") == "The failed attempts are forgotten.\n"
    assert sign_in("ada", PASSWORD).status_code == 429  # by its address
    assert call("sign_ins", "--address", "192.0.2.1") == "The failed attempts are forgotten.\n"
    assert sign_in("ada", PASSWORD).status_code == 302
    assert call("sign_ins", "--user", "nobody") == "There were no failed attempts.\n"


def test_commands_and_other_callers_without_a_request_are_not_throttled(ada: User) -> None:
    assert [authenticate(username="ada", password="guess") for _ in range(20)] == [None] * 20
    assert authenticate(username="ada", password=PASSWORD) == ada


def test_rows_hold_neither_names_nor_addresses(ada: User, clock: Clock) -> None:
    sign_in("a password typed as name", "guess")
    assert {len(row.digest) for row in SignInThrottle.objects.all()} == {64}
