"""Docker provider: isolation, limits, timeouts and destruction, beyond the conformance suite."""

import io
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from django.core.management import CommandError, call_command
from docker import APIClient

from leases import execution, leasing
from sandboxes.agent.client import AgentConnection
from sandboxes.models import Pool, Sandbox
from sandboxes.providers.base import PROCESSOR_COUNT_VARIABLES, ResourceUsage, SandboxSpec
from sandboxes.providers.command_results import ExecResult
from sandboxes.providers.docker import commands, engine, exec_stream
from sandboxes.providers.docker.engine import Cgroup, Engine
from sandboxes.providers.docker.exec_stream import EngineExec
from sandboxes.providers.docker.provider import DockerProvider, is_daemon_available
from sandboxes.providers.errors import Missing, Rejected, Stopped, TooLarge, Unavailable
from sandboxes.runs.operations import Command
from sandboxes.sweeps import reconciliation
from tests.conftest import DOCKER_IMAGE, MINUTE, NOW
from tests.docker.test_sealed import Cell
from tests.support.sandbox_agent import Gateway
from tests.support.storage.tars import file, pack
from tests.support.waiting import run_with_growing_timeouts, wait_until

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("docker_ready")]
BOMB = """
import os
while True:
    try: os.fork()
    except OSError: pass
"""
HOG = "x = b'x' * (1 << 30)"


@dataclass
class Box(Cell):
    """Sandbox with 128 MiB and 64 processes."""

    owner: str


def docker(*argv: str) -> str:
    return subprocess.run(["docker", *argv], check=True, capture_output=True, text=True).stdout


def make_box(owner: str, agent: Path | None = None) -> Box:
    provider, labels = DockerProvider(), {"agent": "did:plc:ada", "owner": "unknown-owner", "name": "x"}
    spec = SandboxSpec(owner, owner, memory_mib=128, pids=64, labels=labels, agent=agent)
    box = Box(provider, provider.create(spec), owner=owner)
    provider.wait_ready(box.ref, timeout=MINUTE)
    return box


@contextmanager
def make_owner() -> Iterator[str]:
    """Return a unique owner. Afterwards destroy all its sandboxes."""
    name, provider = f"lhd-{uuid4().hex[:16]}", DockerProvider()
    try:
        yield name
    finally:
        for found in provider.list(name):
            provider.destroy(found.ref)


@pytest.fixture
def owner() -> Iterator[str]:
    with make_owner() as owner:
        yield owner


@pytest.fixture
def own_box(owner: str, agent_gateway: Gateway) -> Box:
    return make_box(owner, agent_gateway.mount)


@pytest.fixture(scope="module")
def shared_box(agent_gateway: Gateway) -> Iterator[Box]:
    with make_owner() as owner:
        yield make_box(owner, agent_gateway.mount)


@pytest.fixture(params=["engine", "agent"])
def executor(request: pytest.FixtureRequest, agent_gateway: Gateway, settings: Any) -> str:
    """Commands are executed by the engine, or by the agent in the container."""
    if request.param == "agent":
        settings.AGENT_GATEWAY = agent_gateway.client_path
    return str(request.param)


@pytest.fixture
def box(shared_box: Box) -> Box:
    """Empty sandbox for tests that neither destroy it nor create others."""
    for root in ("/workspace", "/data"):
        shared_box.provider.clear(shared_box.ref, root)
    return replace(shared_box, provider=DockerProvider())  # without cached state


def test_available_daemon_is_detected_within_two_seconds() -> None:
    def quickly() -> bool:
        started = time.monotonic()
        return is_daemon_available() and time.monotonic() - started < 2

    wait_until(quickly, "it answers in time, as one does whose machine has nothing else to do")


