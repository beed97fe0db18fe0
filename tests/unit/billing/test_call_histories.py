"""Random histories of model calls: each price, limit, budget and cost is the one that an independent calculation gives."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from math import ceil
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from billing import budgets, costs, derivation, metering, totals
from billing.budgets import call_admission
from billing.models import Budget, CostRecord, PeriodTotal, UsageRecord
from leases.models import Lease
from sandboxes.call_limits import CallLimits
from sandboxes.egress import model_pricing, settlement
from sandboxes.egress.logs import upstream_records
from sandboxes.egress.repricing import reprice_calls
from sandboxes.models import LlmCall, Sandbox, TokenRate
from tests.conftest import MINUTE
from tests.support.billing import ADA, HOUR, create_budget, run_command
from tests.support.call_histories.answers import VENDORS, Event, Script
from tests.support.call_histories.expectations import (
    DEFAULT_MAX_TOKENS,
    INPUT_KINDS,
    OUTPUT_KINDS,
    ExpectedCall,
    Knowledge,
    PriceList,
    Rate,
    find_complete,
    iter_ends,
)
from tests.support.call_histories.proxy import ProxyProcess, ScriptedAnswer, break_off
from tests.support.search import budget as search_budget
from tests.support.token_sums import TokenSum, list_live_sums, list_metered_sums

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.usefixtures("stopped_clock"),
    pytest.mark.postgres("sums: limits, budgets and costs are computed in the database"),
]
BEGIN = datetime(2026, 11, 21, 21, tzinfo=UTC)  # histories reach beyond midnight
MIDNIGHT = datetime(2026, 11, 22, tzinfo=UTC)
LONG_CONTEXT = 200_000
UNPRICED = "mistral"  # has no rate at first
KINDS = (*INPUT_KINDS, *OUTPUT_KINDS, "web_search")
PRICES = st.integers(0, 10**8).map(lambda number: Decimal(number).scaleb(-6))  # up to 100 USD per million
COUNTS = st.one_of(st.just(0), st.integers(0, 300), st.integers(0, 300_000))
PERMILLE = st.integers(0, 1000)


@st.composite
def scripts(draw: Any, name: str) -> Script:
    vendor = VENDORS[name]
    counts = {kind: draw(st.integers(0, 9) if kind == "web_search" else COUNTS, label=kind) for kind in vendor.kinds}
    counts = {kind: count for kind, count in counts.items() if count}
    # At the start of a stream of messages the output is a placeholder, and less has been read from the cache.
    first = {kind: count for kind, count in counts.items() if kind in ("input", "cache_write_5m", "cache_write_1h")}
    first |= {"cache_read": read} if (read := counts.get("cache_read", 0) // 2) else {}
    first |= {"output": 1} if counts.get("output", 0) + counts.get("reasoning", 0) else {}
    return Script(
        model=draw(st.sampled_from([f"{name}-x", f"{name}-x-2026-08-06", f"vendor/{name}-x"])),
        counts=counts,
        texts=tuple(draw(st.lists(st.text("ab é漢", min_size=1, max_size=12), max_size=8))),
        tier=draw(st.sampled_from(vendor.tiers)),
        first_counts=first,
        cost=draw(st.none() | st.sampled_from([0, 0.0123, 1.5e-07])) if vendor.can_state_cost else None,
        has_usage=draw(st.sampled_from([True, True, True, False])),
        is_tier_in_usage=name == "anthropic",
    )


def split(content: bytes, cuts: list[int]) -> list[bytes]:
    """Divide an answer at these places, in thousandths of its length."""
    places = sorted({0, len(content), *(len(content) * cut // 1000 for cut in cuts)})
    return [content[start:end] for start, end in pairwise(places)]


class CallHistories(RuleBasedStateMachine):
    """Histories of calls, crashes, price changes, records, and sweeps."""

    lease: Lease

    @initialize(data=st.data(), has_limit=st.booleans())
    def begin(self, data: Any, has_limit: bool) -> None:
        for model in (CostRecord, PeriodTotal, UsageRecord, LlmCall, TokenRate, Budget):
            model._base_manager.all().delete()
        derivation.reset_usage_and_costs()
        limits = CallLimits(Decimal(10**6) if has_limit else None, 10**9)
        Sandbox.objects.filter(holder=self.lease.pk).update(**limits.columns)
        self.slot = Sandbox.objects.values_list("slot", flat=True).get(holder=self.lease.pk)
        self.now, self.has_limit = BEGIN, has_limit
        fields = {"scope": "agent", "subject": ADA, "hard": False, "now": BEGIN}
        self.budget = create_budget(10**6, "usd", "month", **fields)
        self.token_budget = create_budget(10**9, "tokens", "month", **fields)
        self.process = ProxyProcess(lambda: self.now)
        self.calls: dict[str, ExpectedCall] = {}
        self.prices = {name: PriceList() for name in VENDORS}
        for name in VENDORS:
            if name != UNPRICED:
                kinds = data.draw(st.sets(st.sampled_from(KINDS)), label="priced kinds") | {"input", "output"}
                for kind in sorted(kinds):
                    self.add_rate(name, kind, data.draw(PRICES, label=kind))

    # --- calls --------------------------------------------------------------------------------------------------------

    @rule(
        data=st.data(), name=st.sampled_from(sorted(VENDORS)), size=st.integers(0, 3000),
        max_tokens=st.sampled_from([None, 1, 20, 1000, 32_000]), cuts=st.lists(PERMILLE, max_size=6),
    )  # fmt: skip
    def call(self, data: Any, name: str, size: int, max_tokens: int | None, cuts: list[int]) -> None:
        if self.has_limit and not self.prices[name].rates:
            return  # is refused
        if self.process.database.is_dead:
            self.restart()
        vendor, script = VENDORS[name], data.draw(scripts(name), label="script")
        streamed = vendor.build_events is not None and data.draw(st.booleans(), label="streamed")
        max_tokens = max_tokens or (9 if vendor.path == "/v1/messages" else None)  # messages require one
        body = vendor.build_request(f"{name}-x", "x" * size, max_tokens, streamed=streamed)
        limit = 0 if name == "embeddings" else max_tokens or DEFAULT_MAX_TOKENS
        prices = self.prices[name]
        expected = ExpectedCall(self.now, prices, input_tokens=ceil(len(json.dumps(body)) / 3), max_output=limit)
        expected.tokens = expected.input_tokens + limit
        if prices.rates:
            expected.reserved = prices.estimate(expected.input_tokens, limit, self.now)
        end = data.draw(st.sampled_from(["whole", "whole", "leaves", "breaks", "ends", "dies", "refused"]), label="end")
        if streamed and vendor.build_events:
            self.call_stream(data, expected, [*vendor.build_events(script)], script, vendor.path, body, cuts, end)
        else:
            self.call_document(data, expected, vendor.build_document(script), script, vendor.path, body, cuts, end)

    def call_stream(
        self, data: Any, expected: ExpectedCall, events: list[Event], script: Script, path: str, body: Any, cuts: list[int],
        end: str,
    ) -> None:  # fmt: skip
        content = b"".join(event.data for event in events)
        received = len(content)
        if end in ("breaks", "ends", "dies"):
            received = received * data.draw(PERMILLE, label="received") // 1000
        answer = ScriptedAnswer(split(content[:received], cuts))
        self.send(data, expected, answer, path, body, end)
        if end in ("refused", "dies"):
            if end == "dies":
                self.expect_crash(expected, events, answer.chunks)
            return
        # At an orderly end the last event needs no blank line.
        known = Knowledge.gather(find_complete(events, received + (0 if end == "breaks" else 2)))
        expected.expect_stream(known, script)

    def call_document(
        self, data: Any, expected: ExpectedCall, document: Any, script: Script, path: str, body: Any, cuts: list[int], end: str
    ) -> None:
        content = json.dumps(document, ensure_ascii=False).encode()
        received = len(content)
        if end in ("breaks", "ends", "dies"):
            received = min(received * data.draw(PERMILLE, label="received") // 1000, received - 1)
        if end == "leaves" and not script.has_usage:
            end = "whole"
        stated = None if script.cost is None or end == "refused" else str(script.cost)
        answer = ScriptedAnswer(split(content[:received], cuts), "application/json", cost=stated)
        self.send(data, expected, answer, path, body, end)
        if end in ("whole", "leaves", "breaks", "ends"):
            expected.expect_document(script, stated, received, is_whole=end in ("whole", "leaves"), is_answered=end != "breaks")

    def send(self, data: Any, expected: ExpectedCall, answer: ScriptedAnswer, path: str, body: Any, end: str) -> None:
        patience = data.draw(st.integers(0, 5), label="patience") if end == "leaves" else None
        if end == "refused":
            answer.status = data.draw(st.sampled_from([400, 429, 500, 503, 529]), label="status")
            expected.usd, expected.source, expected.tokens = Fraction(0), "free", 0
        answer.fail = {"breaks": break_off, "dies": self.process.die}.get(end)
        assert self.slot is not None
        call_id, _ = self.process.call(self.slot, path, body, answer, patience)
        expected.is_open = end == "dies"
        self.calls[call_id] = expected

    def expect_crash(self, expected: ExpectedCall, events: list[Event], chunks: list[bytes]) -> None:
        """The usage is noted once, after the first chunk with which it is known, and unless the stream is complete."""
        for received in iter_ends(chunks):
            complete = find_complete(events, received)
            known = Knowledge.gather(complete)
            if known.counts is not None:
                if not any(event.is_last for event in complete):
                    expected.expect_noted(known)
                return

    @rule()
    def restart(self) -> None:
        """The successor of a process that died closes its calls, each at the price that was reserved."""
        self.process = ProxyProcess(lambda: self.now)
        lost = [call for call in self.calls.values() if call.is_open]
        assert settlement.close_calls_of_dead_servers(now=self.now, is_alive=lambda server: False) == len(lost)
        for call in lost:
            call.is_open = False
            if call.reserved is not None:
                call.usd, call.source = call.reserved, "estimate"

    # --- prices -------------------------------------------------------------------------------------------------------

    def add_rate(self, name: str, kind: str, usd: Decimal, **fields: Any) -> None:
        rate = Rate(kind, usd, **{"since": BEGIN} | fields)
        self.prices[name].rates.append(rate)
        TokenRate.objects.create(
            pattern=f"{name}-x",
            kind=kind,
            usd_per_million=usd,
            valid_from=rate.since,
            tokens_from=rate.tokens_from,
            tier=rate.tier,
        )

    @rule(
        name=st.sampled_from(sorted({*VENDORS} - {UNPRICED})), kind=st.sampled_from(KINDS), usd=PRICES, later=st.booleans(),
        tier=st.sampled_from(["", "", "priority", "flex"]), tokens_from=st.sampled_from([0, 0, 1000, LONG_CONTEXT]),
    )  # fmt: skip
    def change_price(self, name: str, kind: str, usd: Decimal, later: bool, tier: str, tokens_from: int) -> None:
        """Add a rate from now on, or from the beginning: calls that have a price keep it."""
        self.add_rate(name, kind, usd, since=self.now if later else BEGIN, tier=tier, tokens_from=tokens_from)

    @rule(usd=st.tuples(PRICES, PRICES))
    def price_model(self, usd: tuple[Decimal, Decimal]) -> None:
        """Add the first rates of a model, and price its calls whose usage is known."""
        if not self.prices[UNPRICED].rates:
            self.add_rate(UNPRICED, "input", usd[0])
            self.add_rate(UNPRICED, "output", usd[1])
        unpriced = {call_id: call for call_id, call in self.calls.items() if call.usd is None and not call.is_open}
        model_pricing.price_calls(self.now)
        for call_id, call in unpriced.items():
            if call.counts is not None:
                call.price_by_rate()
                if LlmCall.objects.get(call_id=call_id).outcome != "ok":
                    call.source, call.is_partial = "estimate", True

    @rule(name=st.sampled_from(sorted(VENDORS)), usd=PRICES, data=st.data())
    def correct_price(self, name: str, usd: Decimal, data: Any) -> None:
        """Replace a wrong price, and price the calls of the model again."""
        if rates := self.prices[name].rates:
            wrong = data.draw(st.sampled_from(rates), label="wrong rate")
            self.add_rate(name, wrong.kind, usd, since=wrong.since, tier=wrong.tier, tokens_from=wrong.tokens_from)
        reprice_calls(BEGIN, now=self.now, model=f"{name}-x", apply=True)
        for call in self.calls.values():
            if call.prices is self.prices[name] and call.counts is not None and call.source in ("rate", "estimate"):
                call.price_by_rate()
                call.source = "estimate" if call.is_partial else call.source

    @rule(data=st.data(), nano=st.integers(0, 10**10), is_exact=st.booleans(), output=st.sampled_from([0, 10**8]))
    def record(self, data: Any, nano: int, is_exact: bool, output: int) -> None:
        """A record of the upstream arrives late. That of a client that left is an estimate, and may state less output."""
        ended = [call_id for call_id, call in self.calls.items() if not call.is_open and call.source != "record"]
        if not ended:
            return
        call_id = data.draw(st.sampled_from(ended), label="recorded call")
        line = {"call": call_id, "status": "success", "error": "" if is_exact else "disconnected", "input": 1, "cached": 0,
                "output": output, "cost": float(Decimal(nano).scaleb(-9))}  # fmt: skip
        call, row = self.calls[call_id], LlmCall.objects.get(call_id=call_id)
        reported = row.output_tokens or 0
        known = (1 if is_exact else max(1, row.input_tokens or 0)) + (output if is_exact else max(output, reported))
        call.tokens, call.reported_tokens = known if is_exact else max(known, call.tokens), known
        upstream_records.apply_lines([json.dumps(line).encode()], now=self.now)
        if is_exact or reported <= output or call.source not in ("upstream", "rate"):
            call.usd, call.source = Fraction(nano, 10**9), "record"
        elif call.counts is not None and output > reported:
            raise AssertionError("such a record is not lower")

    # --- sweeps and sums ----------------------------------------------------------------------------------------------

    @rule(minutes=st.sampled_from([1, 20, 90]))
    def wait(self, minutes: int) -> None:
        self.now += minutes * MINUTE

    @rule()
    def meter(self) -> None:
        metering.meter_usage(now=self.now)
        costs.price_usage(now=self.now)
        self.update_budgets()

    def update_budgets(self) -> None:
        for budget in (self.budget, self.token_budget):
            budgets.update_spending(budget.pk, now=self.now)
            budget.refresh_from_db()

    @invariant()
    def prices_and_limits_are_exact(self) -> None:
        if not hasattr(self, "calls"):
            return
        rows = {row.call_id: row for row in LlmCall.objects.all()}
        assert {*rows} == {*self.calls}
        for call_id, call in self.calls.items():
            row = rows[call_id]
            assert (row.cost is not None and Fraction(row.cost), row.priced) == (call.usd is not None and call.usd, call.source)
            assert (row.ended_at is None) == call.is_open
            assert (row.reserved_tokens if call.is_open else row.tokens) == call.tokens
            assert not call.is_open or Fraction(row.reserved or 0) == (call.reserved or 0)
        total = sum((call.owed for call in self.calls.values()), Fraction(0))
        assert Fraction(budgets.sum_lease_calls(self.lease.pk)) == total
        if self.now >= MIDNIGHT:  # changes of an earlier day are part of the sum after the next update
            self.update_budgets()
        self.budget.refresh_from_db(), self.token_budget.refresh_from_db()
        assert Fraction(call_admission.sum_spent_now(self.budget, now=self.now)) == total
        tokens = sum(call.tokens for call in self.calls.values())
        assert budgets.sum_lease_calls(self.lease.pk, "tokens") == tokens
        assert call_admission.sum_spent_now(self.token_budget, now=self.now) == tokens

    def teardown(self) -> None:
        if not hasattr(self, "calls"):
            return
        self.restart()
        ended = self.calls.values()
        tokens, reported = (sum(getattr(call, name) for call in ended) for name in ("tokens", "reported_tokens"))
        self.check_token_sums(list_live_sums(self.lease), reported, tokens - reported)
        self.meter()
        self.check_token_sums(list_live_sums(self.lease), reported, tokens - reported)
        self.check_token_sums(list_metered_sums(self.now), reported, tokens - reported)
        expected = (
            sum((call.owed for call in ended), Fraction(0)),
            sum((call.owed for call in ended if call.source == "estimate"), Fraction(0)),
            sum(call.usd is None for call in ended),
        )
        assert self.sum_costs() == expected
        derivation.reset_usage_and_costs()
        derivation.derive_usage_and_costs(now=self.now)
        assert self.sum_costs() == expected
        self.update_budgets()
        assert Fraction(self.budget.spent) == expected[0]
        assert (self.token_budget.spent, self.token_budget.estimated_tokens) == (tokens, tokens - reported)

    def check_token_sums(self, found: dict[str, TokenSum], reported: int, estimated: int) -> None:
        assert found == dict.fromkeys(found, (reported, estimated))

    def sum_costs(self) -> tuple[Fraction, Fraction, int]:
        """Return cost, its estimated part, and the number of calls without a price, as `/costs` shows them."""
        shown = totals.sum_costs("lease", item="llm")
        assert {total.key for total in shown} <= {str(self.lease.pk)}
        usd, estimated = sum(Fraction(total.usd) for total in shown), sum(Fraction(total.estimated_usd) for total in shown)
        return Fraction(usd), Fraction(estimated), sum(total.unpriced for total in shown)


def test_costs_of_random_histories_are_exact(grant: Callable[..., Lease], memory: Any, settings: Any) -> None:
    settings.LLM_URL, settings.LLM_API_KEY, settings.LLM_MODELS = "http://upstream.test/v1", "sk-secret", ["*"]
    lease = grant(ADA, "game-1", ttl=20 * HOUR, sleep_after=20 * HOUR, now=BEGIN)
    run_command(lease, "true", now=BEGIN)
    machine = type("Machine", (CallHistories,), {"lease": lease})
    run_state_machine_as_test(
        machine,
        settings=hypothesis.settings(
            max_examples=search_budget(fast=3, full=60),
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=[*HealthCheck],
            phases=[Phase.generate],
        ),
    )
