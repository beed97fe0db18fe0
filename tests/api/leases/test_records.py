"""AT Protocol records of a lease over HTTP."""

from datetime import timedelta

import pytest

from leases.atproto.models import AtprotoRecord
from tests.api.conftest import ApiClient
from tests.conftest import NOW

pytestmark = pytest.mark.django_db


def test_records_are_listed_newest_first(ada: ApiClient, bob: ApiClient, memory: object, lease: dict[str, str]) -> None:
    for number in (1, 2):
        AtprotoRecord.objects.create(
            lease_id=lease["id"], agent_did=lease["agent_did"], turn_number=number, collection="org.example.action",
            record_key=f"key-{number}", value_text='{"turn": 1}', created_at=NOW + timedelta(seconds=number),
            next_attempt_at=NOW, give_up_at=NOW,
        )  # fmt: skip
    AtprotoRecord.objects.filter(turn_number=1).update(
        status="created", uri="at://did:plc:ada/org.example.action/key-1", cid="bafy", ended_at=NOW, next_attempt_at=None
    )
    page = ada.get(f"leases/{lease['id']}/records?limit=1").json()
    assert [(row["key"], row["status"], row["uri"], row["ended_at"]) for row in page["results"]] == [
        ("key-2", "pending", "", None)
    ]
    [row] = ada.get(page["next"]).json()["results"]
    assert (row["turn"], row["status"], row["cid"], row["value"]) == (1, "created", "bafy", {"turn": 1})
    assert bob.get(f"leases/{lease['id']}/records").status_code == 404
