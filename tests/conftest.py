"""Fixtures of the test suite: a fixed time, a pool on the memory provider, leases, simulated crashes and threads."""

import gc
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
from django.conf import settings
from django.db import OperationalError, connections
from django.test import TransactionTestCase
from django.utils import timezone
from pytest_django import DjangoDbBlocker

from leases import leasing
from leases.models import Lease
from sandboxes import claims, deferred_writes, lifecycle, providers
from sandboxes.db import clock, connection_errors, migrations
from sandboxes.models import Pool
from sandboxes.providers.memory import MemoryProvider
from sandboxes.storage import get_store
from sandboxes.storage.memory import MemoryStore
from tests.support.database import MigratedRows, restore_template
from tests.support.sandbox_agent import Gateway
from tests.support.servers import services
from tests.support.servers.receiver import WebhookReceiver, run_receiver
from tests.support.servers.services import SERVICES_REQUIRED, require_environment, skip_or_fail

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
MARKS_OF_DIRECTORIES = {Path(__file__).parent / "docker": "docker", Path(__file__).parent / "e2e": "e2e"}
MARKS_WITH_REASON = ("postgres", "matrix")
DOCKER_IMAGE = os.environ.get("LEASEHOLD_SANDBOX_IMAGE", "leasehold-sandbox:latest")

# On a busy machine an example, or its generation, may exceed Hypothesis's default deadline of 200 ms. In CI, where all services
# are required, the examples are deterministic; elsewhere each run draws new examples.
hypothesis.settings.register_profile(
    "no_deadline", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], derandomize=SERVICES_REQUIRED
)
hypothesis.settings.load_profile("no_deadline")


class SimulatedCrash(BaseException):
    """Death of the process. A BaseException, so that no handler of the code under test catches it."""


def die(*args: object) -> None:
    """Hook of a checkpoint or of a provider call: the process dies."""
    raise SimulatedCrash


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that use the database, and those that exist because of PostgreSQL. Require marks with their reasons.

    The parts of the suite select by these marks (tests/lanes/table.py)."""
    for item in items:
        required = MARKS_OF_DIRECTORIES.get(item.path.parent)
        if required and not item.get_closest_marker(required):
            raise pytest.UsageError(f"{item.nodeid} needs the mark {required}.")
        fixtures, django_db = set(getattr(item, "fixturenames", ())), item.get_closest_marker("django_db")
        if django_db or {"db", "transactional_db"} & fixtures:
            item.add_marker("database")
        if "transactional_db" in fixtures or (django_db and django_db.kwargs.get("transaction")):
            item.add_marker(pytest.mark.postgres("commits: other connections lock and read the rows"))
        for name in MARKS_WITH_REASON:
            for mark in item.iter_markers(name):
                if len(mark.args) != 1 or not isinstance(mark.args[0], str):
                    raise pytest.UsageError(f"{item.nodeid}: the mark {name} needs its reason, a string.")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start the Docker daemon and build the image before the first test that needs them."""
    if item.get_closest_marker("docker"):
        services.start("docker")


def pytest_collection_finish() -> None:
    """Exempt the imported modules from garbage collection, which would traverse them in an eighth of the run's CPU time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def django_db_keepdb(django_db_keepdb: bool) -> bool:
    """Start from the migrated template: Django then keeps the database instead of creating it, and looks for no migration."""
    if django_db_keepdb or not restore_template():
        return django_db_keepdb
    settings.DATABASES["default"]["TEST"]["MIGRATE"] = False
    return True


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[None]:
    """Restore the migrated rows after tests with real transactions (transaction=True), whose rows threads can see."""
    migrations.load_known.cache_clear()  # Django disables all migrations while it takes the template over
    with pytest.MonkeyPatch.context() as patch:
        with django_db_blocker.unblock():
            rows = MigratedRows()
        patch.setattr(TransactionTestCase, "_fixture_teardown", lambda self: rows.restore())
        yield


@pytest.fixture(scope="module")
def compact_tables(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[None]:
    """Remove the dead rows afterwards: a rollback leaves them, and the statistics, to the plans of later tests."""
    yield
    with django_db_blocker.unblock(), connections["default"].cursor() as cursor:
        cursor.execute("VACUUM (FULL, ANALYZE)")


@pytest.fixture(autouse=True)
def clock_past_midnight() -> Iterator[None]:
    """Keep a test from crossing midnight UTC, because pages and commands count days by the clock.

    A test that starts within half a minute of midnight runs with Django's clock a minute ahead, on the next day."""
    system_now = timezone.now
    if system_now().date() == (system_now() + MINUTE / 2).date():
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timezone, "now", lambda: system_now() + MINUTE)
        yield


