"""A live server for the Python client, with sandboxes that are processes of this machine."""

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connections

from leasehold import RetryPolicy
from leases.api import command_threads
from sandboxes import providers
from sandboxes.models import Pool
from sandboxes.providers.memory import MemoryProvider
from tests.api.conftest import ApiClient
from tests.support.billing import ADA
from tests.support.servers.cutting_proxy import CuttingProxy, run_cutting_proxy

FAST_RETRIES = RetryPolicy(period_seconds=5, first_pause_seconds=0.01, max_pause_seconds=0.05)


@pytest.fixture
def options(ada: ApiClient, live_server: Any, memory: MemoryProvider) -> Iterator[dict[str, Any]]:
    """Arguments of a sandbox on this server."""
    pool = Pool.objects.create(name=f"client-{uuid.uuid4().hex[:12]}", provider="process", capacity=10)
    yield {
        "environment_type": "catan", "agent": ADA, "pool": pool.name, "url": live_server.url, "api_key": ada.key,
        "retries": FAST_RETRIES,
    }  # fmt: skip
    command_threads.join_all()
    provider = providers.get_provider("process")
    for sandbox in provider.list(str(pool.owner)):
        provider.destroy(sandbox.ref)
    connections.close_all()


@pytest.fixture
def proxy(options: dict[str, Any]) -> Iterator[CuttingProxy]:
    """Proxy in front of the server. The sandbox uses the proxy."""
    with run_cutting_proxy(options["url"]) as proxy:
        options["url"] = proxy.url
        yield proxy
