"""Hardening of Docker sandboxes: escapes and resource exhaustion. The attacks are in tests/support/attacks.py."""

import errno
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.test import override_settings

from sandboxes.providers.base import SandboxSpec
from sandboxes.providers.command_results import ExecResult
from sandboxes.providers.docker import seccomp
from sandboxes.providers.docker.provider import DockerProvider
from tests.conftest import DOCKER_IMAGE, MINUTE
from tests.support import attacks
from tests.support.sandbox_agent import Gateway
from tests.support.servers.services import require_gvisor
from tests.support.waiting import run_with_growing_timeouts, wait_until

pytestmark = pytest.mark.docker
MEMORY_MIB, PIDS = 128, 64
PROCESSES_OF_OURS = ("ps ", "python3 -I -S /opt/leasehold/agent", "/opt/leasehold/shim")
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "uts")
BOMB = """
import os, time
count = 0
try:
    while os.fork():
        count += 1
    time.sleep(300)
except OSError:
    print(count, flush=True)
while True:
    try: os.fork()
    except OSError: pass
"""
HOG = "x = b'x' * (1 << 30)"
# Attacks and tests that do not have their outcome under gVisor, by reason.
GVISOR_FAILURES = {
    "the sandbox's own kernel answers, and reaches nothing of the host": (
        "be_spared_by_the_oom_killer", "call_get_mempolicy", "call_io_setup", "call_keyctl", "call_mbind",
        "call_name_to_handle_at", "call_open_by_handle_at", "call_perf_event_open", "call_process_vm_writev",
        "call_set_mempolicy", "call_setns", "call_syslog", "call_unshare", "clone_by_flags_in_memory",
        "clone_into_a_mount_namespace", "clone_into_a_user_namespace", "come_first", "leave_memory_behind",
        "leave_messages_behind", "leave_semaphores_behind", "make_a_user_namespace", "make_a_user_namespace_by_program",
        "open_dev_fuse", "open_dev_net_tun", "speak_another_protocol", "trace_a_child", "turn_off_randomized_addresses",
        "write_anywhere_else", "test_writable_root_relaxes_nothing_else",
        "test_replaceable_system_call_fails_with_enosys[435]",
    ),
    "commands can read process 1, which has no secret": (
        "enter_the_namespaces_of_process_1", "read_its_auxv", "read_its_environ", "read_its_maps", "read_its_memory",
        "see_its_files", "see_its_ns_net",
    ),
    "its /proc does not say it: setuid programs have no effect, and its own list of system calls holds": (
        "gain_privileges_by_exec", "run_without_a_seccomp_filter",
    ),
    "its root is a file system of the sandbox alone, served by a process of the host": ("see_the_hosts_files",),
    "its processes have no cgroup namespace": ("test_sandbox_shares_no_namespace_with_the_host_or_another_sandbox",),
    "it has no pidfd_open": ("test_development_tools_work[python]",),
    "too many processes or too much memory end the sandbox": (
        "test_fork_bomb_is_limited_and_ends_with_its_exec", "test_oom_kill_affects_only_its_program",
        "test_full_tmpfs_leaves_memory_to_clean_up",
    ),
}  # fmt: skip
SHARE_MEMORY = """
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=60 << 20)
for mib in range(60):
    memory.buf[mib << 20:(mib + 1) << 20] = b"x" * (1 << 20)
memory.unlink()
print("fine")
"""
# Fills all kinds of memory that outlive processes. Prints the number of bytes and of files.
FILL = """
import ctypes
libc, taken, files = ctypes.CDLL(None), 0, 0
libc.shmat.restype = ctypes.c_void_p
for place in ("/tmp", "/var/tmp", "/run", "/dev/shm"):
    try:
        while files < 100_000:
            open(f"{place}/{files}", "x").close()
            files += 1
    except OSError as error:
        assert error.errno == 28, error
    try:
        with open(f"{place}/{files - 1}", "wb", buffering=0) as big:
            while True:
                taken += big.write(bytes(1 << 12))
    except OSError as error:
        assert error.errno == 28, error
while (segment := libc.shmget(0, 1 << 20, 0o1600)) >= 0:
    ctypes.memset(libc.shmat(segment, None, 0), 1, 1 << 20)
    taken += 1 << 20
print(taken >> 20, files)
"""

