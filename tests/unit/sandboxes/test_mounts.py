"""Agents whose /data is mounted: a real s3fs, a real S3 server, real containers without network and capabilities."""

import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.core.checks import run_checks

from leases import execution, leasing
from leases.models import Lease
from sandboxes import destruction, eviction, providers, sweeps
from sandboxes import pool as pools
from sandboxes.errors import SandboxBusy, StoreUnavailable
from sandboxes.models import Pool, Sandbox, TransitionReason
from sandboxes.models.state import AgentData, DataFile, DataObject, DataSize, DataStorageMode
from sandboxes.providers.base import DATA, Rejected
from sandboxes.providers.memory import MemoryProvider
from sandboxes.runs import Command
from sandboxes.state import mount_points, mounts, pruning, s3fs, storage_mode
from sandboxes.state.s3fs import SandboxMount
from sandboxes.storage import get_store
from tests.conftest import MINUTE, NOW, run_in_threads, skip_or_fail
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.docker, pytest.mark.django_db]
ADA = "did:plc:ada"
NEEDED = ("TEST_S3_URL", "TEST_BUCKET", "TEST_S3_ACCESS_KEY_ID", "TEST_S3_SECRET_ACCESS_KEY")


class Wire:
    """The way to the S3 server, which can be made to hang, or to be refused. What it goes to is not touched."""

    def __init__(self, host: str, port: int) -> None:
        self.target, self.flowing, self.open = (host, port), threading.Event(), True
        self.flowing.set()
        self.ends: list[socket.socket] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self.listener,), daemon=True).start()

    def refuse(self) -> None:
        """As if the server were dead."""
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.cut()

    def restore(self) -> None:
        self.flowing.set()
        if self.listener.fileno() < 0:
            self.listener = socket.create_server(("127.0.0.1", self.port))
            threading.Thread(target=self._accept, args=(self.listener,), daemon=True).start()

    def cut(self) -> None:
        for end in self.ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self.ends.clear()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                here, _ = listener.accept()
                there = socket.create_connection(self.target)
                self.ends += [here, there]
                for source, sink in ((here, there), (there, here)):
                    threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while chunk := source.recv(1 << 16):
                self.flowing.wait()
                sink.sendall(chunk)
            sink.shutdown(socket.SHUT_WR)


@pytest.fixture
def wire(settings: Any, tmp_path: Path) -> Iterator[Wire]:
    """The S3 server of this run and a state directory of this test's own; afterwards nothing is mounted in that."""
    url, bucket, key_id, secret = (os.environ.get(name, "") for name in NEEDED)
    lacking = [name for name in NEEDED if not os.environ.get(name)]
    lacking += [] if shutil.which("s3fs") and os.path.exists("/dev/fuse") else ["s3fs, or /dev/fuse"]
    if lacking or os.geteuid():
        skip_or_fail(f"mounting takes root and {', '.join(lacking or ['nothing else'])}")
    host, port = url.removeprefix("http://").rstrip("/").split(":")
    wire = Wire(host, int(port))
    settings.STORAGE_BACKEND, settings.SANDBOX_PROVIDER, settings.DATA_KEEPING = "s3", "docker", "mount"
    settings.S3_BUCKET, settings.S3_ACCESS_KEY_ID, settings.S3_SECRET_ACCESS_KEY = bucket, key_id, secret
    settings.S3_ENDPOINT, settings.S3_REGION = f"http://127.0.0.1:{wire.port}", "us-east-1"
    settings.STORAGE_PREFIX = f"t-{uuid4().hex}/"
    settings.STATE_DIR = tmp_path / "state, ours"
    get_store.cache_clear()
    yield wire
    wire.restore()
    settings.STORAGE_BACKEND, settings.S3_SECRET_ACCESS_KEY = "s3", secret
    for place in SandboxMount.list_all():
        place.clear()
    mount_points.unmount_all(s3fs.mounts_root())
    get_store().clear()
    get_store.cache_clear()
    wire.refuse()


