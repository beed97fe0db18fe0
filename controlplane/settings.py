"""Django settings, read from the environment by env.py. `manage.py config` prints the effective values."""

import os
import re
from pathlib import Path
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from controlplane import env, kubernetes_settings, logs, public_address, remote_settings
from controlplane.console.sign_in import configuration as sign_in
from controlplane.framework import *  # noqa: F403 - settings that do not depend on the environment
from sandboxes.long_calls import compute_maximum
from sandboxes.providers.registry import DEVELOPMENT_PROVIDERS, PROVIDERS, RUNTIME_PATTERN

BASE_DIR = env.BASE_DIR

# --- installation -------------------------------------------------------------------------------------------------
DEBUG = env.boolean(
    "DEBUG", False, help="development mode: permits the process provider, which does not isolate, and a missing SECRET_KEY"
)
SECRET_KEY = env.text("SECRET_KEY", help="signs sessions and queued tasks; long random text", secret=True)
if not SECRET_KEY:
    if not DEBUG:
        raise ImproperlyConfigured(
            "SECRET_KEY is not set. It takes long random text. `make install` writes one to .env; in production set it in "
            "the environment."
        )
    SECRET_KEY = "for-development-only-because-DEBUG-is-on"  # noqa: S105
_public = public_address.read()
PUBLIC_URL, ALLOWED_HOSTS, CSRF_TRUSTED_ORIGINS = _public.url, _public.allowed_hosts, _public.trusted_origins
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = _public.is_https
COOKIE_PREFIX = _public.cookie_prefix
SESSION_COOKIE_NAME, CSRF_COOKIE_NAME = f"{COOKIE_PREFIX}sessionid", f"{COOKIE_PREFIX}csrftoken"
SECURE_HSTS_SECONDS = _public.hsts_seconds
STATE_DIR = env.path(
    "LEASEHOLD_STATE_DIR", str(BASE_DIR / "var"), help="directory of process sandboxes, stored state and run-time files"
)
env.make_directory("LEASEHOLD_STATE_DIR", STATE_DIR, mode=0o700)
_default_runtime_dir = str(STATE_DIR / "run")
RUNTIME_DIR = env.path(
    "LEASEHOLD_RUNTIME_DIR",
    _default_runtime_dir if len(_default_runtime_dir) <= 70 else f"/tmp/leasehold-{os.getuid()}",  # noqa: S108 - made with mode 0700
    help="directory of unix sockets; must survive a restart of the host and be short: a socket path has at most 107 bytes",
)

INSTANCE = env.text(
    "LEASEHOLD_INSTANCE",
    accepts="at most 64 characters",
    pattern=r"(?s:.{1,64})",
    help="name recorded with the claims of this group of processes; `manage.py up` generates one per start",
)

# --- database -----------------------------------------------------------------------------------------------------
_database = env.database(
    "DATABASE_URL",
    f"sqlite:///{BASE_DIR / 'var' / 'leasehold.sqlite3'}",
    help="database; SQLite by default, PostgreSQL for production",
)
DATABASE_POOLER = env.choice(
    "LEASEHOLD_DATABASE_POOLER", "session", ["session", "transaction"],
    help="mode of a pooler such as PgBouncer before PostgreSQL; transaction does without prepared statements",
)  # fmt: skip
DATABASE_CONNECTIONS = env.integer(
    "LEASEHOLD_DATABASE_CONNECTIONS", 0,
    help="maximum number of PostgreSQL connections of each process; 0: as many as it has threads that use one",
)  # fmt: skip
DATABASE_IDLE = env.duration(
    "LEASEHOLD_DATABASE_IDLE", "10s", help="time after which an unused PostgreSQL connection is closed"
)
DATABASE_WAIT = env.duration(
    "LEASEHOLD_DATABASE_WAIT", "10s", help="time for which a request waits for a free PostgreSQL connection"
)
ON_POSTGRES = _database["ENGINE"].endswith("postgresql")
_options: dict[str, Any] = _database.setdefault("OPTIONS", {})
if ON_POSTGRES:
    _database["ENGINE"] = "sandboxes.db.postgresql"
    _options.setdefault("connect_timeout", 4)  # seconds; lets a health probe respond when the database is unreachable
    _options.setdefault("server_side_binding", True)
    # Prepared statements save planning only together with server_side_binding. Not 0: a migration may send several commands
    # in one statement, which cannot be prepared.
    _options.setdefault("prepare_threshold", None if DATABASE_POOLER == "transaction" else 1)
    _database |= {
        "CONN_MAX_AGE": 0, "CONN_HEALTH_CHECKS": True, "DISABLE_SERVER_SIDE_CURSORS": DATABASE_POOLER == "transaction",
    }  # fmt: skip
