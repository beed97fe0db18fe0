"""Private Docker Engines: a second `dockerd` beside the machine's own, which share nothing but the kernel.

Each engine runs in a network namespace and a mount namespace of its own. In the host's network namespace a daemon without a
bridge would delete `docker0`, the bridge of the machine's engine. In the mount namespace `/etc/docker`, which holds the
engine's id, and `/run/containerd` are private, and all mounts disappear with the last process. Containers have no network."""

import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from docker import APIClient
from docker.errors import DockerException
from docker.utils import kwargs_from_env

from controlplane.supervisor import die_with_parent
from tests.support.database import CACHE
from tests.support.servers.services import skip_or_fail
from tests.support.waiting import wait_until

SANDBOX_IMAGE = os.environ.get("LEASEHOLD_SANDBOX_IMAGE", "leasehold-sandbox:latest")
IMAGES = (SANDBOX_IMAGE, "leasehold-egress:latest")
CGROUP_ROOTS = (Path("/sys/fs/cgroup"), *Path("/sys/fs/cgroup").glob("*"))  # version 2, and the controllers of version 1
CALL_TIMEOUT_SECONDS = 60
CACHE_SECONDS = 7 * 24 * 3600  # for layers of images that were replaced; another run may be using them
HOLD_NAMESPACES = """
mkdir -p /etc/docker /run/containerd && mount --bind "$0" /etc/docker && mount -t tmpfs tmpfs /run/containerd &&
echo ready && exec sleep infinity
"""


def find_obstacle() -> str:
    """Return the reason why no private engine can run on this machine, or an empty string."""
    if os.geteuid() != 0:
        return "a private Docker Engine needs root"
    missing = [program for program in ("dockerd", "unshare", "nsenter") if not shutil.which(program)]
    return f"a private Docker Engine needs {', '.join(missing)}" if missing else ""


@contextmanager
def private_engine(directory: Path, *, live_restore: bool = False, images: Sequence[str] = IMAGES) -> Iterator["PrivateEngine"]:
    """Run an engine with copies of these images of the machine's own engine. Skips or fails the test where none can run.

    Its data is in `directory`, which must not exist and is removed at the end with everything else of the engine. Enter and
    leave the block in the main thread: the daemon dies with the thread that started it."""
    if obstacle := find_obstacle():
        skip_or_fail(obstacle)
    cache = find_image_cache(images)
    engine = PrivateEngine(directory, live_restore=live_restore)
    try:
        if cache.exists():
            copy_images(cache, directory)
            engine.start()
        else:
            engine.start()
            engine.load(images)
            partial = cache.with_suffix(f".{os.getpid()}")
            copy_images(directory, partial)
            with suppress(OSError):  # a concurrent run was first
                partial.rename(cache)
            shutil.rmtree(partial, ignore_errors=True)
        yield engine
    finally:
        engine.stop()


def find_image_cache(images: Sequence[str]) -> Path:
    """Return the directory for the layers of these images of the machine's own engine. Skips or fails without the images."""
    try:
        with closing(APIClient(**kwargs_from_env(), version="auto", timeout=CALL_TIMEOUT_SECONDS)) as client:
            ids = [client.inspect_image(image)["Id"] for image in images]
    except DockerException as error:
        skip_or_fail(f"no Docker Engine with the images {', '.join(images)}: {error}")
    current = CACHE / f"engine-{hashlib.sha256(' '.join([*images, *ids]).encode()).hexdigest()[:16]}"
    for outdated in set(CACHE.glob("engine-*")) - {current}:
        if outdated.stat().st_mtime < time.time() - CACHE_SECONDS:
            shutil.rmtree(outdated, ignore_errors=True)
    return current


def copy_images(source: Path, target: Path) -> None:
    """Copy the images of a data directory to another. Layers are hard links if possible: an engine never writes to them."""
    target.mkdir(parents=True)
    subprocess.run(["cp", "-a", source / "image", target], check=True)
    if subprocess.run(["cp", "-al", source / "overlay2", target], stderr=subprocess.DEVNULL).returncode:
        shutil.rmtree(target / "overlay2", ignore_errors=True)
        subprocess.run(["cp", "-a", source / "overlay2", target], check=True)


