"""Outcome, cleanup and stored result of one-shot runs."""

import io
import tarfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from leases import leasing, one_shot, sweeps
from leases.errors import InvalidRequest, RateLimited
from leases.models import Lease
from leases.one_shot import OneShotOutcome, OneShotRequest, OneShotResult, run_once
from sandboxes.errors import CapacityExhausted, PoolDraining, QuotaExceeded, RunExists
from sandboxes.models import Pool, Quota, Run, Sandbox
from sandboxes.providers.errors import Rejected, Unavailable
from sandboxes.providers.memory import MemoryProvider
from sandboxes.sweeps import passes
from tests.conftest import MINUTE, NOW, SimulatedCrash, die
from tests.races.test_crashes import LATER, sweep
from tests.support.leases import update_pool
from tests.support.storage.tars import file, pack

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("hand-written SQL")]
ADA = "did:plc:ada"


@pytest.fixture
def make_request(pool: Pool) -> Callable[..., OneShotRequest]:
    """Factory of requests of the agent Ada in the pool of this test."""

    def make(*argv: str, **fields: Any) -> OneShotRequest:
        return OneShotRequest(**{"agent_did": ADA, "argv": argv or ("true",), "timeout": MINUTE, "pool": pool.name} | fields)

    return make


def pack_tar(**files: str) -> io.BytesIO:
    return pack(*(file(name, text.encode()) for name, text in files.items()))


def unpack_tar(tar: io.BytesIO) -> dict[str, str]:
    tar.seek(0)
    with tarfile.open(fileobj=tar, mode="r:") as members:
        return {member.name: members.extractfile(member).read().decode() for member in members if member.isreg()}  # type: ignore[union-attr]


def assert_nothing_is_left(pool: Pool, memory: MemoryProvider) -> None:
    assert memory.list(str(pool.owner)) == []
    assert set(Lease.objects.values_list("status", flat=True)) <= {"destroyed"}
    assert set(Sandbox.objects.values_list("state", flat=True)) <= {"destroyed"}
    assert not Run.objects.filter(ended_at__isnull=True).exists()
    assert (Pool.objects.get(pk=pool.pk).used, sum(Quota.objects.values_list("used", flat=True))) == (0, 0)


# --- outcomes -----------------------------------------------------------------------------------------------------


def test_a_run_returns_the_output_and_its_sandbox_is_destroyed(make_request, pool, memory) -> None:
    request = make_request("sh", "-c", "echo hello; echo oops >&2")
    result = run_once(request, now=NOW, actor="key lh_1")
    assert (result.outcome, result.exit_code, result.stdout, result.stderr) == (OneShotOutcome.OK, 0, b"hello\n", b"oops\n")
    assert (result.truncated, result.note, result.cleaned_up) == (False, "", True)
    lease, run = Lease.objects.get(), Run.objects.get()
    assert result.run_id == result.lease_id == lease.pk == run.pk == request.run_id
    assert (lease.environment_id, lease.environment_type_id, lease.end_reason) == (f"run-{run.pk}", "run", "released")
    assert_nothing_is_left(pool, memory)


def test_input_environment_and_directory_reach_the_command(make_request, memory) -> None:
    assert run_once(make_request("cat", stdin=b"\xff\0in"), now=NOW).stdout == b"\xff\0in"
    assert run_once(make_request("printenv", "WORD", env={"WORD": "x y"}), now=NOW).stdout == b"x y\n"
    assert run_once(make_request("pwd", cwd="/data"), now=NOW).stdout == b"/data\n"
    assert [run.env_names for run in Run.objects.order_by("-started_at") if run.env_names] == [["WORD"]]


@pytest.mark.parametrize(
    ("argv", "outcome", "exit_code"),
    [
        (["sh", "-c", "exit 3"], OneShotOutcome.FAILED, 3), (["no-such-program"], OneShotOutcome.FAILED, 127),
        (["sh", "-c", "kill -9 $$"], OneShotOutcome.FAILED, 137), (["sleep", "3600"], OneShotOutcome.TIMEOUT, 137),
        (["oom"], OneShotOutcome.OOM_KILLED, 137), (["echo", "hi"], OneShotOutcome.OK, 0),
    ],
)  # fmt: skip
def test_each_end_of_a_command_has_its_outcome_and_the_rows_contain_the_same_result(
    make_request, pool, memory, argv: list[str], outcome: OneShotOutcome, exit_code: int
) -> None:
    result = run_once(make_request(*argv), now=NOW)
    assert (result.outcome, result.exit_code, result.cleaned_up) == (outcome, exit_code, True)
    assert one_shot.load_result(Lease.objects.get()) == result
    assert_nothing_is_left(pool, memory)