else:
    # IMMEDIATE: a deferred transaction that reads and then writes fails with SQLITE_BUSY under load, with any timeout.
    _options |= {
        "transaction_mode": "IMMEDIATE",
        "timeout": 20,
        "init_command": "PRAGMA journal_mode=WAL;PRAGMA synchronous=NORMAL;PRAGMA cache_size=-20000;"
        "PRAGMA journal_size_limit=27103364",
    }
    _database |= {"CONN_MAX_AGE": 600}
    if _database["NAME"] != ":memory:":
        _directory = Path(_database["NAME"]).parent
        if env.ENV_VARIABLES["DATABASE_URL"].source == "default":
            env.make_directory("DATABASE_URL", _directory)
        elif not _directory.is_dir():
            raise ImproperlyConfigured(f"DATABASE_URL names a SQLite file in {_directory}, and there is no such directory.")
DATABASES = {"default": _database}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# --- sandboxes ----------------------------------------------------------------------------------------------------
SANDBOX_PROVIDER = env.choice(
    "SANDBOX_PROVIDER", "auto", ["auto", *PROVIDERS],
    help="provider of new sandboxes; auto: docker if a daemon responds, else process, which does not isolate",
)  # fmt: skip
ALLOW_UNISOLATED = env.boolean(
    "LEASEHOLD_ALLOW_UNISOLATED",
    False,
    help="allow the process provider with DEBUG off; agents then run with the rights of this user",
)
if SANDBOX_PROVIDER in DEVELOPMENT_PROVIDERS and not (DEBUG or ALLOW_UNISOLATED):
    raise ImproperlyConfigured(
        f"SANDBOX_PROVIDER={SANDBOX_PROVIDER} does not isolate and DEBUG is off. It takes docker, a remote provider or auto; "
        "LEASEHOLD_ALLOW_UNISOLATED=1 overrides this."
    )
SANDBOX_IMAGE = env.text("LEASEHOLD_SANDBOX_IMAGE", "leasehold-sandbox:latest", help="container image of new sandboxes")
DOCKER_RUNTIME = env.text(
    "LEASEHOLD_DOCKER_RUNTIME",
    accepts="the name of a runtime",
    pattern=RUNTIME_PATTERN,
    help="OCI runtime of new Docker sandboxes, such as runsc or kata-runtime, known to the daemon; unset: the daemon's default",
)
REMOTE_PROVIDERS = remote_settings.read()
KUBERNETES = kubernetes_settings.read()
PARKED_NETWORKS = env.integer(
    "LEASEHOLD_PARKED_NETWORKS", 1, minimum=0, maximum=16,
    help="empty network namespaces kept ready on each Docker host for the next starts, in containers of about 6 MiB; 0: none",
)  # fmt: skip
SANDBOX_START_TIMEOUT = env.duration("LEASEHOLD_SANDBOX_TIMEOUT_SECONDS", "180", help="time limit for starting a sandbox")
SANDBOX_MEMORY_MIB = env.integer(
    "LEASEHOLD_SANDBOX_MEMORY_MIB", 512, minimum=16, help="memory limit per sandbox of a new pool, in MiB"
)
SANDBOX_MILLICPUS = env.integer(
    "LEASEHOLD_SANDBOX_MILLICPUS", 1000, minimum=50, help="CPU limit per sandbox of a new pool, in thousandths of a CPU"
)
SANDBOX_PIDS = env.integer("LEASEHOLD_SANDBOX_PIDS", 256, minimum=16, help="process limit per sandbox of a new pool")
SANDBOX_SLEEP_AFTER = env.optional_duration(
    "SANDBOX_SLEEP_AFTER",
    help="sleep_after of a lease if neither the request nor the environment type sets it; unset: LEASEHOLD_IDLE_TIMEOUT",
)
MAX_SANDBOXES = env.optional_integer(
    "LEASEHOLD_MAX_SANDBOXES",
    minimum=1,
    help="capacity, in sandboxes, of the default pool and of others with automatic capacity; unset: by the engine's memory",
)
MAX_SANDBOXES_PER_AGENT = env.integer(
    "LEASEHOLD_MAX_SANDBOXES_PER_AGENT",
    0,
    help="sandboxes an agent can hold in one pool, unless the pool sets a limit; 0: no limit",
)
IDLE_TIMEOUT = env.duration(
    "LEASEHOLD_IDLE_TIMEOUT", "5m", help="idle time after which a sandbox is evicted, unless sleep_after is set as above"
)
KEEP_AWAKE_LIMIT = env.duration(
    "LEASEHOLD_KEEP_AWAKE_LIMIT", "24h", help="time for which a background process with keep_awake prevents suspension"
)
COLD_TTL = env.duration(
    "LEASEHOLD_COLD_TTL", "2h", help="time after which a cold sandbox is destroyed; its stored state is kept"
)
DESTROY_TRIES = env.integer(
    "LEASEHOLD_DESTROY_TRIES", 8, minimum=1, help="failed destroy attempts before a sandbox is quarantined"
)
ORPHAN_GRACE = env.duration("LEASEHOLD_ORPHAN_GRACE", "2m", help="age at which a provider's sandbox without a row is destroyed")
HOST_TIMEOUT = env.duration(
    "LEASEHOLD_HOST_TIMEOUT",
    "5m",
    help="time without a heartbeat after which a host is shown as unreachable; nothing is destroyed",
)
OBSERVE = env.boolean(
    "LEASEHOLD_OBSERVE",
    False,
    help="destroy and delete nothing, deliver no webhook, start no queued run: sweeps only count what they would do",
)

