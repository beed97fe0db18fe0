"""Environments through the API."""

import pytest

from leases.environments.models import Environment
from tests.api.conftest import ApiClient, assert_refused
from tests.support.billing import ADA, BOB

pytestmark = pytest.mark.django_db


def test_operator_creates_starts_and_ends_an_environment(operator: ApiClient, ada: ApiClient, acquire_body) -> None:
    body = {"environment_id": "game-1", "type": "catan", "phase": "setup"}
    created = operator.post("environments", body)
    assert (created.status_code, created.json()["started_at"], created.json()["phase"]) == (201, None, "setup")
    assert operator.post("environments", body).status_code == 200
    assert operator.post("environments", body | {"type": "rpg"}).status_code == 409
    assert operator.post("environments/game-1/start").json()["started_at"]
    assert operator("PATCH", "environments/game-1", {"phase": "trade"}).json()["phase"] == "trade"
    lease = ada.post("leases", acquire_body()).json()
    ended = operator.post("environments/game-1/end", {"outcome": {"winner": "ada\0"}})
    assert (ended.status_code, ended.json()["ended"], ended.json()["outcome"]) == (200, [lease["id"]], {"winner": "ada\0"})
    assert ada.get(f"leases/{lease['id']}").json()["end_reason"] == "condition:environment.ended"
    again = operator("PATCH", "environments/game-1", {"phase": "x"})
    assert (again.status_code, again.json()["code"]) == (409, "environment_ended")


def test_agent_key_sees_the_environments_of_its_agents_and_only_its_own_leases(
    operator: ApiClient, ada: ApiClient, bob: ApiClient, acquire_body
) -> None:
    lease = ada.post("leases", acquire_body()).json()
    bob.post("leases", acquire_body(agent_did=BOB))
    bob.post("leases", acquire_body(agent_did=BOB, environment_id="game-2", environment_type="coding"))
    document = ada.get("environments/game-1").json()
    assert [(row["lease_id"], row["agent_did"]) for row in document["members"]] == [(lease["id"], ADA)]
    assert document["costs"] == {"usd": "0", "estimated_usd": "0", "unpriced_calls": 0, "model_calls_usd": "0"}
    assert len(operator.get("environments/game-1").json()["members"]) == 2
    assert [row["environment_id"] for row in ada.get("environments").json()["results"]] == ["game-1"]
    missing = ada.get("environments/game-2")
    assert (missing.status_code, missing.json()["code"]) == (404, "environment_not_found")


def test_agent_key_changes_no_environment(ada: ApiClient, lease) -> None:
    for method, path, body in (
        ("POST", "environments", {"environment_id": "game-3", "type": "catan"}), ("POST", "environments/game-1/start", None),
        ("POST", "environments/game-1/end", {}), ("PATCH", "environments/game-1", {"phase": "x"}),
    ):  # fmt: skip
        assert ada(method, path, body).status_code == 403, path
    assert Environment.objects.get().ended_at is None


def test_list_is_filtered_and_paged(operator: ApiClient) -> None:
    for number in range(3):
        operator.post("environments", {"environment_id": f"game-{number}", "type": "rpg" if number else "catan"})
    operator.post("environments/game-1/end")

    def names(query: str) -> list[str]:
        return [row["environment_id"] for row in operator.get(f"environments?{query}").json()["results"]]

    assert names("type=rpg") == ["game-2", "game-1"]
    assert names("open=0") == ["game-1"]
    assert names("open=1&type=rpg") == ["game-2"]
    page = operator.get("environments?limit=2").json()
    assert len(page["results"]) == 2
    assert [row["environment_id"] for row in operator.get(page["next"]).json()["results"]] == ["game-0"]
    assert_refused(operator, "GET", "environments?open=yes", None, 400, "open")
    assert_refused(operator, "GET", "environments?type=a%20b", None, 400, "type")


def test_condition_of_an_agent_key_ends_the_environment_of_its_only_agent(ada: ApiClient, lease) -> None:
    body = {"condition": "game.finished"}
    assert ada.post("environments/game-1/conditions", body).json()["ended"] == [lease["id"]]
    document = ada.get("environments/game-1").json()
    assert (document["end_reason"], document["outcome"], document["outcomes"]) == ("condition:game.finished", None, [])
