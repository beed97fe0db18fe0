"""Fixtures of the egress suite: nginx per module; server, upstream and sandboxes per test."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from uuid import uuid4

import pytest
from django.conf import settings
from django.test import override_settings

from leases import execution, leasing
from leases.models import EnvironmentType
from sandboxes.egress.nginx import NginxProxy
from sandboxes.models import Policy, Pool
from sandboxes.providers.docker.engine import Engine
from tests.conftest import NOW
from tests.egress.relay import AUD, LXM, RelaySwitch
from tests.egress.stack import UPSTREAM_API_KEY, EgressStack, LeasedSandbox
from tests.support.servers.egress import EventLoopThread, FakeUpstream

SLOT_COUNT = 8


@pytest.fixture(scope="module")
def nginx(docker_ready: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NginxProxy]:
    """nginx with the module's own settings: directory of sockets, and few slots."""
    runtime = tmp_path_factory.mktemp("r")
    with override_settings(
        RUNTIME_DIR=runtime,
        EGRESS_DIR=runtime / "egress",
        EGRESS_SLOTS=SLOT_COUNT,
        LLM_API_KEY=UPSTREAM_API_KEY,
        EGRESS_IMAGE=settings.EGRESS_IMAGE,
    ):
        nginx = NginxProxy(Engine())
        nginx.start()
        try:
            yield nginx
        finally:
            nginx.stop()


@pytest.fixture
def egress(nginx: NginxProxy, settings: Any, transactional_db: None) -> Iterator[EgressStack]:
    """Egress proxy with the test's own server and upstream."""
    loop = EventLoopThread()
    with ExitStack() as stack:
        stack.callback(loop.close)
        upstream = stack.enter_context(loop.run_context(FakeUpstream().listening()))
        settings.LLM_URL = upstream.url
        if nginx.get_state() != "running":  # after a failed test
            nginx.start()
        egress = EgressStack(nginx, loop, upstream)
        stack.enter_context(egress.serving)
        egress.serve()
        yield egress


@pytest.fixture
def enter(egress: EgressStack, docker_pool: Pool) -> Callable[..., LeasedSandbox]:
    """Factory of leases with a ready sandbox: enter("did:plc:ada")."""

    def make(agent: str = "did:plc:ada") -> LeasedSandbox:
        request = leasing.LeaseRequest(agent, f"egress-{uuid4().hex[:8]}", "coding", pool=docker_pool.name)
        leased = LeasedSandbox(leasing.acquire(request, now=NOW)[0])
        execution.ensure_sandbox_ready(leased.lease.pk, now=NOW)
        return leased

    return make


@pytest.fixture
def leased(enter: Callable[..., LeasedSandbox]) -> LeasedSandbox:
    return enter()


@pytest.fixture
def relayed(egress: EgressStack, settings: Any) -> Iterator[RelaySwitch]:
    """Relay behind /relay/, and a policy that allows it."""
    relayed = RelaySwitch(egress.loop)
    relayed.on()
    settings.RELAY_URL, settings.RELAY_AUD, settings.RELAY_LXM = relayed.relay.url, AUD, LXM
    EnvironmentType.objects.filter(name="coding").update(policy=Policy.objects.create(name="relayed", relay=True))
    yield relayed
    relayed.off()