@pytest.fixture
def pool(wire: Wire, docker_pool: Pool) -> Pool:
    """After `wire`, so that its sandboxes go first."""
    return docker_pool


def sh(lease: Lease, line: str, *, seconds: float = 30) -> str:
    command = Command(argv=["sh", "-c", line], timeout=timedelta(seconds=seconds))
    _, result = execution.exec_command(lease.pk, command, now=NOW)
    return (result.stdout + result.stderr).decode().strip()


def place_of(lease: Lease) -> SandboxMount:
    return SandboxMount.of(sandbox_of(lease).pk)


def sandbox_of(lease: Lease) -> Sandbox:
    found = pools.find_by_holder(lease.pk)
    assert found
    return found


def prefix(lease: Lease) -> str:
    return s3fs.build_key_prefix(lease.agent_did)


def in_bucket(lease: Lease) -> set[str]:
    found = {key.removeprefix(prefix(lease)) for key in get_store().list(prefix(lease))}
    return {path for path in found if path and not path.endswith("/") and not path.startswith("skills/")}


def mounted_in(place: SandboxMount) -> list[str]:
    written = str(place.directory).replace(" ", "\\040")
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if written in line]


def nothing_left(place: SandboxMount) -> bool:
    return not mounted_in(place) and not place._find_s3fs_pids() and not place.exists()


def docker(*argv: str) -> str:
    return subprocess.run(["docker", *argv], check=True, capture_output=True, text=True).stdout


def took(act: Callable[[], object]) -> float:
    began = time.monotonic()
    act()
    return time.monotonic() - began


def refused(lease: Lease) -> StoreUnavailable:
    with pytest.raises(StoreUnavailable) as why:
        sh(lease, "true")
    assert why.value.code == "store_unavailable"
    return why.value


def end(lease: Lease) -> None:
    leasing.release(lease.pk, now=NOW)
    swept = sweeps.destroy_due(now=NOW + MINUTE)
    assert swept.counts == {"destroyed": 1}, swept


@pytest.fixture
def one(grant: Callable[..., Lease]) -> Lease:
    return grant(environment="game-1")


@pytest.fixture
def two(grant: Callable[..., Lease]) -> Lease:
    """A second sandbox of the same agent."""
    return grant(environment="game-2")


def test_what_a_sandbox_writes_is_in_the_bucket_and_the_other_way(one: Lease) -> None:
    assert sh(one, f"mkdir -p {DATA}/memory && echo hello >{DATA}/memory/note && cat {DATA}/memory/note") == "hello"
    assert get_store().get(f"{prefix(one)}memory/note") == b"hello\n"
    get_store().set(f"{prefix(one)}from/outside.txt", b"good day")
    assert sh(one, f"cat {DATA}/from/outside.txt") == "good day"
    assert sh(one, f"rm {DATA}/memory/note; ls {DATA}/memory") == ""
    assert in_bucket(one) == {"from/outside.txt"}


def test_what_is_written_is_weighed_with_the_rest(one: Lease) -> None:
    def weight() -> int:
        assert pruning.measure_mounted(now=NOW).counts == {"weighed": 1}
        data = AgentData.objects.get()
        assert DataSize.objects.latest("pk").size_bytes == data.size_bytes
        return data.size_bytes

    sh(one, f"echo hello >{DATA}/note")
    before = weight()
    sh(one, f"mkdir {DATA}/more && head -c 5000 /dev/zero >{DATA}/more/zeros && rm {DATA}/note")
    assert weight() == before + 5000 - len("hello\n")


def test_files_behave_as_programs_expect(one: Lease) -> None:
    line = (
        f"cd {DATA} && echo 1 >a && echo 2 >>a && mv a b && ln -s b c && cat c && chmod 750 b && stat -c %a:%u b && "
        "git init -q repo && cd repo && touch x && git add x && git commit -qm one && git log --format=%s"
    )
    assert sh(one, line, seconds=60).splitlines() == ["1", "2", "750:10001", "one"]


