"""GET /costs, /estimate and /forecast: visibility, grouping and rendering."""

import csv
import uuid
from collections.abc import Callable
from datetime import UTC, date, timedelta
from decimal import Decimal
from io import StringIO
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from billing import costs, metering
from billing.dates import start_of_day
from billing.forecast import forecast
from billing.models import Account, Membership, Tab
from tests.api.conftest import ApiClient
from tests.conftest import NOW
from tests.support.billing import ADA, BOB, HOUR, create_rate, create_time_usage, create_token_usage, derive_lease_id

pytestmark = pytest.mark.django_db
ADAS_LEASE = str(derive_lease_id(ADA))
Issue = Callable[..., ApiClient]


@pytest.fixture
def usage(db: None) -> None:
    """Ada: 3 h on two days and one call, in the project blue. Bob: 1 h. No agent: 2 h. Rate: 0.50 USD per hour."""
    create_rate("time", "0.5")
    create_time_usage("2026-11-02T22:00", 3 * HOUR, provider="acme")
    create_token_usage(
        "2026-11-03T10:00", "0.000000003", provider="acme", model="claude-opus-4-5", input_tokens=7, cached_tokens=4,
        cache_written_tokens=2, output_tokens=1, estimated_tokens=5,
    )  # fmt: skip
    Tab.objects.create(holder=ADAS_LEASE, agent_did=ADA, environment_type="chat", project="blue", opened_at=NOW, closed_at=NOW)
    create_time_usage("2026-11-03T10:00", HOUR, BOB, provider="acme", environment_id="game-2")
    create_time_usage("2026-11-04T10:00", 2 * HOUR, "", provider="acme")
    costs.price_usage(now=NOW)


def get_totals(api: ApiClient, query: str = "") -> dict[str, tuple[str, str]]:
    response = api.get(f"costs?{query}")
    assert response.status_code == 200, response.content
    return {row["key"]: (row["usd"], row["hours"]) for row in response.json()["results"]}


@pytest.mark.usefixtures("usage")
def test_an_operator_sees_all_and_an_agents_key_its_own(operator: ApiClient, issue: Issue) -> None:
    assert get_totals(operator) == {ADA: ("1.500000003", "3"), "": ("1", "2"), BOB: ("0.5", "1")}
    assert get_totals(issue(ADA)) == {ADA: ("1.500000003", "3")}
    assert get_totals(issue(ADA, BOB)) == {ADA: ("1.500000003", "3"), BOB: ("0.5", "1")}
    assert get_totals(issue("did:plc:new")) == {}
    assert issue(BOB).get("costs").json()["total_usd"] == "0.5"
    assert get_totals(issue(BOB), f"lease={ADAS_LEASE}") == {}


@pytest.mark.usefixtures("usage")
def test_costs_are_grouped_and_filtered(operator: ApiClient) -> None:
    for query, found in (
        ("by=lease", {ADAS_LEASE: ("1.500000003", "3"), str(derive_lease_id(BOB)): ("0.5", "1"), "": ("1", "2")}),
        ("by=environment", {"game-1": ("1.500000003", "3"), "game-2": ("0.5", "1"), "": ("1", "2")}),
        ("by=provider", {"acme": ("3.000000003", "6")}),
        ("by=day", {"2026-11-02": ("1", "2"), "2026-11-03": ("1.000000003", "2"), "2026-11-04": ("1", "2")}),
        ("by=account", {"house": ("3.000000003", "6")}),
        ("by=item", {"time": ("3", None), "llm": ("0.000000003", None)}),
        ("since=2026-11-03", {ADA: ("0.500000003", "1"), BOB: ("0.5", "1"), "": ("1", "2")}),
        ("until=2026-11-03", {ADA: ("1", "2")}),
        ("since=2026-11-03&until=2026-11-04", {ADA: ("0.500000003", "1"), BOB: ("0.5", "1")}),
        (f"agent={BOB}", {BOB: ("0.5", "1")}),
        (f"lease={ADAS_LEASE}", {ADA: ("1.500000003", "3")}),
        ("environment=game-2", {BOB: ("0.5", "1")}),
        ("provider=other", {}),
        ("account=house", {ADA: ("1.500000003", "3"), "": ("1", "2"), BOB: ("0.5", "1")}),
        ("account=team", {}),
        ("by=model", {"": ("3", None), "claude-opus-4-5": ("0.000000003", None)}),
        ("by=model_provider", {"": ("3", None), "anthropic": ("0.000000003", None)}),
        ("model=claude-opus-4-5", {ADA: ("0.000000003", None)}),
        ("model=claude-opus-4-5&by=project", {"blue": ("0.000000003", None)}),
        (f"by=model&agent={BOB}", {"": ("0.5", None)}),
        ("by=project", {"blue": ("1.500000003", "3"), "": ("1.5", "3")}),
        ("project=blue", {ADA: ("1.500000003", "3")}),
        ("project=red", {}),
    ):  # fmt: skip
        assert get_totals(operator, query) == found, query


