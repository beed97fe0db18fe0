"""Model calls in the console: results, spending and limits of leases, filters, search and model rates."""

import re
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from html import unescape
from itertools import product
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client
from django.utils import timezone
from django.utils.html import conditional_escape

from billing import budgets
from leases import execution, leasing
from leases.models import Agent, Lease
from sandboxes.admin.base.formatting import SummaryField
from sandboxes.call_limits import CallLimits
from sandboxes.egress import authorization
from sandboxes.egress.estimates import TokenEstimate
from sandboxes.egress.refusals import CallRefused
from sandboxes.models import LlmCall, Sandbox, TokenRate
from sandboxes.pool import allocation
from tests.admin.conftest import NOW, ensure_sandbox
from tests.conftest import MINUTE
from tests.support.billing import HOUR
from tests.support.console import MARKUP, WHY, fetch, get_fields, list_messages, list_rows, row_url
from tests.support.model_rates import create_rates

pytestmark = pytest.mark.django_db
LIST, RATES, DAY = "/admin/sandboxes/llmcall/", "/admin/sandboxes/tokenrate/", timedelta(days=1)
RATE_FORM = {
    "pattern": "gpt-*", "input_usd": "2.5", "cache_read_usd": "", "output_usd": "10", "web_search_usd": "25", "tier": "",
    "tokens_from": "0", "valid_from_0": "2021-01-01", "valid_from_1": "00:00:00", "source": "price page", "note": "",
}  # fmt: skip


def call(lease: Lease | None = None, **fields: Any) -> LlmCall:
    ended = {"started_at": NOW, "deadline_at": NOW, "ended_at": NOW, "outcome": "ok", "model": "gpt-4o-mini", "status": 200}
    theirs = {"holder": lease.pk, "agent_did": lease.agent_did, "environment_id": lease.environment_id} if lease else {}
    return LlmCall.objects.create(**{"call_id": f"{LlmCall.objects.count():032x}", **ended, **theirs, **fields})


def listed(client: Client, query: str) -> list[int]:
    return sorted(row.pk for row in list_rows(client, query if query.startswith("/") else LIST + query))


def links(fact: SummaryField) -> dict[str, str]:
    """Map the link texts in the note of a summary field to their URLs."""
    found = re.findall(r'<a [^>]*href="([^"]+)">([^<]+)</a>', conditional_escape(fact.note))
    return {words: unescape(href) for href, words in found}


# --- the list and a call's page -----------------------------------------------------------------------------------


def test_a_call_of_every_outcome_is_shown(viewer: Client, lease: Lease) -> None:
    for outcome, kind in product(LlmCall.Outcome.values, LlmCall.Kind.values):
        row = call(lease, outcome=outcome, kind=kind, ended_at=None if outcome == "open" else NOW)
        for url in (f"{LIST}?slice=all&kind__exact={kind}&outcome__exact={outcome}", row_url(row)):
            assert f">{LlmCall.Outcome(outcome).label}</span>" in fetch(viewer, url), (outcome, kind)


def test_each_tab_of_calls_lists_its_own_rows(viewer: Client) -> None:
    rows = {
        outcome: call(outcome=outcome, ended_at=None if outcome == "open" else NOW).pk for outcome in LlmCall.Outcome.values
    }
    relay, priced = call(kind="relay").pk, call(cost=1).pk
    assert listed(viewer, "?slice=open") == [rows["open"]]
    assert listed(viewer, "?slice=failed") == [rows["failed"], rows["cut"], rows["lost"]]
    assert listed(viewer, "?slice=refused") == [rows["refused"]]
    assert listed(viewer, "?slice=unpriced") == [rows["ok"], rows["failed"], rows["cut"], rows["lost"]]
    assert listed(viewer, "?slice=all") == sorted([*rows.values(), relay, priced])


