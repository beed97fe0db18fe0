"""Leases and environments through the API."""

import base64
import json
import re
import uuid
from collections import Counter
from datetime import datetime, timedelta
from uuid import UUID

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from django_q.models import OrmQ

from leases import api_keys
from leases.errors import RateLimited
from leases.models import AgentKey, Lease, LeaseEvent
from sandboxes.models import Pool, Sandbox, Transition
from sandboxes.providers.errors import Unavailable
from sandboxes.providers.memory import File, MemoryProvider
from sandboxes.sweeps import passes
from tests.api.conftest import ADA, ANY_BODY, BOB, ApiClient, assert_refused, expire_lease, list_operations, select_fields
from tests.support.leases import update_pool

pytestmark = pytest.mark.django_db


def test_a_new_lease_is_returned_whole(ada: ApiClient, acquire_body) -> None:
    own = {"sleep_after": "30s", "auto_stop_seconds": 90, "auto_delete_seconds": 0, "expiry_conditions": ["game.finished"]}
    response = ada.post("leases", acquire_body(ttl_seconds=600, **own))
    shown = response.json()
    assert (response.status_code, shown["is_new"], shown["status"]) == (201, True, "active")
    assert (shown["agent_did"], shown["environment_id"], shown["sandbox_id"]) == (ADA, "game-1", f"{ADA}::game-1")
    assert (shown["sleep_after"], shown["expiry_conditions"]) == (30, ["game.finished"])
    assert (shown["auto_stop_seconds"], shown["auto_delete_seconds"]) == (90, 0)
    [listed] = ada.get("leases").json()["results"]
    assert listed == shown | {"is_new": False}
    assert (shown["sandbox"], shown["ended_at"], shown["end_reason"]) == (None, None, "")
    assert all(shown[name].endswith("Z") for name in ("leased_at", "last_activity", "expires_at", "max_expires_at"))
    duration = datetime.fromisoformat(shown["expires_at"]) - datetime.fromisoformat(shown["leased_at"])
    assert duration == timedelta(seconds=600)


def test_acquiring_again_returns_the_same_lease_and_as_another_type_is_a_conflict(ada: ApiClient, acquire_body, lease) -> None:
    response = ada.post("leases", acquire_body(ttl_seconds=60))
    assert (response.status_code, response.json()) == (200, lease | {"is_new": False})
    assert_refused(ada, "POST", "leases", acquire_body(environment_type="rpg"), 409, "environment_type")


def test_missing_and_null_fields_have_the_defaults_of_the_environment_type(ada: ApiClient, acquire_body, lease) -> None:
    nulls = dict.fromkeys(("ttl_seconds", "max_ttl_seconds", "sleep_after", "expiry_conditions"))
    for shown in (lease, ada.post("leases", acquire_body(environment_id="game-2", **nulls)).json()):
        assert (shown["ttl_seconds"], shown["sleep_after"]) == (4 * 3600, 300)
        assert shown["expiry_conditions"] == ["game.finished"]
    for n, (sleep_after, seconds) in enumerate({"5m": 300, "30s": 30, "90": 90, 45: 45}.items()):
        body = acquire_body(environment_id=f"e{n}", sleep_after=sleep_after)
        assert ada.post("leases", body).json()["sleep_after"] == seconds


def test_renew_extends_the_lease(ada: ApiClient, lease) -> None:
    response = ada.post(f"leases/{lease['id']}/renew")
    assert response.status_code == 200
    assert ada.get(f"leases/{lease['id']}").json()["expires_at"] == response.json()["expires_at"] > lease["expires_at"]


def test_renewals_of_a_host_are_one_request(ada: ApiClient, operator: ApiClient, acquire_body) -> None:
    mine, ended = (ada.post("leases", acquire_body(environment_id=name)).json()["id"] for name in ("e1", "e2"))
    bobs = operator.post("leases", acquire_body(agent_did=BOB)).json()["id"]
    ada.post(f"leases/{ended}/release")
    results = ada.post("leases/renew", {"ids": [ended, mine, bobs]}).json()["results"]
    assert [(row["id"], row["code"], row["end_reason"]) for row in results] == [
        (ended, "lease_ended", "released"), (mine, "renewed", ""), (bobs, "not_found", ""),
    ]  # fmt: skip
    assert ada.get(f"leases/{mine}").json()["expires_at"] == results[1]["expires_at"]
    assert [row["code"] for row in operator.post("leases/renew", {"ids": [mine, bobs]}).json()["results"]] == ["renewed"] * 2


@pytest.mark.parametrize("ids", [[], ["x"], [7], "x", [str(UUID(int=1))] * 2, [str(UUID(int=n)) for n in range(1001)]])
def test_a_list_of_renewals_has_1_to_1000_different_ids(ada: ApiClient, ids) -> None:
    refused = ada.post("leases/renew", {"ids": ids})
    assert (refused.status_code, refused.json()["errors"][0]["field"][:3]) == (400, "ids")


