"""Objects that the Kubernetes provider creates, validated strictly against the oldest and the newest supported version."""

import json
from dataclasses import replace

import kubernetes_validate
import pytest

from sandboxes.providers.base import PROCESSOR_COUNT_VARIABLES, GatewayAccess, SandboxSpec
from sandboxes.providers.kubernetes.configuration import KubernetesConfiguration
from sandboxes.providers.kubernetes.pod_spec import build_pod, build_secret

VERSIONS = ("1.30", kubernetes_validate.latest_version())
TOKEN = "lhg_secret-of-one-join"
SPEC = SandboxSpec(
    name="leasehold-0123-1",
    owner="7c1d0f52-7f1d-4c0a-9d4e-000000000000",
    image="leasehold-sandbox:latest",
    labels={"agent": "did:web:agents.example:a", "environment": ""},
    pool="batch",
    gateway=GatewayAccess("https://leasehold-gateway:8443", TOKEN, "-----BEGIN CERTIFICATE-----\n"),
)
FULL = KubernetesConfiguration(
    runtime_class="gvisor",
    pool_runtime_classes={"batch": "kata"},
    priority_class="leasehold-sandbox",
    pull_secret="registry",
    user_namespaces=True,
)


def validate(item):
    for version in VERSIONS:
        kubernetes_validate.validate(item, version, strict=True)
    return item


@pytest.mark.parametrize("configuration", [KubernetesConfiguration(), FULL], ids=["defaults", "every setting"])
@pytest.mark.parametrize("writable_root", [False, True])
def test_pod_and_secret_are_valid_in_every_supported_version(configuration, writable_root):
    spec = replace(SPEC, writable_root=writable_root)
    pod = validate(build_pod(spec, configuration, gateway=("leasehold-gateway", "10.96.7.7")))
    assert pod["spec"]["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is not writable_root
    validate(build_secret(spec, spec.gateway, configuration, uid="u1"))


def test_pod_satisfies_the_restricted_level_and_has_no_way_to_the_cluster():
    spec = build_pod(SPEC, KubernetesConfiguration(), gateway=("leasehold-gateway", "10.96.7.7"))["spec"]
    container = spec["containers"][0]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert {kind for volume in spec["volumes"] for kind in volume} == {"name", "emptyDir", "projected"}
    assert (spec["automountServiceAccountToken"], spec["enableServiceLinks"], spec["dnsPolicy"]) == (False, False, "None")
    assert spec["hostAliases"] == [{"ip": "10.96.7.7", "hostnames": ["leasehold-gateway"]}]
    assert not {"hostNetwork", "hostPID", "hostIPC", "runtimeClassName", "hostUsers"} & {*spec}


@pytest.mark.parametrize(("millicpus", "processors"), [(100, "1"), (1000, "1"), (1500, "2"), (4000, "4")])
def test_programs_learn_the_processors_of_the_limit(millicpus, processors):
    [container] = build_pod(replace(SPEC, millicpus=millicpus), FULL, gateway=("", ""))["spec"]["containers"]
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    assert {variables[name] for name in PROCESSOR_COUNT_VARIABLES} == {processors}


def test_runtime_class_of_the_pool_overrides_the_general_one():
    def find(pool, runtime=""):
        return build_pod(replace(SPEC, pool=pool, runtime=runtime), FULL, gateway=("", ""))["spec"]["runtimeClassName"]

    assert (find("batch"), find("other"), find("batch", "runc")) == ("kata", "gvisor", "runc")


def test_the_token_is_in_the_secret_alone():
    assert TOKEN not in json.dumps(build_pod(SPEC, FULL, gateway=("leasehold-gateway", "10.96.7.7")))
    assert TOKEN not in repr(SPEC)
    content = json.loads(build_secret(SPEC, SPEC.gateway, FULL, uid="u1")["stringData"]["gateway.json"])
    assert content == {"url": SPEC.gateway.url, "token": TOKEN, "ca": SPEC.gateway.certificate_authority}
