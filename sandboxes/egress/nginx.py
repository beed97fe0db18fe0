"""nginx, which stands between sandboxes and the egress server: in a container of its own, without network, without
capabilities, with the slots on one side of it and one socket of ours on the other. It holds no key.

It parses what untrusted programs send, lets through the few paths there are, passes on no header but the dialect's, and
says through which slot a request came. What it refuses is in its log alone."""

import hashlib
import io
import json
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
from sandboxes.egress import slots
from sandboxes.egress.request_filter import FIELDS_BY_PATH, build_error_body
from sandboxes.models.policies import MAX_BODY_KIB
from sandboxes.providers.base import ProviderError, Rejected, Unavailable
from sandboxes.providers.docker.engine import Engine, translate_errors

log = structlog.get_logger(__name__)
SERVER_SOCKET = "server.sock"
ACCESS_LOG_NAME = "access.log"
INSTALLATION_LABEL = "leasehold.egress"  # its value says of which installation on this engine
DIRECTORY_LABEL = "leasehold.egress.directory"  # on this host, with its sockets
CONTAINER_TIMEOUT_SECONDS = 20.0  # seconds in which it has to listen
REQUESTS_PER_SECOND, REQUEST_BURST, MAX_CONNECTIONS_PER_SLOT = 20, 40, 32  # of one slot
MAX_SOCKETS_PER_SLOT = 128  # connections of one slot, whatever is said through them
MAX_WORKER_CONNECTIONS = 8192  # of one worker
MEMORY_BYTES = 128 << 20
SLOTS_MOUNT, SERVER_MOUNT, LOGS_MOUNT, BACKEND_SOCKETS_DIRECTORY = "/s", "/server", "/logs", "/tmp/b"  # noqa: S108 - the container's own

