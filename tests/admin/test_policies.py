"""Policies in the console: exceptions, sandboxes and environment types that use them, permissions."""

from collections.abc import Callable

import pytest
from django.test import Client

from leases import execution
from leases.models import EnvironmentType, Lease
from sandboxes.models import Policy, Sandbox
from sandboxes.models.policies import SEALED_POLICY_NAME
from tests.admin.conftest import NOW
from tests.support.console import fetch, get_fields, list_rows, row_url

pytestmark = pytest.mark.django_db
LIST = "/admin/sandboxes/policy/"
FORM = {
    "name": "builders", "description": "For builds.", "writable_root": "on", "models": "gpt-4o*\n\n o3 ",
    "calls_per_minute": "90", "most_calls_at_once": "8", "largest_body_kib": "1024",
    "mcp_tools": "lease_status\nput_artifact", "allowed_domains": "pypi.org\n*.example.org:8443", "max_connections": "4",
    "max_connection_mib": "10", "max_lease_mib": "100",
}  # fmt: skip


@pytest.fixture
def builders(grant: Callable[..., Lease]) -> Policy:
    """Policy of the type catan and of one sandbox, beside a sandbox without a policy."""
    execution.ensure_sandbox_ready(grant(environment="sealed-one").pk, now=NOW)
    policy = Policy.objects.create(name="builders", writable_root=True, models=["a", "b", "c*"])
    EnvironmentType.objects.filter(name="catan").update(policy=policy)
    execution.ensure_sandbox_ready(grant(environment="loose-one").pk, now=NOW)
    return policy


def test_an_administrator_makes_a_policy_and_edits_all_but_its_name(administrator: Client) -> None:
    assert administrator.post(f"{LIST}add/", FORM).status_code == 302
    made = Policy.objects.get(name="builders")
    assert (made.writable_root, made.relay, made.models) == (True, False, ["gpt-4o*", "o3"])
    assert (made.calls_per_minute, made.most_calls_at_once, made.largest_body_kib) == (90, 8, 1024)
    assert made.mcp_tools == ["lease_status", "put_artifact"]
    assert (made.allowed_domains, made.max_connections) == (["pypi.org", "*.example.org:8443"], 4)
    assert administrator.post(row_url(made), FORM | {"name": "others", "relay": "on"}).status_code == 302
    made.refresh_from_db()
    assert (made.name, made.relay, made.models) == ("builders", True, ["gpt-4o*", "o3"])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": SEALED_POLICY_NAME}, "already exists"), ({"calls_per_minute": "0"}, "greater than or equal to 1"),
        ({"models": "x" * 201}, "at most 64"), ({"allowed_domains": "*"}, "expected a domain"),
    ],
)  # fmt: skip
def test_an_invalid_policy_is_explained(administrator: Client, wrong: dict[str, str], message: str) -> None:
    answer = administrator.post(f"{LIST}add/", FORM | wrong)
    assert answer.status_code == 200
    assert message in answer.content.decode()
    assert Policy.objects.count() == 1


def test_policies_show_their_exceptions_sandboxes_and_environment_types(viewer: Client, builders: Policy) -> None:
    for policy, environment in ((builders, "loose-one"), (Policy.objects.get(name=SEALED_POLICY_NAME), "sealed-one")):
        facts = get_fields(viewer, row_url(policy))
        assert facts["Live sandboxes"].value == "1"
        assert [each.environment_id for each in list_rows(viewer, facts["Live sandboxes"].href)] == [environment]
        types = set(EnvironmentType.objects.filter(policy=None if policy.built_in else policy))
        assert types
        assert all(each.name in str(facts["Environment types"].value) for each in types)
    for sandbox in Sandbox.objects.all():
        field = get_fields(viewer, row_url(sandbox))["Policy"]
        used = (row_url(builders), "writable root") if sandbox.policy else (SEALED_POLICY_NAME, "no exceptions")
        assert used[0] in str(field.value) and field.note == used[1]
    assert '<span class="lh-command">c*</span>' in fetch(viewer, row_url(builders))
    shown = fetch(viewer, LIST)
    for word in ("builders", "writable", "and 2 more", SEALED_POLICY_NAME, "read-only", "600 per minute"):
        assert word in shown
    assert [row.live for row in list_rows(viewer, LIST)] == [1, 1]
