"""One-shot runs: how each ends, and that nothing is left of it."""

import io
import tarfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from leases import leasing, one_shot, sweeps
from leases.errors import Conflict, InvalidRequest, RateLimited
from leases.models import Lease
from leases.one_shot import OneShotOutcome, OneShotRequest, OneShotResult, run_once
from sandboxes import sweeps as below
from sandboxes.errors import CapacityExhausted, PoolDraining, QuotaExceeded
from sandboxes.models import Pool, Quota, Run, Sandbox
from sandboxes.providers.base import Rejected, Unavailable
from sandboxes.providers.memory import MemoryProvider
from tests.conftest import MINUTE, NOW, SimulatedCrash
from tests.races.test_crashes import LATER, die, sweep

pytestmark = pytest.mark.django_db
ADA = "did:plc:ada"


@pytest.fixture
def wish(pool: Pool) -> Callable[..., OneShotRequest]:
    """What Ada wants to run in this test's pool."""

    def make(*argv: str, **fields: Any) -> OneShotRequest:
        return OneShotRequest(**{"agent_did": ADA, "argv": argv or ("true",), "timeout": MINUTE, "pool": pool.name} | fields)

    return make


def packed(**files: str) -> io.BytesIO:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    out.seek(0)
    return out


def unpacked(tar: io.BytesIO) -> dict[str, str]:
    tar.seek(0)
    with tarfile.open(fileobj=tar, mode="r:") as members:
        return {member.name: members.extractfile(member).read().decode() for member in members if member.isreg()}  # type: ignore[union-attr]


def assert_nothing_is_left(pool: Pool, memory: MemoryProvider) -> None:
    assert memory.list(str(pool.owner)) == []
    assert set(Lease.objects.values_list("status", flat=True)) <= {"destroyed"}
    assert set(Sandbox.objects.values_list("state", flat=True)) <= {"destroyed"}
    assert not Run.objects.filter(ended_at__isnull=True).exists()
    assert (Pool.objects.get(pk=pool.pk).used, sum(Quota.objects.values_list("used", flat=True))) == (0, 0)


# --- how it ends --------------------------------------------------------------------------------------------------


def test_a_run_answers_what_its_command_said_and_is_gone(wish, pool, memory) -> None:
    asked = wish("sh", "-c", "echo hello; echo oops >&2")
    result = run_once(asked, now=NOW, actor="key lh_1")
    assert (result.outcome, result.exit_code, result.stdout, result.stderr) == (OneShotOutcome.OK, 0, b"hello\n", b"oops\n")
    assert (result.truncated, result.note, result.cleaned_up) == (False, "", True)
    lease, run = Lease.objects.get(), Run.objects.get()
    assert result.run_id == result.lease_id == lease.pk == run.pk == asked.run_id
    assert (lease.environment_id, lease.environment_type_id, lease.end_reason) == (f"run-{run.pk}", "run", "released")
    assert_nothing_is_left(pool, memory)


def test_input_environment_and_directory_reach_the_command(wish, memory) -> None:
    assert run_once(wish("cat", stdin=b"\xff\0in"), now=NOW).stdout == b"\xff\0in"
    assert run_once(wish("printenv", "WORD", env={"WORD": "x y"}), now=NOW).stdout == b"x y\n"
    assert run_once(wish("pwd", cwd="/data"), now=NOW).stdout == b"/data\n"
    assert [run.env_names for run in Run.objects.order_by("-started_at") if run.env_names] == [["WORD"]]


@pytest.mark.parametrize(
    ("argv", "outcome", "exit_code"),
    [
        (["sh", "-c", "exit 3"], OneShotOutcome.FAILED, 3),
        (["no-such-program"], OneShotOutcome.FAILED, 127),
        (["sh", "-c", "kill -9 $$"], OneShotOutcome.FAILED, 137),
        (["sleep", "3600"], OneShotOutcome.TIMEOUT, 137),
        (["oom"], OneShotOutcome.OOM_KILLED, 137),
    ],
)
def test_each_end_of_a_command_has_its_name(
    wish, pool, memory, argv: list[str], outcome: OneShotOutcome, exit_code: int
) -> None:
    result = run_once(wish(*argv), now=NOW)
    assert (result.outcome, result.exit_code, result.cleaned_up) == (outcome, exit_code, True)
    assert_nothing_is_left(pool, memory)


