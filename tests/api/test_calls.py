"""What a lease's sandboxes asked their model, through its door."""

from decimal import Decimal

import pytest

from sandboxes.models import LlmCall
from tests.api.conftest import Api
from tests.conftest import MINUTE, NOW

pytestmark = pytest.mark.django_db


def called(lease: dict, number: int, **more: object) -> LlmCall:
    at = NOW + number * MINUTE
    known = {"outcome": "ok", "ended_at": at, "started_at": at, "deadline_at": at + MINUTE} | more
    return LlmCall.objects.create(call_id=f"call-{number}", holder=lease["id"], agent_did=lease["agent_did"], **known)


def test_calls_are_listed_newest_first_with_their_totals(ada: Api, lease) -> None:
    called(lease, 1, cost=Decimal("0.100000001"), input_tokens=10, output_tokens=1)
    called(lease, 2, input_tokens=5)
    called(lease, 3, outcome="open", ended_at=None)
    said = ada.get(f"leases/{lease['id']}/calls").json()
    assert [each["call_id"] for each in said["results"]] == ["call-3", "call-2", "call-1"]
    assert [each["cost_usd"] for each in said["results"]] == [None, None, "0.100000001"]
    assert said["total"] == {"calls": 3, "unpriced": 1, "input_tokens": 15, "output_tokens": 1, "cost_usd": "0.100000001"}


def test_pages_have_the_totals_of_all(ada: Api, lease) -> None:
    for number in range(3):
        called(lease, number, cost=Decimal(1))
    first = ada.get(f"leases/{lease['id']}/calls?limit=2").json()
    second = ada.get(f"leases/{lease['id']}/calls?limit=2&cursor={first['next']}").json()
    assert [len(page["results"]) for page in (first, second)] == [2, 1] and second["next"] is None
    assert first["total"] == second["total"] and second["total"]["cost_usd"] == "3"


def test_a_lease_that_asked_nothing_has_totals_of_zero(ada: Api, lease) -> None:
    said = ada.get(f"leases/{lease['id']}/calls").json()
    zero = {"calls": 0, "unpriced": 0, "input_tokens": 0, "output_tokens": 0, "cost_usd": "0"}
    assert said == {"total": zero, "results": [], "next": None}


def test_another_keys_calls_do_not_exist(bob: Api, lease) -> None:
    called(lease, 1)
    assert bob.get(f"leases/{lease['id']}/calls").status_code == 404
