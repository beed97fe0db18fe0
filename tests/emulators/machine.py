"""Sandboxes of the vendor emulators: directories and processes of this machine, in namespaces of their own.

Each machine has its own root file system with /workspace-like directories that its user can write, its own process ids and a
read-only view of this machine's programs. That is enough to execute for real, and starts in milliseconds. It is no isolation:
emulators are for tests and demonstrations. Root is required, because other users cannot create these namespaces everywhere."""

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

USER = 1000  # uid and gid of the commands
SHARED = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc")
# Process 1 ignores SIGCHLD, so that the kernel reaps orphans. Not by `trap`: dash resets the signal when it executes a program.
# It ends at the end of its stdin, which this process never writes: the death of this process ends the machine.
SETUP = """set -e
mount -t tmpfs -o mode=755 tmpfs "$ROOT"
for path in $SHARED; do
  if [ -L "$path" ]; then cp -P "$path" "$ROOT$path"
  elif [ -d "$path" ]; then mkdir -p "$ROOT$path"; mount --rbind "$path" "$ROOT$path"; mount -o remount,bind,ro "$ROOT$path"; fi
done
mkdir -p "$ROOT/proc" "$ROOT/dev"
mount -t proc proc "$ROOT/proc"
mount --rbind /dev "$ROOT/dev"
for name in $WRITABLE; do mkdir -p "$ROOT/$name"; mount --bind "$DISK/$name" "$ROOT/$name"; done
exec chroot "$ROOT" sh -c 'echo ready; exec env --ignore-signal=CHLD cat'
"""


class NotRunning(Exception):
    """The machine is stopped."""


class Machine:
    """One sandbox. `directory` holds its disk, which outlives a stop, and is at first a copy of the disk of its image."""

    def __init__(self, directory: Path, *, writable: tuple[str, ...], home: str, image: Path | None = None) -> None:
        self.directory, self.home = directory, home
        self.writable = ("opt", *sorted(path.strip("/") for path in {*writable, home, "/tmp"}))
        self._init: subprocess.Popen[bytes] | None = None
        if image:
            directory.mkdir(parents=True)
            subprocess.run(["cp", "-a", str(image), str(directory / "disk")], check=True)
        (directory / "disk/opt").mkdir(parents=True, exist_ok=True)  # of root
        for name in self.writable[1:]:
            path = directory / "disk" / name
            if not path.exists():
                path.mkdir(parents=True)
                os.chown(path, USER, USER)
        (directory / "disk/tmp").chmod(0o1777)
        (directory / "root").mkdir(exist_ok=True)

    @property
    def is_running(self) -> bool:
        return self._init is not None and self._init.poll() is None

    def start(self) -> None:
        """Start without processes, on the disk of the last stop. Idempotent."""
        if self.is_running:
            return
        environment = {
            "ROOT": str(self.directory / "root"), "DISK": str(self.directory / "disk"), "SHARED": " ".join(SHARED),
            "WRITABLE": " ".join(self.writable), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        }  # fmt: skip
        command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private", "sh", "-c", SETUP]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._init = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
        assert self._init.stdout is not None
        if self._init.stdout.readline() != b"ready\n":
            raise RuntimeError("the namespaces of an emulated sandbox could not be created; root is required")

    def stop(self) -> None:
        """Kill all processes. The disk stays."""
        if self._init is not None:
            self._init.kill()  # --kill-child kills process 1 of the namespace, and the kernel all others
            self._init.wait()
            self._init = None

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def popen(
        self, argv: list[str], *, cwd: str = "", env: dict[str, str] | None = None, user: int = USER, **more: object
    ) -> subprocess.Popen[bytes]:
        """Start a command as the machine's user, or as another one. Raise NotRunning."""
        if not self.is_running:
            raise NotRunning
        assert self._init is not None
        [child] = Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children").read_text().split()
        environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": self.home, **(env or {})}
        script = f"cd {shlex.quote(cwd or self.home)} && exec {shlex.join(argv)}"
        command = [
            "nsenter", f"--target={child}", "--mount", "--pid", "--root", f"--setuid={user}", f"--setgid={user}",
            "--", "/bin/sh", "-c", script,
        ]  # fmt: skip
        return subprocess.Popen(command, env=environment, cwd="/", start_new_session=True, **more)  # type: ignore[call-overload,no-any-return]

    def run(self, argv: list[str], *, timeout: float | None = None, **more: object) -> tuple[int, bytes, bytes]:
        """Run a command and return (exit code, stdout, stderr). Raise subprocess.TimeoutExpired after killing its session."""
        process = self.popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise
        code = process.returncode
        return (code if code >= 0 else 128 - code), stdout, stderr

    def mount(self, source: Path, path: str) -> None:
        """Mount a directory of this machine read-only at a path. Raise NotRunning."""
        self._change_mounts('mkdir -p "$1" && mount --bind "$0" "$1" && mount -o remount,bind,ro "$1"', str(source), path)

    def unmount(self, path: str) -> None:
        self._change_mounts('umount "$1"', "", path)

    def _change_mounts(self, script: str, source: str, path: str) -> None:
        if self._init is None or not self.is_running:
            raise NotRunning
        [child] = Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children").read_text().split()
        target = f"{self.directory}/root{path}"
        subprocess.run(["nsenter", f"--target={child}", "--mount", "sh", "-c", script, source, target], check=True)

    def write(self, path: str, content: bytes) -> None:
        """Write a file as the machine's user, creating missing parents. Raise OSError."""
        script = f"mkdir -p {shlex.quote(os.path.dirname(path))} && cat >{shlex.quote(path)}"
        process = self.popen(["sh", "-c", script], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        _, stderr = process.communicate(content)
        if process.returncode:
            raise OSError(stderr.decode(errors="replace").strip())

    def read(self, path: str) -> bytes:
        """Read a file as the machine's user. Raise FileNotFoundError."""
        code, stdout, stderr = self.run(["cat", path])
        if code:
            raise FileNotFoundError(stderr.decode(errors="replace").strip())
        return stdout


@contextmanager
def machine_directory(parent: Path) -> Iterator[Path]:
    """Yield a new directory for the machines of one emulator, and remove it."""
    path = parent / f"machines-{uuid4().hex[:12]}"
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
