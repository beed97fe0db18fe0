"""manage.py snapshot: take, restore and fork."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from django.core.management import CommandError
from django.utils import timezone

from leases.models import Lease, LeaseEvent
from sandboxes.models import Snapshot
from tests.commands.manage import call

pytestmark = pytest.mark.django_db
NONE = "00000000-0000-0000-0000-000000000000"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "source"


@pytest.fixture
def lease(grant: Callable[..., Lease], source: Path) -> str:
    """Lease with the file `f`, whose content is "one"."""
    pk = str(grant(now=timezone.now()).pk)
    store(pk, source, "one")
    return pk


def store(lease: str, source: Path, text: str) -> None:
    source.write_text(text)
    call("files", "put", lease, source, "f")


def read(lease: str, target: Path) -> str:
    call("files", "get", lease, "f", target)
    return target.read_text()


def test_a_snapshot_is_taken_and_restored(lease: str, source: Path, tmp_path: Path) -> None:
    taken = call("snapshot", "take", lease, "--name", "before")
    row = Snapshot.objects.get(name="before")
    assert taken == f"{row.pk} taken: {row.size_bytes} bytes\n"
    store(lease, source, "two")
    restored = call("snapshot", "restore", lease, row.pk)
    assert restored == f"{row.pk} restored as {Snapshot.objects.get(kind='restored').pk}\n"
    assert read(lease, tmp_path / "copy") == "one"
    assert str(row.pk) in call("state", "snapshots", lease)
    actors = LeaseEvent.objects.filter(kind__in=("snapshot", "restored")).values_list("kind", "actor")
    assert {*actors} == {("snapshot", "command line"), ("restored", "command line")}


def test_a_lease_is_forked_from_its_workspace_or_a_snapshot(lease: str, source: Path, tmp_path: Path) -> None:
    taken = json.loads(call("snapshot", "take", lease, "--json"))
    store(lease, source, "two")
    output = call("snapshot", "fork", lease, "game-2")
    current = Lease.objects.get(environment_id="game-2")
    assert output == f"{current.pk} forked: did:plc:ada::game-2\n"
    assert (current.environment_type_id, current.pool) == ("catan", Lease.objects.get(pk=lease).pool)
    assert call("snapshot", "fork", lease, "game-2") == f"{current.pk} already held: did:plc:ada::game-2\n"
    document = json.loads(
        call("snapshot", "fork", lease, "game-3", "--snapshot", taken["id"], "--agent", "did:plc:bob", "--json")
    )
    assert (document["agent_did"], document["is_new"]) == ("did:plc:bob", True)
    assert read(str(current.pk), tmp_path / "current") == "two"
    assert read(document["id"], tmp_path / "earlier") == "one"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["take", "x"], "is not a lease id"), (["take", NONE], "no such lease"),
        (["take", "LEASE", "--name", "x" * 101], "^--name: Ensure this field has no more than 100"),
        (["restore", "LEASE", "x"], "is not a snapshot id"), (["restore", "LEASE", NONE], "no such snapshot"),
        (["fork", NONE, "game-2"], "no such lease"), (["fork", "LEASE", "a b"], "is not 1 to 200 letters"),
        (["fork", "LEASE", "game-2", "--agent", "bob"], "is not a DID"),
        (["fork", "LEASE", "game-2", "--type", "chess"], "no such environment type"),
        (["fork", "LEASE", "game-2", "--pool", "none"], "no such pool"),
        (["fork", "LEASE", "game-2", "--snapshot", "x"], "is not a snapshot id"),
        (["fork", "LEASE", "game-2", "--snapshot", NONE], "no such snapshot"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_named_and_change_nothing(lease: str, args: list[str], message: str) -> None:
    with pytest.raises(CommandError, match=message):
        call("snapshot", *[lease if arg == "LEASE" else arg for arg in args])
    assert (Lease.objects.count(), Snapshot.objects.count()) == (1, 0)


def test_an_ended_lease_takes_no_snapshot(lease: str) -> None:
    call("release", lease)
    for args in (["take", lease], ["restore", lease, NONE]):
        with pytest.raises(CommandError, match=r"The lease ended \(released\)"):
            call("snapshot", *args)
