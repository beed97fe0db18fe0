"""Validation of objects by the Kubernetes emulator, without Docker."""

from copy import deepcopy
from typing import Any

import pytest

from tests.emulators.kubernetes.api import pod_security
from tests.emulators.kubernetes.api.resources import NETWORK_POLICIES, PODS, SANDBOXES, SECRETS, Resource
from tests.emulators.kubernetes.api.selectors import Selection
from tests.emulators.kubernetes.api.status import ApiError
from tests.emulators.kubernetes.api.store import Store
from tests.emulators.kubernetes.api.validation import validate
from tests.emulators.kubernetes.api.validation.names import parse_quantity
from tests.emulators.kubernetes.api.validation.semantics import find_update_errors
from tests.emulators.kubernetes.node.policies import Destination, is_reachable
from tests.support.kubernetes import build_pod

CONTAINER = "spec.containers[0]"
LIMITS = f"{CONTAINER}.resources.limits"
POD = build_pod(
    "p1", "image:1", "true",
    dnsPolicy="None", dnsConfig={"nameservers": ["127.0.0.1"]},
    container={
        "resources": {"limits": {"memory": "512Mi", "cpu": "1"}, "requests": {"cpu": "250m"}},
        "volumeMounts": [{"name": "workspace", "mountPath": "/workspace"}],
    },
    volumes=[{"name": "workspace", "emptyDir": {"sizeLimit": "1Gi"}}],
)  # fmt: skip


