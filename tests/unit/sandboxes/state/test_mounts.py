"""Mounted /data with a real s3fs, a real S3 server and real containers without network and capabilities."""

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.core.checks import run_checks

from leases import leasing
from leases.models import Lease
from sandboxes import destruction, eviction, providers
from sandboxes.audit import COMMAND_LINE
from sandboxes.errors import SandboxBusy, StoreUnavailable
from sandboxes.models import OperatorAction, Pool, Sandbox, TransitionReason
from sandboxes.models.state import AgentData, DataEvent, DataFile, DataObject, DataSize, DataStorageMode
from sandboxes.pool import allocation
from sandboxes.providers.base import DATA
from sandboxes.providers.errors import Rejected
from sandboxes.providers.memory import MemoryProvider
from sandboxes.state import mount_points, mounts, pruning, s3fs, storage_mode
from sandboxes.state.s3fs import SandboxMount
from sandboxes.storage import get_store
from sandboxes.sweeps import passes
from tests.conftest import MINUTE, NOW, run_in_threads
from tests.support.servers.services import require_program, require_s3, skip_or_fail
from tests.support.storage.state import sandbox_of, sh
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.docker, pytest.mark.django_db, pytest.mark.matrix("LEASEHOLD_DATA=mount: optional, with s3fs")]
ADA = "did:plc:ada"


class S3Proxy:
    """TCP proxy in front of the S3 server that can hang or refuse connections. The server itself is not affected."""

    def __init__(self, host: str, port: int) -> None:
        self.target, self.flowing, self.open = (host, port), threading.Event(), True
        self.flowing.set()
        self.connections: list[socket.socket] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self.listener,), daemon=True).start()

    def refuse(self) -> None:
        """Refuse connections, as if the server were down."""
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
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self.connections.clear()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                upstream = socket.create_connection(self.target)
                self.connections += [client, upstream]
                for source, sink in ((client, upstream), (upstream, client)):
                    threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while chunk := source.recv(1 << 16):
                self.flowing.wait()
                sink.sendall(chunk)
            sink.shutdown(socket.SHUT_WR)


@pytest.fixture
def s3_proxy(settings: Any, tmp_path: Path) -> Iterator[S3Proxy]:
    """The S3 server behind a proxy, and a state directory of this test only. Unmounts everything afterwards."""
    url, bucket, key_id, secret = require_s3()
    require_program("s3fs", "s3fs")
    if os.geteuid() or not os.path.exists("/dev/fuse"):
        skip_or_fail("mounting requires root and /dev/fuse")
    host, port = url.removeprefix("http://").rstrip("/").split(":")
    s3_proxy = S3Proxy(host, int(port))
    settings.STORAGE_BACKEND, settings.SANDBOX_PROVIDER, settings.DATA_KEEPING = "s3", "docker", "mount"
    settings.S3_BUCKET, settings.S3_ACCESS_KEY_ID, settings.S3_SECRET_ACCESS_KEY = bucket, key_id, secret
    settings.S3_ENDPOINT, settings.S3_REGION = f"http://127.0.0.1:{s3_proxy.port}", "us-east-1"
    settings.STORAGE_PREFIX = f"t-{uuid4().hex}/"
    settings.STATE_DIR = tmp_path / "state, ours"
    get_store.cache_clear()
    yield s3_proxy
    s3_proxy.restore()
    settings.STORAGE_BACKEND, settings.S3_SECRET_ACCESS_KEY = "s3", secret
    for mount in SandboxMount.list_all():
        mount.clear()
    mount_points.unmount_all(s3fs.mounts_root())
    get_store().clear()
    get_store.cache_clear()
    s3_proxy.refuse()


@pytest.fixture
def pool(s3_proxy: S3Proxy, docker_pool: Pool) -> Pool:
    """Requested after `s3_proxy`, so that its sandboxes are destroyed first."""
    return docker_pool


def mount_of(lease: Lease) -> SandboxMount:
    return SandboxMount.of(sandbox_of(lease).pk)


def key_prefix(lease: Lease) -> str:
    return s3fs.build_key_prefix(lease.agent_did)


def bucket_paths(lease: Lease) -> set[str]:
    paths = {key.removeprefix(key_prefix(lease)) for key in get_store().list(key_prefix(lease))}
    return {path for path in paths if path and not path.endswith("/") and not path.startswith("skills/")}


def mount_lines(mount: SandboxMount) -> list[str]:
    escaped = str(mount.directory).replace(" ", "\\040")
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if escaped in line]


