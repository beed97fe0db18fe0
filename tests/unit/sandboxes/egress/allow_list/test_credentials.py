"""Credentials of allowed domains: validation, storage, re-encryption, the command."""

import io
import sys
from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError

from sandboxes.db import encryption
from sandboxes.egress.allow_list import credentials
from sandboxes.egress.allow_list.credentials import Credential, InvalidCredential
from sandboxes.models import EgressCredential, Policy
from tests.conftest import MINUTE, NOW

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("hand-written SQL")]
DOMAIN = "git.example.org"


@pytest.fixture
def policy() -> Policy:
    return Policy.objects.create(name="git", allowed_domains=[DOMAIN, "*.example.com", "files.example.net:8443"])


def test_credential_is_stored_encrypted_replaced_and_removed(policy: Policy) -> None:
    assert credentials.set_credential(policy, DOMAIN, "Bearer first", now=NOW)
    assert not credentials.set_credential(policy, DOMAIN, "Basic YTpi", now=NOW + MINUTE)
    row = EgressCredential.objects.get()
    assert b"YTpi" not in bytes(row.sealed_authorization) and row.changed_at == NOW + MINUTE
    assert credentials.find_credential(policy, DOMAIN) == Credential("Basic YTpi")
    assert credentials.find_credential(policy, "other.example.org") is None
    assert credentials.find_credential(Policy(), DOMAIN) is None  # a sandbox without a policy
    other = Policy.objects.create(name="other", allowed_domains=[DOMAIN])
    assert credentials.find_credential(other, DOMAIN) is None
    assert credentials.remove_credential(policy, DOMAIN)
    assert not credentials.remove_credential(policy, DOMAIN)


def test_credential_moved_to_another_row_is_not_decrypted(policy: Policy) -> None:
    other = Policy.objects.create(name="other", allowed_domains=[DOMAIN])
    credentials.set_credential(policy, DOMAIN, "Bearer secret", now=NOW)
    EgressCredential.objects.update(policy=other)
    with pytest.raises(encryption.DecryptionFailed):
        credentials.find_credential(other, DOMAIN)


@pytest.mark.parametrize("domain", ["a.example.com", "files.example.net"])
def test_subdomains_and_domains_with_a_port_may_have_credentials(policy: Policy, domain: str) -> None:
    assert credentials.set_credential(policy, domain, "Bearer x", now=NOW)


@pytest.mark.parametrize("domain", ["example.org", "example.com", "GIT.example.org", "127.0.0.1", "", "git.example.org:443"])
def test_domain_that_is_not_listed_is_refused(policy: Policy, domain: str) -> None:
    with pytest.raises(InvalidCredential):
        credentials.set_credential(policy, domain, "Bearer x", now=NOW)


@pytest.mark.parametrize(
    "value", ["", "token", "Bearer ", "Bearer a\r\nX: y", "Bearer \u00fc", "Bearer " + "x" * 5000, " Bearer x"]
)
def test_invalid_header_is_refused_without_being_repeated(policy: Policy, value: str) -> None:
    with pytest.raises(InvalidCredential) as refused:
        credentials.set_credential(policy, DOMAIN, value, now=NOW)
    assert len(value) < 8 or value not in str(refused.value)
    assert not EgressCredential.objects.exists()


def test_credentials_are_encrypted_again_under_a_new_key(policy: Policy, settings: Any) -> None:
    credentials.set_credential(policy, DOMAIN, "Bearer x", now=NOW)
    settings.IDENTITY_KEYS = [b"n" * 32, *settings.IDENTITY_KEYS]
    result = credentials.reencrypt()
    assert (result.changed, result.current, result.undecryptable) == (1, 0, [])
    assert (credentials.reencrypt().current, credentials.find_credential(policy, DOMAIN)) == (1, Credential("Bearer x"))
    settings.IDENTITY_KEYS, settings.SECRET_KEY = [b"o" * 32], "another"
    assert credentials.reencrypt().undecryptable == [EgressCredential.objects.get()]


def command(*args: str) -> str:
    output = io.StringIO()
    call_command("egress_credential", *args, stdout=output)
    return output.getvalue()


def test_command_reads_the_value_from_stdin_and_never_prints_it(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Bearer secret\n"))
    assert command("set", "git", DOMAIN) == f"added: git  {DOMAIN}\n"
    assert credentials.find_credential(policy, DOMAIN) == Credential("Bearer secret")
    assert f"{DOMAIN}  downloads" in command("list") and "secret" not in command("list")
    monkeypatch.setattr(sys, "stdin", io.StringIO("Bearer secret\n"))
    assert command("set", "git", DOMAIN, "--writes") == f"replaced: git  {DOMAIN}\n"
    assert credentials.find_credential(policy, DOMAIN) == Credential("Bearer secret", writes=True)
    assert command("remove", "git", DOMAIN) == f"removed: git  {DOMAIN}\n"
    for args in (("remove", "git", DOMAIN), ("set", "nobody", DOMAIN), ("set", "git", "example.net")):
        monkeypatch.setattr(sys, "stdin", io.StringIO("Bearer secret\n"))
        with pytest.raises(CommandError):
            command(*args)
