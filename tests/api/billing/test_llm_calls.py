"""LLM calls of a lease through the API."""

from decimal import Decimal

import pytest

from leases import leasing
from leases.models import EnvironmentType, Lease, Turn
from sandboxes.models import LlmCall, Run
from tests.api.conftest import ApiClient
from tests.conftest import MINUTE, NOW
from tests.support.billing import create_sandbox

pytestmark = pytest.mark.django_db

NO_TOTAL = {
    "calls": 0, "refused": 0, "unpriced": 0, "input_tokens": 0, "cached_tokens": 0, "cache_written_tokens": 0,
    "output_tokens": 0, "estimated_tokens": 0, "cost_usd": "0", "estimated_usd": "0",
}  # fmt: skip


def create_call(lease: dict, number: int, **fields: object) -> LlmCall:
    at = NOW + number * MINUTE
    columns = {"outcome": "ok", "ended_at": at, "started_at": at, "deadline_at": at + MINUTE} | fields
    return LlmCall.objects.create(call_id=f"call-{number}", holder=lease["id"], agent_did=lease["agent_did"], **columns)


def test_calls_are_listed_newest_first_with_their_totals(ada: ApiClient, lease) -> None:
    create_call(lease, 1, cost=Decimal("0.100000001"), input_tokens=10, output_tokens=1, tokens=31)
    create_call(lease, 2, input_tokens=5)
    create_call(lease, 3, outcome="open", ended_at=None)
    create_call(lease, 4, outcome="refused", status=402, code="spend_limit_reached")
    create_call(lease, 5, kind="relay")
    result = ada.get(f"leases/{lease['id']}/calls").json()
    assert [row["call_id"] for row in result["results"]] == ["call-5", "call-4", "call-3", "call-2", "call-1"]
    assert [row["cost_usd"] for row in result["results"]] == [None, None, None, None, "0.100000001"]
    assert [row["kind"] for row in result["results"]] == ["relay", "llm", "llm", "llm", "llm"]
    assert [row["code"] for row in result["results"] if row["code"]] == ["spend_limit_reached"]
    total = {"calls": 4, "refused": 1, "unpriced": 1, "input_tokens": 15, "output_tokens": 1, "cost_usd": "0.100000001"}
    total["estimated_tokens"] = 20
    assert result["total"] == NO_TOTAL | total


def test_every_page_has_the_totals_of_all_calls(ada: ApiClient, lease) -> None:
    empty = ada.get(f"leases/{lease['id']}/calls").json()
    assert empty == {"total": NO_TOTAL, "results": [], "next": None}
    for number in range(3):
        create_call(lease, number, cost=Decimal(1))
    first = ada.get(f"leases/{lease['id']}/calls?limit=2").json()
    second = ada.get(first["next"]).json()
    assert [len(page["results"]) for page in (first, second)] == [2, 1] and second["next"] is None
    assert first["total"] == second["total"] and second["total"]["cost_usd"] == "3"


def test_a_lease_has_its_llm_spending_and_limits(ada: ApiClient, acquire_body) -> None:
    EnvironmentType.objects.filter(name="catan").update(llm_limit=Decimal("5.5"), llm_token_limit=7000)
    lease = ada.post("leases", acquire_body()).json()
    zeros = dict.fromkeys(("unpriced_calls", "calls", "refused", "input_tokens", "output_tokens", "estimated_tokens"), 0)
    limits = {"limit": "5.5", "token_limit": 7000}
    assert ada.get(f"leases/{lease['id']}").json()["llm"] == {**limits, "spent": "0", "estimated_usd": "0", **zeros}
    create_call(lease, 1, cost=Decimal("0.0123"), input_tokens=10, output_tokens=1, tokens=15)
    create_call(lease, 2, cost=Decimal("0.1"), outcome="cut", priced="estimate", input_tokens=4)
    for number, outcome in enumerate(("ok", "failed", "lost", "refused"), start=3):
        create_call(lease, number, outcome=outcome)
    create_call(lease, 7, outcome="open", ended_at=None)
    create_call(lease, 8, kind="relay")
    assert ada.get(f"leases/{lease['id']}").json()["llm"] == {
        **limits, "spent": "0.1123", "estimated_usd": "0.1", "unpriced_calls": 3, "calls": 7, "refused": 1,
        "input_tokens": 14, "output_tokens": 1, "estimated_tokens": 4,
    }  # fmt: skip


def test_no_limit_is_null_and_only_the_lease_detail_has_spending(ada: ApiClient, lease) -> None:
    spending = ada.get(f"leases/{lease['id']}").json()["llm"]
    assert (spending["limit"], spending["token_limit"]) == (None, None)
    assert "llm" not in lease and "llm" not in ada.get("leases").json()["results"][0]