def test_output_past_the_cap_is_dropped_and_that_is_said(wish, memory, settings) -> None:
    settings.EXEC_OUTPUT_CAP = 10
    result = run_once(wish("echo", "x" * 100), now=NOW)
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
def test_a_provider_that_fails_at_any_verb_leaves_nothing(
    wish, pool, memory, verb: str, error, outcome: OneShotOutcome
) -> None:
    memory.fail(verb, error)
    result = run_once(wish(workspace=packed(a="1")), now=NOW)
    assert (result.outcome, result.exit_code, result.cleaned_up) == (outcome, None, True)
    assert str(error) in result.note
    assert_nothing_is_left(pool, memory)


def test_a_sandbox_that_vanishes_under_its_command_is_a_failed_container(wish, pool, memory) -> None:
    memory.before("exec", lambda ref: memory.vanish(ref))
    result = run_once(wish(), now=NOW)
    assert (result.outcome, result.exit_code, result.cleaned_up) == (OneShotOutcome.CONTAINER_FAILED, None, True)
    assert Lease.objects.get().end_reason == "lost"
    assert memory.calls[-1] == ("destroy", Sandbox.objects.get().ref)  # what a container leaves, its volumes, go with it
    assert_nothing_is_left(pool, memory)


def test_an_operator_who_ends_it_meanwhile_has_ended_it(wish, pool, memory) -> None:
    memory.before("exec", lambda ref: leasing.end(Lease.objects.get().pk, reason="operator", now=NOW))
    result = run_once(wish(), now=NOW)
    assert (result.outcome, result.note, result.cleaned_up) == (OneShotOutcome.INTERNAL, "The lease ended (operator).", True)
    assert_nothing_is_left(pool, memory)


@pytest.mark.parametrize("error", [Unavailable("engine down"), ZeroDivisionError("a bug of ours")])
def test_a_destroy_that_cannot_be_confirmed_is_said_and_the_sweep_goes_on(wish, pool, memory, error) -> None:
    memory.fail("destroy", error)
    result = run_once(wish("echo", "kept"), now=NOW)
    assert (result.outcome, result.stdout, result.cleaned_up) == (OneShotOutcome.OK, b"kept\n", False)
    assert Pool.objects.get(pk=pool.pk).used == 1
    memory.reset()
    sweeps.reclaim(now=NOW + 3 * MINUTE)
    assert_nothing_is_left(pool, memory)


def test_a_sweep_that_is_at_it_already_is_waited_for(wish, pool, memory, at_checkpoint) -> None:
    at_checkpoint("run released", lambda: sweeps.reclaim(now=NOW + MINUTE))
    assert run_once(wish(), now=NOW).cleaned_up
    assert memory.calls.count(("destroy", Sandbox.objects.get().ref)) == 1
    assert_nothing_is_left(pool, memory)


