"""Pools and quotas in the console: draining, circuit, limits, and links from numbers to rows."""

from collections.abc import Callable

import pytest
from django.contrib.admin.models import LogEntry
from django.core.cache import cache
from django.test import Client
from django.utils import timezone

from leases.models import Agent, EnvironmentType, Lease
from sandboxes.admin.base.formatting import build_changelist_url
from sandboxes.models import Host, Pool, Quota, Sandbox
from sandboxes.pool import admission_queue, allocation
from sandboxes.providers.errors import Rejected
from sandboxes.providers.memory import MemoryProvider
from sandboxes.sweeps import passes
from tests.admin.conftest import ADA, NOW, ensure_sandbox
from tests.conftest import MINUTE
from tests.support.console import WHY, fetch, get_fields, list_messages, list_rows, row_url

pytestmark = pytest.mark.django_db


def offered(client: Client, pool: Pool) -> set[str]:
    shown = fetch(client, row_url(pool))
    return {name for name in ("Drain…", "Resume…", "Close circuit…") if name in shown}


def has(pool: Pool, **columns: object) -> bool:
    return Pool.objects.filter(pk=pool.pk, **columns).exists()


# --- capacity -----------------------------------------------------------------------------------------------------


def post_pool(client: Client, pool: Pool, **changes: object) -> None:
    names = (
        "capacity", "warm_target", "provider", "image", "memory_mib", "millicpus", "pids", "workspace_limit_mib",
    )  # fmt: skip
    automatic = {"automatic_capacity": "on"} if pool.automatic_capacity else {}
    form = {name: getattr(pool, name) for name in names} | automatic | changes
    assert client.post(row_url(pool), {name: value for name, value in form.items() if value is not None}).status_code == 302
    pool.refresh_from_db()


def test_an_edited_capacity_is_no_longer_automatic_until_it_is_selected_again(
    administrator: Client, memory: MemoryProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "total_memory_mib", lambda: 8192)
    pool = Pool.objects.get(name="default")
    assert get_fields(administrator, row_url(pool))["Capacity"].value == "not derived yet"
    post_pool(administrator, pool, memory_mib=1024)
    assert (pool.automatic_capacity, pool.capacity) == (True, 6)
    assert get_fields(administrator, row_url(pool))["Capacity"].value == "6, automatic"
    post_pool(administrator, pool, capacity=40)
    assert (pool.automatic_capacity, pool.capacity) == (False, 40)
    assert get_fields(administrator, row_url(pool))["Capacity"].value == "40"
    post_pool(administrator, pool, automatic_capacity="on")
    assert (pool.automatic_capacity, pool.capacity) == (True, 6)


def test_a_new_pool_is_offered_the_capacity_of_the_engine(
    administrator: Client, memory: MemoryProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "total_memory_mib", lambda: 8192)
    assert administrator.get("/admin/sandboxes/pool/add/").context["adminform"].form["capacity"].value() == 12


# --- actions ------------------------------------------------------------------------------------------------------


def test_an_operator_drains_and_resumes_a_pool_with_a_reason(operator: Client, pool: Pool) -> None:
    assert offered(operator, pool) == {"Drain…"}
    assert list_messages(operator.post(row_url(pool, "drain"), WHY)) == ["1 pool draining."]
    assert has(pool, draining=True)
    assert offered(operator, pool) == {"Resume…"}
    shown = fetch(operator, row_url(pool))
    assert "draining" in shown
    assert "it was agreed" in shown
    assert list_messages(operator.post(row_url(pool, "drain"), WHY))[-1] == "Nothing changed: already draining."
    assert list_messages(operator.post(row_url(pool, "resume"), WHY))[-1] == "1 pool resumed."
    assert has(pool, draining=False)
    messages = [entry.get_change_message() for entry in LogEntry.objects.order_by("pk")]
    assert messages == ["Drain: it was agreed", "Resume: it was agreed"]


@pytest.fixture
def broken(pool: Pool, memory: MemoryProvider) -> Pool:
    """Pool whose circuit is open after three failed starts in a row."""
    Pool.objects.filter(pk=pool.pk).update(warm_target=2)
    with memory.fail("create", Rejected("no such image")):
        passes.warm_pools(now=timezone.now())
    assert has(pool, warm_failures=3)
    return pool


