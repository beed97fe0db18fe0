"""NetworkPolicies: reachability of a destination from a Pod."""

import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.emulators.kubernetes.api.resources import NAMESPACES, NETWORK_POLICIES
from tests.emulators.kubernetes.api.selectors import parse_object_selector, select_labels
from tests.emulators.kubernetes.api.store import Object, Store


@dataclass(frozen=True)
class Destination:
    """Address and port that Pods may reach.

    `labels` and `namespace` are those of the Pods behind it; a destination outside of the cluster's Pods has no namespace.
    `target` is an address on this machine, or the uid of a Pod, and the port there. Policies see this port."""

    address: str
    port: int
    target: str
    target_port: int
    namespace: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    protocol: str = "TCP"
    policy_port: int = 0  # by default the port of the target

    @property
    def key(self) -> tuple[str, int, str]:
        return self.address, self.port, self.protocol


def is_reachable(store: Store, pod: Object, destination: Destination) -> bool:
    """Return whether the policies of the source and of the destination allow a connection."""
    labels, namespace = pod["metadata"].get("labels") or {}, pod["metadata"]["namespace"]
    address = (pod.get("status") or {}).get("podIP", "")
    port = destination.policy_port or destination.target_port
    leaving = _select_policies(store, namespace, labels, "Egress")
    ends = [(leaving, "egress", "to", destination.namespace, dict(destination.labels), destination.address)]
    if destination.namespace:
        entering = _select_policies(store, destination.namespace, dict(destination.labels), "Ingress")
        ends.append((entering, "ingress", "from", namespace, labels, address))
    for policies, direction, side, peer_namespace, peer_labels, peer_address in ends:

        def matches(policy: Object, peer: Mapping[str, Any], found: tuple[str, Mapping[str, str], str]) -> bool:
            return _matches_peer(store, policy["metadata"]["namespace"], peer, *found)

        found = (peer_namespace, peer_labels, peer_address)
        if policies and not any(
            _allows(policy, rule, side, port, destination.protocol, found, matches)
            for policy in policies
            for rule in policy["spec"].get(direction) or ()
        ):
            return False
    return True


def _select_policies(store: Store, namespace: str, labels: Mapping[str, str], kind: str) -> list[Object]:
    """Return the policies that isolate Pods with these labels in a direction."""
    found = []
    for policy in store.list(NETWORK_POLICIES, namespace):
        spec = policy.get("spec") or {}
        kinds = spec.get("policyTypes") or ["Ingress", *(["Egress"] if "egress" in spec else ())]
        if kind in kinds and select_labels(parse_object_selector(spec.get("podSelector") or {}), labels):
            found.append(policy)
    return found


def _allows(
    policy: Object, rule: Mapping[str, Any], side: str, port: int, protocol: str, found: tuple[str, Mapping[str, str], str],
    matches: Callable[..., bool],
) -> bool:  # fmt: skip
    peers, ports = rule.get(side), rule.get("ports")
    if ports and not any(_matches_port(one, port, protocol) for one in ports):
        return False
    return not peers or any(matches(policy, peer, found) for peer in peers)


def _matches_port(rule: Mapping[str, Any], port: int, protocol: str) -> bool:
    if rule.get("protocol", "TCP") != protocol:
        return False
    first = rule.get("port")
    return first is None or (isinstance(first, int) and first <= port <= rule.get("endPort", first))


def _matches_peer(
    store: Store, policy_namespace: str, peer: Mapping[str, Any], namespace: str, labels: Mapping[str, str], address: str
) -> bool:
    if block := peer.get("ipBlock"):
        found = ipaddress.ip_address(address)
        excluded = any(found in ipaddress.ip_network(one) for one in block.get("except") or ())
        return found in ipaddress.ip_network(block["cidr"]) and not excluded
    if not namespace:
        return False
    selector = peer.get("namespaceSelector")
    if selector is None:
        if namespace != policy_namespace:
            return False
    else:
        item = store.find(NAMESPACES, "", namespace)
        if item is None or not select_labels(parse_object_selector(selector), item["metadata"].get("labels")):
            return False
    return select_labels(parse_object_selector(peer.get("podSelector") or {}), labels)
