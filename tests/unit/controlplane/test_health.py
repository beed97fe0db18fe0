"""Warnings of the health report: failed starts, counter drift, quarantined, lost and stalled sandboxes."""

import re
from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane import health, schedules
from sandboxes.models import Host, Pool, Sandbox, Sweep, Webhook
from sandboxes.pool import admission_queue
from sandboxes.providers.errors import FailureCause, Rejected, Unavailable
from sandboxes.state import disk_space
from sandboxes.sweeps import heartbeat, passes
from tests.conftest import MINUTE, NOW
from tests.support.leases import run, update_pool

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("hand-written SQL")]


@pytest.fixture(autouse=True)
def healthy_system(monkeypatch: pytest.MonkeyPatch, db: None) -> None:
    names = [*schedules.SCHEDULE, health.EGRESS_HEARTBEAT]
    Sweep.objects.bulk_create(Sweep(name=name, every=MINUTE, succeeded_at=timezone.now()) for name in names)
    monkeypatch.setattr(health.provider_probe, "get_status", lambda: {"name": "memory", "isolated": True, "answers": True})


@pytest.fixture
def sandbox(grant) -> Sandbox:
    run(grant())
    Host.objects.update(heartbeat_at=timezone.now())
    return Sandbox.objects.get()


def warnings(client) -> list[str]:
    report = client.get("/readyz").json()
    assert report["warnings"] == client.get("/healthz").json()["warnings"]
    assert not any("did:" in warning or "secret" in warning for warning in report["warnings"])
    return report["warnings"]


def test_a_healthy_system_has_no_warnings(client, sandbox) -> None:
    report = client.get("/healthz").json()
    assert (report["warnings"], report["quarantined"], report["stalled"], report["lost"], report["drift"]) == ([], 0, 0, 0, 0)
    assert report["warming"] == {}


def test_numbers_of_the_pools_are_reported(client, sandbox) -> None:
    numbers = client.get("/healthz").json()["pool"]
    assert (numbers["total"], numbers["waiting"], numbers["max_capacity"]) == (
        1,
        1,
        sum(Pool.objects.values_list("capacity", flat=True)),
    )
    assert (numbers["resume_warm_hits"], numbers["resume_cold_hits"], numbers["evicted_cold"]) == (0, 0, 0)


@pytest.mark.parametrize(("age", "is_named"), [(timedelta(minutes=15), False), (timedelta(minutes=17), True)])
def test_sweeps_that_never_succeeded_are_warned_about_by_name(client, sandbox, age: timedelta, is_named: bool) -> None:
    """`reconcile` is due every five minutes, and has three intervals and a minute for its first success."""
    Sweep.objects.filter(name="reconcile").update(succeeded_at=None, last_error="secret")
    Host.objects.update(created_at=timezone.now() - age)
    named = ["Sweeps without a recent success: reconcile. The page Sweeps and the log have their errors."]
    assert warnings(client) == named * is_named


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch, isolate_state_dirs: None) -> dict[str, int]:
    """Free bytes of the directories. They stay the same, although other processes write between two requests."""
    free = disk_space.measure_free_space()
    monkeypatch.setattr(disk_space, "measure_free_space", lambda: free)
    return free


def test_low_disk_is_warned_about_without_its_path(client, settings, free) -> None:
    assert client.get("/healthz").json()["disk_free_bytes"] == free
    assert {"state", "store"} <= free.keys() and min(free.values()) > 0
    settings.MIN_FREE_DISK = 1 << 60
    assert len(warnings(client)) == len(free)
    assert re.fullmatch(r"The state disk has \d+ MiB free, less than LEASEHOLD_MIN_FREE_DISK: .*", warnings(client)[0])
    assert str(settings.STATE_DIR) not in str(warnings(client))


def test_queue_for_places_is_warned_about(client, pool) -> None:
    admission_queue.enqueue(pool, "did:plc:ada", "game-1", now=timezone.now())
    assert warnings(client) == [f'Pool "{pool}" is full. Requests that wait for a place: 1.']


def test_failed_starts_are_warned_about_without_the_error(client, pool, memory) -> None:
    update_pool(pool, warm_target=2)
    with memory.fail("create", Rejected("secret registry"), times=99):
        passes.warm_pools(now=timezone.now())
    row = Pool.objects.get(pk=pool.pk)
    until, since = row.warm_paused_until, f"{row.starts_failing_since:%Y-%m-%d %H:%M:%S}"
    assert warnings(client) == [
        f'Pool "{pool}" starts no warm sandboxes until {until:%H:%M:%S} UTC, after failed starts.',
        f'Starts of the pool "{pool}" fail since {since} UTC: provider_rejected. See the page of the pool.',
    ]
    warming = client.get("/healthz").json()["warming"][pool.name]
    assert (warming["target"], warming["ready"], warming["paused_until"][:19]) == (2, 0, f"{until:%Y-%m-%dT%H:%M:%S}")


def test_a_missing_image_is_warned_about_until_the_engine_has_it(client, pool, sandbox, memory) -> None:
    update_pool(pool, image="private.example/base:1")
    memory.missing_images = {"private.example/base:1"}
    heartbeat.record_heartbeats(now=timezone.now())
    text = f'The image of the pool "{pool}" does not exist on the host "{Host.objects.get()}": its starts fail there.'
    assert warnings(client) == [text]
    assert client.get("/readyz").status_code == 200  # sandboxes that run are served
    memory.missing_images = set()
    heartbeat.record_heartbeats(now=timezone.now())
    assert warnings(client) == []


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"failures": 2, "failing_since": NOW}, None),
        ({"failures": 3, "failing_since": NOW}, "Webhooks whose receiver fails: 1. The page Webhooks has their errors."),
        (
            {"failures": 10, "failing_since": NOW, "disabled_at": NOW},
            "Webhooks disabled after failures, which send nothing: 1. The page Webhooks has their errors.",
        ),
        ({"failures": 10, "failing_since": NOW, "disabled_at": NOW, "removed_at": NOW}, None),
        ({"failures": 3, "failing_since": NOW, "active": False}, None),
    ],
    ids=["two failures", "three failures", "disabled", "removed", "paused"],
)
def test_failing_webhooks_are_warned_about(client, sandbox, fields: dict, text: str | None) -> None:
    sealed = None if "removed_at" in fields else b"sealed"
    Webhook.objects.create(url="https://secret.example/", created_at=NOW, sealed=sealed, **fields)
    assert warnings(client) == ([text] if text else [])