def test_two_sandboxes_of_an_agent_see_each_others_files(one: Lease, two: Lease) -> None:
    sh(one, f"echo first >{DATA}/note")
    assert sh(two, f"cat {DATA}/note") == "first"
    sh(two, f"echo second and longer >{DATA}/note; echo more >{DATA}/more")
    wait_until(lambda: sh(one, f"cat {DATA}/note {DATA}/more") == "second and longer\nmore", "the other's change")


def test_another_agent_has_none_of_it(one: Lease, grant: Callable[..., Lease]) -> None:
    sh(one, f"echo secret >{DATA}/note")
    assert sh(grant(agent="did:plc:bob", environment="game-9"), f"ls -A {DATA}") == "skills"


@pytest.mark.parametrize("did", ["did:web:example.org%3A8443:agents:x", "did:key:z6Mk-._a"])
def test_a_did_with_colons_or_escapes_is_a_directory_like_any_other(grant: Callable[..., Lease], did: str) -> None:
    lease = grant(agent=did)
    sh(lease, f"echo hello >{DATA}/note")
    assert get_store().get(f"agents/{did}/files/note") == b"hello\n"


def test_a_skill_is_there_at_first_and_one_that_was_removed_does_not_come_back(one: Lease, two: Lease) -> None:
    assert sh(one, f"ls {DATA}/skills/catan") == "prompt.md"
    sh(one, f"rm -r {DATA}/skills/catan")
    assert sh(two, f"ls -A {DATA}/skills") == ""


def test_when_s3fs_has_died_the_next_command_has_its_files_again(one: Lease) -> None:
    sh(one, f"echo hello >{DATA}/note")
    place = place_of(one)
    for _ in range(2):
        place.end(patience_seconds=0)
        assert place.probe() == s3fs.DEAD
        assert sh(one, f"cat {DATA}/note") == "hello"
    assert len(place._find_s3fs_pids()) == 1


def test_so_it_has_in_a_container_that_was_started_while_it_was_mounted(one: Lease) -> None:
    sh(one, f"echo hello >{DATA}/note")
    docker("kill", sandbox_of(one).ref)
    assert sh(one, f"cat {DATA}/note") == "hello"
    place_of(one).end(patience_seconds=0)
    assert sh(one, f"cat {DATA}/note; echo again >{DATA}/more") == "hello"
    assert get_store().get(f"{prefix(one)}more") == b"again\n"


def test_there_is_no_volume_for_what_is_mounted(one: Lease) -> None:
    sh(one, "true")
    ref = sandbox_of(one).ref
    assert docker("volume", "ls", "-q", "--filter", f"label=leasehold.name={ref}") == f"{ref}-workspace\n"


def test_what_was_unmounted_by_somebody_else_is_mounted_again(one: Lease) -> None:
    sh(one, f"echo hello >{DATA}/note")
    place_of(one).unmount()
    assert sh(one, f"cat {DATA}/note") == "hello"


def test_a_process_that_goes_on_without_a_mount_cannot_write_beside_it(one: Lease) -> None:
    sh(one, "true")
    place_of(one).unmount()
    asked = providers.get_provider("docker").exec(
        sandbox_of(one).ref, ["touch", f"{DATA}/lost"], env={}, timeout=MINUTE, mark=uuid4().hex
    )
    assert b"Permission denied" in asked.stderr


def test_many_at_once_make_one_mount(one: Lease) -> None:
    sh(one, "true")
    sandbox, provider = sandbox_of(one), providers.get_provider("docker")
    place_of(one).unmount()
    with run_in_threads(8) as run:
        assert run(lambda _: mounts.attach(sandbox, provider)) == [None] * 8
    place = SandboxMount.of(sandbox.pk)
    assert len(place._find_s3fs_pids()) == 1
    assert len(mount_points.read_mountinfo(place.data)) == len(mount_points.read_mountinfo(place.fs)) == 1