@pytest.mark.parametrize("host", ["unix:///nowhere.sock", "tcp://127.0.0.1:9"])
def test_verbs_raise_unavailable_without_a_daemon(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    assert not is_daemon_available()
    verbs = (
        lambda p: p.list("o"),
        lambda p: p.inspect("n"),
        lambda p: p.destroy("n"),
        lambda p: p.create(SandboxSpec("n", "o")),
    )
    for act in verbs:
        with pytest.raises(Unavailable):
            act(DockerProvider())


def test_owner_labels_cannot_be_overridden(box: Box) -> None:
    [found] = box.provider.list(box.owner)
    assert (found.ref, found.name, found.is_remnant) == (box.ref, box.ref, False)
    assert box.provider.list("unknown-owner") == []


def test_create_after_a_crash_before_start_starts_the_container(owner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Died(BaseException):
        pass

    def die(*args: object) -> None:
        raise Died

    provider, spec = DockerProvider(), SandboxSpec(owner, owner)
    with monkeypatch.context() as crash:
        crash.setattr(APIClient, "start", die)
        with pytest.raises(Died):
            provider.create(spec)
    assert not provider.inspect(spec.name).running
    assert provider.create(spec) == spec.name
    assert provider.inspect(spec.name).running


def volumes_of(box: Box) -> list[str]:
    return docker("volume", "ls", "-q", "--filter", f"label=leasehold.owner={box.owner}").split()


def test_remnant_is_listed_and_can_be_destroyed(own_box: Box) -> None:
    own_box.run("touch", "-d", "2090-01-01", "/workspace", "/data")
    made_at = own_box.provider.inspect(own_box.ref).created_at
    docker("rm", "-f", own_box.ref)
    docker("volume", "rm", f"{own_box.ref}-data")
    [found] = own_box.provider.list(own_box.owner)
    assert (found.ref, found.name, found.running, found.is_remnant) == (own_box.ref, own_box.ref, False, True)
    assert abs(found.created_at - made_at) < MINUTE
    with pytest.raises(Missing):
        own_box.provider.inspect(found.ref)
    own_box.provider.destroy(found.ref)
    assert own_box.provider.list(own_box.owner) == []
    assert volumes_of(own_box) == []


def test_volume_of_another_owner_is_neither_used_nor_removed(owner: str) -> None:
    provider = DockerProvider()
    docker("volume", "create", f"{owner}-data")
    try:
        with pytest.raises(Rejected, match="another owner"):
            provider.create(SandboxSpec(owner, owner=owner))
        provider.destroy(owner)
        assert docker("volume", "ls", "-q", "--filter", f"name={owner}") == f"{owner}-data\n"
    finally:
        docker("volume", "rm", f"{owner}-data")


def test_nproc_prints_the_processors_of_the_limit(box: Box) -> None:
    """Not those of the host. The sandbox has the default limit of one."""
    assert box.run("nproc").stdout == b"1\n"
    assert box.run("printenv", *PROCESSOR_COUNT_VARIABLES).stdout == b"1\n" * len(PROCESSOR_COUNT_VARIABLES)


def test_home_exists_and_tmpfs_is_empty_after_a_restart(box: Box) -> None:
    box.run("sh", "-c", "for d in ~ /data /tmp /var/tmp; do echo kept > $d/f; done")
    docker("restart", "-t", "0", box.ref)
    assert box.run("sh", "-c", "ls ~/f /data/f /tmp/f /var/tmp/f").stdout == b"/data/f\n/workspace/.home/f\n"


@pytest.mark.django_db
def test_sandbox_is_lost_if_only_one_of_its_volumes_is_left(docker_pool: Pool) -> None:
    leases = [
        leasing.acquire(leasing.LeaseRequest(f"did:plc:{n}", n, "catan", pool=docker_pool.name), now=NOW)[0] for n in "ab"
    ]
    for lease in leases:
        execution.exec_command(lease.pk, Command(argv=["touch", "f"], timeout=MINUTE), now=NOW)
    gone = Sandbox.objects.get(holder=leases[0].pk)
    docker("rm", "-f", gone.ref)
    docker("volume", "rm", f"{gone.ref}-data")
    assert reconciliation.reconcile(now=NOW, grace=timedelta(days=1)).counts == {"lost": 1, "kept": 1}


@pytest.mark.django_db
def test_remnant_is_an_orphan(docker_pool: Pool) -> None:
    provider, owner = DockerProvider(), str(docker_pool.owner)
    ref = provider.create(SandboxSpec(f"lhd-{uuid4().hex[:16]}", owner=owner))
    docker("rm", "-f", ref)
    late = provider.list(owner)[0].created_at + 2 * MINUTE
    assert reconciliation.reconcile(now=late - MINUTE, grace=2 * MINUTE).counts == {}
    assert reconciliation.reconcile(now=late, grace=2 * MINUTE).counts == {"orphans destroyed": 1}
    assert provider.list(owner) == []


def test_runtime_setting_is_passed_to_the_engine(owner: str, settings: Any) -> None:
    settings.DOCKER_RUNTIME = "io.containerd.runc.v2"
    box = make_box(owner)
    assert docker("inspect", "-f", "{{.HostConfig.Runtime}}", box.ref) == "io.containerd.runc.v2\n"
    assert box.run("true").exit_code == 0


def test_unknown_runtime_is_rejected_and_leaves_nothing(owner: str, settings: Any) -> None:
    settings.DOCKER_RUNTIME = "runsc-of-nowhere"
    with pytest.raises(Rejected, match="no runtime runsc-of-nowhere"):
        DockerProvider().create(SandboxSpec(owner, owner))
    with pytest.raises(Rejected, match="no runtime runsc-of-the-pool"):
        DockerProvider().create(SandboxSpec(owner, owner, runtime="runsc-of-the-pool"))
    assert DockerProvider().list(owner) == []


def test_host_access_is_not_used_with_a_runtime_with_its_own_kernel(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "SHARED_KERNEL_RUNTIMES", set())
    asked: list[list[str]] = []
    create = box.provider._create_exec
    monkeypatch.setattr(
        box.provider, "_create_exec", lambda ref, argv, *a, **o: asked.append(argv) or create(ref, argv, *a, **o)
    )
    box.provider.write_file(box.ref, "/workspace/f", b"x")
    assert box.provider.read_file(box.ref, "/workspace/f", limit=9) == b"x"
    assert len(asked) == 2
    assert box.run("sh", "-c", "setsid sleep 300 & sleep 300", seconds=0.7).timed_out
    assert box.run("python3", "-c", HOG).oom
    assert box.processes() == []


@pytest.mark.parametrize(
    ("field", "reason"), [({"image": "lhd-no-such-image:none"}, "build_image"), ({"millicpus": 10**6}, "CPUs")]
)
def test_missing_image_and_limit_above_the_hosts_capacity_are_rejected(field: dict[str, Any], reason: str) -> None:
    with pytest.raises(Rejected, match=reason):
        DockerProvider().create(SandboxSpec("lhd-none", "lhd-none", **field))
    assert DockerProvider().list("lhd-none") == []


def test_oom_kill_is_distinguished_from_sigkill_by_the_engines_events(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "cgroup", lambda self, ref: None)
    hog, killed = box.run("python3", "-c", HOG), box.run("sh", "-c", "kill -9 $$")
    assert (hog.exit_code, hog.oom) == (137, True)
    assert (killed.exit_code, killed.oom) == (137, False)


def test_command_that_ends_well_beside_an_oom_kill_is_not_out_of_memory(box: Box) -> None:
    done = box.run("sh", "-c", f'python3 -c "{HOG}"; echo $?')
    assert (done.exit_code, done.stdout, done.oom) == (0, b"137\n", False)


def test_oom_counter_is_read_after_a_restart(box: Box) -> None:
    assert box.run("python3", "-c", HOG).oom
    docker("restart", "-t", "0", box.ref)
    assert not box.run("true").oom
    assert box.run("python3", "-c", HOG).oom


def by_reaper_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DockerProvider, "_kill_by_mark_on_host", lambda self, ref, mark, gid: False)


def by_host(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may signal the processes of a container")
    monkeypatch.setattr(DockerProvider, "_kill_by_mark_in_container", lambda self, ref, mark, gid: False)


def by_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills from outside are not available."""
    monkeypatch.setattr(DockerProvider, "_kill_by_mark_on_host", lambda self, ref, mark, gid: False)
    monkeypatch.setattr(DockerProvider, "_kill_by_mark_in_container", lambda self, ref, mark, gid: False)


@pytest.fixture
def kill_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, agent_gateway: Gateway, settings: Any) -> Any:
    """Way in which processes are killed, of the three above."""
    request.param(monkeypatch)
    if request.param is by_agent:
        settings.AGENT_GATEWAY = agent_gateway.client_path
    return request.param


CLEARED_ENVIRONMENT = "(env -i setsid sh -c 'sleep 300 & exec sleep 300' &) & sleep 300"


def read_beyond_the_limit(box: Box) -> None:
    with pytest.raises(TooLarge):
        b"".join(box.provider.get_files(box.ref, "/data", max_bytes=1 << 20))


def exceed_the_time(box: Box) -> None:
    done = run_with_growing_timeouts(lambda seconds: box.run("cat", "/dev/zero", seconds=seconds), lambda done: done.stdout)
    assert (done.timed_out, done.truncated, {*done.stdout}) == (True, True, {0})


@pytest.mark.parametrize("interrupt", [read_beyond_the_limit, exceed_the_time])
def test_program_that_writes_is_killed_alone(
    box: Box, monkeypatch: pytest.MonkeyPatch, interrupt: Callable[[Box], None]
) -> None:
    by_reaper_inside(monkeypatch)
    box.run("sh", "-c", "head -c 40000000 /dev/zero > /data/zeros")
    started = [docker("inspect", "--format", "{{.State.StartedAt}}", box.ref)]
    interrupt(box)
    assert box.run("true").exit_code == 0
    started.append(docker("inspect", "--format", "{{.State.StartedAt}}", box.ref))
    assert started[0] == started[1]  # the last resort, a kill of the container, was not needed


class SilentPoll:
    """Poll object that reports no event."""

    def register(self, connection: object, events: int) -> None:
        pass

    def poll(self, milliseconds: float) -> list[Any]:
        time.sleep(milliseconds / 1000)
        return []


def test_command_ends_with_its_container_though_its_stream_stays_open(owner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    box = make_box(owner)
    silent = SimpleNamespace(poll=SilentPoll, POLLIN=select.POLLIN, POLLOUT=select.POLLOUT)
    monkeypatch.setattr(exec_stream, "select", silent)
    monkeypatch.setattr(exec_stream, "CHECK_SECONDS", 0.1)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(box.run, "sleep", "300", seconds=60)
        wait_until(lambda: "sleep 300" in docker("top", box.ref), "the command runs")
        DockerProvider().destroy(box.ref)
        assert isinstance(running.exception(), Missing | Stopped)  # its timeout would be a result


@pytest.mark.parametrize(
    ("kill_by", "hidden"),
    [
        (by_reaper_inside, "sleep 300 & wait"),
        (by_reaper_inside, "setsid sleep 300 & setsid sh -c 'sleep 300 & sleep 300' & wait"),
        (by_reaper_inside, CLEARED_ENVIRONMENT),
        (by_host, CLEARED_ENVIRONMENT),
        (by_reaper_inside, "trap '' TERM HUP INT; sleep 300; sleep 300"),
        (by_agent, "setsid sleep 300 & setsid sh -c 'sleep 300 & sleep 300' & wait"),
        (by_agent, CLEARED_ENVIRONMENT),
    ],
    indirect=["kill_by"],
)
@pytest.mark.usefixtures("kill_by")
def test_timeout_leaves_no_process(box: Box, hidden: str) -> None:
    done = run_with_growing_timeouts(
        lambda seconds: box.run("sh", "-c", f"echo began; {hidden}", seconds=seconds), lambda done: done.stdout
    )
    assert (done.exit_code, done.timed_out, done.stdout) == (137, True, b"began\n")
    assert done.duration < MINUTE  # far below the 300 s that the programs sleep
    assert box.processes() == []


@pytest.mark.parametrize("kill_by", [by_reaper_inside, by_host, by_agent], indirect=True)
def test_timeout_ends_a_fork_bomb_and_no_other_exec(box: Box, kill_by: Callable[[pytest.MonkeyPatch], None]) -> None:
    other: list[ExecResult] = []
    script = "sleep 4 & touch begun; wait; echo unharmed"  # needs no further process once it has begun
    beside = threading.Thread(target=lambda: other.append(box.run("sh", "-c", script, seconds=60)))
    beside.start()
    wait_until(lambda: box.run("test", "-e", "begun").exit_code == 0, "the other one has begun")
    assert box.run("env", "-i", "/usr/bin/setsid", "--wait", "/usr/bin/python3", "-c", BOMB, seconds=1.5).timed_out
    beside.join()
    assert box.processes() == []
    if (
        kill_by is not by_reaper_inside
    ):  # in the container the reaper competes with the bomb; if it is too slow, all processes are killed
        assert other[0].stdout == b"unharmed\n"


def test_container_is_killed_if_reaping_fails_and_its_files_remain(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    box.run("sh", "-c", "echo kept > /workspace/file")
    monkeypatch.setattr(DockerProvider, "_kill_by_mark_on_host", lambda self, ref, mark, gid: False)
    monkeypatch.setattr(DockerProvider, "_kill_by_mark_in_container", lambda self, ref, mark, gid: False)
    assert box.run("python3", "-c", BOMB, seconds=1).timed_out
    assert box.run("cat", "/workspace/file").stdout == b"kept\n"
    assert box.processes() == []


@pytest.mark.usefixtures("executor")
def test_timeout_shorter_than_the_start_leaves_no_process(box: Box) -> None:
    assert box.run("sleep", "300", seconds=0.005).timed_out
    assert box.processes() == []


def test_kill_waits_for_a_start_that_the_engine_has_not_begun(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy engine reads the request to start a command after the timeout of the command."""
    began, killed = list[bytes](), threading.Event()
    kill_by_mark = DockerProvider._kill_by_mark

    def delay(connection: socket.socket) -> socket.socket:
        """Return a connection whose first bytes reach the engine after the first attempt to kill."""
        near, far = socket.socketpair()

        def relay() -> None:
            request = far.recv(1 << 16)
            assert killed.wait(30)
            connection.sendall(request)
            while chunk := connection.recv(1 << 16):
                began.append(chunk)
                far.sendall(chunk)
            far.close()

        threading.Thread(target=relay, daemon=True).start()
        return near

    def start(engine: Engine, connection: socket.socket, *args: Any) -> EngineExec:
        return EngineExec(engine, delay(connection), *args)

    def kill(provider: DockerProvider, *args: Any) -> bool:
        result = kill_by_mark(provider, *args)
        killed.set()
        return result

    monkeypatch.setattr(commands, "EngineExec", start)
    monkeypatch.setattr(DockerProvider, "_kill_by_mark", kill)
    assert box.run("sleep", "300", seconds=0.005).timed_out
    monkeypatch.undo()
    assert began  # the command was started after the first attempt
    assert box.processes() == []


@pytest.mark.usefixtures("executor")
@pytest.mark.parametrize("how", ["pause", "kill", "freeze"])
def test_exec_resumes_a_stopped_or_frozen_container(box: Box, how: str) -> None:
    box.run("sh", "-c", "echo kept > /data/file")
    if how == "freeze":
        box.provider.suspend(box.ref)
    else:
        docker(how, box.ref)
    assert not box.provider.inspect(box.ref).running
    assert box.run("cat", "/data/file").stdout == b"kept\n"


@pytest.mark.usefixtures("executor")
@pytest.mark.parametrize("executor", ["agent"], indirect=True)
def test_exec_over_a_connection_to_an_ended_container_starts_it(box: Box, monkeypatch: Any) -> None:
    assert box.run("true").exit_code == 0
    docker("kill", box.ref)
    monkeypatch.setattr(AgentConnection, "is_reusable", lambda _: True)  # the end of the connection was not seen yet
    assert box.run("echo", "out").stdout == b"out\n"


@pytest.mark.usefixtures("executor")
@pytest.mark.parametrize("end", [["kill"], ["stop", "-t", "1"], ["restart", "-t", "0"], ["rm", "-f"]])
def test_container_death_during_a_command_is_a_stop_and_keeps_the_files(own_box: Box, end: list[str]) -> None:
    own_box.run("sh", "-c", "echo kept > f; echo kept > /data/f")
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(own_box.run, "sleep", "300", seconds=250)
        wait_until(lambda: "sleep 300" in own_box.processes(), "it sleeps")
        docker(*end, own_box.ref)
        with pytest.raises(Stopped):
            running.result()
    assert own_box.run("cat", "f", "/data/f").stdout == b"kept\nkept\n"


def test_command_killed_in_a_running_container_is_a_result_without_delay(box: Box) -> None:
    done = box.run("sh", "-c", "kill -9 $$")
    assert (done.exit_code, done.timed_out, done.oom) == (137, False, False)
    assert box.run("sh", "-c", "exit 137").exit_code == 137


def test_streams_closed_early_do_not_end_the_exec(box: Box) -> None:
    assert box.run("sh", "-c", "exec >&- 2>&-; sleep 1; exit 5").exit_code == 5


@pytest.mark.parametrize(
    ("argv", "cwd", "exit_code", "why"),
    [
        (["no-such-program"], "/workspace", 127, b"executable file not found"),
        (["/no/such/program"], "/workspace", 127, b"no such file"),
        (["/etc/passwd"], "/workspace", 126, b"permission denied"),
        (["true"], "/no/such/directory", 126, b"no such file"),
    ],
)
def test_program_that_cannot_be_started_is_a_result_with_the_reason_on_stderr(
    box: Box, argv: list[str], cwd: str, exit_code: int, why: bytes
) -> None:
    done = box.provider.exec(box.ref, argv, env={}, cwd=cwd, timeout=timedelta(seconds=30), mark="m")
    assert (done.exit_code, done.stdout) == (exit_code, b"")
    assert why in done.stderr


def test_start_failure_is_distinguished_from_a_program_that_prints_the_same(box: Box) -> None:
    failed = box.run("no-such-program", cap=4)
    assert (failed.exit_code, failed.stderr, failed.truncated) == (127, b"exec", True)
    done = box.run("sh", "-c", "echo 'OCI runtime exec failed'; exit 127")
    assert (done.exit_code, done.stdout) == (127, b"OCI runtime exec failed\n")


def test_destroy_awaits_a_concurrent_removal_and_removes_the_volumes(own_box: Box) -> None:
    assert volumes_of(own_box) == [f"{own_box.ref}-data", f"{own_box.ref}-workspace"]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(own_box.provider.destroy, [own_box.ref] * 4))
    with pytest.raises(Missing):
        own_box.provider.inspect(own_box.ref)
    assert volumes_of(own_box) == []


def test_tar_without_its_end_is_rejected(box: Box) -> None:
    with pytest.raises(Rejected):
        box.provider.put_files(box.ref, "/data", io.BytesIO(pack(file("a"), file("b")).getvalue()[:1024]))


def test_abandoned_transfer_leaves_no_process(box: Box) -> None:
    box.run("sh", "-c", "head -c 50M /dev/zero > big")
    transfer = box.provider.get_files(box.ref, "/workspace")
    next(transfer)
    transfer.close()
    assert box.processes() == []


def test_tools_are_installed_and_home_is_ignored_by_git(box: Box) -> None:
    assert box.run("sh", "-ec", "pip --version && python -c 'import pydantic, aiohttp'").exit_code == 0
    done = box.run("sh", "-ec", "cd; pwd; touch x; cd /workspace; git init -q; git status --porcelain")
    assert done.stdout == b"/workspace/.home\n"
    commit = "touch f && git add f && git commit -qm m && git log --format='%an <%ae>'"
    assert box.run("sh", "-ec", commit).stdout == b"Agent <agent@leasehold.invalid>\n"


def test_image_is_not_rebuilt_without_changes(capsys: pytest.CaptureFixture[str]) -> None:
    call_command("build_image")
    capsys.readouterr()
    call_command("build_image")
    assert capsys.readouterr().out.endswith(": up to date\n")


def test_image_lists_its_tools_and_their_versions(box: Box, capsys: pytest.CaptureFixture[str]) -> None:
    call_command("build_image", "--contents", tag=DOCKER_IMAGE)
    listed = capsys.readouterr().out
    assert box.run("cat", "/opt/leasehold/CONTENTS").stdout.decode() == listed
    versions = {(kind, name): version for kind, name, version in (line.split("\t") for line in listed.splitlines())}
    for tool in ("git", "node", "python3", "tsx"):
        assert versions["tool", tool] in box.run(tool, "--version").stdout.decode()
    assert ("python-package", "pydantic") in versions
    page = Path("docs/image.md").read_text()
    documented = {tuple(line.split("\t")[:2]) for line in page.partition("```tsv\n")[2].partition("```")[0].splitlines()}
    assert documented == set(versions)  # the versions depend on the base image and the day of the build


def test_build_without_a_daemon_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    with pytest.raises(CommandError, match="Docker daemon is unavailable"):
        call_command("build_image")


def test_engine_reports_its_memory() -> None:
    assert DockerProvider().total_memory_mib() == int(docker("info", "--format", "{{.MemTotal}}")) >> 20


# --- resource usage ----------------------------------------------------------------------------------------------

VERSIONS = {  # cgroup version -> files of a container, as written by kernels 5.10 and 6.1
    1: {
        "cpuacct.usage": "30333511\n",
        "memory.usage_in_bytes": "3104768\n",
        "memory.stat": "cache 2629632\nrss 106496\ninactive_file 1\ntotal_cache 2629632\ntotal_inactive_file 2629632\n",
    },
    2: {
        "cpu.stat": "usage_usec 30333\nuser_usec 20000\nsystem_usec 10333\nnr_periods 0\n",
        "memory.current": "3104768\n",
        "memory.stat": "anon 106496\nfile 2629632\ninactive_file 2629632\nactive_file 0\n",
    },
}


@pytest.mark.parametrize("version", VERSIONS)
def test_both_cgroup_versions_are_read(version: int, tmp_path: Path) -> None:
    for name, content in VERSIONS[version].items():
        (tmp_path / name).write_text(content)
    cpu, memory, _ = (tmp_path / name for name in VERSIONS[version])
    assert Cgroup(tmp_path, tmp_path, cpu, memory).usage() == ResourceUsage(30333, 3104768 - 2629632)


def test_usage_from_the_kernel_equals_usage_from_the_engine(own_box: Box) -> None:
    """Compares host access and the engine's API, as used from another host. The sandbox is idle in between."""
    ours, engine = own_box.provider.stats(own_box.ref), own_box.provider._engine
    if engine.cgroup(own_box.ref) is None:
        pytest.skip("control groups cannot be seen from here")
    engine.cgroups[own_box.ref] = None
    its = own_box.provider.stats(own_box.ref)
    assert ours and its and 0 <= its.cpu_micros - ours.cpu_micros < 10**6
    assert abs(its.memory_bytes - ours.memory_bytes) < 16 << 20
    engine.client.stop(own_box.ref, timeout=0)
    assert own_box.provider.stats(own_box.ref) is None
    del engine.cgroups[own_box.ref]
    assert own_box.provider.stats(own_box.ref) is None
