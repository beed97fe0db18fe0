"""Containers that hold the network namespaces of Pods.

The engine spends most of a container's start on its network namespace. A namespace whose Pod is gone is therefore used again,
with its address, for the next Pod with the same host name and resolver configuration."""

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from docker import APIClient
from docker.errors import APIError
from docker.types import LogConfig

from tests.emulators.kubernetes.api.store import Object
from tests.emulators.kubernetes.node.names import CLUSTER_DOMAIN, NAME_SERVER

MAX_UNUSED = 8
MEMORY_BYTES = 64 << 20
NOBODY = "65535:65535"


@dataclass(frozen=True)
class Identity:
    """Host name, hosts file and resolver configuration, which all containers of a Pod get from its namespace."""

    host_name: str
    hosts: tuple[str, ...]
    servers: tuple[str, ...]
    search: tuple[str, ...]


@dataclass(frozen=True)
class Pause:
    """One running container, and the address of its Pod."""

    identifier: str
    address: str
    process: int
    identity: Identity


def identify(pod: Object) -> Identity:
    spec, metadata = pod["spec"], pod["metadata"]
    aliases = [f"{name}:{alias['ip']}" for alias in spec.get("hostAliases") or () for name in alias.get("hostnames") or ()]
    servers, search = (spec.get("dnsConfig") or {}).get("nameservers") or (), ()
    if spec.get("dnsPolicy") != "None":
        servers, search = (NAME_SERVER,), (f"{metadata['namespace']}.{CLUSTER_DOMAIN}", CLUSTER_DOMAIN, "cluster.local")
    return Identity((spec.get("hostname") or metadata["name"])[:63], tuple(aliases), tuple(servers), search)


class Pauses:
    """Containers that hold namespaces, in use or not."""

    def __init__(self, client: APIClient, image: str, labels: dict[str, str]) -> None:
        self.client, self.image, self.labels = client, image, labels
        self._unused: list[Pause] = []
        self._created = 0
        self._lock = threading.Lock()

    def start(self, pod: Object) -> Pause:
        """Return a container for a Pod, an unused or a new one."""
        identity = identify(pod)
        with self._lock:
            for pause in self._unused:
                if pause.identity == identity:
                    self._unused.remove(pause)
                    return pause
            self._created += 1
            address = f"10.244.{self._created >> 8}.{self._created & 255}"
        host = self.client.create_host_config(
            network_mode="none", extra_hosts=[f"{identity.host_name}:{address}", *identity.hosts], dns=list(identity.servers),
            dns_search=list(identity.search), dns_opt=["ndots:5"] if identity.search else [], cap_drop=["ALL"], read_only=True,
            mem_limit=MEMORY_BYTES, log_config=LogConfig(type="none"),
        )  # fmt: skip
        created = self.client.create_container(
            self.image, entrypoint=["sleep", "infinity"], command=[], user=NOBODY, working_dir="/", labels=self.labels,
            host_config=host, hostname=identity.host_name,
        )["Id"]  # fmt: skip
        self.client.start(created)
        process = self.client.inspect_container(created)["State"]["Pid"]
        return Pause(created, address, process, identity)

    def stop(self, pause: Pause, remove: Callable[[str], None]) -> None:
        """Keep a container for another Pod, or remove it."""
        with self._lock:
            is_kept = len(self._unused) < MAX_UNUSED
            if is_kept:
                self._unused.append(pause)
        if not is_kept:
            with suppress(APIError):
                remove(pause.identifier)
