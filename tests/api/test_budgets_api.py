"""Budgets through the API: refusals and visibility."""

from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.utils import timezone

from billing import budgets
from billing.dates import start_of_day, to_utc_date
from billing.models import Account, Budget, Membership, Tab
from leases import api_keys
from leases.models import AgentKey, Lease
from sandboxes import eviction
from sandboxes.models import Run, Sandbox
from tests.api.conftest import ADA, BOB, ApiClient
from tests.conftest import run_in_threads
from tests.support.billing import create_time_usage

pytestmark = pytest.mark.django_db


def create_budget(amount: Any = 1, unit: str = "hours", period: str = "day", **fields: Any) -> Budget:
    budget = Budget(**{"scope": "all", "amount": Decimal(amount), "unit": unit, "period": period} | fields)
    budgets.save_budget(budget, now=timezone.now())
    return budget


def mark_exhausted(budget: Budget) -> None:
    """Mark the budget as exhausted, as its sweep does."""
    now = timezone.now()
    began, _ = budgets.get_period_bounds(budget.period, now)
    Budget.objects.filter(pk=budget.pk).update(
        spent=budget.amount, spent_at=now, period_began=began, exhausted_at=now, exhausted_for=began
    )


def assert_exhausted(response: Any) -> dict[str, Any]:
    assert response.status_code == 402, response.content
    assert response.headers["Content-Type"] == "application/problem+json"
    result: dict[str, Any] = response.json()
    assert (result["type"], result["code"]) == ("urn:leasehold:problem:budget_exhausted", "budget_exhausted")
    assert result["title"] == "Budget exhausted" and "field" not in result and "Retry-After" not in response.headers
    return {name: result[name] for name in ("spent", "limit", "unit", "resets_at")}


def test_an_exhausted_budget_is_refused_with_its_figures(ada: ApiClient, acquire_body, pool) -> None:
    create_budget("0.001", period="ever", scope="agent", subject=ADA)
    nothing = {"spent": "0", "limit": "0.001", "unit": "hours", "resets_at": None}
    assert assert_exhausted(ada.post("leases", acquire_body())) == nothing
    body = {name: value for name, value in acquire_body().items() if name != "environment_id"}
    assert assert_exhausted(ada.post("environments/game-1/join", body)) == nothing
    assert assert_exhausted(ada.post("runs", {"agent_did": ADA, "argv": ["true"], "pool": pool.name})) == nothing
    assert not (Lease.objects.exists() or Tab.objects.exists() or Sandbox.objects.exists() or Run.objects.exists())
    assert pool.__class__.objects.get(pk=pool.pk).used == 0


def test_a_refused_request_frees_its_idempotency_key(ada: ApiClient, acquire_body) -> None:
    budget = create_budget("0.001")
    assert_exhausted(ada.post("leases", acquire_body(), idempotency_key="k1"))
    budget.amount = Decimal(1)
    budgets.save_budget(budget, now=timezone.now())
    assert ada.post("leases", acquire_body(), idempotency_key="k1").status_code == 201


def test_exec_and_turns_are_refused_while_the_budget_is_exhausted(
    ada: ApiClient, bob: ApiClient, acquire_body, lease, memory
) -> None:
    lease_url = f"leases/{lease['id']}"
    assert ada.post(f"{lease_url}/exec", {"argv": ["sh", "-c", "echo kept >f"]}).status_code == 200
    mark_exhausted(budget := create_budget(2, "usd", "month", scope="agent", subject=ADA))
    result = assert_exhausted(ada.post(f"{lease_url}/exec", {"argv": ["true"]}))
    assert (result["spent"], result["limit"], result["unit"]) == ("2", "2", "usd")
    assert datetime.fromisoformat(result["resets_at"]) == budgets.get_period_bounds("month", timezone.now())[1]
    assert_exhausted(ada.post(f"{lease_url}/turns", {"turn_number": 1, "state": {}}))
    assert_exhausted(ada.post(f"{lease_url}/processes", {"argv": ["sleep", "9"]}))
    assert_exhausted(ada.post("environments/game-1/join", {k: v for k, v in acquire_body().items() if k != "environment_id"}))
    assert_exhausted(ada.post("leases", acquire_body(environment_id="game-2")))
    assert_exhausted(ada.post(f"{lease_url}/fork", {"environment_id": "game-3"}))
    assert ada.get(f"{lease_url}/files/f").content == b"kept\n"
    assert ada.put(f"{lease_url}/files/g", b"1", content_type="application/octet-stream").status_code == 204
    assert [ada.post(f"{lease_url}/renew").status_code, ada.get(lease_url).status_code] == [200, 200]
    assert ada.post("leases", acquire_body()).json()["is_new"] is False
    assert bob.post("leases", acquire_body(agent_did=BOB)).status_code == 201
    Budget.objects.filter(pk=budget.pk).update(amount=3)
    assert ada.post(f"{lease_url}/exec", {"argv": ["true"]}).status_code == 200


