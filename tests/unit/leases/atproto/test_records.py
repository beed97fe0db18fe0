"""Records of turns: created once in the agent's repository, with every failure on the way."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from uuid import uuid4

import pytest

from leases import turns
from leases.atproto import accounts, records
from leases.atproto.models import AtprotoAccount, AtprotoRecord
from leases.errors import InvalidRequest
from leases.models import EnvironmentType, Lease, Turn
from sandboxes import server_calls
from sandboxes.identity import signing
from sandboxes.models import MintedToken, Policy
from tests.conftest import MINUTE, NOW
from tests.emulators.pds import CUT_AFTER_CREATE, CUT_BEFORE_CREATE, DidDocuments, Pds
from tests.support.servers.receiver import run_held_servers
from tests.unit.leases.atproto.conftest import COLLECTION, take_turn

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("stopped_clock")]
HOUR = timedelta(hours=1)


def sweep(minutes: float = 0) -> dict[str, int]:
    return records.create_due_records(now=NOW + minutes * MINUTE).counts


def get_record() -> AtprotoRecord:
    return AtprotoRecord.objects.get()


def test_each_action_becomes_one_record_in_the_agents_repository(recorded: Lease, pds: Pds, documents: DidDocuments) -> None:
    for number in (1, 2):
        take_turn(recorded, number, action={"action": "roll", "dice": number}, now=NOW + number * MINUTE)
        take_turn(recorded, number, now=NOW + number * MINUTE)  # a repeated request
    assert sweep(2) == {"created": 2}
    assert sweep(2) == {}
    assert [key[:2] for key in pds.records] == [(documents.did, COLLECTION)] * 2
    assert sorted(pds.records, key=lambda key: key[2]) == [*pds.records]  # record keys sort by time
    first = next(iter(pds.records.values()))
    assert first == {
        "$type": COLLECTION,
        "environment": "game-1",
        "environmentType": "catan",
        "turn": 1,
        "action": {"action": "roll", "dice": 1},
        "createdAt": first["createdAt"],
    }
    row = AtprotoRecord.objects.get(turn_number=1)
    assert row.uri == f"at://{documents.did}/{COLLECTION}/{row.record_key}" and row.cid.startswith("bafy")
    tokens = MintedToken.objects.all()
    assert {(token.aud, token.lxm) for token in tokens} == {(pds.did, "com.atproto.repo.createRecord")} and len(tokens) == 2


def test_a_skipped_turn_and_a_type_without_a_collection_have_no_record(recorded: Lease) -> None:
    take_turn(recorded, 1, action=["not an action"])
    EnvironmentType.objects.update(turn_collection="")
    take_turn(recorded, 2)
    assert Turn.objects.count() == 2 and not AtprotoRecord.objects.exists()


@pytest.mark.parametrize("fault", [CUT_BEFORE_CREATE, CUT_AFTER_CREATE, 503])
def test_a_failed_request_is_repeated_and_creates_no_second_record(recorded: Lease, pds: Pds, fault: int | str) -> None:
    pds.faults = [fault]
    take_turn(recorded)
    counts = sweep()
    if fault == CUT_AFTER_CREATE:  # the record is found at once
        assert counts == {"created": 1}
    else:
        assert counts == {"postponed": 1} and get_record().error
        assert sweep() == {}  # not before its time
        assert sweep(1) == {"created": 1}
    assert len(pds.records) == 1 and get_record().error == ""


@pytest.mark.parametrize("step", ["record claimed", "record created"])
def test_a_crash_between_the_request_and_its_result_creates_no_second_record(
    recorded: Lease, pds: Pds, crash_at: Callable[[str], AbstractContextManager[None]], step: str
) -> None:
    take_turn(recorded)
    with crash_at(step):
        sweep()
    assert sweep(1) == {}  # claimed by the process that died
    assert sweep(4) == {"created": 1}
    assert len(pds.records) == 1 and get_record().uri


def test_two_concurrent_attempts_create_one_record(recorded: Lease, pds: Pds, at_checkpoint: Callable[..., None]) -> None:
    """The claim of the first attempt elapses before its request."""
    take_turn(recorded)
    results: list[dict[str, int]] = []

    def overtake() -> None:
        if not results:
            results.append({})
            results.append(sweep(5))

    at_checkpoint("record claimed", overtake)
    assert sweep() == {"lost race": 1}
    assert results[1] == {"created": 1} and len(pds.records) == 1


def test_a_turn_whose_process_died_is_recorded_when_it_is_settled(
    recorded: Lease, pds: Pds, crash_at: Callable[[str], AbstractContextManager[None]]
) -> None:
    with crash_at("turn answered"):
        take_turn(recorded)
    assert not AtprotoRecord.objects.exists()
    turns.settle_overdue_turns(now=NOW + HOUR)
    assert records.create_due_records(now=NOW + HOUR).counts == {"created": 1}
    assert [value["turn"] for value in pds.records.values()] == [1]


def test_a_rate_limit_postpones_the_request_until_its_end(recorded: Lease, pds: Pds) -> None:
    pds.faults, pds.reset_at = [429], int((NOW + 10 * MINUTE).timestamp())
    take_turn(recorded)
    assert sweep() == {"postponed": 1}
    assert get_record().next_attempt_at == NOW + 10 * MINUTE
    assert sweep(10) == {"created": 1}


def test_a_record_that_the_server_refuses_fails_with_its_message_and_can_be_repeated(recorded: Lease, pds: Pds) -> None:
    take_turn(recorded)
    AtprotoRecord.objects.update(value_text='{"$type": "org.example.other"}')
    assert sweep() == {"refused": 1}
    row = get_record()
    assert row.status == "failed"
    assert row.error == "com.atproto.repo.createRecord at localhost: 400 InvalidRequest ⟪Invalid record⟫"
    assert sweep(60) == {}
    AtprotoRecord.objects.update(value_text=f'{{"$type": "{COLLECTION}"}}')
    assert records.retry(row, now=NOW + 26 * HOUR) and not records.retry(row, now=NOW + 26 * HOUR)
    pds.faults = [503]
    assert sweep(26 * 60) == {"postponed": 1}  # repeated for another day
    assert sweep(28 * 60) == {"created": 1}


def test_an_unreachable_server_is_given_up_after_a_day(recorded: Lease, pds: Pds) -> None:
    take_turn(recorded)
    pds.faults = [503] * 3
    assert sweep() == {"postponed": 1}
    assert sweep(23 * 60) == {"postponed": 1}
    assert sweep(25 * 60) == {"refused": 1}
    assert get_record().status == "failed" and "503" in get_record().error


def test_a_server_that_does_not_answer_costs_a_pass_one_request(
    recorded: Lease, pds: Pds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More records than a pass reads of a server wait for it, of several agents, and are due before that of another server."""
    monkeypatch.setattr(server_calls, "SLOW_FAILURE", timedelta(0))
    take_turn(recorded)
    waiting = get_record()
    row = {field.attname: getattr(waiting, field.attname) for field in AtprotoRecord._meta.fields}
    for number in range(3):
        agent = f"did:plc:silent{number}"
        accounts.set_account(agent, service_url="http://127.0.0.1:1", service_did="did:web:silent", now=NOW)
        signing.create_key(agent, now=NOW)
        AtprotoRecord.objects.create(
            **row | {"id": uuid4(), "agent_did": agent, "turn_number": 10 + number, "next_attempt_at": NOW - MINUTE}
        )
    assert records.create_due_records(now=NOW, limit=1).counts == {"postponed": 3, "created": 1}
    assert [each.attempts for each in AtprotoRecord.objects.exclude(pk=waiting.pk).order_by("-attempts")] == [1, 0, 0]
    assert sweep() == {}


