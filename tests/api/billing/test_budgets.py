"""Budgets through the API: refusals and visibility."""

from datetime import datetime, timedelta
from typing import Any

import pytest
from django.utils import timezone

from billing import budgets
from billing.dates import start_of_day, to_utc_date
from billing.forecast import predict_exhaustion_date
from billing.models import Account, Budget, Membership
from leases.models import AgentKey, Lease
from sandboxes import eviction
from sandboxes.models import Sandbox
from tests.api.conftest import ADA, ANY_BODY, BOB, ApiClient, select_fields
from tests.support.billing import HOUR, create_budget, create_time_usage

pytestmark = pytest.mark.django_db


def mark_exhausted(budget: Budget) -> None:
    """Mark the budget as exhausted, as its sweep does."""
    now = timezone.now()
    began, _ = budgets.get_period_bounds(budget, now)
    Budget.objects.filter(pk=budget.pk).update(
        spent=budget.amount, spent_at=now, period_began=began, exhausted_at=now, exhausted_for=began
    )


def assert_exhausted(api: ApiClient, method: str, path: str, body: Any) -> dict[str, Any]:
    response = api(method, path, body)
    result = response.json()
    assert (response.status_code, result["code"], result["title"]) == (402, "budget_exhausted", "Budget exhausted")
    assert "field" not in result and "Retry-After" not in response.headers
    return {name: result[name] for name in ("spent", "limit", "unit", "resets_at")}


def test_a_new_lease_over_budget_is_refused_with_the_figures(ada: ApiClient, acquire_body) -> None:
    create_budget("0.001", period="ever", scope="agent", subject=ADA)
    for path in ("leases", "environments/game-1/join", "runs"):
        figures = assert_exhausted(ada, "POST", path, select_fields("POST", path, ANY_BODY | acquire_body()))
        assert figures == {"spent": "0", "limit": "0.001", "unit": "hours", "resets_at": None}
    assert not Lease.objects.exists()


def test_new_work_of_a_lease_is_refused_while_the_budget_is_exhausted(ada: ApiClient, acquire_body, lease, memory) -> None:
    lease_url = f"leases/{lease['id']}"
    assert ada.post(f"{lease_url}/exec", {"argv": ["sh", "-c", "echo kept >f"]}).status_code == 200
    mark_exhausted(budget := create_budget(2, "usd", "month", scope="agent", subject=ADA))
    resets_at = budgets.compute_period_bounds("month", timezone.now())[1]
    body = {name: value for name, value in ANY_BODY.items() if name != "snapshot_id"}
    for path in ("exec", "turns", "processes", "fork"):
        url = f"{lease_url}/{path}"
        figures = assert_exhausted(ada, "POST", url, select_fields("POST", url, body))
        assert datetime.fromisoformat(figures.pop("resets_at")) == resets_at
        assert figures == {"spent": "2", "limit": "2", "unit": "usd"}
    assert ada.put(f"{lease_url}/files/g", b"1").status_code == 204
    assert [ada.post(f"{lease_url}/renew").status_code, ada.post("leases", acquire_body()).status_code] == [200, 200]
    eviction.evict(Sandbox.objects.get().pk, now=timezone.now(), reason="idle")
    assert ada.get(f"{lease_url}/files/f").content == b"kept\n"
    assert_exhausted(ada, "PUT", f"{lease_url}/files/g", b"1")
    assert Sandbox.objects.get().state == "cold"
    Budget.objects.filter(pk=budget.pk).update(amount=3)
    assert ada.post(f"{lease_url}/exec", {"argv": ["true"]}).status_code == 200


def test_a_budget_of_a_key_counts_what_that_key_acquires(issue, acquire_body, pool) -> None:
    one, other = issue(ADA), issue(ADA)
    first_key = AgentKey.objects.earliest("pk")
    create_budget("0.02", scope="key", subject=str(first_key.pk))
    assert one.post("leases", acquire_body()).status_code == 201
    assert assert_exhausted(one, "POST", "leases", acquire_body(environment_id="game-2"))["limit"] == "0.02"
    assert_exhausted(one, "POST", "runs", {"agent_did": ADA, "argv": ["true"], "pool": pool.name})
    assert other.post("leases", acquire_body(environment_id="game-2")).status_code == 201
    assert Lease.objects.count() == 2


# --- visibility ---------------------------------------------------------------------------------------------------


def list_scopes(api: ApiClient) -> list[tuple[str, str]]:
    return sorted((row["scope"], row["subject"]) for row in api.get("budgets").json()["results"])


def test_agents_see_the_budgets_of_their_leases_and_operators_see_all(
    ada: ApiClient, bob: ApiClient, operator: ApiClient, acquire_body
) -> None:
    crew, soon = Account.objects.create(name="crew"), to_utc_date(timezone.now()) + timedelta(days=2)
    for agent, since in ((BOB, None), (ADA, soon)):
        Membership.objects.create(agent_did=agent, account=crew, since=since)
    own_key = AgentKey.objects.get(dids=[ADA])
    for scope, subject in [
        ("all", ""), ("agent", ADA), ("agent", BOB), ("key", str(own_key.pk)), ("key", "999999"), ("environment_type", "catan"),
        ("environment_type", "rpg"), ("account", "house"), ("account", "crew"), ("project", "default"), ("project", "acme"),
    ]:  # fmt: skip
        create_budget(9, scope=scope, subject=subject)
    create_budget(9, scope="agent", subject=ADA, active=False)
    assert ada.post("leases", acquire_body()).status_code == 201
    assert list_scopes(ada) == [
        ("account", "house"), ("agent", ADA), ("all", ""), ("environment_type", "catan"), ("key", str(own_key.pk)),
        ("project", "default"),
    ]  # fmt: skip
    assert list_scopes(bob) == [("account", "crew"), ("agent", BOB), ("all", "")]
    assert len(list_scopes(operator)) == 12