def test_refused_calls_are_not_unpriced(viewer: Client) -> None:
    call(outcome="refused", status=402, code="spend_limit_reached")
    call(kind="relay", path="/xrpc/sub")
    shown = fetch(viewer, LIST)
    assert "unpriced" not in shown.split("result_list")[1]
    assert "spend_limit_reached" in shown and "/xrpc/sub" in shown


def test_calls_are_narrowed_by_each_filter(viewer: Client, lease: Lease) -> None:
    plain = call(started_at=timezone.now(), cost=1, priced="rate")
    record = call(cost=2, priced="record", streamed=True, model="claude-3", started_at=NOW - 2 * DAY)
    refused = call(outcome="refused", status=403, code="model_not_allowed", started_at=NOW - 3 * DAY)
    relay = call(kind="relay", status=101, started_at=NOW - 40 * DAY)
    free = call(started_at=NOW - 50 * DAY)
    everything = sorted(row.pk for row in (plain, record, refused, relay, free))
    for query, found in {
        "kind__exact=relay": [relay], "outcome__exact=refused": [refused], "code=model_not_allowed": [refused],
        "code=model": [], "status=403": [refused], "status=4": [], "called=claude": [record], "streamed__exact=1": [record],
        "price=record": [record], "price=rate": [plain], "price=none": [free], "since=1h": [plain],
        "since=7d": [plain, record, refused],
        f"started_at_from_0={NOW - 2 * DAY:%Y-%m-%d}": [plain, record],
        f"started_at_to_0={NOW - 40 * DAY:%Y-%m-%d}": [relay, free],
        f"started_at_from_0={NOW - 3 * DAY:%Y-%m-%d}&started_at_from_1={NOW:%H:%M}"
        f"&started_at_to_0={NOW - 2 * DAY:%Y-%m-%d}&started_at_to_1={NOW + MINUTE:%H:%M}": [record, refused],
    }.items():  # fmt: skip
        assert listed(viewer, f"?{query}") == sorted(row.pk for row in found), query
    for nonsense in (
        "since=x", "price=x", "started_at_from_0=x", "started_at_from_0=2026-13-45&started_at_from_1=25:00", "code=",
        "code=%00", "called=%00",
    ):  # fmt: skip
        assert listed(viewer, f"?{nonsense}") == everything, nonsense


def test_a_call_is_found_by_agent_and_by_any_complete_id(viewer: Client, lease: Lease) -> None:
    row = call(lease, sandbox=ensure_sandbox(lease), call_id="0123456789abcdef0123456789abcdef")
    call(agent_did="did:plc:other", environment_id="elsewhere", model="o3")
    for query in (row.call_id, lease.pk, row.sandbox_id, lease.pk.hex, row.agent_did, row.environment_id, "gpt-4o"):
        assert listed(viewer, f"?q={query}") == [row.pk], query
    assert not listed(viewer, "?q=00000000-0000-0000-0000-000000000000")


def test_a_calls_page_shows_the_source_of_its_price(viewer: Client, lease: Lease) -> None:
    rates = create_rates("gpt-*", input="2.5", cache_read="1.25", output=10)
    row = call(
        lease, cost="0.0025", priced="rate", input_tokens=1000, cached_tokens=400, output_tokens=50, path="/v1/messages",
        rate_ids=[rate.pk for rate in rates],
        sent_bytes=2048, received_bytes=812, first_byte_at=NOW + timedelta(seconds=2), recorded_at=NOW, streamed=True,
    )  # fmt: skip
    fields = get_fields(viewer, row_url(row))
    assert (fields["USD"].value, fields["Sent / received"].value) == ("0.0025", "2.0 KiB / 812 B")
    assert [*links(fields["USD"]).values()] == [f"{RATES}{rate.pk}/change/" for rate in rates]
    note = re.sub("<[^>]*>", "", str(fields["USD"].note))
    assert note.startswith("by rate: 600 input at 2.5 USD per million tokens (gpt-*, input), 400 cached input at 1.25 USD")
    assert "/v1/messages" in str(fields["Path"].value)
    assert fields["Duration"].note == "first byte after 2.0 s"
    assert fields["In proxy log"].value == "no"
    assert f"{NOW:%Y-%m-%d %H:%M:%S}" in str(fields["In upstream records"].value)
    LlmCall.objects.update(rate_ids=None)
    assert get_fields(viewer, row_url(row))["USD"].note == "by rate of a version that did not keep its rows"


