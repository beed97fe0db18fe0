"""The cluster: namespaces of its own, and the processes in them.

Network, mounts and process ids are its own. Nothing of the machine is changed but a group of cgroups, and everything ends with
the first process of the namespaces. Two connections cross their border, both on loopback (border.py): to the API server, and
from the Pods to a server of this machine. Pods are connected by a bridge (CNI), without a plugin that enforces policies."""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.support.cluster_access import Address, ClusterAccess
from tests.support.kubernetes import Kubectl
from tests.support.own_cluster import programs
from tests.support.own_cluster.border import Border
from tests.support.own_cluster.credentials import Credentials
from tests.support.servers.engines import CGROUP_ROOTS, spawn
from tests.support.servers.ports import find_free_ports
from tests.support.waiting import wait_until

START_SECONDS = 120
# Settings of the kernel which the kubelet demands. It sees files in their place: the machine's own stay as they are.
KERNEL_SETTINGS = {
    "vm/overcommit_memory": 1, "vm/panic_on_oom": 0, "kernel/panic": 10, "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1_000_000, "kernel/keys/root_maxbytes": 25_000_000,
}  # fmt: skip
HOLD_NAMESPACES = f"""
set -e
cd "$0"
find * -type f | while read -r name; do mount --bind "$name" "/proc/sys/$name"; done
ip link set lo up
ip link add node0 type bridge && ip address add {programs.NODE_ADDRESS}/24 dev node0 && ip link set node0 up
ip link add {programs.BRIDGE} type bridge && ip address add {programs.POD_GATEWAY}/16 dev {programs.BRIDGE}
ip link set {programs.BRIDGE} up
echo 1 >/proc/sys/net/ipv4/ip_forward
echo ready
while :; do sleep 3600 & wait; done
"""


