"""The emulator and a real API server with a kubelet answer the same requests in the same way.

Each difference that is left has its reason here: of the version of the real one, or of what the emulator leaves out."""

import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from tests.conftest import DOCKER_IMAGE
from tests.emulators.kubernetes.emulator import KubernetesEmulator
from tests.emulators.registry import serve_kubernetes
from tests.support.api_answers import Server, compare
from tests.support.kubernetes import build_pod
from tests.support.own_cluster.cluster import OwnCluster
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.docker, pytest.mark.matrix("needs a cluster: test_kubernetes_emulator.py has the emulator alone")]
RBAC = "/apis/rbac.authorization.k8s.io/v1/namespaces"
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
ENDED = ("Failed", "Succeeded")
SMALL = {"resources": {"limits": {"memory": "64Mi"}, "requests": {"memory": "64Mi"}}}
ERROR_FIELDS = ("document.code", "document.message", "document.reason")
# Reasons of differences.
OLD_SECCOMP = "before 1.25 the field had an annotation"
NEW = "a field of 1.28"
ENGINE = "containerd writes the name of an image in full, Docker as it was given"
DIFFERENCES_OF_ENDED = {
    "status.conditions[0].reason": "a reason of later versions", "status.conditions[3].reason": "a reason of later versions",
    "status.containerStatuses[0].image": ENGINE, "status.hostIPs": NEW,
}  # fmt: skip


@pytest.fixture(scope="module")
def emulator(docker_ready: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubernetesEmulator]:
    with serve_kubernetes(tmp_path_factory.mktemp("kubernetes")) as served:
        yield served


@pytest.fixture
def servers(cluster_access: Any, emulator: KubernetesEmulator) -> Iterator[list[Server]]:
    """The real one and the emulator, each with an empty namespace."""
    name = f"answers-{secrets.token_hex(4)}"
    found = [Server.of_kubeconfig(path, name) for path in (cluster_access.kubeconfig, emulator.kubeconfig)]
    with ExitStack() as stack:
        for server in found:
            server.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
            stack.callback(server.call, "DELETE", f"/api/v1/namespaces/{name}")
            wait_until(partial(_has_account, server), "the namespace has its account")
        yield found


def _has_account(server: Server) -> bool:
    return "metadata" in server.call("GET", "serviceaccounts/default")


def drive(servers: list[Server], requests: Callable[[Server], None], expected: Mapping[str, str] | None = None) -> None:
    """Make the requests on both servers, and require the same answers but for the expected differences, by place."""
    for server in servers:
        requests(server)
    real, emulated = (server.answers for server in servers)
    assert [*real] == [*emulated] and real
    found = {place: f"{one} / {other}" for place, one, other in compare(real, emulated)}
    assert {*found} == {*(expected or {})}, "\n".join(f"{place}: {values}" for place, values in found.items())


def test_errors_of_requests(servers: list[Server]) -> None:
    secret = {"metadata": {"name": "s1"}, "stringData": {"key": "value"}}

    def ask(server: Server) -> None:
        server.ask("absent", "GET", "pods/none")
        server.ask("delete absent", "DELETE", "secrets/none")
        server.ask("unknown path", "GET", "nothings")
        server.ask("created", "POST", "secrets", secret)
        server.ask("name in use", "POST", "secrets", secret)
        server.ask("another uid", "DELETE", "secrets/s1", {"preconditions": {"uid": "another"}})
        server.ask("no JSON", "POST", "pods", "{")
        server.ask("another kind", "POST", "pods", {"kind": "Secret", "apiVersion": "v1", "metadata": {"name": "x"}})
        server.ask("bad name", "POST", "secrets", {"metadata": {"name": "Not_a_name"}})
        server.ask("no containers", "POST", "pods", {"metadata": {"name": "empty"}, "spec": {"containers": []}})
        server.ask("absent namespace", "GET", "/api/v1/namespaces/none/pods/p")
        server.ask("create in an absent namespace", "POST", "/api/v1/namespaces/none/secrets", secret)
        server.ask("bad token", "GET", "pods", token="none")
        server.ask("deleted", "DELETE", "secrets/s1")
        server.ask("bad continuation", "GET", "secrets", limit="1", **{"continue": "nonsense"})
        server.ask("bad selector", "GET", "pods", labelSelector="a==b==c")
        server.ask("version of the future", "GET", "pods", resourceVersion="99999999", timeoutSeconds="1")

    drive(servers, ask, {
        "no JSON.document.message": "words of a parser",
        "bad continuation.document.message": "words of a parser",
        "bad selector.document.message": "words of a parser",
        "version of the future.document.message": "it has the current version",
        "another kind.document.message": "words of 1.20",
    })  # fmt: skip


