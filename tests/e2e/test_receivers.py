"""Sweeps of an installation that sends requests to servers that do not respond: receivers of webhooks, forges, PDSs."""

import time
from collections.abc import Callable, Mapping
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


ADD_FORGES_AND_ACCOUNTS = """
from datetime import timedelta
from django.utils import timezone
from leases import leasing
from leases.atproto import accounts
from leases.atproto.models import AtprotoRecord
from leases.coding.models import CodingTask, ForgeKind, Repository
from leases.models import EnvironmentType
from sandboxes.models import Policy
now = timezone.now()
policy = Policy.objects.create(name="recorded", record_collections=["org.example.move"])
EnvironmentType.objects.filter(name="coding").update(policy=policy)
for number in range({count}):
    name = f"repository-{{number}}"
    repository = Repository.objects.create(
        name=name, clone_url=f"/srv/{{name}}", forge=ForgeKind.GITHUB, api_url="{forge}", forge_project=f"owner/{{name}}"
    )
    did = f"did:plc:agent{{number}}"
    lease, _ = leasing.acquire(leasing.LeaseRequest(did, f"game-{{number}}", "coding"), now=now)
    CodingTask.objects.create(
        environment_id=f"game-{{number}}", repository=repository, title="Task", base_branch="main", branch="task",
        status="proposed", head_commit="a" * 40, pull_request_number=1, next_poll_at=now,
    )
    accounts.set_account(did, service_url="{pds}", password="secret", now=now)
    AtprotoRecord.objects.create(
        lease=lease, agent_did=did, collection="org.example.move", record_key=str(number), value_text="{{}}", created_at=now,
        next_attempt_at=now, give_up_at=now + timedelta(days=1),
    )
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
        ages = observe_sweeps(home)
        assert len({one.headers["webhook-id"] for one in healthy.received}) == EVENTS
        assert silent.received and dripping.received
        assert find_late_sweeps(ages) == {}


def test_forges_and_repository_servers_that_do_not_respond_stop_no_sweep(home: Home) -> None:
    """Also not the two sweeps that send the requests, which go on with others."""
    with ExitStack() as stack:
        forge, pds = (stack.enter_context(run_receiver()) for _ in range(2))
        forge.answer, pds.answer = never_respond, never_respond
        urls = {"forge": forge.url, "pds": pds.url.removesuffix("/events")}
        run_shell(home, ADD_FORGES_AND_ACCOUNTS.format(count=RECEIVERS_OF_EACH_KIND, **urls))
        home.up()
        wait_until(lambda: home.get("/readyz")[0] == 200, "ready", within=120)
        ages = observe_sweeps(home)
        assert forge.received and pds.received
        assert find_late_sweeps(ages) == {}


def observe_sweeps(home: Home) -> dict[str, float]:
    """Return the largest age in seconds of each sweep during OBSERVED, in which the installation remains ready."""
    ages, until = dict[str, float](), time.monotonic() + OBSERVED.total_seconds()
    while time.monotonic() < until:
        status, report = home.get("/readyz")
        assert status == 200, report["missing"]
        for name, sweep in report["sweeps"].items():
            ages[name] = max(ages.get(name, 0.0), sweep["age_seconds"] or 0.0)
        time.sleep(2)
    return ages


def find_late_sweeps(ages: Mapping[str, float]) -> dict[str, float]:
    """Return the sweeps that were older than two intervals."""
    return {name: age for name, age in ages.items() if age > 2 * SCHEDULE[name].interval.total_seconds()}


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
