"""GET /statements and `manage.py statements`."""

import csv
import json
from decimal import Decimal
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.test import Client

from billing import statements
from tests.api.conftest import ApiClient
from tests.support.billing import (
    ADA,
    HOUR,
    advance_and_price,
    close_month,
    create_rate,
    create_time_usage,
    create_token_usage,
    get_house_account,
    join_account,
    parse_day,
    parse_utc,
)

pytestmark = pytest.mark.django_db
DECEMBER = parse_utc("2026-12-01T00:00")


@pytest.fixture
def closed(db: None) -> None:
    """Statements of house for October and November, and of team for November, which a credit of 0.50 USD reduces."""
    create_rate("time", "0.5")
    team = join_account("team").account
    create_time_usage("2026-10-02T22:00", 3 * HOUR, "", provider="acme")
    create_time_usage("2026-11-02T22:00", 3 * HOUR, provider="acme")
    create_token_usage("2026-11-03T10:00", "0.125", provider="acme")
    advance_and_price(DECEMBER)
    statements.grant_credit(team, Decimal("0.50"), now=DECEMBER, actor="eve", reason="welcome")
    for account, month in ((get_house_account(), "2026-10-01"), (get_house_account(), "2026-11-01"), (team, "2026-11-01")):
        close_month(account, parse_day(month), now=DECEMBER)


def run_command(*words: str) -> str:
    out = StringIO()
    call_command("statements", *words, stdout=out)
    return out.getvalue()


@pytest.mark.usefixtures("closed")
def test_an_operator_lists_statements(operator: ApiClient) -> None:
    for query, found in (
        ("", [("house", "2026-11"), ("team", "2026-11"), ("house", "2026-10")]),
        ("account=house", [("house", "2026-11"), ("house", "2026-10")]),
        ("month=2026-11", [("house", "2026-11"), ("team", "2026-11")]), ("account=team&month=2026-10", []),
        ("account=unknown", []), ("limit=1", [("house", "2026-11")]),
    ):  # fmt: skip
        response = operator.get(f"statements?{query}").json()
        assert [(row["account"], row["month"]) for row in response["results"]] == found, query
        assert response["left_out"] == (2 if query == "limit=1" else 0)


@pytest.mark.usefixtures("closed")
def test_a_statement_has_its_lines(operator: ApiClient) -> None:
    response = operator.get("statements/team/2026-11").json()
    lines = response.pop("lines")
    assert response == {
        "account": "team", "month": "2026-11", "closed_at": "2026-12-01T00:00:00Z", "subtotal_usd": "1.63",
        "credit_used_usd": "0.50", "total_usd": "1.13", "estimated_usd": "0.00", "unpriced_calls": 0,
    }  # fmt: skip
    time = {
        "kind": "usage", "for_month": "2026-11", "agent": ADA, "provider": "acme", "item": "time", "unit": "sandbox-hours",
        "quantity": "3", "free": "0", "rate_usd": "0.5", "rate_from": "2020-01-01T00:00:00Z", "usd": "1.50", "status": "final",
        "estimated_usd": "0.00", "unpriced_calls": 0, "model": "", "input_tokens": 0, "cached_tokens": 0,
        "cache_written_tokens": 0, "output_tokens": 0, "estimated_tokens": 0,
    }  # fmt: skip
    calls = {"rate_usd": "", "rate_from": "", "item": "llm", "unit": "model calls", "model": "m"}
    assert lines == [time | calls | {"quantity": "1", "usd": "0.13"}, time]
    for path in ("team/2026-10", "unknown/2026-11", "team/2026-13", "team/november", "team/2026-11-01"):
        assert operator.get(f"statements/{path}").status_code == 404


@pytest.mark.usefixtures("closed")
def test_statements_are_for_operators_and_read_only(ada: ApiClient, operator: ApiClient) -> None:
    for path in ("statements", "statements/team/2026-11"):
        problem = ada.get(path)
        assert (problem.status_code, "/api/v1/costs" in problem.json()["detail"]) == (403, True)
        assert operator.post(path).status_code == 405


@pytest.mark.usefixtures("closed")
def test_statements_are_csv_on_request(operator: ApiClient) -> None:
    headers = {"Authorization": f"Bearer {operator.key}", "Accept": "text/csv"}
    listed = Client().get("/api/v1/statements", headers=headers).content.decode()
    rows = [line[:2] for line in csv.reader(StringIO(listed))][1:]
    assert rows == [["house", "2026-11"], ["team", "2026-11"], ["house", "2026-10"]]
    lines = Client().get("/api/v1/statements/team/2026-11", headers=headers).content.decode()
    assert [*csv.reader(StringIO(lines))][2] == [
        "usage", "2026-11", ADA, "acme", "time", "sandbox-hours", "3", "0", "0.5", "2020-01-01T00:00:00Z", "1.50", "final",
        "0.00", "0", "", "0", "0", "0", "0", "0",
    ]  # fmt: skip
    assert run_command("show", "--account", "team", "--month", "2026-11", "--csv") == lines


