"""Configuration of the provider for Kubernetes, from the settings."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from ipaddress import ip_address
from urllib.parse import urlsplit

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from sandboxes.providers.errors import FailureCause, Unavailable

GATEWAY_URL_VARIABLE = "LEASEHOLD_GATEWAY_URL"
SERVICE_HOST_VARIABLE = "KUBERNETES_SERVICE_HOST"  # of each Pod: this process runs in a cluster


class ObjectKind(StrEnum):
    """Object by which a sandbox is created."""

    POD = "pod"
    SANDBOX = "sandbox"  # of the project agent-sandbox, which makes the Pod


@dataclass(frozen=True)
class KubernetesConfiguration:
    """Cluster, and properties of the Pods. An empty text leaves the choice to the cluster."""

    context: str = ""  # of the kubeconfig; empty: its current one
    namespace: str = "leasehold-sandboxes"
    runtime_class: str = ""
    pool_runtime_classes: Mapping[str, str] = field(default_factory=dict)  # by name of the pool
    priority_class: str = ""
    service_account: str = "sandbox"
    pull_secret: str = ""  # for images of a private registry
    gateway_address: str = ""  # IP address of the gateway; empty: resolved by the control plane
    user_namespaces: bool = False
    disk_mib: int = 4096  # ephemeral storage of a sandbox: /workspace and /data together
    grace: timedelta = timedelta(minutes=2)  # in which the state is stored after the cluster has begun to delete a Pod
    lifetime: timedelta = timedelta(days=7)  # after which the cluster ends a Pod
    scale_timeout: timedelta = timedelta(minutes=10)
    object_kind: ObjectKind = ObjectKind.POD
    exec_fallback: bool = False  # commands go through the API server while the agent is not connected

    def find_runtime_class(self, pool: str) -> str:
        """Return the RuntimeClass of the Pods of a pool. Empty: that of the cluster."""
        return self.pool_runtime_classes.get(pool, self.runtime_class)


def get_configuration() -> KubernetesConfiguration:
    """Return the configuration. Raise ImproperlyConfigured, naming the variable, if a required one is not set."""
    if variable := find_missing_variable():
        raise ImproperlyConfigured(f"The kubernetes provider needs {variable}, which is not set.")
    configuration: KubernetesConfiguration = settings.KUBERNETES
    return configuration


def find_missing_variable() -> str:
    """Return the first variable that the provider requires and that is not set. Empty: none.

    The agents of the sandboxes join the gateway, without which no command runs."""
    return "" if settings.GATEWAY_URL else GATEWAY_URL_VARIABLE


def resolve_gateway(configuration: KubernetesConfiguration, url: str) -> tuple[str, str]:
    """Return (host name, IP address) of the gateway. The name is empty if the URL has an address. Raise Unavailable.

    Sandboxes have no name server, so the control plane resolves the name."""
    host = urlsplit(url).hostname or ""
    try:
        return "", str(ip_address(host))
    except ValueError:
        pass
    if configuration.gateway_address:
        return host, configuration.gateway_address
    try:
        return host, str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        message = (
            f"The name {host} of LEASEHOLD_GATEWAY_URL is not resolved here, and a sandbox has no name server: {error}. "
            "Set LEASEHOLD_KUBERNETES_GATEWAY_ADDRESS to the gateway's IP address."
        )
        raise Unavailable(message, cause=FailureCause.ENGINE_UNREACHABLE) from error