def test_a_key_without_its_scheme_renews_nothing(ada: ApiClient, lease) -> None:
    ada.post(f"leases/{lease['id']}/renew")  # notes the use of the key, so that the next request could be one statement
    refused = ada.post(f"leases/{lease['id']}/renew", Authorization=ada.key)
    assert (refused.status_code, refused.json()["code"]) == (401, "unauthenticated")


def test_a_renewal_is_one_statement(ada: ApiClient, lease, django_assert_num_queries) -> None:
    with django_assert_num_queries(1):
        assert ada.post(f"leases/{lease['id']}/renew").status_code == 200


@pytest.mark.django_db(transaction=True)
def test_a_new_lease_takes_few_statements_and_one_commit(ada: ApiClient, acquire_body) -> None:
    """The key, the rows that decide, the inserts and the key's token. SQLite inserts the lease's rows one after the other."""
    ada.post("leases", acquire_body(environment_id="earlier"))
    with CaptureQueriesContext(connection) as statements:
        assert ada.post("leases", acquire_body()).status_code == 201
    verbs = Counter(statement["sql"].partition(" ")[0] for statement in statements)
    on_postgres = connection.vendor == "postgresql"
    assert (len(statements), verbs["SELECT"], verbs["COMMIT"]) == (8 if on_postgres else 10, 2, 1)


def test_releasing_twice_returns_the_same_and_the_timeline_names_the_key(ada: ApiClient, lease) -> None:
    first, again = (ada.post(f"leases/{lease['id']}/release") for _ in range(2))
    assert first.status_code == again.status_code == 200
    assert first.json() == again.json()
    assert (first.json()["status"], first.json()["end_reason"]) == ("expired", "released")
    assert {event.actor for event in LeaseEvent.objects.all()} == {f"key {ada.key[3:11]}"}


def test_an_elapsed_lease_is_shown_as_expired_before_any_sweep(ada: ApiClient, lease) -> None:
    expire_lease(lease["id"])
    shown = ada.get(f"leases/{lease['id']}").json()
    assert (shown["status"], shown["end_reason"], shown["ended_at"]) == ("expired", "ttl", shown["expires_at"])
    assert ada.get("leases?status=active").json()["results"] == []
    assert [row["status"] for row in ada.get("leases?status=expired").json()["results"]] == ["expired"]
    assert Lease.objects.get().status == "active"
    assert ada.post(f"leases/{lease['id']}/release").json()["end_reason"] == "ttl"


# exec/stream needs real transactions: tests/api/sandbox/test_streams.py. The limits on calls need an operator's key:
# tests/api/billing/test_llm_calls.py.
OTHER_PATHS = ("/processes/", "/fork", "/exec/stream", "/calls/limits")


@pytest.mark.parametrize(
    ("method", "path"),
    [row for row in list_operations("leases/{id}", status=410) if not any(other in row[1] for other in OTHER_PATHS)],
)
def test_an_ended_lease_is_gone_with_its_end_reason(ada: ApiClient, lease, method: str, path: str) -> None:
    expire_lease(lease["id"])
    url = path.format(**lease)
    body = bytes(1024) if path.endswith("archive") else select_fields(method, url, ANY_BODY)  # an empty tar
    problem = assert_refused(ada, method, url, body, 410)
    assert (problem["code"], problem["end_reason"]) == ("lease_ended", "ttl")
    assert problem["ended_at"].endswith("Z")


def test_an_ended_lease_reports_the_reason_of_its_sandboxs_end(ada: ApiClient, join_body) -> None:
    lease = ada.post("environments/game-1/join", join_body()).json()
    assert ada.get(f"leases/{lease['id']}").json()["sandbox_ended"] is None
    ada.post(f"leases/{lease['id']}/release")
    ended = ada.get(f"leases/{lease['id']}").json()["sandbox_ended"]
    assert ended.pop("at").endswith("Z")
    assert ended == {"state": "destroying", "reason": "lease_ended", "detail": "lease ended: released"}
    problem = ada.post(f"leases/{lease['id']}/renew").json()
    assert (problem["sandbox_reason"], problem["sandbox_detail"]) == ("lease_ended", "lease ended: released")


# --- lists --------------------------------------------------------------------------------------------------------


def test_pages_are_followed_by_next_until_null(ada: ApiClient, acquire_body) -> None:
    granted = [ada.post("leases", acquire_body(environment_id=f"e{n}")).json()["id"] for n in range(5)]

    def list_all() -> list[str]:
        listed, url = [], "/api/v1/leases?limit=2&status=active"
        while url:
            page = ada.get(url).json()
            assert len(page["results"]) <= 2
            listed += [row["id"] for row in page["results"]]
            url = page["next"]
        return listed

    assert list_all() == granted[::-1]
    Lease.objects.update(leased_at=timezone.now())
    assert sorted(list_all()) == sorted(granted)


