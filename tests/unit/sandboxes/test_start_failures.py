"""Failed starts of a pool, from the first until a start succeeds, and the errors that their callers get."""

import pytest

from leases import execution
from leases.api.files.base import build_command
from sandboxes.errors import EngineDiskFull, ImageMissing, SandboxDiskFull, SandboxNotReady
from sandboxes.failures import find_cause, needs_operator
from sandboxes.models import Host, Pool, Run
from sandboxes.pool import start_breaker
from sandboxes.providers.base import WORKSPACE
from sandboxes.providers.errors import FailureCause, OutOfSpace, Rejected, Unavailable
from sandboxes.providers.file_verbs import raise_for_exit_code
from sandboxes.redaction.texts import omit_answers
from sandboxes.state import disk_space
from sandboxes.sweeps import passes
from tests.conftest import MINUTE, NOW
from tests.support.leases import evict, run, write

pytestmark = pytest.mark.django_db


@pytest.fixture
def lease(grant, pool):
    Pool.objects.exclude(pk=pool.pk).update(draining=True)
    return grant()


def put_file(lease) -> None:
    command = build_command("write", "/workspace/f", root=WORKSPACE)
    execution.change_files(
        lease.pk, command, lambda provider, sandbox: provider.write_file(sandbox.ref, "/workspace/f", b"x"), now=NOW + MINUTE
    )


def get_failures(pool: Pool) -> tuple:
    row = Pool.objects.get(pk=pool.pk)
    return row.starts_failing_since, row.start_error_code, row.start_error


def test_failed_starts_are_recorded_until_one_succeeds(lease, grant, pool, memory) -> None:
    with memory.fail("create", Rejected("no such runtime"), times=1), pytest.raises(SandboxNotReady):
        run(lease, now=NOW)
    with memory.fail("wait_ready", Unavailable("silent", cause=FailureCause.TIMEOUT), times=1), pytest.raises(SandboxNotReady):
        run(lease, now=NOW + MINUTE)
    since, code, error = get_failures(pool)
    assert NOW <= since < NOW + MINUTE
    assert (code, error) == ("timeout", "silent")
    run(lease, now=NOW + 2 * MINUTE)
    assert get_failures(pool) == (None, "", "")


def test_failed_wakes_count_and_a_wake_ends_the_failures(lease, pool, memory) -> None:
    write(lease)
    evict(lease)
    with memory.fail("put_files", Unavailable("away"), times=1), pytest.raises(SandboxNotReady):
        run(lease, now=NOW + MINUTE)
    since, code, _ = get_failures(pool)
    assert NOW + MINUTE <= since < NOW + 2 * MINUTE
    assert code == "provider_unavailable"
    run(lease, now=NOW + 2 * MINUTE)
    assert get_failures(pool)[0] is None


def test_missing_image_has_a_code_of_its_own_and_needs_an_operator(lease, pool, memory, settings) -> None:
    memory.missing_images = {settings.SANDBOX_IMAGE}
    for _ in range(start_breaker.MAX_START_FAILURES + 1):
        with pytest.raises(ImageMissing) as raised:
            run(lease)
    assert (raised.value.code, find_cause(raised.value), needs_operator(raised.value)) == (
        "image_missing",
        "image_unusable",
        True,
    )
    assert get_failures(pool)[1] == "image_unusable"
    assert not start_breaker.is_open(Host.objects.get(provider="memory"), now=NOW)  # other images of the host start
    memory.missing_images = set()
    run(lease)
    assert get_failures(pool)[0] is None


def test_full_disk_at_a_start_is_disk_full_with_the_text_of_the_engine_quoted(lease, pool, memory) -> None:
    failing = memory.fail("create", OutOfSpace("mkdir /var/lib/docker/overlay2/x: no space left"))
    with failing, pytest.raises(EngineDiskFull) as raised:
        run(lease)
    assert (raised.value.code, needs_operator(raised.value)) == ("disk_full", False)
    _, code, error = get_failures(pool)
    assert code == "disk_full" and "/var/lib" in error and "/var/lib" not in omit_answers(str(raised.value))


def test_full_disk_at_a_write_is_disk_full_and_the_run_failed(lease, memory) -> None:
    run(lease)
    failing = memory.fail("write_file", OutOfSpace("[Errno 28] No space left on device: '/srv/leasehold/f'"))
    with failing, pytest.raises(SandboxDiskFull) as full:
        put_file(lease)
    assert "/srv" not in str(full.value)
    assert (full.value.code, full.value.retry_after, find_cause(full.value)) == ("disk_full", 60, "disk_full")
    recorded = Run.objects.latest("started_at")
    assert (recorded.outcome, recorded.error_code) == ("failed", "disk_full")
    put_file(lease)


@pytest.mark.parametrize("number", [28, 122])
def test_exit_code_of_a_file_verb_on_a_full_disk_is_out_of_space(number: int) -> None:
    with pytest.raises(OutOfSpace):
        raise_for_exit_code(1, f"[Errno {number}] No space left on device: 'x'")
    with pytest.raises(Unavailable) as other:
        raise_for_exit_code(1, "[Errno 5] Input/output error")
    assert not isinstance(other.value, OutOfSpace)


def test_start_that_a_sweep_gives_up_counts_as_failed(lease, pool, memory) -> None:
    def die(ref: str) -> None:
        raise SystemExit

    with memory.before("wait_ready", die), pytest.raises(SystemExit):
        run(lease, now=NOW)
    assert get_failures(pool)[0] is None
    assert passes.recover_stalled(now=NOW + 60 * MINUTE).counts["stalled starts destroyed"] == 1
    since, code, _ = get_failures(pool)
    assert (since, code) == (NOW + 60 * MINUTE, "start_stalled")


def test_engine_that_does_not_respond_has_no_known_disk(memory, settings) -> None:
    settings.MIN_FREE_DISK = 1
    with memory.fail("find_disk", Unavailable("away")):
        assert disk_space.measure_engine_space(memory) is None
