"""kubectl and the official client, connected to a Kubernetes emulator."""

import json
import subprocess
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client, config

from tests.emulators.kubernetes.emulator import KubernetesEmulator
from tests.support.servers.services import require_kubectl

TIMEOUT_SECONDS = 60
UNPRIVILEGED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
RESTRICTED = {
    "runAsNonRoot": True, "runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 10001,
    "seccompProfile": {"type": "RuntimeDefault"}
}  # fmt: skip


class Kubectl:
    """kubectl of this machine, with a kubeconfig. Without a namespace, that of the kubeconfig."""

    def __init__(self, kubeconfig: Path, namespace: str = "") -> None:
        self.program = require_kubectl()
        self.command = [self.program, f"--kubeconfig={kubeconfig}", *([f"--namespace={namespace}"] if namespace else [])]

    def run(self, *arguments: str, content: str | bytes = b"", check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command and return its result with decoded output. Fails with its message if it is checked."""
        content = content.encode() if isinstance(content, str) else content
        command = [*self.command, *arguments]
        done = subprocess.run(command, input=content, capture_output=True, timeout=TIMEOUT_SECONDS)
        assert not check or done.returncode == 0, done.stderr.decode()
        output, errors = (stream.decode(errors="replace") for stream in (done.stdout, done.stderr))
        return subprocess.CompletedProcess(command, done.returncode, output, errors)

    def create(self, *items: dict[str, Any]) -> None:
        self.run("create", "-f", "-", content=yaml.safe_dump_all(items))

    def read(self, *arguments: str) -> dict[str, Any]:
        """Return the object or list of `kubectl get`."""
        parsed = json.loads(self.run("get", *arguments, "-o", "json").stdout)
        assert isinstance(parsed, dict)
        return parsed

    def wait(self, condition: str, *names: str) -> None:
        """Wait for a condition as `kubectl wait --for` has it."""
        self.run("wait", f"--for={condition}", *names, f"--timeout={TIMEOUT_SECONDS}s")


def build_api_client(cluster: KubernetesEmulator) -> client.ApiClient:
    """Return the official client of the cluster's administrator."""
    return config.new_client_from_config(str(cluster.kubeconfig))


def build_pod(name: str, image: str, script: str, **changes: Any) -> dict[str, Any]:
    """Return a Pod that satisfies the level restricted and runs a shell script. `changes` are those of its specification."""
    container = {"name": "sandbox", "image": image, "command": ["sh", "-c", script], "securityContext": UNPRIVILEGED,
                 "imagePullPolicy": "IfNotPresent"}  # fmt: skip
    container |= changes.pop("container", {})
    spec = {
        "restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "automountServiceAccountToken": False,
        "enableServiceLinks": False, "securityContext": RESTRICTED, "containers": [container], **changes,
    }  # fmt: skip
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}}, "spec": spec}