@pytest.mark.usefixtures("usage")
def test_a_response_names_its_period_and_grouping(operator: ApiClient) -> None:
    metering.meter_usage(now=NOW)
    result = operator.get("costs?by=day&since=2026-11-01&until=2026-11-04&limit=1").json()
    (first,) = result.pop("results")
    assert first == {
        "key": "2026-11-02", "usd": "1", "estimated_usd": "0", "unpriced_calls": 0, "hours": "2", "quantities": {"time": "2"},
        "free": {}, "tokens": {"input": 0, "cached": 0, "cache_written": 0, "output": 0, "estimated": 0},
    }  # fmt: skip
    assert result.pop("total_tokens") == {"input": 7, "cached": 4, "cache_written": 2, "output": 1, "estimated": 5}
    assert result == {
        "by": "day", "since": "2026-11-01", "until": "2026-11-04", "metered_at": "2026-11-21T12:00:00Z",
        "total_usd": "2.000000003", "total_estimated_usd": "0", "total_unpriced_calls": 0, "left_out": 1,
    }  # fmt: skip


@pytest.mark.usefixtures("usage")
def test_costs_are_csv_on_request(ada: ApiClient) -> None:
    key = {"Authorization": f"Bearer {ada.key}"}
    by_header = Client().get("/api/v1/costs?by=day", headers=key | {"Accept": "text/csv"})
    by_parameter = Client().get("/api/v1/costs?by=day&format=csv", headers=key)
    assert by_header["Content-Type"] == by_parameter["Content-Type"] == "text/csv; charset=utf-8"
    assert by_header.content == by_parameter.content
    items = ["time", "memory", "cpu", "disk", "gpu", "suspend", "storage", "request", "plan", "llm"]
    tokens = ["input_tokens", "cached_tokens", "cache_written_tokens", "output_tokens", "estimated_tokens"]
    assert [*csv.reader(StringIO(by_header.content.decode()))] == [
        ["day", "usd", "hours", *items, "estimated_usd", "unpriced_calls", *tokens],
        ["2026-11-02", "1", "2", "2", "", "", "", "", "", "", "", "", "", "0", "0", "0", "0", "0", "0", "0"],
        ["2026-11-03", "0.500000003", "1", "1", "", "", "", "", "", "", "", "", "1", "0", "0", "7", "4", "2", "1", "5"],
    ]  # fmt: skip
    assert Client().get("/api/v1/costs?format=xml", headers=key).status_code == 404


def test_costs_name_their_estimated_part_and_the_unpriced_calls(operator: ApiClient) -> None:
    create_token_usage("2026-11-03T10:00", "3", 9, unpriced=5, estimated_usd="0.125")
    create_token_usage("2026-11-03T10:00", "1", agent=BOB, unpriced=1)
    costs.price_usage(now=NOW)
    for by, found in (("agent", [("0.125", 5), ("0", 1)]), ("item", [("0.125", 6)]), ("lease", [("0.125", 5), ("0", 1)])):
        result = operator.get(f"costs?by={by}&limit=1").json()
        assert (result["total_estimated_usd"], result["total_unpriced_calls"]) == ("0.125", 6)
        rows = operator.get(f"costs?by={by}").json()["results"]
        assert [(each["estimated_usd"], each["unpriced_calls"]) for each in rows] == found
    headers = {"Authorization": f"Bearer {operator.key}", "Accept": "text/csv"}
    table = Client().get("/api/v1/costs?by=day", headers=headers).content.decode()
    assert [row[-8:-5] for row in csv.reader(StringIO(table))] == [
        ["llm", "estimated_usd", "unpriced_calls"],
        ["10", "0.125", "6"],
    ]


def test_costs_of_other_agents_are_forbidden(bob: ApiClient) -> None:
    for path in ("costs", "forecast"):
        assert bob.get(f"{path}?agent={ADA}").status_code == 403
        assert bob.post(path).status_code == 405


