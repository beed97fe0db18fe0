"""Docker provider: isolation, limits, timeouts and destruction, beyond the conformance suite."""

import io
import os
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.core.management import CommandError, call_command
from docker import APIClient

from leases import execution, leasing
from sandboxes import reconciliation
from sandboxes.models import Pool, Sandbox
from sandboxes.providers.base import ExecResult, Missing, Rejected, ResourceUsage, SandboxSpec, Unavailable
from sandboxes.providers.docker import engine
from sandboxes.providers.docker.engine import Cgroup, Engine
from sandboxes.providers.docker.provider import DockerProvider, is_daemon_available
from sandboxes.runs import Command
from tests.conftest import MINUTE, NOW
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
class Box:
    """Sandbox with 128 MiB and 64 processes."""

    provider: DockerProvider
    ref: str
    owner: str

    def run(self, *argv: str, seconds: float = 60, stdin: bytes = b"", cap: int = 1 << 20) -> ExecResult:
        return self.provider.exec(
            self.ref, argv, env={}, timeout=timedelta(seconds=seconds), stdin=stdin, cap=cap, mark=uuid4().hex
        )

    def processes(self) -> list[str]:
        """List command lines of live processes, except process 1 and the listing itself."""
        lines = self.run("ps", "-eo", "args=").stdout.decode().splitlines()
        return [
            line
            for line in lines
            if not line.startswith(("ps ", "/sbin/docker-init", "python3 -I -S /opt/leasehold/bridge.py"))
            and not line.endswith(" <defunct>")
        ]


