"""GET and POST /model-rates: rates of models for operators."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from leases.models import KeyScope
from sandboxes.models import Pool, TokenRate
from tests.api.conftest import ApiClient
from tests.support.model_rates import create_rates

pytestmark = pytest.mark.django_db
BODY = {
    "model": "gpt-*", "prices": {"input": "2.5", "output": "10", "web_search": "25"},
    "valid_from": "2026-11-01T00:00:00Z", "source": "price page",
}  # fmt: skip


def list_shown(answer: Any) -> list[tuple[Any, ...]]:
    return [(each["model"], each["kind"], each["usd"], each["superseded"]) for each in answer.json()["results"]]


def test_prices_are_added_once_and_listed(operator: ApiClient) -> None:
    added = operator.post("model-rates", BODY)
    assert added.status_code == 201
    assert list_shown(added) == [
        ("gpt-*", "input", "2.5", False), ("gpt-*", "output", "10", False), ("gpt-*", "web_search", "25", False),
    ]  # fmt: skip
    assert [*TokenRate.objects.order_by("pk").values_list("usd_per_million", flat=True)] == [2_500_000 / 10**6, 10, 25_000]
    first = added.json()["results"][0]
    assert (first["unit"], first["tokens_from"], first["tier"], first["source"]) == ("million tokens", 0, "", "price page")
    again = operator.post("model-rates", BODY)
    assert (again.status_code, again.json()) == (200, added.json())
    more = operator.post("model-rates", BODY | {"prices": {"input": "2.50", "cache_read": "1.25"}})
    assert (more.status_code, TokenRate.objects.count()) == (201, 4)
    assert more.json()["results"][0] == first
    page = operator.get("model-rates?limit=3").json()
    assert [each["kind"] for each in page["results"]] == ["cache_read", "web_search", "output"] and page["next"]


def test_a_price_with_the_same_start_supersedes_the_earlier_one(operator: ApiClient) -> None:
    operator.post("model-rates", BODY | {"prices": {"input": "250"}})
    assert operator.post("model-rates", BODY | {"prices": {"input": "2.5"}}).status_code == 201
    assert list_shown(operator.get("model-rates")) == [("gpt-*", "input", "2.5", False), ("gpt-*", "input", "250", True)]
    assert list_shown(operator.get("model-rates?model=gpt-5")) == [("gpt-*", "input", "2.5", False)]


def test_a_model_has_the_rates_that_price_it_now(operator: ApiClient) -> None:
    create_rates("gpt-*", input=1)
    create_rates("gpt-4o", input=9, output=10, since=timezone.now() - timedelta(days=2))
    create_rates("gpt-4o", input=2, since=timezone.now() - timedelta(days=1))
    create_rates("gpt-4o", input=3, since=timezone.now() + timedelta(days=1))
    assert list_shown(operator.get("model-rates?model=openai/gpt-4o-2024-08-06")) == [
        ("gpt-4o", "input", "2", False), ("gpt-4o", "output", "10", False),
    ]  # fmt: skip
    assert list_shown(operator.get("model-rates?model=claude")) == []
    assert operator.get("model-rates?model=").json()["field"] == "model"


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"prices": {}}, "prices"), ({"prices": {"input": 2.5}}, "prices.input"), ({"prices": {"input": "-1"}}, "prices.input"),
        ({"prices": {"input": "NaN"}}, "prices.input"), ({"prices": {"input": "0.0000000001"}}, "prices.input"),
        ({"prices": {"inputs": "1"}}, "prices.inputs"), ({"prices": {"web_search": "1000"}}, "prices"),
        ({"model": ""}, "model"),
        ({"model": "a" * 201}, "model"), ({"valid_from": "soon"}, "valid_from"), ({"valid_from": 7}, "valid_from"),
        ({"tokens_from": -1}, "tokens_from"), ({"source": ""}, "source"), ({"extra": 1}, "extra"),
    ],
)  # fmt: skip
def test_an_invalid_rate_is_refused_by_its_field(operator: ApiClient, wrong: dict[str, Any], field: str) -> None:
    refused = operator.post("model-rates", BODY | wrong)
    assert (refused.status_code, refused.json()["code"], refused.json()["field"]) == (400, "invalid", field), refused.json()
    assert not TokenRate.objects.exists()


def test_only_an_operator_of_all_pools_reads_rates_and_one_with_leases_adds_them(
    ada: ApiClient, issue: Callable[..., ApiClient], pool: Pool
) -> None:
    reader = issue(operator=True, scopes=[KeyScope.COSTS])
    for key in (ada, issue(operator=True, pools=[pool.name]), issue(operator=True, scopes=[KeyScope.LEASES])):
        assert key.get("model-rates").status_code == 403
        assert key.post("model-rates", BODY).status_code == 403
    assert reader.get("model-rates").status_code == 200
    assert reader.post("model-rates", BODY).json()["code"] == "insufficient_scope"
    assert not TokenRate.objects.exists()
