"""Access of a key: only leases of its own agents."""

from datetime import timedelta
from uuid import uuid4

import pytest
from django.utils import timezone

from leases import api_keys
from leases.models import Agent, AgentKey, Lease
from sandboxes.models import Pool
from tests.api.conftest import ADA, ANY_BODY, BOB, ApiClient, assert_refused, close_response, list_operations, select_fields

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize("header", ["Bearer", "Bearer ", "Bearer lh_x", "Basic {key}", "{key}", "Bearer {key}x", "Bearer é"])
def test_an_invalid_key_is_refused(ada: ApiClient, header: str) -> None:
    response = ApiClient().get("leases", authorization=header.format(key=ada.key))
    assert (response.status_code, response.json()["code"]) == (401, "unauthenticated")
    assert response["WWW-Authenticate"] == 'Bearer realm="leasehold"'


def test_a_revoked_key_is_refused_at_once(ada: ApiClient, lease) -> None:
    api_keys.revoke_key(AgentKey.objects.get(), now=timezone.now())
    assert ada.get(f"leases/{lease['id']}").status_code == 401
    assert ada.post(f"leases/{lease['id']}/renew").status_code == 401


def test_another_agents_lease_does_not_exist(bob: ApiClient, lease) -> None:
    for method, path in list_operations("leases/{id}"):
        problem = assert_refused(bob, method, path.format(**lease), ANY_BODY, 404)
        assert problem["detail"] == "There is no such lease.", (method, path)


def test_every_operation_needs_a_key(lease) -> None:
    for method, path in list_operations():
        problem = assert_refused(ApiClient(), method, path.format(**lease), ANY_BODY, 401)
        assert problem["code"] == "unauthenticated", (method, path)


@pytest.mark.parametrize("path", ["leases", "environments/game-1/join"])
def test_acquiring_for_another_agent_is_forbidden(bob: ApiClient, acquire_body, path: str) -> None:
    response = bob.post(path, select_fields("POST", path, acquire_body()))
    assert (response.status_code, Lease.objects.count()) == (403, 0)


def test_a_list_has_only_leases_visible_to_the_key(bob: ApiClient, operator: ApiClient, issue, lease, acquire_body) -> None:
    assert bob.get("leases").json()["results"] == []
    assert bob.get(f"leases?agent_did={ADA}").json()["results"] == []
    assert [row["id"] for row in operator.get("leases").json()["results"]] == [lease["id"]]
    assert operator.get(f"leases/{lease['id']}").status_code == 200
    both = issue(ADA, BOB)
    assert both.post("leases", acquire_body(agent_did=BOB)).status_code == 201
    assert len(both.get("leases").json()["results"]) == 2


def test_agents_see_themselves_and_operators_see_all(ada: ApiClient, bob: ApiClient, operator: ApiClient) -> None:
    assert [row["did"] for row in ada.get("agents").json()["results"]] == [ADA]
    assert {row["did"] for row in operator.get("agents").json()["results"]} == {ADA, BOB}
    assert ada.get(f"agents/{ADA}").status_code == 200
    assert ada.get(f"agents/{BOB}").status_code == ada.get("agents/x%00y").status_code == 404


def test_only_operators_create_agents(ada: ApiClient, operator: ApiClient) -> None:
    new = {"did": "did:web:example.com%3A3000", "name": "Cy"}
    assert ada.post("agents", new).status_code == 403
    first, again = (operator.post("agents", new) for _ in range(2))
    assert (first.status_code, again.status_code, again.json()) == (201, 200, first.json())
    assert operator.get("agents/did:web:example.com%253A3000").json()["name"] == "Cy"
    assert Agent.objects.filter(did=new["did"]).count() == 1


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("leases", {"environment_type": "coding"}, "environment_type"),
        ("leases", {"environment_type": "catan"}, "pool"),
        ("environments/game-1/join", {"environment_type": "coding", "environment_id": None}, "environment_type"),
        ("runs", {"argv": ["true"], "environment_type": "coding", "environment_id": None}, "environment_type"),
    ],
)
def test_a_type_or_pool_outside_the_keys_allow_lists_is_forbidden(issue, acquire_body, path: str, body, field: str) -> None:
    listed = issue(ADA, environment_types=["catan"], pools=["default"])
    sent = {name: value for name, value in acquire_body(**body).items() if value is not None}
    assert_refused(listed, "POST", path, sent, 403, field)


def test_a_fork_into_a_type_outside_the_keys_allow_lists_is_forbidden(issue, lease) -> None:
    listed = issue(ADA, environment_types=["catan"])
    body = {"environment_id": "fork-1", "environment_type": "coding"}
    assert_refused(listed, "POST", f"leases/{lease['id']}/fork", body, 403, "environment_type")


def test_a_key_lists_only_pools_that_it_may_use(issue, pool) -> None:
    Pool.objects.create(name="gpu", restricted=True)
    for dids, operator in [([ADA], False), ([], True)]:
        ordinary, listed = issue(*dids, operator=operator), issue(*dids, operator=operator, pools=["gpu"])
        assert [row["name"] for row in ordinary.get("pool").json()["pools"]] == sorted(["default", pool.name])
        assert [row["name"] for row in listed.get("pool").json()["pools"]] == ["gpu"]


def test_an_expired_key_is_refused_with_the_time_of_its_expiry(issue) -> None:
    expiring = issue(ADA, expires_at=timezone.now() + timedelta(hours=1))
    assert expiring.get("leases").status_code == 200
    AgentKey.objects.update(expires_at=timezone.now())
    for method, path in [("GET", "leases"), ("POST", f"leases/{uuid4()}/renew"), ("GET", "costs")]:
        problem = assert_refused(expiring, method, path, None, 401)
        assert problem["code"] == "key_expired"
        assert "expired at" in problem["detail"]


COSTS_PATHS = ("costs", "estimate", "forecast", "statements", "budgets", "model-rates")


def test_an_operation_needs_its_scope(issue, lease) -> None:
    clients = {scope: issue(ADA, scopes=[scope]) for scope in ("leases", "read", "costs")}
    for method, path in list_operations():
        scopes = {"costs"} if path.split("/")[0] in COSTS_PATHS else {"leases", *(["read"] if method == "GET" else [])}
        for scope in clients.keys() - scopes:
            problem = assert_refused(clients[scope], method, path.format(**lease), ANY_BODY, 403)
            assert problem["code"] == "insufficient_scope", (method, path, scope)
        for scope in scopes & {"read", "costs"}:
            response = clients[scope](method, path.format(**lease))
            close_response(response)
            assert response.status_code != 403 or response.json()["code"] != "insufficient_scope", (method, path, scope)


def test_a_rotation_keeps_idempotency_keys_and_the_rate_limit(ada: ApiClient, acquire_body, settings) -> None:
    settings.CREATES_PER_MINUTE = 1
    first = ada.post("leases", acquire_body(), idempotency_key="k1")
    rotated = ApiClient(api_keys.rotate_key(AgentKey.objects.get().pk, now=timezone.now()))
    for client in (ada, rotated):
        again = client.post("leases", acquire_body(), idempotency_key="k1")
        assert (again.headers["Idempotent-Replayed"], again.json()) == ("true", first.json())
        assert client.post("leases", acquire_body(environment_id="next")).status_code == 429
