"""Network policies at Runloop: one for each gateway address, found or created, and restored after changes."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest

from sandboxes.providers.base import Network, SandboxSpec
from sandboxes.providers.errors import Rejected, Unavailable
from sandboxes.providers.remote.provider import RemoteProvider
from tests.emulators.base import CUT_AFTER, CUT_BEFORE, Fault
from tests.emulators.runloop import EGRESS_DEFAULTS, RunloopEmulator
from tests.support.remote import GetEmulator
from tests.unit.sandboxes.remote.conftest import MakeProvider

CREATE_POLICY, LIST_POLICIES = "POST /v1/network-policies$", "GET /v1/network-policies$"


@pytest.fixture
def emulator(emulators: GetEmulator, settings: Any) -> RunloopEmulator:
    """Emulator without network policies."""
    found = emulators("runloop")
    assert isinstance(found, RunloopEmulator)
    found.policies.clear()
    found.policy_keys.clear()
    found.requests.clear()
    found.faults.clear()  # a concurrent create that finds the policy leaves a delay to the next test
    settings.GATEWAY_URL = "https://gateway.example.org:8443/x"
    return found


@pytest.fixture
def provider(make_provider: MakeProvider) -> RemoteProvider:
    return make_provider("runloop")


def create(provider: RemoteProvider) -> str:
    """Create a devbox and destroy it. Return the policy of its request."""
    ref = provider.create(SandboxSpec(f"lhr-{uuid4().hex[:16]}", owner="network"))
    created = provider._client.devboxes.retrieve(provider._ids[ref]).launch_parameters  # type: ignore[attr-defined]
    provider.destroy(ref)
    return str(created.network_policy_id)


def test_devboxes_share_one_policy_that_permits_the_gateway_alone(
    provider: RemoteProvider, emulator: RunloopEmulator
) -> None:  # fmt: skip
    first = create(provider)
    assert create(provider) == first
    [policy] = emulator.policies.values()
    assert (policy["id"], policy["name"]) == (first, "leasehold-gateway-gateway.example.org")
    assert policy["egress"] == EGRESS_DEFAULTS | {"allowed_hostnames": ["gateway.example.org"]}


@pytest.mark.parametrize(
    ("gateway_url", "name", "rules"),
    [
        ("http://192.0.2.7:8443", "leasehold-gateway-192.0.2.7", {"allowed_cidrs": [{"cidr": "192.0.2.7/32"}]}),
        ("", "leasehold-no-network", {}),
    ],
)
def test_another_gateway_address_gets_another_policy(
    gateway_url: str, name: str, rules: dict[str, Any], provider: RemoteProvider, emulator: RunloopEmulator, settings: Any
) -> None:
    first = create(provider)
    settings.GATEWAY_URL = gateway_url
    second = emulator.policies[create(provider)]
    assert (second["name"], second["egress"]) == (name, EGRESS_DEFAULTS | rules)
    assert first in emulator.policies and len(emulator.policies) == 2


def test_policy_that_somebody_has_opened_is_restricted_again(provider: RemoteProvider, emulator: RunloopEmulator) -> None:
    first = create(provider)
    emulator.policies[first]["egress"] |= {"allow_all": True, "allowed_hostnames": ["gateway.example.org", "example.com"]}
    assert create(provider) == first
    assert emulator.policies[first]["egress"] == EGRESS_DEFAULTS | {"allowed_hostnames": ["gateway.example.org"]}


def test_deleted_policy_is_created_anew(provider: RemoteProvider, emulator: RunloopEmulator) -> None:
    del emulator.policies[create(provider)]
    assert create(provider) in emulator.policies


def test_policy_whose_name_only_contains_the_name_is_not_used(provider: RemoteProvider, emulator: RunloopEmulator) -> None:
    other = provider._client.network_policies.create(  # type: ignore[attr-defined]
        name="leasehold-gateway-gateway.example.org.example.net", allowed_hostnames=["gateway.example.org"]
    )
    assert create(provider) != other.id


def test_concurrent_creates_make_one_policy(provider: RemoteProvider, emulator: RunloopEmulator) -> None:
    emulator.faults.append(Fault(CREATE_POLICY, None, times=4, seconds=0.1))  # until each has found none
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda _: create(provider), range(4))]
    assert {*found} == {*emulator.policies} and len(emulator.policies) == 1


@pytest.mark.parametrize(("outcome", "created"), [(CUT_AFTER, 1), (CUT_BEFORE, 0), (500, 0)])
def test_unknown_outcome_of_a_policy_is_settled_by_the_list(
    outcome: int | str, created: int, provider: RemoteProvider, emulator: RunloopEmulator
) -> None:
    emulator.faults.append(Fault(CREATE_POLICY, outcome))
    if created:
        create(provider)
    else:
        with pytest.raises(Unavailable):
            create(provider)
        assert not [line for line in emulator.requests if line == "POST /v1/devboxes"]  # none without a policy
    assert len(emulator.policies) == created
    create(provider)
    assert len(emulator.policies) == 1


def test_refused_policy_or_unreadable_list_creates_no_devbox(provider: RemoteProvider, emulator: RunloopEmulator) -> None:
    for pattern, outcome, error in ((CREATE_POLICY, 422, Rejected), (LIST_POLICIES, 503, Unavailable)):
        emulator.faults.append(Fault(pattern, outcome))
        with pytest.raises(error):
            create(provider)
    assert "POST /v1/devboxes" not in emulator.requests


def test_ipv6_gateway_is_refused_before_any_call(provider: RemoteProvider, emulator: RunloopEmulator, settings: Any) -> None:
    settings.GATEWAY_URL = "https://[2001:db8::1]:8443"
    with pytest.raises(Rejected, match=r"IPv6 address 2001:db8::1/128.*RUNLOOP_SANDBOX_NETWORK=open"):
        create(provider)
    assert emulator.requests == []


def test_open_network_needs_no_policy(make_provider: MakeProvider, emulator: RunloopEmulator) -> None:
    assert create(make_provider("runloop", network=Network.OPEN)) == "None"
    assert not [line for line in emulator.requests if "network-policies" in line]