def test_pages_of_lists(servers: list[Server]) -> None:
    def ask(server: Server) -> None:
        for number in range(3):
            server.call("POST", "configmaps", {"metadata": {"name": f"c{number}", "labels": {"of": "test"}}})
        first = server.ask("first page", "GET", "configmaps", limit="2", labelSelector="of=test")
        server.call("DELETE", "configmaps/c2")
        server.ask(
            "second page",
            "GET",
            "configmaps",
            limit="2",
            labelSelector="of=test",
            **{"continue": first["metadata"]["continue"]},
        )
        server.ask("no page", "GET", "configmaps", limit="2", labelSelector="of=another")

    drive(servers, ask)


def test_watches(servers: list[Server]) -> None:
    def ask(server: Server) -> None:
        version = server.call("GET", "configmaps")["metadata"]["resourceVersion"]
        server.call("POST", "configmaps", {"metadata": {"name": "c", "labels": {"of": "test"}}})
        server.call("PUT", "configmaps/c", {"metadata": {"name": "c", "labels": {"of": "test"}}, "data": {"key": "value"}})
        server.call("PUT", "configmaps/c", {"metadata": {"name": "c", "labels": {"of": "another"}}})  # leaves the selection
        server.call("PUT", "configmaps/c", {"metadata": {"name": "c", "labels": {"of": "test"}}})
        server.call("DELETE", "configmaps/c")
        for name, query in {
            "selected": {"resourceVersion": version, "labelSelector": "of=test"},
            "by name": {"resourceVersion": version, "fieldSelector": "metadata.name=c"},
            "of another name": {"resourceVersion": version, "fieldSelector": "metadata.name=another"},
        }.items():
            server.answers[name] = [server.simplify(event) for event in server.watch("configmaps", timeoutSeconds="2", **query)]
        server.ask("no version", "GET", "configmaps", watch="true", resourceVersion="none", timeoutSeconds="2")
        server.ask("no selector", "GET", "configmaps", watch="true", labelSelector="a==b==c", timeoutSeconds="2")

    drive(servers, ask, {
        "no selector.document.message": "words of a parser",
        **dict.fromkeys((f"no version.{field}" for field in ("HTTP", *ERROR_FIELDS)), "1.20 answers with an internal error"),
    })  # fmt: skip


def test_watch_of_a_forgotten_version(servers: list[Server], own_cluster: OwnCluster, emulator: KubernetesEmulator) -> None:
    versions = [server.call("GET", "configmaps")["metadata"]["resourceVersion"] for server in servers]
    for server in servers:
        server.call("POST", "configmaps", {"metadata": {"name": "c"}})
    own_cluster.forget_versions()
    emulator.store.compact()
    for server, version in zip(servers, versions, strict=True):
        events = server.watch("configmaps", resourceVersion=version, timeoutSeconds="2")
        server.answers["events"] = [server.simplify(event) for event in events]
    drive(servers, lambda server: None, {"events[0].object.message": "it has the current version"})
    [event] = servers[0].answers["events"]
    assert (event["type"], event["object"]["code"], event["object"]["reason"]) == ("ERROR", 410, "Expired")


def test_rights_and_quota_of_an_account(servers: list[Server], emulator: KubernetesEmulator) -> None:
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["create", "list"]}]
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "limited"}

    def ask(server: Server) -> None:
        name = server.namespace
        server.call("POST", f"{RBAC}/{name}/roles", {"metadata": {"name": "limited"}, "rules": rules})
        subjects = [{"kind": "ServiceAccount", "name": "default", "namespace": name}]
        binding = {"metadata": {"name": "limited"}, "roleRef": role, "subjects": subjects}
        server.call("POST", f"{RBAC}/{name}/rolebindings", binding)
        token = server.call("POST", "serviceaccounts/default/token", {"spec": {"expirationSeconds": 3600}})["status"]["token"]
        server.ask("permitted", "GET", "pods", token=token)
        server.ask("forbidden", "GET", "secrets", token=token)
        server.ask("forbidden name", "DELETE", "pods/p", token=token)
        server.ask("forbidden subresource", "GET", "pods/p/log", token=token)
        server.ask("forbidden in all namespaces", "GET", "/api/v1/pods", token=token)
        for verb in ("create", "delete"):
            attributes = {"namespace": name, "verb": verb, "resource": "pods"}
            review = {"kind": "SelfSubjectAccessReview", "apiVersion": "authorization.k8s.io/v1"}
            review["spec"] = {"resourceAttributes": attributes}  # type: ignore[assignment]
            server.ask(f"may {verb}", "POST", REVIEWS, review, token=token)
        server.call(
            "POST", "resourcequotas", {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "1", "limits.memory": "64Mi"}}}
        )
        wait_until(lambda: "used" in server.call("GET", "resourcequotas/few").get("status", {}), "the quota is counted")
        pod = build_pod("large", DOCKER_IMAGE, "true", container={"resources": {"limits": {"memory": "128Mi"}}})
        server.ask("over the quota", "POST", "pods", pod, token=token)
        server.ask("without a limit", "POST", "pods", build_pod("free", DOCKER_IMAGE, "true"), token=token)
        server.ask("quota", "GET", "resourcequotas/few")

    emulator.authorizer.is_enforced = True
    try:
        drive(servers, ask, {
            "may create.document.status.reason": "the emulator names no rule",
            "without a limit.document.message": "1.20 does not name the container",
        })  # fmt: skip
    finally:
        emulator.authorizer.is_enforced = False