def test_filters_narrow_the_list(operator: ApiClient, acquire_body) -> None:
    for did, environment in ((ADA, "e1"), (ADA, "e2"), (BOB, "e1")):
        operator.post("leases", acquire_body(agent_did=did, environment_id=environment))
    assert len(operator.get(f"leases?agent_did={ADA}").json()["results"]) == 2
    assert len(operator.get("leases?environment_id=e1").json()["results"]) == 2
    assert len(operator.get(f"leases?agent_did={BOB}&environment_id=e2").json()["results"]) == 0


def test_a_list_has_the_documents_of_single_leases_in_one_query(
    ada: ApiClient, join_body, acquire_body, django_assert_num_queries
) -> None:
    waiting, elapsed, at_max, released = (ada.post(f"environments/e{n}/join", join_body()).json()["id"] for n in range(4))
    ada.post("leases", acquire_body(environment_id="without-sandbox"))
    ada.post(f"leases/{released}/release")
    past, whole_second = timezone.now() - timedelta(minutes=1), timezone.now().replace(microsecond=0)
    Lease.objects.filter(pk=elapsed).update(expires_at=past)
    Lease.objects.filter(pk=at_max).update(expires_at=past, max_expires_at=past)
    Lease.objects.filter(pk=waiting).update(last_activity_at=whole_second, ttl=timedelta(seconds=90, microseconds=700_000))
    with django_assert_num_queries(2):  # the key and the page
        shown = ada.get("leases").json()["results"]
    for document in shown:
        single = ada.get(f"leases/{document['id']}").json()
        assert document == {name: single[name] for name in document}
    assert [row["sandbox"] and row["sandbox"]["state"] for row in shown] == [None, None, "warm", "warm", "warm"]
    assert [row["end_reason"] for row in shown] == ["", "released", "max_ttl", "ttl", ""]


def test_a_page_is_entered_in_the_index_at_its_cursor(operator: ApiClient) -> None:
    cursor = base64.b64encode(f"{timezone.now().isoformat()} {uuid.uuid4()}".encode()).decode()
    with CaptureQueriesContext(connection) as captured:
        operator.get(f"leases?cursor={cursor}")
    [page] = [query["sql"] for query in captured if "leases_lease" in query["sql"]]
    on_postgres = connection.vendor == "postgresql"
    with connection.cursor() as explain:
        if on_postgres:
            for plan_type in ("seqscan", "bitmapscan", "sort"):  # cheaper for the few pages that statistics may know of
                explain.execute(f"SET LOCAL enable_{plan_type} = off")
        explain.execute(f"{'EXPLAIN' if on_postgres else 'EXPLAIN QUERY PLAN'} {page}")
        plan = str(explain.fetchall())
    assert re.search(r"lease_newest.*Index Cond: \(leased_at <=" if on_postgres else r"lease_newest \(leased_at<", plan), plan


# --- limits -------------------------------------------------------------------------------------------------------


def test_only_new_leases_count_against_the_rate_limit(ada: ApiClient, acquire_body, settings) -> None:
    settings.CREATES_PER_MINUTE = 2
    assert [ada.post("leases", acquire_body(environment_id=f"e{n % 2}")).status_code for n in range(4)] == [201, 201, 200, 200]
    refused = ada.post("leases", acquire_body(environment_id="e3"))
    assert (refused.status_code, refused.json()["code"], refused["Retry-After"]) == (429, "rate_limited", "30")
    assert Lease.objects.count() == 2


def test_concurrent_requests_refill_the_bucket_once(ada: ApiClient, now: datetime) -> None:
    """Both requests read the key before either refills its bucket with the two tokens of two seconds."""
    AgentKey.objects.update(tokens=0, tokens_at=now)
    for key in [AgentKey.objects.get(), AgentKey.objects.get()]:
        api_keys.consume_rate_limit_token(key, per_minute=60, now=now + timedelta(seconds=2))
    with pytest.raises(RateLimited):
        api_keys.consume_rate_limit_token(AgentKey.objects.get(), per_minute=60, now=now + timedelta(seconds=2))


# --- environments -----------------------------------------------------------------------------------------------------


