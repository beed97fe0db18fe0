"""Policies in the console: exceptions, sandboxes and environment types that use them, permissions."""

from collections.abc import Callable

import pytest
from django.test import Client

from leases import execution
from leases.models import EnvironmentType, Lease
from sandboxes.models import Policy, Sandbox
from sandboxes.models.policies import SEALED_POLICY_NAME
from tests.admin.conftest import NOW

pytestmark = pytest.mark.django_db
LIST = "/admin/sandboxes/policy/"
FORM = {
    "name": "builders", "description": "For builds.", "writable_root": "on", "models": "gpt-4o*\n\n o3 ",
    "calls_per_minute": "90", "most_calls_at_once": "8", "largest_body_kib": "1024",
}  # fmt: skip


def page(policy: Policy) -> str:
    return f"{LIST}{policy.pk}/change/"


@pytest.fixture
def builders(grant: Callable[..., Lease]) -> Policy:
    """Policy of the type catan and of one sandbox, beside a sandbox without a policy."""
    execution.ensure_sandbox_ready(grant(environment="sealed-one").pk, now=NOW)
    policy = Policy.objects.create(name="builders", writable_root=True, models=["a", "b", "c*"])
    EnvironmentType.objects.filter(name="catan").update(policy=policy)
    execution.ensure_sandbox_ready(grant(environment="loose-one").pk, now=NOW)
    return policy


def test_an_administrator_makes_a_policy(administrator: Client) -> None:
    assert administrator.post(f"{LIST}add/", FORM).status_code == 302
    made = Policy.objects.get(name="builders")
    assert (made.writable_root, made.relay, made.models) == (True, False, ["gpt-4o*", "o3"])
    assert (made.calls_per_minute, made.most_calls_at_once, made.largest_body_kib) == (90, 8, 1024)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": SEALED_POLICY_NAME}, "already exists"),
        ({"calls_per_minute": "0"}, "greater than or equal to 1"),
        ({"models": "x" * 201}, "at most 64"),
    ],
)  # fmt: skip
def test_an_invalid_policy_is_explained(administrator: Client, wrong: dict[str, str], message: str) -> None:
    answer = administrator.post(f"{LIST}add/", FORM | wrong)
    assert answer.status_code == 200
    assert message in answer.content.decode()
    assert Policy.objects.count() == 1


def test_editing_a_policy_keeps_its_name(administrator: Client, builders: Policy) -> None:
    assert administrator.post(page(builders), FORM | {"name": "others", "relay": "on"}).status_code == 302
    builders.refresh_from_db()
    assert (builders.name, builders.relay, builders.models) == ("builders", True, ["gpt-4o*", "o3"])


def test_the_built_in_policy_cannot_be_edited(superuser: Client) -> None:
    sealed = Policy.objects.get(name=SEALED_POLICY_NAME)
    shown = superuser.get(page(sealed))
    assert shown.status_code == 200
    assert b'name="_save"' not in shown.content
    assert superuser.post(page(sealed), FORM).status_code == 403


def test_an_operator_reads_policies_and_writes_none(operator: Client, builders: Policy) -> None:
    shown = operator.get(page(builders)).content.decode()
    assert 'name="_save"' not in shown
    assert '<span class="lh-command">c*</span>' in shown
    assert operator.post(page(builders), FORM).status_code == 403
    assert operator.get(f"{LIST}add/").status_code == 403


def test_a_policys_page_links_to_exactly_its_sandboxes(viewer: Client, builders: Policy) -> None:
    for policy, environment in ((builders, "loose-one"), (Policy.objects.get(name=SEALED_POLICY_NAME), "sealed-one")):
        facts = {each.label: each for each in viewer.get(page(policy)).context["facts"]}
        assert facts["Live sandboxes"].value == "1"
        listed = viewer.get(facts["Live sandboxes"].href).context["cl"].result_list
        assert [each.environment_id for each in listed] == [environment]
        types = set(EnvironmentType.objects.filter(policy=None if policy.built_in else policy))
        assert types
        assert all(each.name in str(facts["Environment types"].value) for each in types)


def test_the_list_shows_the_exceptions_of_each_policy(viewer: Client, builders: Policy) -> None:
    shown = viewer.get(LIST).content.decode()
    for word in ("builders", "writable", "and 2 more", SEALED_POLICY_NAME, "read-only", "600 per minute"):
        assert word in shown
    assert [row.live for row in viewer.get(LIST).context["cl"].result_list] == [1, 1]


def test_a_sandboxs_page_names_its_policy(viewer: Client, builders: Policy) -> None:
    for sandbox in Sandbox.objects.all():
        facts = {each.label: each for each in viewer.get(f"/admin/sandboxes/sandbox/{sandbox.pk}/change/").context["facts"]}
        value, note = str(facts["Policy"].value), facts["Policy"].note
        if sandbox.policy:
            assert (page(builders) in value, note) == (True, "writable root")
        else:
            assert (value, note) == (SEALED_POLICY_NAME, "no exceptions")


def test_an_environment_type_is_given_a_policy(administrator: Client) -> None:
    kind, policy = EnvironmentType.objects.get(name="catan"), Policy.objects.create(name="relaying", relay=True)
    form = {
        "policy": policy.pk, "ttl": "4h", "max_ttl": "1d", "expiry_conditions": "", "turn_argv": "play", "sleep_after": "5m",
        "turn_timeout": "", "snapshot_excludes": "", "pool": "",
    }  # fmt: skip
    assert administrator.post(f"/admin/leases/environmenttype/{kind.pk}/change/", form).status_code == 302
    kind.refresh_from_db()
    assert kind.policy == policy
    assert "relaying" in administrator.get("/admin/leases/environmenttype/").content.decode()
