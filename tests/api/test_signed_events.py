"""Events that a game server signs with a secret of the environment."""

import base64
import json
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from leases.environments import signing
from leases.environments.models import Environment, EnvironmentOutcome, EnvironmentSecret
from leases.models import EnvironmentType, QueuedRun, Turn
from leases.queue import attempts, queue
from sandboxes.webhooks import signatures
from tests.api.conftest import ApiClient
from tests.support.billing import ADA, BOB

pytestmark = pytest.mark.django_db
URL = "/api/v1/environments/game-1/events"


@pytest.fixture
def secret(operator: ApiClient, lease) -> str:
    response = operator.post("environments/game-1/secrets")
    assert response.status_code == 201
    text: str = response.json()["secret"]
    return text


def open_secret(text: str) -> bytes:
    assert text.startswith("whsec_")
    return base64.b64decode(text.removeprefix("whsec_"))


def send(secret: str, message_id: str = "evt_1", *, number: int = 1, url: str = URL, age: int = 0, **changes: Any) -> Any:
    """Post a signed event. `changes` replace headers, or fields of the event after it was signed."""
    event = {"type": "turn", "agent_did": ADA, "turn_number": number, "state": {"n": number}} | changes.pop("event", {})
    content = changes.pop("event_body", event)
    body = json.dumps(content).encode()
    timestamp = str(int(timezone.now().timestamp()) - age)
    headers = {
        "webhook-id": message_id,
        "webhook-timestamp": timestamp,
        "webhook-signature": signatures.sign(open_secret(secret), message_id, timestamp, body),
    } | {name.replace("_", "-"): value for name, value in changes.items() if name != "sent"}
    return Client().post(url, changes.get("sent", body), "application/json", headers=headers)


def test_signed_event_is_queued_once_and_played(secret: str, ada: ApiClient) -> None:
    EnvironmentType.objects.update(turn_argv=["cat"])
    first, again = send(secret), send(secret)
    assert (first.status_code, again.status_code) == (202, 202)
    assert first.json()["queued_run_id"] == again.json()["queued_run_id"]
    row = queue.claim("r1", now=timezone.now())
    assert row and row.actor == "game server"
    attempts.execute(row, now=timezone.now())
    assert Turn.objects.get().action == {"n": 1}
    assert ada.get(f"runs/queued/{row.pk}").json()["state"] == "completed"
    assert send(secret).json()["state"] == "completed"
    assert QueuedRun.objects.count() == 1


def test_id_of_another_event_is_a_conflict(secret: str) -> None:
    assert send(secret).status_code == 202
    other = send(secret, number=2)
    assert (other.status_code, other.json()["code"], other.json()["field"]) == (409, "idempotency_key_reused", "webhook-id")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"webhook_id": ""}, "webhook-id"), ({"webhook_id": "a b"}, "webhook-id"), ({"webhook_id": "x" * 256}, "webhook-id"),
        ({"webhook_timestamp": "soon"}, "webhook-timestamp"), ({"webhook_timestamp": "1" * 12}, "webhook-timestamp"),
        ({"age": 301}, "webhook-timestamp"), ({"age": -301}, "webhook-timestamp"),
        ({"webhook_signature": "v2,abc"}, "webhook-signature"), ({"webhook_signature": "v1,é"}, "webhook-signature"),
        ({"webhook_id": "evt_2"}, "webhook-signature"), ({"sent": b'{"type": "turn"}'}, "webhook-signature"),
        ({"sent": b"{"}, "webhook-signature"), ({"url": URL.replace("game-1", "game-2")}, "webhook-signature"),
        ({"url": URL.replace("game-1", "%00")}, "webhook-signature"),
    ],
)  # fmt: skip
def test_invalid_header_is_named_and_nothing_is_queued(secret: str, changes: dict[str, Any], field: str) -> None:
    refused = send(secret, **changes)
    assert (refused.status_code, refused.json()["code"], refused.json()["field"]) == (401, "invalid_signature", field)
    assert not QueuedRun.objects.exists()


