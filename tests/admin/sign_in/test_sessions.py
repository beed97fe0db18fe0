"""Limits of sessions: idle time, age, requests that a page makes by itself, and marks that are missing."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.contrib.sessions.models import Session
from django.template.loader import get_template
from django.test import Client

from controlplane.console.sign_in.sessions import BACKGROUND_HEADER, BEGAN_AT, SEEN_AT
from tests.admin.sign_in.conftest import PASSWORD, Clock, is_signed_in, sign_in


@pytest.fixture
def browser(ada: User, clock: Clock) -> Client:
    browser = Client()
    assert sign_in("ada", PASSWORD, browser=browser).status_code == 302
    return browser


def test_session_ends_after_the_idle_time(browser: Client, clock: Clock) -> None:
    clock.advance(minutes=59)
    assert is_signed_in(browser)
    clock.advance(minutes=59)
    assert is_signed_in(browser)
    clock.advance(minutes=60)
    assert not is_signed_in(browser)
    assert not Session.objects.exists()


def test_session_ends_at_its_age_also_in_use(browser: Client, clock: Clock) -> None:
    for _ in range(23):
        clock.advance(minutes=30)
        assert is_signed_in(browser)
    clock.advance(minutes=30)
    assert not is_signed_in(browser)


def test_limits_are_settings(browser: Client, clock: Clock, configure: Callable[..., None]) -> None:
    configure(idle_timeout=timedelta(minutes=5), max_age=timedelta(minutes=20))
    clock.advance(minutes=4)
    assert is_signed_in(browser)
    clock.advance(minutes=5)
    assert not is_signed_in(browser)


def test_requests_of_an_open_page_by_itself_are_no_use(browser: Client, clock: Clock) -> None:
    for _ in range(7):
        clock.advance(minutes=10)
        shown = browser.get("/admin/fleet/", headers={BACKGROUND_HEADER: "1"})
    assert (shown.status_code, b"You are signed out" in shown.content) == (286, True)


@pytest.mark.parametrize("name", ["admin/index.html", "admin/leases/environment/page.html"])
def test_pages_that_refresh_themselves_say_so(name: str) -> None:
    source: Any = get_template(name).template.source  # type: ignore[attr-defined]
    assert "every " in source and BACKGROUND_HEADER in source


def test_every_page_that_refreshes_itself_is_listed() -> None:
    from controlplane.env import BASE_DIR

    pages = [path for path in (BASE_DIR / "templates").rglob("*.html") if 'hx-trigger="every' in path.read_text()]
    assert sorted(path.name for path in pages) == ["index.html", "page.html"]


@pytest.mark.parametrize("change", [{BEGAN_AT: None}, {SEEN_AT: "yesterday"}, {SEEN_AT: 5}, {BEGAN_AT: 1e300}])
def test_session_without_valid_clocks_ends(change: dict[str, Any], browser: Client) -> None:
    session = browser.session
    session.update(change)
    session.save()
    assert not is_signed_in(browser)


def test_session_is_written_once_a_minute_at_most(browser: Client, clock: Clock, django_assert_max_num_queries: Any) -> None:
    is_signed_in(browser)
    clock.advance(seconds=59)
    with django_assert_max_num_queries(2) as queries:
        is_signed_in(browser)
    assert not [each for each in queries.captured_queries if "UPDATE" in each["sql"]]


def test_sign_in_begins_a_new_session(browser: Client, clock: Clock) -> None:
    key = browser.session.session_key
    browser.post("/admin/logout/")
    sign_in("ada", PASSWORD, browser=browser)
    assert browser.session.session_key != key
    assert not Session.objects.filter(session_key=key).exists()
