"""Life of one agent in one environment, from joining to the bill.

The model and the repository server (PDS) are emulated. Everything else is real: processes, containers, egress proxy, API."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from controlplane.games.client import ApiError, Client, post_condition
from tests.commands.manage import run_manage
from tests.e2e.bill import check_bill, read_costs
from tests.e2e.disturbances import PATIENCE_SECONDS
from tests.e2e.test_kill import Fleet, fleet  # noqa: F401 - fixture
from tests.emulators.pds import DidDocuments, Pds, serve
from tests.support.servers.egress import EventLoopThread, FakeUpstream
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.docker]
ENVIRONMENT, COLLECTION = "campaign-1", "org.example.rpg.action"
UPSTREAM_KEY = "sk-upstream-secret"
RPG = Path(__file__).resolve().parents[2] / "leases/packs/shipped/rpg"
SET_UP = """
from django.core.management import call_command
call_command("policy", "add", "recorded", "--record-collections", "{collection}")
call_command("environment_type", "set", "rpg", "--policy", "recorded", "--turn-collection", "{collection}")
call_command("identity", "create", "{agent}")
call_command("atproto", "set", "{agent}", "--service-url", "{pds.url}", "--service-did", "{pds.did}")
call_command("create_key", "--agent", "{agent}", "--json")
"""


@pytest.fixture
def documents() -> Iterator[DidDocuments]:
    with serve(DidDocuments()) as documents:
        yield documents


@pytest.fixture
def pds(documents: DidDocuments) -> Iterator[Pds]:
    with serve(Pds(documents, now=lambda: datetime.now(UTC))) as pds:
        yield pds


@pytest.fixture
def model() -> Iterator[FakeUpstream]:
    loop = EventLoopThread()
    with loop.run_context(FakeUpstream().listening()) as model:
        yield model
    loop.close()


def set_up_agent(fleet: Fleet, documents: DidDocuments, pds: Pds) -> Client:  # noqa: F811
    """Let turns of the type `rpg` become records, give the agent a DID with a signing key and an account, and an API key."""
    script = SET_UP.format(agent=documents.did, collection=COLLECTION, pds=pds)
    process = run_manage(fleet.path, "shell", "-c", script, **fleet.env)
    assert process.returncode == 0, process.stderr
    *_, key = process.stdout.splitlines()
    [(public_key,)] = fleet.select("SELECT public_key FROM sandboxes_signingkey")
    documents.publish(public_key, service_url=pds.url)
    return Client(f"http://127.0.0.1:{fleet.port}", json.loads(key)["key"], PATIENCE_SECONDS)


def let_answer(model: FakeUpstream, text: str) -> None:
    usage = {"prompt_tokens": 120, "completion_tokens": 7}
    model.body = json.dumps({"model": "test", "choices": [{"message": {"content": text}}], "usage": usage}).encode()


def build_state(turn_number: int) -> dict[str, Any]:
    """Return the state of a turn: an ogre holds the party, and a companion is hurt."""
    state: dict[str, Any] = json.loads((RPG / "examples/combat.json").read_text())
    return state | {"campaign": ENVIRONMENT, "turn_number": turn_number}


def test_agent_joins_acts_sleeps_wakes_and_is_reclaimed(
    fleet: Fleet,  # noqa: F811
    documents: DidDocuments,
    pds: Pds,
    model: FakeUpstream,
) -> None:
    fleet.env |= {"LEASEHOLD_LLM_URL": model.url, "LEASEHOLD_LLM_API_KEY": UPSTREAM_KEY}
    fleet.up()
    host = Client(f"http://127.0.0.1:{fleet.port}", fleet.key, PATIENCE_SECONDS)
    agent = set_up_agent(fleet, documents, pds)

    # Join: a lease, and a sandbox with its configuration.
    request = {"agent_did": documents.did, "environment_type": "rpg", "sleep_after": "1s"}
    lease = agent.call("POST", f"/environments/{ENVIRONMENT}/join", request)
    path = f"/leases/{lease['id']}"
    assert (lease["is_new"], lease["sandbox_id"]) == (True, f"{documents.did}::{ENVIRONMENT}")
    assert lease["expiry_conditions"] == ["agent.death", "game.finished", "campaign.ended"]
    repeated = agent.call("POST", f"/environments/{ENVIRONMENT}/join", request)
    assert (repeated["is_new"], repeated["id"]) == (False, lease["id"])
    assert len(fleet.list_containers()) == 1

    def execute(*argv: str) -> str:
        result = agent.call("POST", f"{path}/exec", {"argv": argv})
        assert result["exit_code"] == 0, result
        return str(result["stdout"])

    def take_turn(number: int, state: dict[str, Any], answer: str) -> dict[str, Any]:
        let_answer(model, answer)
        return agent.call("POST", f"{path}/turns", {"turn_number": number, "state": state})

    config = json.loads(execute("cat", "/workspace/config.json"))
    assert (config["agentDid"], config["environmentType"]) == (documents.did, "rpg")

    # Turn: the harness asks the model with the skill's prompt. The credentials stay outside of the sandbox.
    first = take_turn(1, build_state(1), 'I will help her. {"action": "heal Ada", "narration": "Brook kneels down."}')
    assert first["action"] == {"action": "heal Ada", "narration": "Brook kneels down."}
    [(endpoint, headers, body)] = model.requests
    assert (endpoint, headers["authorization"]) == ("/v1/chat/completions", f"Bearer {UPSTREAM_KEY}")
    assert body["messages"][0]["content"].startswith((RPG / "skill/prompt.md").read_text())
    assert json.loads(body["messages"][1]["content"])["scene"] == build_state(1)["scene"]
    assert UPSTREAM_KEY not in execute("env")
    assert agent.call("GET", path)["expires_at"] > lease["expires_at"]

    # Sleep: an idle sandbox has no container. The next turn wakes it with its files.
    execute("sh", "-c", "echo kept > notes")

    def sleeps() -> bool:
        fleet.sweep()
        return bool(agent.call("GET", path)["sandbox"]["state"] == "cold") and not fleet.list_containers()

    wait_until(sleeps, "the sandbox sleeps", within=60.0, every=1.0)
    second = take_turn(2, build_state(2), '{"action": "attack ogre"}')
    assert second["action"]["action"] == "attack ogre"
    memories = json.loads(model.requests[-1][2]["messages"][1]["content"])["memories"]
    assert "Brook chose: heal Ada" in memories
    assert json.loads(execute("cat", "/data/character.json"))["role"] == "healer"
    assert execute("cat", "notes") == "kept\n"

    # A turn without an action is skipped.
    third = take_turn(3, {"environment_type": "rpg", "turn_number": 3}, "I cannot decide.")
    assert third["skipped"] and third["action"]["action"] == "skip_turn", third

    # Record: each action is in the agent's repository, signed with its key.
    wait_until(lambda: fleet.sweep() or len(pds.records) == 2, "the actions are recorded", within=60.0, every=1.0)
    assert {key[:2] for key in pds.records} == {(documents.did, COLLECTION)}
    assert [(value["turn"], value["action"]["action"]) for value in pds.records.values()] == [
        (1, "heal Ada"),
        (2, "attack ogre"),
    ]

    # End: the condition ends the lease, and the container is destroyed.
    assert post_condition(host, ENVIRONMENT, "agent.death", agents=[documents.did]) == [lease["id"]]
    with pytest.raises(ApiError, match=r"condition:agent\.death"):
        take_turn(4, build_state(4), '{"action": "defend"}')
    wait_until(lambda: agent.call("GET", path)["status"] == "destroyed", "the lease is destroyed", within=60.0)
    assert fleet.list_containers() == {}
    check_bill(fleet, host, ENVIRONMENT, calls=3)
    [(billed, quantities)] = read_costs(host, ENVIRONMENT, "agent").items()
    assert billed == documents.did and float(quantities["time"]) > 0
