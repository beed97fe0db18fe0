"""Container of the egress proxy: nginx between sandboxes and the egress server.

The container has no network and no capabilities, and holds no credentials. It has the slots' sockets and the egress server's
socket mounted. nginx parses the HTTP of untrusted programs, admits the allowed paths, and drops all headers except
`anthropic-version` and those of a WebSocket handshake. It tells the egress server the slot of each request in a header. A
request that nginx refuses appears only in nginx's access log."""

import hashlib
import io
import socket
import tarfile
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import structlog
from django.conf import settings
from docker import APIClient
from docker.errors import APIError, NotFound
from docker.types import LogConfig, Mount, Ulimit

from sandboxes import providers
from sandboxes.egress import nginx_config, slots
from sandboxes.egress.nginx_config import LOGS_MOUNT, SERVER_MOUNT, SLOTS_MOUNT, START_COMMAND
from sandboxes.hosts.directories import ensure_directory
from sandboxes.providers.docker.engine import Engine, translate_errors
from sandboxes.providers.errors import ProviderError, Rejected, Unavailable

log = structlog.get_logger(__name__)
INSTALLATION_LABEL = "leasehold.egress"  # identifies the installation among those that share an engine
DIRECTORY_LABEL = "leasehold.egress.directory"  # host directory of the installation's sockets
CONTAINER_TIMEOUT_SECONDS = 20.0  # for the start until nginx listens, and for the removal
MEMORY_BYTES = 128 << 20


@dataclass(frozen=True)
class NginxProxy:
    """The proxy container of one installation, named after the directory of its sockets."""

    engine: Engine

    @property
    def name(self) -> str:
        return f"leasehold-egress-{get_installation_id()[:16]}"

    def start(self) -> None:
        """Replace a running container by one with the current configuration, and wait until it listens on every slot.

        Raise a ProviderError, and leave no container, if the proxy does not start."""
        for slot in range(settings.EGRESS_SLOTS):
            (slots.ensure_slot_directory(slot) / slots.SOCKET_NAME).unlink(missing_ok=True)
        self.stop()
        client = self.engine.client
        with translate_errors():
            try:
                client.create_container(
                    settings.EGRESS_IMAGE, name=self.name, command=["sh", "-c", START_COMMAND],
                    user=f"{slots.get_proxy_uid()}:{slots.get_proxy_uid()}", hostname="egress",
                    labels={INSTALLATION_LABEL: get_installation_id(), DIRECTORY_LABEL: str(settings.EGRESS_DIR.absolute())},
                    host_config=self._build_host_config(), use_config_proxy=False,
                    # Without an explicit stop signal the engine takes every signal as a stop by the user, also the one that
                    # reopens the log, and would then not restart the container after a crash.
                    stop_signal="SIGTERM",
                )  # fmt: skip
            except NotFound as error:
                message = f"Image {settings.EGRESS_IMAGE} does not exist. Run `manage.py build_image`."
                raise Rejected(message) from error
        try:
            with translate_errors():
                client.start(self.name)
            self._wait_until_listening()
        except ProviderError:
            self.stop()
            raise

    def _build_host_config(self) -> dict[str, Any]:
        mounts = [
            Mount(SLOTS_MOUNT, str(slots.ensure_root_directory().resolve()), type="bind"),
            Mount(SERVER_MOUNT, str(get_server_socket_path().parent.resolve()), type="bind", read_only=True),
            Mount(LOGS_MOUNT, str(ensure_logs_directory().resolve()), type="bind"),
            *(
                Mount(f"/etc/nginx/{name}", str(path), type="bind", read_only=True)
                for name, path in nginx_config.write_configuration().items()
            ),
        ]
        limits: dict[str, Any] = self.engine.client.create_host_config(
            network_mode="none",
            cap_drop=["ALL"],
            security_opt=["no-new-privileges:true"],
            ipc_mode="private",
            init=True,
            read_only=True,
            tmpfs={"/tmp": "size=16m,mode=1777,noexec,nosuid,nodev"},  # noqa: S108 - inside the container
            mem_limit=MEMORY_BYTES,
            memswap_limit=MEMORY_BYTES,
            nano_cpus=1_000_000_000,
            pids_limit=32,
            ulimits=[
                Ulimit(name="nofile", soft=nginx_config.max_open_files(), hard=nginx_config.max_open_files()),
                Ulimit(name="core", soft=0, hard=0),
            ],
            mounts=mounts,
            restart_policy={"Name": "on-failure"},  # not restarted with the engine, because the egress server may have ended
            log_config=LogConfig(type="json-file", config={"max-size": "1m", "max-file": "1"}),
        )
        return limits

    def _wait_until_listening(self) -> None:
        last_socket = slots.ensure_slot_directory(settings.EGRESS_SLOTS - 1) / slots.SOCKET_NAME
        deadline = time.monotonic() + CONTAINER_TIMEOUT_SECONDS
        while not last_socket.is_socket():
            state = self.get_state()
            if time.monotonic() > deadline or state in ("", "exited", "restarting"):
                with translate_errors():
                    output = self.engine.client.logs(self.name, tail=5).decode(errors="replace") if state else ""
                raise Unavailable(f"The egress proxy did not start ({state or 'removed'}): {output.strip()}")
            time.sleep(0.05)

    def get_state(self) -> str:
        """Return the container's state as the engine names it, such as "running". Return "" if there is no container."""
        try:
            with translate_errors():
                return str(self.engine.client.inspect_container(self.name)["State"]["Status"])
        except Exception as error:
            if isinstance(error.__cause__, NotFound):
                return ""
            raise

    def reopen_log(self) -> None:
        """Make nginx reopen its access log by name, after the file was renamed."""
        with translate_errors():
            self.engine.client.kill(self.name, "SIGUSR1")

    def stop(self) -> None:
        """Remove the container. A missing container is success."""
        deadline = time.monotonic() + CONTAINER_TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            try:
                self.engine.client.remove_container(self.name, force=True, v=True)
            except NotFound:
                return
            except APIError as error:
                if error.status_code != 409:  # 409: a removal by another process is in progress
                    raise Unavailable(f"The egress proxy could not be removed: {error.explanation}") from error
            time.sleep(0.05)
        raise Unavailable(f"The container {self.name} was not removed within {CONTAINER_TIMEOUT_SECONDS:.0f} s.")