def test_a_server_that_hangs_refuses_commands_in_bounded_time_and_is_found_again(one: Lease, wire: Wire) -> None:
    sh(one, f"echo hello >{DATA}/note")
    before = place_of(one)._find_s3fs_pids()
    wire.flowing.clear()
    assert took(lambda: refused(one)) < 20
    wire.restore()
    wait_until(lambda: place_of(one).probe() == s3fs.RESPONSIVE, "s3fs finds its server again", within=60)
    assert sh(one, f"cat {DATA}/note") == "hello"
    assert place_of(one)._find_s3fs_pids() == before


def test_a_server_that_is_dead_refuses_commands_in_bounded_time(one: Lease, two: Lease, wire: Wire) -> None:
    sh(one, f"echo hello >{DATA}/note")
    wire.refuse()
    assert took(lambda: refused(one)) < 20
    assert took(lambda: refused(two)) < 20  # nothing was mounted in it yet
    assert not place_of(two).device()
    wire.restore()
    assert sh(two, f"cat {DATA}/note") == "hello"


def test_an_s3fs_that_is_stuck_is_replaced(one: Lease) -> None:
    sh(one, f"echo hello >{DATA}/note")
    [stuck] = place_of(one)._find_s3fs_pids()
    os.kill(stuck, 19)
    assert sh(one, f"cat {DATA}/note") == "hello"
    assert stuck not in place_of(one)._find_s3fs_pids()


def test_wrong_keys_are_told_and_leave_nothing_mounted(one: Lease, settings: Any) -> None:
    settings.S3_SECRET_ACCESS_KEY = "not-the-secret"
    assert "not-the-secret" not in str(refused(one))
    place = place_of(one)
    assert not mounted_in(place) and not place._find_s3fs_pids() and not (place.directory / "keys").exists()


def test_a_sandbox_whose_command_waits_for_a_dead_server_is_destroyed_all_the_same(one: Lease, wire: Wire) -> None:
    sh(one, f"echo hello >{DATA}/note; (while :; do cat {DATA}/note {DATA}/none; done) >/dev/null 2>&1 &")
    place, ref = place_of(one), sandbox_of(one).ref
    wire.flowing.clear()
    assert took(lambda: end(one)) < 40
    assert nothing_left(place)
    assert ref not in docker("ps", "-a", "--format", "{{.Names}}")


def test_a_sandbox_that_sleeps_leaves_nothing_and_has_its_files_when_it_wakes(one: Lease) -> None:
    sh(one, f"echo hello >{DATA}/note; sleep 300 & cd {DATA}")
    place = place_of(one)
    assert len(mounted_in(place)) == 2
    assert eviction.evict(place.pk, now=NOW, reason="test")
    assert nothing_left(place)
    assert sh(one, f"cat {DATA}/note") == "hello"


def test_what_a_control_plane_that_died_has_left_is_cleared_and_nothing_else(one: Lease, two: Lease) -> None:
    sh(one, "true")
    sh(two, "true")
    gone, stays = place_of(one), place_of(two)
    docker("rm", "-f", sandbox_of(one).ref)
    Sandbox.objects.filter(pk=gone.pk).update(state="destroyed", destroyed_at=NOW)
    assert mounts.clear_leftovers() == [gone.pk]
    assert nothing_left(gone)
    assert sh(two, f"echo hello >{DATA}/note; cat {DATA}/note") == "hello"
    assert mounts.clear_leftovers() == []
    assert stays.device()