def test_an_unpriced_calls_page_names_the_models_without_a_rate(viewer: Client, lease: Lease) -> None:
    row = call(lease, model="gpt-4o-2024-08-06", requested_model="gpt-4o")
    assert get_fields(viewer, row_url(row))["USD"].note == "no rate for gpt-4o-2024-08-06 or gpt-4o"
    create_rates("gpt-*", input=1)
    assert get_fields(viewer, row_url(row))["USD"].note == "the rates for gpt-* apply once the usage is known"


def test_text_from_a_sandbox_in_a_call_is_escaped(superuser: Client, lease: Lease) -> None:
    row = call(lease, model=MARKUP, path=MARKUP, code=MARKUP[:64], outcome="failed", environment_id=MARKUP)
    for url in (LIST, row_url(row), f"{LIST}?code={MARKUP}", f"{LIST}?q={MARKUP}"):
        assert "<img src=x" not in superuser.get(url).content.decode(), url


# --- spending of a lease ------------------------------------------------------------------------------------------


@pytest.fixture
def metered_lease(lease: Lease, grant: Callable[..., Lease]) -> Lease:
    """Three priced calls of a lease (two incomplete), two unpriced, one refused, one relay call; and another lease's call."""
    call(lease, cost="1.5", input_tokens=1000, cached_tokens=300, output_tokens=20)
    call(lease, cost="0.25", outcome="cut", input_tokens=500)
    call(lease, cost="0", outcome="failed")
    call(lease)
    call(lease, outcome="lost", status=None)
    call(lease, outcome="refused", status=402, code="spend_limit_reached")
    call(lease, kind="relay")
    call(grant(agent="did:plc:other"), cost=100)
    return lease


def test_a_lease_links_to_exactly_its_model_calls(viewer: Client, metered_lease: Lease) -> None:
    fields = get_fields(viewer, row_url(metered_lease))
    assert (fields["Model calls"].value, fields["Tokens in / out"].value) == ("6", "1,500 / 20")
    assert fields["Tokens in / out"].note == "300 input tokens cached"
    assert (fields["Model cost"].value, fields["Model cost"].alarm) == ("1.75 USD", False)
    assert "no limit" in str(fields["Model cost"].note)
    assert len(listed(viewer, fields["Model calls"].href)) == 6
    narrower = links(fields["Model calls"]) | links(fields["Model cost"])
    assert {words: len(listed(viewer, href)) for words, href in narrower.items()} == {
        "3 failed": 3, "1 refused": 1, "2 calls unpriced": 2,
    }  # fmt: skip


@pytest.mark.parametrize(("limit", "share", "over"), [("7", "0.2500", False), ("1.75", "1.0000", True), ("0", "1.0000", True)])
def test_a_limit_is_a_bar_that_turns_red_when_it_is_reached(
    viewer: Client, metered_lease: Lease, limit: str, share: str, over: bool
) -> None:
    Lease.objects.filter(pk=metered_lease.pk).update(llm_limit=limit)
    fields = get_fields(viewer, row_url(metered_lease))["Model cost"]
    assert (f'value="{share}"' in fields.note, fields.alarm, f"of {limit} USD" in fields.note) == (True, over, True)


def test_an_agents_page_sums_up_its_last_thirty_days(viewer: Client, metered_lease: Lease) -> None:
    call(metered_lease, cost=7, started_at=NOW - 31 * DAY)
    fields = get_fields(viewer, row_url(Agent.objects.get(did=metered_lease.agent_did)))
    assert (fields["Model calls, last 30 days"].value, fields["Model cost"].value) == ("6", "1.75 USD")
    assert len(listed(viewer, fields["Model calls, last 30 days"].href)) == 6
    assert len(listed(viewer, links(fields["Model cost"])["2 calls unpriced"])) == 2


