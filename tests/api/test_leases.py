"""Leases through the API."""

from datetime import datetime, timedelta

import pytest
from django.utils import timezone

from leases import api_keys
from leases.errors import RateLimited
from leases.models import AgentKey, Lease, LeaseEvent
from sandboxes.models import Pool, Sandbox
from tests.api.conftest import ADA, BOB, ApiClient, expire_lease

pytestmark = pytest.mark.django_db


def test_a_new_lease_is_returned_whole(ada: ApiClient, acquire_body) -> None:
    response = ada.post("leases", acquire_body(ttl_seconds=600, sleep_after="30s", expiry_conditions=["game.finished"]))
    shown = response.json()
    assert (response.status_code, shown["is_new"], shown["status"]) == (201, True, "active")
    assert (shown["agent_did"], shown["environment_id"], shown["sandbox_id"]) == (ADA, "game-1", f"{ADA}::game-1")
    assert (shown["sleep_after"], shown["expiry_conditions"]) == (30, ["game.finished"])
    assert (shown["sandbox"], shown["ended_at"], shown["end_reason"]) == (None, None, "")
    assert all(shown[name].endswith("Z") for name in ("leased_at", "last_activity", "expires_at", "max_expires_at"))
    duration = datetime.fromisoformat(shown["expires_at"]) - datetime.fromisoformat(shown["leased_at"])
    assert duration == timedelta(seconds=600)


def test_acquiring_again_returns_the_same_lease(ada: ApiClient, acquire_body, lease) -> None:
    response = ada.post("leases", acquire_body(ttl_seconds=60))
    assert (response.status_code, response.json()) == (200, lease | {"is_new": False})
    assert not Sandbox.objects.exists()


def test_defaults_come_from_the_environment_type(lease) -> None:
    assert (lease["ttl_seconds"], lease["sleep_after"]) == (4 * 3600, 300)
    assert lease["expiry_conditions"] == ["game.finished"]


@pytest.mark.parametrize(("sleep_after", "seconds"), [("5m", 300), ("30s", 30), ("90", 90), (45, 45), (None, 300)])
def test_sleep_after_is_returned_in_seconds(ada: ApiClient, acquire_body, sleep_after, seconds: int) -> None:
    assert ada.post("leases", acquire_body(sleep_after=sleep_after)).json()["sleep_after"] == seconds


def test_null_is_the_same_as_leaving_it_out(ada: ApiClient, acquire_body) -> None:
    nothing = dict.fromkeys(("ttl_seconds", "max_ttl_seconds", "sleep_after", "expiry_conditions"))
    assert ada.post("leases", acquire_body(**nothing)).status_code == 201


def test_unknown_fields_are_ignored(ada: ApiClient, acquire_body) -> None:
    assert ada.post("leases", acquire_body(colour="red")).status_code == 201


def test_a_lease_of_another_type_is_a_conflict(ada: ApiClient, acquire_body, lease) -> None:
    response = ada.post("leases", acquire_body(environment_type="rpg"))
    assert (response.status_code, response.json()["field"]) == (409, "environment_type")


def test_renew_extends_the_lease(ada: ApiClient, lease) -> None:
    response = ada.post(f"leases/{lease['id']}/renew")
    assert response.status_code == 200
    assert response.json()["expires_at"] > lease["expires_at"]
    assert ada.get(f"leases/{lease['id']}").json()["expires_at"] == response.json()["expires_at"]


def test_releasing_twice_returns_the_same(ada: ApiClient, lease) -> None:
    first, again = (ada.post(f"leases/{lease['id']}/release") for _ in range(2))
    assert first.status_code == again.status_code == 200
    assert first.json() == again.json()
    assert (first.json()["status"], first.json()["end_reason"]) == ("expired", "released")


def test_acquire_after_release_grants_a_lease_with_a_new_id(ada: ApiClient, acquire_body, lease) -> None:
    ada.post(f"leases/{lease['id']}/release")
    again = ada.post("leases", acquire_body())
    assert again.status_code == 201
    assert again.json()["id"] != lease["id"]


def test_an_elapsed_lease_is_expired_before_any_sweep(ada: ApiClient, lease) -> None:
    expire_lease(lease["id"])
    shown = ada.get(f"leases/{lease['id']}").json()
    assert (shown["status"], shown["end_reason"], shown["ended_at"]) == ("expired", "ttl", shown["expires_at"])
    assert Lease.objects.get().status == "active"


def test_releasing_an_elapsed_lease_keeps_its_end_reason(ada: ApiClient, lease) -> None:
    expire_lease(lease["id"])
    assert ada.post(f"leases/{lease['id']}/release").json()["end_reason"] == "ttl"


@pytest.mark.parametrize("act", ["renew", "exec", "turns"])
def test_an_ended_lease_is_gone_with_its_end_reason(ada: ApiClient, lease, act: str) -> None:
    expire_lease(lease["id"])
    response = ada.post(f"leases/{lease['id']}/{act}", {"argv": ["true"], "turn_number": 1, "state": {}})
    assert (response.status_code, response.json()["code"], response.json()["end_reason"]) == (410, "lease_ended", "ttl")
    assert response.json()["ended_at"].endswith("Z")
    assert not Sandbox.objects.exists()