def test_an_open_circuit_says_why_and_an_operator_closes_it(operator: Client, broken: Pool) -> None:
    shown = fetch(operator, row_url(broken))
    assert "no such image" in shown
    assert "open for" in shown
    assert passes.warm_pools(now=timezone.now()).failures
    assert list_messages(operator.post(row_url(broken, "warm_again"), WHY)) == ["1 pool warming up again."]
    assert has(broken, warm_failures=0, warm_paused_until__isnull=True, warm_error__contains="no such image")
    assert passes.warm_pools(now=timezone.now()).counts == {"warmed up": 2}
    assert has(broken, warm_error="")
    assert "Close circuit…" not in offered(operator, broken)
    assert list_messages(operator.post(row_url(broken, "warm_again"), WHY)) == ["Nothing changed: its circuit is closed."]


def test_an_expired_circuit_is_closed(operator: Client, broken: Pool) -> None:
    paused = "/admin/sandboxes/pool/?slice=paused"
    assert list_rows(operator, paused) == [broken]
    Pool.objects.filter(pk=broken.pk).update(warm_paused_until=NOW)
    assert "Close circuit…" not in offered(operator, broken)
    assert "open for" not in fetch(operator, row_url(broken))
    assert list_rows(operator, paused) == []


# --- pool page ----------------------------------------------------------------------------------------------------


def test_every_number_of_a_pool_links_to_exactly_its_sandboxes(
    viewer: Client, pool: Pool, grant: Callable[..., Lease], memory: MemoryProvider
) -> None:
    now = timezone.now()
    other = Pool.objects.create(name="other", provider="memory")
    boxes = [ensure_sandbox(grant(agent=f"did:plc:a{number}", now=now)) for number in range(5)]
    ensure_sandbox(grant(agent="did:plc:elsewhere", pool=other.name, now=now))
    Sandbox.objects.filter(pk=boxes[0].pk).update(state="cold")
    Sandbox.objects.filter(pk=boxes[1].pk).update(state="waiting", last_error="store down")
    Sandbox.objects.filter(pk=boxes[2].pk).update(lost_at=now)
    Sandbox.objects.filter(pk=boxes[3].pk).update(state="destroying", deadline_at=now, quarantined_at=now)
    Pool.objects.filter(pk=pool.pk).update(warm_target=1)
    pool.refresh_from_db()
    allocation.start_warm(pool, now=now)
    context = viewer.get(row_url(pool)).context
    numbers = {fact.label: (str(fact.value), fact.href) for fact in context["facts"] if fact.href and fact.label != "Starts"}
    assert {label: value for label, (value, _) in numbers.items()} == {
        "Used": "6 of 100", "Unclaimed": "1", "Quarantine": "1", "Stalled": "0", "Lost": "1",
        "State not stored": "1",
    }  # fmt: skip
    for label, (value, href) in numbers.items():
        assert viewer.get(href).context["cl"].result_count == int(value.split()[0]), label
    for part in context["usage"].parts:
        assert viewer.get(part.href).context["cl"].result_count == part.number, part.state
    Pool.objects.filter(pk=pool.pk).update(image="other:2")
    assert get_fields(viewer, row_url(pool))["Unclaimed"].note == "target 1; 1 outdated (image or memory changed)"


def test_a_pool_shows_its_queue(viewer: Client, pool: Pool) -> None:
    assert get_fields(viewer, row_url(pool))["Queue"].note == "no request waits"
    now = timezone.now()
    for number in range(2):
        admission_queue.enqueue(pool, ADA, f"game-{number}", now=now, since=now - MINUTE)
    queue = get_fields(viewer, row_url(pool))["Queue"]
    assert (queue.value, queue.alarm, "longest 1" in queue.note) == ("2", True, True)


# --- quotas -------------------------------------------------------------------------------------------------------


def quota(pool: Pool, **columns: object) -> Quota:
    return Quota.objects.update_or_create(pool=pool, agent_did=ADA, defaults=columns)[0]