def test_files_of_a_sleeping_sandbox_are_readable_but_not_writable_over_budget(ada: ApiClient, lease) -> None:
    lease_url = f"leases/{lease['id']}"
    ada.post(f"{lease_url}/exec", {"argv": ["sh", "-c", "echo kept >f"]})
    eviction.evict(Sandbox.objects.get().pk, now=timezone.now(), reason="idle")
    mark_exhausted(create_budget())
    assert ada.get(f"{lease_url}/files/f").content == b"kept\n"
    assert_exhausted(ada.put(f"{lease_url}/files/g", b"1", content_type="application/octet-stream"))
    assert Sandbox.objects.get().state == "cold"


def test_a_budget_of_a_key_counts_what_that_key_acquires(acquire_body, pool) -> None:
    first, second = (api_keys.issue_key([ADA], now=timezone.now()) for _ in range(2))
    create_budget("0.02", scope="key", subject=str(first[0].pk))
    one, other = ApiClient(first[1]), ApiClient(second[1])
    assert one.post("leases", acquire_body()).status_code == 201
    result = one.post("leases", acquire_body(environment_id="game-2"))
    assert assert_exhausted(result)["limit"] == "0.02"
    assert one.post("runs", {"agent_did": ADA, "argv": ["true"], "pool": pool.name}).status_code == 402
    assert other.post("leases", acquire_body(environment_id="game-2")).status_code == 201
    assert [*Tab.objects.order_by("opened_at").values_list("key_id", flat=True)] == [str(first[0].pk), str(second[0].pk)]


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
        ("environment_type", "rpg"), ("account", "house"), ("account", "crew"),
    ]:  # fmt: skip
        create_budget(9, scope=scope, subject=subject)
    create_budget(9, scope="agent", subject=ADA, active=False)
    assert ada.post("leases", acquire_body()).status_code == 201
    assert list_scopes(ada) == [
        ("account", "house"), ("agent", ADA), ("all", ""), ("environment_type", "catan"), ("key", str(own_key.pk)),
    ]  # fmt: skip
    assert list_scopes(bob) == [("account", "crew"), ("agent", BOB), ("all", "")]
    assert len(list_scopes(operator)) == 10
    assert Client().get("/api/v1/budgets").status_code == 401


def test_a_budget_is_returned_whole_and_is_read_only(ada: ApiClient) -> None:
    budget = create_budget("1.50", "usd", warn_percent=50, grace=timedelta(seconds=90))
    mark_exhausted(budget)
    (shown,) = ada.get("budgets").json()["results"]
    ends = budgets.get_period_bounds("day", timezone.now())[1]
    assert ends is not None
    assert datetime.fromisoformat(shown.pop("resets_at")) == ends
    assert shown.pop("spent_at") and shown.pop("created_at")
    assert shown == {
        "id": budget.pk, "scope": "all", "subject": "", "unit": "usd", "amount": "1.5", "period": "day", "hard": True,
        "warn_percent": 50, "grace_seconds": 90, "active": True, "spent": "1.5", "exhausted": True,
        "runs_out": f"{ends - timedelta(days=1):%Y-%m-%d}",
    }  # fmt: skip
    for method in ("POST", "PUT", "DELETE"):
        assert ada(method, "budgets", {}).status_code == 405


def test_a_budget_has_a_predicted_day_of_exhaustion(ada: ApiClient, bob: ApiClient, operator: ApiClient) -> None:
    today = timezone.now().astimezone(UTC).date()
    create_time_usage(start_of_day(today - timedelta(days=1)), timedelta(hours=10), ADA)
    for amount, scope in ((100, {"scope": "agent", "subject": ADA}), (1000, {}), (7, {"scope": "agent", "subject": BOB})):
        create_budget(amount, period="ever", **scope)
    create_budget(100, period="ever", scope="agent", subject=ADA, active=False)

    def shown(api: ApiClient) -> dict[tuple[str, bool], int | None]:
        rows = api.get("budgets").json()["results"]
        days = {(row["amount"], row["active"]): row["runs_out"] for row in rows}
        return {name: (date.fromisoformat(day) - today).days if day else None for name, day in days.items()}

    assert shown(ada) == {("100", True): 8, ("1000", True): 98}
    assert shown(bob) == {("1000", True): 98, ("7", True): None}
    assert shown(operator) == {("100", True): 8, ("100", False): None, ("1000", True): 98, ("7", True): None}


def test_a_page_takes_one_query_per_budget(operator: ApiClient, django_assert_max_num_queries: Any) -> None:
    for _ in range(12):
        create_budget(9, "usd", "ever", scope="agent", subject=ADA)
    with django_assert_max_num_queries(10 + 4):
        assert len(operator.get("budgets?limit=10").json()["results"]) == 10


# --- concurrency ----------------------------------------------------------------------------------------------------------


@pytest.mark.django_db(transaction=True)
def test_concurrent_acquires_and_runs_do_not_exceed_the_budget(issue: Callable[..., ApiClient], acquire_body, settings) -> None:
    settings.MINIMUM_TIME = timedelta(minutes=6)
    many = 50 if connection.vendor == "postgresql" else 16
    create_budget(1)
    apis = [issue(f"did:plc:a{number}") for number in range(many)]
    with run_in_threads(many) as run:
        responses = run(lambda i: apis[i].post("leases", acquire_body(agent_did=f"did:plc:a{i}")))
    assert sorted(response.status_code for response in responses) == [201] * 10 + [402] * (many - 10)
    assert Lease.objects.count() == 10