def is_removed(mount: SandboxMount) -> bool:
    return not mount_lines(mount) and not mount._find_s3fs_pids() and not mount.exists()


def docker(*argv: str) -> str:
    return subprocess.run(["docker", *argv], check=True, capture_output=True, text=True).stdout


def measure_seconds(act: Callable[[], object]) -> float:
    began = time.monotonic()
    act()
    return time.monotonic() - began


def assert_refused(lease: Lease) -> StoreUnavailable:
    with pytest.raises(StoreUnavailable) as error:
        sh(lease, "true")
    assert error.value.code == "store_unavailable"
    return error.value


def destroy(lease: Lease, *, discard: bool = False) -> None:
    """Destroy the sandbox of a lease. With `discard` its last state is not stored, which would need the server."""
    if discard:
        leasing.discard(lease.pk, now=NOW)
    else:
        leasing.release(lease.pk, now=NOW)
    result = passes.destroy_due(now=NOW + MINUTE)
    assert result.counts == {"destroyed": 1}, result


def test_files_appear_in_the_bucket_and_objects_in_the_sandbox(one: Lease) -> None:
    assert sh(one, f"mkdir -p {DATA}/memory && echo hello >{DATA}/memory/note && cat {DATA}/memory/note") == "hello"
    assert get_store().get(f"{key_prefix(one)}memory/note") == b"hello\n"
    ref = sandbox_of(one).ref
    assert docker("volume", "ls", "-q", "--filter", f"label=leasehold.name={ref}") == f"{ref}-workspace\n"  # none for /data
    get_store().set(f"{key_prefix(one)}from/outside.txt", b"good day")
    assert sh(one, f"cat {DATA}/from/outside.txt") == "good day"
    assert sh(one, f"rm {DATA}/memory/note; ls {DATA}/memory") == ""
    assert bucket_paths(one) == {"from/outside.txt"}


def test_files_behave_as_programs_expect_and_are_measured(one: Lease) -> None:
    def measured_bytes() -> int:
        assert pruning.measure_mounted(now=NOW).counts == {"measured": 1}
        data = AgentData.objects.get()
        assert DataSize.objects.latest("pk").size_bytes == data.size_bytes
        return data.size_bytes

    line = (
        f"cd {DATA} && echo 1 >a && echo 2 >>a && mv a b && ln -s b c && cat c && chmod 750 b && stat -c %a:%u b && "
        "git init -q repo && cd repo && touch x && git add x && git commit -qm one && git log --format=%s"
    )
    assert sh(one, line).splitlines() == ["1", "2", "750:10001", "one"]
    before = measured_bytes()
    sh(one, f"mkdir {DATA}/more && head -c 5000 /dev/zero >{DATA}/more/zeros && rm {DATA}/b")
    assert measured_bytes() == before + 5000 - len("1\n2\n")


def test_two_sandboxes_of_an_agent_see_each_others_files(one: Lease, two: Lease) -> None:
    sh(one, f"echo first >{DATA}/note")
    assert sh(two, f"cat {DATA}/note") == "first"
    sh(two, f"echo second and longer >{DATA}/note; echo more >{DATA}/more")
    wait_until(lambda: sh(one, f"cat {DATA}/note {DATA}/more") == "second and longer\nmore", "the other's change")


def test_files_are_not_visible_to_other_agents(one: Lease, grant: Callable[..., Lease]) -> None:
    sh(one, f"echo secret >{DATA}/note")
    assert sh(grant(agent="did:plc:bob", environment="game-9"), f"ls -A {DATA}") == "skills"


def test_did_with_colons_or_escapes_is_a_valid_prefix(grant: Callable[..., Lease]) -> None:
    for did in ("did:web:example.org%3A8443:agents:x", "did:key:z6Mk-._a"):
        sh(grant(agent=did, environment=f"game-{len(did)}"), f"echo hello >{DATA}/note")
        assert get_store().get(f"agents/{did}/files/note") == b"hello\n"


def test_skill_is_seeded_once_and_not_after_removal(one: Lease, two: Lease) -> None:
    assert "prompt.md" in sh(one, f"ls {DATA}/skills/catan").split()
    sh(one, f"rm -r {DATA}/skills/catan")
    assert sh(two, f"ls -A {DATA}/skills") == ""