def test_an_administrator_sets_the_limit_of_a_quota_but_not_its_use(administrator: Client, pool: Pool, lease: Lease) -> None:
    ensure_sandbox(lease)
    row = quota(pool)
    assert row.used == 1
    sent = {"most": 4, "guaranteed": 2, "used": 77, "agent_did": "did:plc:eve", "pool": 1}
    assert administrator.post(row_url(row), sent).status_code == 302
    row.refresh_from_db()
    assert (row.most, row.guaranteed, row.used, row.agent_did, row.pool) == (4, 2, 1, ADA, pool)
    sent = {"pool": pool.pk, "agent_did": " did:plc:bob ", "most": "", "guaranteed": 1}
    administrator.post("/admin/sandboxes/quota/add/", sent)
    added = Quota.objects.get(agent_did="did:plc:bob")
    assert (added.most, added.guaranteed, added.used) == (None, 1, 0)


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        ({"most": 2, "guaranteed": 3}, "The guarantee cannot exceed the limit of 2."),
        ({"most": -1}, "greater than or equal to 0"),
        ({"agent_did": "ada"}, "is not a DID such as did:plc:abc123"),
        ({"agent_did": ADA}, "Quota with this Pool and Agent already exists"),
        ({"pool": 999}, "Select a valid choice"),
    ],
)
def test_an_invalid_quota_is_explained(administrator: Client, pool: Pool, sent: dict, why: str) -> None:
    quota(pool)
    right = {"pool": pool.pk, "agent_did": "did:plc:bob", "most": "", "guaranteed": 0}
    answer = administrator.post("/admin/sandboxes/quota/add/", right | sent)
    assert answer.status_code == 200
    assert why in answer.content.decode().replace("&#x27;", "'")
    assert "guaranteed is at most most" not in answer.content.decode()
    assert Quota.objects.count() == 1


def test_pools_and_agents_link_to_their_quotas_and_these_to_their_sandboxes(
    administrator: Client, viewer: Client, pool: Pool, lease: Lease, grant: Callable[..., Lease]
) -> None:
    ensure_sandbox(lease)
    ensure_sandbox(grant(agent="did:plc:other"))
    row = quota(pool, most=1)
    agent = Agent.objects.get(did=ADA)
    for url in (row_url(pool), row_url(agent)):
        shown = fetch(viewer, url)
        assert row_url(row) in shown and "Add quota" not in shown
        assert "/admin/sandboxes/quota/add/?" in fetch(administrator, url)
    facts = get_fields(viewer, row_url(row))
    assert (facts["Used"].value, facts["Used"].alarm) == ("1", True)
    assert len(list_rows(viewer, facts["Used"].href)) == 1
    assert row_url(agent) in facts["Agent"].value
    assert [each.agent_did for each in list_rows(viewer, "/admin/sandboxes/quota/?slice=full")] == [ADA]


# --- pools of an environment type ---------------------------------------------------------------------------------


def test_alternative_pools_are_edited_on_the_page_of_their_type(administrator: Client, viewer: Client, pool: Pool) -> None:
    second = Pool.objects.create(name="second", provider="memory")
    duo = EnvironmentType.objects.create(name="duo", pool=pool)
    fields = {
        "pool": pool.pk, "ttl": "4h", "max_ttl": "24h", "turn_argv": "true",
        "alternative_pools-TOTAL_FORMS": 2, "alternative_pools-INITIAL_FORMS": 0,
        "alternative_pools-0-position": 1, "alternative_pools-0-pool": second.pk, "alternative_pools-1-position": 0,
    }  # fmt: skip
    for listed, message in ((pool, "first pool of the environment type"), (second, "duplicate data")):
        refused = administrator.post(row_url(duo), fields | {"alternative_pools-1-pool": listed.pk})
        assert message in refused.content.decode()
    assert viewer.post(row_url(duo), fields).status_code == 403
    assert not duo.alternative_pools.exists()
    assert administrator.post(row_url(duo), fields).status_code == 302
    assert [row.pool for row in duo.alternative_pools.all()] == [second]
    assert get_fields(viewer, row_url(duo))["Pools"].value == f"{pool.name}, second"


def test_a_failing_pool_and_a_missing_image_say_why(viewer: Client, pool: Pool, lease: Lease, memory: MemoryProvider) -> None:
    ensure_sandbox(lease)
    assert get_fields(viewer, row_url(pool))["Last start"].value == "no failure"
    Pool.objects.filter(pk=pool.pk).update(
        starts_failing_since=timezone.now() - 5 * MINUTE, start_error="mkdir /var/lib/docker/x: no space left"
    )
    shown = get_fields(viewer, row_url(pool))["Last start"]
    assert shown.alarm and "failing for 5 m" in str(shown.value) and "/var/lib/docker/x" in str(shown.note)
    listed = viewer.get(build_changelist_url("sandboxes_pool", slice="failing")).content.decode()
    assert pool.name in listed and "starts failing</b>" in listed
    cache.clear()
    assert "starts failing for 5 m" in viewer.get("/admin/").content.decode()
    host = Host.objects.get()
    assert "Missing images" not in get_fields(viewer, row_url(host))
    Host.objects.update(missing_images={pool.name: "private.example/base:1"})
    assert "image missing</span>" in fetch(viewer, build_changelist_url("sandboxes_host"))
    missing = get_fields(viewer, row_url(host))["Missing images"]
    assert (missing.alarm, missing.note) == (True, f"private.example/base:1 (pool {pool.name})")
