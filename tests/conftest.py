"""What most tests start from: a moment, a pool of their own on the memory provider, and verbs to arrange with."""

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from django.db import connections

from billing.dates import start_of_day, to_utc_date
from leases import leasing
from leases.models import Lease
from sandboxes import lifecycle, providers
from sandboxes.models import Pool
from sandboxes.providers.memory import MemoryProvider
from sandboxes.storage import get_store
from tests.support.database import restore_template, save_template

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
SERVICES_REQUIRED = os.environ.get("LEASEHOLD_REQUIRE_SERVICES") == "1"
DOCKER_IMAGE = os.environ.get("LEASEHOLD_SANDBOX_IMAGE", "leasehold-sandbox:latest")

# A busy machine may hold up any example for longer than the fifth of a second that one has by default, and making them, too.
# Where every service is promised, as in CI, the same code is given the same examples; elsewhere each run looks at others.
hypothesis.settings.register_profile(
    "unhurried", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], derandomize=SERVICES_REQUIRED
)
hypothesis.settings.load_profile("unhurried")


class SimulatedCrash(BaseException):
    """The process stops here: nothing above catches it, so nothing after the step it is raised in happens."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that use the database, and restore migrated rows after tests with real transactions.

    Threads see committed rows only, so such tests use transaction=True, which empties all tables afterwards."""
    for item in items:
        mark = item.get_closest_marker("django_db")
        if mark and mark.kwargs.get("transaction"):
            mark.kwargs["serialized_rollback"] = True
        if mark or {"db", "transactional_db"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("database")


def skip_or_fail(why: str) -> None:
    """Skip, or fail where every service was promised."""
    if SERVICES_REQUIRED:
        pytest.fail(why)
    pytest.skip(why)


@pytest.fixture(scope="session")
def django_db_keepdb(django_db_keepdb: bool) -> bool:
    """Start from the migrated template, if there is one: Django then keeps the database instead of creating it."""
    return django_db_keepdb or restore_template()


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup: None, django_db_keepdb: bool) -> None:
    if not django_db_keepdb:
        save_template()


@pytest.fixture(autouse=True)
def avoid_midnight() -> None:
    """What reads the clock, as pages and commands do, counts days: so no test begins on one that may be over before it ends."""
    now = datetime.now(UTC)
    left = start_of_day(to_utc_date(now) + timedelta(days=1)) - now
    if left < MINUTE / 2:
        time.sleep(left.total_seconds())


@pytest.fixture(autouse=True)
def isolate_state_dirs(tmp_path: Path, settings: Any) -> Iterator[None]:
    """A store and a state directory of this test's own: what others have left would be pruned, or counted."""
    settings.STATE_DIR, settings.STORAGE_DIR = tmp_path / "state", tmp_path / "store"
    get_store.cache_clear()
    yield
    get_store.cache_clear()


@pytest.fixture
def now() -> datetime:
    return NOW


@pytest.fixture
def memory() -> Iterator[MemoryProvider]:
    provider = providers.get_provider("memory")
    assert isinstance(provider, MemoryProvider)
    provider.reset()
    yield provider
    provider.reset()


@pytest.fixture
def pool(db: None, memory: MemoryProvider) -> Pool:
    """A pool of this test's own, on the memory provider."""
    return Pool.objects.create(name=f"pool-{uuid.uuid4().hex[:12]}", provider="memory", capacity=100)


@pytest.fixture(scope="session")
def docker_ready() -> None:
    """A Docker Engine with the sandbox image, or the test is skipped (or fails, where it was promised)."""
    import docker as sdk

    try:
        client = sdk.from_env(timeout=60)
        client.images.get(DOCKER_IMAGE)
    except sdk.errors.DockerException as why:
        skip_or_fail(f"No Docker Engine with the image {DOCKER_IMAGE}: {why}")


@pytest.fixture
def docker_pool(db: None, docker_ready: None) -> Iterator[Pool]:
    """A pool of this test's own on the real engine; whatever is left of it is removed, by its owner label."""
    pool = Pool.objects.create(
        name=f"docker-{uuid.uuid4().hex[:12]}", provider="docker", image=DOCKER_IMAGE, capacity=100, memory_mib=128
    )
    provider = providers.get_provider("docker")
    yield pool
    for found in provider.list(str(pool.owner)):
        provider.destroy(found.ref)


@pytest.fixture
def grant(pool: Pool) -> Callable[..., Lease]:
    """Acquire a lease in this test's pool: grant(agent="did:plc:a", environment="e1", **Ask fields)."""

    def make(agent: str = "did:plc:ada", environment: str = "game-1", now: datetime = NOW, **ask: Any) -> Lease:
        ask = {"environment_type": "catan", "pool": pool.name} | ask
        return leasing.acquire(leasing.LeaseRequest(agent_did=agent, environment_id=environment, **ask), now=now)[0]

    return make


@pytest.fixture
def at_checkpoint() -> Iterator[Callable[..., None]]:
    """at_step("created", act): run act() the first time a verb comes to that step. act may raise Died."""
    hung: list[Any] = []

    def hang(name: str, act: Callable[[], object]) -> None:
        def hook(reached: str, subject: Any) -> None:
            if reached == name:
                lifecycle.CHECKPOINT_HOOKS.remove(hook)
                act()

        hung.append(hook)
        lifecycle.CHECKPOINT_HOOKS.append(hook)

    yield hang
    for hook in hung:
        if hook in lifecycle.CHECKPOINT_HOOKS:
            lifecycle.CHECKPOINT_HOOKS.remove(hook)


@contextmanager
def run_in_threads(count: int) -> Iterator[Callable[[Callable[[int], Any]], list[Any]]]:
    """Run one function in `count` threads that start together; the answers in order, exceptions included."""
    barrier = threading.Barrier(count)

    def run(act: Callable[[int], Any]) -> list[Any]:
        def one(index: int) -> Any:
            try:
                barrier.wait(timeout=30)
                return act(index)
            except Exception as failed:
                return failed
            finally:
                connections.close_all()

        with ThreadPoolExecutor(count) as executor:
            return list(executor.map(one, range(count)))

    yield run