# --- limits on model calls ----------------------------------------------------------------------------------------


def set_limits(client: Client, lease: Lease, limit: str = "", token_limit: str = "", shown: CallLimits | None = None) -> Any:
    """Submit the dialog, which was opened when the lease had the limits `shown`, by default the present ones."""
    shown = shown or CallLimits.of(Lease.objects.get(pk=lease.pk))
    hidden = {
        "initial-limit": "" if shown.usd is None else f"{shown.usd.normalize():f}",
        "initial-token_limit": "" if shown.tokens is None else str(shown.tokens),
    }
    return client.post(row_url(lease, "limit_calls"), WHY | {"limit": limit, "token_limit": token_limit} | hidden)


def limits(lease: Lease) -> CallLimits:
    """Return the limits of a lease, which are also those of its sandbox."""
    sandbox = allocation.find_by_holder(lease.pk)
    assert sandbox
    found = CallLimits.of(Lease.objects.get(pk=lease.pk))
    assert found == CallLimits.of(sandbox)
    return found


def test_an_operator_raises_lowers_and_lifts_the_limits_of_a_lease(operator: Client, metered_lease: Lease) -> None:
    assert b"Call limits" in operator.get(row_url(metered_lease)).content
    assert "1.75 USD (no limit)" in fetch(operator, row_url(metered_lease, "limit_calls"))
    Lease.objects.filter(pk=metered_lease.pk).update(llm_limit=3, llm_token_limit=50_000)
    shown = fetch(operator, row_url(metered_lease, "limit_calls"))
    assert "1.75 USD of 3 USD" in shown and "of 50,000 tokens" in shown
    for name, value in (("limit", "3"), ("initial-limit", "3"), ("token_limit", "50000"), ("initial-token_limit", "50000")):
        assert re.search(rf'<input[^>]* name="{name}"[^>]* value="{value}"', shown), name
    for limit, token_limit, expected, event in (
        ("1.5", "50000", CallLimits(Decimal("1.5"), 50_000), "1.5 USD instead of 3 USD"),
        ("0.000000001", "50000", CallLimits(Decimal("1e-9"), 50_000), "0.000000001 USD instead of 1.5 USD"),
        ("20", "7", CallLimits(Decimal(20), 7), "20 USD instead of 0.000000001 USD, 7 tokens instead of 50000 tokens"),
        ("20", "", CallLimits(Decimal(20), None), "no token limit instead of 7 tokens"),
        ("", "", CallLimits(), "no spend limit instead of 20 USD"),
    ):
        changed = set_limits(operator, metered_lease, limit, token_limit)
        assert list_messages(changed)[-1] == "1 lease updated with the new limits."
        assert limits(metered_lease) == expected
        last = metered_lease.events.first()
        assert last
        assert (last.kind, last.actor, last.reason) == ("call_limits", "operator", f"{event}: it was agreed")
        entry = LogEntry.objects.first()
        assert entry and entry.get_change_message() == "Set limits on model calls: it was agreed"
    assert event in fetch(operator, row_url(metered_lease))


def test_a_limit_that_was_not_edited_keeps_a_concurrent_change(operator: Client, metered_lease: Lease) -> None:
    ensure_sandbox(metered_lease)
    set_limits(operator, metered_lease, "5", "1000")  # by another operator, after this one has opened the dialog
    set_limits(operator, metered_lease, "3", "2000", shown=CallLimits(Decimal(3), 1000))
    assert limits(metered_lease) == CallLimits(Decimal(5), 2000)


