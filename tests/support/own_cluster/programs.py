"""Command lines and configuration of the programs of a cluster. All addresses are inside of its network namespace."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support.own_cluster.credentials import ADMINISTRATORS, Credentials, User

NODE, NODE_ADDRESS = "node-1", "10.200.0.1"
POD_NETWORK, POD_GATEWAY = "10.244.0.0/16", "10.244.0.1"
SERVICE_NETWORK, SERVICE_ADDRESS = "10.96.0.0/16", "10.96.0.1"
BRIDGE = "cni0"
API_PORT, ETCD_PORT = 6443, 2379
API_URL = f"https://127.0.0.1:{API_PORT}"
ADMIN = User("admin", (ADMINISTRATORS,))
USERS = {
    "kubelet": User(f"system:node:{NODE}", ("system:nodes",)),
    "kube-controller-manager": User("system:kube-controller-manager"),
    "kube-scheduler": User("system:kube-scheduler"),
}


@dataclass(frozen=True)
class Layout:
    """Directories of the programs and of one cluster's files. The name of the latter is that of its cgroups, too."""

    programs: Path
    directory: Path

    @property
    def containerd_socket(self) -> Path:
        return self.directory / "containerd.sock"

    @property
    def cgroup(self) -> str:
        return f"/{self.directory.name}"

    @property
    def pause_image(self) -> str:
        """Image of the process that holds the namespaces of a Pod."""
        return f"{self.directory.name}-pause:latest"


def build_commands(layout: Layout, credentials: Credentials) -> dict[str, list[str]]:
    """Write all configuration, and return the command line of each program by its name, in the order of their start."""
    directory = layout.directory
    api_names = ("127.0.0.1", NODE_ADDRESS, SERVICE_ADDRESS, "kubernetes.default.svc")
    server_key, server_certificate = credentials.issue("apiserver", *api_names)
    kubelet_key, kubelet_certificate = credentials.issue("kubelet", NODE_ADDRESS, NODE)
    client_key, client_certificate = credentials.issue("kubelet-client", groups=(ADMINISTRATORS,))
    for name, user in USERS.items():
        credentials.write_kubeconfig(name, API_URL, user.token)
    kubelet = _write_yaml(directory / "kubelet.yaml", _configure_kubelet(layout, kubelet_key, kubelet_certificate))
    etcd_url = f"http://127.0.0.1:{ETCD_PORT}"
    return {
        "etcd": [
            f"{layout.programs}/etcd", f"--data-dir={directory}/etcd", f"--listen-client-urls={etcd_url}",
            f"--advertise-client-urls={etcd_url}", "--listen-peer-urls=http://127.0.0.1:2380", "--unsafe-no-fsync",
        ],
        "kube-apiserver": [
            f"{layout.programs}/kube-apiserver", f"--etcd-servers={etcd_url}", f"--secure-port={API_PORT}",
            f"--advertise-address={NODE_ADDRESS}", f"--service-cluster-ip-range={SERVICE_NETWORK}",
            "--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--anonymous-auth=false",
            f"--token-auth-file={credentials.write_users([ADMIN, *USERS.values()])}",
            f"--tls-private-key-file={server_key}", f"--tls-cert-file={server_certificate}",
            f"--client-ca-file={credentials.authority}", f"--kubelet-certificate-authority={credentials.authority}",
            f"--kubelet-client-key={client_key}", f"--kubelet-client-certificate={client_certificate}",
            "--kubelet-preferred-address-types=InternalIP",
            f"--service-account-key-file={credentials.write_public_key()}",
            f"--service-account-signing-key-file={credentials.signing_key}",
            "--service-account-issuer=https://kubernetes.default.svc",
        ],
        "kube-controller-manager": [
            f"{layout.programs}/kube-controller-manager", f"--kubeconfig={directory}/kube-controller-manager.kubeconfig",
            f"--root-ca-file={credentials.authority}", f"--service-account-private-key-file={credentials.signing_key}",
            "--leader-elect=false", "--use-service-account-credentials",
        ],
        "kube-scheduler": [
            f"{layout.programs}/kube-scheduler", f"--kubeconfig={directory}/kube-scheduler.kubeconfig", "--leader-elect=false",
        ],
        "containerd": ["containerd", f"--config={_write_containerd_configuration(layout)}"],
        "kubelet": [
            f"{layout.programs}/kubelet", f"--config={kubelet}", f"--kubeconfig={directory}/kubelet.kubeconfig",
            f"--root-dir={directory}/kubelet", f"--cert-dir={directory}/kubelet-certificates", f"--hostname-override={NODE}",
            f"--node-ip={NODE_ADDRESS}", "--container-runtime=remote",
            f"--container-runtime-endpoint=unix://{layout.containerd_socket}",
        ],
    }  # fmt: skip


def _configure_kubelet(layout: Layout, key: Path, certificate: Path) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": NODE_ADDRESS,
        "tlsPrivateKeyFile": str(key),
        "tlsCertFile": str(certificate),
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(layout.directory / "authority.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": layout.cgroup,
        "enforceNodeAllocatable": [],
        "evictionHard": {"nodefs.available": "1%"},  # of a disk that others use as well
        "imageGCHighThresholdPercent": 100,
        "failSwapOn": False,
        "makeIPTablesUtilChains": False,
        # A Pod that is deleted within a second of its start is otherwise ended at the next look at all Pods, after a minute.
        "syncFrequency": "5s",
        "volumeStatsAggPeriod": "5s",  # by which a Pod over its disk limit is found, instead of a minute
        "oomScoreAdj": 0,  # a lower value needs a capability that root has not everywhere
        "protectKernelDefaults": True,
        "resolvConf": str(_write(layout.directory / "resolv.conf", f"nameserver {NODE_ADDRESS}\n")),
        "clusterDNS": [NODE_ADDRESS],
        "clusterDomain": "cluster.local",
    }


def _write_containerd_configuration(layout: Layout) -> Path:
    networks = layout.directory / "networks"
    networks.mkdir()
    network = {
        "cniVersion": "0.4.0", "name": "pods", "type": "bridge", "bridge": BRIDGE, "isGateway": True, "ipMasq": False,
        "ipam": {
            "type": "host-local", "ranges": [[{"subnet": POD_NETWORK, "gateway": POD_GATEWAY}]],
            "routes": [{"dst": "0.0.0.0/0"}], "dataDir": f"{layout.directory}/addresses",
        },
    }  # fmt: skip
    loopback = {"cniVersion": "0.4.0", "name": "loopback", "type": "loopback"}
    for name, plugin in (("10-pods", network), ("99-loopback", loopback)):
        _write(networks / f"{name}.conf", json.dumps(plugin))
    return _write(layout.directory / "containerd.toml", f"""
version = 2
root = "{layout.directory}/containerd"
state = "{layout.directory}/containerd-state"
disabled_plugins = ["io.containerd.grpc.v1.cri.none", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs"]
[grpc]
  address = "{layout.containerd_socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "docker.io/library/{layout.pause_image}"
  restrict_oom_score_adj = true
  disable_hugetlb_controller = true
  stream_server_address = "127.0.0.1"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{layout.programs}"
    conf_dir = "{networks}"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
""")  # fmt: skip


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def _write_yaml(path: Path, content: Sequence[Any] | dict[str, Any]) -> Path:
    return _write(path, yaml.safe_dump(content))