# A proxy that was killed has left its sockets, and cannot bind them again.
CLEANUP_COMMAND = (
    f"find {SLOTS_MOUNT} -name {slots.SOCKET_NAME} -delete; "
    f"rm -rf {BACKEND_SOCKETS_DIRECTORY}; mkdir {BACKEND_SOCKETS_DIRECTORY}"
)
START_COMMAND = f"{CLEANUP_COMMAND}; exec nginx -c /etc/nginx/leasehold.conf"
CONFIG_TEMPLATE = """\
daemon off;
worker_processes {workers};
worker_rlimit_nofile {files};
pid /tmp/nginx.pid;
error_log stderr crit;
load_module /usr/lib/nginx/modules/ngx_stream_module.so;
events {{ worker_connections {connections}; }}
http {{
  server_tokens off;
  default_type application/octet-stream;
  client_body_temp_path /tmp/body;
  proxy_temp_path /tmp/proxy;
  fastcgi_temp_path /tmp/fastcgi;
  uwsgi_temp_path /tmp/uwsgi;
  scgi_temp_path /tmp/scgi;

  # One server for all: a block for each slot would take 200 KiB each. Who speaks is known by the socket alone.
  map $server_addr $slot {{ "~^unix:{behind}/(?<number>[0-9]+)$" $number; }}

  # Of refusals that cost nothing to bring about, one in sixteen is logged.
  map "$status $request_id" $logged {{ default 1; "~^(400|408|429) [^0]" 0; }}
  log_format calls escape=json '{{"id":"$request_id","slot":$slot,"at":$msec,"took":$request_time,'
    '"method":"$request_method","uri":"$uri","status":$status,"sent":$request_length,"received":$bytes_sent,"upstream":"$upstream_status",'
    '"limit":"$limit_req_status","code":"$upstream_http_x_leasehold_code"}}';
  access_log {logs}/{log} calls if=$logged;

  limit_req_zone $slot zone=pace:2m rate={rate}r/s;
  limit_conn_zone $slot zone=open:2m;
  limit_req_status 429;
  limit_conn_status 429;
  limit_req zone=pace burst={burst} nodelay;
  limit_conn open {open};

  client_max_body_size {body};
  client_body_buffer_size 64k;
  client_header_buffer_size 2k;
  large_client_header_buffers 4 8k;
  client_header_timeout 10s;
  client_body_timeout 30s;
  send_timeout 60s;
  keepalive_timeout 75s;
  underscores_in_headers off;
  ignore_invalid_headers on;
  merge_slashes off;
  absolute_redirect off;

  # Of what a sandbox says in headers this goes on, where it is what it should be.
  map $http_upgrade $upgrade {{ default ""; "~*^websocket$" websocket; }}
  map $http_upgrade $connection_upgrade {{ default ""; "~*^websocket$" upgrade; }}
  map $http_sec_websocket_key $websocket_key {{ default ""; "~^[A-Za-z0-9+/=]{{24}}$" $http_sec_websocket_key; }}
  map $http_sec_websocket_version $websocket_version {{ default ""; "~^[0-9]{{1,3}}$" $http_sec_websocket_version; }}
  map $http_anthropic_version $dialect {{ default ""; "~^[A-Za-z0-9.-]{{1,32}}$" $http_anthropic_version; }}
  upstream server {{ server unix:{server}; keepalive 32; }}

  server {{
    include /etc/nginx/leasehold-way.conf;
{behinds}
  }}
}}
# In front of that, where a connection counts before it has said anything: no sandbox takes those that there are from others.
stream {{
  map $server_addr $slot {{ "~^unix:{slots}/(?<number>[0-9]+)/" $number; }}
  limit_conn_zone $slot zone=sockets:2m;
  limit_conn sockets {sockets};
  server {{
    proxy_pass unix:{behind}/$slot;
    proxy_connect_timeout 5s;
    proxy_timeout {patience}s;
    proxy_half_close on;  # so a refusal arrives that is answered before all was sent
{listens}
  }}
}}
"""
LISTEN_TEMPLATE, LISTEN_BACKEND_TEMPLATE = (
    "    listen unix:{slots}/{slot}/{socket} backlog=64;",
    "    listen unix:{behind}/{slot};",
)
LOCATIONS_TEMPLATE = """\
proxy_http_version 1.1;
proxy_pass_request_headers off;
proxy_request_buffering off;
proxy_buffering off;
proxy_read_timeout {patience}s;
proxy_send_timeout 60s;
proxy_connect_timeout 5s;
proxy_next_upstream off;
proxy_intercept_errors off;
{errors}
{paths}
location = /v1/models {{
  limit_except GET {{ deny all; }}
  proxy_set_header X-Leasehold-Slot $slot;
  proxy_set_header X-Request-Id $request_id;
  proxy_set_header Host leasehold;
  proxy_set_header Connection "";
  proxy_pass http://server/v1/models;
}}
location ^~ /relay/ {{
  limit_except GET {{ deny all; }}
  proxy_set_header X-Leasehold-Slot $slot;
  proxy_set_header X-Request-Id $request_id;
  proxy_set_header Host leasehold;
  proxy_set_header Upgrade $upgrade;
  proxy_set_header Connection $connection_upgrade;
  proxy_set_header Sec-WebSocket-Key $websocket_key;
  proxy_set_header Sec-WebSocket-Version $websocket_version;
  proxy_pass http://server;
}}
location / {{ deny all; }}
"""
ERROR_RESPONSES = {
    400: ("malformed", "This is no HTTP that is understood here."),
    403: ("path_forbidden", "Only model calls, and the relay, leave this sandbox."),
    404: ("path_forbidden", "Only model calls, and the relay, leave this sandbox."),
    405: ("path_forbidden", "Only model calls, and the relay, leave this sandbox."),
    413: ("too_large", f"A request has at most {MAX_BODY_KIB} KiB."),
    414: ("too_large", "This path is too long."),
    429: ("too_many", "Too many requests, or connections, at once."),
    501: ("malformed", "This is no HTTP that is understood here."),
    502: ("way_out_closed", "The control plane does not answer now. Try again."),
    504: ("way_out_slow", "The control plane did not answer in time."),
    505: ("malformed", "This is no HTTP that is understood here."),
}  # what nginx itself answers, in the words of both kinds of SDK
ERROR_TEMPLATE = """\
error_page {status} /leasehold-error-{status};
location = /leasehold-error-{status} {{ internal; default_type application/json;{more} return {status} '{body}'; }}"""
PATH_TEMPLATE = """\
location = {path} {{
  limit_except POST {{ deny all; }}
  proxy_set_header X-Leasehold-Slot $slot;
  proxy_set_header X-Request-Id $request_id;
  proxy_set_header Host leasehold;
  proxy_set_header Connection "";
  proxy_set_header Content-Type application/json;
  proxy_set_header anthropic-version $dialect;
  proxy_pass http://server{path};
}}"""