def test_a_token_limit_is_a_bar_that_turns_red_when_it_is_reached(viewer: Client, metered_lease: Lease) -> None:
    assert "Tokens counted" not in get_fields(viewer, row_url(metered_lease))
    used = int(budgets.sum_lease_calls(metered_lease.pk, "tokens"))
    assert used > 0
    for limit, over in ((4 * used, False), (used, True)):
        Lease.objects.filter(pk=metered_lease.pk).update(llm_token_limit=limit)
        field = get_fields(viewer, row_url(metered_lease))["Tokens counted"]
        assert (field.value, field.alarm, f"of {limit:,} tokens" in field.note) == (f"{used:,}", over, True)


def test_a_limit_applies_from_the_next_call(operator: Client, metered_lease: Lease, settings: Any) -> None:
    settings.LLM_MODELS, settings.LLM_URL = ["m"], "http://127.0.0.1:9"  # never called
    create_rates("m", input=10, output=10)
    Sandbox.objects.filter(pk=ensure_sandbox(metered_lease).pk).update(slot=7)

    def ask(number: int) -> None:
        authorization.open_model_call(
            7, f"call-{number}", "/v1/messages", "m", streamed=False, size=1, estimate=TokenEstimate(1, 1), now=timezone.now()
        )

    set_limits(operator, metered_lease, "1.75")
    with pytest.raises(CallRefused) as refused:
        ask(1)
    assert (refused.value.status, refused.value.code) == (402, "spend_limit_reached")
    set_limits(operator, metered_lease, "1.76")
    ask(2)
    assert LlmCall.objects.get(call_id="call-2").outcome == "open"


@pytest.mark.parametrize(
    ("limit", "token_limit"),
    [
        *((limit, "") for limit in ("-1", "0.0000000001", "NaN", "Infinity", "much", "1e20")),
        *(("", limit) for limit in ("-1", "1.5", "many", "1e3", "9223372036854775808")),
    ],
)
def test_an_invalid_limit_is_explained(operator: Client, lease: Lease, limit: str, token_limit: str) -> None:
    again = set_limits(operator, lease, limit, token_limit)
    assert again.status_code == 200 and "HX-Redirect" not in again.headers
    assert limits(lease) == CallLimits()


def test_the_same_limit_and_an_ended_lease_change_nothing(operator: Client, lease: Lease) -> None:
    assert list_messages(set_limits(operator, lease)) == ["Nothing changed: the lease already has these limits."]
    leasing.end(lease.pk, reason="released", now=NOW)
    assert "The lease ended (released)." in set_limits(operator, lease, "5").content.decode()
    assert Lease.objects.get(pk=lease.pk).llm_limit is None
    assert not lease.events.filter(kind="call_limits").exists() and not LogEntry.objects.exists()
    assert "Call limits…" not in fetch(operator, row_url(lease))


@pytest.mark.parametrize("warm_target", [0, 1])
def test_a_later_sandbox_gets_the_present_limits_of_its_lease(
    operator: Client, grant: Callable[..., Lease], warm_target: int
) -> None:
    lease = grant()
    lease.pool.warm_target = warm_target
    lease.pool.save(update_fields=["warm_target"])
    if warm_target:
        allocation.start_warm(lease.pool, now=NOW)
    want = execution.build_sandbox_request(lease, now=NOW)  # a request that began before the limits were set
    set_limits(operator, lease, "5", "6")
    assert CallLimits.of(allocation.ensure_running(want, now=NOW)) == limits(lease) == CallLimits(Decimal(5), 6)


# --- model rates --------------------------------------------------------------------------------------------------


def test_a_rate_is_added_shown_and_listed(superuser: Client) -> None:
    assert superuser.post(f"{RATES}add/", RATE_FORM).status_code == 302
    assert [*TokenRate.objects.values_list("pattern", "kind", "usd_per_million", "source")] == [
        ("gpt-*", "input", Decimal("2.5"), "price page"),
        ("gpt-*", "output", 10, "price page"),
        ("gpt-*", "web_search", 25_000, "price page"),
    ]
    shown = fetch(superuser, RATES)
    assert "gpt-*" in shown and "2.5 USD per million tokens" in shown and "25 USD per 1,000 searches" in shown


