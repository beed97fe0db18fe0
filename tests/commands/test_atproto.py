"""manage.py atproto: accounts and records. Passwords are read from stdin and never printed."""

import io
import sys

import pytest
from django.core.management import CommandError

from leases.atproto.models import AtprotoAccount, AtprotoRecord
from leases.models import Lease
from tests.commands.manage import call
from tests.conftest import NOW

pytestmark = pytest.mark.django_db
ADA, URL = "did:plc:ada", "https://pds.example"


def test_accounts_are_set_listed_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    token = ("set", ADA, "--service-url", URL, "--service-did", "did:web:pds.example")
    assert call("atproto", *token) == f"{ADA} added: {URL} service_token\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("hunter2-hunter2\n"))
    assert call("atproto", "set", ADA, "--service-url", URL, "--password-stdin") == f"{ADA} changed: {URL} session\n"
    assert b"hunter2" not in bytes(AtprotoAccount.objects.get().sealed_password or b"")
    assert call("atproto", "list") == f"{ADA} {URL} session\n"
    assert call("identity", "reencrypt").endswith("0 AT Protocol passwords re-encrypted, 1 already current\n")
    assert call("atproto", "remove", ADA) == f"{ADA} removed\n"
    with pytest.raises(CommandError, match="no AT Protocol account"):
        call("atproto", "remove", ADA)


def test_an_invalid_account_is_refused() -> None:
    with pytest.raises(CommandError, match="https URL"):
        call("atproto", "set", ADA, "--service-url", "http://pds.example", "--service-did", "did:web:pds.example")
    assert not AtprotoAccount.objects.exists()


def test_failed_records_are_listed_and_repeated(lease: Lease) -> None:
    common = {"lease": lease, "agent_did": ADA, "collection": "org.example.action", "value_text": "{}", "give_up_at": NOW}
    AtprotoRecord.objects.create(
        record_key="a", status="failed", error="400 no", created_at=NOW, ended_at=NOW, next_attempt_at=None, **common
    )
    AtprotoRecord.objects.create(record_key="b", created_at=NOW, next_attempt_at=NOW, **common)
    assert call("atproto", "records", "--status", "failed") == f"failed {ADA} org.example.action/a 400 no\n"
    assert len(call("atproto", "records").splitlines()) == 2
    assert call("atproto", "retry") == "1 to be repeated by the sweep `records`\n"
    assert [*AtprotoRecord.objects.values_list("status", flat=True)] == ["pending"] * 2
