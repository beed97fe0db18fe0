"""Network policies of Runloop: account-wide objects that list the destinations of the devboxes that name them.

There is one policy for each gateway address, found by a name that contains the address. Its rules are compared at each use and
restored if they were changed. A gateway with another address gets another policy; existing devboxes keep theirs."""

from typing import Any

from runloop_api_client import Runloop
from runloop_api_client.types import NetworkPolicyView

from sandboxes.providers.errors import ProviderError, Rejected
from sandboxes.providers.remote.configuration import GatewayDestination
from sandboxes.providers.remote.errors import NotFound
from sandboxes.providers.runloop.errors import translate_errors

PAGE_SIZE = 1000
MAX_CREATES = 5  # with keys whose policies have been deleted
DESCRIPTION = "Managed by Leasehold: egress of sandboxes to the gateway alone. Changes are undone."


def ensure_policy(client: Runloop, destination: GatewayDestination) -> str:
    """Return the id of the policy that permits this destination alone, or none if it is empty. Create or restore the policy.

    Idempotent, and safe to repeat after an unknown outcome. Raise Rejected for an IPv6 address, which a policy cannot state,
    and Unavailable."""
    name, rules = build_name(destination), _build_rules(destination)
    found = _find(client, name)
    if found is None:
        try:
            found = _create(client, name, rules)
        except ProviderError as error:
            found = _find(client, name)  # created by another process, or an unknown outcome was a success
            if found is None:
                raise error from None
    if not _has_rules(found, rules):
        with translate_errors(name):
            found = client.network_policies.update(found.id, **rules)
        if not _has_rules(found, rules):
            raise Rejected(f"Runloop's network policy {name} cannot be restricted to the gateway: {found.egress}")
    return found.id


def build_name(destination: GatewayDestination) -> str:
    """Return the name of the policy of a destination. Installations of one account that share a gateway share the policy."""
    host = destination.cidr.removesuffix("/32") or destination.domain
    return f"leasehold-gateway-{host}" if host else "leasehold-no-network"


def _build_rules(destination: GatewayDestination) -> dict[str, Any]:
    """Return the rules of a policy. Without a host no destination is permitted."""
    cidr, domain = destination
    if ":" in cidr:
        raise Rejected(
            f"A network policy of Runloop cannot state the IPv6 address {cidr}. Name the host in LEASEHOLD_GATEWAY_URL, or set "
            "RUNLOOP_SANDBOX_NETWORK=open."
        )
    return {
        "allow_all": False,
        "allow_agent_gateway": False,
        "allow_devbox_to_devbox": False,
        "allow_mcp_gateway": False,
        "allow_runloop_mirrors": False,
        "allowed_cidrs": [{"cidr": cidr}] if cidr else [],
        "allowed_hostnames": [domain] if domain else [],
    }


def _has_rules(policy: NetworkPolicyView, rules: dict[str, Any]) -> bool:
    stated = policy.egress.model_dump(include={*rules}, exclude_none=True)
    return all(stated.get(field, type(value)()) == value for field, value in rules.items())


def _find(client: Runloop, name: str) -> NetworkPolicyView | None:
    """Return the oldest policy of this name, which is not unique at Runloop. The filter of the list matches parts of names."""
    with translate_errors("the list of network policies"):
        found = [policy for policy in client.network_policies.list(name=name, limit=PAGE_SIZE) if policy.name == name]
    return min(found, key=lambda policy: (policy.create_time_ms, policy.id), default=None)


def _create(client: Runloop, name: str, rules: dict[str, Any]) -> NetworkPolicyView:
    """Create the policy. The keys are derived from the name, so that concurrent calls create one policy."""
    for number in range(MAX_CREATES):
        with translate_errors(name):
            created = client.network_policies.create(
                name=name, description=DESCRIPTION, idempotency_key=f"{name}-{number}", **rules
            )
        try:
            with translate_errors(name):
                return client.network_policies.retrieve(created.id)
        except NotFound:
            continue  # a policy of this key was deleted before
    raise Rejected(f"{MAX_CREATES} network policies {name} have been deleted.")