def test_dead_or_stuck_s3fs_is_replaced_before_the_next_command(one: Lease) -> None:
    sh(one, f"echo hello >{DATA}/note")
    mount = mount_of(one)
    for _ in range(2):
        mount.end(grace_seconds=0)
        assert mount.probe() == s3fs.DEAD
        assert sh(one, f"cat {DATA}/note") == "hello"
    [stuck] = mount._find_s3fs_pids()
    os.kill(stuck, signal.SIGSTOP)
    assert sh(one, f"cat {DATA}/note") == "hello"
    assert stuck not in mount._find_s3fs_pids()


def test_dead_s3fs_is_replaced_in_a_container_started_while_mounted(one: Lease) -> None:
    sh(one, f"echo hello >{DATA}/note")
    docker("kill", sandbox_of(one).ref)
    assert sh(one, f"cat {DATA}/note") == "hello"
    mount_of(one).end(grace_seconds=0)
    assert sh(one, f"cat {DATA}/note; echo again >{DATA}/more") == "hello"
    assert get_store().get(f"{key_prefix(one)}more") == b"again\n"


def test_externally_removed_mount_refuses_writes_and_is_restored(one: Lease) -> None:
    sh(one, f"echo hello >{DATA}/note")
    mount_of(one).unmount()
    provider = providers.get_provider("docker")
    result = provider.exec(sandbox_of(one).ref, ["touch", f"{DATA}/lost"], env={}, timeout=MINUTE, mark=uuid4().hex)
    assert b"Permission denied" in result.stderr
    assert sh(one, f"cat {DATA}/note") == "hello"


def test_concurrent_attaches_create_one_mount(one: Lease) -> None:
    sh(one, "true")
    sandbox, provider = sandbox_of(one), providers.get_provider("docker")
    mount_of(one).unmount()
    with run_in_threads(8) as run:
        assert run(lambda _: mounts.attach(sandbox, provider)) == [None] * 8
    mount = SandboxMount.of(sandbox.pk)
    assert len(mount._find_s3fs_pids()) == 1
    assert len(mount_points.read_mountinfo(mount.data)) == len(mount_points.read_mountinfo(mount.fs)) == 1


def test_hanging_server_refuses_commands_in_bounded_time_and_recovers(one: Lease, s3_proxy: S3Proxy) -> None:
    sh(one, f"echo hello >{DATA}/note")
    before = mount_of(one)._find_s3fs_pids()
    s3_proxy.flowing.clear()
    assert measure_seconds(lambda: assert_refused(one)) < 20
    s3_proxy.restore()
    wait_until(lambda: mount_of(one).probe() == s3fs.RESPONSIVE, "s3fs finds its server again", within=60)
    assert sh(one, f"cat {DATA}/note") == "hello"
    assert mount_of(one)._find_s3fs_pids() == before


def test_dead_server_refuses_commands_in_bounded_time(one: Lease, two: Lease, s3_proxy: S3Proxy) -> None:
    sh(one, f"echo hello >{DATA}/note")
    s3_proxy.refuse()
    assert measure_seconds(lambda: assert_refused(one)) < 20
    assert measure_seconds(lambda: assert_refused(two)) < 20  # never mounted before
    assert not mount_of(two).device()
    s3_proxy.restore()
    assert sh(two, f"cat {DATA}/note") == "hello"


def test_wrong_keys_are_reported_and_leave_no_mount(one: Lease, settings: Any) -> None:
    settings.S3_SECRET_ACCESS_KEY = "not-the-secret"
    assert "not-the-secret" not in str(assert_refused(one))
    mount = mount_of(one)
    assert not mount_lines(mount) and not mount._find_s3fs_pids() and not (mount.directory / "keys").exists()


def test_sandbox_with_a_command_waiting_for_a_dead_server_is_destroyed(one: Lease, s3_proxy: S3Proxy) -> None:
    sh(one, f"echo hello >{DATA}/note; (while :; do cat {DATA}/note {DATA}/none; done) >/dev/null 2>&1 &")
    mount, ref = mount_of(one), sandbox_of(one).ref
    s3_proxy.flowing.clear()
    assert measure_seconds(lambda: destroy(one, discard=True)) < 40
    assert is_removed(mount)
    assert DataEvent.objects.filter(holder=one.pk, kind="dropped", detail__contains="not uploaded yet").exists()
    assert ref not in docker("ps", "-a", "--format", "{{.Names}}")


def test_eviction_removes_the_mount_and_wake_restores_it(one: Lease) -> None:
    sh(one, f"echo hello >{DATA}/note; sleep 300 & cd {DATA}")
    mount = mount_of(one)
    assert len(mount_lines(mount)) == 2
    assert eviction.evict(mount.pk, now=NOW, reason="test")
    assert is_removed(mount)
    assert sh(one, f"cat {DATA}/note") == "hello"