@dataclass(frozen=True)
class NginxProxy:
    """The container of one installation, which is named by the directory of its sockets."""

    engine: Engine

    @property
    def name(self) -> str:
        return f"leasehold-egress-{get_installation_id()[:16]}"

    def start(self) -> None:
        """It runs, with the configuration of now, and listens on every slot. Whatever ran before is gone."""
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
                    # Without one of its own the engine takes any signal for a stop, also the one that reopens the log, and
                    # does not start again what dies later.
                    stop_signal="SIGTERM",
                )  # fmt: skip
            except NotFound as gone:
                raise Rejected(f"There is no image {settings.EGRESS_IMAGE} here. `manage.py build_image` makes it.") from gone
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
                for name, path in write_configuration().items()
            ),
        ]
        limits: dict[str, Any] = self.engine.client.create_host_config(
            network_mode="none",
            cap_drop=["ALL"],
            security_opt=["no-new-privileges:true"],
            ipc_mode="private",
            init=True,
            read_only=True,
            tmpfs={"/tmp": "size=16m,mode=1777,noexec,nosuid,nodev"},  # noqa: S108 - the container's own
            mem_limit=MEMORY_BYTES,
            memswap_limit=MEMORY_BYTES,
            nano_cpus=1_000_000_000,
            pids_limit=32,
            ulimits=[Ulimit(name="nofile", soft=max_open_files(), hard=max_open_files()), Ulimit(name="core", soft=0, hard=0)],
            mounts=mounts,
            restart_policy={"Name": "on-failure"},  # and not with the engine: there may be no server any more
            log_config=LogConfig(type="json-file", config={"max-size": "1m", "max-file": "1"}),
        )
        return limits

    def _wait_until_listening(self) -> None:
        last, until = (
            slots.ensure_slot_directory(settings.EGRESS_SLOTS - 1) / slots.SOCKET_NAME,
            time.monotonic() + CONTAINER_TIMEOUT_SECONDS,
        )
        while not last.is_socket():
            found = self.look()
            if time.monotonic() > until or found in ("", "exited", "restarting"):
                with translate_errors():
                    said = self.engine.client.logs(self.name, tail=5).decode(errors="replace") if found else ""
                raise Unavailable(f"The egress proxy does not come up ({found or 'gone'}): {said.strip()}")
            time.sleep(0.05)

    def look(self) -> str:
        """The state of the container as the engine names it, "" if there is none."""
        try:
            with translate_errors():
                return str(self.engine.client.inspect_container(self.name)["State"]["Status"])
        except Exception as failed:
            if isinstance(failed.__cause__, NotFound):
                return ""
            raise

    def reopen_log(self) -> None:
        """It writes to a new file where its log was moved away."""
        with translate_errors():
            self.engine.client.kill(self.name, "SIGUSR1")

    def stop(self) -> None:
        """Nothing is left of it. Not there is success."""
        until = time.monotonic() + CONTAINER_TIMEOUT_SECONDS
        while time.monotonic() < until:
            try:
                self.engine.client.remove_container(self.name, force=True, v=True)
            except NotFound:
                return
            except APIError as failed:
                if failed.status_code != 409:  # somebody else's removal is in progress
                    raise Unavailable(f"The egress proxy cannot be removed: {failed.explanation}") from failed
            time.sleep(0.05)
        raise Unavailable(f"The container {self.name} does not go.")


def get_installation_id() -> str:
    """What an installation's proxy is labelled with: another for another directory of sockets."""
    return hashlib.sha256(str(settings.EGRESS_DIR.absolute()).encode()).hexdigest()


def find_orphans(client: APIClient, *, now: datetime, grace: timedelta) -> list[str]:
    """Proxies that serve nobody: older than `grace`, and of this installation without a server behind them, or of one
    whose directory is gone. Whoever should have removed them has died. A server that comes back starts its own anew."""
    with translate_errors():
        found = client.containers(all=True, filters={"label": INSTALLATION_LABEL})
    old = [each for each in found if datetime.fromtimestamp(each["Created"], UTC) <= now - grace]
    ours = {INSTALLATION_LABEL: get_installation_id()}.items()
    return [
        each["Id"]
        for each in old
        if (ours <= each["Labels"].items() and not is_listening(get_server_socket_path()))
        or not Path(each["Labels"].get(DIRECTORY_LABEL, "/")).exists()
    ]


def remove_orphans(*, now: datetime, grace: timedelta) -> int:
    """How many were removed; or one of the port's errors."""
    with translate_errors():
        engine = Engine()
    with closing(engine.client):
        gone = find_orphans(engine.client, now=now, grace=grace)
        for one in gone:
            log.warning("egress proxy without a server removed", container=one[:12])
            with translate_errors(), suppress(NotFound):
                engine.client.remove_container(one, force=True, v=True)
    return len(gone)


