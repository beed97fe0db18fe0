"""Access of a key: only leases of its own agents."""

import pytest
from django.utils import timezone

from leases import api_keys
from leases.models import Agent, AgentKey, Lease
from tests.api.conftest import ADA, ANY_BODY, BOB, ApiClient, assert_refused, list_operations, select_fields

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize("header", ["Bearer", "Bearer ", "Bearer lh_x", "Basic {key}", "{key}", "Bearer {key}x", "Bearer é"])
def test_an_invalid_key_is_refused(ada: ApiClient, header: str) -> None:
    response = ApiClient().get("leases", authorization=header.format(key=ada.key))
    assert (response.status_code, response.json()["code"]) == (401, "unauthenticated")
    assert response["WWW-Authenticate"] == 'Bearer realm="leasehold"'


def test_a_revoked_key_is_refused_at_once(ada: ApiClient, lease) -> None:
    api_keys.revoke_key(AgentKey.objects.get().pk, now=timezone.now())
    assert ada.get(f"leases/{lease['id']}").status_code == 401
    assert ada.post(f"leases/{lease['id']}/renew").status_code == 401


@pytest.mark.parametrize(("method", "path"), list_operations("leases/{id}"))
def test_another_agents_lease_does_not_exist(bob: ApiClient, lease, method: str, path: str) -> None:
    problem = assert_refused(bob, method, path.format(**lease), ANY_BODY, 404)
    assert problem["detail"] == "There is no such lease."


@pytest.mark.parametrize(("method", "path"), list_operations())
def test_every_operation_needs_a_key(lease, method: str, path: str) -> None:
    assert assert_refused(ApiClient(), method, path.format(**lease), ANY_BODY, 401)["code"] == "unauthenticated"


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