def test_the_disk_of_the_engine_is_measured_and_warned_about(
    client, sandbox, memory, settings, tmp_path, free, monkeypatch
) -> None:
    memory.disk = tmp_path
    status = health.query_provider()
    monkeypatch.setattr(health.provider_probe, "get_status", lambda: status)
    assert client.get("/healthz").json()["disk_free_bytes"]["engine"] == status["disk"]["engine"] > 0
    settings.MIN_FREE_DISK = 1 << 60
    assert any(each.startswith("The engine disk has") for each in warnings(client))


def test_drift_is_warned_about_until_a_recount_finds_none(client, pool, sandbox) -> None:
    update_pool(pool, used=7)
    schedules.run_sweep("recount", now=timezone.now())
    assert warnings(client) == ["Pool or quota counters corrected by the last recount: 1."]
    schedules.run_sweep("recount", now=timezone.now())
    assert warnings(client) == []


PROBLEMS = {
    "Sandboxes in quarantine after failed destroy attempts: 1.": {
        "state": "destroying", "deadline_at": NOW, "quarantined_at": NOW,
    },
    "Sandboxes stalled past their deadline: 1.": {"state": "destroying", "deadline_at": NOW - timedelta(days=5000)},
    "Sandboxes lost by their provider while a lease held them: 1.": {"lost_at": NOW},
}  # fmt: skip


@pytest.mark.parametrize(("warning_text", "fields"), PROBLEMS.items(), ids=["quarantined", "stalled", "lost"])
def test_sandboxes_that_need_an_operator_are_warned_about(client, sandbox, warning_text: str, fields: dict) -> None:
    Sandbox.objects.filter(pk=sandbox.pk).update(**fields)
    assert warnings(client) == [warning_text]
    response = client.get("/healthz")
    assert response.status_code == 200
    assert sum(response.json()[name] for name in ("quarantined", "stalled", "lost")) == 1


def test_sandboxes_that_cannot_sleep_are_warned_about_until_their_state_is_stored(client, sandbox, memory) -> None:
    later = timezone.now() + timedelta(hours=1)
    with memory.fail("get_files", Unavailable("secret")):
        assert passes.evict_idle(now=later).failures
    assert warnings(client) == ["Sandboxes whose state cannot be stored, so that they do not sleep: 1."]
    assert passes.evict_idle(now=later + timedelta(hours=1)).counts == {"put to sleep": 1}
    assert warnings(client) == []


@pytest.mark.parametrize(("minutes", "late"), [(3.9, False), (4.1, True), (None, True)])
def test_a_late_egress_heartbeat_is_warned_about(client, minutes: float | None, late: bool) -> None:
    rows = Sweep.objects.filter(name="egress")
    rows.update(succeeded_at=timezone.now() - minutes * MINUTE) if minutes else rows.delete()
    warning_text = "The egress proxy has no recent heartbeat, so sandboxes reach no model. Is manage.py egress running?"
    assert warnings(client) == [warning_text] * late
    assert client.get("/healthz").json()["egress"]["late"] is late


@pytest.mark.parametrize(("minutes", "queue_runs", "warned"), [(3.9, True, False), (4.1, True, True), (4.1, False, False)])
def test_a_store_that_cannot_be_written_is_warned_about(client, minutes: float, queue_runs: bool, warned: bool) -> None:
    at = timezone.now()
    Sweep.objects.filter(name="mark").update(started_at=at, succeeded_at=at - minutes * MINUTE)
    Sweep.objects.filter(name="heartbeat").update(succeeded_at=at if queue_runs else None)
    text = "The sweep `mark` fails: the store or the state directory cannot be written, so no state is stored."
    assert warnings(client) == [text] * warned


def test_a_refused_api_key_is_named_in_place_of_a_provider_that_does_not_respond(client, memory, monkeypatch) -> None:
    refused = Unavailable("status 401", cause=FailureCause.CREDENTIALS_REFUSED)
    probe = health.ProviderProbe()
    with memory.fail("list", refused, times=2):
        status, first = probe.query_and_note(), probe.refused_at
        probe.query_and_note()
    assert first is not None and probe.refused_at == first
    assert probe.query_and_note().get("key_refused") is None and probe.refused_at is None
    monkeypatch.setattr(health.provider_probe, "refused_at", NOW)
    monkeypatch.setattr(health.provider_probe, "get_status", lambda: status)
    assert f"The provider memory refuses the API key since {NOW:%Y-%m-%d %H:%M} UTC." in client.get("/readyz").json()["missing"]
    with memory.fail("list", Unavailable("away")):
        assert "key_refused" not in health.query_provider()


def test_agents_of_another_version_are_warned_about(client, sandbox) -> None:
    Sweep.objects.filter(name=health.EGRESS_HEARTBEAT).update(counts={"agent outdated": 2})
    assert [each.partition(": ")[2] for each in warnings(client)] == [
        "2. Put them to sleep: they wake with this version's agent."
    ]
