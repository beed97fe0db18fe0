"""Estimated tokens of model calls: the same in each place, before and after the calls are metered."""

from collections.abc import Callable
from typing import Any

import pytest

from billing import budgets, costs, derivation, metering, totals
from billing.statements import preview_month
from leases.models import Lease
from tests.conftest import NOW
from tests.support.billing import ADA, BOB, HOUR, create_budget, create_llm_call, get_house_account
from tests.support.token_sums import list_live_sums, list_metered_sums

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("sums: totals are computed in the database")]
UNKNOWN = {"input_tokens": None, "cached_tokens": None, "output_tokens": None}
CALLS: dict[str, tuple[dict[str, Any], int, int]] = {  # columns, reported and estimated tokens
    "answered": ({"tokens": 107}, 107, 0),
    "cut": ({"outcome": "cut", "output_tokens": 7, "tokens": 160, "priced": "estimate"}, 107, 53),
    "without output": ({"outcome": "cut", "output_tokens": None, "tokens": 130, "priced": "estimate"}, 100, 30),
    "without usage": ({**UNKNOWN, "tokens": 4096, "cost": None, "priced": "", "model": "unpriced"}, 0, 4096),
    "lost": ({**UNKNOWN, "outcome": "lost", "tokens": 900, "reserved_tokens": 900, "priced": "estimate"}, 0, 900),
    "failed": ({**UNKNOWN, "outcome": "failed", "tokens": 0, "reserved_tokens": 70, "cost": 0, "priced": "free"}, 0, 0),
    "refused": ({**UNKNOWN, "outcome": "refused", "cost": None, "priced": ""}, 0, 0),
    "ended by a version without tokens": ({"tokens": None, "reserved_tokens": 150}, 107, 43),
    "from before tokens were counted": ({"tokens": None}, 107, 0),
    "unknown, from before tokens were counted": ({**UNKNOWN, "tokens": None}, 0, 0),
}


def derive() -> None:
    metering.meter_usage(now=NOW + HOUR)
    costs.price_usage(now=NOW + HOUR)


@pytest.mark.parametrize("name", CALLS)
def test_each_kind_of_call_has_the_same_tokens_everywhere(name: str, grant: Callable[..., Lease]) -> None:
    lease, (columns, *expected) = grant(now=NOW), CALLS[name]
    create_llm_call(lease, **columns)
    for _ in range(2):
        assert list_live_sums(lease) == dict.fromkeys(list_live_sums(lease), tuple(expected))
        derive()
    found = list_metered_sums(NOW)
    assert found == dict.fromkeys(found, tuple(expected))


def test_all_calls_of_two_agents_have_the_same_tokens_everywhere(grant: Callable[..., Lease]) -> None:
    leases = [grant(ADA, now=NOW), grant(BOB, "game-2", now=NOW)]
    for lease in leases:
        for columns, *_ in CALLS.values():
            create_llm_call(lease, **columns)
        in_flight = {"outcome": "open", "ended_at": None, "tokens": None, "reserved_tokens": 10**6, "cost": None, "priced": ""}
        create_llm_call(lease, **UNKNOWN, **in_flight)
    reported, estimated = (sum(call[number] for call in CALLS.values()) for number in (1, 2))
    live = [list_live_sums(lease) for lease in leases]
    assert live == [dict.fromkeys(live[0], (reported, estimated))] * 2
    derive()
    assert [list_live_sums(lease) for lease in leases] == live
    for _ in range(2):
        found = list_metered_sums(NOW)
        assert found == dict.fromkeys(found, (2 * reported, 2 * estimated))
        by_lease = {total.key: total.tokens for total in totals.sum_costs("lease")}
        assert {key: tokens and tokens.estimated for key, tokens in by_lease.items()} == {
            str(lease.pk): estimated for lease in leases
        }  # fmt: skip
        derivation.reset_usage_and_costs()
        derivation.derive_usage_and_costs(now=NOW + HOUR)
    budget = create_budget(10**9, "tokens", "month", scope="agent", subject=ADA, hard=False, now=NOW)
    budgets.update_spending(budget.pk, now=NOW + HOUR)
    budget.refresh_from_db()
    assert (budget.spent, budget.estimated_tokens) == (reported + estimated, estimated)
    assert sum(line.estimated_tokens or 0 for line in preview_month(get_house_account(), NOW.date())) == 2 * estimated