# --- stored state -------------------------------------------------------------------------------------------------
KEEP_SNAPSHOTS = env.integer(
    "LEASEHOLD_KEEP_SNAPSHOTS", 2, minimum=1, help="automatic workspace snapshots retained per active lease"
)
KEEP_ASKED_SNAPSHOTS = env.integer(
    "LEASEHOLD_KEEP_ASKED_SNAPSHOTS",
    10,
    minimum=1,
    help="requested snapshots retained per lease, in addition to automatic ones",
)
DATA_KEEPING = env.choice(
    "LEASEHOLD_DATA", "sync", ["sync", "mount"],
    help="mode of /data for new agents: sync copies changes before and after every use; mount uses s3fs",
)  # fmt: skip
DATA_MOST_FILES = env.integer(
    "LEASEHOLD_DATA_MOST_FILES", 20_000, minimum=1, help="files and directories an agent can store in /data"
)
DATA_MOST_BYTES = env.integer("LEASEHOLD_DATA_MOST_MIB", 1024, minimum=1, help="size limit of an agent's /data, in MiB") << 20
MIN_FREE_DISK = (
    env.integer(
        "LEASEHOLD_MIN_FREE_DISK",
        2048,
        help="free space of the state, store and SQLite disks, in MiB, below which no sandbox is started; 0: no check",
    )
    << 20
)
KEEP_STATE = env.duration("LEASEHOLD_KEEP_STATE", "7d", help="retention of stored state after the end of its lease")
KEEP_HISTORY = env.duration(
    "LEASEHOLD_KEEP_HISTORY",
    "90d",
    help="retention of the rows of a lease, its turns, events and processes after its end",
)
KEEP_OPERATOR_ACTIONS = env.duration(
    "LEASEHOLD_KEEP_OPERATOR_ACTIONS",
    "365d",
    help="retention of the rows that record what operators changed by API keys and commands",
)
_backend = env.choice(
    "STORAGE_BACKEND", "filesystem", ["filesystem", "s3", "r2", "cloudflare_kv", "kv"],
    help="backend for stored state; r2 is an alias of s3, kv of cloudflare_kv",
)  # fmt: skip
STORAGE_BACKEND = {"r2": "s3", "kv": "cloudflare_kv"}.get(_backend, _backend)
STORAGE_MODE = env.choice(
    "STORAGE_MODE",
    "standard",
    ["standard", "journaled"],
    help="layout of chat history, artifacts and the audit log: one object per key, or an append-only journal",
)
STORAGE_SYNC = env.boolean(
    "STORAGE_SYNC", STORAGE_BACKEND == "filesystem",
    help="fsync each journal record before it is acknowledged (filesystem backend, journaled mode); off: records survive "
    "a crash of a process, but not of the machine",
)  # fmt: skip
STORAGE_DIR = env.path(
    "LEASEHOLD_STORAGE_DIR",
    str(STATE_DIR / "store"),
    help="directory of the filesystem backend; several hosts must share it",
)
STORAGE_PREFIX = env.text(
    "LEASEHOLD_STORAGE_PREFIX",
    accepts="up to 64 letters, digits and . _ - /, with / at the end",
    help="prefix of every key, for a bucket or namespace that several installations share",
)
S3_BUCKET = env.text("R2_BUCKET_BINDING", help="bucket name, on R2 or another S3 service")
S3_ENDPOINT = env.text(
    "LEASEHOLD_S3_ENDPOINT",
    accepts="an http:// or https:// URL",
    help="S3 endpoint; for R2 https://ACCOUNT.r2.cloudflarestorage.com",
)
S3_REGION = env.text("LEASEHOLD_S3_REGION", "auto", help="S3 region; auto for R2; a region without an endpoint selects AWS")
S3_ACCESS_KEY_ID = env.text(
    "LEASEHOLD_S3_ACCESS_KEY_ID", help="access key with read, write, list and delete permission on the bucket"
)
S3_SECRET_ACCESS_KEY = env.text("LEASEHOLD_S3_SECRET_ACCESS_KEY", help="secret of the access key", secret=True)
KV_NAMESPACE = env.text("KV_NAMESPACE_BINDING", help="id of the KV namespace, 32 hexadecimal digits")
KV_ACCOUNT_ID = env.text("LEASEHOLD_KV_ACCOUNT_ID", help="Cloudflare account of the KV namespace")
KV_API_TOKEN = env.text("LEASEHOLD_KV_API_TOKEN", help="Cloudflare API token with Workers KV edit permission", secret=True)
KV_API_URL = env.text(
    "LEASEHOLD_KV_API_URL",
    "https://api.cloudflare.com/client/v4",
    accepts="an http:// or https:// URL",
    help="base URL of the Cloudflare API",
)
_required_variables = {
    "filesystem": [],
    "s3": ["R2_BUCKET_BINDING", "LEASEHOLD_S3_ACCESS_KEY_ID", "LEASEHOLD_S3_SECRET_ACCESS_KEY"]
    + ["LEASEHOLD_S3_ENDPOINT"] * (S3_REGION == "auto"),
    "cloudflare_kv": ["KV_NAMESPACE_BINDING", "LEASEHOLD_KV_ACCOUNT_ID", "LEASEHOLD_KV_API_TOKEN", "LEASEHOLD_KV_API_URL"],
}
for _variable in (env.ENV_VARIABLES[_name] for _name in _required_variables[STORAGE_BACKEND]):
    if not _variable.value:
        raise ImproperlyConfigured(f"{_variable.name} is not set, and STORAGE_BACKEND={_backend} needs it. ({_variable.help})")
