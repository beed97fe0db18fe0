"""Sandbox and AsyncSandbox against a live server."""

import asyncio
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leasehold import AsyncSandbox, CommandFailed, InvalidRequest, LeaseEnded, LeaseholdError, NotFound, Sandbox, SandboxClosed
from leases.models import Lease, LeaseStatus
from sandboxes.models import Run
from tests.api.conftest import ApiClient

pytestmark = pytest.mark.django_db(transaction=True)
Options = dict[str, Any]


def list_active() -> list[Lease]:
    return [*Lease.objects.filter(status=LeaseStatus.ACTIVE)]


def test_commands_and_their_results(options: Options) -> None:
    with Sandbox(**options) as box:
        result = box.exec("cat; echo $GREETING >&2; pwd; exit 3", env={"GREETING": "héllo"}, cwd="/", stdin=b"\xff\0in\n")
        assert (result.exit_code, result.stdout_bytes, result.stderr) == (3, b"\xff\0in\n/\n", "héllo\n")
        assert (result.ok, result.timed_out, result.run_id) == (False, False, str(Run.objects.get(exit_code=3).pk))
        assert box.exec(["printf", "%s", "a b"]).stdout == "a b"
        run_id = str(uuid.uuid4())
        first, again = (box.exec("date +%N", run_id=run_id) for _ in range(2))
        assert (first.run_id, again.stdout) == (run_id, first.stdout)
        assert box.exec("sleep 30", timeout=1).timed_out
        with pytest.raises(CommandFailed, match="exited with 1: bad") as failed:
            box.exec("echo bad >&2; false", check=True)
        assert failed.value.result.stderr == "bad\n"


def test_output_is_streamed_with_its_result(options: Options) -> None:
    with Sandbox(**options) as box:
        with box.stream("echo out; echo err >&2; exit 4") as parts:
            assert sorted((part.stream, part.data) for part in parts) == [("stderr", "err\n"), ("stdout", "out\n")]
        assert parts.result is not None
        assert parts.result.exit_code == 4
        assert box.stream(["true"]).wait().ok


