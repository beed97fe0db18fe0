"""Access to a real cluster: that of a developer, from the variables of `make kind-test`, or one of the tests."""

import os
from dataclasses import dataclass
from pathlib import Path

GATEWAY_VARIABLE = "TEST_CLUSTER_GATEWAY"  # HOST:PORT by which Pods reach the gateway; set by .ci/kind-test
LISTEN_VARIABLE = "TEST_CLUSTER_LISTEN"  # HOST:PORT at which the gateway listens on this machine


@dataclass(frozen=True)
class Address:
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> "Address":
        host, _, port = text.rpartition(":")
        return cls(host, int(port))


@dataclass(frozen=True)
class ClusterAccess:
    """Addresses of a cluster. Its Pods reach a server of this machine by `gateway`, at which `listen` answers.

    `enforces_policies`: its network plugin enforces NetworkPolicy, which docs/kubernetes.md demands."""

    kubeconfig: Path
    gateway: Address
    listen: Address
    enforces_policies: bool = True

    def build_environment(self) -> dict[str, str]:
        """Return the variables of `make kind-test`."""
        return {"KUBECONFIG": str(self.kubeconfig), GATEWAY_VARIABLE: str(self.gateway), LISTEN_VARIABLE: str(self.listen)}


def read_access() -> ClusterAccess | None:
    """Return the access to the cluster of the developer, if one is configured."""
    if not (gateway := os.environ.get(GATEWAY_VARIABLE)):
        return None
    listen = Address.parse(os.environ[LISTEN_VARIABLE])
    return ClusterAccess(Path(os.environ["KUBECONFIG"]), Address.parse(gateway), listen)