# Bash scripts that exercise a tool. Each succeeds and prints "fine" at the end.
TOOLS = {
    "analysis": """cat >plot.py <<'END'
import matplotlib, numpy, pandas
matplotlib.use("Agg")
from matplotlib import pyplot
frame = pandas.DataFrame({"turn": numpy.arange(100), "points": numpy.arange(100) % 7})
frame.groupby("points").sum().plot(y="turn")
pyplot.savefig("plot.png")
END
python3 -W error::UserWarning plot.py 2>errors; cat errors; test ! -s errors
test "$(head -c 4 plot.png | tail -c 3)" = PNG; echo fine""",
    "bash": """
sleep 30 & kill $! ; wait $! || true
diff <(printf '%s\\n' a b | sort -r | cat) <(printf 'b\\na\\n')
mkfifo pipe; (echo fine > pipe) & cat pipe; wait
""",
    "coreutils": """
printf 'one\\ntwo\\n' > a; cp -a a b; ln -s a c; ln a d; install -m 700 a e; touch -d yesterday b; chmod 600 b; mv b f
tar cf x.tar a c d e f; test $(tar tf x.tar | wc -l) = 5; test $(find . -type l | xargs readlink) = a
flock a timeout 60 nice -n 5 nohup setsid env true; df . > /dev/null; ps aux > /dev/null; test $(id -un) = agent
dd if=/dev/zero of=z bs=4k count=4 conv=fsync status=none; truncate -s 1M z; split -n 4 z; sha256sum z | cut -c1-4; echo fine
""",
    "git": """
git init -q one; cd one; echo a > a; git add a; git commit -qm one; git checkout -qb two; echo b >> a; git commit -qam two
git checkout -q main; git merge -q two; git gc -q; cd ..; git clone -q file://$PWD/one three; git -C three fsck --strict
test "$(git -C three log -1 --format=%s)" = two; git -C three worktree add -q ../four; echo fine
""",
    "python": """
python3 - <<'END'
import asyncio, concurrent.futures, ctypes, fcntl, mmap, multiprocessing, os, pty, resource, select, selectors, shutil, signal
import socket, sqlite3, ssl, subprocess, tempfile, threading
with concurrent.futures.ThreadPoolExecutor(4) as many:
    assert list(many.map(str, range(9)))[-1] == "8"
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert sum(pool.map(abs, range(5))) == 10
assert subprocess.run(["cat"], input=b"x", capture_output=True, preexec_fn=os.setsid).stdout == b"x"
assert socket.if_nameindex()[0][1] == "lo"
async def talk():
    async def answer(reader, writer):
        writer.write(await reader.readline()); writer.close()
    tcp, unix = await asyncio.start_server(answer, "127.0.0.1", 0), await asyncio.start_unix_server(answer, "sock")
    port = tcp.sockets[0].getsockname()[1]
    for dialled in (asyncio.open_connection("127.0.0.1", port), asyncio.open_unix_connection("sock")):
        reader, writer = await dialled
        writer.write(b"hi\\n")
        assert await reader.readline() == b"hi\\n"
        writer.close()
    assert await (await asyncio.create_subprocess_exec("true")).wait() == 0
asyncio.run(talk())
one, two = socket.socketpair()
socket.send_fds(one, [b"x"], [0]); assert socket.recv_fds(two, 1, 1)[1]
os.close(os.memfd_create("x")); os.close(os.pidfd_open(os.getpid())); os.posix_fallocate(os.open("y", 66), 0, 4096)
assert pty.spawn(["true"]) == 0
END
python3 -m venv --without-pip env && env/bin/python -c 'print("fine")'
""",
    "sqlite": """
python3 - <<'END'
import sqlite3, threading
for mode in ("delete", "wal"):
    first = sqlite3.connect(f"{mode}.db", timeout=20)
    first.execute(f"pragma journal_mode={mode}"); first.execute("create table t (n)")
    def write():
        mine = sqlite3.connect(f"{mode}.db", timeout=20)
        for n in range(20):
            with mine: mine.execute("insert into t values (?)", (n,))
    threads = [threading.Thread(target=write) for _ in range(3)]
    [each.start() for each in threads]; [each.join() for each in threads]
    assert first.execute("select count(*) from t").fetchone() == (60,)
    first.execute("vacuum")
print("fine")
END
""",
    "node": """
cat > a.js <<'END'
const { Worker } = require("worker_threads"), { execFileSync, fork } = require("child_process"), http = require("http")
const fs = require("fs"), os = require("os")
if (process.argv[2] === "child") process.exit(0)
os.networkInterfaces(); os.cpus(); os.userInfo()
const watched = new Promise(done => fs.watch(".", done))
fs.promises.writeFile("b", "c").then(() => watched).then(() => {
  execFileSync("true")
  const work = "require('worker_threads').parentPort.postMessage(7)"
  fork(__filename, ["child"]).on("exit", code => new Worker(work, { eval: true })
    .on("message", () => { const s = http.createServer((q, a) => a.end("fine")).listen(0, "127.0.0.1", () =>
      http.get(s.address(), a => a.on("data", d => { console.log(String(d)); process.exit(code) }))) }))
})
END
node a.js
""",
    "npm": """
mkdir lib app; cd lib; npm init -y > /dev/null; echo 'module.exports = "fine"' > index.js; npm pack --silent > /dev/null
cd ../app; npm init -y > /dev/null; npm pkg set scripts.say='node -p "require(\\"lib\\")"'
npm install --offline --no-audit --no-fund --silent ../lib/lib-1.0.0.tgz; npm run --silent say
""",
    "typescript": """
echo 'const words: string[] = ["fine"]; console.log(words[0])' > a.ts
tsc --strict --target es2022 a.ts; node a.js; tsx a.ts
""",
}