def test_any_key_gets_an_estimate(ada: ApiClient) -> None:
    result = ada.get("estimate?agents=8&hours_per_day=4&days=30&instance=basic&cpu_utilisation=0.1").json()
    assert {line["item"]: line["usd"] for line in result["lines"]} == {
        "memory": "8.42", "cpu": "1.28", "disk": "0.91", "plan": "5.00",
    }  # fmt: skip
    assert (result["total_usd"], result["per_agent_usd"]) == ("15.61", "1.95")
    query = "agents=8&hours_per_day=4&cpu_utilisation=0.1&providers=kubernetes,cloudflare"
    kubernetes, cloudflare = ada.get(f"estimate/comparison?{query}").json()["results"]
    assert (kubernetes["provider"], kubernetes["estimate"], cloudflare["estimate"]) == ("kubernetes", None, result)


# --- forecasts --------------------------------------------------------------------------------------------------------


@pytest.fixture
def recent_usage(db: None) -> date:
    """Rate: 1 USD per hour. Ada: 24 h yesterday, 1 h today. Bob, of account team: 2 h and 1 h in game-2. Return today."""
    today = timezone.now().astimezone(UTC).date()
    create_rate("time", "1")
    Membership.objects.create(agent_did=BOB, account=Account.objects.create(name="team"))
    for agent, game, hours in ((ADA, "game-1", 24), (BOB, "game-2", 2)):
        create_time_usage(start_of_day(today - timedelta(days=1)), hours * HOUR, agent, environment_id=game, provider="acme")
        create_time_usage(start_of_day(today), HOUR, agent, environment_id=game, provider="acme")
    costs.price_usage(now=timezone.now())
    return today


def get_forecast(api: ApiClient, query: str = "") -> dict[str, Any]:
    response = api.get(f"forecast?{query}")
    assert response.status_code == 200, response.content
    payload: dict[str, Any] = response.json()
    return payload


def test_a_forecast_has_the_cost_of_the_month_and_the_day_of_exhaustion(operator: ApiClient, recent_usage: date) -> None:
    found = forecast(now=timezone.now(), budget=Decimal("100000.5"))
    assert get_forecast(operator, "budget=100000.50") == {
        "metered_at": None, "spent_usd": "28" if recent_usage.day > 1 else "2", "estimated_usd": "0", "unpriced_calls": 0,
        "a_day_usd": "26", "days": 1,
        "month_usd": f"{found.month.normalize():f}", "budget_usd": "100000.5", "runs_out": f"{found.runs_out}",
    }  # fmt: skip
    metering.meter_usage(now=NOW)
    assert get_forecast(operator)["metered_at"] == "2026-11-21T12:00:00Z"


@pytest.mark.usefixtures("recent_usage")
def test_a_forecast_is_filtered(operator: ApiClient) -> None:
    paces = {
        "": "26", "last=1": "26", "last=366": "26", f"agent={ADA}": "24", "account=team": "2", "account=house": "24",
        "environment=game-2": "2", "provider=acme": "26", "provider=other": None, f"agent={ADA}&account=team": None,
    }  # fmt: skip
    assert {query: get_forecast(operator, query)["a_day_usd"] for query in paces} == paces
    assert get_forecast(operator, "budget=999999999.999999999&last=366")["runs_out"] is None  # the largest budget
    assert get_forecast(operator, "budget=0.000000001")["runs_out"]  # the smallest


@pytest.mark.usefixtures("recent_usage")
def test_an_agents_key_gets_a_forecast_of_its_own_agents(issue: Issue) -> None:
    assert get_forecast(issue(ADA))["a_day_usd"] == "24"
    assert get_forecast(issue(ADA, BOB))["a_day_usd"] == "26"
    assert get_forecast(issue(ADA, BOB), f"agent={BOB}")["a_day_usd"] == "2"
    assert get_forecast(issue("did:plc:new"), "budget=1") == {
        "metered_at": None, "spent_usd": "0", "estimated_usd": "0", "unpriced_calls": 0, "a_day_usd": None, "days": 0,
        "month_usd": "0", "budget_usd": "1", "runs_out": None,
    }  # fmt: skip
    assert get_forecast(issue(ADA), "account=team")["a_day_usd"] is None


# --- query counts -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("usage")
def test_costs_take_a_constant_number_of_queries(operator: ApiClient, django_assert_max_num_queries: Any) -> None:
    for number in range(20):
        create_time_usage("2026-11-02T10:00", agent=f"did:plc:{uuid.UUID(int=number).hex}", provider="acme")
    costs.price_usage(now=NOW)
    with django_assert_max_num_queries(7):
        assert len(get_totals(operator)) == 23