for _name, _pattern in {
    "LEASEHOLD_S3_ENDPOINT": r"(https?://[^/\s]+\S*)?",
    "LEASEHOLD_KV_API_URL": r"https?://[^/\s]+\S*",
    "LEASEHOLD_STORAGE_PREFIX": r"(?=.{0,64}$)([A-Za-z0-9_-][A-Za-z0-9_.-]*/)*",
}.items():
    if not re.fullmatch(_pattern, (_variable := env.ENV_VARIABLES[_name]).value):
        raise ImproperlyConfigured(
            f"{_name}={_variable.value!r} is not accepted. It takes {_variable.accepts}. ({_variable.help})"
        )
if STORAGE_BACKEND == "cloudflare_kv" and STORAGE_MODE == "journaled":
    raise ImproperlyConfigured(
        f"STORAGE_MODE=journaled is not supported with STORAGE_BACKEND={_backend}: KV accepts one write per second to a "
        "key, and a journal writes more often. Use filesystem or s3, or STORAGE_MODE=standard."
    )
if STORAGE_BACKEND != "filesystem" and STORAGE_SYNC:
    raise ImproperlyConfigured(
        f"STORAGE_SYNC=1 is not supported with STORAGE_BACKEND={_backend}: only the filesystem backend appends to files. "
        "A service acknowledges a value once it is stored. Leave STORAGE_SYNC unset."
    )