@pytest.fixture(autouse=True)
def isolate_state_dirs(tmp_path: Path, settings: Any) -> Iterator[None]:
    """Give each test its own store and state directory, so that no test prunes or counts files of another test."""
    settings.STATE_DIR, settings.STORAGE_DIR = tmp_path / "state", tmp_path / "store"
    get_store.cache_clear()
    yield
    get_store.cache_clear()


@pytest.fixture(autouse=True)
def heartbeat_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extend claims only by `claims.HEARTBEAT.beat()`. A heartbeat thread would not see rows of a test's transaction."""
    monkeypatch.setattr(claims, "HEARTBEAT_SECONDS", 3600.0)
    monkeypatch.setattr(deferred_writes, "DEFERRED", deferred_writes.DeferredWrites())


@pytest.fixture
def now() -> datetime:
    return NOW


@pytest.fixture
def memory(settings: Any) -> Iterator[MemoryProvider]:
    """Memory provider without sandboxes. It is the default: sweeps over all pools call no Docker Engine of this machine."""
    settings.SANDBOX_PROVIDER = "memory"
    provider = providers.get_provider("memory")
    assert isinstance(provider, MemoryProvider)
    provider.reset()
    yield provider
    provider.reset()


@pytest.fixture
def pool(db: None, memory: MemoryProvider) -> Pool:
    """Pool of this test, on the memory provider."""
    return Pool.objects.create(name=f"pool-{uuid.uuid4().hex[:12]}", provider="memory", capacity=100)


@pytest.fixture(scope="session")
def docker_ready() -> None:
    """Require a Docker Engine with the sandbox image. Skips the test, or fails it if all services are required."""
    import docker as sdk

    try:
        client = sdk.from_env(timeout=60)
        client.images.get(DOCKER_IMAGE)
    except sdk.errors.DockerException as failed:
        skip_or_fail(f"No Docker Engine with the image {DOCKER_IMAGE}: {failed}")


@pytest.fixture(scope="session")
def own_cluster(docker_ready: None) -> Iterator[Any]:
    """A real Kubernetes cluster of this run, whose programs a test may end and start. Each test leaves all of them running."""
    from tests.support.cluster_access import read_access
    from tests.support.own_cluster.cluster import running_cluster

    if read_access():
        pytest.skip("the test ends programs of the cluster: not those of a developer's")
    [directory] = require_environment("kubernetes", "TEST_KUBERNETES_PROGRAMS")
    with running_cluster(Path(directory), [DOCKER_IMAGE]) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def cluster_access(request: pytest.FixtureRequest) -> Any:
    """Access to the cluster of the developer (make kind-test), or to that of this run."""
    from tests.support.cluster_access import read_access

    return read_access() or request.getfixturevalue("own_cluster").access


@pytest.fixture(scope="session")
def agent_gateway(docker_ready: None) -> Iterator[Gateway]:
    """A gateway of its own: containers with `agent=agent_gateway.mount` connect to it."""
    gateway = Gateway(container="")
    yield gateway
    gateway.close()


@pytest.fixture
def docker_pool(db: None, docker_ready: None) -> Iterator[Pool]:
    """Pool of this test on the Docker Engine. Remaining containers are removed afterwards, by their owner label."""
    pool = Pool.objects.create(
        name=f"docker-{uuid.uuid4().hex[:12]}", provider="docker", image=DOCKER_IMAGE, capacity=100, memory_mib=128
    )
    provider = providers.get_provider("docker")
    yield pool
    for sandbox in provider.list(str(pool.owner)):
        provider.destroy(sandbox.ref)