def test_a_rates_page_shows_the_models_and_the_unpriced_calls_that_it_matches(superuser: Client) -> None:
    rate, _ = create_rates("gpt-*", input=1, output=2)
    create_rates("gpt-5", input=1)
    tokens = {"input_tokens": 1, "output_tokens": 1}
    call(**tokens), call(**tokens), call(model="claude", **tokens), call(model="gpt-5-2025-08-07", **tokens)
    call(model="gpt-5-mini", cost=1, priced="record", **tokens), call(model="gpt-x", started_at=NOW - 31 * DAY)
    fields = get_fields(superuser, row_url(rate))
    assert fields["Unpriced calls"].value == "2"
    assert (fields["Models, last 30 days"].value, fields["Models, last 30 days"].note) == ("2", "gpt-4o-mini: 2, gpt-5-mini: 1")
    assert "output" in str(fields["Other rates of this model"].note)


def test_a_rate_that_has_begun_is_not_edited_or_deleted(superuser: Client) -> None:
    [rate] = create_rates("m", input=3)
    assert superuser.post(row_url(rate), {"usd_per_million": "300"}).status_code == 403
    assert list_messages(superuser.post(row_url(rate, "withdraw"), WHY))[-1].startswith("Nothing changed")
    assert TokenRate.objects.get().usd_per_million == 3


def test_a_superseded_rate_is_marked(superuser: Client) -> None:
    assert superuser.post(f"{RATES}add/", RATE_FORM).status_code == 302
    assert (
        superuser.post(f"{RATES}add/", RATE_FORM | {"input_usd": "25", "output_usd": "", "web_search_usd": ""}).status_code
        == 302
    )
    wrong, right = TokenRate.objects.filter(kind="input").order_by("pk")
    assert [row.pk for row in list_rows(superuser, f"{RATES}?slice=superseded")] == [wrong.pk]
    assert fetch(superuser, RATES).count("superseded</span>") == 1
    assert "superseded" in str(get_fields(superuser, row_url(wrong))["State"].value)
    assert "in force" in str(get_fields(superuser, row_url(right))["State"].value)


def test_a_scheduled_rate_is_deleted(superuser: Client) -> None:
    [rate] = create_rates("m", input=3, since=timezone.now() + DAY)
    assert list_messages(superuser.post(row_url(rate, "withdraw"), WHY))[-1] == "1 model rate deleted."
    assert not TokenRate.objects.exists()


@pytest.mark.parametrize(
    "wrong",
    [
        {"input_usd": "-1"}, {"cache_read_usd": "-0.1"}, {"pattern": ""}, {"output_usd": "1e9"}, {"tokens_from": "-1"},
        {"input_usd": "", "output_usd": "", "web_search_usd": ""}, {"pattern": "taken", "valid_from_0": f"{NOW:%Y-%m-%d}"},
    ],
)  # fmt: skip
def test_an_invalid_model_rate_is_refused(superuser: Client, wrong: dict[str, str]) -> None:
    create_rates("taken", input="2.5", since=NOW.replace(hour=0, minute=0, second=0, microsecond=0))
    assert superuser.post(f"{RATES}add/", RATE_FORM | wrong).status_code == 200
    assert TokenRate.objects.count() == 1


def test_a_scheduled_model_rate_shows_its_start(superuser: Client) -> None:
    create_rates("m", input=1, since=timezone.now() + 5 * HOUR)
    shown = fetch(superuser, RATES)
    assert ">in 4 h 59 m</time>" in shown and "ago</time>" not in shown


def test_calls_missing_in_upstream_records_are_listed(superuser: Client, settings: Any) -> None:
    old = call(ended_at=NOW - HOUR)
    assert listed(superuser, "?slice=unmetered") == []
    settings.LLM_RECORDS = "/var/log/records.jsonl"
    assert listed(superuser, "?slice=unmetered") == [old.pk]