def test_an_operator_sets_each_limit_and_leaves_the_other(operator: ApiClient, ada: ApiClient, lease) -> None:
    url = f"leases/{lease['id']}/calls/limits"
    for change, limit, token_limit in (
        ({"limit": "2.50"}, "2.5", None),
        ({"token_limit": 7000}, "2.5", 7000),
        ({"limit": None}, None, 7000),
        ({"limit": "0", "token_limit": 0}, "0", 0),
        ({"limit": "0"}, "0", 0),
    ):
        limits = {"limit": limit, "token_limit": token_limit}
        assert operator("PATCH", url, change).json() == limits
        spending = ada.get(f"leases/{lease['id']}").json()["llm"]
        assert {name: spending[name] for name in limits} == limits
    events = Lease.objects.get(pk=lease["id"]).events.filter(kind="call_limits").order_by("pk")
    assert [event.reason for event in events] == [
        "2.5 USD instead of no spend limit", "7000 tokens instead of no token limit", "no spend limit instead of 2.5 USD",
        "0 USD instead of no spend limit, 0 tokens instead of 7000 tokens",
    ]  # fmt: skip
    assert {event.actor.partition(" ")[0] for event in events} == {"key"}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({}, "limit"), ({"limit": 5}, "limit"), ({"limit": "-1"}, "limit"), ({"limit": "0.0000000001"}, "limit"),
        ({"limit": "NaN"}, "limit"), ({"token_limit": "7"}, "token_limit"), ({"token_limit": 1.5}, "token_limit"),
        ({"token_limit": -1}, "token_limit"), ({"token_limit": 2**62 + 1}, "token_limit"), ({"tokens": 1}, "tokens"),
    ],
)  # fmt: skip
def test_an_invalid_limit_names_its_field(operator: ApiClient, lease, change: dict, field: str) -> None:
    problem = operator("PATCH", f"leases/{lease['id']}/calls/limits", change)
    assert (problem.status_code, [each["field"] for each in problem.json()["errors"]]) == (400, [field])
    assert Lease.objects.get(pk=lease["id"]).llm_limit is None


def test_the_limits_of_an_ended_lease_are_not_changed(operator: ApiClient, lease) -> None:
    leasing.end(Lease.objects.get(pk=lease["id"]).pk, reason="released", now=NOW)
    assert operator("PATCH", f"leases/{lease['id']}/calls/limits", {"limit": "1"}).status_code == 410
    assert Lease.objects.get(pk=lease["id"]).llm_limit is None


def test_calls_are_summed_by_run_turn_and_model(ada: ApiClient, lease) -> None:
    sandbox, at = create_sandbox(lease["agent_did"]), {"started_at": NOW, "deadline_at": NOW + MINUTE}
    runs = [Run.objects.create(sandbox=sandbox, holder=lease["id"], argv=["true"], **at).pk for _ in range(2)]
    Turn.objects.create(lease_id=lease["id"], number=7, run_id=runs[1], **at)
    made = ((runs[0], "gpt-5", "1"), (runs[1], "claude", "2"), (runs[1], "gpt-5", "0.5"), (None, "", "0.25"))
    for number, (run, model, usd) in enumerate(made):
        tokens = {"input_tokens": 10, "cached_tokens": 4, "output_tokens": 1, "token_counts": {"cache_write_5m": 3}}
        create_call(lease, number, run_id=run, model=model, cost=Decimal(usd), priced="estimate", **tokens)
    create_call(lease, 5, model="claude", outcome="refused"), create_call(lease, 6, kind="relay")
    expected = {
        "run": {str(runs[1]): (2, "2.5"), str(runs[0]): (1, "1"), "": (2, "0.25")},
        "turn": {"7": (2, "2.5"), "": (3, "1.25")},
        "model": {"claude": (2, "2"), "gpt-5": (2, "1.5"), "": (1, "0.25")},
    }
    for by, groups in expected.items():
        result = ada.get(f"leases/{lease['id']}/calls/totals?by={by}").json()
        assert {each["key"]: (each["calls"], each["cost_usd"]) for each in result["results"]} == groups
        assert (result["by"], result["left_out"], result["total"]["cost_usd"]) == (by, 0, "3.75")
    first = ada.get(f"leases/{lease['id']}/calls/totals?by=model&limit=1").json()
    counts = {"input_tokens": 10, "cached_tokens": 4, "cache_written_tokens": 3, "output_tokens": 1}
    claude = {"key": "claude", "calls": 2, "refused": 1, "cost_usd": "2", "estimated_usd": "2", **counts}
    assert first["results"] == [NO_TOTAL | claude] and first["left_out"] == 2


def test_an_unknown_grouping_of_calls_is_named(ada: ApiClient, lease) -> None:
    for query in ("by=agent", "limit=0", "limit=x", "group=run"):
        problem = ada.get(f"leases/{lease['id']}/calls/totals?{query}")
        assert (problem.status_code, problem.json()["field"]) == (400, query.partition("=")[0])