def test_output_beyond_the_cap_is_dropped_and_reported(make_request, memory, settings) -> None:
    settings.EXEC_OUTPUT_CAP = 10
    result = run_once(make_request("echo", "x" * 100), now=NOW)
    assert (result.outcome, result.stdout, result.truncated) == (OneShotOutcome.OK, b"x" * 10, True)


@pytest.mark.parametrize(
    ("verb", "error", "outcome"),
    [
        ("create", Rejected("no such image"), OneShotOutcome.CONTAINER_FAILED),
        ("create", Unavailable("engine down"), OneShotOutcome.CONTAINER_FAILED),
        ("wait_ready", Unavailable("not ready"), OneShotOutcome.CONTAINER_FAILED),
        ("put_files", Unavailable("engine down"), OneShotOutcome.CONTAINER_FAILED),
        ("exec", Unavailable("engine down"), OneShotOutcome.CONTAINER_FAILED),
        ("create", ZeroDivisionError("a bug of ours"), OneShotOutcome.INTERNAL),
        ("put_files", OSError("a bug of ours"), OneShotOutcome.INTERNAL),
        ("exec", ZeroDivisionError("a bug of ours"), OneShotOutcome.INTERNAL),
    ],
)
def test_a_provider_error_in_any_call_leaves_no_sandbox(make_request, pool, memory, verb: str, error, outcome) -> None:
    memory.fail(verb, error)
    result = run_once(make_request(workspace=pack_tar(a="1")), now=NOW)
    assert (result.outcome, result.exit_code, result.cleaned_up) == (outcome, None, True)
    assert str(error) in result.note
    assert one_shot.load_result(Lease.objects.get()) == result
    assert_nothing_is_left(pool, memory)


def test_a_sandbox_lost_during_the_command_is_container_failed(make_request, pool, memory) -> None:
    memory.before("exec", lambda ref: memory.vanish(ref))
    result = run_once(make_request(), now=NOW)
    assert (result.outcome, result.exit_code, result.cleaned_up) == (OneShotOutcome.CONTAINER_FAILED, None, True)
    assert Lease.objects.get().end_reason == "lost"
    assert memory.calls[-1] == ("destroy", Sandbox.objects.get().ref)  # also removes the volumes of the lost container
    assert_nothing_is_left(pool, memory)


def test_a_run_ended_by_an_operator_is_internal(make_request, pool, memory) -> None:
    memory.before("exec", lambda ref: leasing.end(Lease.objects.get().pk, reason="operator", now=NOW))
    result = run_once(make_request(), now=NOW)
    assert (result.outcome, result.note, result.cleaned_up) == (OneShotOutcome.INTERNAL, "The lease ended (operator).", True)
    assert_nothing_is_left(pool, memory)


@pytest.mark.parametrize("error", [Unavailable("engine down"), ZeroDivisionError("a bug of ours")])
def test_an_unconfirmed_destroy_is_reported_and_finished_by_the_sweep(make_request, pool, memory, error) -> None:
    memory.fail("destroy", error)
    result = run_once(make_request("echo", "kept"), now=NOW)
    assert (result.outcome, result.stdout, result.cleaned_up) == (OneShotOutcome.OK, b"kept\n", False)
    assert Pool.objects.get(pk=pool.pk).used == 1
    memory.reset()
    sweeps.reclaim(now=NOW + 5 * MINUTE)
    assert_nothing_is_left(pool, memory)


def test_cleanup_waits_for_a_sweep_that_is_destroying_the_sandbox(make_request, pool, memory, at_checkpoint) -> None:
    at_checkpoint("run released", lambda: sweeps.reclaim(now=NOW + MINUTE))
    assert run_once(make_request(), now=NOW).cleaned_up
    assert memory.calls.count(("destroy", Sandbox.objects.get().ref)) == 1
    assert_nothing_is_left(pool, memory)