def test_only_mounts_of_dead_sandboxes_are_cleared(one: Lease, two: Lease) -> None:
    sh(one, "true")
    sh(two, "true")
    orphaned, live = mount_of(one), mount_of(two)
    docker("rm", "-f", sandbox_of(one).ref)
    Sandbox.objects.filter(pk=orphaned.pk).update(state="destroyed", destroyed_at=NOW)
    assert mounts.clear_leftovers() == [orphaned.pk]
    assert is_removed(orphaned)
    assert sh(two, f"echo hello >{DATA}/note; cat {DATA}/note") == "hello"
    assert mounts.clear_leftovers() == []
    assert live.device()


def test_s3_keys_are_not_visible_in_the_sandbox(one: Lease, settings: Any) -> None:
    sh(one, f"echo hello >{DATA}/note")
    output = sh(one, f"env; cat /proc/self/mountinfo /proc/mounts; ps -eo args=; ls -laR {DATA} /run; cat /proc/*/environ")
    output += docker("inspect", sandbox_of(one).ref)
    for secret in (settings.S3_SECRET_ACCESS_KEY, settings.S3_ACCESS_KEY_ID, "passwd", settings.S3_ENDPOINT, "s3fs -"):
        assert secret not in output
    mount = mount_of(one)
    assert sorted(os.listdir(mount.directory)) == ["data", "fs", "log"]
    assert settings.S3_SECRET_ACCESS_KEY not in (mount.directory / "log").read_text()
    for pid in mount._find_s3fs_pids():
        environment = Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()
        assert settings.S3_SECRET_ACCESS_KEY.encode() not in environment


def test_mount_gives_the_sandbox_no_additional_rights(one: Lease) -> None:
    status = sh(one, "cat /proc/self/status; ls /sys/class/net; ls /dev")
    assert "CapBnd:\t0000000000000000" in status and "NoNewPrivs:\t1" in status
    assert "fuse" not in status and "eth0" not in status
    script = f"import ctypes, os; c = ctypes.CDLL(None, use_errno=True); c.umount2(b'{DATA}', 2); print(ctypes.get_errno())"
    assert sh(one, f'python3 -c "{script}"') == "1"
    # Propagation is one-way: a mount made by the container's root on /data stays in the container.
    pid = docker("inspect", "-f", "{{.State.Pid}}", sandbox_of(one).ref).strip()
    subprocess.run(["nsenter", "-t", pid, "-m", "mount", "-t", "tmpfs", "none", DATA], check=True)
    assert [line.split(" - ")[1].split()[0] for line in mount_lines(mount_of(one))] == ["fuse.s3fs", "fuse.s3fs"]


def test_synced_data_works_in_a_sandbox_with_a_mount_directory(one: Lease) -> None:
    AgentData.objects.create(agent_did=one.agent_did, keeping=DataStorageMode.SYNC, created_at=NOW, changed_at=NOW)
    assert sh(one, f"echo hello >{DATA}/note; cat {DATA}/note") == "hello"
    assert DataFile.objects.filter(data__agent_did=one.agent_did, path="note", removed=False).exists()
    mount = mount_of(one)
    assert mount.exists() and not mount_lines(mount)
    eviction.evict(mount.pk, now=NOW, reason="test")
    assert is_removed(mount)
    assert sh(one, f"cat {DATA}/note") == "hello"


def test_mounted_agent_claims_only_warm_sandboxes_with_a_mount_directory(pool: Pool, settings: Any, grant: Any) -> None:
    Pool.objects.filter(pk=pool.pk).update(warm_target=1)
    settings.DATA_KEEPING = "sync"
    without = allocation.start_warm(Pool.objects.get(pk=pool.pk), now=NOW)
    settings.DATA_KEEPING = "mount"
    first = grant(environment="game-1")
    assert sh(first, f"echo hello >{DATA}/note") == ""
    assert without and sandbox_of(first).pk != without.pk
    destruction.schedule_destroy(without.pk, now=NOW, code=TransitionReason.OPERATOR)
    ready = allocation.start_warm(Pool.objects.get(pk=pool.pk), now=NOW)
    second = grant(environment="game-2")
    assert sh(second, f"cat {DATA}/note") == "hello"
    assert ready and sandbox_of(second).pk == ready.pk


