"""Check that a sandbox reaches the gateway alone: a canary Pod tries the ways out of a cluster.

A NetworkPolicy without a network plugin that enforces it does nothing, and nothing says so. A canary with the network of a
sandbox therefore tries the API server, the metadata address of clouds, another Pod and the name server, before and after it has
reached the gateway: rules of a new Pod may become effective late, and permissions later than refusals."""

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from sandboxes.providers.base import SandboxSpec
from sandboxes.providers.engine_reports import SealReport
from sandboxes.providers.errors import FailureCause, Missing, Unavailable
from sandboxes.providers.kubernetes import endings
from sandboxes.providers.kubernetes.configuration import resolve_gateway
from sandboxes.providers.kubernetes.pod_spec import CONTAINER, MANAGED_LABELS, OWNER_LABEL, ROLE_LABEL, build_pod_spec
from sandboxes.providers.kubernetes.pods import PodClient, build_deletion

ROLE = "seal-check"
TIMEOUT_SECONDS = 120.0  # of both Pods, from their creation on
POLL_SECONDS = 0.5
TARGET_PORT = 8080
MEMORY_MIB, MILLICPUS = 64, 100
MAX_LOG_BYTES = 64 << 10
GATEWAY = "gateway"
TARGET_SCRIPT = f"""
import socket
server = socket.create_server(("", {TARGET_PORT}))
while True:
    server.accept()[0].close()
"""
# Arguments: name=host:port. Prints {{name: [destination, reached]}}. The gateway is tried until it answers, everything else
# before and after that.
CANARY_SCRIPT = """
import json, os, socket, sys, threading, time

def reaches(host, port):
    try:
        socket.create_connection((host, port), timeout=3).close()
        return True
    except ConnectionRefusedError:
        return True  # the host has answered
    except OSError:
        return False

def asks(host):
    query = bytes.fromhex("beef01000001000000000000") + b"\\x0akubernetes\\x07default\\x03svc\\x00\\x00\\x01\\x00\\x01"
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as question:
        question.settimeout(3)
        try:
            question.sendto(query, (host, 53))
            return bool(question.recv(512))
        except OSError:
            return False

tries = {}
for argument in sys.argv[1:]:
    name, _, address = argument.partition("=")
    host, _, port = address.rpartition(":")
    tries[name] = address, lambda host=host.strip("[]"), port=int(port): reaches(host, port)
if host := os.environ.get("KUBERNETES_SERVICE_HOST"):
    port = int(os.environ.get("KUBERNETES_SERVICE_PORT", "443"))
    tries["API server in the cluster"] = f"{host}:{port}", lambda host=host, port=port: reaches(host, port)
with open("/etc/resolv.conf") as file:
    servers = [line.split()[1] for line in file if line.startswith("nameserver ") and len(line.split()) > 1]
for host in servers:
    tries[f"name server {host}"] = f"{host}:53", lambda host=host: asks(host) or reaches(host, 53)

reached = dict.fromkeys(tries, False)

def attempt(name):
    reached[name] |= tries[name][1]()

def attempt_all():
    threads = [threading.Thread(target=attempt, args=(name,)) for name in tries if name != "gateway"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

attempt_all()
deadline = time.monotonic() + 30
while not reached["gateway"] and time.monotonic() < deadline:
    attempt("gateway")
    time.sleep(0.2)
attempt_all()
print(json.dumps({name: [tries[name][0], reached[name]] for name in tries}))
"""