@pytest.mark.django_db(transaction=True)
def test_a_run_is_cleaned_up_after_a_failover(make_request, pool, memory, failover) -> None:
    failover(leasing, "end")
    assert run_once(make_request(), now=NOW).cleaned_up
    assert_nothing_is_left(pool, memory)


def test_an_interrupt_leaves_no_sandbox(make_request, pool, memory) -> None:
    memory.fail("exec", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run_once(make_request(), now=NOW)
    assert_nothing_is_left(pool, memory)


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"memory_mib": 15}, "limits.memory_mib"), ({"memory_mib": 4097}, "limits.memory_mib"),
        ({"timeout": timedelta(hours=24)}, "limits.timeout_seconds"), ({"pool": "no-such-pool"}, "pool"),
        ({"environment_type": "chess"}, "environment_type"),
    ],
)  # fmt: skip
def test_an_invalid_request_names_the_field_and_starts_nothing(make_request, memory, fields: dict, field: str) -> None:
    with pytest.raises(InvalidRequest) as wrong:
        run_once(make_request(**fields), now=NOW)
    assert wrong.value.extra["field"] == field
    assert not Lease.objects.exists()
    assert memory.calls == []


@pytest.mark.parametrize(
    ("change", "most", "error"),
    [({"draining": True}, None, PoolDraining), ({"capacity": 0}, None, CapacityExhausted), ({}, 0, QuotaExceeded)],
)
def test_without_capacity_the_run_is_refused_and_nothing_is_left(make_request, pool, memory, change, most, error) -> None:
    Quota.objects.create(pool=pool, agent_did=ADA, most=most)
    update_pool(pool, **change)
    with pytest.raises(error):
        run_once(make_request(), now=NOW)
    assert not Run.objects.exists()
    assert_nothing_is_left(pool, memory)


def test_a_run_that_is_not_admitted_gets_no_lease(make_request, memory) -> None:
    def refuse() -> None:
        raise RateLimited()

    with pytest.raises(RateLimited):
        run_once(make_request(), now=NOW, admit=refuse)
    assert not Lease.objects.exists()


def test_a_tar_that_cannot_be_unpacked_is_an_invalid_request(make_request, pool, memory) -> None:
    with pytest.raises(InvalidRequest, match="unpacked"):
        run_once(make_request(workspace=pack_tar(**{"../out": "x"})), now=NOW)
    assert_nothing_is_left(pool, memory)


def test_a_run_id_can_be_used_once(make_request, pool, memory) -> None:
    request = make_request("echo", "once")
    run_once(request, now=NOW)
    with pytest.raises(RunExists):
        run_once(request, now=NOW + MINUTE)
    assert [verb for verb, _ in memory.calls].count("exec") == 1


def test_a_concurrent_run_with_the_same_id_is_refused_without_side_effects(make_request, pool, memory, at_checkpoint) -> None:
    request = make_request("echo", "mine")

    def rival() -> None:
        with pytest.raises(RunExists):
            run_once(request, now=NOW)

    at_checkpoint("workspace in", rival)
    assert run_once(request, now=NOW).stdout == b"mine\n"
    assert Lease.objects.count() == Run.objects.count() == 1


# --- the workspace ------------------------------------------------------------------------------------------------


def test_the_workspace_is_copied_in_and_returned(make_request, pool, memory) -> None:
    output = io.BytesIO()
    result = run_once(make_request("sh", "-c", "cat a; echo new >b", workspace=pack_tar(a="1"), output=output), now=NOW)
    assert (result.outcome, result.stdout, result.workspace_returned) == (OneShotOutcome.OK, b"1", True)
    assert unpack_tar(output) == {"a": "1", "b": "new\n"}
    assert_nothing_is_left(pool, memory)


def test_a_workspace_without_a_tar_starts_empty_and_home_is_not_returned(make_request, memory) -> None:
    output = io.BytesIO()
    assert run_once(make_request("sh", "-c", "echo x >.home/junk", output=output), now=NOW).workspace_returned
    assert unpack_tar(output) == {}


@pytest.mark.parametrize("failure", ["too large", "engine down"])
def test_a_workspace_that_cannot_be_returned_adds_a_note_to_the_result(make_request, pool, memory, failure: str) -> None:
    if failure == "engine down":
        memory.fail("get_files", Unavailable(failure))
    request = make_request("echo", "done", workspace=pack_tar(a="1"), output=io.BytesIO(), max_returned_bytes=1)
    result = run_once(request, now=NOW)
    assert (result.outcome, result.stdout, result.cleaned_up) == (OneShotOutcome.OK, b"done\n", True)
    assert not result.workspace_returned and result.note.startswith("The workspace could not be returned: ")
    assert_nothing_is_left(pool, memory)


