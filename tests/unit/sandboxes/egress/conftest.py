"""Egress server of one sandbox's slot, and a scripted upstream."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from leases import execution
from leases.models import Lease
from sandboxes.egress.server import EgressServer
from sandboxes.models import Sandbox
from sandboxes.runs.operations import Command
from tests.conftest import MINUTE, NOW
from tests.support.servers.egress import EventLoopThread, FakeUpstream, run_server


@pytest.fixture
def loop() -> Iterator[EventLoopThread]:
    loop = EventLoopThread()
    yield loop
    loop.close()


@pytest.fixture
def upstream(settings: Any, loop: EventLoopThread) -> Iterator[FakeUpstream]:
    with loop.run_context(FakeUpstream().listening()) as upstream:
        settings.LLM_URL, settings.LLM_API_KEY = upstream.url, "sk-secret"
        yield upstream


@pytest.fixture(autouse=True)
def short_paths(settings: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    settings.RUNTIME_DIR = tmp_path_factory.mktemp("r")
    settings.EGRESS_DIR = settings.RUNTIME_DIR / "egress"


@pytest.fixture
def lease(transactional_db: None, grant: Callable[..., Lease]) -> Lease:
    found = grant()
    execution.exec_command(found.pk, Command(argv=["true"], timeout=MINUTE), now=NOW)
    return found


@pytest.fixture
def sandbox(lease: Lease) -> Sandbox:
    return Sandbox.objects.get(holder=lease.pk)


@pytest.fixture
def socket_path(sandbox: Sandbox, loop: EventLoopThread) -> Iterator[Path]:
    assert sandbox.slot is not None
    with run_server(loop, slot=sandbox.slot, server=EgressServer(now=lambda: NOW)) as path:
        yield path