# --- runs ---------------------------------------------------------------------------------------------------------
EXEC_TIMEOUT = env.duration("LEASEHOLD_EXEC_TIMEOUT", "60s", help="timeout of an exec that sets none")
EXEC_TIMEOUT_MOST = env.duration("LEASEHOLD_EXEC_TIMEOUT_MOST", "1h", help="maximum timeout of an exec")
AGENT_RUN_TIMEOUT_MOST = env.duration(
    "LEASEHOLD_AGENT_RUN_TIMEOUT_MOST",
    "12h",
    help="maximum timeout of a run of an agent CLI; without one of its own it has LEASEHOLD_EXEC_TIMEOUT_MOST",
)
RUNNER_THREADS = env.integer(
    "LEASEHOLD_RUNNER_THREADS",
    4,
    minimum=0,
    maximum=1000,
    help="queued runs that one web process executes at once; 0: `manage.py runner` does",
)
QUEUE_MAX_RUNNING = env.integer("LEASEHOLD_QUEUE_MAX_RUNNING", 100, minimum=1, help="queued and agent runs at once, in all")
QUEUE_MAX_RUNNING_PER_AGENT = env.integer(
    "LEASEHOLD_QUEUE_MAX_RUNNING_PER_AGENT", 4, minimum=1, help="queued runs and agent runs of one agent at once"
)
QUEUE_MAX_RUNNING_PER_POOL = env.integer(
    "LEASEHOLD_QUEUE_MAX_RUNNING_PER_POOL", 50, minimum=1, help="queued runs and agent runs in sandboxes of one pool at once"
)
QUEUE_MAX_PENDING = env.integer("LEASEHOLD_QUEUE_MAX_PENDING", 20_000, minimum=1, help="maximum number of pending queued runs")
QUEUE_MAX_PENDING_PER_AGENT = env.integer(
    "LEASEHOLD_QUEUE_MAX_PENDING_PER_AGENT", 10_000, minimum=1, help="maximum number of pending queued runs of one agent"
)
EXEC_OUTPUT_CAP = env.integer(
    "LEASEHOLD_EXEC_OUTPUT_CAP_BYTES",
    1 << 20,
    minimum=1024,
    maximum=64 << 20,
    help="output limit per stream of an exec, in bytes; further output is discarded",
)
RUN_OUTPUT_KEPT = env.integer(
    "LEASEHOLD_RUN_OUTPUT_KEPT_BYTES",
    64 << 10,
    minimum=64 << 10,
    maximum=16 << 20,
    help="output stored with the run, in bytes per stream",
)
RUN_MEMORY_MOST_MIB = env.integer(
    "LEASEHOLD_RUN_MEMORY_MOST_MIB", 4096, minimum=16, help="maximum memory of a one-shot run, in MiB"
)
MAX_RUNS_PER_LEASE = env.integer(
    "LEASEHOLD_MAX_RUNS_PER_LEASE", 8, minimum=1, help="open runs of one lease: commands, turns, file transfers"
)
MAX_STREAMS = env.integer(
    "LEASEHOLD_MAX_STREAMS",
    500,
    minimum=1,
    maximum=800,
    help="open output streams of a web process, each with a thread of its own",
)  # the web server accepts 1024 connections
MAX_STREAMS_PER_LEASE = env.integer(
    "LEASEHOLD_MAX_STREAMS_PER_LEASE",
    32,
    minimum=1,
    help="open output streams of one lease, and event streams of one key, in a web process",
)
TURN_TIMEOUT = env.duration("LEASEHOLD_TURN_TIMEOUT", "60s", help="time limit of a turn; a turn that exceeds it is skipped")

FALLBACK_TRIGGER_TOKENS = env.integer(
    "LEASEHOLD_FALLBACK_TRIGGER_TOKENS",
    100_000,
    minimum=1,
    help="length of a conversation at which an agent summarizes it, if its model has no profile; in /workspace/config.json",
)
FALLBACK_KEEP_MESSAGES = env.integer(
    "LEASEHOLD_FALLBACK_KEEP_MESSAGES", 6, minimum=0, help="latest messages that an agent keeps when it summarizes the others"
)

# --- model calls --------------------------------------------------------------------------------------------------
LLM_URL = env.text(
    "LEASEHOLD_LLM_URL",
    accepts="an http:// or https:// URL",
    help="base URL of an OpenAI-compatible API such as LiteLLM, ending in /v1; unset: the built-in offline model answers",
)
LLM_API_KEY = env.text(
    "LEASEHOLD_LLM_API_KEY", secret=True, help="credential that the egress proxy adds to model calls; never enters a sandbox"
)
LLM_MODEL = env.text("LEASEHOLD_LLM_MODEL", "gpt-4o-mini", help="model of turns, and of calls that request the model `default`")
LLM_MODELS = env.string_list(
    "LEASEHOLD_LLM_MODELS", "", help="allowed models, * matches any part; LEASEHOLD_LLM_MODEL is always allowed"
)
LLM_TIMEOUT = env.duration("LEASEHOLD_LLM_TIMEOUT", "10m", help="time limit of a model call, streams included")
LLM_RECORDS = env.optional_path(
    "LEASEHOLD_LLM_RECORDS", help="file to which the LiteLLM callback appends the cost of calls; unset: none"
)
RELAY_URL = env.text(
    "LEASEHOLD_RELAY_URL",
    accepts="a ws:// or wss:// URL",
    help="upstream of /relay/, a WebSocket; unset: sandboxes have no relay",
)
RELAY_AUD = env.text(
    "LEASEHOLD_RELAY_AUD", help="DID of the relay, the audience of service tokens; unset: no tokens are minted for it"
)
RELAY_LXM = env.text(
    "LEASEHOLD_RELAY_LXM", "com.atproto.sync.subscribeRepos", help="lexicon method that these tokens authorize"
)
for _name, _pattern in {"LEASEHOLD_LLM_URL": r"(https?://[^/\s]+\S*)?", "LEASEHOLD_RELAY_URL": r"(wss?://[^/\s]+\S*)?"}.items():
    if not re.fullmatch(_pattern, (_variable := env.ENV_VARIABLES[_name]).value):
        raise ImproperlyConfigured(
            f"{_name}={_variable.value!r} is not accepted. It takes {_variable.accepts}. ({_variable.help})"
        )

