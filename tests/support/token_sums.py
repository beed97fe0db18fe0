"""Sums of reported and of estimated tokens in each place that shows them beside costs."""

import csv
import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from io import StringIO
from typing import Any

from django.core.management import call_command

from billing import overview, statements
from billing.api.costs import render_cost_total, render_costs_csv, render_sums
from billing.api.statements import render_lines_csv, render_statement_line
from billing.focus.export import iter_csv, open_month
from billing.grouping import GROUP_BY_COLUMNS
from billing.totals import sum_costs
from leases.api.llm_calls import render_grouped_calls, serialize_lease_calls
from leases.call_totals import GROUP_COLUMNS
from leases.models import Lease
from sandboxes.egress.totals import calculate_totals
from sandboxes.models import LlmCall
from tests.support.billing import get_house_account

TokenSum = tuple[int, int]  # reported by the upstreams, and estimated


def list_live_sums(lease: Lease) -> dict[str, TokenSum]:
    """Return the sums of the calls of a lease, metered or not: of its API documents and its commands."""
    calls = LlmCall.objects.filter(holder=lease.pk)
    found = {"lease": _add([serialize_lease_calls(lease, calculate_totals(calls))])}
    for by in GROUP_COLUMNS:
        document = render_grouped_calls(lease.pk, by, limit=1000)
        found |= {f"calls by {by}": _add(document["results"]), f"total of calls by {by}": _add([document["total"]])}
    found["command"] = _add([json.loads(_run("lease", "calls", str(lease.pk), "--json"))["total"]])
    return found


def list_metered_sums(now: datetime) -> dict[str, TokenSum]:
    """Return the sums of all metered calls, which are of the month of `now` and of the house account."""
    found, month, account = {}, now.date().replace(day=1), get_house_account()
    for by in GROUP_BY_COLUMNS:
        totals = sum_costs(by)
        documents = [render_cost_total(each)["tokens"] for each in totals]
        found[f"costs by {by}"] = _add(documents, suffix="")
        found[f"total of costs by {by}"] = _add([render_sums(totals)["total_tokens"]], suffix="")
        found[f"CSV by {by}"] = _add(_read(render_costs_csv(by, totals)))
        found[f"command by {by}"] = _add([json.loads(_run("costs", "--by", by, "--json"))["total_tokens"]], suffix="")
    found["overview"] = _add([each.tokens._asdict() for each in overview.build_overview(now=now).models or ()], suffix="")
    lines = statements.preview_month(account, month)
    found["preliminary lines"] = _add([render_statement_line(line, preliminary=True) for line in lines])
    found["CSV of lines"] = _add(_read(render_lines_csv(lines, preliminary=True)))
    source = open_month(account, month, preliminary=True)
    assert source
    names = {"input_tokens": "x_InputTokens", "output_tokens": "x_OutputTokens", "estimated_tokens": "x_EstimatedTokens"}
    rows = _read("".join(iter_csv([source], daily=True)))
    found["FOCUS"] = _add([{name: row[column] for name, column in names.items()} for row in rows])
    return found


def _add(documents: Iterable[Mapping[str, Any]], suffix: str = "_tokens") -> TokenSum:
    rows = [*documents]
    sums = [sum(int(row[f"{kind}{suffix}"] or 0) for row in rows) for kind in ("input", "output", "estimated")]
    return sums[0] + sums[1], sums[2]


def _read(text: str) -> list[dict[str, str]]:
    return [*csv.DictReader(StringIO(text))]


def _run(*words: str) -> str:
    out = StringIO()
    call_command(*words, stdout=out)
    return out.getvalue()
