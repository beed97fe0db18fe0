"""Dashboard: numbers match the lists they link to, and polling stops after signing out."""

import re
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.contrib.auth.models import Group, Permission
from django.test import Client
from django.utils import timezone

from billing import budgets, costs
from billing.dates import start_of_day, to_utc_date
from billing.models import Budget
from controlplane.console import dashboard
from leases.models import Lease
from sandboxes.models import AgentData, Attachment, LlmCall, Pool, Sandbox, Sweep, Webhook
from tests.admin.conftest import ensure_sandbox
from tests.conftest import MINUTE
from tests.support.billing import create_rate, create_time_usage
from tests.support.console import count_queries

pytestmark = pytest.mark.django_db
NO_COUNTS = ("Capacity used", "Cost today", "Cost this month")


@pytest.fixture
def troubled(grant: Callable[..., Lease]) -> None:
    """One or two rows for every tile."""
    now = timezone.now()
    boxes = [ensure_sandbox(grant(agent=f"did:plc:a{number}", now=now)) for number in range(8)]
    grant(environment="late", now=now - 10 * MINUTE, ttl=MINUTE)
    Sandbox.objects.filter(pk=boxes[0].pk).update(state="running", open_runs=1)
    gone = {"state": "destroying", "deadline_at": now - 5 * MINUTE}
    Sandbox.objects.filter(pk__in=[boxes[1].pk, boxes[2].pk]).update(**gone, quarantined_at=now, last_error="engine down")
    Sandbox.objects.filter(pk=boxes[3].pk).update(**gone)
    Sandbox.objects.filter(pk=boxes[4].pk).update(state="waiting", last_error="store down")
    Sandbox.objects.filter(pk=boxes[5].pk).update(state="waiting", last_error="Lost: no container", lost_at=now)
    Sandbox.objects.filter(pk=boxes[6].pk).update(state="cold")
    data = AgentData.objects.create(agent_did="did:plc:a7", created_at=now, changed_at=now)
    Attachment.objects.create(sandbox=boxes[7], incarnation=1, holder=boxes[7].holder, data=data, unsaved_since=now)
    Pool.objects.create(name="drains", draining=True)
    Pool.objects.create(name="broken", warm_target=1, warm_paused_until=now + MINUTE, warm_error="no image")
    Webhook.objects.create(url="https://example.com", sealed=b"x", created_at=now, disabled_at=now)
    Sweep.objects.create(name="never")
    Sweep.objects.create(name="in time", succeeded_at=now)
    Sweep.objects.create(name="late", succeeded_at=now - 4 * MINUTE)
    create_time_usage(now.replace(hour=0), agent="did:plc:a8")
    for amount, fields in (("1", {}), ("0.9", {"hard": False}), ("1.1", {}), ("2", {}), ("1", {"active": False})):
        stated = Budget(scope="agent", subject="did:plc:a8", amount=Decimal(amount), unit="hours", period="day", **fields)
        budgets.create_budget(stated, now=now)
    for number, (hours, kind, outcome) in enumerate(
        [(1, "llm", "ok"), (2, "llm", "refused"), (3, "relay", "ok"), (25, "llm", "ok")]
    ):
        at = now - hours * 60 * MINUTE
        LlmCall.objects.create(
            call_id=f"{number}", started_at=at, deadline_at=at, ended_at=at, kind=kind, outcome=outcome, cost="0.126"
        )


def test_every_tile_and_state_of_a_pool_links_to_the_rows_it_counts(viewer: Client, troubled: None, pool: Pool) -> None:
    tiles = {tile.title: tile for tile in dashboard.build_fleet_summary().tiles}
    numbers = {title: tile.value for title, tile in tiles.items() if title not in NO_COUNTS}
    assert numbers == {
        "Active leases": "9", "Running sandboxes": "1", "In quarantine": "2", "Stalled sandboxes": "1", "Leases overdue": "1",
        "Sweeps late": "2", "Cold sandboxes": "1", "Lost sandboxes": "1", "State not stored": "1", "Pools draining": "1",
        "Circuits open": "1", "Data not stored": "1", "Webhooks disabled": "1", "Model calls, 24 h": "2",
        "Budgets warned": "2", "Budgets exhausted": "2", "Suspended sandboxes": "0", "Starts failing": "0",
    }  # fmt: skip
    assert tiles["Model calls, 24 h"].note == "1 refused, 0.25 USD"
    for title, number in numbers.items():
        assert str(viewer.get(tiles[title].href).context["cl"].result_count) == number, title
    filling = next(each for each in dashboard.build_fleet_summary().pools if each.stats.pk == pool.pk)
    numbers = {part.state: part.number for part in filling.parts}
    assert numbers == {"warm": 1, "running": 1, "waiting": 2, "destroying": 3, "cold": 1}
    for part in filling.parts:
        assert viewer.get(part.href).context["cl"].result_count == part.number, part.state


