"""The bridge of Cloudflare: containers that any request starts, that are lost silently, and that nothing lists."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from controlplane import health
from leases import execution, sweeps
from leases.models import Lease
from sandboxes.models import Pool, Sandbox
from sandboxes.providers.cloudflare.provider import MAX_OUTPUT_BYTES
from sandboxes.providers.errors import FailureCause, Missing, NoCapacity, Rejected, Unavailable
from sandboxes.runs.operations import Command
from tests.conftest import MINUTE, NOW
from tests.emulators.base import CUT_AFTER, CUT_BEFORE
from tests.emulators.cloudflare import CloudflareEmulator
from tests.support.leases import evict
from tests.support.remote import GetEmulator, connect_provider
from tests.unit.sandboxes.remote.conftest import Remote

COUNT = "echo run >>/data/count; wc -l </data/count"
EXECUTE, UPLOAD = "POST .*/exec", "PUT .*/file/"


@pytest.fixture
def bridge(emulators: GetEmulator) -> Iterator[Remote]:
    emulator = emulators("cloudflare")
    assert isinstance(emulator, CloudflareEmulator)
    provider = connect_provider("cloudflare", emulator)
    provider.retry_delays_seconds = (0.0, 0.0, 0.0)
    remove_containers(emulator)  # of other tests
    yield Remote("cloudflare", provider, emulator, owner=uuid4().hex)
    emulator.faults.clear()
    emulator.max_instances = 1000
    remove_containers(emulator)


def remove_containers(emulator: CloudflareEmulator) -> None:
    for machine in emulator.containers.values():
        machine.remove()
    emulator.containers.clear()


def test_lost_container_is_missing_and_the_empty_one_in_its_place_is_removed(bridge: Remote) -> None:
    ref = bridge.start()
    bridge.provider.write_file(ref, "/workspace/a", b"1")
    bridge.emulator.stop_idle(ref)
    with pytest.raises(Missing, match="replaced this sandbox by an empty one"):
        bridge.run(ref, "true")
    assert bridge.emulator.list_machines() == []


def test_question_for_an_unknown_sandbox_leaves_no_container(bridge: Remote) -> None:
    with pytest.raises(Missing):
        bridge.provider.inspect("lhr-unknown")
    bridge.provider.destroy("lhr-unknown")
    assert bridge.emulator.list_machines() == []


@pytest.mark.parametrize("outcome", [502, 503, CUT_BEFORE, CUT_AFTER])
def test_command_runs_once_although_its_call_is_repeated(bridge: Remote, outcome: int | str) -> None:
    ref = bridge.start()
    bridge.fail(EXECUTE, outcome, times=2)
    assert bridge.run(ref, "sh", "-c", COUNT).stdout == b"1\n"


def test_create_waits_for_a_pool_that_fails_for_a_moment_and_not_for_ever(bridge: Remote, settings: Any) -> None:
    bridge.fail(EXECUTE, 502, times=3)
    assert bridge.start()
    bridge.emulator.max_instances = 1  # type: ignore[attr-defined]
    settings.SANDBOX_START_TIMEOUT = timedelta(seconds=0.2)
    with pytest.raises(NoCapacity) as error:
        bridge.provider.create(bridge.spec())
    assert error.value.cause == FailureCause.NO_CAPACITY
    bridge.fail(EXECUTE, 502, times=100)
    with pytest.raises(Unavailable) as error:
        bridge.provider.create(bridge.spec())
    assert error.value.cause == FailureCause.TIMEOUT


@pytest.mark.parametrize(
    ("outcome", "cause"),
    [
        (401, FailureCause.CREDENTIALS_REFUSED),
        (429, FailureCause.RATE_LIMITED),
        (500, FailureCause.ENGINE_ERROR),
        (503, FailureCause.RATE_LIMITED),  # capacity_exceeded
        (CUT_BEFORE, FailureCause.ENGINE_UNREACHABLE),
    ],
)
def test_failed_check_of_the_bridge_states_its_cause(bridge: Remote, outcome: int | str, cause: FailureCause) -> None:
    bridge.provider.ping()
    bridge.fail("GET /v1/pool/stats", outcome)
    with pytest.raises(Unavailable) as error:
        bridge.provider.ping()
    assert error.value.cause == cause


def test_refused_key_is_not_a_missing_sandbox(bridge: Remote) -> None:
    ref = bridge.start()
    provider = connect_provider("cloudflare", bridge.emulator, api_key="revoked")
    for call in (lambda: provider.inspect(ref), lambda: provider.destroy(ref)):
        with pytest.raises(Unavailable) as error:
            call()
        assert error.value.cause == FailureCause.CREDENTIALS_REFUSED
    assert len(bridge.emulator.find_machines(ref)) == 1


@pytest.mark.parametrize(("outcome", "error"), [(500, Unavailable), (CUT_AFTER, Unavailable), (400, Rejected)])
def test_create_whose_upload_fails_can_be_repeated(bridge: Remote, outcome: int | str, error: type[Exception]) -> None:
    spec = bridge.spec()
    bridge.fail(UPLOAD, outcome)
    with pytest.raises(error):
        bridge.provider.create(spec)
    assert bridge.provider.create(spec) == bridge.provider.create(spec) == spec.name
    assert len(bridge.emulator.list_machines()) == 1
    assert bridge.run(spec.name, "true").exit_code == 0


def test_destroy_whose_response_is_lost_can_be_repeated(bridge: Remote) -> None:
    ref = bridge.start()
    bridge.fail("DELETE", CUT_AFTER)
    with pytest.raises(Unavailable):
        bridge.provider.destroy(ref)
    bridge.provider.destroy(ref)
    assert bridge.emulator.list_machines() == []


def test_output_above_the_limit_of_an_exec_is_no_result(bridge: Remote) -> None:
    ref = bridge.start()
    with pytest.raises(Unavailable, match="too much output") as error:
        bridge.provider._execute(ref, f"head -c {MAX_OUTPUT_BYTES + 1} /dev/zero", timeout=MINUTE)
    assert error.value.cause == FailureCause.AGENT_FAILED


def test_content_above_the_limit_of_a_write_is_uploaded_in_parts(bridge: Remote) -> None:
    ref = bridge.start()
    content = bytes(range(256)) * (40 << 12)  # 40 MiB
    bridge.provider.write_file(ref, "/data/large.bin", content)
    assert bridge.run(ref, "sh", "-c", "wc -c </data/large.bin; ls /workspace").stdout == b"41943040\n"
    assert bridge.provider.read_range(ref, "/data/large.bin", start=len(content) - 3, length=9) == (content[-3:], len(content))


@pytest.mark.django_db(transaction=True)
def test_lease_on_a_lost_container_wakes_with_its_stored_state(
    move_pool: Callable[[str], Pool], grant: Callable[..., Lease], bridge: Remote
) -> None:
    move_pool("cloudflare")
    lease = grant()

    def run(script: str) -> bytes:
        return bytes(execution.exec_command(lease.pk, Command(argv=["sh", "-c", script], timeout=MINUTE), now=NOW)[0].stdout)

    run("echo kept >/data/f")
    evict(lease)
    assert run("cat /data/f") == b"kept\n"
    result = sweeps.reconcile(now=NOW + timedelta(days=3650), grace=MINUTE)  # nothing is listed, and nothing taken for lost
    assert not result.failures and Sandbox.objects.get(holder=lease.pk).lost_at is None
    assert len(bridge.emulator.list_machines()) == 1
    assert health.query_provider() == {"name": "cloudflare", "isolated": True, "answers": True, "disk": {}}