@pytest.mark.usefixtures("closed")
def test_an_open_month_is_returned_as_preliminary_on_request(operator: ApiClient) -> None:
    create_time_usage("2026-12-02T22:00", HOUR, provider="acme")
    advance_and_price(parse_utc("2026-12-03T00:00"))
    path = "statements/team/2026-12"
    assert operator.get(path).status_code == 404
    assert operator.get(f"{path}?preliminary=soon").json()["errors"][0]["field"] == "preliminary"
    response = operator.get(f"{path}?preliminary=true").json()
    assert (response["closed_at"], response["total_usd"]) == (None, "0.50")
    assert [(line["status"], line["usd"]) for line in response["lines"]] == [("preliminary", "0.50")]
    headers = {"Authorization": f"Bearer {operator.key}", "Accept": "text/csv"}
    lines = Client().get(f"/api/v1/{path}?preliminary=true", headers=headers).content.decode()
    assert [row["status"] for row in csv.DictReader(StringIO(lines))] == ["preliminary"]
    assert run_command("show", "--account", "team", "--month", "2026-12", "--csv", "--preliminary") == lines
    assert run_command("show", "--account", "team", "--month", "2026-12", "--preliminary").startswith("preliminary: ")


def test_a_statement_and_an_open_month_name_estimated_and_unpriced_calls(operator: ApiClient) -> None:
    for month in ("2026-10", "2026-11"):
        create_token_usage(f"{month}-03T10:00", "2", 7, unpriced=5, estimated_usd="0.125")
    advance_and_price(DECEMBER)
    close_month(get_house_account(), parse_day("2026-10-01"), now=DECEMBER)
    headers = {"Authorization": f"Bearer {operator.key}", "Accept": "text/csv"}
    for path in ("statements/house/2026-10", "statements/house/2026-11?preliminary=true"):
        statement = operator.get(path).json()
        for each in (statement, *statement["lines"]):
            assert (each["estimated_usd"], each["unpriced_calls"]) == ("0.13", 5)
        table = Client().get(f"/api/v1/{path}", headers=headers).content.decode()
        assert [row[-8:-6] for row in csv.reader(StringIO(table))] == [["estimated_usd", "unpriced_calls"], ["0.13", "5"]]
    listed = csv.DictReader(StringIO(Client().get("/api/v1/statements", headers=headers).content.decode()))
    assert [(row["estimated_usd"], row["unpriced_calls"]) for row in listed] == [("0.13", "5")]


# --- manage.py statements ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("closed")
def test_the_command_lists_and_shows() -> None:
    assert run_command("list").splitlines() == [
        "account    month   USD  credit  to pay",
        "house    2026-10  1.50    0.00    1.50",
        "house    2026-11  0.00    0.00    0.00",
        "team     2026-11  1.63    0.50    1.13",
    ]
    shown = run_command("show", "--account", "team", "--month", "2026-11").splitlines()
    assert shown[1].split() == [ADA, "acme", "model", "calls:", "m", "2026-11", "1", "0", "-", "0.13"]
    assert [line.split()[-1] for line in shown[3:]] == ["1.63", "-0.50", "1.13"]
    encoded = json.loads(run_command("show", "--account", "team", "--month", "2026-11", "--json"))
    assert (encoded["total_usd"], len(encoded["lines"])) == ("1.13", 2)
    assert [row["account"] for row in json.loads(run_command("list", "--month", "2026-10", "--json"))["results"]] == ["house"]


def test_the_command_closes_months_and_names_those_it_cannot() -> None:
    create_rate("time", "0.5")
    join_account("team")
    create_time_usage("2021-09-02T22:00", 3 * HOUR, "", provider="acme")
    for month in ("2021-09", "2021-10"):
        create_time_usage(f"{month}-02T22:00", 3 * HOUR, provider="acme")
    create_time_usage("2021-10-02T22:00", 3 * HOUR, "", provider="acme")
    close_team = ("close", "--account", "team", "--month")
    advance_and_price(DECEMBER)
    assert run_command(*close_team, "2021-09").splitlines()[1].split() == ["team", "2021-09", "1.50", "0.00", "1.50"]
    with pytest.raises(CommandError, match="house: 2021-09 has costs and is not closed") as refused:
        run_command("close", "--month", "2021-10")
    assert "team" not in str(refused.value)
    assert "team     2021-10" in run_command("list", "--month", "2021-10")
    assert run_command("close", "--month", "2021-09").splitlines()[1].startswith("house")
    assert "house" in run_command("close", "--month", "2021-10")


def test_the_command_names_estimated_and_unpriced_calls_of_a_closed_month() -> None:
    create_token_usage("2021-09-02T22:00", "2", 7, unpriced=5, estimated_usd="0.5")
    advance_and_price(DECEMBER)
    note = "house 2021-09: 0.50 USD estimated, 5 calls without a price"
    for action in ("close", "list"):
        assert run_command(action, "--month", "2021-09").splitlines()[2:] == [note]
    shown = run_command("show", "--account", "house", "--month", "2021-09").splitlines()
    assert shown[0].split()[-4:] == ["USD", "estimated", "unpriced", "calls"]
    assert shown[1].split()[-3:] == ["2.00", "0.50", "5"]
    assert [line.split()[-1] for line in shown[2:]] == ["2.00", "0.00", "2.00"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("close",), "--month"), (("close", "--month", "2026-99"), "--month: Not a month"),
        (("show",), "--account and --month"),
        (("list", "--account", "unknown"), "--account: there is no 'unknown'"),
        (("show", "--account", "house", "--month", "2026-01"), "2026-01 of house is not closed"),
    ],
)  # fmt: skip
def test_the_command_names_invalid_arguments(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(CommandError, match=message):
        run_command(*words)