def test_missing_requirement_is_reported(one: Lease, settings: Any) -> None:
    settings.STORAGE_BACKEND = "filesystem"
    AgentData.objects.create(agent_did=one.agent_did, keeping=DataStorageMode.MOUNT, created_at=NOW, changed_at=NOW)
    assert "STORAGE_BACKEND=s3" in str(assert_refused(one))
    settings.STORAGE_BACKEND = "s3"
    assert sh(one, f"echo hello >{DATA}/note; cat {DATA}/note") == "hello"


def test_other_providers_are_rejected(s3_proxy: S3Proxy, memory: MemoryProvider) -> None:
    sandbox = Sandbox(provider="memory", agent_did=ADA, pk=UUID(int=1))
    with pytest.raises(Rejected, match="memory"):
        mounts.attach(sandbox, memory)
    assert mounts.prepare_mount_directory(sandbox) is None


@pytest.mark.parametrize(
    ("name", "value", "requirement"),
    [("STORAGE_BACKEND", "filesystem", "STORAGE_BACKEND=s3"), ("SANDBOX_PROVIDER", "process", "SANDBOX_PROVIDER=docker")],
)
def test_startup_check_reports_missing_requirement(s3_proxy: S3Proxy, settings: Any, name: str, value: str, requirement: str):
    assert [message.id for message in run_checks() if message.id == "leasehold.E005"] == []
    setattr(settings, name, value)
    [error] = [message for message in run_checks() if message.id == "leasehold.E005"]
    assert "LEASEHOLD_DATA=mount" in error.msg and requirement in error.msg


# Modes of files only: this server stores no metadata of directory objects.
CREATE_FILES = "mkdir -p deep/er && echo 1 >deep/er/a && echo run >tool && chmod 755 tool && ln -s tool link && : >empty"
LIST_FILES = (
    "cd /data && find . -path ./skills -prune -o -type d -printf '%P\\n' -o -printf '%P %y %m %l\\n' | sort; cat deep/er/a tool"
)


def test_data_is_converted_to_mount_and_back(one: Lease) -> None:
    data = AgentData.objects.create(agent_did=one.agent_did, keeping=DataStorageMode.SYNC, created_at=NOW, changed_at=NOW)
    sh(one, f"cd {DATA} && {CREATE_FILES}")
    before = sh(one, LIST_FILES)
    with pytest.raises(SandboxBusy):
        storage_mode.convert_to_mount(reload(data), now=NOW)
    assert bucket_paths(one) == set()
    eviction.evict(sandbox_of(one).pk, now=NOW, reason="test")
    storage_mode.convert_to_mount(reload(data), now=NOW, actor=COMMAND_LINE)
    assert reload(data).keeping == DataStorageMode.MOUNT
    assert not DataObject.objects.exists()
    assert bucket_paths(one) == {"deep/er/a", "tool", "link", "empty"}
    assert sh(one, LIST_FILES) == before
    sh(one, f"echo more >{DATA}/more; rm {DATA}/empty")
    with pytest.raises(SandboxBusy, match="has a process"):
        storage_mode.convert_to_sync(reload(data), now=NOW)
    changed = sh(one, LIST_FILES)
    eviction.evict(sandbox_of(one).pk, now=NOW, reason="test")
    storage_mode.convert_to_sync(reload(data), now=NOW, actor=COMMAND_LINE)
    recorded = OperatorAction.objects.values_list("action", "detail").order_by("detail")
    assert [*recorded] == [("Set storage mode", "mount → sync"), ("Set storage mode", "sync → mount")]
    assert bucket_paths(one) == set()
    assert sh(one, LIST_FILES) == changed
    assert sh(one, f"ls {DATA}/skills") == "catan"


def test_conversion_fails_if_data_changes_meanwhile(one: Lease, at_checkpoint: Callable[..., None]) -> None:
    sh(one, f"echo hello >{DATA}/note")
    data = AgentData.objects.get(agent_did=one.agent_did)
    eviction.evict(sandbox_of(one).pk, now=NOW, reason="test")

    def use() -> None:
        sh(one, f"echo late >{DATA}/late")
        eviction.evict(sandbox_of(one).pk, now=NOW, reason="test")

    at_checkpoint("data copied", use)
    with pytest.raises(SandboxBusy, match="meanwhile"):
        storage_mode.convert_to_sync(data, now=NOW)
    assert sh(one, f"cat {DATA}/note {DATA}/late") == "hello\nlate"


def reload(data: AgentData) -> AgentData:
    return AgentData.objects.get(pk=data.pk)