def test_join_starts_the_sandbox_once(ada: ApiClient, join_body, memory: MemoryProvider) -> None:
    first, again = (ada.post("environments/game-7/join", join_body()) for _ in range(2))
    shown = first.json()
    assert (first.status_code, shown["is_new"], shown["environment_id"]) == (201, True, "game-7")
    assert (shown["sandbox"]["state"], shown["sandbox"]["provider"]) == ("warm", "memory")
    config = memory.files(Sandbox.objects.get().ref)["/workspace/config.json"]
    assert isinstance(config, File)
    assert json.loads(config.content)["leaseId"] == shown["id"]
    times = {name: again.json()[name] for name in ("expires_at", "last_activity")}
    assert (again.status_code, again.json()) == (200, shown | {"is_new": False} | times)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(("prewarmed", "limits"), [(False, (18, 25)), (True, (13, 16))])
def test_a_join_takes_few_statements(ada: ApiClient, join_body, pool: Pool, prewarmed: bool, limits) -> None:
    """On PostgreSQL one commit with the grant and the place. A pre-warmed sandbox gets its files with its first run."""
    ada.post("environments/earlier/join", join_body())  # inserts the agent's quota
    if prewarmed:
        update_pool(pool, warm_target=1)
        passes.warm_pools(now=timezone.now())
    with CaptureQueriesContext(connection) as statements:
        assert ada.post("environments/game-1/join", join_body()).status_code == 201
    assert Sandbox.objects.filter(environment_id="game-1", source="fresh", prepared=not prewarmed).exists()
    assert Transition.objects.filter(sandbox__environment_id="game-1", code="claimed").exists() is prewarmed
    verbs = Counter(statement["sql"].partition(" ")[0] for statement in statements)
    if connection.vendor == "postgresql":
        assert (len(statements), verbs["COMMIT"]) == (limits[0], 1)
    else:
        assert len(statements) == limits[1]


def test_a_join_whose_start_failed_is_repeated_with_a_new_lease(ada: ApiClient, join_body, memory: MemoryProvider) -> None:
    memory.fail("create", Unavailable("no engine"), times=1)
    refused = ada.post("environments/game-1/join", join_body(), idempotency_key="k1")
    assert (refused.status_code, refused.json()["code"]) == (503, "sandbox_not_ready")
    assert not ada.get("leases?status=active").json()["results"]
    assert ada.post("environments/game-1/join", join_body(), idempotency_key="k1").status_code == 201


def test_a_condition_ends_the_leases_of_the_keys_own_agents(ada: ApiClient, operator: ApiClient, acquire_body) -> None:
    own, other = (operator.post("leases", acquire_body(agent_did=did)).json()["id"] for did in (ADA, BOB))
    finished = {"condition": "game.finished"}
    response = ada.post("environments/game-1/conditions", finished)
    assert (response.status_code, response.json()) == (200, {"ended": [own]})
    assert ada.get(f"leases/{own}").json()["end_reason"] == "condition:game.finished"
    assert operator.post("environments/game-1/conditions", finished).json() == {"ended": [other]}


@pytest.mark.parametrize(("named", "ended"), [(BOB, [BOB]), ([ADA, BOB], [ADA, BOB]), ("did:plc:nobody", [])], ids=str)
def test_a_condition_that_names_agents_ends_only_their_leases(operator: ApiClient, acquire_body, named, ended) -> None:
    leases = {did: operator.post("leases", acquire_body(agent_did=did)).json()["id"] for did in (ADA, BOB, "did:plc:eve")}
    response = operator.post("environments/game-1/conditions", {"condition": "game.finished", "agent_did": named})
    assert (response.status_code, set(response.json()["ended"])) == (200, {leases[did] for did in ended})
    assert {lease.agent_did for lease in Lease.objects.filter(status="active")} == set(leases) - set(ended)


def test_a_condition_for_an_agent_of_another_key_is_refused(ada: ApiClient, lease) -> None:
    for named in (BOB, [ADA, BOB]):
        refused = ada.post("environments/game-1/conditions", {"condition": "game.finished", "agent_did": named})
        assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
    assert Lease.objects.get().status == "active"


BAD_AGENTS = [
    None, 5, "", "ada", "did:plc:a\0b", {}, [], [None], ["ada"], [[ADA]], [ADA, ADA], [f"did:plc:a{n}" for n in range(101)],
]  # fmt: skip


@pytest.mark.parametrize("named", BAD_AGENTS, ids=lambda named: str(named)[:20])
def test_a_condition_with_malformed_agents_ends_nothing(operator: ApiClient, lease, named) -> None:
    body = {"condition": "game.finished", "agent_did": named}
    assert_refused(operator, "POST", "environments/game-1/conditions", body, 400, "agent_did")
    assert Lease.objects.get().status == "active"


def test_only_the_end_of_a_lease_wakes_the_sweep(ada: ApiClient, lease) -> None:
    ada.post("environments/game-1/conditions", {"condition": "agent.left"})
    assert OrmQ.objects.count() == 0
    ada.post(f"leases/{lease['id']}/release")
    assert [task.func() for task in OrmQ.objects.all()] == ["leases.tasks.reclaim"]