@dataclass
class Cell:
    provider: DockerProvider
    ref: str

    def run(self, *argv: str, seconds: float = 60, stdin: bytes = b"", cap: int = 1 << 20) -> ExecResult:
        limit = timedelta(seconds=seconds)
        return self.provider.exec(self.ref, argv, env={}, timeout=limit, stdin=stdin, cap=cap, mark=uuid4().hex)

    def lives(self) -> bool:
        return self.run("echo", "well").stdout == b"well\n" and not self.processes()

    def processes(self) -> list[str]:
        """List command lines of live processes, except process 1 and the listing itself."""
        lines = self.run("ps", "-eo", "args=").stdout.decode().splitlines()
        return [line for line in lines if not line.startswith(PROCESSES_OF_OURS) and not line.endswith(" <defunct>")]


def docker(*argv: str) -> str:
    done = subprocess.run(["docker", *argv], check=False, capture_output=True, text=True)
    return done.stdout + done.stderr


def inspected(*argv: str) -> Any:
    return json.loads(docker(*argv))[0]


@dataclass
class Maker:
    """Runs sandboxes of one owner, under one runtime."""

    gateway: Gateway
    runtime: str = ""
    owner: str = field(default_factory=lambda: f"lhs-{uuid4().hex[:16]}")

    @contextmanager
    def run(self, sockets: Path | None = None, **fields: Any) -> Iterator[Cell]:
        """Run a sandbox. With a directory `sockets` it has a socket, which contains the directory's name, and small limits."""
        if sockets:
            sockets.chmod(0o755)
            (sockets / "llm.sock").write_text(sockets.name)
            fields |= {"memory_mib": MEMORY_MIB, "pids": PIDS, "sockets": sockets}
        provider, name = DockerProvider(), f"{self.owner}-{uuid4().hex[:8]}"
        spec = SandboxSpec(name, self.owner, agent=self.gateway.mount, runtime=self.runtime, **fields)
        try:
            cell = Cell(provider, provider.create(spec))
            provider.wait_ready(cell.ref, timeout=MINUTE)
            yield cell
        finally:
            provider.destroy(name)