def test_servers_that_do_not_answer_delay_no_record_for_another(recorded: Lease, pds: Pds) -> None:
    """They hold their requests until the record exists, which is due after theirs."""
    take_turn(recorded)
    waiting = get_record()
    row = {field.attname: getattr(waiting, field.attname) for field in AtprotoRecord._meta.fields}
    with run_held_servers(lambda: pds.records) as servers:
        for number in range(40):
            agent, server = f"did:plc:agent{number}", servers[number % 2].url
            accounts.set_account(agent, service_url=f"{server}/{number}", password="secret", now=NOW)
            AtprotoRecord.objects.create(
                **row | {"id": uuid4(), "agent_did": agent, "turn_number": None, "next_attempt_at": NOW - MINUTE}
            )
        assert sweep() == {"created": 1, "postponed": 40}
        assert all(len({request.path for request in server.received}) == 20 for server in servers)


def test_a_record_waits_for_the_agents_account(recorded: Lease, pds: Pds) -> None:
    take_turn(recorded)
    assert accounts.remove_account(recorded.agent_did, now=NOW) and not accounts.remove_account(recorded.agent_did, now=NOW)
    assert sweep() == {"postponed": 1}
    assert get_record().error == "The agent has no AT Protocol account."
    accounts.set_account(recorded.agent_did, service_url=pds.url, service_did=pds.did, now=NOW)
    assert sweep(1) == {"created": 1}