def test_problems_are_listed_on_the_dashboard_and_a_poll_is_served_from_the_cache(viewer: Client, troubled: None) -> None:
    page = viewer.get("/admin/").content.decode()
    for text in ("engine down", "store down", "Lost: no container", "draining", "circuit open for"):
        assert text in page, text
    assert page.count("lh-tile lh-alarmed") == 10
    assert re.search(r"Sandboxes</span>\s*<span[^>]*>\s*2\s*<", page)
    assert count_queries(viewer, "/admin/fleet/") <= 4  # session, user, permissions
    answer = viewer.get("/admin/fleet/")
    assert "no-store" in answer.headers["Cache-Control"]
    assert b"<html" not in answer.content


def test_an_empty_fleet_says_so(viewer: Client) -> None:
    page = viewer.get("/admin/").content.decode()
    assert "Quarantine is empty" in page
    assert "No waiting sandboxes" in page
    assert "No sandboxes." in page
    assert "lh-tile lh-alarmed" not in page


def test_costs_are_shown_on_the_dashboard(viewer: Client) -> None:
    def shown_tiles() -> list[dashboard.Tile]:
        return [tile for tile in dashboard.build_fleet_summary().tiles if tile.view_permission == "billing.costrecord"]

    assert [(tile.title, tile.value) for tile in shown_tiles()] == [("Cost today", "0.00"), ("Cost this month", "0.00")]
    now = timezone.now()
    today = to_utc_date(now)
    create_rate("time", "1")
    for day, hours in ((today, 2), (today.replace(day=1), 3), (today.replace(day=1) - timedelta(days=1), 5)):
        create_time_usage(start_of_day(day), hours * 60 * MINUTE, provider="acme")
    costs.price_usage(now=now)
    first = {"2.00", "5.00"} if today.day > 1 else {"5.00"}
    shown = shown_tiles()
    assert {tile.value for tile in shown} == first and shown[1].value == "5.00"
    page = viewer.get("/admin/").content.decode()
    for tile in shown:
        assert f'<a href="/admin/spending/" class="lh-tile">\n        <span class="lh-title">{tile.title}</span>' in page
        assert f"<strong>{tile.value}</strong>" in page
        assert viewer.get(tile.href).status_code == 200


@pytest.mark.parametrize(
    ("more", "seen"),
    [
        ([], set()), (["view_costrecord"], {"Cost today", "Cost this month"}),
        (["view_budget"], {"Budgets warned", "Budgets exhausted"}),
    ],
)  # fmt: skip
def test_costs_are_hidden_without_permission_to_view_them(
    as_role: Callable[..., Client], troubled: None, more: list[str], seen: set[str]
) -> None:
    few = Group.objects.create(name="Few")
    codenames = ["view_lease", "view_sandbox", "view_pool", "view_sweep", *more]
    few.permissions.set(Permission.objects.filter(codename__in=codenames))
    browser = as_role("Few")
    for url in ("/admin/", "/admin/fleet/"):
        titles = {*re.findall('<span class="lh-title">(.*?)</span>', browser.get(url).content.decode())}
        assert titles & {"Cost today", "Cost this month", "Budgets warned", "Budgets exhausted"} == seen
        assert "Active leases" in titles


def test_cost_tiles_take_four_queries(django_assert_num_queries: Any) -> None:
    now = timezone.now()
    with django_assert_num_queries(4):
        dashboard.build_spending_tiles(now)
        dashboard.build_budget_tiles(now)


def test_polling_stops_after_signing_out() -> None:
    answer = Client().get("/admin/fleet/")
    assert answer.status_code == 286  # htmx shows it and stops polling
    assert b"You are signed out" in answer.content