def get_installation_id() -> str:
    """Return the label value of this installation, derived from the directory of its sockets."""
    return hashlib.sha256(str(settings.EGRESS_DIR.absolute()).encode()).hexdigest()


def find_orphans(client: APIClient, *, now: datetime, grace: timedelta) -> list[str]:
    """Return the ids of this installation's proxy containers that are older than `grace`, unless its egress server listens.

    A restarted egress server creates a new container. Containers of other installations are none of this one's business,
    even if their directories cannot be seen from here."""
    if is_listening(get_server_socket_path()):
        return []
    with translate_errors():
        containers = client.containers(all=True, filters={"label": f"{INSTALLATION_LABEL}={get_installation_id()}"})
    return [container["Id"] for container in containers if datetime.fromtimestamp(container["Created"], UTC) <= now - grace]


def remove_orphans(*, now: datetime, grace: timedelta) -> int:
    """Remove orphaned proxy containers. Return the number removed. Raise a ProviderError."""
    with translate_errors():
        engine = Engine()
    with closing(engine.client):
        orphans = find_orphans(engine.client, now=now, grace=grace)
        for container_id in orphans:
            log.warning("egress proxy without a server removed", container=container_id[:12])
            with translate_errors(), suppress(NotFound):
                engine.client.remove_container(container_id, force=True, v=True)
    return len(orphans)


def is_listening(path: Path) -> bool:
    """Return whether a process listens on this unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(str(path)) == 0


def list_required_sockets() -> list[Path]:
    """Return the sockets that show that the egress proxy of this host accepts calls: the server's and the last slot's."""
    return [get_server_socket_path(), slots.ensure_root_directory() / str(settings.EGRESS_SLOTS - 1) / slots.SOCKET_NAME]


def is_open() -> bool:
    """Return whether the egress proxy accepts calls on this host."""
    return all(map(is_listening, list_required_sockets()))


def get_proxy_kind() -> str:
    """Return "nginx", "none" or "gateway": LEASEHOLD_EGRESS_PROXY, by default nginx if the default provider is docker."""
    if settings.EGRESS_PROXY != "auto":
        return str(settings.EGRESS_PROXY)
    return "nginx" if providers.get_default_provider_name() == "docker" else "none"


def get_server_socket_path() -> Path:
    slots.ensure_root_directory()
    return ensure_directory(settings.EGRESS_DIR / "server") / nginx_config.SERVER_SOCKET


def ensure_logs_directory() -> Path:
    slots.ensure_root_directory()
    return slots.ensure_proxy_directory(settings.EGRESS_DIR / "logs")


def build_image_context(base: str) -> bytes:
    """Return the build context of the proxy's image as a tar. Equal base images give equal bytes."""
    dockerfile = (
        f"FROM {base}\n"
        "RUN apt-get update && apt-get install -y --no-install-recommends nginx-light libnginx-mod-stream"
        " && rm -rf /var/lib/apt/lists/*\n"
    ).encode()
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        member = tarfile.TarInfo("Dockerfile")
        member.size = len(dockerfile)
        tar.addfile(member, io.BytesIO(dockerfile))
    return archive.getvalue()