def test_the_timeline_names_the_key_that_acted(ada: ApiClient, lease) -> None:
    ada.post(f"leases/{lease['id']}/release")
    assert {event.actor for event in LeaseEvent.objects.all()} == {f"key {ada.key[3:11]}"}


# --- lists --------------------------------------------------------------------------------------------------------


def test_pages_are_followed_by_next_until_null(ada: ApiClient, acquire_body) -> None:
    granted = [ada.post("leases", acquire_body(environment_id=f"e{n}")).json()["id"] for n in range(5)]
    listed, url = [], "/api/v1/leases?limit=2&status=active"
    while url:
        page = ada.get(url).json()
        listed += [row["id"] for row in page["results"]]
        url = page["next"]
    assert listed == granted[::-1]


def test_leases_of_the_same_time_are_all_listed_once(ada: ApiClient, acquire_body) -> None:
    for n in range(5):
        ada.post("leases", acquire_body(environment_id=f"e{n}"))
    Lease.objects.update(leased_at=timezone.now())
    first = ada.get("leases?limit=3").json()
    second = ada.get(first["next"]).json()
    assert len({row["id"] for row in first["results"] + second["results"]}) == 5
    assert second["next"] is None


def test_filters_narrow_the_list(operator: ApiClient, acquire_body) -> None:
    for did, environment in ((ADA, "e1"), (ADA, "e2"), (BOB, "e1")):
        operator.post("leases", acquire_body(agent_did=did, environment_id=environment))
    assert len(operator.get(f"leases?agent_did={ADA}").json()["results"]) == 2
    assert len(operator.get("leases?environment_id=e1").json()["results"]) == 2
    assert len(operator.get(f"leases?agent_did={BOB}&environment_id=e2").json()["results"]) == 0


def test_the_status_filter_treats_elapsed_leases_as_expired(ada: ApiClient, lease) -> None:
    expire_lease(lease["id"])
    assert ada.get("leases?status=active").json()["results"] == []
    assert [row["status"] for row in ada.get("leases?status=expired").json()["results"]] == ["expired"]


def test_a_list_shows_sandboxes_in_a_constant_number_of_queries(
    ada: ApiClient, acquire_body, django_assert_max_num_queries
) -> None:
    for n in range(4):
        ada.post(f"environments/e{n}/join", acquire_body())
    with django_assert_max_num_queries(4):
        shown = ada.get("leases").json()["results"]
    assert [row["sandbox"]["state"] for row in shown] == ["warm"] * 4


# --- limits -------------------------------------------------------------------------------------------------------


def test_only_new_leases_count_against_the_rate_limit(ada: ApiClient, acquire_body, settings) -> None:
    settings.CREATES_PER_MINUTE = 2
    assert [ada.post("leases", acquire_body(environment_id=f"e{n % 2}")).status_code for n in range(4)] == [201, 201, 200, 200]
    refused = ada.post("leases", acquire_body(environment_id="e3"))
    assert (refused.status_code, refused.json()["code"], refused["Retry-After"]) == (429, "rate_limited", "30")
    assert Lease.objects.count() == 2


def test_a_refused_request_does_not_count_against_the_rate_limit(ada: ApiClient, acquire_body, settings) -> None:
    settings.CREATES_PER_MINUTE = 1
    assert ada.post("leases", acquire_body(environment_type="chess")).status_code == 400
    assert ada.post("leases", acquire_body()).status_code == 201


def test_concurrent_requests_refill_the_bucket_once(ada: ApiClient, now: datetime) -> None:
    """Both requests read the key before either refills its bucket with the two tokens of two seconds."""
    AgentKey.objects.update(tokens=0, tokens_at=now)
    for key in [AgentKey.objects.get(), AgentKey.objects.get()]:
        api_keys.consume_rate_limit_token(key, per_minute=60, now=now + timedelta(seconds=2))
    with pytest.raises(RateLimited):
        api_keys.consume_rate_limit_token(AgentKey.objects.get(), per_minute=60, now=now + timedelta(seconds=2))


def test_a_full_pool_sends_retry_after(ada: ApiClient, acquire_body, pool: Pool) -> None:
    Pool.objects.filter(pk=pool.pk).update(used=100)
    refused = ada.post("environments/game-1/join", acquire_body())
    assert (refused.status_code, refused.json()["code"]) == (503, "capacity_exhausted")
    assert int(refused["Retry-After"]) > 0


def test_the_ttl_of_the_type_is_the_maximum(ada: ApiClient, acquire_body) -> None:
    day = int(timedelta(days=1).total_seconds())
    assert ada.post("leases", acquire_body(max_ttl_seconds=day + 1)).json()["field"] == "max_ttl_seconds"
    assert ada.post("leases", acquire_body(ttl_seconds=day + 1)).json()["field"] == "ttl_seconds"


@pytest.mark.parametrize("verb", ["renew", "release"])
def test_an_ignored_body_is_read_all_the_same(ada: ApiClient, lease, verb: str) -> None:
    """An unread body stays on the connection, which the server then closes under the client's next request."""
    assert ada.post(f"leases/{lease['id']}/{verb}", b" " * (2 << 20)).status_code == 413
    assert ada.post(f"leases/{lease['id']}/{verb}", {}).status_code == 200
