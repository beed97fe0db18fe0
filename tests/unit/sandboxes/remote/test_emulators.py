"""Fidelity of an emulator: the vendor's whole SDK runs on it, and its sandboxes reap their orphans."""

import subprocess
import sys
import warnings
from pathlib import Path
from uuid import uuid4

import pytest
from daytona import CreateSandboxFromSnapshotParams, Daytona, DaytonaConfig, DaytonaNotFoundError, ListSandboxesQuery

from tests.emulators.machine import Machine
from tests.lanes.table import REPO
from tests.support.remote import GetEmulator
from tests.support.waiting import wait_until


def test_sdk_of_daytona_runs_on_its_emulator(emulators: GetEmulator) -> None:
    emulator = emulators("daytona")
    with warnings.catch_warnings(action="ignore"):  # without a connection for events, which the emulator does not have
        client = Daytona(DaytonaConfig(api_key=emulator.key, api_url=emulator.api_url, use_deprecated_polling=True))
    name = f"lhr-{uuid4().hex[:16]}"
    sandbox = client.create(CreateSandboxFromSnapshotParams(name=name, labels={"run": name}, auto_stop_interval=30), timeout=30)
    done = sandbox.process.exec("echo out; echo err >&2; exit 3", timeout=10)
    assert (done.exit_code, sorted(done.result.split())) == (3, ["err", "out"])  # one merged text
    sandbox.fs.upload_file(b"\xff\x00content", "/workspace/a.bin")
    assert sandbox.fs.download_file("/workspace/a.bin") == b"\xff\x00content"
    assert [found.name for found in client.list(ListSandboxesQuery(labels={"run": name}))] == [name]
    sandbox.stop(timeout=30)
    sandbox.start(timeout=30)
    assert sandbox.process.exec("cat /workspace/a.bin | wc -c", timeout=10).result == "9\n"
    client.delete(sandbox, timeout=30, wait=True)
    with pytest.raises(DaytonaNotFoundError):
        client.get(name)


# Starts a machine with a process, prints the id of process 1 of the machine and waits.
START = """
import sys, time
from pathlib import Path
from tests.emulators.machine import Machine
from tests.lanes.table import REPO

machine = Machine(Path(sys.argv[1]), writable=("/workspace",), home="/workspace")
machine.start()
machine.popen(["sleep", "600"])
print(Path(f"/proc/{machine._init.pid}/task/{machine._init.pid}/children").read_text(), flush=True)
time.sleep(600)
"""


def test_sandboxes_end_with_the_process_of_their_emulator(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", START, str(tmp_path / "machine")]
    with subprocess.Popen(argv, cwd=REPO, stdout=subprocess.PIPE) as owner:
        assert owner.stdout
        first = Path("/proc", owner.stdout.readline().decode().strip())
        assert first.exists()
        owner.kill()
    wait_until(lambda: not first.exists(), "the sandbox has ended")


def test_orphans_of_a_sandbox_are_reaped(tmp_path: Path) -> None:
    """Thousands of zombies slow down each process of this machine that reads /proc."""
    machine = Machine(tmp_path / "machine", writable=("/workspace",), home="/workspace")
    machine.start()
    try:
        machine.run(["sh", "-c", "(sleep 0.1; echo ended >/workspace/ended) & exit"])
        wait_until(lambda: machine.run(["cat", "/workspace/ended"])[1] == b"ended\n", "the orphan has ended")
        count_zombies = ["sh", "-c", "cat /proc/[0-9]*/stat 2>/dev/null | grep -c ') Z '"]
        wait_until(lambda: machine.run(count_zombies)[1] == b"0\n", "no zombie is left")
    finally:
        machine.remove()