def test_a_collection_that_the_policy_no_longer_permits_is_refused(recorded: Lease, pds: Pds) -> None:
    take_turn(recorded)
    Policy.objects.update(record_collections=[])
    assert sweep() == {"refused": 1}
    assert not pds.records and "policy" in get_record().error


def test_a_token_of_another_key_creates_nothing(recorded: Lease, pds: Pds, documents: DidDocuments) -> None:
    """The DID document has the old key until the operator publishes the new one."""
    take_turn(recorded)
    key = signing.rotate_key(recorded.agent_did, now=NOW)
    assert sweep() == {"postponed": 1}
    assert not pds.records and "401 BadJwtSignature" in get_record().error
    documents.publish(key.public_key, service_url=pds.url)
    assert sweep(1) == {"created": 1}


def test_another_record_with_the_key_is_not_taken_for_this_one(recorded: Lease, pds: Pds) -> None:
    take_turn(recorded)
    row = get_record()
    pds.records[row.agent_did, COLLECTION, row.record_key] = {"$type": COLLECTION, "turn": 99}
    assert sweep() == {"refused": 1}
    assert "another record" in get_record().error


def test_an_agent_that_took_the_key_of_a_turn_does_not_keep_the_turn_open(recorded: Lease, pds: Pds) -> None:
    key = records.build_tid(NOW, f"{recorded.pk}/1")
    records.create_for_agent(recorded, COLLECTION, {"text": "mine"}, key=key, now=NOW)
    assert take_turn(recorded).ended_at
    assert [value.get("text") for value in pds.records.values()] == ["mine"]


@pytest.mark.parametrize(
    ("action", "stored"),
    [
        ({"price": 2.0, "odds": 0.25}, {"price": 2, "odds": "0.25"}),
        ({"path": [[1.5, {"n": 1 << 60}]], "ok": True, "none": None},
         {"path": [["1.5", {"n": str(1 << 60)}]], "ok": True, "none": None}),
    ],
)  # fmt: skip
def test_numbers_that_the_data_model_lacks_are_stored_as_text(
    recorded: Lease, pds: Pds, action: dict[str, object], stored: dict[str, object]
) -> None:
    take_turn(recorded, action=action)
    assert sweep() == {"created": 1}
    assert [value["action"] for value in pds.records.values()] == [stored]


# --- sessions -----------------------------------------------------------------------------------------------------


@pytest.fixture
def session(recorded: Lease, pds: Pds) -> AtprotoAccount:
    """Account of the agent with a password in place of service tokens."""
    pds.passwords[recorded.agent_did] = "password-of-ada"
    return accounts.set_account(recorded.agent_did, service_url=pds.url, password="password-of-ada", now=NOW)[0]


def test_a_session_is_opened_once_and_refreshed_when_its_token_expires(
    session: AtprotoAccount, recorded: Lease, pds: Pds
) -> None:
    for number in (1, 2):
        take_turn(recorded, number)
        assert sweep() == {"created": 1}
    assert pds.calls == ["createSession", "createRecord", "createRecord"]
    pds.access_tokens.clear()
    take_turn(recorded, 3)
    assert sweep() == {"created": 1}
    assert pds.calls[3:] == ["createRecord", "getRecord", "refreshSession", "createRecord"]
    pds.access_tokens.clear()
    pds.refresh_tokens.clear()
    take_turn(recorded, 4)
    assert sweep() == {"created": 1}
    assert pds.calls[7:] == ["createRecord", "getRecord", "refreshSession", "createSession", "createRecord"]
    assert not MintedToken.objects.exists()


