"""nginx for each test module here, and for each test a server, an upstream and sandboxes."""

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
from tests.egress.whole import UPSTREAM_API_KEY, EgressStack, LeasedSandbox
from tests.support.egress import EventLoopThread, FakeUpstream

SLOT_COUNT = 8


@pytest.fixture(scope="module")
def nginx(docker_ready: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NginxProxy]:
    """The proxy, and settings that are this module's: a directory of sockets and a few slots."""
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
    """The way out with a server and an upstream of this test's own."""
    loop = EventLoopThread()
    with ExitStack() as stack:
        stack.callback(loop.close)
        upstream = stack.enter_context(loop.run_context(FakeUpstream().listening()))
        settings.LLM_URL = upstream.url
        if nginx.get_state() != "running":  # a test that failed has left it so
            nginx.start()
        egress = EgressStack(nginx, loop, upstream)
        stack.enter_context(egress.serving)
        egress.serve()
        yield egress


@pytest.fixture
def enter(egress: EgressStack, docker_pool: Pool) -> Callable[..., LeasedSandbox]:
    """Make a lease, and its sandbox ready: enter("did:plc:ada")."""

    def make(agent: str = "did:plc:ada") -> LeasedSandbox:
        ask = leasing.LeaseRequest(agent, f"way-{uuid4().hex[:8]}", "coding", pool=docker_pool.name)
        inside = LeasedSandbox(leasing.acquire(ask, now=NOW)[0])
        execution.ensure_sandbox_ready(inside.lease.pk, now=NOW)
        return inside

    return make


@pytest.fixture
def inside(enter: Callable[..., LeasedSandbox]) -> LeasedSandbox:
    return enter()


@pytest.fixture
def relayed(egress: EgressStack, settings: Any) -> Iterator[RelaySwitch]:
    """What /relay/ leads to, for sandboxes of a policy that lets them."""
    relayed = RelaySwitch(egress.loop)
    relayed.on()
    settings.RELAY_URL, settings.RELAY_AUD, settings.RELAY_LXM = relayed.relay.url, AUD, LXM
    EnvironmentType.objects.filter(name="coding").update(policy=Policy.objects.create(name="relayed", relay=True))
    yield relayed
    relayed.off()