@pytest.fixture(
    scope="module",
    params=["runc", pytest.param("gVisor", marks=pytest.mark.matrix("test_gvisor.py has the smoke cases"))],
)
def maker(request: pytest.FixtureRequest, agent_gateway: Gateway) -> Maker:
    return Maker(agent_gateway, require_gvisor() if request.param == "gVisor" else "")


@pytest.fixture(autouse=True)
def _failures_under_gvisor(request: pytest.FixtureRequest, maker: Maker) -> None:
    """Expect the failures that have a reason."""
    name = request.node.name.replace("gVisor-", "").replace("[gVisor]", "")
    attack = name.removeprefix("test_attack_is_refused[").removesuffix("]")
    for reason, names in GVISOR_FAILURES.items():
        if maker.runtime and {name, attack} & {*names}:
            request.applymarker(pytest.mark.xfail(reason=reason, strict=True))


@pytest.fixture(scope="module", autouse=True)
def _commands_by_agent(agent_gateway: Gateway) -> Iterator[None]:
    with override_settings(AGENT_GATEWAY=agent_gateway.client_path):
        yield


@pytest.fixture(scope="module")
def cells(maker: Maker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Cell]]:
    """Two sandboxes of one owner, each with its own socket."""
    mktemp = tmp_path_factory.mktemp
    with maker.run(mktemp("a")) as one, maker.run(mktemp("b")) as two:
        yield [one, two]


@pytest.fixture(scope="module")
def cell(cells: list[Cell]) -> Cell:
    return cells[0]


@pytest.fixture(scope="module")
def workshop(maker: Maker) -> Iterator[Cell]:
    """Sandbox of default size, for running tools."""
    with maker.run() as cell:
        yield cell