# --- egress proxy -------------------------------------------------------------------------------------------------
EGRESS_DIR = RUNTIME_DIR / "egress"
AGENT_GATEWAY = RUNTIME_DIR / "gateway.sock"  # to the agents in the sandboxes of this host, for web and worker processes
RUNNER_GATEWAY = EGRESS_DIR / "runners.sock"  # to the runners in remote sandboxes that are connected to this host's gateway
EGRESS_PROXY = env.choice(
    "LEASEHOLD_EGRESS_PROXY", "auto", ["auto", "nginx", "none", "gateway"],
    help="front end of the egress proxy: nginx in a container, none (direct), or gateway (no sandboxes on this machine: only "
    "LEASEHOLD_GATEWAY_LISTEN is served); auto: nginx with the docker provider",
)  # fmt: skip
EGRESS_IMAGE = env.text("LEASEHOLD_EGRESS_IMAGE", "leasehold-egress:latest", help="container image of the nginx front end")
EGRESS_SLOTS = env.integer(
    "LEASEHOLD_EGRESS_SLOTS", 1024, minimum=1, maximum=16384,
    help="maximum number of sandboxes with a process, over all pools; beyond it a start or wake evicts another sandbox",
)  # fmt: skip
GATEWAY_LISTEN = env.text(
    "LEASEHOLD_GATEWAY_LISTEN",
    accepts="host:port",
    pattern=r"(\[[0-9a-f:]+\]|[^:\s]+):[0-9]{1,5}",
    help="address on which `manage.py egress` serves the gateway for remote sandboxes; unset: no gateway",
)
GATEWAY_URL = env.text(
    "LEASEHOLD_GATEWAY_URL",
    accepts="an https:// URL, or http:// on this machine",
    pattern=r"https://[^\s/]+[^\s]*|http://(127\.0\.0\.1|localhost)(:[0-9]{1,5})?(/[^\s]*)?",
    help="public address of the gateway, which remote sandboxes call; unset: they have no models",
).rstrip("/")
GATEWAY_CERTIFICATE = env.optional_path(
    "LEASEHOLD_GATEWAY_CERTIFICATE", help="PEM file with the gateway's certificate chain; unset: a proxy before it ends TLS"
)
GATEWAY_CERTIFICATE_KEY = env.optional_path(
    "LEASEHOLD_GATEWAY_CERTIFICATE_KEY", help="PEM file with the key of the certificate; unset: it is in the certificate's file"
)
GATEWAY_AUTHORITY = env.optional_path(
    "LEASEHOLD_GATEWAY_AUTHORITY",
    help="PEM file with the authority of the gateway's certificate, for agents that join it; unset: those of the image",
)
GATEWAY_INTERNAL_LISTEN = env.text(
    "LEASEHOLD_GATEWAY_INTERNAL_LISTEN",
    "127.0.0.1:0",
    accepts="host:port",
    pattern=r"(\[[0-9a-f:]+\]|[^:\s]+):[0-9]{1,5}",
    help="address on which the gateway serves the web and worker processes, which reach connected agents there; port 0: any",
)
GATEWAY_INTERNAL_ADDRESS = env.text(
    "LEASEHOLD_GATEWAY_INTERNAL_ADDRESS",
    accepts="host:port",
    pattern=r"(\[[0-9a-f:]+\]|[^:\s]+):[0-9]{1,5}",
    help="address of this gateway for web and worker processes on other machines; unset: LEASEHOLD_GATEWAY_INTERNAL_LISTEN",
)
GATEWAY_INTERNAL_CERTIFICATE = env.optional_path(
    "LEASEHOLD_GATEWAY_INTERNAL_CERTIFICATE",
    help="PEM file with the certificate chain of the gateway's internal address; unset: its content is not encrypted",
)
GATEWAY_INTERNAL_CERTIFICATE_KEY = env.optional_path(
    "LEASEHOLD_GATEWAY_INTERNAL_CERTIFICATE_KEY",
    help="PEM file with the key of the internal certificate; unset: it is in the certificate's file",
)
GATEWAY_INTERNAL_AUTHORITY = env.optional_path(
    "LEASEHOLD_GATEWAY_INTERNAL_AUTHORITY",
    help="PEM file with the authority of internal certificates: all processes then reach gateways over TLS; unset: without",
)
GATEWAY_INTERNAL_NAME = env.text(
    "LEASEHOLD_GATEWAY_INTERNAL_NAME",
    accepts="host name",
    pattern=r"[A-Za-z0-9.-]+",
    help="name that the internal certificates of all gateways have; unset: each has the host of its internal address",
)

