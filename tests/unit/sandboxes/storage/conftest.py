"""A scripted HTTP server for the stores that are clients, and two stores of which one supports appends."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxes.storage.base import KeyValueStore
from sandboxes.storage.filesystem import FilesystemStore
from sandboxes.storage.memory import MemoryStore
from tests.support.servers.loopback import ScriptedServer, run_scripted_server


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with run_scripted_server() as server:
        yield server


@pytest.fixture(params=["filesystem", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> KeyValueStore:
    return MemoryStore() if request.param == "memory" else FilesystemStore(tmp_path / "store")


@pytest.fixture
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable fsync: no test cuts the power, and a killed process loses nothing that it has written."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
