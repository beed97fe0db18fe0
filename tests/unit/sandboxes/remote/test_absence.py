"""Absence of a sandbox at a vendor: proven by the vendor's own documents, and never by an answer of another sender."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from leases import execution, leasing, sweeps
from leases.errors import LeaseEnded
from leases.models import Lease
from sandboxes.errors import SandboxError
from sandboxes.models import Pool, Sandbox
from sandboxes.providers.errors import Missing, Unavailable
from sandboxes.providers.remote import absence
from sandboxes.providers.remote.errors import NotFound
from sandboxes.runs.operations import Command
from tests.conftest import MINUTE, NOW
from tests.emulators.base import FOREIGN_ANSWERS
from tests.emulators.registry import EMULATORS
from tests.support.remote import GetEmulator, connect_provider
from tests.unit.sandboxes.remote.conftest import Remote

pytestmark = pytest.mark.smoke


@pytest.fixture(params=sorted(EMULATORS))
def any_vendor(request: pytest.FixtureRequest, emulators: GetEmulator) -> Iterator[Remote]:
    emulator = emulators(request.param)
    provider = connect_provider(request.param, emulator)
    provider.retry_delays_seconds = (0.0,)
    remote = Remote(request.param, provider, emulator, owner=uuid4().hex)
    yield remote
    emulator.foreign_answer = None


def test_answer_of_another_sender_neither_ends_a_sandbox_nor_confirms_its_end(any_vendor: Remote) -> None:
    ref, provider = any_vendor.start(), any_vendor.provider
    provider.write_file(ref, "/data/kept", b"kept")
    fresh = connect_provider(any_vendor.kind, any_vendor.emulator)  # as in another process
    fresh.retry_delays_seconds = ()
    calls: dict[str, Callable[[], Any]] = {
        "inspect": lambda: provider.inspect(ref),
        "inspect in another process": lambda: fresh.inspect(ref),
        "exec": lambda: any_vendor.run(ref, "true"),
        "list": lambda: provider.list(any_vendor.owner),
        "list all": lambda: provider.list_all(),
        "destroy": lambda: provider.destroy(ref),
        "destroy in another process": lambda: fresh.destroy(ref),
    }
    read: list[tuple[str, str, str]] = []
    for kind, answer in FOREIGN_ANSWERS.items():
        any_vendor.emulator.foreign_answer = answer
        for verb, call in calls.items():
            try:
                call()
                read.append((kind, verb, "success"))
            except Unavailable:
                continue
            except Exception as error:  # each is a wrong reading, and all are to be reported
                read.append((kind, verb, repr(error)))
    any_vendor.emulator.foreign_answer = None
    assert read == []
    assert any_vendor.run(ref, "cat", "/data/kept").stdout == b"kept"
    provider.destroy(ref)
    assert any_vendor.emulator.find_machines(ref) == []


def test_sandbox_that_was_deleted_at_the_vendor_is_missing_and_its_destruction_confirmed(remote: Remote) -> None:
    ref, provider = remote.start(), remote.provider
    remote.emulator.stop_idle(ref)  # Modal has no stopped sandboxes
    if remote.kind != "modal":
        remote.emulator.delete_stopped(ref)
    fresh = connect_provider(remote.kind, remote.emulator)
    for each in (provider, fresh):
        with pytest.raises(Missing):
            each.inspect(ref)
        with pytest.raises(Missing):
            each.exec(ref, ["true"], env={}, timeout=timedelta(seconds=30), mark=uuid4().hex)
        each.destroy(ref)


@pytest.mark.parametrize("remote", ["daytona"], indirect=True)
def test_proof_of_absence_has_two_documents_of_absence_and_a_list_between_them(remote: Remote) -> None:
    remote.emulator.requests.clear()
    with pytest.raises(Missing):
        remote.provider.inspect("lhr-unknown")
    look, listing = "GET /api/sandbox/lhr-unknown", "GET /api/sandbox"
    assert remote.emulator.requests == [look, listing, look]


@pytest.mark.parametrize("remote", ["daytona", "langsmith", "runloop"], indirect=True)
def test_description_that_cannot_be_read_is_unavailable(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    ref, describe = remote.start(), remote.emulator._describe  # type: ignore[attr-defined]
    times = {"createdAt": "yesterday", "created_at": "yesterday", "create_time_ms": None}

    def describe_badly(*arguments: Any) -> dict[str, Any]:
        described = describe(*arguments)
        return {**described, **{name: value for name, value in times.items() if name in described}}

    monkeypatch.setattr(remote.emulator, "_describe", describe_badly)
    for call in (lambda: remote.provider.inspect(ref), remote.provider.list_all, lambda: remote.provider.list(remote.owner)):
        with pytest.raises(Unavailable):
            call()
    monkeypatch.undo()


ABSENT, AWAY = NotFound("no such sandbox"), Unavailable("away")


@pytest.mark.parametrize(
    ("looks", "listed", "expected"),
    [
        (["found"], AWAY, "found"),
        ([ABSENT, ABSENT], False, Missing),
        ([ABSENT, "found"], False, "found"),
        ([ABSENT, ABSENT], True, Unavailable),
        ([ABSENT, ABSENT], AWAY, Unavailable),
        ([ABSENT, ABSENT], ABSENT, Unavailable),  # the list itself is not found
        ([ABSENT, AWAY], False, Unavailable),
        ([AWAY, ABSENT], False, Unavailable),
    ],
)
def test_absence_is_known_only_by_the_whole_proof(looks: list[Any], listed: Any, expected: Any) -> None:
    remaining = iter(looks)

    def take(step: Any) -> Any:
        if isinstance(step, Exception):
            raise step
        return step

    def look_up() -> Any:
        return absence.look_up("box", lambda: take(next(remaining)), lambda: take(listed))

    if isinstance(expected, str):
        assert look_up() == expected
        return
    with pytest.raises(expected):
        look_up()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("vendor", ["daytona", "runloop"])
def test_lease_and_its_destruction_outlast_a_page_of_a_proxy_before_the_vendor(
    vendor: str, move_pool: Callable[[str], Pool], grant: Callable[..., Lease], emulators: GetEmulator
) -> None:
    move_pool(vendor)
    emulator, lease = emulators(vendor), grant()

    def run(script: str) -> bytes:
        return bytes(execution.exec_command(lease.pk, Command(argv=["sh", "-c", script], timeout=MINUTE), now=NOW)[0].stdout)

    run("echo kept >/data/f")
    for answer in FOREIGN_ANSWERS.values():
        emulator.foreign_answer = answer
        with pytest.raises(SandboxError) as error:
            run("true")
        assert not isinstance(error.value, LeaseEnded) and error.value.retry_after
        sweeps.reconcile(now=NOW + 10 * MINUTE, grace=timedelta(0))
    emulator.foreign_answer = None
    assert run("cat /data/f") == b"kept\n"
    leasing.release(lease.pk, now=NOW)
    emulator.foreign_answer = FOREIGN_ANSWERS["not found page"]
    sweeps.reclaim(now=NOW)
    sandbox = Sandbox.objects.get(holder=lease.pk)
    assert sandbox.state == "destroying" and emulator.find_machines(sandbox.ref)
    emulator.foreign_answer = None
    sweeps.reclaim(now=NOW + 60 * MINUTE)
    sandbox.refresh_from_db()
    assert sandbox.state == "destroyed" and not emulator.find_machines(sandbox.ref)
