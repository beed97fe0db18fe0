"""Pools and quotas in the console: draining, circuit, limits, and links from numbers to rows."""

from collections.abc import Callable

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client
from django.utils import timezone

from leases.models import Agent, Lease
from sandboxes import pool as pools
from sandboxes import sweeps
from sandboxes.models import Pool, Quota, Sandbox
from sandboxes.providers.base import Unavailable
from sandboxes.providers.memory import MemoryProvider
from tests.admin.conftest import NOW, ensure_sandbox
from tests.admin.test_acts import WHY, list_messages
from tests.admin.test_pages import costs
from tests.conftest import MINUTE

pytestmark = pytest.mark.django_db


def page(pool: Pool, act: str = "change") -> str:
    return f"/admin/sandboxes/pool/{pool.pk}/{act}/"


def offered(client: Client, pool: Pool) -> set[str]:
    shown = client.get(page(pool)).content.decode()
    return {name for name in ("Drain…", "Resume…", "Close circuit…") if name in shown}


def has(pool: Pool, **columns: object) -> bool:
    return Pool.objects.filter(pk=pool.pk, **columns).exists()


# --- actions ------------------------------------------------------------------------------------------------------


def test_an_operator_drains_and_resumes_a_pool_with_a_reason(operator: Client, pool: Pool) -> None:
    assert offered(operator, pool) == {"Drain…"}
    assert list_messages(operator.post(page(pool, "drain"), WHY)) == ["1 pool draining."]
    assert has(pool, draining=True)
    assert offered(operator, pool) == {"Resume…"}
    shown = operator.get(page(pool)).content.decode()
    assert "draining" in shown
    assert "it mines coins" in shown
    assert list_messages(operator.post(page(pool, "drain"), WHY))[-1] == "Nothing changed: already draining."
    assert list_messages(operator.post(page(pool, "resume"), WHY))[-1] == "1 pool resumed."
    assert has(pool, draining=False)
    messages = [entry.get_change_message() for entry in LogEntry.objects.order_by("pk")]
    assert messages == ["Drain: it mines coins", "Resume: it mines coins"]


@pytest.fixture
def broken(pool: Pool, memory: MemoryProvider) -> Pool:
    """Pool whose circuit is open after three failed starts in a row."""
    Pool.objects.filter(pk=pool.pk).update(warm_target=2)
    with memory.fail("create", Unavailable("no such image")):
        sweeps.warm_pools(now=timezone.now())
    assert has(pool, warm_failures=3)
    return pool


def test_an_open_circuit_says_why_and_an_operator_closes_it(operator: Client, broken: Pool) -> None:
    shown = operator.get(page(broken)).content.decode()
    assert "no such image" in shown
    assert "open for" in shown
    assert sweeps.warm_pools(now=timezone.now()).failures
    assert list_messages(operator.post(page(broken, "warm_again"), WHY)) == ["1 pool warming up again."]
    assert has(broken, warm_failures=0, warm_paused_until__isnull=True, warm_error__contains="no such image")
    assert sweeps.warm_pools(now=timezone.now()).counts == {"warmed up": 2}
    assert has(broken, warm_error="")
    assert "Close circuit…" not in offered(operator, broken)
    assert list_messages(operator.post(page(broken, "warm_again"), WHY)) == ["Nothing changed: its circuit is closed."]


def test_an_expired_circuit_is_closed(operator: Client, broken: Pool) -> None:
    Pool.objects.filter(pk=broken.pk).update(warm_paused_until=NOW)
    assert "Close circuit…" not in offered(operator, broken)
    assert "open for" not in operator.get(page(broken)).content.decode()


@pytest.mark.parametrize("act", ["drain", "resume", "warm_again"])
def test_a_viewer_a_get_and_a_post_without_a_token_change_nothing(
    act: str, viewer: Client, operator: Client, as_role: Callable[..., Client], broken: Pool
) -> None:
    Pool.objects.filter(pk=broken.pk).update(draining=act == "resume")
    before = Pool.objects.filter(pk=broken.pk).values().get()
    assert viewer.post(page(broken, act), WHY).status_code == 403
    assert b"Recorded in the history" in operator.get(page(broken, act), WHY).content
    assert as_role("Operator", enforce_csrf_checks=True).post(page(broken, act), WHY).status_code == 403
    assert operator.post(page(broken, act), {**WHY, "reason": ""}).status_code == 200
    assert Pool.objects.filter(pk=broken.pk).values().get() == before


@pytest.mark.parametrize("pk", ["999", "no-id", "9" * 40])
def test_an_action_on_a_missing_row_is_not_found(operator: Client, pk: str) -> None:
    assert operator.post(f"/admin/sandboxes/pool/{pk}/drain/", WHY).status_code == 404


def test_an_operator_does_not_edit_a_pool(operator: Client, pool: Pool) -> None:
    assert operator.post(page(pool), {"capacity": 1}).status_code == 403
    assert operator.get("/admin/sandboxes/pool/add/").status_code == 403
    assert has(pool, capacity=100)


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
    pools.start_warm(pool, now=now)
    context = viewer.get(page(pool)).context
    numbers = {fact.label: (str(fact.value), fact.href) for fact in context["facts"] if fact.href}
    assert {label: value for label, (value, _) in numbers.items()} == {
        "Used": "6 of 100", "Unclaimed": "1", "Quarantine": "1", "Stalled": "0", "Lost": "1",
        "State not stored": "1",
    }  # fmt: skip
    for label, (value, href) in numbers.items():
        assert viewer.get(href).context["cl"].result_count == int(value.split()[0]), label
    for part in context["usage"].parts:
        assert viewer.get(part.href).context["cl"].result_count == part.number, part.state


