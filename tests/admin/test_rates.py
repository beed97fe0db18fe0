"""Model rates in the console, and the unpriced calls they apply to."""

from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from sandboxes.models import LlmCall, ModelRate
from tests.admin.conftest import NOW

pytestmark = pytest.mark.django_db
HOUR = timedelta(hours=1)
RATE = {
    "pattern": "gpt-*", "input_usd": "2.5", "cached_usd": "", "output_usd": "10", "valid_from_0": "2021-01-01",
    "valid_from_1": "00:00:00",
}  # fmt: skip


def call(**fields: Any) -> LlmCall:
    ended = {"started_at": NOW, "deadline_at": NOW, "ended_at": NOW, "outcome": "ok", "input_tokens": 1, "output_tokens": 1}
    return LlmCall.objects.create(call_id=f"{LlmCall.objects.count():032x}", **{**ended, "model": "gpt-4o", **fields})


def test_a_rate_is_added_shown_and_listed(superuser: Client) -> None:
    assert superuser.post("/admin/sandboxes/modelrate/add/", RATE).status_code == 302
    rate = ModelRate.objects.get()
    assert (rate.pattern, rate.input_usd, rate.cached_usd, rate.output_usd) == ("gpt-*", Decimal("2.5"), None, 10)
    listed = superuser.get("/admin/sandboxes/modelrate/").content.decode()
    assert "gpt-*" in listed and "2.5" in listed and "as input" in listed
    call()
    call(model="claude")
    call(cost=1, priced="record")
    facts = superuser.get(f"/admin/sandboxes/modelrate/{rate.pk}/change/").context["facts"]
    assert {fact.label: fact.value for fact in facts}["Unpriced calls"] == "1"


@pytest.mark.parametrize("wrong", [{"input_usd": "-1"}, {"output_usd": ""}, {"cached_usd": "-0.1"}, {"pattern": ""}])
def test_an_invalid_model_rate_is_refused(superuser: Client, wrong: dict[str, str]) -> None:
    assert superuser.post("/admin/sandboxes/modelrate/add/", {**RATE, **wrong}).status_code == 200
    assert not ModelRate.objects.exists()


def test_a_scheduled_model_rate_shows_its_start(superuser: Client) -> None:
    ModelRate.objects.create(pattern="m", input_usd=1, output_usd=1, valid_from=timezone.now() + 5 * HOUR)
    listed = superuser.get("/admin/sandboxes/modelrate/").content.decode()
    assert ">in 4 h 59 m</time>" in listed and "ago</time>" not in listed


def test_a_model_rate_cannot_be_deleted(superuser: Client) -> None:
    rate = ModelRate.objects.create(pattern="m", input_usd=1, output_usd=1, valid_from=NOW)
    assert superuser.post(f"/admin/sandboxes/modelrate/{rate.pk}/delete/", {"post": "yes"}).status_code == 403


def test_calls_missing_in_upstream_records_are_listed(superuser: Client, settings: Any) -> None:
    page = "/admin/sandboxes/llmcall/?slice=unmetered"
    call(ended_at=NOW - HOUR)
    assert superuser.get(page).context["cl"].result_count == 0
    settings.LLM_RECORDS = "/var/log/records.jsonl"
    assert superuser.get(page).context["cl"].result_count == 1