def test_life_of_a_pod(servers: list[Server]) -> None:
    def ask(server: Server) -> None:
        version = server.call("GET", "pods")["metadata"]["resourceVersion"]
        created = server.ask("created", "POST", "pods", build_pod("p", DOCKER_IMAGE, "trap 'exit 0' TERM; sleep 60 & wait"))
        steps: list[str] = []
        for event in server.watch("pods", resourceVersion=version, timeoutSeconds="60"):
            step = _describe(event)
            steps += [step] if step not in steps[-1:] else []
            if step == "MODIFIED Running ready" and "running" not in server.answers:
                server.ask("running", "GET", "pods/p")
                server.ask("another of its name", "POST", "pods", build_pod("p", DOCKER_IMAGE, "true"))
                options = {"gracePeriodSeconds": 2, "preconditions": {"uid": created["metadata"]["uid"]}}
                server.ask("deletion", "DELETE", "pods/p", options)
                server.ask("name of a dying Pod", "POST", "pods", build_pod("p", DOCKER_IMAGE, "true"))
            if event["type"] == "DELETED":
                break
        server.answers["events"] = steps
        server.ask("gone", "GET", "pods/p")

    drive(servers, ask, {
        **{f"{name}.document.metadata.annotations": OLD_SECCOMP for name in ("created", "running", "deletion")},
        **{f"{name}.document.status.containerStatuses[0].image": ENGINE for name in ("running", "deletion")},
        **{f"{name}.document.status.hostIPs": NEW for name in ("running", "deletion")},
    })  # fmt: skip


def _describe(event: Mapping[str, Any]) -> str:
    """Return what an event shows of a Pod, in words."""
    item = event["object"]
    ready = [one for one in item["status"].get("conditions") or () if (one["type"], one["status"]) == ("Ready", "True")]
    parts = [event["type"], "deleted" if item["metadata"].get("deletionTimestamp") else "", item["status"]["phase"]]
    return " ".join(part for part in (*parts, "ready" if ready else "") if part)


ENDS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, str]]] = {
    "failed": (build_pod("failed", DOCKER_IMAGE, "exit 3"), DIFFERENCES_OF_ENDED),
    "hog": (build_pod("hog", DOCKER_IMAGE, "exec python3 -c 'x = b\"x\" * (1 << 28)'", container=SMALL), DIFFERENCES_OF_ENDED),
    "overdue": (build_pod("overdue", DOCKER_IMAGE, "exec sleep 60", activeDeadlineSeconds=2), {
        "status.conditions": "1.20 drops them", "status.hostIP": "1.20 drops it",
        "status.containerStatuses[0].image": ENGINE, "status.hostIPs": NEW,
        "status.containerStatuses[0].ready": "the emulator fails a Pod before its containers end",
        "status.containerStatuses[0].started": "the emulator fails a Pod before its containers end",
    }),
    "image": (build_pod("image", "no-such-image:1", "true", container={"imagePullPolicy": "Never"}), {"status.hostIPs": NEW}),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_ends_of_pods(servers: list[Server], name: str) -> None:
    pod, expected = ENDS[name]

    def has_ended(server: Server) -> bool:
        status = server.call("GET", f"pods/{name}")["status"]
        waiting = [one["state"].get("waiting", {}).get("reason") for one in status.get("containerStatuses") or ()]
        return status["phase"] in ENDED or "ErrImageNeverPull" in waiting

    def ask(server: Server) -> None:
        server.call("POST", "pods", pod)
        wait_until(partial(has_ended, server), f"{name} ends on {server.url}", within=60)
        server.answers["status"] = server.simplify(server.call("GET", f"pods/{name}")["status"])

    drive(servers, ask, expected)
