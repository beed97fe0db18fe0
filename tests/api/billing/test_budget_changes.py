"""Budgets created, changed, topped up and deleted by operators' keys."""

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from billing import budgets
from billing.models import Budget, BudgetTopUp
from leases.models import AgentKey, IdempotentRequest
from sandboxes.models import OperatorAction
from tests.api.conftest import ADA, ApiClient
from tests.support.billing import HOUR, create_budget, create_time_usage

pytestmark = pytest.mark.django_db
NEW = {"scope": "agent", "subject": ADA, "unit": "usd", "amount": "20", "period": "week", "time_zone": "Europe/Berlin"}


def test_budget_is_created_changed_read_and_deleted(operator: ApiClient) -> None:
    body = NEW | {"model": "claude-opus*", "warn_percents": [90, 10, 10], "grace_seconds": 0, "hard": False}
    response = operator.post("budgets", body)
    assert response.status_code == 201
    made = response.json()
    expected = body | {"warn_percents": [10, 90], "grace_seconds": 0.0, "spent": "0", "remaining": "20", "active": True}
    assert expected.items() <= made.items()
    url = f"budgets/{made['id']}"
    changed = operator("PATCH", url, {"amount": "30.5", "active": False, "warn_percents": []})
    assert changed.status_code == 200
    assert {"amount": "30.5", "active": False, "warn_percents": [], "hard": False}.items() <= changed.json().items()
    assert operator.get(url).json() == changed.json()
    assert operator.delete(url).status_code == 204
    assert [*OperatorAction.objects.order_by("at").values_list("action", "detail", "object_id")] == [
        ("Create budget", "", str(made["id"])),
        ("Change budget", "amount 20 → 30.5, active yes → no, warn_percents [10, 90] → []", str(made["id"])),
        ("Delete budget", "", str(made["id"])),
    ]
    for missing in (
        operator.get(url),
        operator("PATCH", url, {}),
        operator.delete(url),
        operator.post(f"{url}/top-ups", {"amount": "1"}),
    ):
        assert (missing.status_code, missing.json()["code"]) == (404, "budget_not_found")
    assert operator.get(f"budgets/{10**30}").status_code == 404


def test_budget_in_tokens_has_whole_numbers(operator: ApiClient) -> None:
    body = NEW | {"unit": "tokens", "amount": "250000000000", "model": "claude-opus*"}
    refused = operator.post("budgets", body | {"amount": "1.5"})
    assert (refused.status_code, "whole number" in str(refused.json())) == (400, True)
    made = operator.post("budgets", body).json()
    assert body.items() <= made.items() and made["estimated_tokens"] == 0
    answer = operator.post(f"budgets/{made['id']}/top-ups", {"amount": "1000000"}).json()
    assert answer["budget"]["remaining"] == "250001000000"


def test_top_up_clears_exhaustion_and_is_applied_once_for_a_key(operator: ApiClient) -> None:
    budget = create_budget(1, scope="agent", subject=ADA, now=timezone.now())
    create_time_usage(budgets.get_period_bounds(budget, timezone.now())[0], HOUR)
    budgets.update_spending(budget.pk, now=timezone.now())
    url = f"budgets/{budget.pk}"
    assert operator.get(url).json()["exhausted"]
    first, repeated = (
        operator.post(f"{url}/top-ups", {"amount": "2.5", "note": "demo"}, idempotency_key="k") for _ in range(2)
    )
    assert first.status_code == repeated.status_code == 201 and first.json() == repeated.json()
    shown = first.json()["budget"]
    assert not shown["exhausted"]
    assert {"amount": "1", "topped_up": "2.5", "remaining": "2.5", "spent": "1"}.items() <= shown.items()
    (row,) = operator.get(f"{url}/top-ups").json()["results"]
    assert row == first.json()["top_up"] and (row["amount"], row["note"]) == ("2.5", "demo") and row["actor"]
    assert operator.post(f"{url}/top-ups", {"amount": "1"}, idempotency_key="k").json()["code"] == "idempotency_key_reused"


def test_repeated_request_after_an_error_creates_one_row(operator: ApiClient, at_checkpoint: Any) -> None:
    """An error after the commit frees the key."""

    def fail() -> None:
        raise RuntimeError("no database")

    for url, body in (("budgets", NEW), ("budgets/{}/top-ups", {"amount": "1"})):
        url = url.format(Budget.objects.values_list("pk", flat=True).first())
        at_checkpoint("budget summed", fail)
        assert operator.post(url, body, idempotency_key=url).status_code == 500
        assert operator.post(url, body, idempotency_key=url).status_code == 201
    actions = OperatorAction.objects.order_by("at").values_list("action", "detail", "actor")
    actor = f"key {AgentKey.objects.get(operator=True).prefix}"
    assert [*actions] == [("Create budget", "", actor), ("Top up budget", "1 USD", actor)]
    IdempotentRequest.objects.all().delete()  # expired
    assert operator.post(url, {"amount": "2"}, idempotency_key=url).json()["code"] == "idempotency_key_reused"
    assert Budget.objects.get().topped_up == BudgetTopUp.objects.get().amount == 1


def test_only_operators_without_a_list_of_pools_write(ada: ApiClient, issue: Any, pool: Any) -> None:
    budget = create_budget(9, scope="agent", subject=ADA)
    url = f"budgets/{budget.pk}"
    limited, reports = issue(operator=True, pools=[pool.name]), issue(operator=True, scopes=["costs"])
    for key in (ada, limited, reports):
        answers = [
            key.post("budgets", NEW), key("PATCH", url, {"amount": "1"}), key.delete(url),
            key.post(f"{url}/top-ups", {"amount": "1"}),
        ]  # fmt: skip
        assert {each.status_code for each in answers} == {403}
        assert key.get(url).json()["amount"] == "9"
    assert ada.get(f"{url}/top-ups").status_code == 403
    other = create_budget(9, scope="agent", subject="did:plc:other")
    assert ada.get(f"budgets/{other.pk}").status_code == 404
    assert Budget.objects.count() == 2 and not BudgetTopUp.objects.exists()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"amount": 5}, "amount"), ({"amount": "0"}, "amount"), ({"amount": "1e12"}, "amount"),
        ({"time_zone": "Mars"}, "time_zone"),
        ({"model": "a b"}, "model"), ({"model": "m", "unit": "hours"}, "model"), ({"subject": ""}, "subject"),
        ({"subject": "ada"}, "subject"), ({"scope": "all"}, "subject"), ({"scope": "account", "subject": "none"}, "subject"),
        ({"scope": "key", "subject": "9" * 200}, "subject"), ({"scope": "team"}, "scope"), ({"period": "year"}, "period"),
        ({"scope": "project", "subject": "a\0"}, "subject"), ({"warn_percents": [0]}, "warn_percents"),
        ({"warn_percents": [1] * 11}, "warn_percents"), ({"grace_seconds": -1}, "grace_seconds"), ({"spent": "0"}, "spent"),
    ],
)  # fmt: skip
def test_invalid_field_is_named_and_changes_nothing(operator: ApiClient, fields: dict[str, Any], field: str) -> None:
    budget = create_budget(1, "usd")
    response = operator.post("budgets", NEW | fields)
    assert response.status_code == 400 and field in response.content.decode()
    if fields.keys() <= {"amount", "time_zone", "warn_percents", "grace_seconds", "spent"}:
        response = operator("PATCH", f"budgets/{budget.pk}", fields)
        assert response.status_code == 400 and field in response.content.decode()
    stored = Budget.objects.get()
    assert (stored.amount, stored.time_zone, stored.grace) == (1, "UTC", timedelta(minutes=5))