def test_age_within_the_tolerance_is_accepted(secret: str) -> None:
    assert send(secret, "old", age=290).status_code == send(secret, "new", age=-290).status_code == 202


def test_signed_event_is_validated_like_one_with_a_key(secret: str) -> None:
    assert send(secret, event={"turn_number": -1}).json()["field"] == "turn_number"
    missing = send(secret, event={"agent_did": BOB})
    assert (missing.status_code, missing.json()["code"]) == (404, "no_active_lease")


def test_both_secrets_are_valid_during_a_rotation(secret: str, operator: ApiClient) -> None:
    new = operator.post("environments/game-1/secrets").json()["secret"]
    assert send(secret, "a").status_code == send(new, "b").status_code == 202
    both = f"v1,AAAA {signatures.sign(b'x', 'c', '1', b'')}"
    assert send(secret, "c", webhook_signature=both).status_code == 401
    later = timezone.now() + signatures.ROTATION_OVERLAP + timedelta(minutes=1)
    row = EnvironmentSecret.objects.exclude(valid_until=None).get()
    assert row.valid_until and row.valid_until < later
    last = operator.post("environments/game-1/secrets", {"revoke_previous": True}).json()["secret"]
    assert send(secret, "d").status_code == send(new, "e").status_code == 401
    assert send(last, "f").status_code == 202
    assert EnvironmentSecret.objects.count() == 1


def test_secret_is_encrypted_and_only_for_operators(secret: str, ada: ApiClient) -> None:
    assert open_secret(secret) not in bytes(EnvironmentSecret.objects.get().sealed)
    assert ada.post("environments/game-1/secrets").status_code == 403
    result = signing.reencrypt()
    assert (result.changed, result.current, result.undecryptable) == (0, 1, [])


def test_key_whose_event_has_an_invalid_webhook_id_learns_the_header(ada: ApiClient, lease) -> None:
    body = {"type": "turn", "agent_did": ADA, "turn_number": 1, "state": {}}
    refused = ada("POST", "environments/game-1/events", body, webhook_id="a b")
    assert (refused.status_code, refused.json()["field"]) == (400, "webhook-id")


def test_published_vector_verifies() -> None:
    """Example of the Standard Webhooks specification."""
    secret = open_secret("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    body = b'{"test": 2432232314}'
    header = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    signatures.verify([secret], "msg_p5jXN8AQM9LWM0D4loKWxJek", "1614265330", header, body)
    with pytest.raises(signatures.InvalidHeader):
        signatures.verify([secret], "msg_p5jXN8AQM9LWM0D4loKWxJek", "1614265331", header, body)


def test_game_server_ends_its_environment_with_an_outcome(secret: str, lease: dict[str, Any]) -> None:
    url = "/api/v1/environments/game-1/end"
    content = {"outcome": {"winner": ADA}}
    ended = send(secret, url=url, event_body=content)
    assert (ended.status_code, ended.json()["ended"], ended.json()["outcome"]) == (200, [lease["id"]], {"winner": ADA})
    again = send(secret, "evt_2", url=url, event_body={"outcome": "other"})
    assert (again.json()["ended"], again.json()["outcome"]) == ([], {"winner": ADA})
    [outcome] = EnvironmentOutcome.objects.all()
    assert outcome.recorded_by == "game server"


def test_secret_of_one_environment_ends_no_other(secret: str, operator: ApiClient) -> None:
    operator.post("environments", {"environment_id": "game-2", "type": "catan"})
    refused = send(secret, url="/api/v1/environments/game-2/end", event_body={})
    assert (refused.status_code, refused.json()["code"]) == (401, "invalid_signature")
    assert Environment.objects.get(pk="game-2").ended_at is None


def test_signed_turn_is_no_end_and_a_signed_end_is_no_turn(secret: str) -> None:
    assert send(secret, url="/api/v1/environments/game-1/end").status_code == 400
    assert send(secret, event_body={"outcome": 1}).status_code == 400
    assert Environment.objects.get(pk="game-1").ended_at is None
