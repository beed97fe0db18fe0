"""nginx configuration of the egress proxy."""

import json
from pathlib import Path

from django.conf import settings

from sandboxes.egress import slots
from sandboxes.egress.request_filter import FIELDS_BY_PATH, build_error_body
from sandboxes.hosts.directories import chmod_no_follow, ensure_directory
from sandboxes.models.policies import MAX_BODY_KIB

SERVER_SOCKET = "server.sock"
ACCESS_LOG_NAME = "access.log"
REQUESTS_PER_SECOND, REQUEST_BURST, MAX_CONNECTIONS_PER_SLOT = 20, 40, 32  # HTTP requests and open requests of one slot
MAX_SOCKETS_PER_SLOT = 128  # connections of one slot, also those without a request
MAX_WORKER_CONNECTIONS = 8192  # per worker, beyond the listening sockets
# Paths inside the container.
SLOTS_MOUNT, SERVER_MOUNT, LOGS_MOUNT, BACKEND_SOCKETS_DIRECTORY = "/s", "/server", "/logs", "/tmp/b"  # noqa: S108


# A killed proxy leaves its sockets behind. nginx cannot bind a path that exists.
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

  # One server for all slots: a server block takes about 200 KiB. The slot is derived from the socket's path.
  map $server_addr $slot {{ "~^unix:{backend}/(?<number>[0-9]+)$" $number; }}

  # Refusals that are cheap to provoke are sampled: one in sixteen is logged.
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

  # The only headers of a sandbox that are passed on, each validated.
  map $http_upgrade $upgrade {{ default ""; "~*^websocket$" websocket; }}
  map $http_upgrade $connection_upgrade {{ default ""; "~*^websocket$" upgrade; }}
  map $http_sec_websocket_key $websocket_key {{ default ""; "~^[A-Za-z0-9+/=]{{24}}$" $http_sec_websocket_key; }}
  map $http_sec_websocket_version $websocket_version {{ default ""; "~^[0-9]{{1,3}}$" $http_sec_websocket_version; }}
  map $http_anthropic_version $dialect {{ default ""; "~^[A-Za-z0-9.-]{{1,32}}$" $http_anthropic_version; }}
  map $http_anthropic_beta $betas {{ default ""; "~^[A-Za-z0-9., -]{{1,1024}}$" $http_anthropic_beta; }}
  map $http_mcp_protocol_version $mcp_version {{ default ""; "~^[0-9-]{{1,32}}$" $http_mcp_protocol_version; }}
  map $http_mcp_method $mcp_method {{ default ""; "~^[A-Za-z/]{{1,64}}$" $http_mcp_method; }}
  map $http_mcp_name $mcp_name {{ default ""; "~^[A-Za-z0-9_.-]{{1,128}}$" $http_mcp_name; }}
  upstream server {{ server unix:{server}; keepalive 32; }}

  server {{
    include /etc/nginx/leasehold-locations.conf;
{backend_listens}
  }}
}}
# Limits connections before any byte is read, so that one sandbox cannot exhaust the connections of the others.
stream {{
  map $server_addr $slot {{ "~^unix:{slots}/(?<number>[0-9]+)/" $number; }}
  limit_conn_zone $slot zone=sockets:2m;
  limit_conn sockets {sockets};
  server {{
    proxy_pass unix:{backend}/$slot;
    proxy_connect_timeout 5s;
    proxy_timeout {timeout}s;
    proxy_half_close on;  # delivers a refusal that is sent before the request is complete
{listens}
  }}
}}
"""
LISTEN_TEMPLATE, LISTEN_BACKEND_TEMPLATE = (
    "    listen unix:{slots}/{slot}/{socket} backlog=64;",
    "    listen unix:{backend}/{slot};",
)
LOCATIONS_TEMPLATE = """\
proxy_http_version 1.1;
proxy_pass_request_headers off;
proxy_request_buffering off;
proxy_buffering off;
proxy_read_timeout {timeout}s;
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
location = /mcp {{
  limit_except GET POST DELETE {{ deny all; }}
  proxy_set_header X-Leasehold-Slot $slot;
  proxy_set_header X-Request-Id $request_id;
  proxy_set_header Host leasehold;
  proxy_set_header Connection "";
  proxy_set_header Content-Type application/json;
  proxy_set_header Accept "application/json, text/event-stream";
  proxy_set_header MCP-Protocol-Version $mcp_version;
  proxy_set_header Mcp-Method $mcp_method;
  proxy_set_header Mcp-Name $mcp_name;
  proxy_pass http://server/mcp;
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
# Status -> (code, message) of errors that nginx itself answers.
ERROR_RESPONSES = {
    400: ("malformed", "Malformed HTTP request."),
    403: ("path_forbidden", "Only model calls, tools and the relay are allowed from a sandbox."),
    404: ("path_forbidden", "Only model calls, tools and the relay are allowed from a sandbox."),
    405: ("path_forbidden", "Only model calls, tools and the relay are allowed from a sandbox."),
    413: ("too_large", f"The request exceeds the limit of {MAX_BODY_KIB} KiB."),
    414: ("too_large", "The path is too long."),
    429: ("too_many", "Too many concurrent requests or connections."),
    501: ("malformed", "Malformed HTTP request."),
    502: ("way_out_closed", "The control plane is unavailable. Try again."),
    504: ("way_out_slow", "The control plane did not answer in time."),
    505: ("malformed", "Malformed HTTP request."),
}
ERROR_TEMPLATE = """\
error_page {status} /leasehold-error-{status};
location = /leasehold-error-{status} {{ internal; default_type application/json;{headers} return {status} '{body}'; }}"""
PATH_TEMPLATE = """\
location = {path} {{
  limit_except POST {{ deny all; }}
  proxy_set_header X-Leasehold-Slot $slot;
  proxy_set_header X-Request-Id $request_id;
  proxy_set_header Host leasehold;
  proxy_set_header Connection "";
  proxy_set_header Content-Type application/json;
  proxy_set_header anthropic-version $dialect;
  proxy_set_header anthropic-beta $betas;
  proxy_pass http://server{path};
}}"""


def write_configuration() -> dict[str, Path]:
    """Write the configuration files for the current settings. Return file name -> host path."""
    slots.ensure_root_directory()
    directory = ensure_directory(settings.EGRESS_DIR / "nginx")
    contents = {"leasehold.conf": render_main_config(), "leasehold-locations.conf": render_locations_config()}
    for name, content in contents.items():
        (directory / name).write_text(content)
        chmod_no_follow(directory / name, 0o644)
    return {name: (directory / name).resolve() for name in contents}


def max_open_files() -> int:
    """Return the limit on open files of one nginx process. nginx counts each listening socket as a connection."""
    return 2 * int(settings.EGRESS_SLOTS) + MAX_WORKER_CONNECTIONS + 512


def render_main_config() -> str:
    """Render the main configuration for all slots."""
    all_slots = range(settings.EGRESS_SLOTS)
    listens = "\n".join(LISTEN_TEMPLATE.format(slots=SLOTS_MOUNT, slot=slot, socket=slots.SOCKET_NAME) for slot in all_slots)
    backend_listens = "\n".join(
        LISTEN_BACKEND_TEMPLATE.format(backend=BACKEND_SOCKETS_DIRECTORY, slot=slot) for slot in all_slots
    )
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
        backend=BACKEND_SOCKETS_DIRECTORY,
        listens=listens,
        backend_listens=backend_listens,
        timeout=proxy_timeout_seconds(),
    )


def proxy_timeout_seconds() -> int:
    """Return the idle timeout of a proxied connection in seconds: longer than that of a model call."""
    return int(settings.LLM_TIMEOUT.total_seconds()) + 30


def render_locations_config() -> str:
    """Render the locations and error pages shared by all slots."""
    paths = "\n".join(PATH_TEMPLATE.format(path=path) for path in FIELDS_BY_PATH)
    bodies = {status: json.dumps(build_error_body(code, message)) for status, (code, message) in ERROR_RESPONSES.items()}
    errors = "\n".join(
        ERROR_TEMPLATE.format(status=status, body=body, headers=" add_header Retry-After 1 always;" * (status == 429))
        for status, body in bodies.items()
    )
    return LOCATIONS_TEMPLATE.format(paths=paths, errors=errors, timeout=proxy_timeout_seconds())