# --- memory -------------------------------------------------------------------------------------------------------


def test_the_memory_limit_is_the_requested_limit_or_the_limit_of_the_pool(make_request, pool, memory) -> None:
    run_once(make_request(memory_mib=64), now=NOW)
    assert Sandbox.objects.get().memory_mib == 64
    run_once(make_request(), now=NOW)
    assert set(Sandbox.objects.values_list("memory_mib", flat=True)) == {64, pool.memory_mib}


def test_only_a_run_with_the_pools_memory_claims_a_warm_sandbox(make_request, pool, memory) -> None:
    update_pool(pool, warm_target=1)
    passes.warm_pools(now=NOW)
    warm_id = Sandbox.objects.get().pk
    run_once(make_request(memory_mib=pool.memory_mib * 2), now=NOW)
    assert Sandbox.objects.get(pk=warm_id).state == "warm"
    run_once(make_request(memory_mib=pool.memory_mib), now=NOW)
    assert Sandbox.objects.get(pk=warm_id).state == "destroyed"


# --- stored result ------------------------------------------------------------------------------------------------


def test_a_running_run_has_no_outcome(make_request, memory) -> None:
    seen: list[OneShotResult] = []
    memory.before("exec", lambda ref: seen.append(one_shot.load_result(Lease.objects.get())))
    run_once(make_request(), now=NOW)
    assert [(result.outcome, result.cleaned_up) for result in seen] == [(None, False)]


# --- crashes ------------------------------------------------------------------------------------------------------

STEPS = [
    "run granted", "reserved", "created", "prepared", "run opened", "workspace in", "command ended", "run answered",
    "run released", "destroy claimed", "destroy answered",
]  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
def test_a_crash_at_any_step_leaves_nothing_after_the_sweeps(step: str, make_request, pool, memory, crash_at) -> None:
    request = make_request(workspace=pack_tar(a="1"), output=io.BytesIO())
    with crash_at(step):
        run_once(request, now=NOW)
    sweep(NOW + request.max_duration)
    if step == "workspace in":
        result = one_shot.load_result(Lease.objects.get())
        assert (result.outcome, result.exit_code, result.cleaned_up) == (OneShotOutcome.INTERNAL, None, True)
    assert_nothing_is_left(pool, memory)
    with pytest.raises(RunExists):
        run_once(request, now=LATER)


VERBS = ["create", "wait_ready", "put_files", "exec", "get_files", "destroy"]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_around_any_provider_call_leaves_nothing_after_the_sweeps(when, verb, make_request, pool, memory) -> None:
    request = make_request(workspace=pack_tar(a="1"), output=io.BytesIO())
    with getattr(memory, when)(verb, die), pytest.raises(SimulatedCrash):
        run_once(request, now=NOW)
    sweep(NOW + request.max_duration)
    sweep(LATER)
    assert_nothing_is_left(pool, memory)


def test_no_sweep_ends_a_run_within_its_time(make_request, pool, memory) -> None:
    request = make_request("echo", "kept", workspace=pack_tar(a="1"), output=io.BytesIO())
    memory.before("exec", lambda ref: sweep(NOW + request.timeout + request.copy_timeout))
    result = run_once(request, now=NOW)
    assert (result.outcome, result.stdout) == (OneShotOutcome.OK, b"kept\n")


def test_the_agents_data_is_available_and_stored(make_request, memory) -> None:
    run_once(make_request("sh", "-c", "echo mine >/data/diary"), now=NOW)
    assert run_once(make_request("cat", "/data/diary"), now=NOW + MINUTE).stdout == b"mine\n"


def test_the_complete_output_is_returned_and_a_part_is_stored(make_request, memory, settings) -> None:
    settings.RUN_OUTPUT_KEPT = 4
    result = run_once(make_request("echo", "hello"), now=NOW)
    assert (result.stdout, result.truncated) == (b"hello\n", False)
    stored = one_shot.load_result(Lease.objects.get())
    assert (stored.stdout, stored.truncated) == (b"hell", True)