def test_a_wrong_password_is_stated_and_a_changed_one_opens_a_new_session(
    session: AtprotoAccount, recorded: Lease, pds: Pds
) -> None:
    pds.passwords[recorded.agent_did] = "changed-password"
    take_turn(recorded)
    assert sweep() == {"postponed": 1}
    assert "401 AuthenticationRequired" in get_record().error and "password-of-ada" not in get_record().error
    accounts.set_account(recorded.agent_did, service_url=pds.url, password="changed-password", now=NOW + MINUTE)
    assert sweep(1) == {"created": 1}


def test_a_session_of_another_account_is_not_used(session: AtprotoAccount, recorded: Lease, pds: Pds) -> None:
    pds.open_session = lambda body: {"did": "did:plc:eve", "accessJwt": "a", "refreshJwt": "b"}  # type: ignore[method-assign]
    take_turn(recorded)
    assert sweep() == {"refused": 1}
    assert "another account" in get_record().error and not pds.records


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"service_url": "http://pds.example.org"}, "service_url"),
        ({"service_url": "https://user:secret@pds.example.org"}, "service_url"),
        ({"service_did": ""}, "service_did"),
        ({"service_did": "pds.example.org"}, "service_did"),
        ({"password": ""}, "password"),
        ({"agent_did": "ada"}, "agent_did"),
    ],
)
def test_an_invalid_account_is_refused_by_field(db: None, fields: dict[str, str], field: str) -> None:
    valid = {"agent_did": "did:plc:ada", "service_url": "https://pds.example.org", "service_did": "did:web:pds.example.org"}
    with pytest.raises(InvalidRequest) as error:
        accounts.set_account(**(valid | fields), now=NOW)
    assert error.value.extra["field"] == field and not AtprotoAccount.objects.exists()


# --- records of agents ----------------------------------------------------------------------------------------------


def test_a_record_of_the_agent_is_created_at_once_and_repeating_it_has_no_effect(recorded: Lease, pds: Pds) -> None:
    for _ in range(2):
        row = records.create_for_agent(recorded, COLLECTION, {"text": "gg"}, key="end", now=NOW)
        assert (row.status, row.turn_number) == ("created", None)
    assert [*pds.records.values()] == [{"$type": COLLECTION, "text": "gg"}] and pds.calls == ["createRecord"]


def test_a_record_of_the_agent_is_created_later_if_the_server_does_not_answer(recorded: Lease, pds: Pds) -> None:
    pds.faults = [CUT_BEFORE_CREATE]
    row = records.create_for_agent(recorded, COLLECTION, {"text": "gg"}, now=NOW)
    assert (row.status, row.uri) == ("pending", "") and row.error
    assert sweep(1) == {"created": 1} and len(pds.records) == 1


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"collection": "app.bsky.feed.post"}, "collection"),
        ({"value": {"$type": "app.bsky.feed.post"}}, "record"),
        ({"value": {"odds": 0.5}}, "record"),
        ({"value": {"count": 1.0}}, "record"),
        ({"value": {"count": 1 << 53}}, "record"),
        ({"value": {"text": "x" * 65536}}, "record"),
        ({"key": "a/b"}, "key"),
        ({"key": ".."}, "key"),
        ({"key": "taken"}, "key"),
    ],
    ids=str,
)
def test_an_invalid_record_of_the_agent_is_refused_by_field(
    recorded: Lease, pds: Pds, changes: dict[str, object], field: str
) -> None:
    records.create_for_agent(recorded, COLLECTION, {"text": "first"}, key="taken", now=NOW)
    arguments: dict[str, object] = {"collection": COLLECTION, "value": {"text": "gg"}, "key": "free"} | changes
    with pytest.raises(InvalidRequest) as error:
        records.create_for_agent(recorded, **arguments, now=NOW)  # type: ignore[arg-type]
    assert error.value.extra["field"] == field and len(pds.records) == 1 == AtprotoRecord.objects.count()