EGRESS_ALLOWED_NETWORKS = env.networks(
    "LEASEHOLD_EGRESS_ALLOWED_NETWORKS",
    help="private networks that domains of an allow list may resolve to, such as that of a registry; link-local, multicast and "
    "cloud metadata addresses are never allowed",
)

# --- terminals and previews -----------------------------------------------------------------------------------------
STREAM_HOST = env.text("LEASEHOLD_STREAM_HOST", "127.0.0.1", help="address on which the stream server of this host listens")
STREAM_PORT = env.integer(
    "LEASEHOLD_STREAM_PORT", 0, minimum=0, maximum=65535,
    help="port of the stream server, for terminals and previews; 0: a free one, the same after a restart if it is still free",
)  # fmt: skip
STREAM_URL = env.text(
    "LEASEHOLD_STREAM_URL",
    accepts="an http:// or https:// URL",
    pattern=r"https?://[^/\s]+\S*",
    help="public URL of the stream server of this host, behind a proxy; unset: its own address",
)
PREVIEW_DOMAIN = env.text(
    "LEASEHOLD_PREVIEW_DOMAIN",
    accepts="a domain whose names of one more label all lead to the stream server",
    pattern=r"[a-z0-9.-]{1,190}",
    help="each preview gets a host name below this domain, and so an origin of its own; unset: previews are paths",
)

# --- money --------------------------------------------------------------------------------------------------------
# Each grant reserves one of these amounts in every budget that applies to the lease, which bounds the overshoot of concurrent
# grants.
MINIMUM_TIME = env.duration("LEASEHOLD_MINIMUM_TIME", "1m", help="time that a budget in hours must have left per active lease")
MINIMUM_USD = env.decimal("LEASEHOLD_MINIMUM_USD", "0.01", help="amount that a budget in USD must have left per active lease")

# --- identity -----------------------------------------------------------------------------------------------------
IDENTITY_KEYS = env.keys(
    "LEASEHOLD_IDENTITY_KEYS",
    help="encrypt signing keys of agents and webhooks: the first encrypts, all decrypt; unset: derived from SECRET_KEY",
)

# --- sign-in to the console ---------------------------------------------------------------------------------------
SIGN_IN = sign_in.read()
AUTHENTICATION_BACKENDS = SIGN_IN.list_backends()
SESSION_COOKIE_AGE = int(SIGN_IN.max_age.total_seconds())
if SIGN_IN.second_factor != "off":
    INSTALLED_APPS = [*INSTALLED_APPS, *sign_in.SECOND_FACTOR_APPS]  # noqa: F405
    MIDDLEWARE = sign_in.insert_second_factor(MIDDLEWARE)  # noqa: F405
    UNFOLD = UNFOLD | {"ACCOUNT": {"navigation": sign_in.SECOND_FACTOR_NAVIGATION}}  # noqa: F405

# --- HTTP API -----------------------------------------------------------------------------------------------------
CREATES_PER_MINUTE = env.integer(
    "LEASEHOLD_CREATES_PER_MINUTE", 600, help="new leases per key and minute, as a token bucket; 0: no limit"
)
MAX_JOIN_WAIT = env.duration(
    "LEASEHOLD_MAX_JOIN_WAIT",
    "1m",
    help="maximum wait_seconds of a join, for a place in a full pool; clients repeat the request",
)
IDEMPOTENCY_TTL = env.duration(
    "LEASEHOLD_IDEMPOTENCY_TTL", "1d", help="retention of the response to a request with an Idempotency-Key"
)

