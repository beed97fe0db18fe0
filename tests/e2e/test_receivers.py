"""Sweeps of an installation whose webhooks have receivers that do not respond."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from http.server import BaseHTTPRequestHandler

import pytest

from controlplane.schedules import SCHEDULE
from tests.commands.manage import run_manage
from tests.e2e.conftest import Home
from tests.support.servers.receiver import never_respond, run_receiver, trickle_headers
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.matrix("two rounds of sweeps that run once a minute")]
EVENTS, RECEIVERS_OF_EACH_KIND = 500, 20
OBSERVED = timedelta(seconds=150)
ADD_WEBHOOKS = """
from django.utils import timezone
from sandboxes.webhooks import subscriptions
for url in {urls!r}:
    subscriptions.add_webhook(url, [], now=timezone.now(), internal=True)
"""
ADD_EVENTS = """
from django.utils import timezone
from sandboxes.webhooks import outbox
for number in range({events}):
    outbox.enqueue_event("budget.warning", key=str(number), payload={{"number": number}}, now=timezone.now())
"""


def test_receivers_that_do_not_respond_stop_no_sweep_and_delay_no_event_of_another(home: Home) -> None:
    """Older webhooks than the one that works; with one thread of the queue, the default on SQLite."""
    with ExitStack() as stack:
        silent, dripping, healthy = (stack.enter_context(run_receiver()) for _ in range(3))
        silent.answer, dripping.answer = never_respond, ignore_disconnects(trickle_headers)
        urls = [f"{receiver.url}/{number}" for number in range(RECEIVERS_OF_EACH_KIND) for receiver in (silent, dripping)]
        run_shell(home, ADD_WEBHOOKS.format(urls=[*urls, healthy.url]))
        home.up()
        wait_until(lambda: home.get("/readyz")[0] == 200, "ready", within=120)
        run_shell(home, ADD_EVENTS.format(events=EVENTS))
        ages, until = dict[str, float](), time.monotonic() + OBSERVED.total_seconds()
        while time.monotonic() < until:
            status, report = home.get("/readyz")
            assert status == 200, report["missing"]
            for name, sweep in report["sweeps"].items():
                ages[name] = max(ages.get(name, 0.0), sweep["age_seconds"] or 0.0)
            time.sleep(2)
        assert len({one.headers["webhook-id"] for one in healthy.received}) == EVENTS
        assert silent.received and dripping.received
        assert {name: age for name, age in ages.items() if age > 2 * SCHEDULE[name].interval.total_seconds()} == {}


def run_shell(home: Home, code: str) -> None:
    done = run_manage(home.path, "shell", "--no-imports", "-c", code)
    assert done.returncode == 0, done.stderr


def ignore_disconnects(answer: Callable[[BaseHTTPRequestHandler], None]) -> Callable[[BaseHTTPRequestHandler], None]:
    def respond(request: BaseHTTPRequestHandler) -> None:
        try:
            answer(request)
        except OSError:  # the sender has given up
            request.close_connection = True

    return respond
