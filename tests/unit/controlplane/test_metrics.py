"""Prometheus metrics: values from the database, no agent names, no stale values."""

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from django.db import OperationalError, connection
from django.test import Client
from django.utils import timezone
from prometheus_client.parser import text_string_to_metric_families

from controlplane import metrics, schedules
from leases import leasing
from sandboxes.models import Host, Sandbox, Sweep, Webhook
from sandboxes.pool import admission_queue
from sandboxes.providers.errors import Rejected, Unavailable
from sandboxes.sweeps import passes
from tests.conftest import MINUTE, NOW
from tests.support.leases import run, update_pool

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("hand-written SQL")]
HOUR = 60 * MINUTE
TOKEN = "0123456789abcdef"
Labels = frozenset[tuple[str, str]]


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "snapshot_cache", metrics.SnapshotCache())


@pytest.fixture
def client(settings: Any) -> Client:
    settings.METRICS_TOKEN = TOKEN
    return Client(headers={"authorization": f"Bearer {TOKEN}"})


@pytest.fixture
def scrape(client, pool) -> Callable[..., float | None]:
    """Return the function scrape(name, **labels): one sample, of this test's pool if it has a pool label, or None."""

    def read(name: str, **labels: str) -> float | None:
        metrics.snapshot_cache.snapshot = None
        values = samples(client.get("/metrics").content.decode())
        pool_value = values.get((f"leasehold_{name}", frozenset({**labels, "pool": pool.name}.items())))
        return pool_value if pool_value is not None else values.get((f"leasehold_{name}", frozenset(labels.items())))

    return read