def test_a_person_who_interrupts_it_leaves_nothing(wish, pool, memory) -> None:
    memory.fail("exec", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run_once(wish(), now=NOW)
    assert_nothing_is_left(pool, memory)


# --- what does not begin ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"memory_mib": 15}, "limits.memory_mib"), ({"memory_mib": 4097}, "limits.memory_mib"),
        ({"timeout": timedelta(hours=24)}, "limits.timeout_seconds"), ({"pool": "no-such-pool"}, "pool"),
        ({"environment_type": "chess"}, "environment_type"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_wish_is_said_and_nothing_begins(wish, memory, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as wrong:
        run_once(wish(**fields), now=NOW)
    assert wrong.value.extra["field"] == field
    assert not Lease.objects.exists()
    assert memory.calls == []


@pytest.mark.parametrize(
    ("change", "most", "error"),
    [({"draining": True}, None, PoolDraining), ({"capacity": 0}, None, CapacityExhausted), ({}, 0, QuotaExceeded)],
)
def test_without_a_place_it_is_refused_and_nothing_is_left(wish, pool, memory, change: dict, most: int | None, error) -> None:
    Quota.objects.create(pool=pool, agent_did=ADA, most=most)
    Pool.objects.filter(pk=pool.pk).update(**change)
    with pytest.raises(error):
        run_once(wish(), now=NOW)
    assert not Run.objects.exists()
    assert_nothing_is_left(pool, memory)


def test_whoever_may_not_have_a_lease_has_no_run(wish, memory) -> None:
    def no() -> None:
        raise RateLimited()

    with pytest.raises(RateLimited):
        run_once(wish(), now=NOW, admit=no)
    assert not Lease.objects.exists()


def test_a_tar_that_does_not_fit_over_the_workspace_is_the_callers_fault(wish, pool, memory) -> None:
    with pytest.raises(InvalidRequest, match="unpacked"):
        run_once(wish(workspace=packed(**{"../out": "x"})), now=NOW)
    assert_nothing_is_left(pool, memory)


def test_an_id_is_run_once(wish, pool, memory) -> None:
    asked = wish("echo", "once")
    run_once(asked, now=NOW)
    with pytest.raises(Conflict):
        run_once(asked, now=NOW + MINUTE)
    assert [verb for verb, _ in memory.calls].count("exec") == 1


def test_a_rival_with_the_same_id_is_refused_and_takes_nothing_away(wish, pool, memory, at_checkpoint) -> None:
    asked = wish("echo", "mine")

    def rival() -> None:
        with pytest.raises(Conflict):
            run_once(asked, now=NOW)

    at_checkpoint("workspace in", rival)
    assert run_once(asked, now=NOW).stdout == b"mine\n"
    assert Lease.objects.count() == Run.objects.count() == 1


# --- the workspace ------------------------------------------------------------------------------------------------


def test_the_workspace_goes_in_and_comes_back_as_the_command_left_it(wish, pool, memory) -> None:
    back = io.BytesIO()
    result = run_once(wish("sh", "-c", "cat a; echo new >b", workspace=packed(a="1"), output=back), now=NOW)
    assert (result.outcome, result.stdout, result.workspace_returned) == (OneShotOutcome.OK, b"1", True)
    assert unpacked(back) == {"a": "1", "b": "new\n"}
    assert_nothing_is_left(pool, memory)


def test_a_workspace_without_a_tar_is_empty_and_its_home_does_not_come_back(wish, memory) -> None:
    back = io.BytesIO()
    assert run_once(wish("sh", "-c", "echo x >.home/junk", output=back), now=NOW).workspace_returned
    assert unpacked(back) == {}


@pytest.mark.parametrize("why", ["too large", "engine down"])
def test_a_workspace_that_does_not_come_back_is_a_note_beside_the_commands_end(wish, pool, memory, why: str) -> None:
    if why == "engine down":
        memory.fail("get_files", Unavailable(why))
    result = run_once(wish("echo", "done", workspace=packed(a="1"), output=io.BytesIO(), max_returned_bytes=1), now=NOW)
    assert (result.outcome, result.stdout, result.workspace_returned, result.cleaned_up) == (
        OneShotOutcome.OK,
        b"done\n",
        False,
        True,
    )
    assert result.note.startswith("The workspace could not be returned: ")
    assert_nothing_is_left(pool, memory)


# --- memory -------------------------------------------------------------------------------------------------------


def test_its_memory_is_what_was_asked_for_else_the_pools(wish, pool, memory) -> None:
    run_once(wish(memory_mib=64), now=NOW)
    assert Sandbox.objects.get().memory_mib == 64
    run_once(wish(), now=NOW)
    assert set(Sandbox.objects.values_list("memory_mib", flat=True)) == {64, pool.memory_mib}


def test_only_a_run_with_the_pools_memory_takes_what_is_ready(wish, pool, memory) -> None:
    Pool.objects.filter(pk=pool.pk).update(warm_target=1)
    below.warm_pools(now=NOW)
    ready = Sandbox.objects.get().pk
    run_once(wish(memory_mib=pool.memory_mib * 2), now=NOW)
    assert Sandbox.objects.get(pk=ready).state == "warm"
    run_once(wish(memory_mib=pool.memory_mib), now=NOW)
    assert Sandbox.objects.get(pk=ready).state == "destroyed"


# --- what is stored of it -----------------------------------------------------------------------------------------


def test_the_rows_say_afterwards_what_the_call_said(wish, memory) -> None:
    for argv in (["echo", "hi"], ["false"], ["sleep", "3600"], ["oom"]):
        said = run_once(wish(*argv), now=NOW)
        assert one_shot.load_result(Lease.objects.get(pk=said.run_id)) == said
    memory.fail("create", Rejected("no such image"))
    said = run_once(wish(), now=NOW)
    assert one_shot.load_result(Lease.objects.get(pk=said.run_id)) == said


def test_while_it_runs_it_has_no_outcome(wish, memory) -> None:
    seen: list[OneShotResult] = []
    memory.before("exec", lambda ref: seen.append(one_shot.load_result(Lease.objects.get())))
    run_once(wish(), now=NOW)
    assert [(result.outcome, result.cleaned_up) for result in seen] == [(None, False)]


# --- the process dies ---------------------------------------------------------------------------------------------

STEPS = [
    "run granted", "reserved", "created", "prepared", "run opened", "workspace in", "command ended", "run answered",
    "run released", "destroy claimed", "destroy answered",
]  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
def test_dying_at_any_step_leaves_nothing_after_the_sweeps(step: str, wish, pool, memory, at_checkpoint) -> None:
    at_checkpoint(step, die)
    asked = wish(workspace=packed(a="1"), output=io.BytesIO())
    with pytest.raises(SimulatedCrash):
        run_once(asked, now=NOW)
    sweep(NOW + asked.max_duration)
    assert_nothing_is_left(pool, memory)
    with pytest.raises(Conflict):
        run_once(asked, now=LATER)


VERBS = ["create", "wait_ready", "put_files", "exec", "get_files", "destroy"]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_dying_around_any_call_to_the_provider_leaves_nothing_after_the_sweeps(when, verb, wish, pool, memory) -> None:
    asked = wish(workspace=packed(a="1"), output=io.BytesIO())
    with getattr(memory, when)(verb, lambda ref: die()), pytest.raises(SimulatedCrash):
        run_once(asked, now=NOW)
    sweep(NOW + asked.max_duration)
    sweep(LATER)
    assert_nothing_is_left(pool, memory)


def test_until_its_time_is_over_no_sweep_takes_a_run_away(wish, pool, memory) -> None:
    asked = wish("echo", "kept", workspace=packed(a="1"), output=io.BytesIO())
    memory.before("exec", lambda ref: sweep(NOW + asked.timeout + asked.copy_timeout))
    result = run_once(asked, now=NOW)
    assert (result.outcome, result.stdout) == (OneShotOutcome.OK, b"kept\n")


def test_how_the_run_of_a_dead_process_ended_is_internal(wish, memory, at_checkpoint) -> None:
    at_checkpoint("workspace in", die)
    asked = wish()
    with pytest.raises(SimulatedCrash):
        run_once(asked, now=NOW)
    sweep(NOW + asked.max_duration)
    result = one_shot.load_result(Lease.objects.get())
    assert (result.outcome, result.exit_code, result.cleaned_up) == (OneShotOutcome.INTERNAL, None, True)


def test_what_its_agent_keeps_is_there_and_is_kept(wish, memory) -> None:
    run_once(wish("sh", "-c", "echo mine >/data/diary"), now=NOW)
    assert run_once(wish("cat", "/data/diary"), now=NOW + MINUTE).stdout == b"mine\n"


def test_all_of_the_output_is_answered_and_what_the_run_keeps_is_stored(wish, memory, settings) -> None:
    settings.RUN_OUTPUT_KEPT = 4
    said = run_once(wish("echo", "hello"), now=NOW)
    assert (said.stdout, said.truncated) == (b"hello\n", False)
    kept = one_shot.load_result(Lease.objects.get())
    assert (kept.stdout, kept.truncated) == (b"hell", True)