class OwnCluster:
    """One cluster. The programs can be ended and started one by one."""

    def __init__(self, directory: Path, images: Sequence[str]) -> None:
        """Prepare a cluster with the programs of a directory, and with these images of the Docker Engine."""
        self.images = images
        # Short, because paths of unix sockets are limited. Part of the names of cgroups and of an image.
        self.directory = Path(f"/tmp/lh-cluster-{secrets.token_hex(4)}")
        self.directory.mkdir(mode=0o700)
        self.layout = programs.Layout(directory, self.directory)
        self.api_port, gateway_port = find_free_ports(2)
        credentials = Credentials(self.directory)
        self.commands = programs.build_commands(self.layout, credentials)
        url = f"https://127.0.0.1:{self.api_port}"
        kubeconfig = credentials.write_kubeconfig("admin", url, programs.ADMIN.token)
        self.kubectl = Kubectl(kubeconfig)
        # The border connects the two addresses.
        gateway, listen = Address(programs.POD_GATEWAY, 8443), Address("127.0.0.1", gateway_port)
        self.access = ClusterAccess(kubeconfig, gateway, listen, enforces_policies=False)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._holder: subprocess.Popen[bytes] | None = None
        self._border: Border | None = None

    def start(self) -> None:
        """Start everything, and wait until the node is ready."""
        self._hold_namespaces()
        for root in CGROUP_ROOTS:
            if (root / "cgroup.procs").exists():
                (root / self.directory.name).mkdir()
        for name in self.commands:
            self.run(name)
            if name == "kube-apiserver":
                self.wait_for_api()
            if name == "containerd":
                self._load_images()
        self.wait_for_node()

    def stop(self) -> None:
        """Kill all processes, and remove all files, cgroups and the image of the Pods."""
        if self._border:
            self._border.close()
        if self._holder:
            self._holder.kill()  # and, with its first process, everything in the namespaces
            self._holder.wait()
        for process in self._processes.values():
            process.wait()
        subprocess.run(["docker", "image", "rm", self.layout.pause_image], capture_output=True)
        for root in CGROUP_ROOTS:
            for path in sorted(filter(Path.is_dir, (root / self.directory.name).rglob("*")), reverse=True):
                path.rmdir()
            with suppress(FileNotFoundError):
                (root / self.directory.name).rmdir()
        shutil.rmtree(self.directory)

    def run(self, name: str) -> None:
        """Start a program that does not run."""
        assert name not in self._processes, f"{name} runs already"
        with (self.directory / f"{name}.log").open("ab") as log:
            self._processes[name] = spawn(self.enter(*self.commands[name]), stdout=log, stderr=log)

    def kill(self, name: str) -> None:
        """End a program by SIGKILL. Processes that it has started go on."""
        process = self._processes.pop(name)
        os.kill(_find_child(process.pid), signal.SIGKILL)  # nsenter ends with its only child
        process.wait()

    def forget_versions(self) -> None:
        """Let the API server know the present resource version alone: etcd is compacted, and the cache of watches is empty."""
        self.kill("kube-apiserver")
        try:
            revision = self._ask_etcd("range", {"key": "AA=="})["header"]["revision"]
            self._ask_etcd("compaction", {"revision": revision, "physical": True})
        finally:
            self.run("kube-apiserver")
            self.wait_for_api()

    def _ask_etcd(self, verb: str, body: dict[str, Any]) -> Any:
        program = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], sys.argv[2].encode(), 10).read().decode())"
        url = f"http://127.0.0.1:{programs.ETCD_PORT}/v3/kv/{verb}"
        command = self.enter(sys.executable, "-I", "-c", program, url, json.dumps(body))
        return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)

    def enter(self, *command: str) -> list[str]:
        """Return the command line by which a command runs in the namespaces."""
        assert self._holder
        return ["nsenter", f"--target={_find_child(self._holder.pid)}", "--net", "--mount", "--pid", *command]

    def wait_for_api(self) -> None:
        wait_until(lambda: self._responds("get", "--raw", "/readyz"), self._describe("API server"), within=START_SECONDS)

    def wait_for_node(self) -> None:
        command = ("wait", "--for=condition=Ready", f"node/{programs.NODE}", "--timeout=1s")
        wait_until(lambda: self._responds(*command), self._describe("node"), within=START_SECONDS)

    def _describe(self, what: str) -> str:
        ended = [name for name, process in self._processes.items() if process.poll() is not None]
        return f"the {what} is ready; ended: {ended}, see {self.directory}/*.log"

    def _responds(self, *arguments: str) -> bool:
        return self.kubectl.run(*arguments, check=False).returncode == 0

    def _hold_namespaces(self) -> None:
        settings = self.directory / "settings"
        for name, value in KERNEL_SETTINGS.items():
            (settings / name).parent.mkdir(parents=True, exist_ok=True)
            (settings / name).write_text(f"{value}\n")
        namespaces = ["--net", "--mount", "--propagation=slave", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._holder = spawn(["unshare", *namespaces, "bash", "-c", HOLD_NAMESPACES, str(settings)], stdout=subprocess.PIPE)
        assert self._holder.stdout
        with self._holder.stdout as output:
            assert output.readline() == b"ready\n", "the namespaces of the cluster could not be created"
        self._border = Border(_find_child(self._holder.pid))
        self._border.lead_inside(("127.0.0.1", self.api_port), ("127.0.0.1", programs.API_PORT))
        gateway, listen = self.access.gateway, self.access.listen
        self._border.lead_outside((gateway.host, gateway.port), (listen.host, listen.port))

    def _load_images(self) -> None:
        """Copy the images from the Docker Engine to containerd."""
        pause = str(self.layout.programs / "pause.tar")
        command = ["docker", "import", "--change", 'ENTRYPOINT ["/pause"]', pause, self.layout.pause_image]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        socket = f"--address={self.layout.containerd_socket}"
        wait_until(self.layout.containerd_socket.exists, self._describe("containerd"), within=START_SECONDS)
        load = self.enter("ctr", socket, "--namespace=k8s.io", "images", "import", "-")
        with subprocess.Popen(["docker", "save", *self.images, self.layout.pause_image], stdout=subprocess.PIPE) as save:
            subprocess.run(load, stdin=save.stdout, stdout=subprocess.DEVNULL, check=True)
        assert save.returncode == 0, "docker save failed"


@contextmanager
def running_cluster(directory: Path, images: Sequence[str]) -> Iterator[OwnCluster]:
    """Run a cluster. Enter and leave the block in the main thread: the programs die with the thread that started them."""
    cluster = OwnCluster(directory, images)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def _find_child(pid: int) -> int:
    """Return the only child of a process, which has entered the process id namespace."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