def test_an_agents_key_reads_figures_only_of_budgets_of_its_own(ada: ApiClient, operator: ApiClient, acquire_body) -> None:
    own_key = AgentKey.objects.get(dids=[ADA])
    scopes = {"agent": ADA, "key": str(own_key.pk), "environment_type": "catan", "account": "house", "all": ""}
    for scope, subject in scopes.items():
        mark_exhausted(create_budget(9, scope=scope, subject=subject, hard=False))
    assert ada.post("leases", acquire_body()).status_code == 201
    figures = ("amount", "topped_up", "spent", "remaining", "estimated_usd", "estimated_tokens", "unpriced_calls", "runs_out")
    shown = {row["scope"]: row for row in ada.get("budgets").json()["results"]}
    assert {scope: [name for name in figures if row[name] is not None] for scope, row in shown.items()} == {
        "agent": [*figures], "key": [*figures], "environment_type": ["amount", "topped_up"], "account": [], "all": [],
    }  # fmt: skip
    assert all(row["exhausted"] and row["resets_at"] for row in shown.values())
    assert all(row["amount"] == row["spent"] == "9" for row in operator.get("budgets").json()["results"])


@pytest.mark.parametrize(
    ("scope", "names", "detail"),
    [
        ("agent", ["limit", "spent", "unit"], "No room in the budget of 123 USD a day for agent did:plc:ada: 123 spent."),
        ("key", ["limit", "spent", "unit"], "No room in the budget of 123 USD a day for api key {key}: 123 spent."),
        ("environment_type", ["limit", "unit"], "No room in the budget of 123 USD a day for environment type catan."),
        ("account", [], "No room in a budget for account house."),
        ("all", [], "No room in a budget for everything."),
    ],
)  # fmt: skip
def test_a_refusal_has_figures_only_of_budgets_of_the_key(
    ada: ApiClient, issue, operator: ApiClient, acquire_body, lease, scope: str, names: list[str], detail: str
) -> None:
    key = str(AgentKey.objects.get(dids=[ADA]).pk)
    subjects = {"agent": ADA, "key": key, "environment_type": "catan", "account": "house", "all": ""}
    mark_exhausted(create_budget(123, "usd", scope=scope, subject=subjects[scope]))
    for path, body in (("leases", acquire_body(environment_id="game-2")), (f"leases/{lease['id']}/exec", {"argv": ["true"]})):
        problem = ada.post(path, body).json()
        assert problem["code"] == "budget_exhausted" and problem["resets_at"]
        assert sorted(problem.keys() & {"limit", "spent", "unit"}) == names
        assert problem["detail"].startswith(f"{detail.format(key=key)} Resets at ")
    assert ("123" in issue(ADA).post(path, body).content.decode()) == (scope in ("agent", "environment_type"))
    assert {"limit", "spent"} <= operator.post(path, body).json().keys()


def test_a_budget_is_returned_whole(operator: ApiClient) -> None:
    ada = operator
    budget = create_budget("1.50", "usd", warn_percents=[50], grace=timedelta(seconds=90))
    mark_exhausted(budget)
    Budget.objects.update(estimated_usd="0.250000000", unpriced=5)
    (shown,) = ada.get("budgets").json()["results"]
    ends = budgets.compute_period_bounds("day", timezone.now())[1]
    assert ends is not None
    assert datetime.fromisoformat(shown.pop("resets_at")) == ends
    assert shown.pop("spent_at") and shown.pop("created_at")
    assert shown == {
        "id": budget.pk, "scope": "all", "subject": "", "unit": "usd", "amount": "1.5", "period": "day", "hard": True,
        "model": "", "time_zone": "UTC", "topped_up": "0", "remaining": "0", "expected": None, "warn_percents": [50],
        "warn_percent": 50, "grace_seconds": 90, "active": True, "spent": "1.5", "reserved": "0", "exhausted": True,
        "estimated_usd": "0.25", "estimated_tokens": 0, "unpriced_calls": 5,
        "runs_out": f"{ends - timedelta(days=1):%Y-%m-%d}",
    }  # fmt: skip
    yesterday = start_of_day(to_utc_date(timezone.now()) - timedelta(days=1))
    create_time_usage(yesterday, 10 * HOUR, ADA)
    lasting = create_budget(100, period="ever")
    assert ada.get("budgets").json()["results"][0]["runs_out"] == f"{predict_exhaustion_date(lasting, timezone.now())}"


def test_a_page_takes_two_queries_per_budget(operator: ApiClient, django_assert_max_num_queries: Any) -> None:
    for _ in range(12):
        create_budget(9, "usd", "ever", scope="agent", subject=ADA)
    with django_assert_max_num_queries(2 * 10 + 6):
        assert len(operator.get("budgets?limit=10").json()["results"]) == 10