METRICS_TOKEN = env.text(
    "LEASEHOLD_METRICS_TOKEN",
    help="bearer token of /metrics; unset: only a direct scrape from this host is answered, and none behind a proxy",
    secret=True,
    accepts="16 to 256 visible ASCII characters",
    pattern=r"[!-~]{16,256}",
)

OTLP_ENDPOINT = env.text(
    "LEASEHOLD_OTLP_ENDPOINT",
    accepts="an http:// or https:// URL",
    pattern=r"https?://[^/\s]+\S*",
    help="base URL of the receiver of traces (OTLP over HTTP), such as http://127.0.0.1:4318; needs the extra `traces`",
)

# --- processes ----------------------------------------------------------------------------------------------------
PROFILE = env.choice(
    "LEASEHOLD_PROFILE", "standard", ["standard", "small"],
    help="processes of `manage.py up`: standard forks web server, queue and egress proxy; small runs them as threads of one",
)  # fmt: skip
WEB_WORKERS = env.integer("LEASEHOLD_WEB_WORKERS", 2 if ON_POSTGRES else 1, minimum=1, maximum=256, help="web server processes")
WEB_THREADS = env.integer(
    "LEASEHOLD_WEB_THREADS", 16, minimum=2, maximum=1000,
    help="threads per web process; an exec occupies one while it runs, and a quarter is kept for short requests",
)  # fmt: skip
# Two thirds of the commands that all web processes together execute at once: one agent leaves room for others.
MAX_RUNS_PER_AGENT = env.integer(
    "LEASEHOLD_MAX_RUNS_PER_AGENT", max(1, WEB_WORKERS * compute_maximum(WEB_THREADS) * 2 // 3), minimum=1,
    help="open runs of one agent, over all its leases; unset: two thirds of the commands that all web processes run at once",
)  # fmt: skip
HEALTH_REPORT_SECONDS = 1.0  # for which /healthz and /readyz, which need no key, answer with the same report
DRAIN_DELAY_SECONDS = env.integer(
    "LEASEHOLD_DRAIN_DELAY_SECONDS", 0, minimum=0, help="seconds in which a stopping `up` accepts requests while /readyz fails"
)
DRAIN_TIMEOUT = env.duration(
    "LEASEHOLD_DRAIN_TIMEOUT", "30s", help="time that a stopping web server has to finish its requests, execs included"
)
QUEUE_WORKERS = env.integer(
    "LEASEHOLD_QUEUE_WORKERS", 2 if ON_POSTGRES else 1, minimum=1, maximum=256, help="queue worker threads (django-q2)"
)
LOG_FORMAT = env.choice("LEASEHOLD_LOG_FORMAT", "text", ["text", "json"], help="log format")
LOG_LEVEL = env.choice("LEASEHOLD_LOG_LEVEL", "INFO", ["DEBUG", "INFO", "WARNING", "ERROR"], help="minimum log level")

# --- static files and queue ---------------------------------------------------------------------------------------
STATIC_ROOT = STATE_DIR / "static"
STATIC_ROOT.mkdir(parents=True, exist_ok=True)  # whitenoise warns if it does not exist
STATICFILES_DIRS = [BASE_DIR / "templates" / "static"]

# Work that may outlast its task runs in threads (sandboxes/queue_threads.py), which the end of their worker interrupts. Workers
# are therefore replaced only above a memory limit, not after a number of tasks.
# A task is delivered at least once. retry > timeout x (queue_limit / workers + 1), because the retry time counts from the
# fetch of a task, not from its start. catch_up off: after an outage each schedule runs once, not once per missed interval.
# save_limit -1: successful tasks are not kept. To prune them, django-q2 would load and lock all of them after each task, and
# the workers of all hosts would wait for each other.
Q_CLUSTER = {
    "name": "leasehold",
    "orm": "default",
    "broker_class": "controlplane.worker.broker.DatabaseTimeBroker",
    "workers": QUEUE_WORKERS,
    "queue_limit": QUEUE_WORKERS,
    "timeout": 240,
    "retry": 600,
    "max_attempts": 3,
    "ack_failures": True,
    "catch_up": False,
    "recycle": 0,
    "max_rss": 1 << 20,  # KiB
    "save_limit": -1,
    "poll": 0.5,
    "label": "Queue",
}

LOGGING = logs.build_logging(LOG_FORMAT, LOG_LEVEL)
SECRETS = env.list_secrets()  # removed from messages and logs