def test_outdated_warm_sandboxes_are_reported(viewer: Client, pool: Pool) -> None:
    Pool.objects.filter(pk=pool.pk).update(warm_target=1)
    pool.refresh_from_db()
    pools.start_warm(pool, now=NOW)
    Pool.objects.filter(pk=pool.pk).update(image="other:2")
    fact = next(each for each in viewer.get(page(pool)).context["facts"] if each.label == "Unclaimed")
    assert (fact.value, fact.note) == ("1", "target 1; 1 outdated (image or memory changed)")


# --- quotas -------------------------------------------------------------------------------------------------------

ADA = "did:plc:ada"


def quota(pool: Pool, **columns: object) -> Quota:
    return Quota.objects.update_or_create(pool=pool, agent_did=ADA, defaults=columns)[0]


def test_an_administrator_sets_the_limit_of_a_quota_but_not_its_use(administrator: Client, pool: Pool, lease: Lease) -> None:
    ensure_sandbox(lease)
    row = quota(pool)
    assert row.used == 1
    url = f"/admin/sandboxes/quota/{row.pk}/change/"
    sent = {"most": 4, "guaranteed": 2, "used": 77, "agent_did": "did:plc:eve", "pool": 1}
    assert administrator.post(url, sent).status_code == 302
    row.refresh_from_db()
    assert (row.most, row.guaranteed, row.used, row.agent_did, row.pool) == (4, 2, 1, ADA, pool)
    administrator.post(
        "/admin/sandboxes/quota/add/", {"pool": pool.pk, "agent_did": " did:plc:bob ", "most": "", "guaranteed": 1}
    )
    added = Quota.objects.get(agent_did="did:plc:bob")
    assert (added.most, added.guaranteed, added.used) == (None, 1, 0)


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        ({"most": 2, "guaranteed": 3}, "The guarantee cannot exceed the limit of 2."),
        ({"most": -1}, "greater than or equal to 0"),
        ({"most": "many"}, "Enter a whole number"),
        ({"guaranteed": ""}, "This field is required"),
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


def test_others_see_quotas_and_do_not_change_them(operator: Client, viewer: Client, pool: Pool) -> None:
    row = quota(pool, most=4)
    for client in (operator, viewer):
        assert client.get(f"/admin/sandboxes/quota/{row.pk}/change/").status_code == 200
        assert client.post(f"/admin/sandboxes/quota/{row.pk}/change/", {"most": 1, "guaranteed": 0}).status_code == 403
        assert client.get("/admin/sandboxes/quota/add/").status_code == 403
    row.refresh_from_db()
    assert row.most == 4


def test_pools_and_agents_link_to_their_quotas_and_these_to_their_sandboxes(
    administrator: Client, viewer: Client, pool: Pool, lease: Lease, grant: Callable[..., Lease]
) -> None:
    ensure_sandbox(lease)
    ensure_sandbox(grant(agent="did:plc:other"))
    row = quota(pool, most=1)
    agent = Agent.objects.get(did=ADA)
    for shown in (page(pool), f"/admin/leases/agent/{agent.pk}/change/"):
        assert f"/admin/sandboxes/quota/{row.pk}/change/" in viewer.get(shown).content.decode()
        assert "Add quota" not in viewer.get(shown).content.decode()
        assert "/admin/sandboxes/quota/add/?" in administrator.get(shown).content.decode()
    facts = {fact.label: fact for fact in viewer.get(f"/admin/sandboxes/quota/{row.pk}/change/").context["facts"]}
    assert (facts["Used"].value, facts["Used"].alarm) == ("1", True)
    assert viewer.get(facts["Used"].href).context["cl"].result_count == 1
    assert f"/admin/leases/agent/{agent.pk}/change/" in facts["Agent"].value
    full = viewer.get("/admin/sandboxes/quota/?slice=full").context["cl"].result_list
    assert [each.agent_did for each in full] == [ADA]


# --- query counts -------------------------------------------------------------------------------------------------


def test_the_pages_of_a_pool_and_an_agent_cost_the_same_with_60_quotas_as_with_3(
    viewer: Client, operator: Client, pool: Pool, lease: Lease, grant: Callable[..., Lease]
) -> None:
    agent = Agent.objects.get(did=ADA)
    pages = [f"sandboxes/pool/{pool.pk}/change/", f"leases/agent/{agent.pk}/change/", "sandboxes/quota/", "sandboxes/pool/"]
    counts = []
    for numbers in (range(3), range(3, 60)):
        for number in numbers:
            ensure_sandbox(grant(agent=f"did:plc:b{number}"))
            quota(Pool.objects.create(name=f"p{number}"), most=1)
        for act in ("drain", "resume"):
            operator.post(page(pool, act), WHY)
        counts.append(costs(viewer, pages))
    assert counts[0] == counts[1]
    assert max(counts[0].values()) <= 17
    assert counts[0]["sandboxes/pool/"] <= 9


def test_a_pool_whose_pause_ended_is_on_no_tile(viewer: Client, broken: Pool) -> None:
    shown = viewer.get("/admin/sandboxes/pool/?slice=paused").context["cl"].result_list
    assert [each.pk for each in shown] == [broken.pk]
    Pool.objects.filter(pk=broken.pk).update(warm_paused_until=timezone.now() - MINUTE)
    assert not viewer.get("/admin/sandboxes/pool/?slice=paused").context["cl"].result_list