def test_nothing_of_the_keys_is_in_the_sandbox(one: Lease, settings: Any) -> None:
    sh(one, f"echo hello >{DATA}/note")
    seen = sh(one, f"env; cat /proc/self/mountinfo /proc/mounts; ps -eo args=; ls -laR {DATA} /run; cat /proc/*/environ")
    seen += docker("inspect", sandbox_of(one).ref)
    for secret in (settings.S3_SECRET_ACCESS_KEY, settings.S3_ACCESS_KEY_ID, "passwd", settings.S3_ENDPOINT, "s3fs -"):
        assert secret not in seen
    place = place_of(one)
    assert sorted(os.listdir(place.directory)) == ["data", "fs", "log"]
    assert settings.S3_SECRET_ACCESS_KEY not in (place.directory / "log").read_text()
    for pid in place._find_s3fs_pids():
        told = Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()
        assert settings.S3_SECRET_ACCESS_KEY.encode() not in told


def test_a_sandbox_with_a_mount_has_no_more_rights_than_any(one: Lease) -> None:
    status = sh(one, "cat /proc/self/status; ls /sys/class/net; ls /dev")
    assert "CapBnd:\t0000000000000000" in status
    assert "NoNewPrivs:\t1" in status
    assert "fuse" not in status
    assert "eth0" not in status
    asked = f"import ctypes, os; c = ctypes.CDLL(None, use_errno=True); c.umount2(b'{DATA}', 2); print(ctypes.get_errno())"
    assert sh(one, f'python3 -c "{asked}"') == "1"


def test_a_mount_made_inside_reaches_nobody(one: Lease) -> None:
    """Propagation goes one way: what the container's root would mount on /data stays in there."""
    sh(one, "true")
    place, ref = place_of(one), sandbox_of(one).ref
    pid = docker("inspect", "-f", "{{.State.Pid}}", ref).strip()
    subprocess.run(["nsenter", "-t", pid, "-m", "mount", "-t", "tmpfs", "none", DATA], check=True)
    assert [line.split(" - ")[1].split()[0] for line in mounted_in(place)] == ["fuse.s3fs", "fuse.s3fs"]


def test_an_agent_whose_data_is_copied_works_in_a_sandbox_that_could_have_a_mount(one: Lease) -> None:
    AgentData.objects.create(agent_did=one.agent_did, keeping=DataStorageMode.SYNC, created_at=NOW, changed_at=NOW)
    assert sh(one, f"echo hello >{DATA}/note; cat {DATA}/note") == "hello"
    assert DataFile.objects.filter(data__agent_did=one.agent_did, path="note", removed=False).exists()
    place = place_of(one)
    assert place.exists() and not mounted_in(place)
    eviction.evict(place.pk, now=NOW, reason="test")
    assert nothing_left(place)
    assert sh(one, f"cat {DATA}/note") == "hello"


def test_a_mounted_agent_takes_a_ready_made_sandbox_that_has_a_place_for_it(pool: Pool, settings: Any, grant: Any) -> None:
    Pool.objects.filter(pk=pool.pk).update(warm_target=1)
    settings.DATA_KEEPING = "sync"
    without = pools.start_warm(Pool.objects.get(pk=pool.pk), now=NOW)
    settings.DATA_KEEPING = "mount"
    first = grant(environment="game-1")
    assert sh(first, f"echo hello >{DATA}/note") == ""
    assert without and sandbox_of(first).pk != without.pk
    destruction.schedule_destroy(without.pk, now=NOW, code=TransitionReason.OPERATOR)
    ready = pools.start_warm(Pool.objects.get(pk=pool.pk), now=NOW)
    second = grant(environment="game-2")
    assert sh(second, f"cat {DATA}/note") == "hello"
    assert ready and sandbox_of(second).pk == ready.pk


def test_without_what_it_takes_an_agent_is_refused_and_told_why(one: Lease, settings: Any) -> None:
    settings.STORAGE_BACKEND = "filesystem"
    AgentData.objects.create(agent_did=one.agent_did, keeping=DataStorageMode.MOUNT, created_at=NOW, changed_at=NOW)
    assert "STORAGE_BACKEND=s3" in str(refused(one))
    settings.STORAGE_BACKEND = "s3"
    assert sh(one, f"echo hello >{DATA}/note; cat {DATA}/note") == "hello"


