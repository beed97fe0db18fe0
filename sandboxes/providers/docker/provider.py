"""Docker provider: sandboxes as containers of a local Docker Engine.

The container's name is the sandbox's name and its ref. Two volumes belong to a container, for /workspace and for /data, so a
stopped container is started again and has lost only its processes and its tmpfs. All other directories are read-only.
Process 1 is the agent (image/agent/), the parent of all commands that it starts. Commands run as the same user, and cannot
end, stop or trace it: the kernel keeps signals of its own namespace away from process 1, and it is not dumpable."""

import os
import time
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import structlog
from django.conf import settings
from docker import APIClient
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.types import LogConfig, Mount, Ulimit
from docker.utils import kwargs_from_env

from sandboxes.providers import base, recoveries
from sandboxes.providers.base import (
    AGENT_DIRECTORY,
    DATA,
    SOCKETS_DIRECTORY,
    WORKSPACE,
    Network,
    ProviderSandbox,
    ResourceUsage,
    SandboxSpec,
)
from sandboxes.providers.docker import parked_networks, replacement, seccomp, volumes
from sandboxes.providers.docker.command_end import ContainerCommandEndProvider
from sandboxes.providers.docker.commands import AGENT_UID
from sandboxes.providers.docker.engine import CALL_TIMEOUT_SECONDS, Conflict, translate_errors
from sandboxes.providers.docker.files import ContainerFilesProvider
from sandboxes.providers.docker.images import ContainerImagesProvider
from sandboxes.providers.docker.processes import ContainerProcessesProvider
from sandboxes.providers.docker.suspension import LIVE_STATES
from sandboxes.providers.docker.volumes import NAME_LABEL, OWNER_LABEL
from sandboxes.providers.errors import FailureCause, Missing, Rejected, Unavailable
from sandboxes.providers.recoveries import Recovery
from sandboxes.redaction.texts import quote_answer

log = structlog.get_logger(__name__)
INIT_COMMAND = (
    "python3",
    "-I",
    "-S",
    "/opt/leasehold/agent.pyc",
    base.AGENT_SOCKET,
    "/opt/leasehold/shim",
    base.EGRESS_LOOPBACK_ADDRESS.rpartition(":")[2],
    base.LLM_SOCKET,
    base.PROXY_LOOPBACK_ADDRESS.rpartition(":")[2],
    base.PROXY_SOCKET,
)
REMOVAL_TIMEOUT_SECONDS = 30.0  # for a removal begun by another process
# Sizes of tmpfs directories as shares of the sandbox's memory limit, to which their content counts. Completely full, including
# inodes, they leave more than half of the memory, so that commands still start and can clean up.
# With 512 MiB, /dev/shm has Docker's default of 64 MiB. A program that writes to a mapping beyond its size is killed by SIGBUS.
TMPFS_MEMORY_SHARES = {"/tmp": 1 / 4, "/var/tmp": 1 / 32, "/dev/shm": 1 / 8, "/run": 1 / 64}  # noqa: S108 - inside the sandbox
SHM_MEMORY_SHARE = 1 / 32  # SysV shared memory, which also outlives its processes
BYTES_PER_INODE = 16 << 10  # inode limit: an inode takes about 1 KiB of kernel memory, which counts towards the memory limit


def is_daemon_available() -> bool:
    """Return whether a Docker daemon responds, with a timeout of one second per request."""
    try:
        APIClient(**kwargs_from_env(), version="auto", timeout=1).close()
    except (DockerException, OSError):
        return False
    return True