def samples(text: str) -> dict[tuple[str, Labels], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_are_prometheus_text_with_help_and_type(client, pool) -> None:
    response = client.get("/metrics")
    assert (response.status_code, response["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert "no-store" in response["Cache-Control"]
    families = list(text_string_to_metric_families(response.content.decode()))
    assert {family.type for family in families} == {"gauge", "counter"}
    assert all(family.documentation and family.name.startswith("leasehold_") for family in families)
    assert {family.name.removeprefix("leasehold_") for family in families} >= {
        "sandboxes", "pool_capacity", "pool_used", "wakes", "evictions", "prewarmed_claims", "quarantined",
        "sandboxes_stalled", "warm_target", "warm_circuit_open", "leases", "oldest_waiting_seconds", "sweep_age_seconds",
        "queue_depth",
    }  # fmt: skip


def test_counts_of_a_gateway_are_reported_by_host(scrape) -> None:
    host = Host.objects.create(id=uuid4(), provider="docker", engine_id="e1", name="box-1", created_at=NOW)
    counts = {"agent connected": 3, "agent executions": 40, "agent fallbacks busy": 2, "logs rotated": 1}
    counts["agent request fields dropped"] = 5
    Sweep.objects.create(name="egress", host=host, counts=counts)
    assert scrape("agents_connected", host="box-1") == 3
    assert scrape("agent_events_total", host="box-1", event="executions") == 40
    assert scrape("agent_events_total", host="box-1", event="violations") == 0
    assert scrape("agent_fallbacks_total", host="box-1", reason="busy") == 2
    assert scrape("model_request_fields_dropped_total", host="box-1") == 5


def test_free_space_is_a_gauge_by_directory(scrape) -> None:
    assert scrape("disk_free_bytes", directory="state") > 0
    assert scrape("disk_free_bytes", directory="store") > 0


def test_sandboxes_capacity_and_leases_are_gauges(scrape, grant, pool) -> None:
    used = timezone.now() - HOUR
    run(grant(now=used), now=used)
    run(grant(environment="e2"))
    leasing.release(grant(environment="e2").pk, now=NOW)
    assert (scrape("sandboxes", state="waiting"), scrape("sandboxes", state="destroying")) == (1, 1)
    assert scrape("sandboxes", state="cold") == 0
    assert scrape("sandboxes", state="destroyed") is None
    assert (scrape("pool_capacity"), scrape("pool_used")) == (100, 2)
    admission_queue.enqueue(pool, "did:plc:eve", "e3", now=timezone.now())
    assert scrape("admission_queue_length") == 1
    assert 3600 <= scrape("oldest_waiting_seconds") < 3700
    assert (scrape("leases", status="active"), scrape("leases", status="expired")) == (1, 1)
    assert scrape("leases", status="destroyed") is None


def test_wakes_sleeps_evictions_and_claims_are_counters(scrape, grant, pool) -> None:
    update_pool(pool, capacity=1, warm_target=1)
    passes.warm_pools(now=NOW)
    lease = grant()
    run(lease)
    run(lease)
    passes.evict_idle(now=NOW + HOUR)
    run(lease, now=NOW + HOUR)
    run(grant(agent="did:plc:b"), now=NOW + HOUR)
    assert scrape("prewarmed_claims_total") == 1
    wakes = {source: scrape("wakes_total", source=source) for source in ("warm", "local", "cloud", "fresh")}
    assert wakes == {"warm": 1, "local": 1, "cloud": 0, "fresh": 0}
    evictions = {tier: scrape("evictions_total", tier=tier) for tier in ("cold", "warm", "waiting")}
    assert evictions == {"cold": 0, "warm": 0, "waiting": 1}
    assert scrape("sleeps_total") == 2


def test_recent_transitions_are_counted_by_reason_without_those_of_runs(scrape, grant, pool, memory) -> None:
    now = timezone.now()
    old, idle, unstored = (grant(environment=name, now=now - HOUR) for name in ("old", "idle", "unstored"))
    run(old, now=now - HOUR)
    leasing.release(old.pk, now=now - 11 * MINUTE)
    run(idle, now=now)
    run(unstored, now=now)
    passes.evict_idle(now=now - MINUTE)
    Sandbox.objects.filter(holder=idle.pk).update(idle_at=now)
    passes.evict_idle(now=now)
    leasing.release(idle.pk, now=now)
    Sandbox.objects.filter(holder=unstored.pk).update(idle_at=now)
    with memory.fail("size", Unavailable("disk"), times=99):
        passes.evict_idle(now=now)
    recent = {
        (to, reason): scrape("recent_transitions", to=to, reason=reason)
        for to, reason in (
            ("evicting", "idle"), ("cold", "persisted"), ("waiting", "persist_failed"), ("destroying", "lease_ended"),
            ("destroying", "operator"), ("running", "run_started"),
        )
    }  # fmt: skip
    assert [*recent.values()] == [2, 1, 1, 1, 0, None]


def test_a_sweep_that_never_succeeded_is_as_old_as_its_host(scrape, grant) -> None:
    run(grant())
    Sweep.objects.all().delete()
    Host.objects.update(created_at=timezone.now() - HOUR)
    Sweep.objects.create(name="meter", started_at=timezone.now(), last_error="refused")
    host = Host.objects.get().name
    for name, label in (("meter", ""), ("expire", ""), ("reconcile", host), ("warm", host)):
        assert 3600 <= scrape("sweep_age_seconds", sweep=name, host=label) < 3700, name


def test_failed_starts_sweep_age_and_queue_depth_are_gauges(scrape, pool, memory) -> None:
    update_pool(pool, warm_target=3)
    assert (scrape("warm_target"), scrape("warm_ready"), scrape("warm_circuit_open")) == (3, 0, 0)
    with memory.fail("create", Rejected("no such image"), times=99):
        passes.warm_pools(now=timezone.now())
    assert scrape("warm_circuit_open") == 1
    Sweep.objects.create(name="idle", succeeded_at=timezone.now() - HOUR)
    assert 3600 <= scrape("sweep_age_seconds", sweep="idle", host="") < 3700
    schedules.enqueue_all_sweeps()
    assert scrape("queue_depth") == len(schedules.SCHEDULE)


def test_no_agent_and_no_error_is_exposed(client, grant, pool, memory) -> None:
    run(grant())
    update_pool(pool, warm_target=1)
    with memory.fail("create", Rejected("secret path"), times=99):
        passes.warm_pools(now=NOW)
    text = client.get("/metrics").content.decode()
    assert pool.name in text
    assert "did:" not in text and "secret" not in text


def test_a_snapshot_is_reused_for_the_cache_time(client, pool, django_assert_num_queries) -> None:
    client.get("/metrics")
    with django_assert_num_queries(0):
        client.get("/metrics")
    metrics.snapshot_cache.read_at -= metrics.CACHE_SECONDS
    update_pool(pool, capacity=7)
    assert f'leasehold_pool_capacity{{pool="{pool.name}"}} 7.0' in client.get("/metrics").content.decode()


def test_without_a_database_the_status_is_503_without_stale_values(client, pool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OperationalError("password=secret")

    assert client.get("/metrics").status_code == 200
    metrics.snapshot_cache.read_at -= metrics.CACHE_SECONDS
    with monkeypatch.context() as patched:
        patched.setattr(connection, "cursor", fail)
        for _ in range(2):
            response = client.get("/metrics")
            assert response.status_code == 503
            assert b"leasehold_" not in response.content and b"secret" not in response.content
    assert client.get("/metrics").status_code == 200


@pytest.mark.skipif(connection.vendor != "postgresql", reason="SQLite has no statement timeout")
def test_a_statement_timeout_is_503(client, pool, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*, now: object) -> list[object]:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_sleep(10)")
        return []

    monkeypatch.setattr(metrics.pool_stats, "collect_pool_stats", slow)
    monkeypatch.setattr(metrics, "STATEMENT_TIMEOUT_MS", 50)
    assert client.get("/metrics").status_code == 503


def test_metrics_are_read_only_and_need_neither_api_key_nor_allowed_host(client, pool) -> None:
    assert client.post("/metrics").status_code == 405
    assert client.get("/metrics", HTTP_HOST="10.1.2.3").status_code == 200
    assert client.head("/metrics").status_code == 200


# --- access -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header", ["", TOKEN, "Bearer ", f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer é"], ids=repr
)
def test_a_wrong_token_is_refused_even_from_loopback(client, header: str) -> None:
    response = Client().get("/metrics", headers={"authorization": header} if header else {})
    assert (response.status_code, response["WWW-Authenticate"]) == (401, "Bearer")
    assert b"leasehold_" not in response.content
    assert client.get("/metrics", REMOTE_ADDR="192.0.2.7").status_code == 200


@pytest.fixture
def without_token(settings: Any) -> Any:
    settings.METRICS_TOKEN, settings.ALLOWED_HOSTS = "", ["127.0.0.1", "localhost", "[::1]"]
    settings.CSRF_TRUSTED_ORIGINS = []
    return settings


LOCAL = {"REMOTE_ADDR": "127.0.0.1", "HTTP_HOST": "localhost:8000"}


@pytest.mark.parametrize(
    ("request_meta", "status"),
    [
        ({}, 200),
        ({"REMOTE_ADDR": "::1", "HTTP_HOST": "[::1]:8000"}, 200),
        ({"REMOTE_ADDR": "::ffff:127.0.0.1"}, 200),
        ({"REMOTE_ADDR": "192.0.2.7"}, 403),
        ({"REMOTE_ADDR": ""}, 403),
        ({"HTTP_HOST": "leasehold.example.com"}, 403),
        *[({f"HTTP_{name}": "192.0.2.7"}, 403) for name in ("X_FORWARDED_FOR", "X_FORWARDED_PROTO", "X_REAL_IP", "VIA")],
        ({"HTTP_FORWARDED": "for=192.0.2.7"}, 403),
    ],
    ids=str,
)
def test_without_a_token_only_a_direct_local_scrape_is_answered(without_token, request_meta: dict[str, str], status) -> None:
    response = Client().get("/metrics", **(LOCAL | request_meta))
    assert response.status_code == status
    assert (b"leasehold_" in response.content, b"LEASEHOLD_METRICS_TOKEN" in response.content) == (status == 200, status == 403)


@pytest.mark.parametrize(
    "changes",
    [{"ALLOWED_HOSTS": ["leasehold.example.com", "localhost"]}, {"CSRF_TRUSTED_ORIGINS": ["https://x.example"]}],
    ids=str,
)
def test_behind_a_proxy_loopback_is_not_enough(without_token, changes: dict[str, list[str]]) -> None:
    for name, value in changes.items():
        setattr(without_token, name, value)
    assert Client().get("/metrics", **LOCAL).status_code == 403


def test_failing_starts_missing_images_and_webhooks_are_scraped(scrape, pool, memory, client) -> None:
    Host.objects.create(pk=uuid4(), provider="memory", engine_id="e", name="alpha", created_at=NOW)
    assert scrape("starts_failing") == 0
    assert scrape("missing_images", host="alpha", provider="memory") == 0
    update_pool(pool, starts_failing_since=NOW)
    Host.objects.update(missing_images={pool.name: "image"})
    Webhook.objects.create(url="https://a.example/", created_at=NOW, sealed=b"s", failures=3)
    Webhook.objects.create(url="https://b.example/", created_at=NOW, sealed=b"s", failures=9, disabled_at=NOW)
    assert scrape("starts_failing") == 1
    assert scrape("missing_images", host="alpha", provider="memory") == 1
    assert scrape("webhooks_failing", state="failing") == 1
    assert scrape("webhooks_failing", state="disabled") == 1
