"""Shells of a lease: variables and working directory of the commands that name them."""

from collections.abc import Callable

import pytest

from leases import leasing, shells, sweeps
from leases.errors import LeaseEnded, ShellDecryptionFailed, ShellExists, ShellNotFound, TooManyShells
from leases.models import Lease, Shell
from leases.retention.sweep import delete_expired
from tests.conftest import MINUTE, NOW

pytestmark = pytest.mark.django_db
SECRET = {"TOKEN": "s3cret-value"}


@pytest.fixture
def lease(grant: Callable[..., Lease]) -> Lease:
    return grant(ttl=2 * MINUTE)


def test_context_of_a_command_precedes_that_of_its_shell(lease: Lease) -> None:
    shells.create_shell(lease.pk, "a", env={"X": "shell", "Y": "shell"}, cwd="/data", now=NOW)
    context = shells.build_context(lease.pk, "a", cwd=None, env={"X": "command"})
    assert (context.cwd, context.env) == ("/data", {"X": "command", "Y": "shell"})
    assert shells.build_context(lease.pk, "a", cwd="/tmp", env={}).cwd == "/tmp"
    assert shells.build_context(lease.pk, None, cwd=None, env={}) == shells.CommandContext("/workspace", {})


def test_shells_of_other_leases_and_names_are_not_found(lease: Lease, grant: Callable[..., Lease]) -> None:
    other = grant("did:plc:bob")
    shells.create_shell(lease.pk, "a", env=SECRET, now=NOW)
    for pk, name in [(other.pk, "a"), (lease.pk, "b"), (lease.pk, "A")]:
        with pytest.raises(ShellNotFound):
            shells.build_context(pk, name, cwd=None, env={})


def test_name_is_used_once_and_free_after_a_deletion(lease: Lease) -> None:
    shells.create_shell(lease.pk, "a", now=NOW)
    with pytest.raises(ShellExists):
        shells.create_shell(lease.pk, "a", env=SECRET, now=NOW)
    assert Shell.objects.get().env_names == []
    assert [shells.delete_shell(lease.pk, "a") for _ in range(2)] == [True, False]
    shells.create_shell(lease.pk, "a", env=SECRET, now=NOW)


def test_lease_has_a_limited_number_of_shells(lease: Lease, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shells, "MAX_SHELLS", 2)
    for name in "ab":
        shells.create_shell(lease.pk, name, now=NOW)
    with pytest.raises(TooManyShells):
        shells.create_shell(lease.pk, "c", now=NOW)
    assert Shell.objects.count() == 2


def test_values_are_stored_encrypted_and_bound_to_lease_and_name(lease: Lease, grant: Callable[..., Lease]) -> None:
    shell = shells.create_shell(lease.pk, "a", env=SECRET, now=NOW)
    assert b"s3cret" not in bytes(Shell.objects.values_list("sealed_env", flat=True).get())
    for changes in ({"name": "b"}, {"lease": grant("did:plc:bob")}):
        Shell.objects.filter(pk=shell.pk).update(**changes)
        moved = Shell.objects.get()
        with pytest.raises(ShellDecryptionFailed):
            shells.build_context(moved.lease_id, moved.name, cwd=None, env={})


def test_values_survive_a_change_of_keys(lease: Lease, settings) -> None:
    settings.IDENTITY_KEYS = [b"1" * 32]
    shells.create_shell(lease.pk, "a", env=SECRET, now=NOW)
    settings.IDENTITY_KEYS = [b"2" * 32, b"1" * 32]
    assert shells.reencrypt_shells().changed == 1
    settings.IDENTITY_KEYS = [b"2" * 32]
    assert shells.build_context(lease.pk, "a", cwd=None, env={}).env == SECRET
    assert shells.reencrypt_shells().current == 1
    settings.IDENTITY_KEYS = [b"3" * 32]
    assert [shell.name for shell in shells.reencrypt_shells().undecryptable] == ["a"]


@pytest.mark.parametrize("is_recorded", [True, False])
def test_ended_lease_gets_no_shell_and_loses_its_shells(lease: Lease, grant, is_recorded: bool) -> None:
    shells.create_shell(lease.pk, "a", env=SECRET, now=NOW)
    kept = shells.create_shell(grant("did:plc:bob").pk, "a", now=NOW)
    later = NOW if is_recorded else lease.expires_at
    if is_recorded:
        leasing.release(lease.pk, now=NOW)
    with pytest.raises(LeaseEnded):
        shells.create_shell(lease.pk, "b", now=later)
    sweeps.expire_due_leases(now=later)
    assert delete_expired(now=later + MINUTE).counts == {"shells of ended leases deleted": 1}
    assert [*Shell.objects.all()] == [kept]