@pytest.fixture
def grant(pool: Pool) -> Callable[..., Lease]:
    """Acquire a lease in this test's pool: grant(agent="did:plc:a", environment="e1", **fields of LeaseRequest)."""

    def acquire(agent: str = "did:plc:ada", environment: str = "game-1", now: datetime = NOW, **fields: Any) -> Lease:
        fields = {"environment_type": "catan", "pool": pool.name} | fields
        return leasing.acquire(leasing.LeaseRequest(agent_did=agent, environment_id=environment, **fields), now=now)[0]

    return acquire


@pytest.fixture
def lease(grant: Callable[..., Lease]) -> Lease:
    return grant()


@pytest.fixture
def memory_store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    """Store of this test. The cache of get_store is cleared before each test."""
    store = MemoryStore()
    monkeypatch.setattr("sandboxes.storage.FilesystemStore", lambda root: store)
    return store


@pytest.fixture
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the monotonic clock of the verbs, so that durations are exact."""
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: 0.0))


@pytest.fixture
def failover(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[object]]:
    """Lose the database connection in the first calls of a function: failover(runs, "close_run", times=20). Return the calls.

    Time passes only by the pauses between retries. The test needs real transactions."""
    paused = [0.0]
    monkeypatch.setattr(connection_errors, "time", SimpleNamespace(sleep=paused.append))
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: sum(paused)))

    def lose_connection(owner: object, name: str, times: int = 3) -> list[object]:
        function, calls = getattr(owner, name), list[object]()

        def fail(*args: Any, **options: Any) -> Any:
            calls.append(args)
            if len(calls) <= times:
                raise OperationalError("the connection is closed")
            return function(*args, **options)

        monkeypatch.setattr(owner, name, fail)
        return calls

    return lose_connection


@pytest.fixture(scope="session")
def receiver_server() -> Iterator[WebhookReceiver]:
    with run_receiver() as server:
        yield server


@pytest.fixture
def receiver(receiver_server: WebhookReceiver) -> Iterator[WebhookReceiver]:
    """Receiver of webhooks: one server for all tests."""
    receiver_server.reset()
    yield receiver_server
    receiver_server.stopping.set()


@pytest.fixture
def at_checkpoint() -> Iterator[Callable[..., None]]:
    """Call a function at the first pass of a checkpoint: at_checkpoint("created", act). By default the process dies there."""
    hooks: list[Any] = []

    def add_hook(name: str, act: Callable[[], object] = die) -> None:
        def hook(reached: str, subject: Any) -> None:
            if reached == name:
                lifecycle.CHECKPOINT_HOOKS.remove(hook)
                act()

        hooks.append(hook)
        lifecycle.CHECKPOINT_HOOKS.append(hook)

    yield add_hook
    for hook in hooks:
        if hook in lifecycle.CHECKPOINT_HOOKS:
            lifecycle.CHECKPOINT_HOOKS.remove(hook)


@pytest.fixture
def crash_at(at_checkpoint: Callable[..., None]) -> Callable[[str], AbstractContextManager[None]]:
    """Let the process die at the first pass of a checkpoint, within the block: `with crash_at("created"): ...`."""

    @contextmanager
    def crash(name: str) -> Iterator[None]:
        at_checkpoint(name, die)
        with pytest.raises(SimulatedCrash):
            yield

    return crash


@contextmanager
def run_in_threads(count: int) -> Iterator[Callable[[Callable[[int], Any]], list[Any]]]:
    """Run one function in `count` threads that start at a barrier. Returns results in order, exceptions included."""
    barrier = threading.Barrier(count)

    def run(act: Callable[[int], Any]) -> list[Any]:
        def call(index: int) -> Any:
            try:
                barrier.wait(timeout=30)
                return act(index)
            except Exception as failed:
                return failed
            finally:
                connections.close_all()

        with ThreadPoolExecutor(count) as executor:
            return list(executor.map(call, range(count)))

    yield run
