"""Kubernetes manifests of the control plane: schemas, references between the objects, and settings."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate
import pytest
import yaml

from controlplane.checks import check_shared_state
from controlplane.env import ENV_VARIABLES, UNLISTED_VARIABLES
from tests.support.servers.services import require_kubectl

ROOT = Path(__file__).resolve().parents[3]
DEPLOYMENT = ROOT / "controlplane/deployment/kubernetes"
VERSIONS = ("1.30.0", kubernetes_validate.latest_version())  # oldest and newest supported one
Manifest = dict[str, Any]


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> list[Manifest]:
    """The objects of the example, with secrets, as kubectl builds them."""
    directory = tmp_path_factory.mktemp("deployment") / "kubernetes"
    shutil.copytree(DEPLOYMENT, directory)
    example = directory / "example"
    shutil.copy(example / "secrets.env.example", example / "secrets.env")
    for name in ("tls.crt", "tls.key", "ca.crt"):
        (example / name).write_text("test")
    built = subprocess.run([require_kubectl(), "kustomize", str(example)], capture_output=True, check=True)
    return [*yaml.safe_load_all(built.stdout)]


def select(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {each["metadata"]["name"]: each for each in manifests if each["kind"] == kind}


def list_pod_templates(manifests: list[Manifest]) -> dict[str, Manifest]:
    return {each["metadata"]["name"]: each["spec"]["template"] for each in manifests if each["kind"] in ("Deployment", "Job")}


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_are_valid_in_the_oldest_and_newest_version(manifests: list[Manifest], version: str) -> None:
    for manifest in manifests:
        kubernetes_validate.validate(manifest, version, strict=True)


def test_pods_meet_the_restricted_level_and_mount_the_account_only_where_needed(manifests: list[Manifest]) -> None:
    with_access = set()
    for name, template in list_pod_templates(manifests).items():
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
            assert context["capabilities"] == {"drop": ["ALL"]}
        if spec["automountServiceAccountToken"]:
            with_access.add(name)
            assert spec["serviceAccountName"] == "leasehold"
    assert with_access == {"web", "worker", "runner"}


def test_selectors_ports_and_references_meet_their_objects(manifests: list[Manifest]) -> None:
    templates = list_pod_templates(manifests)
    names = {(each["kind"], each["metadata"]["name"]) for each in manifests}
    for service in select(manifests, "Service").values():
        [template] = [
            each for each in templates.values() if service["spec"]["selector"].items() <= each["metadata"]["labels"].items()
        ]
        ports = {port["name"] for container in template["spec"]["containers"] for port in container["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    for budget in select(manifests, "PodDisruptionBudget").values():
        selector = budget["spec"]["selector"]["matchLabels"]
        assert [each for each in templates.values() if selector.items() <= each["metadata"]["labels"].items()]
    for scaler in select(manifests, "HorizontalPodAutoscaler").values():
        target = scaler["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) in names
        assert "replicas" not in select(manifests, "Deployment")[target["name"]]["spec"]  # else each apply would reset it
    for template in templates.values():
        [container] = template["spec"]["containers"]
        sources = [("ConfigMap", each["configMapRef"]) for each in container["envFrom"] if "configMapRef" in each]
        sources += [("Secret", each["secretRef"]) for each in container["envFrom"] if "secretRef" in each]
        assert {(kind, each["name"]) for kind, each in sources} <= names
        assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in template["spec"]["volumes"]}
        secrets = {each["secret"]["secretName"] for each in template["spec"]["volumes"] if "secret" in each}
        assert {("Secret", name) for name in secrets} <= names
    [binding] = select(manifests, "RoleBinding").values()
    assert ("Role", binding["roleRef"]["name"]) in names
    assert [("ServiceAccount", each["name"]) for each in binding["subjects"]] == [("ServiceAccount", "leasehold")]


def test_sandboxes_reach_the_gateway_alone(manifests: list[Manifest]) -> None:
    sealed = select(manifests, "NetworkPolicy")["sealed"]
    assert sealed["metadata"]["namespace"] == "leasehold-sandboxes" and sealed["spec"]["podSelector"] == {}
    assert sealed["spec"]["policyTypes"] == ["Ingress", "Egress"] and "ingress" not in sealed["spec"]
    [rule] = sealed["spec"]["egress"]
    [peer] = rule["to"]
    labels = list_pod_templates(manifests)["gateway"]["metadata"]["labels"]
    assert peer["podSelector"]["matchLabels"].items() <= labels.items()
    [listener] = [
        each for each in list_pod_templates(manifests)["gateway"]["spec"]["containers"][0]["ports"] if each["name"] == "gateway"
    ]
    assert rule["ports"] == [{"protocol": "TCP", "port": listener["containerPort"]}]


def test_access_to_the_cluster_is_limited_to_the_sandboxes(manifests: list[Manifest]) -> None:
    [role] = select(manifests, "Role").values()
    assert not [each for each in manifests if each["kind"].startswith("ClusterRole")]
    rules = {resource: {*rule["verbs"]} for rule in role["rules"] for resource in rule["resources"]}
    assert rules["secrets"] == {"create", "delete"} and "pods/exec" not in rules
    assert role["metadata"]["namespace"] == "leasehold-sandboxes"


def test_settings_are_known_variables() -> None:
    known = {*ENV_VARIABLES, *UNLISTED_VARIABLES}
    for path in DEPLOYMENT.rglob("*.env*"):
        assert {line.partition("=")[0] for line in path.read_text().splitlines()} <= known, path
    named = re.findall(r"name: ([A-Z][A-Z0-9_]+)", (DEPLOYMENT / "base/gateway.yaml").read_text())
    assert {*named} - {"POD_IP"} <= known


def test_internal_port_has_the_gateways_certificate_on_both_sides(manifests: list[Manifest]) -> None:
    [configuration] = [
        each["data"] for name, each in select(manifests, "ConfigMap").items() if name.startswith("leasehold-config")
    ]
    assert configuration["LEASEHOLD_GATEWAY_INTERNAL_NAME"] == urlsplit(configuration["LEASEHOLD_GATEWAY_URL"]).hostname
    assert configuration["LEASEHOLD_GATEWAY_INTERNAL_AUTHORITY"] == configuration["LEASEHOLD_GATEWAY_AUTHORITY"]
    [gateway] = list_pod_templates(manifests)["gateway"]["spec"]["containers"]
    values = {each["name"].removeprefix("LEASEHOLD_GATEWAY_"): each.get("value") for each in gateway["env"]}
    assert values["INTERNAL_CERTIFICATE"] == values["CERTIFICATE"] and values["INTERNAL_CERTIFICATE_KEY"]
    assert values["INTERNAL_AUTHORITY"] == "/etc/leasehold/tls/ca.crt"


def test_migration_job_has_the_name_of_the_version(manifests: list[Manifest]) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    [job] = select(manifests, "Job").values()
    [image] = job["spec"]["template"]["spec"]["containers"]
    assert job["metadata"]["name"] == f"migrate-{version}" and image["image"].endswith(f":{version}")


def test_control_plane_in_a_cluster_requires_shared_state(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.SANDBOX_PROVIDER, settings.DEBUG = "kubernetes", False
    settings.ON_POSTGRES, settings.STORAGE_BACKEND = False, "filesystem"
    assert check_shared_state(None) == []
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    problems = check_shared_state(None)
    assert [problem.id for problem in problems] == ["leasehold.E011"] * 2
    assert [str(problem.hint).split()[1] for problem in problems] == ["DATABASE_URL", "STORAGE_BACKEND=s3"]
    settings.ON_POSTGRES, settings.STORAGE_BACKEND = True, "s3"
    assert check_shared_state(None) == []