def test_files_and_directories(options: Options, tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    (source / "a b").mkdir(parents=True)
    (source / "a b" / "x.txt").write_text("x")
    (source / "link").symlink_to("a b/x.txt")
    with Sandbox(**options) as box:
        box.files.write("notes/ü?#.md", "text")
        assert box.files.read("/workspace/notes/ü?#.md") == b"text"
        assert [entry["name"] for entry in box.files.list("notes")] == ["ü?#.md"]
        box.files.write("/data/memory.txt", b"m")
        assert box.files.read_text("/data/memory.txt") == "m"
        box.files.remove("notes/ü?#.md")
        with pytest.raises(NotFound):
            box.files.read("notes/ü?#.md")
        with pytest.raises(ValueError, match="not below"):
            box.files.remove("../etc/passwd")
        box.files.upload(source, "up/here")
        box.exec("echo y > 'up/here/a b/y.txt'", check=True)
        box.files.download("up/here", copy)
    assert sorted(path.relative_to(copy).as_posix() for path in copy.rglob("*")) == ["a b", "a b/x.txt", "a b/y.txt", "link"]
    assert (copy / "link").read_text() == "x"


def test_agents_and_processes(options: Options) -> None:
    messages = ['{"type": "assistant", "text": "Hi"}', '{"type": "result", "text": "Done."}']
    with Sandbox(**options) as box:
        agent = box.agent("\n".join(messages), cli="program", argv=["cat"])
        assert [message["text"] for message in agent.messages()] == ["Hi", "Done."]
        run = agent.wait()
        assert (run["state"], run["result"], agent.interrupt()["state"]) == ("completed", "Done.", "completed")
        process = box.processes.start("echo ready; sleep 60", name="dev", wait_for="ready")
        assert (process["found"], box.processes.logs(process["process_id"])["content"]) == (True, "ready\n")
        assert box.processes.kill(process["process_id"])["state"] == "killed"
        assert [each["name"] for each in box.processes.list()] == ["dev"]


def test_errors_name_the_problem_and_its_fields(options: Options) -> None:
    with pytest.raises(InvalidRequest) as too_much, Sandbox(**options, resources={"gpu": 1}):
        pass
    assert [*too_much.value.field_errors] == ["resources.gpu"]
    with Sandbox(**options) as box, pytest.raises(InvalidRequest) as failed:
        box.exec([], timeout=0)
    error = failed.value
    assert (error.status, error.code, error.retryable, set(error.field_errors)) == (
        400, "invalid", False, {"argv", "timeout_seconds"},
    )  # fmt: skip
    with pytest.raises(InvalidRequest, match="no such environment type"):
        Sandbox(**options | {"environment_type": "chess"}).open()
    assert options["api_key"] not in repr(error) + repr(error.problem)


def test_lease_is_released_at_the_end_and_after_an_exception(options: Options) -> None:
    with Sandbox(**options) as box:
        [lease] = list_active()
        assert (str(lease.pk), lease.ttl.total_seconds()) == (box.lease_id, 120)
    box.release()
    for use in (lambda: box.exec("true"), box.open):
        with pytest.raises(SandboxClosed):
            use()
    with pytest.raises(ZeroDivisionError), Sandbox(**options):
        raise ZeroDivisionError
    assert [*Lease.objects.values_list("end_reason", flat=True)] == ["released"] * 2


def test_lease_of_another_program_is_not_released(options: Options) -> None:
    with Sandbox(environment="shared", **options) as first:
        with Sandbox(environment="shared", **options) as second:
            assert (second.lease_id, second.lease["is_new"]) == (first.lease_id, False)
        assert len(list_active()) == 1
    assert list_active() == []
    with Sandbox(environment="kept", release=False, **options):
        pass
    assert [lease.environment_id for lease in list_active()] == ["kept"]


def test_end_of_the_lease_is_an_error_of_the_next_call(options: Options, ada: ApiClient) -> None:
    with Sandbox(**options) as box:
        ada.post(f"leases/{box.lease_id}/release")
        with pytest.raises(LeaseEnded) as ended:
            box.exec("true")
    assert ended.value.problem["end_reason"] == "released"


def test_async_sandbox_has_the_same_surface(options: Options, tmp_path: Path) -> None:
    async def use() -> None:
        async with AsyncSandbox(**options) as box:
            results = await asyncio.gather(box.exec("echo 1"), box.exec("echo 2"))
            assert [result.stdout for result in results] == ["1\n", "2\n"]
            async with box.stream("echo out; exit 4") as parts:
                assert [part.data async for part in parts] == ["out\n"]
            assert parts.result is not None
            assert parts.result.exit_code == 4
            await box.files.write("d/x", "x")
            assert await box.files.read_text("d/x") == "x"
            await box.files.download("d", tmp_path / "copy")
            await box.files.upload(tmp_path / "copy", "e")
            assert [entry["name"] for entry in await box.files.list("e")] == ["x"]
            await box.files.remove("e/x")
            agent = await box.agent('{"text": "Hi"}', cli="program", argv=["cat"])
            assert [message async for message in agent.messages()] == [{"text": "Hi"}]
            assert (await agent.wait())["state"] == "completed"
            process = await box.processes.start(["sleep", "60"])
            assert (await box.processes.kill(process["process_id"]))["state"] == "killed"
        with pytest.raises(SandboxClosed):
            await box.exec("true")

    asyncio.run(use())
    assert list_active() == []


def test_sandboxes_have_the_same_public_methods() -> None:
    def list_public(owner: type) -> set[str]:
        return {name for name in dir(owner) if not name.startswith("_")}

    pairs: list[tuple[type, type]] = [(Sandbox, AsyncSandbox)]
    for name in ("files", "processes"):
        get: Callable[[Any], Any] = getattr(Sandbox, name).fget
        get_async: Callable[[Any], Any] = getattr(AsyncSandbox, name).fget
        boxes = [owner("x", url="http://127.0.0.1:1", api_key="k") for owner in (Sandbox, AsyncSandbox)]
        pairs.append((type(get(boxes[0])), type(get_async(boxes[1]))))
    for plain, awaited in pairs:
        assert list_public(plain) == list_public(awaited)
    with pytest.raises(LeaseholdError, match="not open"):
        _ = boxes[0].lease