@dataclass
class SealCheck:
    """One check, with two Pods of its own."""

    pods: PodClient
    image: str
    gateway_url: str
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def run(self) -> SealReport:
        """Return what the canary has reached. Raise ProviderError if it has not run."""
        name, deadline = f"leasehold-seal-{uuid.uuid4().hex[:12]}", self.clock() + TIMEOUT_SECONDS
        target, canary = f"{name}-target", f"{name}-canary"
        try:
            self._create(target, [TARGET_SCRIPT], ports=[{"containerPort": TARGET_PORT}])
            address = self._wait(target, lambda status: status.get("phase") == "Running" and status.get("podIP"), deadline)
            self._create(canary, [CANARY_SCRIPT, *self._list_destinations(str(address))])
            self._wait(canary, lambda status: status.get("phase") in endings.ENDED_PHASES, deadline)
            log = self.pods.api.fetch(
                "GET", f"{self.pods.path('pods', canary)}/log", query={"container": CONTAINER, "limitBytes": str(MAX_LOG_BYTES)}
            )
        finally:
            for each in (canary, target):
                self._delete(each)
        return parse_log(log)

    def _list_destinations(self, target: str) -> list[str]:
        gateway, api = urlsplit(self.gateway_url), urlsplit(self.pods.api.configuration.host)
        destinations = {
            GATEWAY: _format_address(gateway.hostname or "", gateway.port or _default_port(gateway.scheme)),
            "metadata of the cloud": "169.254.169.254:80",
            "another Pod": _format_address(target, TARGET_PORT),
        }
        if api.hostname and api.hostname not in ("127.0.0.1", "localhost", "::1"):
            destinations["API server"] = _format_address(api.hostname, api.port or _default_port(api.scheme))
        return [f"{name}={address}" for name, address in destinations.items()]

    def _create(self, name: str, arguments: list[str], *, ports: Sequence[Mapping[str, int]] = ()) -> None:
        """Create a Pod with the specification of a sandbox, another command, and the name server of the cluster."""
        configuration = self.pods.configuration
        spec = SandboxSpec(name=name, owner=ROLE, image=self.image, memory_mib=MEMORY_MIB, millicpus=MILLICPUS)
        pod_spec = build_pod_spec(spec, configuration, gateway=resolve_gateway(configuration, self.gateway_url))
        del pod_spec["dnsConfig"]
        pod_spec |= {"dnsPolicy": "ClusterFirst", "activeDeadlineSeconds": int(TIMEOUT_SECONDS), "volumes": []}
        pod_spec |= {"terminationGracePeriodSeconds": 1}
        [container] = pod_spec["containers"]
        container |= {"command": ["python3", "-I", "-S", "-c", *arguments], "volumeMounts": [], "workingDir": "/"}
        container |= {"ports": [*ports]}
        labels = {**MANAGED_LABELS, OWNER_LABEL: ROLE, ROLE_LABEL: ROLE}
        self.pods.api.creates.take()
        self.pods.api.call(
            "POST",
            self.pods.path("pods"),
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, "namespace": configuration.namespace, "labels": labels},
                "spec": pod_spec,
            },
        )

    def _wait(self, name: str, find: Callable[[Mapping[str, Any]], Any], deadline: float) -> Any:
        """Return the first true result of `find` for the status of a Pod."""
        while True:
            pod = self.pods.read(name)
            if found := find(pod.get("status") or {}):
                return found
            if ending := endings.describe_end(pod):
                raise Unavailable(f"The Pod {name} of the seal check ended: {ending.message}", cause=ending.cause)
            if self.clock() > deadline:
                reason = endings.find_unschedulable(pod) or ": ".join(endings.find_waiting(pod)) or "no progress"
                raise Unavailable(f"The Pod {name} of the seal check is not ready: {reason}", cause=FailureCause.TIMEOUT)
            self.sleep(POLL_SECONDS)

    def _delete(self, name: str) -> None:
        """Request the deletion of a Pod of this check. One that is left over ends with its activeDeadlineSeconds."""
        try:
            uid = str(self.pods.read(name)["metadata"]["uid"])
            self.pods.api.call("DELETE", self.pods.path("pods", name), build_deletion(uid))
        except (Missing, Unavailable):
            return


def parse_log(log: bytes) -> SealReport:
    """Translate the canary's output. Raise Unavailable if it is not complete."""
    try:
        found = json.loads(log.strip().splitlines()[-1])
        outcomes = {str(name): (str(destination), bool(reached)) for name, (destination, reached) in found.items()}
        answered = outcomes.pop(GATEWAY)[1]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        message = f"The canary of the seal check has printed no result: {log[-300:].decode(errors='replace')}"
        raise Unavailable(message, cause=FailureCause.AGENT_FAILED) from error
    lines = [f"gateway: {'answered' if answered else 'did not answer'}"]
    lines += [
        f"{name} ({destination}): {'REACHED' if reached else 'not reached'}"
        for name, (destination, reached) in outcomes.items()
    ]
    return SealReport(answered and not any(reached for _, reached in outcomes.values()), "\n".join(lines))


def _default_port(scheme: str) -> int:
    return 80 if scheme == "http" else 443


def _format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
