"""GET /statements/{account}/{month}/focus.csv and `manage.py statements export`."""

from decimal import Decimal
from io import StringIO
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from django.http import StreamingHttpResponse
from django.test import Client

from billing import statements
from billing.models import Statement
from tests.api.conftest import ApiClient
from tests.support.billing import (
    HOUR,
    advance_and_price,
    close_month,
    create_rate,
    create_time_usage,
    get_house_account,
    join_account,
    parse_day,
    parse_utc,
)
from tests.support.focus import read_focus, sum_column

pytestmark = pytest.mark.django_db
DECEMBER = parse_utc("2026-12-01T00:00")
PATH = "statements/team/2026-11/focus.csv"


@pytest.fixture
def closed(db: None) -> None:
    """Statements of house and team for November, of which a credit of 0.50 USD reduces that of team."""
    create_rate("time", "0.333")
    team = join_account("team").account
    create_time_usage("2026-11-02T22:00", 3 * HOUR, provider="acme")
    create_time_usage("2026-11-02T22:00", HOUR, "", provider="acme")
    advance_and_price(DECEMBER)
    statements.grant_credit(team, Decimal("0.50"), now=DECEMBER, actor="eve", reason="welcome")
    for account in (get_house_account(), team):
        close_month(account, parse_day("2026-11-01"), now=DECEMBER)


def download(operator: ApiClient, path: str, accept: str = "*/*") -> tuple[str, str]:
    """Return the text and the name of an export."""
    response = Client().get(f"/api/v1/{path}", headers={"Authorization": f"Bearer {operator.key}", "Accept": accept})
    assert (response.status_code, response["Content-Type"]) == (200, "text/csv; charset=utf-8")
    assert isinstance(response, StreamingHttpResponse)
    return b"".join(response.streaming_content).decode(), response["Content-Disposition"]  # type: ignore[arg-type]


def run_command(*words: str) -> str:
    out = StringIO()
    call_command("statements", "export", "--format", "focus", *words, stdout=out)
    return out.getvalue()


@pytest.mark.usefixtures("closed")
def test_a_statement_is_exported_by_line_and_by_day(operator: ApiClient) -> None:
    total = Statement.objects.get(account__name="team").total
    for query, name, number in (("", "team-2026-11-focus.csv", 2), ("?daily=true", "team-2026-11-focus-daily.csv", 4)):
        text, disposition = download(operator, PATH + query)
        rows = read_focus(text)
        assert (len(rows), sum_column(rows), disposition) == (number, total, f'attachment; filename="{name}"')
        assert {row["x_Status"] for row in rows} == {"final"}
        daily = ["--daily"] if query else []
        assert run_command("--account", "team", "--month", "2026-11", *daily) == text
    assert download(operator, PATH, accept="text/csv") == download(operator, PATH, accept="application/json")


@pytest.mark.usefixtures("closed")
def test_an_open_month_is_exported_as_preliminary_on_request(operator: ApiClient) -> None:
    create_time_usage("2026-12-02T22:00", HOUR, provider="acme")
    advance_and_price(parse_utc("2026-12-03T00:00"))
    path = "statements/team/2026-12/focus.csv"
    assert operator.get(path).status_code == 404
    text, disposition = download(operator, f"{path}?preliminary=true")
    assert disposition == 'attachment; filename="team-2026-12-focus-preliminary.csv"'
    assert {row["x_Status"] for row in read_focus(text)} == {"preliminary"}
    assert run_command("--month", "2026-12", "--preliminary") == text
    with pytest.raises(CommandError, match="2026-12 of team is not closed"):
        run_command("--month", "2026-12")


@pytest.mark.usefixtures("closed")
def test_an_export_is_for_operators_and_names_what_is_wrong(ada: ApiClient, operator: ApiClient) -> None:
    assert (ada.get(PATH).status_code, operator.post(PATH).status_code) == (403, 405)
    for path in (
        "statements/unknown/2026-11/focus.csv",
        "statements/team/2026-13/focus.csv",
        "statements/team/2026-10/focus.csv",
    ):
        problem = operator.get(path)
        assert (problem.status_code, problem["Content-Type"]) == (404, "application/problem+json")
    for query, field in (("daily=often", "daily"), ("preliminary=soon", "preliminary"), ("columns=all", "columns")):
        problem = operator.get(f"{PATH}?{query}")
        assert (problem.status_code, problem.json()["errors"][0]["field"]) == (400, field)


# --- manage.py statements export --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("closed")
def test_the_command_exports_all_accounts_to_a_file(tmp_path: Path) -> None:
    file = tmp_path / "november.csv"
    file.write_text("of the last export")
    assert run_command("--month", "2026-11", "--output", str(file)) == ""
    rows = read_focus(file.read_text())
    assert [row["BillingAccountId"] for row in rows] == ["house", "team", "team"]
    assert sum_column(rows) == sum(Statement.objects.values_list("total", flat=True))
    assert [*tmp_path.iterdir()] == [file]


@pytest.mark.usefixtures("closed")
def test_a_failed_export_leaves_the_file_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "november.csv"
    file.write_text("of the last export")
    monkeypatch.setattr("billing.focus.export.build_credit_row", lambda month, used: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_command("--month", "2026-11", "--output", str(file))
    assert {path: path.read_text() for path in tmp_path.iterdir()} == {file: "of the last export"}
    with pytest.raises(CommandError, match="--output: No such file or directory"):
        run_command("--month", "2026-11", "--output", str(tmp_path / "missing" / "november.csv"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("export", "--month", "2026-11"), "--month and --format"), (("export", "--format", "focus"), "--month and --format"),
        (("export", "--format", "focus", "--month", "2026-99"), "--month: Not a month"),
        (("export", "--format", "focus", "--month", "2026-11", "--json"), "--csv and --json"),
        (("export", "--format", "focus", "--month", "2026-11", "--account", "unknown"), "--account: there is no 'unknown'"),
        (("list", "--daily"), "for export only"), (("show", "--output", "file"), "for export only"),
    ],
)  # fmt: skip
def test_the_command_names_invalid_arguments(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(CommandError, match=message):
        call_command("statements", *words)