def test_sandboxes_of_other_providers_are_refused(wire: Wire, memory: MemoryProvider) -> None:
    sandbox = Sandbox(provider="memory", agent_did=ADA, pk=UUID(int=1))
    with pytest.raises(Rejected, match="memory"):
        mounts.attach(sandbox, memory)
    assert mounts.prepare_mount_directory(sandbox) is None


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("STORAGE_BACKEND", "filesystem", "STORAGE_BACKEND=s3"), ("SANDBOX_PROVIDER", "process", "SANDBOX_PROVIDER=docker")],
)
def test_mounting_is_refused_at_the_start_where_it_cannot_be_had(wire: Wire, settings: Any, name: str, value: str, said: str):
    assert [each.id for each in run_checks() if each.id == "leasehold.E005"] == []
    setattr(settings, name, value)
    [error] = [each for each in run_checks() if each.id == "leasehold.E005"]
    assert "LEASEHOLD_DATA=mount" in error.msg and said in error.msg


# Modes of files alone: this server keeps no metadata of an object that is a directory to it.
LINES = "mkdir -p deep/er && echo 1 >deep/er/a && echo run >tool && chmod 755 tool && ln -s tool link && : >empty"
SHOWN = (
    "cd /data && find . -path ./skills -prune -o -type d -printf '%P\\n' -o -printf '%P %y %m %l\\n' | sort; cat deep/er/a tool"
)


def test_copied_data_can_be_mounted_and_copied_again(one: Lease) -> None:
    mine = AgentData.objects.create(agent_did=one.agent_did, keeping=DataStorageMode.SYNC, created_at=NOW, changed_at=NOW)
    sh(one, f"cd {DATA} && {LINES}")
    was = sh(one, SHOWN)
    with pytest.raises(SandboxBusy):
        storage_mode.convert_to_mount(reread(mine), now=NOW)
    assert in_bucket(one) == set()
    eviction.evict(sandbox_of(one).pk, now=NOW, reason="test")
    storage_mode.convert_to_mount(reread(mine), now=NOW)
    assert reread(mine).keeping == DataStorageMode.MOUNT
    assert not DataObject.objects.exists()
    assert in_bucket(one) == {"deep/er/a", "tool", "link", "empty"}
    assert sh(one, SHOWN) == was
    sh(one, f"echo more >{DATA}/more; rm {DATA}/empty")
    with pytest.raises(SandboxBusy, match="has a process"):
        storage_mode.convert_to_sync(reread(mine), now=NOW)
    changed = sh(one, SHOWN)
    eviction.evict(sandbox_of(one).pk, now=NOW, reason="test")
    storage_mode.convert_to_sync(reread(mine), now=NOW)
    assert in_bucket(one) == set()
    assert sh(one, SHOWN) == changed
    assert sh(one, f"ls {DATA}/skills") == "catan"


def test_what_is_written_while_data_is_being_copied_is_not_lost(one: Lease, at_checkpoint: Callable[..., None]) -> None:
    sh(one, f"echo hello >{DATA}/note")
    mine = AgentData.objects.get(agent_did=one.agent_did)
    eviction.evict(sandbox_of(one).pk, now=NOW, reason="test")

    def use() -> None:
        sh(one, f"echo late >{DATA}/late")
        eviction.evict(sandbox_of(one).pk, now=NOW, reason="test")

    at_checkpoint("data copied", use)
    with pytest.raises(SandboxBusy, match="meanwhile"):
        storage_mode.convert_to_sync(mine, now=NOW)
    assert sh(one, f"cat {DATA}/note {DATA}/late") == "hello\nlate"


def reread(mine: AgentData) -> AgentData:
    return AgentData.objects.get(pk=mine.pk)
