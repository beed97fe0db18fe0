"""Fidelity of an emulator: the vendor's whole SDK runs on it, beside the generated clients that the provider uses."""

import warnings
from uuid import uuid4

import pytest
from daytona import CreateSandboxFromSnapshotParams, Daytona, DaytonaConfig, DaytonaNotFoundError, ListSandboxesQuery

from tests.support.remote import GetEmulator


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