def is_listening(path: Path) -> bool:
    """Whether somebody listens on this unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(str(path)) == 0


def is_open() -> bool:
    """Whether the whole way out is there, on this host: the server, and sockets for sandboxes."""
    last = slots.ensure_root_directory() / str(settings.EGRESS_SLOTS - 1) / slots.SOCKET_NAME
    return is_listening(get_server_socket_path()) and is_listening(last)


def get_proxy_kind() -> str:
    """What stands between sandboxes and the server: nginx where they are containers, unless the environment says otherwise."""
    if settings.EGRESS_PROXY != "auto":
        return str(settings.EGRESS_PROXY)
    return "nginx" if providers.get_default_provider_name() == "docker" else "none"


def get_server_socket_path() -> Path:
    place: Path = settings.EGRESS_DIR / "server"
    slots.ensure_root_directory()
    place.mkdir(mode=0o755, parents=True, exist_ok=True)
    return place / SERVER_SOCKET


def ensure_logs_directory() -> Path:
    place: Path = settings.EGRESS_DIR / "logs"
    slots.ensure_root_directory()
    place.mkdir(mode=0o755, parents=True, exist_ok=True)
    slots.chown_to_proxy(place)
    return place


def write_configuration() -> dict[str, Path]:
    """nginx's files as they are to be now, which are there afterwards: name -> path."""
    place: Path = settings.EGRESS_DIR / "nginx"
    slots.ensure_root_directory()
    place.mkdir(mode=0o755, parents=True, exist_ok=True)
    written = {"leasehold.conf": render_main_config(), "leasehold-way.conf": render_locations_config()}
    for name, content in written.items():
        (place / name).write_text(content)
        (place / name).chmod(0o644)
    return {name: (place / name).resolve() for name in written}


def max_open_files() -> int:
    """Files that each of nginx's processes may have open. Each listening socket is a connection to it."""
    return 2 * int(settings.EGRESS_SLOTS) + MAX_WORKER_CONNECTIONS + 512


def render_main_config() -> str:
    """nginx's configuration for as many slots as there are."""
    each = range(settings.EGRESS_SLOTS)
    listens = "\n".join(LISTEN_TEMPLATE.format(slots=SLOTS_MOUNT, slot=slot, socket=slots.SOCKET_NAME) for slot in each)
    behinds = "\n".join(LISTEN_BACKEND_TEMPLATE.format(behind=BACKEND_SOCKETS_DIRECTORY, slot=slot) for slot in each)
    return CONFIG_TEMPLATE.format(
        workers=2,
        files=max_open_files(),
        connections=max_open_files() - 512,
        slots=SLOTS_MOUNT,
        logs=LOGS_MOUNT,
        log=ACCESS_LOG_NAME,
        rate=REQUESTS_PER_SECOND,
        burst=REQUEST_BURST,
        open=MAX_CONNECTIONS_PER_SLOT,
        body=MAX_BODY_KIB << 10,
        sockets=MAX_SOCKETS_PER_SLOT,
        server=f"{SERVER_MOUNT}/{SERVER_SOCKET}",
        behind=BACKEND_SOCKETS_DIRECTORY,
        listens=listens,
        behinds=behinds,
        patience=proxy_timeout_seconds(),
    )


def proxy_timeout_seconds() -> int:
    """Seconds in which something is said through a connection."""
    return int(settings.LLM_TIMEOUT.total_seconds()) + 30


def render_locations_config() -> str:
    """What holds for every slot."""
    paths = "\n".join(PATH_TEMPLATE.format(path=path) for path in FIELDS_BY_PATH)
    bodies = {status: json.dumps(build_error_body(*said)) for status, said in ERROR_RESPONSES.items()}
    errors = "\n".join(
        ERROR_TEMPLATE.format(status=status, body=body, more=" add_header Retry-After 1 always;" * (status == 429))
        for status, body in bodies.items()
    )
    return LOCATIONS_TEMPLATE.format(paths=paths, errors=errors, patience=proxy_timeout_seconds())


def build_image_context(base: str) -> bytes:
    """The build context of the proxy's image, byte for byte the same for the same base."""
    dockerfile = (
        f"FROM {base}\n"
        "RUN apt-get update && apt-get install -y --no-install-recommends nginx-light libnginx-mod-stream"
        " && rm -rf /var/lib/apt/lists/*\n"
    ).encode()
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as tar:
        member = tarfile.TarInfo("Dockerfile")
        member.size = len(dockerfile)
        tar.addfile(member, io.BytesIO(dockerfile))
    return whole.getvalue()