def docker(*argv: str) -> str:
    return subprocess.run(["docker", *argv], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    provider, name = DockerProvider(), f"lhd-{uuid4().hex[:16]}"
    (tmp_path / "llm.sock").write_text("a socket")
    tmp_path.chmod(0o755)
    spec = SandboxSpec(name, owner=name, memory_mib=128, pids=64, labels={"agent": "did:plc:ada"}, sockets=tmp_path)
    box = Box(provider, provider.create(spec), owner=name)
    provider.wait_ready(box.ref, timeout=MINUTE)
    yield box
    for found in provider.list(box.owner):
        provider.destroy(found.ref)


def test_available_daemon_is_detected_within_two_seconds() -> None:
    def quickly() -> bool:
        started = time.monotonic()
        return is_daemon_available() and time.monotonic() - started < 2

    wait_until(quickly, "it answers in time, as one does whose machine has nothing else to do")


@pytest.mark.parametrize("host", ["unix:///nowhere.sock", "tcp://127.0.0.1:9"])
def test_verbs_raise_unavailable_without_a_daemon(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    assert not is_daemon_available()
    for act in (
        lambda p: p.list("o"),
        lambda p: p.inspect("n"),
        lambda p: p.destroy("n"),
        lambda p: p.create(SandboxSpec("n", "o")),
    ):
        with pytest.raises(Unavailable):
            act(DockerProvider())


def test_command_has_no_network_and_no_capabilities(box: Box) -> None:
    assert box.run("ls", "/sys/class/net").stdout == b"lo\n"
    status = box.run("cat", "/proc/self/status").stdout.decode()
    assert "CapBnd:\t0000000000000000" in status
    assert "NoNewPrivs:\t1" in status
    assert "Uid:\t10001\t10001" in status


def test_agent_cannot_end_its_sandbox(box: Box) -> None:
    first = docker("inspect", "-f", "{{.State.Pid}}", box.ref)
    box.run("sh", "-c", "kill -9 1 7; kill -9 -1")
    assert box.run("true").exit_code == 0
    assert docker("inspect", "-f", "{{.State.Pid}}", box.ref) == first


def test_image_files_are_not_writable_by_the_agent(box: Box) -> None:
    done = box.run("sh", "-c", "echo > /opt/leasehold/reap.py; rm -r /opt/leasehold/skills/rpg; mv /workspace /away")
    assert done.stderr.count(b"Read-only file system") == 3


def test_sockets_can_be_used_but_not_replaced(box: Box) -> None:
    done = box.run("sh", "-c", "cat /run/leasehold/llm.sock; rm -f /run/leasehold/llm.sock; echo > /run/leasehold/new")
    assert done.stdout == b"a socket"
    assert done.stderr.count(b"Read-only file system") == 2


def test_control_planes_environment_is_not_inherited(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_THING", "xyzzy")
    monkeypatch.setenv("HTTPS_PROXY", "http://user:xyzzy@proxy.invalid")
    assert b"xyzzy" not in box.run("env").stdout
    assert "xyzzy" not in docker("inspect", box.ref)


def test_owner_labels_cannot_be_overridden(box: Box) -> None:
    box.provider.create(SandboxSpec(f"{box.ref}-b", owner=box.owner, labels={"owner": "somebody", "name": "x"}))
    assert {found.name for found in box.provider.list(box.owner)} == {box.ref, f"{box.ref}-b"}
    assert box.provider.list("somebody") == []


def test_name_of_another_owners_container_is_rejected(box: Box) -> None:
    with pytest.raises(Rejected):
        box.provider.create(SandboxSpec(box.ref, owner="another"))
    assert box.run("true").exit_code == 0


def test_create_after_a_crash_before_start_starts_the_container(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    class Died(BaseException):
        pass

    def die(*args: object) -> None:
        raise Died

    spec = SandboxSpec(f"{box.ref}-b", owner=box.owner)
    with monkeypatch.context() as crash:
        crash.setattr(APIClient, "start", die)
        with pytest.raises(Died):
            box.provider.create(spec)
    assert not box.provider.inspect(spec.name).running
    assert box.provider.create(spec) == spec.name
    assert box.provider.inspect(spec.name).running


def volumes_of(box: Box) -> list[str]:
    return docker("volume", "ls", "-q", "--filter", f"label=leasehold.owner={box.owner}").split()


def test_destroy_removes_the_volumes(box: Box) -> None:
    assert volumes_of(box) == [f"{box.ref}-data", f"{box.ref}-workspace"]
    box.provider.destroy(box.ref)
    assert volumes_of(box) == []


def test_remnant_is_listed_and_can_be_destroyed(box: Box) -> None:
    box.run("touch", "-d", "2090-01-01", "/workspace", "/data")
    made_at = box.provider.inspect(box.ref).created_at
    docker("rm", "-f", box.ref)
    docker("volume", "rm", f"{box.ref}-data")
    [found] = box.provider.list(box.owner)
    assert (found.ref, found.name, found.running, found.is_remnant) == (box.ref, box.ref, False, True)
    assert abs(found.created_at - made_at) < MINUTE
    with pytest.raises(Missing):
        box.provider.inspect(found.ref)
    box.provider.destroy(found.ref)
    assert box.provider.list(box.owner) == []
    assert volumes_of(box) == []


def test_existing_sandbox_is_not_a_remnant(box: Box) -> None:
    assert [(found.ref, found.is_remnant) for found in box.provider.list(box.owner)] == [(box.ref, False)]


def test_volume_of_another_owner_is_neither_used_nor_removed(box: Box) -> None:
    name = f"{box.ref}-x"
    docker("volume", "create", f"{name}-data")
    try:
        with pytest.raises(Rejected, match="another owner"):
            box.provider.create(SandboxSpec(name, owner=box.owner))
        box.provider.destroy(name)
        assert docker("volume", "ls", "-q", "--filter", f"name={name}") == f"{name}-data\n"
    finally:
        docker("volume", "rm", f"{name}-data")


def test_home_exists_and_tmpfs_is_empty_after_a_restart(box: Box) -> None:
    box.run("sh", "-c", "for d in ~ /data /tmp /var/tmp; do echo kept > $d/f; done")
    docker("restart", "-t", "0", box.ref)
    assert box.run("sh", "-c", "ls ~/f /data/f /tmp/f /var/tmp/f").stdout == b"/data/f\n/workspace/.home/f\n"


@pytest.mark.django_db
def test_sandbox_is_lost_if_only_its_volumes_are_left(docker_pool: Pool) -> None:
    leases = [
        leasing.acquire(leasing.LeaseRequest(f"did:plc:{n}", n, "catan", pool=docker_pool.name), now=NOW)[0] for n in "ab"
    ]
    for lease in leases:
        execution.exec_command(lease.pk, Command(argv=["touch", "f"], timeout=MINUTE), now=NOW)
    gone = Sandbox.objects.get(holder=leases[0].pk)
    docker("rm", "-f", gone.ref)
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


def test_runtime_setting_is_passed_to_the_engine(box: Box, settings: Any) -> None:
    settings.DOCKER_RUNTIME = "io.containerd.runc.v2"
    box.provider.create(SandboxSpec(f"{box.ref}-b", owner=box.owner))
    assert docker("inspect", "-f", "{{.HostConfig.Runtime}}", f"{box.ref}-b") == "io.containerd.runc.v2\n"
    assert Box(box.provider, f"{box.ref}-b", box.owner).run("true").exit_code == 0


def test_unknown_runtime_is_rejected_and_leaves_nothing(box: Box, settings: Any) -> None:
    settings.DOCKER_RUNTIME = "runsc-of-nowhere"
    with pytest.raises(Rejected, match="LEASEHOLD_DOCKER_RUNTIME=runsc-of-nowhere"):
        box.provider.create(SandboxSpec(f"{box.ref}-b", owner=box.owner))
    assert [found.ref for found in box.provider.list(box.owner)] == [box.ref]


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


def test_missing_image_error_names_the_build_command() -> None:
    with pytest.raises(Rejected, match="build_image"):
        DockerProvider().create(SandboxSpec("lhd-none", "lhd-none", image="lhd-no-such-image:none"))
    assert DockerProvider().list("lhd-none") == []


def test_limit_above_the_hosts_capacity_is_rejected() -> None:
    with pytest.raises(Rejected, match="CPUs"):
        DockerProvider().create(SandboxSpec("lhd-none", "lhd-none", millicpus=1_000_000))
    assert DockerProvider().list("lhd-none") == []


@pytest.mark.parametrize("seen", ["its counter", "the engine's events"])
def test_oom_kill_is_distinguished_from_sigkill(box: Box, monkeypatch: pytest.MonkeyPatch, seen: str) -> None:
    if seen == "the engine's events":
        monkeypatch.setattr(Engine, "cgroup", lambda self, ref: None)
    hog, killed = box.run("python3", "-c", HOG), box.run("sh", "-c", "kill -9 $$")
    assert (hog.exit_code, hog.oom) == (137, True)
    assert (killed.exit_code, killed.oom) == (137, False)


def test_oom_kill_of_a_child_is_reported(box: Box) -> None:
    done = box.run("sh", "-c", f'python3 -c "{HOG}"; echo and on')
    assert (done.exit_code, done.stdout, done.oom) == (0, b"and on\n", True)


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


@pytest.mark.parametrize("way", [by_reaper_inside, by_host])
@pytest.mark.parametrize(
    "hidden",
    [
        "sleep 300 & wait",
        "setsid sleep 300 & setsid sh -c 'sleep 300 & sleep 300' & wait",
        "(env -i setsid sh -c 'sleep 300 & exec sleep 300' &) & sleep 300",
        "trap '' TERM HUP INT; sleep 300; sleep 300",
    ],
)
def test_timeout_leaves_no_process(
    box: Box, monkeypatch: pytest.MonkeyPatch, way: Callable[[pytest.MonkeyPatch], None], hidden: str
) -> None:
    way(monkeypatch)
    done = run_with_growing_timeouts(
        lambda seconds: box.run("sh", "-c", f"echo began; {hidden}", seconds=seconds), lambda done: done.stdout
    )
    assert (done.exit_code, done.timed_out, done.stdout) == (137, True, b"began\n")
    assert done.duration < MINUTE  # far below the 300 s that the programs sleep
    assert box.processes() == []


@pytest.mark.parametrize("way", [by_reaper_inside, by_host])
def test_timeout_ends_a_fork_bomb_and_no_other_exec(
    box: Box, monkeypatch: pytest.MonkeyPatch, way: Callable[[pytest.MonkeyPatch], None]
) -> None:
    way(monkeypatch)
    other: list[ExecResult] = []
    script = "sleep 4 & touch begun; wait; echo unharmed"  # needs no further process once it has begun
    beside = threading.Thread(target=lambda: other.append(box.run("sh", "-c", script, seconds=60)))
    beside.start()
    wait_until(lambda: box.run("test", "-e", "begun").exit_code == 0, "the other one has begun")
    assert box.run("env", "-i", "/usr/bin/setsid", "/usr/bin/python3", "-c", BOMB, seconds=1.5).timed_out
    beside.join()
    assert box.processes() == []
    if way is by_host:  # in the container the reaper competes with the bomb; if it is too slow, all processes are killed
        assert other[0].stdout == b"unharmed\n"


def test_container_is_killed_if_reaping_fails_and_its_files_remain(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    box.run("sh", "-c", "echo kept > /workspace/file")
    monkeypatch.setattr(DockerProvider, "_kill_by_mark_on_host", lambda self, ref, mark, gid: False)
    monkeypatch.setattr(DockerProvider, "_kill_by_mark_in_container", lambda self, ref, mark, gid: False)
    assert box.run("python3", "-c", BOMB, seconds=1).timed_out
    assert box.run("cat", "/workspace/file").stdout == b"kept\n"
    assert box.processes() == []


def test_timeout_shorter_than_the_start_leaves_no_process(box: Box) -> None:
    assert box.run("sleep", "300", seconds=0.005).timed_out
    assert box.processes() == []


@pytest.mark.parametrize("how", ["pause", "kill"])
def test_exec_resumes_a_stopped_or_paused_container(box: Box, how: str) -> None:
    box.run("sh", "-c", "echo kept > /data/file")
    docker(how, box.ref)
    assert not box.provider.inspect(box.ref).running
    assert box.run("cat", "/data/file").stdout == b"kept\n"


def test_container_death_during_a_command_is_a_result(box: Box) -> None:
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(box.run, "sleep", "300", seconds=250)
        wait_until(lambda: "sleep 300" in box.processes(), "it sleeps")
        docker("kill", box.ref)
        done = running.result()
    assert (done.exit_code, done.timed_out) == (137, False)
    assert box.run("true").exit_code == 0


def test_simultaneous_large_input_and_output_do_not_deadlock(box: Box) -> None:
    done = box.run("cat", stdin=b"x" * (20 << 20), cap=1000)
    assert (done.exit_code, done.stdout, done.truncated) == (0, b"x" * 1000, True)


def test_unread_stdin_does_not_delay_the_result(box: Box) -> None:
    done = box.run("true", stdin=b"x" * (5 << 20), seconds=250)
    assert (done.exit_code, done.timed_out) == (0, False) and done.duration < MINUTE


def test_streams_closed_early_do_not_end_the_exec(box: Box) -> None:
    assert box.run("sh", "-c", "exec >&- 2>&-; sleep 3; exit 5").exit_code == 5


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


def test_start_failure_is_recognized_with_a_small_cap(box: Box) -> None:
    done = box.run("no-such-program", cap=4)
    assert (done.exit_code, done.stderr, done.truncated) == (127, b"exec", True)


def test_program_may_exit_with_127_and_its_own_message(box: Box) -> None:
    done = box.run("sh", "-c", "echo 'OCI runtime exec failed'; exit 127")
    assert (done.exit_code, done.stdout) == (127, b"OCI runtime exec failed\n")


def test_destroy_awaits_a_concurrent_removal(box: Box) -> None:
    threads = [threading.Thread(target=box.provider.destroy, args=(box.ref,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with pytest.raises(Missing):
        box.provider.inspect(box.ref)


def test_unreadable_files_are_transferred(box: Box) -> None:
    box.run(
        "sh",
        "-c",
        "mkdir -p locked/in; echo 1 > locked/in/f; ln -s /usr/bin/python3 py; chmod 0 locked/in/f locked/in locked",
    )
    tar = b"".join(box.provider.get_files(box.ref, "/workspace"))
    box.run("sh", "-c", "chmod -R u+rwx locked; rm -r locked py")
    box.provider.put_files(box.ref, "/workspace", io.BytesIO(tar))
    assert b"".join(box.provider.get_files(box.ref, "/workspace")) == tar
    assert box.provider.read_file(box.ref, "/workspace/locked/in/f", limit=10) == b"1\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root reaches a container's files from outside")
def test_files_are_unpacked_without_an_exec_and_owned_by_the_agent(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box.provider, "_create_exec", lambda *args, **options: pytest.fail("an exec"))
    box.provider.write_file(box.ref, "/workspace/a/f", b"x")
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as out:
        out.addfile(tarfile.TarInfo("b/g"))
    tar.seek(0)
    box.provider.put_files(box.ref, "/data", tar)
    monkeypatch.undo()
    assert box.run("stat", "-c", "%u:%g", "a", "a/f", "/data/b", "/data/b/g").stdout.split() == [b"10001:10001"] * 4


def test_unpack_never_writes_through_a_link(box: Box) -> None:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as tar:
        link = tarfile.TarInfo("out")
        link.type, link.linkname = tarfile.SYMTYPE, "/tmp"
        tar.addfile(link)
        tar.addfile(tarfile.TarInfo("out/file"))
    whole.seek(0)
    with pytest.raises(Rejected):
        box.provider.put_files(box.ref, "/workspace", whole)
    assert box.run("ls", "/tmp").stdout == b""


def test_truncated_tar_is_rejected(box: Box) -> None:
    box.run("sh", "-c", "for i in 1 2 3; do echo $i > $i; done")
    tar = b"".join(box.provider.get_files(box.ref, "/workspace"))
    with pytest.raises(Rejected):
        box.provider.put_files(box.ref, "/data", io.BytesIO(tar[:1024]))


def test_abandoned_transfer_leaves_no_process(box: Box) -> None:
    box.run("sh", "-c", "head -c 50M /dev/zero > big")
    transfer = box.provider.get_files(box.ref, "/workspace")
    next(transfer)
    transfer.close()
    assert box.processes() == []


def test_tools_are_installed(box: Box) -> None:
    script = "python --version && pip --version && python -c 'import pydantic, aiohttp' && node --version && tsc --version"
    assert box.run("sh", "-ec", script).exit_code == 0
    assert box.run("sh", "-ec", "echo 'console.log((1 as number) + 1)' > a.ts; tsx a.ts").stdout == b"2\n"
    git = "git init -q r && cd r && touch f && git add f && git commit -qm m && git log --format='%an <%ae>'"
    assert box.run("sh", "-ec", git).stdout == b"Agent <agent@leasehold.invalid>\n"
    assert b"JSON" in box.run("cat", "/opt/leasehold/skills/catan/prompt.md").stdout


def test_home_is_in_the_workspace_and_ignored_by_git(box: Box) -> None:
    done = box.run("sh", "-ec", "cd; pwd; touch x; cd /workspace; git init -q; git status --porcelain")
    assert done.stdout == b"/workspace/.home\n"


def test_image_is_not_rebuilt_without_changes(capsys: pytest.CaptureFixture[str]) -> None:
    call_command("build_image")
    capsys.readouterr()
    call_command("build_image")
    assert capsys.readouterr().out.endswith(": up to date\n")


def test_build_without_a_daemon_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    with pytest.raises(CommandError, match="Docker daemon is unavailable"):
        call_command("build_image")


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


def test_usage_from_the_kernel_equals_usage_from_the_engine(box: Box) -> None:
    """Compares host access and the engine's API, as used from another host. The sandbox is idle in between."""
    ours, engine = box.provider.stats(box.ref), box.provider._engine
    if engine.cgroup(box.ref) is None:
        pytest.skip("control groups cannot be seen from here")
    engine.cgroups[box.ref] = None
    its = box.provider.stats(box.ref)
    assert ours and its and 0 <= its.cpu_micros - ours.cpu_micros < 10**6
    assert abs(its.memory_bytes - ours.memory_bytes) < 16 << 20
    engine.client.stop(box.ref, timeout=0)
    assert box.provider.stats(box.ref) is None
    del engine.cgroups[box.ref]
    assert box.provider.stats(box.ref) is None