def change(item: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a copy with one value changed. Numbers in the path are indexes."""
    changed = place = deepcopy(item)
    *parents, last = [int(part) if part.isdigit() else part for part in path.split("/")]
    for part in parents:
        place = place[part]
    place[last] = value
    return changed


def find_causes(resource: Resource, item: dict[str, Any]) -> dict[str, str]:
    """Return the reasons by field, of the refusal of an object."""
    with pytest.raises(ApiError) as refused:
        validate(resource, item)
    assert refused.value.code == 422 and refused.value.reason == "Invalid"
    return {one["field"]: one["reason"] for one in refused.value.details["causes"]}


@pytest.mark.parametrize(
    ("path", "value", "field", "reason"),
    [
        ("metadata/name", "Not_A_Name", "metadata.name", "FieldValueInvalid"),
        ("metadata/labels", {"app": "x" * 70}, "metadata.labels", "FieldValueInvalid"),
        ("metadata/labels", {"did:plc:a": "x"}, "metadata.labels", "FieldValueInvalid"),
        ("spec/restartPolicy", "Maybe", "spec.restartPolicy", "FieldValueNotSupported"),
        ("spec/dnsConfig", {}, "spec.dnsConfig.nameservers", "FieldValueRequired"),
        ("spec/activeDeadlineSeconds", 0, "spec.activeDeadlineSeconds", "FieldValueInvalid"),
        ("spec/hostAliases", [{"ip": "gateway"}], "spec.hostAliases[0].ip", "FieldValueInvalid"),
        ("spec/containers/0/imagePullPolicy", "Sometimes", f"{CONTAINER}.imagePullPolicy", "FieldValueNotSupported"),
        ("spec/containers/0/resources/limits", {"memory": "12 potatoes"}, f"{LIMITS}[memory]", "FieldValueInvalid"),
        ("spec/containers/0/resources/requests/cpu", "2", f"{CONTAINER}.resources.requests", "FieldValueInvalid"),
        ("spec/containers/0/volumeMounts/0/name", "other", f"{CONTAINER}.volumeMounts[0].name", "FieldValueNotFound"),
        ("spec/containers", [POD["spec"]["containers"][0]] * 2, "spec.containers[1].name", "FieldValueDuplicate"),
        ("spec/volumes/0", {"name": "workspace"}, "spec.volumes[0]", "FieldValueRequired"),
        ("spec/terminationGracePeriodSeconds", "5", "spec.terminationGracePeriodSeconds", "FieldValueInvalid"),
    ],
)  # fmt: skip
def test_invalid_fields_of_a_pod_are_named(path: str, value: Any, field: str, reason: str) -> None:
    validate(PODS, POD)
    assert find_causes(PODS, change(POD, path, value)) == {field: reason}


def test_a_field_unknown_to_the_oldest_version_is_refused() -> None:
    with pytest.raises(ApiError, match=r'unknown field "spec.evictionResponders"'):
        validate(PODS, change(POD, "spec/evictionResponders", []))


def test_the_pod_of_a_sandbox_is_validated() -> None:
    sandbox = {
        "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "metadata": {"name": "s"},
        "spec": {"podTemplate": {"metadata": {"labels": {}}, "spec": POD["spec"]}},
    }  # fmt: skip
    validate(SANDBOXES, sandbox)
    invalid = change(sandbox, "spec/podTemplate/spec/restartPolicy", "Maybe")
    assert find_causes(SANDBOXES, invalid) == {"spec.podTemplate.spec.restartPolicy": "FieldValueNotSupported"}


def test_secrets_and_policies_are_checked() -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "data": {"key": "not base64"}}
    assert find_causes(SECRETS, secret) == {"data[key]": "FieldValueInvalid"}
    peer = {"ipBlock": {"cidr": "10.0.0.0/8"}, "podSelector": {}}
    policy = {
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "p"},
        "spec": {"podSelector": {}, "egress": [{"to": [peer]}]},
    }  # fmt: skip
    assert find_causes(NETWORK_POLICIES, policy) == {"spec.egress[0].to[0]": "FieldValueForbidden"}


def test_the_specification_of_a_pod_is_immutable() -> None:
    assert not find_update_errors(PODS, POD, change(POD, "spec/activeDeadlineSeconds", 5))
    [cause] = find_update_errors(PODS, POD, change(POD, "spec/priorityClassName", "high"))
    assert (cause["field"], cause["reason"]) == ("spec", "FieldValueForbidden")


def test_the_level_restricted_names_each_violation() -> None:
    pod_security.require("restricted", POD)
    unsafe = deepcopy(POD)
    del unsafe["spec"]["securityContext"], unsafe["spec"]["containers"][0]["securityContext"]
    with pytest.raises(ApiError) as refused:
        pod_security.require("restricted", unsafe)
    words = ("allowPrivilegeEscalation", "unrestricted capabilities", "runAsNonRoot", "seccompProfile")
    assert refused.value.code == 403 and all(word in refused.value.message for word in words)


def test_quantities_are_exact() -> None:
    assert [parse_quantity(text) for text in ("250m", "1.5", "512Mi", "1e3", "2G")] == [
        parse_quantity("0.25"), parse_quantity("1500m"), 512 << 20, 1000, 2 * 10**9,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("selector", "is_selected"),
    [("app=p1", True), ("app!=p1", False), ("app in (a, p1),!other", True), ("other", False), ("app notin (p1)", False)],
)
def test_labels_are_selected(selector: str, is_selected: bool) -> None:
    assert Selection.parse(selector, "metadata.name=p1").matches(POD) is is_selected


def test_policies_without_a_rule_isolate_what_they_select() -> None:
    store, destination = Store(), Destination("10.96.0.1", 443, "127.0.0.1", 6443)
    pod = {"metadata": {"name": "p", "namespace": "n", "labels": {"app": "p"}}, "status": {"podIP": "10.244.0.1"}}
    assert is_reachable(store, pod, destination)
    spec: dict[str, Any] = {"podSelector": {"matchLabels": {"app": "p"}}, "policyTypes": ["Egress"]}
    store.create(NETWORK_POLICIES, {"metadata": {"name": "closed", "namespace": "n"}, "spec": spec})
    assert not is_reachable(store, pod, destination)
    spec = spec | {"egress": [{"to": [{"ipBlock": {"cidr": "10.96.0.0/24"}}]}]}
    store.create(NETWORK_POLICIES, {"metadata": {"name": "open", "namespace": "n"}, "spec": spec})
    assert is_reachable(store, pod, destination)
