"""Modal: sandboxes that end with their files, commands over gRPC, and a client that repeats calls and has no time limits."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest
from modal_proto import task_command_router_pb2 as router_pb2

from leases import execution
from leases.errors import LeaseEnded
from leases.models import Lease
from sandboxes.models import Pool, Sandbox
from sandboxes.providers.base import SandboxSpec
from sandboxes.providers.errors import FailureCause, Rejected, Unavailable
from sandboxes.providers.modal import provider as vendor
from sandboxes.runs.operations import Command
from tests.conftest import MINUTE, NOW
from tests.emulators import modal as emulation
from tests.emulators.base import CUT_AFTER, CUT_BEFORE, Fault, Throttle
from tests.support.remote import GetEmulator, connect_provider
from tests.support.servers import ports
from tests.unit.sandboxes.remote.conftest import Remote


@pytest.fixture
def modal(emulators: GetEmulator) -> Iterator[Remote]:
    emulator = emulators("modal")
    provider = connect_provider("modal", emulator)
    provider.retry_delays_seconds = (0.0, 0.0, 0.0)
    modal = Remote("modal", provider, emulator, owner=uuid4().hex)
    yield modal
    emulator.faults.clear()
    for found in provider.list(modal.owner):
        provider.destroy(found.ref)


def test_import_of_the_client_reads_no_configuration_file_and_prints_nothing(tmp_path: Path) -> None:
    (tmp_path / ".modal.toml").write_text("this is not TOML")
    command = [sys.executable, "-c", "import sandboxes.providers.modal, modal"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MODAL_")}
    done = subprocess.run(command, env=environment | {"HOME": str(tmp_path)}, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize(
    ("message", "cause"),
    [("Sandbox limit reached", FailureCause.NO_CAPACITY), ("API rate limit exceeded", FailureCause.RATE_LIMITED)],
)
def test_time_that_modal_states_reaches_the_caller(modal: Remote, message: str, cause: FailureCause) -> None:
    """The client itself would wait for that time, however long it is, and repeat the call."""
    modal.emulator.faults.append(Fault("RPC /.*SandboxCreate", Throttle(message, 89.5), times=99))
    began_at = time.monotonic()
    with pytest.raises(Unavailable) as raised:
        modal.start()
    assert (raised.value.cause, raised.value.retry_after) == (cause, 90)
    assert time.monotonic() - began_at < 30


def test_a_short_time_that_modal_states_is_waited_for(modal: Remote) -> None:
    modal.emulator.faults.append(Fault("RPC /.*SandboxCreate", Throttle("API rate limit exceeded", 0.1)))
    assert modal.start()


def test_forked_process_has_a_connection_of_its_own(modal: Remote) -> None:
    ref = modal.start()
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if modal.run(ref, "echo", "child").stdout == b"child\n" else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert modal.run(ref, "echo", "parent").stdout == b"parent\n"


def test_result_of_minus_one_is_a_timeout_at_the_deadline_only(modal: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    ref, provider = modal.start(), modal.provider
    with pytest.raises(Unavailable) as error:
        provider._execute(ref, "echo begun; exec sleep 60", timeout=timedelta(seconds=1))
    assert error.value.cause == FailureCause.TIMEOUT
    monkeypatch.setattr(emulation.Execution, "result", router_pb2.TaskExecWaitResponse(code=-1))
    assert provider._execute(ref, "echo out; echo err >&2", timeout=MINUTE) == "out\nerr\n"


def test_call_that_is_not_answered_ends_at_its_time_limit(modal: Remote) -> None:
    provider = connect_provider("modal", modal.emulator)
    assert isinstance(provider, vendor.ModalProvider)
    provider.call_timeout_seconds = 0.2
    modal.emulator.faults.append(Fault("RPC /SandboxListV2", seconds=2.0))
    started = time.monotonic()
    with pytest.raises(Unavailable) as error:
        provider.list(modal.owner)
    assert error.value.cause == FailureCause.TIMEOUT and time.monotonic() - started < 1.5


def test_unreachable_vendor_is_unavailable(modal: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    [port] = ports.find_free_ports()
    provider = connect_provider("modal", modal.emulator, api_url=f"http://127.0.0.1:{port}")
    with monkeypatch.context() as patch:  # not for the end of the test, which lists the emulator's
        patch.setattr(vendor, "CONNECT_TIMEOUT_SECONDS", 0.3)
        with pytest.raises(Unavailable) as error:
            provider.list(modal.owner)
    assert error.value.cause == FailureCause.ENGINE_UNREACHABLE


@pytest.mark.parametrize(
    "outcome", [pytest.param(CUT_BEFORE, marks=pytest.mark.matrix("3 s, as the case of a cut after the request")), CUT_AFTER]
)
def test_upload_whose_connection_is_cut_is_complete(modal: Remote, outcome: str) -> None:
    ref, content = modal.start(), os.urandom(3 << 20)
    modal.fail("RPC /TaskExecStdinWrite", outcome, times=2)
    modal.provider.write_file(ref, "/data/large.bin", content)
    assert modal.provider.read_file(ref, "/data/large.bin", limit=4 << 20) == content


def test_listing_continues_over_pages(modal: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {modal.provider.create(modal.spec()) for _ in range(3)}
    monkeypatch.setattr(emulation, "PAGE_SIZE", 1)
    found = modal.provider.list(modal.owner)
    assert {sandbox.name for sandbox in found} == names
    assert all(abs(time.time() - sandbox.created_at.timestamp()) < 60 for sandbox in found)


def test_labels_with_characters_that_tags_cannot_have_do_not_prevent_a_create(modal: Remote) -> None:
    labels = {"agent": "did:plc:ada", "environment": "", "sandbox": "x" * 100}
    spec = SandboxSpec(modal.spec().name, modal.owner, labels=labels)
    modal.provider.create(spec)
    tags = modal.emulator.get_creation(spec.name)["tags"]
    assert (tags["agent"], tags["sandbox"], tags.get("environment")) == ("did-plc-ada", "x" * 63, None)


def test_name_of_another_owner_is_rejected_and_unknown_image_is_not_a_missing_sandbox(modal: Remote) -> None:
    ref = modal.start()
    with pytest.raises(Rejected, match="another owner"):
        modal.provider.create(SandboxSpec(ref, owner="another"))
    modal.fail("RPC /ImageGetOrCreate", 404)
    with pytest.raises(Rejected):
        modal.provider.create(modal.spec())


@pytest.mark.matrix("5 s of vendor calls: test_vendor_lifetimes.py has ends of lifetimes on the memory provider")
@pytest.mark.django_db(transaction=True)
def test_sandbox_that_reached_its_lifetime_ends_its_lease_and_the_next_one_has_the_stored_data(
    move_pool: Callable[[str], Pool], grant: Callable[..., Lease], emulators: GetEmulator
) -> None:
    move_pool("modal")

    def run(lease: Lease, script: str) -> bytes:
        command = Command(argv=["sh", "-c", script], timeout=MINUTE)
        return bytes(execution.exec_command(lease.pk, command, now=NOW)[0].stdout)

    lease = grant()
    run(lease, "echo kept >/data/f; echo lost >/workspace/w")
    emulators("modal").stop_idle(Sandbox.objects.get(holder=lease.pk).ref)
    with pytest.raises(LeaseEnded, match="lost"):
        run(lease, "true")
    assert run(grant(), "cat /data/f; [ -e /workspace/w ] || echo none") == b"kept\nnone\n"
