"""Policies: validation, and assignment to the sandboxes of an environment type."""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from django.db.models import ProtectedError

from leases import execution
from leases.models import EnvironmentType, Lease
from sandboxes import eviction
from sandboxes.egress.request_filter import is_allowed
from sandboxes.models import Policy, Pool, Sandbox
from sandboxes.models.policies import MAX_BODY_KIB, SEALED_POLICY_NAME
from sandboxes.pool import allocation, starts
from tests.conftest import MINUTE

pytestmark = pytest.mark.django_db


@pytest.fixture
def loosened() -> Policy:
    return Policy.objects.create(name="builders", writable_root=True, relay=True, models=["gpt-4o*"])


@pytest.fixture
def grant_with(grant: Callable[..., Lease]) -> Callable[..., Lease]:
    """Factory of leases whose environment type has a given policy."""

    def make(policy: Policy | None, **ask: Any) -> Lease:
        EnvironmentType.objects.filter(name="catan").update(policy=policy)
        return grant(**ask)

    return make


def warmed_up(pool: Pool, now: datetime) -> Sandbox:
    Pool.objects.filter(pk=pool.pk).update(warm_target=1)
    pool.refresh_from_db()
    sandbox = allocation.start_warm(pool, now=now)
    assert sandbox
    return sandbox


# --- validation -------------------------------------------------------------------------------------------------


def test_built_in_policy_exists_with_strict_defaults() -> None:
    sealed, default = Policy.objects.get(name=SEALED_POLICY_NAME), Policy(name=SEALED_POLICY_NAME)
    columns = [field.name for field in Policy._meta.fields if field.name not in ("id", "description")]
    assert [getattr(sealed, name) for name in columns] == [getattr(default, name) for name in columns]
    assert (sealed.built_in, sealed.writable_root, sealed.relay, sealed.models) == (True, False, False, [])


@pytest.mark.parametrize(
    "loose",
    [
        {"writable_root": True}, {"relay": True}, {"calls_per_minute": 601}, {"most_calls_at_once": 9}, {"largest_body_kib": 1},
        {"mcp_tools": ["budget"]},
    ],
)  # fmt: skip
def test_built_in_policy_cannot_be_relaxed(loose: dict[str, Any]) -> None:
    with pytest.raises(IntegrityError), transaction.atomic():
        Policy.objects.filter(name=SEALED_POLICY_NAME).update(**loose)
    assert Policy.objects.create(name="another", **loose)


@pytest.mark.parametrize(
    ("patterns", "model", "may"),
    [
        (["gpt-4o"], "gpt-4o", True), (["gpt-4o"], "gpt-4o-mini", False), (["gpt-4o*"], "gpt-4o-mini", True),
        (["gpt-4o*"], "GPT-4o", False), (["gpt-4o*"], "azure/gpt-4o", False), (["a", "b"], "", False),
        (["a", "claude-[34]-*"], "claude-4-opus", True),
    ],
)  # fmt: skip
def test_model_patterns_define_the_allow_list(patterns: list[str], model: str, may: bool) -> None:
    assert is_allowed(model, patterns) is may


@pytest.mark.parametrize(
    "wrong",
    [
        {"models": "gpt"}, {"models": [""]}, {"models": [7]}, {"models": ["x" * 201]}, {"models": ["x"] * 65},
        {"calls_per_minute": 0}, {"most_calls_at_once": 0}, {"largest_body_kib": 0}, {"largest_body_kib": MAX_BODY_KIB + 1},
        {"mcp_tools": "budget"}, {"mcp_tools": ["exec"]}, {"mcp_tools": ["budget", "budget"]}, {"mcp_tools": [[]]},
        {"name": "two words"}, {"name": SEALED_POLICY_NAME},
    ],
)  # fmt: skip
def test_invalid_policy_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        Policy(**{"name": "p"} | wrong).full_clean()
    assert list(refused.value.error_dict) == list(wrong)


@pytest.mark.parametrize("user", ["environment type", "sandbox"])
def test_policy_in_use_cannot_be_deleted(loosened: Policy, grant_with: Callable[..., Lease], user: str, now: datetime) -> None:
    lease = grant_with(loosened)
    if user == "sandbox":
        execution.ensure_sandbox_ready(lease.pk, now=now)
        EnvironmentType.objects.update(policy=None)
    with pytest.raises(ProtectedError):
        loosened.delete()


# --- assignment --------------------------------------------------------------------------------------------


def test_new_sandbox_has_the_policy_of_its_environment_type(
    loosened: Policy, grant_with: Callable[..., Lease], now: datetime
) -> None:
    sandbox = execution.ensure_sandbox_ready(grant_with(loosened).pk, now=now)
    assert (sandbox.policy, sandbox.rules) == (loosened, loosened)
    for number, equivalent in enumerate((None, Policy.objects.get(name=SEALED_POLICY_NAME))):
        sealed = execution.ensure_sandbox_ready(grant_with(equivalent, environment=f"sealed-{number}").pk, now=now)
        assert (sealed.policy, sealed.rules.name, sealed.rules.relay) == (None, SEALED_POLICY_NAME, False)


def test_sandbox_keeps_its_policy_when_its_environment_type_changes(
    loosened: Policy, grant_with: Callable[..., Lease], now: datetime
) -> None:
    lease = grant_with(loosened)
    execution.ensure_sandbox_ready(lease.pk, now=now)
    EnvironmentType.objects.update(policy=None)
    assert execution.ensure_sandbox_ready(lease.pk, now=now).policy == loosened


def test_pre_warmed_sandbox_gets_the_policy_when_claimed(grant_with: Callable[..., Lease], pool: Pool, now: datetime) -> None:
    ready = warmed_up(pool, now)
    relaying = Policy.objects.create(name="relaying", relay=True)
    claimed = execution.ensure_sandbox_ready(grant_with(relaying).pk, now=now)
    assert (claimed.pk, claimed.policy) == (ready.pk, relaying)


def test_pre_warmed_sandbox_is_not_claimed_for_a_writable_root(
    loosened: Policy, grant_with: Callable[..., Lease], pool: Pool, now: datetime
) -> None:
    ready = warmed_up(pool, now)
    sandbox = execution.ensure_sandbox_ready(grant_with(loosened).pk, now=now)
    assert sandbox.pk != ready.pk
    assert starts.build_spec(sandbox).writable_root
    ready.refresh_from_db()
    assert (ready.holder, ready.policy, starts.build_spec(ready).writable_root) == (None, None, False)


def test_edited_policy_applies_to_the_container_from_the_next_wake(
    loosened: Policy, grant_with: Callable[..., Lease], now: datetime
) -> None:
    lease = grant_with(loosened, ttl=timedelta(hours=4))
    first = execution.ensure_sandbox_ready(lease.pk, now=now)
    assert starts.build_spec(first).writable_root
    Policy.objects.filter(pk=loosened.pk).update(writable_root=False)
    assert eviction.evict(first.pk, now=now, reason="test")
    second = execution.ensure_sandbox_ready(lease.pk, now=now + MINUTE)
    assert (second.pk, second.incarnation) == (first.pk, 2)
    assert not starts.build_spec(second).writable_root