class PrivateEngine:
    """One engine. Other processes reach it through DOCKER_HOST=`url`, and the host sees its containers' processes and cgroups.

    With `live_restore` running containers survive the death of the daemon. Without it, the default of Docker, the next daemon
    stops them when it starts."""

    def __init__(self, directory: Path, *, live_restore: bool = False) -> None:
        self.directory, self.live_restore = directory, live_restore
        self.run_directory = Path(tempfile.mkdtemp(prefix="lh-engine-"))  # short: paths of unix sockets are limited
        self.url = f"unix://{self.run_directory}/docker.sock"
        self.log = self.run_directory / "dockerd.log"
        self._holder: subprocess.Popen[bytes] | None = None  # keeps the namespaces while no daemon runs
        self._daemon: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        return self._daemon is not None

    def start(self) -> None:
        """Start the daemon, for the first time or after `kill` or `crash`, and wait until it responds."""
        assert self._daemon is None, "the daemon is running"
        if self._holder is None:
            self._holder = self._hold_namespaces()
        for stale in self.run_directory.rglob("*.pid"):  # the process ids may be in use again
            stale.unlink()
        arguments = [
            f"--host={self.url}", f"--data-root={self.directory}", f"--exec-root={self.run_directory}/exec",
            f"--pidfile={self.run_directory}/docker.pid", f"--group={os.getgid()}", "--storage-driver=overlay2",
            f"--cgroup-parent=/{self.run_directory.name}", "--exec-opt=native.cgroupdriver=cgroupfs",
            "--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false",
            f"--live-restore={str(self.live_restore).lower()}",
        ]  # fmt: skip
        with self.log.open("ab") as log:
            self._daemon = spawn(
                ["nsenter", f"--target={self._holder.pid}", "--net", "--mount", "dockerd", *arguments], stdout=log, stderr=log
            )
        wait_until(self._responds, f"the engine responds; see {self.log}", within=CALL_TIMEOUT_SECONDS)

    def kill(self) -> None:
        """Kill the daemon by SIGKILL, and with it containerd. The containers and their shims survive."""
        if self._daemon:
            containerd = self.run_directory / "exec/containerd/containerd.pid"
            self._daemon.kill()
            self._daemon.wait()
            self._daemon = None
            pids = _read_lines(containerd)  # the kernel kills containerd at the death of its parent
            wait_until(lambda: not any(map(_is_running, pids)), "containerd has ended")

    def shut_down(self) -> None:
        """Stop the daemon by SIGTERM, as a package upgrade does. Without live-restore it stops all containers first."""
        assert self._daemon
        self._daemon.terminate()
        assert self._daemon.wait(CALL_TIMEOUT_SECONDS) == 0
        self._daemon = None

    def crash(self) -> None:
        """Kill the daemon, all shims and all processes in containers by SIGKILL, as a crash of the host would."""
        self.kill()
        wait_until(lambda: not self._kill_processes(), "all processes of the engine have ended")

    def stop(self) -> None:
        """Kill all processes and remove all data, sockets, mounts, namespaces and cgroups."""
        self.crash()
        if self._holder:
            self._holder.kill()
            self._holder.wait()
        for cgroup in self._list_cgroups():
            for path in sorted(filter(Path.is_dir, cgroup.rglob("*")), reverse=True):
                path.rmdir()
            cgroup.rmdir()
        shutil.rmtree(self.run_directory)
        shutil.rmtree(self.directory, ignore_errors=True)  # if it was never created

    def load(self, images: Sequence[str]) -> None:
        """Load images from the machine's own engine."""
        with subprocess.Popen(["docker", "save", *images], stdout=subprocess.PIPE) as save:
            subprocess.run(
                ["docker", f"--host={self.url}", "load", "--quiet"], stdin=save.stdout, stdout=subprocess.DEVNULL, check=True
            )
        assert save.returncode == 0, "docker save failed"

    def _hold_namespaces(self) -> "subprocess.Popen[bytes]":
        configuration = self.directory / "etc"
        configuration.mkdir(parents=True, exist_ok=True)
        command = ["unshare", "--net", "--mount", "--propagation=slave", "sh", "-c", HOLD_NAMESPACES, str(configuration)]
        holder = spawn(command, stdout=subprocess.PIPE)
        assert holder.stdout
        with holder.stdout as output:
            assert output.readline() == b"ready\n", "the namespaces of the engine could not be created"
        return holder

    def _responds(self) -> bool:
        assert self._daemon
        assert self._daemon.poll() is None, f"the daemon has ended:\n{self.log.read_text()[-2000:]}"
        with suppress(DockerException), closing(APIClient(self.url, version="auto", timeout=CALL_TIMEOUT_SECONDS)) as client:
            return bool(client.ping())
        return False

    def _list_cgroups(self) -> list[Path]:
        return [path for root in CGROUP_ROOTS if (path := root / self.run_directory.name).is_dir()]

    def _kill_processes(self) -> set[int]:
        """Send SIGKILL to every shim and every process in a container. Return their process ids."""
        files = [file for cgroup in self._list_cgroups() for file in cgroup.rglob("cgroup.procs")]
        pids = {int(pid) for file in files for pid in _read_lines(file)}
        pids |= {pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self._is_shim(pid)}
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return pids

    def _is_shim(self, pid: int) -> bool:
        arguments = "".join(_read_lines(Path(f"/proc/{pid}/cmdline"))).split("\0")
        return any(argument.startswith(f"{self.run_directory}/exec/") for argument in arguments)


def spawn(command: Sequence[str], **streams: Any) -> "subprocess.Popen[bytes]":
    parent = os.getpid()
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=lambda: die_with_parent(parent), **streams
    )


def _is_running(pid: str) -> bool:
    status = _read_lines(Path(f"/proc/{pid}/status"))
    return any(line.startswith("State:") and "Z" not in line for line in status)


def _read_lines(path: Path) -> list[str]:
    """Read a file of a process or of a cgroup, which may have ended."""
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