@pytest.fixture(scope="module")
def loosened(maker: Maker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    """Sandbox with a writable root file system, from an image in which the agent's user owns /opt/tools."""
    context = tmp_path_factory.mktemp("context")
    (context / "tools").mkdir()
    (context / "Dockerfile").write_text(f"FROM {DOCKER_IMAGE}\nCOPY --chown=10001:10001 tools /opt/tools\n")
    docker("build", "-q", "-t", maker.owner, str(context))
    try:
        with maker.run(tmp_path_factory.mktemp("c"), image=maker.owner, writable_root=True) as cell:
            yield cell
    finally:
        docker("image", "rm", maker.owner)


@pytest.fixture(scope="module")
def attack_results(cell: Cell) -> dict[str, list[str]]:
    """Run all attacks in one exec."""
    return outcomes(cell)


def outcomes(cell: Cell) -> dict[str, list[str]]:
    """Return the outcomes of all attacks. Two of them target a listener on this host."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=20):  # reachable from the host
            pass
        out.connect(("192.0.2.1", 9))  # sends nothing: determines the host's address
        addresses = [f"127.0.0.1:{port}", f"{out.getsockname()[0]}:{port}"]
        done = cell.run("python3", "-I", "-", *addresses, stdin=Path(attacks.__file__).read_bytes(), seconds=300)
    assert done.exit_code == 0, done.stderr.decode()
    found: dict[str, list[str]] = json.loads(done.stdout)
    assert found.keys() >= attacks.ATTACKS.keys() and len(found) == len(attacks.ATTACKS) + 6
    return found


@pytest.mark.parametrize("name", attacks.ATTACKS)
def test_attack_is_refused(attack_results: dict[str, list[str]], name: str) -> None:
    outcome, detail = attack_results[name]
    assert outcome == "refused", detail


def test_no_address_is_reachable(attack_results: dict[str, list[str]]) -> None:
    outcomes = {name: outcome for name, (outcome, _) in attack_results.items() if name.startswith("reach ")}
    assert set(outcomes.values()) == {"refused"}, outcomes


def test_writable_root_relaxes_nothing_else(cell: Cell, loosened: Cell) -> None:
    sealed, loose = (inspected("inspect", each.ref)["HostConfig"] for each in (cell, loosened))
    assert {key for key in sealed if sealed[key] != loose[key]} == {"ReadonlyRootfs", "Mounts"}
    theirs = [[(each["Type"], each["Target"], each.get("ReadOnly")) for each in host["Mounts"]] for host in (sealed, loose)]
    assert theirs[0] == theirs[1]
    assert loosened.run("sh", "-c", "echo '#!/bin/sh\necho mine' > /opt/tools/x; chmod +x /opt/tools/x").exit_code == 0
    assert loosened.run("/opt/tools/x").stdout == b"mine\n"
    found = {name: detail for name, (outcome, detail) in outcomes(loosened).items() if outcome != "refused"}
    assert found == {"write_anywhere_else": "['/opt/tools', '/opt/tools/x']"}


@pytest.mark.parametrize("number", [attacks.SYSCALL_NUMBERS["clone3"][0], 4000])
def test_replaceable_system_call_fails_with_enosys(cell: Cell, number: int) -> None:
    ask = f"import ctypes; libc = ctypes.CDLL(None, use_errno=True); print(libc.syscall({number}, 0, 0), ctypes.get_errno())"
    assert cell.run("python3", "-c", ask).stdout.split() == [b"-1", b"%d" % errno.ENOSYS]


@pytest.mark.parametrize("name", TOOLS)
def test_development_tools_work(workshop: Cell, name: str) -> None:
    place = f"/workspace/{name}"
    done = workshop.run("bash", "-euo", "pipefail", "-c", f"mkdir {place}; cd {place}\n{TOOLS[name]}", seconds=120)
    assert (done.exit_code, done.stdout.split()[-1:]) == (0, [b"fine"]), done.stdout + done.stderr


def test_sandbox_shares_no_namespace_with_the_host_or_another_sandbox(cells: list[Cell]) -> None:
    one, two = (
        set(each.run("sh", "-c", f"for n in {' '.join(NAMESPACES)}; do readlink /proc/self/ns/$n; done").stdout.split())
        for each in cells
    )
    ours = {os.readlink(f"/proc/self/ns/{name}").encode() for name in NAMESPACES}
    assert len(one) == len(two) == len(NAMESPACES)
    assert not one & two and not (one | two) & ours


def test_files_sockets_and_processes_of_another_sandbox_are_invisible(cells: list[Cell]) -> None:
    one, two = cells
    two.run("sh", "-c", "for d in /workspace /data /tmp /var/tmp /run /dev/shm; do echo of-two > $d/theirs; done")
    script = "find / -name theirs 2>/dev/null; cat /run/leasehold/llm.sock; ps -eo args="
    found = one.run("sh", "-c", f"sleep 0.1; {script}").stdout.decode().splitlines()
    assert found[0].startswith("a0")  # its own socket only
    assert not [line for line in found if "theirs" in line and "find" not in line]


LISTEN = """
import os, socket, time
tcp, abstract = socket.create_server(("0.0.0.0", 7777)), socket.socket(socket.AF_UNIX)
abstract.bind("\\0theirs"); abstract.listen()
open("/tmp/listening", "w").close()
while os.path.exists("/tmp/listening"): time.sleep(0.05)
"""
DIAL = """
import json, os, socket
def dials(family, address):
    with socket.socket(family) as out:
        out.settimeout(2)
        return not out.connect_ex(address)
hosts = ["127.0.0.1", "0.0.0.0", "127.0.1.1", *(f"172.17.0.{last}" for last in range(1, 9))]
found = [host for host in hosts if dials(socket.AF_INET, (host, 7777))]
print(json.dumps([dials(socket.AF_UNIX, "\\0theirs"), found]))
"""


def test_listener_in_another_sandbox_is_unreachable(cells: list[Cell]) -> None:
    one, two = cells
    with ThreadPoolExecutor(1) as thread:
        listening = thread.submit(two.run, "python3", "-c", LISTEN)
        wait_until(lambda: two.run("test", "-e", "/tmp/listening").exit_code == 0, "it listens")
        reached = [json.loads(cell.run("python3", "-c", DIAL).stdout) for cell in (two, one)]
        two.run("rm", "/tmp/listening")
    assert listening.result().exit_code == 0
    assert reached == [[True, ["127.0.0.1", "0.0.0.0", "127.0.1.1"]], [False, []]]


def test_container_configuration_is_minimal(cell: Cell) -> None:
    found = inspected("inspect", cell.ref)
    host = found["HostConfig"]
    assert (host["ReadonlyRootfs"], host["Privileged"], host["NetworkMode"]) == (True, False, "none")
    assert (host["CapAdd"], host["CapDrop"]) == (None, ["ALL"])
    assert host["SecurityOpt"] == ["no-new-privileges:true", f"seccomp={seccomp.build_profile()}"]
    assert {"/proc/kcore", "/proc/keys", "/sys/firmware"} <= set(host["MaskedPaths"])
    assert {"/proc/sys", "/proc/sysrq-trigger"} <= set(host["ReadonlyPaths"])
    assert (host["PidMode"], host["IpcMode"], host["UTSMode"], host["CgroupnsMode"]) == ("", "private", "", "private")
    assert not host["Devices"] and not host["Binds"] and not host["VolumesFrom"]
    mounts = {(each["Type"], each["Destination"], each["RW"]) for each in found["Mounts"]}
    assert mounts == {
        ("volume", "/workspace", True), ("volume", "/data", True), ("bind", "/run/leasehold", False),
        ("bind", "/run/leasehold-agent", False),
    }  # fmt: skip


def test_fork_bomb_is_limited_and_ends_with_its_exec(cell: Cell) -> None:
    done = run_with_growing_timeouts(lambda seconds: cell.run("python3", "-c", BOMB, seconds=seconds), lambda done: done.stdout)
    assert done.timed_out
    assert 1 <= int(done.stdout.split()[0]) < PIDS
    assert cell.lives()


def test_oom_kill_affects_only_its_program(cell: Cell) -> None:
    done = cell.run("sh", "-c", f'python3 -c "{HOG}"; echo and on')
    assert (done.stdout, done.oom) == (b"and on\n", False)  # the command itself has ended well
    killed = cell.run("python3", "-c", HOG)
    assert (killed.exit_code, killed.oom) == (137, True)
    assert cell.lives()


def test_full_tmpfs_leaves_memory_to_clean_up(cells: list[Cell]) -> None:
    cell = cells[1]
    filled = cell.run("python3", "-c", FILL)
    assert (filled.exit_code, filled.oom) == (0, False), filled.stderr
    mib, files = map(int, filled.stdout.split())
    assert MEMORY_MIB / 4 < mib < MEMORY_MIB / 2
    assert files < 100_000
    work = cell.run("sh", "-ec", "echo fine > /workspace/x; git init -q g; python3 -c 'import json, asyncio'; cat x")
    assert (work.stdout, work.oom) == (b"fine\n", False), work.stderr
    cell.provider.write_file(cell.ref, "/data/y", b"y")
    assert cell.run("find", "/tmp", "/var/tmp", "/run", "/dev/shm", "-xdev", "-type", "f", "-delete").exit_code == 0
    assert cell.run("sh", "-c", "head -c 1M /dev/zero > /tmp/x && echo room").stdout == b"room\n"


def test_programs_share_60_mib_in_a_sandbox_of_512_mib(maker: Maker) -> None:
    with maker.run(memory_mib=512) as cell:
        result = cell.run("python3", "-c", SHARE_MEMORY)
    assert (result.exit_code, result.stdout) == (0, b"fine\n"), result.stderr


def test_flood_on_both_streams_is_dropped_and_ended(cell: Cell) -> None:
    flood = "yes >&2 & yes"
    done = run_with_growing_timeouts(
        lambda seconds: cell.run("sh", "-c", flood, seconds=seconds, cap=1000), lambda done: done.stdout and done.stderr
    )
    assert (len(done.stdout), len(done.stderr), done.truncated, done.timed_out) == (1000, 1000, True, True)
    assert cell.lives()


def test_daemon_does_not_outlive_a_timed_out_exec(cell: Cell) -> None:
    daemon = "import os, time\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n  os.environ.clear(); time.sleep(300)"
    done = cell.run("sh", "-c", f'env -i /usr/bin/python3 -c "{daemon}"; setsid sleep 300 & sleep 300', seconds=1.5)
    assert done.timed_out
    assert cell.lives()