class DockerProvider(ContainerFilesProvider, ContainerCommandEndProvider, ContainerProcessesProvider, ContainerImagesProvider):
    """Provider for one Docker daemon: DOCKER_HOST, over a unix socket or plain TCP."""

    name = "docker"
    isolated = True
    network = Network.SEALED
    bridges_proxy = True
    enforces_limits = limits_processes = True
    measures_usage = True
    streams_output = True
    has_terminals = True

    def engine_id(self) -> str:
        return self._engine.fetch_id()

    def last_engine_id(self) -> str:
        return self._engine.id or self._engine.fetch_id()

    def total_memory_mib(self) -> int | None:
        return int(self._engine.call("GET", "/info")["MemTotal"]) >> 20 or None  # 0 if the daemon cannot read it

    def find_disk(self) -> Path | None:
        return self._engine.data_root

    def create(self, spec: SandboxSpec) -> str:
        # A container that loses its parked namespace is replaced, which would lose the rest of its file system.
        may_park = settings.PARKED_NETWORKS > 0 and not _get_runtime(spec) and not spec.writable_root
        parked = parked_networks.claim(self._engine) if may_park else None
        try:
            return self._create_and_start(spec, parked)
        finally:
            if may_park:
                parked_networks.replace_later(self._engine, parked)

    def prepare_starts(self) -> Mapping[str, int]:
        removed = parked_networks.sweep(self._engine, keep=settings.PARKED_NETWORKS)
        return {"parked networks removed": removed, "networks parked": parked_networks.park(self._engine)}

    def discard_prepared(self) -> None:
        parked_networks.sweep(self._engine, keep=0)

    def _create_and_start(self, spec: SandboxSpec, parked: str | None) -> str:
        client, deadline = self._engine.client, time.monotonic() + CALL_TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            with translate_errors():
                if self._create_container(spec, parked) or self._is_own_container(spec):
                    self._check_volume_owner(spec)
                    self._start(spec.name, client.inspect_container(spec.name)["Id"])
                    return spec.name
            time.sleep(0.05)
        raise Unavailable(f"The container name {spec.name} is in use, but no such container appears.")

    def _create_container(self, spec: SandboxSpec, parked: str | None = None) -> bool:
        """Create the container and its volumes. Return False if the name is in use.

        `parked` is the id of a parked container, in whose network namespace the container will start."""
        client, memory, image = self._engine.client, spec.memory_mib << 20, spec.image or settings.SANDBOX_IMAGE
        mounts = [Mount(SOCKETS_DIRECTORY, str(spec.sockets), type="bind", read_only=True)] if spec.sockets else []
        if spec.agent:
            mounts.append(Mount(AGENT_DIRECTORY, str(spec.agent), type="bind", read_only=True))
        if spec.data:  # rslave: later mounts on the host appear in the container, not vice versa
            mounts.append(Mount(DATA, str(spec.data), type="bind", propagation="rslave"))
        own_labels, volume_labels = {OWNER_LABEL: spec.owner, NAME_LABEL: spec.name}, volumes.build_labels(spec)
        for name, directory in volumes.list_volumes(spec):  # created with the container, initialized from the image
            mounts.append(Mount(directory, name, type="volume", labels=volume_labels))
        labels = base.truncate_labels((f"leasehold.{key}", value) for key, value in spec.labels.items())
        host_config = client.create_host_config(
            network_mode=f"container:{parked}" if parked else "none",
            cap_drop=["ALL"],
            security_opt=["no-new-privileges:true", f"seccomp={seccomp.build_profile()}"],
            ipc_mode="private",
            cgroupns="private",
            init=False,  # process 1 of the image adopts and reaps orphans
            read_only=not spec.writable_root,
            tmpfs={path: _tmpfs_options(path, int(memory * share)) for path, share in TMPFS_MEMORY_SHARES.items()},
            sysctls=_sysv_ipc_sysctls(memory),
            ulimits=[Ulimit(name="core", soft=0, hard=0)],
            runtime=_get_runtime(spec) or None,
            mem_limit=memory,
            memswap_limit=memory,
            nano_cpus=spec.millicpus * 1_000_000,
            pids_limit=spec.pids,
            mounts=mounts,
            log_config=LogConfig(type="none"),
        )
        variables = base.EGRESS_ENVIRONMENT | {"LLM_SOCKET": base.LLM_SOCKET} | base.build_processor_counts(spec.millicpus)
        try:
            client.create_container(
                image,
                name=spec.name,
                entrypoint=[*INIT_COMMAND],
                environment=variables,
                hostname=None if parked else "sandbox",  # the parked container's, which is the same
                user=f"{AGENT_UID}:{AGENT_UID}",
                working_dir=WORKSPACE,
                labels={**labels, **own_labels},
                host_config=host_config,
                use_config_proxy=False,  # the host user's proxy settings may contain passwords
            )
        except ImageNotFound as error:
            message = f"Image {image} does not exist. Run `manage.py build_image`."
            raise Rejected(message, cause=FailureCause.IMAGE_UNUSABLE) from error
        except APIError as error:
            if error.status_code == 409:
                return False
            if error.status_code in (400, 404) and "runtime" in str(error.explanation).lower():
                raise Rejected(
                    f"The Docker daemon has no runtime {_get_runtime(spec)}, which the pool or LEASEHOLD_DOCKER_RUNTIME names. "
                    f"Add it to the daemon's configuration. {quote_answer(error.explanation)}"
                ) from error
            raise
        return True

    def _recreate(self, ref: str, *, is_recovery: bool = True) -> bool:
        """Create the container of a sandbox again on its volumes. Return False unless all of them exist.

        1. Read the spec from the volumes.
        2. Create the container, which is not started. Another process may be first.
        3. Look at the volumes again: the engine creates the volumes that a concurrent destroy has removed anew, and empty."""
        kept = volumes.find_kept(self._engine, ref)
        if kept is None:
            return False
        try:
            with translate_errors():
                is_created = self._create_container(kept.spec)
        except Rejected as error:  # by a state of the engine that an operator can repair: its files wait until then
            raise Unavailable(f"{ref} cannot be created again: {error}", cause=FailureCause.IMAGE_UNUSABLE) from error
        if volumes.find_kept(self._engine, ref) != kept:
            if is_created:
                self._remove_container(ref)
                volumes.remove_newer(self._engine, kept)
            return False
        self._engine.cgroups.pop(ref, None)
        self._engine.container_ids.pop(ref, None)
        if is_created and is_recovery:
            log.warning("container created again on its volumes", name=ref)
            recoveries.report(Recovery.RECREATED)
        return True

    def _renew(self, ref: str, container: str) -> bool:
        """See ContainerRestartProvider. The container is created again on its volumes, by the spec that they have as a label.

        After a crash in between the next call creates it, as after a removal by someone else. All directories but /workspace
        and /data are lost, as by an eviction, which concerns only sandboxes with a writable root file system."""
        kept = volumes.find_kept(self._engine, ref)
        if kept is None:
            return False
        with translate_errors():
            try:
                present = self._engine.client.inspect_image(kept.spec.image or settings.SANDBOX_IMAGE)["Id"]
            except ImageNotFound:
                return False
        if self._engine.call("GET", f"/containers/{container}/json")["Image"] == present:
            return False
        self._engine.call("DELETE", f"/containers/{container}")
        if not self._recreate(ref, is_recovery=False):
            raise Missing(f"{ref} was destroyed")
        log.info("container replaced: its agent was of another version", name=ref)
        return True

    def _is_own_container(self, spec: SandboxSpec) -> bool:
        """Return whether the container of this name exists. Raise Rejected if it has another owner.

        False while the name is in use without a container: the engine reserves a name before the container is visible, and
        releases it after its removal."""
        try:
            inspected = self._engine.client.inspect_container(spec.name)
        except NotFound:
            return False
        if (inspected["Config"]["Labels"] or {}).get(OWNER_LABEL) != spec.owner:
            raise Rejected(f"The name {spec.name} is used by a container of another owner.")
        return inspected["State"]["Status"] != "removing" and not replacement.finish_removal(self._engine, inspected)

    def _check_volume_owner(self, spec: SandboxSpec) -> None:
        """Remove the container and raise Rejected if one of its volumes existed before and has another owner."""
        for name, _ in volumes.list_volumes(spec):
            labels = self._engine.call("GET", f"/volumes/{name}")["Labels"] or {}
            if (labels.get(OWNER_LABEL), labels.get(NAME_LABEL)) != (spec.owner, spec.name):
                self._engine.client.remove_container(spec.name, force=True)
                raise Rejected(f"The name {name} is used by a volume of another owner.")

    def wait_ready(self, ref: str, *, timeout: timedelta) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        reason = "no response"
        while (remaining := deadline - time.monotonic()) > 0:
            if self._is_init_running(ref):
                return
            try:
                result = self.exec(ref, ["true"], env={}, timeout=timedelta(seconds=remaining), mark=uuid.uuid4().hex)
                if result.exit_code == 0:
                    return
                reason = result.stderr.decode(errors="replace")
            except Unavailable as error:
                reason = str(error)
            time.sleep(0.1)
        raise Unavailable(f"{ref} is not ready after {timeout}: {reason}", cause=FailureCause.TIMEOUT)

    def _is_init_running(self, ref: str) -> bool:
        """Return whether process 1 has executed agent.pyc. False if the container's processes are not visible from here."""
        try:
            cgroup = self._engine.cgroup(ref)
            pids = cgroup.processes.read_text().split() if cgroup else []
            return any(b"agent.pyc" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids)
        except OSError:
            return False

    def destroy(self, ref: str) -> None:
        deadline = time.monotonic() + REMOVAL_TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            try:
                self._remove_container(ref)
                continue
            except Missing:  # repeated until confirmed: the engine may answer 204 during another removal
                self._engine.cgroups.pop(ref, None)
                self._engine.container_ids.pop(ref, None)
                if volumes.remove_volumes(self._engine, ref):
                    return
            except Conflict:  # another removal is in progress
                pass
            time.sleep(0.05)
        raise Unavailable(f"{ref} is still being removed", cause=FailureCause.TIMEOUT)

    def _remove_container(self, ref: str) -> None:
        """Remove the container with all of its processes. Raise Missing if it does not exist."""
        engine = self._engine
        replacement.remove_replacement(engine, ref)
        inspected = engine.call("GET", f"/containers/{ref}/json")
        if inspected["State"]["Running"]:
            self._thaw_in_kernel(ref)  # version 1 of cgroups kills no frozen process
        engine.call("DELETE", f"/containers/{ref}?force=true&v=true")
        if not inspected["State"]["Running"]:
            replacement.kill_leftover_processes(inspected["Id"])

    def inspect(self, ref: str) -> ProviderSandbox:
        try:
            inspected = self._engine.call("GET", f"/containers/{ref}/json")
        except Missing:
            if not replacement.complete_replacement(self._engine, ref):
                if kept := volumes.find_kept(self._engine, ref):
                    return ProviderSandbox(ref, ref, running=False, created_at=min(kept.created_at.values()))
                raise
            inspected = self._engine.call("GET", f"/containers/{ref}/json")
        suspended = self._is_suspended(ref, inspected["State"]["Status"])
        return ProviderSandbox(
            ref=inspected["Name"].lstrip("/"),
            name=inspected["Name"].lstrip("/"),
            running=inspected["State"]["Status"] in LIVE_STATES and not suspended,
            created_at=datetime.fromisoformat(inspected["Created"]),
            suspended=suspended,
        )

    def stats(self, ref: str) -> ResourceUsage | None:
        try:
            return self._engine.usage(ref)
        except Missing:
            if not self._has_volumes(ref):
                raise
            return None

    def list_all(self) -> list[ProviderSandbox]:
        return self._list(OWNER_LABEL)

    def _list(self, filter_label: str) -> list[ProviderSandbox]:
        """List the sandboxes with a label, given as a name or as name=value."""
        label = {"label": filter_label}
        with translate_errors():
            # Volumes are listed first, because a volume outlives its container.
            listed = self._engine.client.volumes(filters=label)["Volumes"] or []
            containers = self._engine.client.containers(all=True, filters=label)
        sandboxes = []
        for container in containers:
            if name := container["Labels"].get(NAME_LABEL):  # set on all sandboxes
                suspended = self._is_suspended(name, container["State"])
                running = container["State"] in LIVE_STATES and not suspended
                created_at = datetime.fromtimestamp(container["Created"], UTC)
                owner = container["Labels"][OWNER_LABEL]
                sandboxes.append(ProviderSandbox(name, name, running, created_at, suspended=suspended, owner=owner))
        return sandboxes + volumes.find_remnants(listed, {sandbox.name for sandbox in sandboxes})

    def list(self, owner: str) -> list[ProviderSandbox]:
        return self._list(f"{OWNER_LABEL}={owner}")


def _get_runtime(spec: SandboxSpec) -> str:
    """Return the OCI runtime of a sandbox. Empty: the daemon's default."""
    return spec.runtime or str(settings.DOCKER_RUNTIME)


def _tmpfs_options(path: str, size: int) -> str:
    """Build tmpfs mount options. `exec` is allowed: tools compile in /tmp, and /workspace is executable anyway."""
    rights = f"mode=0755,uid={AGENT_UID},gid={AGENT_UID}" if path == "/run" else "mode=1777"
    return f"rw,nosuid,nodev,exec,size={size},nr_inodes={max(size // BYTES_PER_INODE, 16)},{rights}"


def _sysv_ipc_sysctls(memory: int) -> dict[str, str]:
    """Build limits on SysV IPC objects, which outlive processes and could otherwise take all of the sandbox's memory."""
    pages = int(memory * SHM_MEMORY_SHARE) // os.sysconf("SC_PAGE_SIZE")
    return {"kernel.shmall": str(pages), "kernel.msgmni": "16", "kernel.sem": "250 8000 32 32"}
