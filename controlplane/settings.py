"""Settings, all of them from the environment (env.py says how); `manage.py config` prints what is in force."""

import os
import re
from pathlib import Path
from typing import Any

import structlog
from django.core.exceptions import ImproperlyConfigured
from django.templatetags.static import static
from django.urls import reverse_lazy

from controlplane import env

BASE_DIR = env.BASE_DIR

# --- who we are ---------------------------------------------------------------------------------------------------
DEBUG = env.boolean("DEBUG", False, help="development: lax hosts, and the process provider without asking")
SECRET_KEY = env.text("SECRET_KEY", help="signs sessions and queued tasks; any long random text", secret=True)
if not SECRET_KEY:
    if not DEBUG:
        raise ImproperlyConfigured(
            "SECRET_KEY is not set. It takes any long random text. `make install` writes one into .env; "
            "in production give it in the environment."
        )
    SECRET_KEY = "for-development-only-because-DEBUG-is-on"  # noqa: S105
ALLOWED_HOSTS = env.string_list("ALLOWED_HOSTS", "127.0.0.1,localhost,[::1]", help="host names this server answers to")
CSRF_TRUSTED_ORIGINS = env.string_list("CSRF_TRUSTED_ORIGINS", "", help="origins of the admin behind a proxy, with scheme")
STATE_DIR = Path(env.text("LEASEHOLD_STATE_DIR", str(BASE_DIR / "var"), help="SQLite file, process sandboxes, stored state"))
STATE_DIR.mkdir(mode=0o700, parents=True, exist_ok=True)
_default_runtime_dir = str(STATE_DIR / "run")
RUNTIME_DIR = Path(
    env.text(
        "LEASEHOLD_RUNTIME_DIR",
        _default_runtime_dir if len(_default_runtime_dir) <= 70 else f"/tmp/leasehold-{os.getuid()}",  # noqa: S108 - made with mode 0700
        help="unix sockets; it outlives a restart of the host, and is short, since a socket's path has 108 bytes",
    )
)

INSTANCE = env.text(
    "LEASEHOLD_INSTANCE", help="names this group of processes in what it claims; `manage.py up` gives each start a new one"
)

# --- database -----------------------------------------------------------------------------------------------------
_database = env.database(
    "DATABASE_URL", f"sqlite:///{BASE_DIR / 'var' / 'leasehold.sqlite3'}", help="SQLite when unset, PostgreSQL in production"
)
ON_POSTGRES = _database["ENGINE"].endswith("postgresql")
_options: dict[str, Any] = _database.setdefault("OPTIONS", {})
if ON_POSTGRES:
    _options.setdefault("connect_timeout", 4)  # seconds: a probe is answered also when the database is out of reach
    _options.setdefault("server_side_binding", True)
    # Only together with the line above does it save the planning. Not 0: a migration may hold several commands in one
    # statement, and that cannot be prepared.
    _options.setdefault("prepare_threshold", 1)
    _database |= {"CONN_MAX_AGE": 600, "CONN_HEALTH_CHECKS": True}
else:
    # IMMEDIATE: a transaction that reads, then writes, otherwise fails at once under load and no timeout helps.
    _options |= {
        "transaction_mode": "IMMEDIATE",
        "timeout": 20,
        "init_command": "PRAGMA journal_mode=WAL;PRAGMA synchronous=NORMAL;PRAGMA cache_size=-20000;"
        "PRAGMA journal_size_limit=27103364",
    }
    _database |= {"CONN_MAX_AGE": 600}
    if _database["NAME"] != ":memory:":
        Path(_database["NAME"]).parent.mkdir(parents=True, exist_ok=True)
DATABASES = {"default": _database}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# --- sandboxes ----------------------------------------------------------------------------------------------------
SANDBOX_PROVIDER = env.choice(
    "SANDBOX_PROVIDER", "auto", ["auto", "docker", "process", "memory"],
    help="where sandboxes run; auto: docker if a daemon answers, else process, which does not isolate",
)  # fmt: skip
ALLOW_UNISOLATED = env.boolean(
    "LEASEHOLD_ALLOW_UNISOLATED", False, help="run the process provider although DEBUG is off: agents get this user's rights"
)
if SANDBOX_PROVIDER in ("process", "memory") and not (DEBUG or ALLOW_UNISOLATED):
    raise ImproperlyConfigured(
        f"SANDBOX_PROVIDER={SANDBOX_PROVIDER} does not isolate and DEBUG is off. It takes docker or auto here; "
        "LEASEHOLD_ALLOW_UNISOLATED=1 overrides this."
    )
SANDBOX_IMAGE = env.text("LEASEHOLD_SANDBOX_IMAGE", "leasehold-sandbox:latest", help="image of new sandboxes")
DOCKER_RUNTIME = env.text(
    "LEASEHOLD_DOCKER_RUNTIME",
    help="of new Docker sandboxes, such as runsc or kata-runtime; the daemon has to have it; unset: the daemon's default",
)
SANDBOX_START_TIMEOUT = env.duration(
    "LEASEHOLD_SANDBOX_TIMEOUT_SECONDS", "180", help="a sandbox that is not ready by then is given up"
)
SANDBOX_MEMORY_MIB = env.integer("LEASEHOLD_SANDBOX_MEMORY_MIB", 512, least=16, help="memory of a sandbox in a new pool")
SANDBOX_MILLICPUS = env.integer("LEASEHOLD_SANDBOX_MILLICPUS", 1000, least=50, help="thousandths of a CPU, in a new pool")
SANDBOX_PIDS = env.integer("LEASEHOLD_SANDBOX_PIDS", 256, least=16, help="processes in a sandbox, in a new pool")
SANDBOX_SLEEP_AFTER = env.duration(
    "SANDBOX_SLEEP_AFTER", "5m", help="sleep_after of a lease when neither the request nor its environment type says one"
)
MAX_SANDBOXES = env.integer("LEASEHOLD_MAX_SANDBOXES", 1000, least=1, help="capacity of a new pool")
MAX_SANDBOXES_PER_AGENT = env.integer(
    "LEASEHOLD_MAX_SANDBOXES_PER_AGENT", 0, help="what an agent may hold at once in a pool that says nothing else; 0: no limit"
)
IDLE_TIMEOUT = env.duration("LEASEHOLD_IDLE_TIMEOUT", "30m", help="an unused sandbox sleeps after this, unless its lease says")
COLD_TTL = env.duration("LEASEHOLD_COLD_TTL", "2h", help="a sandbox asleep for this long gives up its local files and place")
DESTROY_TRIES = env.integer("LEASEHOLD_DESTROY_TRIES", 8, least=1, help="failed destroys before an operator is asked")
ORPHAN_GRACE = env.duration("LEASEHOLD_ORPHAN_GRACE", "2m", help="age at which a listed sandbox without a row is destroyed")

# --- stored state -------------------------------------------------------------------------------------------------
KEEP_SNAPSHOTS = env.integer(
    "LEASEHOLD_KEEP_SNAPSHOTS", 2, least=1, help="copies of a workspace that are kept while its lease lives, the newest first"
)
KEEP_ASKED_SNAPSHOTS = env.integer(
    "LEASEHOLD_KEEP_ASKED_SNAPSHOTS", 10, least=1, help="of a lease that somebody asked for, kept beside those"
)
DATA_KEEPING = env.choice(
    "LEASEHOLD_DATA", "sync", ["sync", "mount"],
    help="how /data of a new agent gets into sandboxes: sync copies what changed, around every use; mount has s3fs mount it",
)  # fmt: skip
DATA_MOST_FILES = env.integer(
    "LEASEHOLD_DATA_MOST_FILES", 20_000, least=1, help="files and directories an agent may keep in /data"
)
DATA_MOST_BYTES = env.integer("LEASEHOLD_DATA_MOST_MIB", 1024, least=1, help="what an agent may keep in /data, in MiB") << 20
KEEP_STATE = env.duration("LEASEHOLD_KEEP_STATE", "7d", help="how long what was stored outlives the end of its lease")
_backend = env.choice(
    "STORAGE_BACKEND", "filesystem", ["filesystem", "s3", "r2", "cloudflare_kv", "kv"],
    help="where stored state is kept; r2 is another name of s3, and kv of cloudflare_kv",
)  # fmt: skip
STORAGE_BACKEND = {"r2": "s3", "kv": "cloudflare_kv"}.get(_backend, _backend)
STORAGE_MODE = env.choice(
    "STORAGE_MODE", "standard", ["standard", "journaled"], help="how chat history, artifacts and the audit log are kept"
)
STORAGE_SYNC = env.boolean(
    "STORAGE_SYNC", STORAGE_BACKEND == "filesystem",
    help="journaled on the filesystem: a record is on the disk before it is acknowledged; off: it outlives our processes, "
    "not a crash of the machine",
)  # fmt: skip
STORAGE_DIR = Path(
    env.text("LEASEHOLD_STORAGE_DIR", str(STATE_DIR / "store"), help="of the filesystem backend; share it between machines")
)
STORAGE_PREFIX = env.text(
    "LEASEHOLD_STORAGE_PREFIX",
    accepts="up to 64 letters, digits and . _ - /, with / at the end",
    help="before every key in the bucket or namespace, where several installations share it",
)
S3_BUCKET = env.text("R2_BUCKET_BINDING", help="name of the bucket, on R2 or on any other S3")
S3_ENDPOINT = env.text(
    "LEASEHOLD_S3_ENDPOINT", accepts="an http:// or https:// URL", help="of R2: https://ACCOUNT.r2.cloudflarestorage.com"
)
S3_REGION = env.text("LEASEHOLD_S3_REGION", "auto", help="auto for R2; with a real region and no endpoint it is AWS")
S3_ACCESS_KEY_ID = env.text("LEASEHOLD_S3_ACCESS_KEY_ID", help="of a key that may read, write, list and delete in the bucket")
S3_SECRET_ACCESS_KEY = env.text("LEASEHOLD_S3_SECRET_ACCESS_KEY", help="of that key", secret=True)
KV_NAMESPACE = env.text("KV_NAMESPACE_BINDING", help="id of the KV namespace: 32 hexadecimal digits")
KV_ACCOUNT_ID = env.text("LEASEHOLD_KV_ACCOUNT_ID", help="of the Cloudflare account that has the namespace")
KV_API_TOKEN = env.text("LEASEHOLD_KV_API_TOKEN", help="of Cloudflare, with the right to edit Workers KV", secret=True)
KV_API_URL = env.text(
    "LEASEHOLD_KV_API_URL", "https://api.cloudflare.com/client/v4", accepts="an http:// or https:// URL", help="of Cloudflare"
)
_required_variables = {
    "filesystem": [],
    "s3": ["R2_BUCKET_BINDING", "LEASEHOLD_S3_ACCESS_KEY_ID", "LEASEHOLD_S3_SECRET_ACCESS_KEY"]
    + ["LEASEHOLD_S3_ENDPOINT"] * (S3_REGION == "auto"),
    "cloudflare_kv": ["KV_NAMESPACE_BINDING", "LEASEHOLD_KV_ACCOUNT_ID", "LEASEHOLD_KV_API_TOKEN", "LEASEHOLD_KV_API_URL"],
}
for _knob in (env.ENV_VARIABLES[_name] for _name in _required_variables[STORAGE_BACKEND]):
    if not _knob.value:
        raise ImproperlyConfigured(f"{_knob.name} is not set, and STORAGE_BACKEND={_backend} needs it. ({_knob.help})")
for _name, _pattern in {
    "LEASEHOLD_S3_ENDPOINT": r"(https?://[^/\s]+\S*)?",
    "LEASEHOLD_KV_API_URL": r"https?://[^/\s]+\S*",
    "LEASEHOLD_STORAGE_PREFIX": r"(?=.{0,64}$)([A-Za-z0-9_-][A-Za-z0-9_.-]*/)*",
}.items():
    if not re.fullmatch(_pattern, (_knob := env.ENV_VARIABLES[_name]).value):
        raise ImproperlyConfigured(f"{_name}={_knob.value!r} is not accepted. It takes {_knob.accepts}. ({_knob.help})")
if STORAGE_BACKEND == "cloudflare_kv" and STORAGE_MODE == "journaled":
    raise ImproperlyConfigured(
        f"STORAGE_MODE=journaled does not go with STORAGE_BACKEND={_backend}: KV takes one write a second of a key, and a "
        "journal writes more often. Use filesystem or s3, or STORAGE_MODE=standard."
    )
if STORAGE_BACKEND != "filesystem" and STORAGE_SYNC:
    raise ImproperlyConfigured(
        f"STORAGE_SYNC=1 does not go with STORAGE_BACKEND={_backend}: nothing is appended to there, so there is "
        "nothing to bring to the disk; the service answers when it has the value. Leave it unset."
    )

# --- runs ---------------------------------------------------------------------------------------------------------
EXEC_TIMEOUT = env.duration("LEASEHOLD_EXEC_TIMEOUT", "60s", help="of an exec that names none")
EXEC_TIMEOUT_MOST = env.duration("LEASEHOLD_EXEC_TIMEOUT_MOST", "1h", help="the longest timeout an exec may ask for")
EXEC_OUTPUT_CAP = env.integer(
    "LEASEHOLD_EXEC_OUTPUT_CAP_BYTES",
    1 << 20,
    least=1024,
    most=64 << 20,
    help="kept of stdout and of stderr; the rest is read and dropped",
)
RUN_OUTPUT_KEPT = env.integer(
    "LEASEHOLD_RUN_OUTPUT_KEPT_BYTES", 64 << 10, least=64 << 10, most=16 << 20, help="of each stream stored with the Run row"
)
RUN_MEMORY_MOST_MIB = env.integer(
    "LEASEHOLD_RUN_MEMORY_MOST_MIB", 4096, least=16, help="the most memory that a one-shot run may ask for"
)
TURN_TIMEOUT = env.duration("LEASEHOLD_TURN_TIMEOUT", "60s", help="a turn that takes longer is skipped")

# --- the model that agents think with -----------------------------------------------------------------------------
LLM_URL = env.text(
    "LEASEHOLD_LLM_URL",
    accepts="an http:// or https:// URL",
    help="base of an OpenAI-compatible API such as LiteLLM's, ending in /v1; unset: the built-in offline policy answers",
)
LLM_API_KEY = env.text("LEASEHOLD_LLM_API_KEY", secret=True, help="added to calls on their way out; never enters a sandbox")
LLM_MODEL = env.text("LEASEHOLD_LLM_MODEL", "gpt-4o-mini", help="what turns ask for, and what a call means that says `default`")
LLM_MODELS = env.string_list(
    "LEASEHOLD_LLM_MODELS", "", help="models that may be called, * matching any part; LLM_MODEL always may"
)
LLM_TIMEOUT = env.duration("LEASEHOLD_LLM_TIMEOUT", "10m", help="the longest that one model call may take, streams included")
LLM_RECORDS = env.text("LEASEHOLD_LLM_RECORDS", help="file to which LiteLLM's callback appends what calls cost; unset: none")
RELAY_URL = env.text(
    "LEASEHOLD_RELAY_URL",
    accepts="a ws:// or wss:// URL",
    help="what /relay/ leads to, as a WebSocket; unset: sandboxes have no relay",
)
RELAY_AUD = env.text("LEASEHOLD_RELAY_AUD", help="DID of the relay: for it agents' service tokens are made; unset: none are")
RELAY_LXM = env.text("LEASEHOLD_RELAY_LXM", "com.atproto.sync.subscribeRepos", help="method that these tokens are good for")
for _name, _pattern in {"LEASEHOLD_LLM_URL": r"(https?://[^/\s]+\S*)?", "LEASEHOLD_RELAY_URL": r"(wss?://[^/\s]+\S*)?"}.items():
    if not re.fullmatch(_pattern, (_knob := env.ENV_VARIABLES[_name]).value):
        raise ImproperlyConfigured(f"{_name}={_knob.value!r} is not accepted. It takes {_knob.accepts}. ({_knob.help})")

# --- the way out of sandboxes -------------------------------------------------------------------------------------
EGRESS_DIR = RUNTIME_DIR / "egress"
EGRESS_PROXY = env.choice(
    "LEASEHOLD_EGRESS_PROXY", "auto", ["auto", "nginx", "none"],
    help="what sandboxes talk to: nginx in a container of its own; none: ourselves; auto: nginx where the provider is docker",
)  # fmt: skip
EGRESS_IMAGE = env.text("LEASEHOLD_EGRESS_IMAGE", "leasehold-egress:latest", help="image of that container")
EGRESS_SLOTS = env.integer(
    "LEASEHOLD_EGRESS_SLOTS", 1024, least=1, most=16384,
    help="sandboxes that can have a way out at once, those of all pools together; more are not started",
)  # fmt: skip

# --- money --------------------------------------------------------------------------------------------------------
# Also what a grant reserves of each budget it counts against: so many leases at once cannot go further than it reaches.
MINIMUM_TIME = env.duration("LEASEHOLD_MINIMUM_TIME", "1m", help="what a budget in hours must have left for each active lease")
MINIMUM_USD = env.decimal("LEASEHOLD_MINIMUM_USD", "0.01", help="what a budget in USD must have left for each active lease")

# --- who agents are to others -------------------------------------------------------------------------------------
IDENTITY_KEYS = env.keys(
    "LEASEHOLD_IDENTITY_KEYS",
    help="encrypt agents' signing keys, and webhooks': the first encrypts, all decrypt; unset: one derived from SECRET_KEY",
)

# --- the API ------------------------------------------------------------------------------------------------------
CREATES_PER_MINUTE = env.integer(
    "LEASEHOLD_CREATES_PER_MINUTE", 600, help="new leases a key may ask for in a minute, as a token bucket; 0: no limit"
)
IDEMPOTENCY_TTL = env.duration("LEASEHOLD_IDEMPOTENCY_TTL", "1d", help="how long the answer to an Idempotency-Key is kept")

# --- processes ----------------------------------------------------------------------------------------------------
WEB_WORKERS = env.integer("LEASEHOLD_WEB_WORKERS", 2 if ON_POSTGRES else 1, least=1, help="web processes")
WEB_THREADS = env.integer("LEASEHOLD_WEB_THREADS", 16, least=1, help="threads of each: an exec holds one while it runs")
QUEUE_WORKERS = env.integer("LEASEHOLD_QUEUE_WORKERS", 2 if ON_POSTGRES else 1, least=1, help="django-q2 workers")
LOG_FORMAT = env.choice("LEASEHOLD_LOG_FORMAT", "text", ["text", "json"], help="text for a person, json for a machine")
LOG_LEVEL = env.choice("LEASEHOLD_LOG_LEVEL", "INFO", ["DEBUG", "INFO", "WARNING", "ERROR"], help="least level logged")

# --- Django -------------------------------------------------------------------------------------------------------
INSTALLED_APPS = [
    "unfold",
    "unfold.contrib.filters",
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django_q",
    "rest_framework",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "sandboxes",
    "billing",
    "leases",
    "controlplane",
]
MIDDLEWARE = [
    "controlplane.middleware.ProblemDocumentMiddleware",  # outermost: every API error is a problem document
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "controlplane.middleware.AdminSessionMiddleware",  # the next five do nothing under /api/: agents carry keys, not cookies
    "controlplane.middleware.AdminCommonMiddleware",
    "controlplane.middleware.AdminCsrfMiddleware",
    "controlplane.middleware.AdminAuthenticationMiddleware",
    "controlplane.middleware.AdminMessageMiddleware",
    "controlplane.middleware.ContentSecurityPolicyMiddleware",
]
ROOT_URLCONF = "controlplane.urls"
WSGI_APPLICATION = "controlplane.wsgi.application"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
USE_TZ = True
TIME_ZONE = "UTC"
LANGUAGE_CODE = "en"
FORMAT_MODULE_PATH = ["controlplane.formats"]
STATIC_URL = "/static/"
STATIC_ROOT = STATE_DIR / "static"
STATIC_ROOT.mkdir(parents=True, exist_ok=True)  # whitenoise warns of one that is not there
STATICFILES_DIRS = [BASE_DIR / "templates" / "static"]
WHITENOISE_USE_FINDERS = True  # a fresh clone serves the admin without a collectstatic
WHITENOISE_AUTOREFRESH = False
LOGIN_REDIRECT_URL = "admin:index"
AUTH_PASSWORD_VALIDATORS = [{"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator"}]
SESSION_COOKIE_HTTPONLY = CSRF_COOKIE_HTTPONLY = True
X_FRAME_OPTIONS = "DENY"
DATA_UPLOAD_MAX_MEMORY_SIZE = 80 << 20  # each view has its own, smaller limit and says so with a 413
CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}

REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": ["leases.api.authentication.KeyAuthentication"],
    "DEFAULT_PERMISSION_CLASSES": ["leases.api.permissions.HasKey"],
    "DEFAULT_PARSER_CLASSES": ["leases.api.parsers.JsonParser"],
    "DEFAULT_RENDERER_CLASSES": ["leases.api.renderers.JsonRenderer"],
    "DEFAULT_CONTENT_NEGOTIATION_CLASS": "leases.api.renderers.Negotiation",
    "DEFAULT_SCHEMA_CLASS": "leases.api.schema.ApiSchema",
    "EXCEPTION_HANDLER": "controlplane.errors.handle",
    "UNAUTHENTICATED_USER": None,
}
SPECTACULAR_SETTINGS = {
    "TITLE": "Leasehold",
    "VERSION": "1",
    "DESCRIPTION": "API to lease sandboxes to AI agents. Errors are problem documents (RFC 9457).",
    "OAS_VERSION": "3.1.1",
    "SERVE_INCLUDE_SCHEMA": False,
    "SERVE_PERMISSIONS": ["rest_framework.permissions.AllowAny"],
    "SERVE_AUTHENTICATION": [],
    "SCHEMA_PATH_PREFIX": "/api/v1",
    "COMPONENT_SPLIT_REQUEST": True,
    "SORT_OPERATIONS": False,
    "ENUM_NAME_OVERRIDES": {  # enums whose field names occur in several components
        "RunKindEnum": ["exec", "turn", "file", "process"],
        "StateEnum": "sandboxes.models.SandboxState",
        "ProcessStateEnum": "sandboxes.models.ProcessStatus",
        "OutcomeEnum": "sandboxes.models.RunOutcome",
        "CallOutcomeEnum": ["open", "ok", "failed", "cut", "refused", "lost"],
        "OnceOutcomeEnum": ["ok", "failed", "timeout", "oom_killed", "container_failed", "internal"],
    },
    "SWAGGER_UI_DIST": "SIDECAR",  # served locally, not from a CDN
    "SWAGGER_UI_FAVICON_HREF": "SIDECAR",
    "SWAGGER_UI_SETTINGS": {"deepLinking": True, "validatorUrl": None},  # null: no request to validator.swagger.io
}

# A task is delivered at least once. retry > timeout x (queue_limit / workers + 1): the clock of a retry starts when
# a task is fetched, not when it runs. catch_up off: after an outage each schedule runs once, not once a missed minute.
Q_CLUSTER = {
    "name": "leasehold",
    "orm": "default",
    "workers": QUEUE_WORKERS,
    "queue_limit": QUEUE_WORKERS,
    "timeout": 240,
    "retry": 600,
    "max_attempts": 3,
    "ack_failures": True,
    "catch_up": False,
    "recycle": 500,
    "save_limit": 100,
    "poll": 0.5,
    "label": "Queue",
}

UNFOLD = {
    "SITE_TITLE": "Leasehold",
    "SITE_HEADER": "Leasehold",
    "SITE_SUBHEADER": "sandboxes for agents",
    "SITE_SYMBOL": "deployed_code",
    "SITE_URL": None,
    "SHOW_VIEW_ON_SITE": False,
    "SHOW_HISTORY": True,
    "STYLES": [lambda request: static("leasehold/console.css")],
    "SITE_FAVICONS": [{"rel": "icon", "type": "image/svg+xml", "href": lambda request: static("leasehold/icon.svg")}],
    "SIDEBAR": {
        "show_search": False,
        "show_all_applications": False,
        "navigation": "controlplane.console.dashboard.navigation",
    },
    "TABS": "controlplane.console.dashboard.tabs",
    "ENVIRONMENT": "controlplane.console.dashboard.environment",
    "DASHBOARD_CALLBACK": "controlplane.console.dashboard.fleet",
}

# --- logs: one line each, no secrets: values of env, stdin and keys are never passed to a logger --------------------
_shared_processors: list[Any] = [
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
]
_renderer: Any = (
    structlog.processors.JSONRenderer() if LOG_FORMAT == "json" else structlog.dev.ConsoleRenderer(colors=False, pad_event_to=0)
)
structlog.configure(
    processors=[*_shared_processors, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
    logger_factory=structlog.stdlib.LoggerFactory(),
    wrapper_class=structlog.stdlib.BoundLogger,
    cache_logger_on_first_use=True,
)
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "ours": {
            "()": structlog.stdlib.ProcessorFormatter,
            "foreign_pre_chain": _shared_processors,
            "processors": [
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                _renderer,
            ],
        }
    },
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "ours"}},
    "root": {"handlers": ["stderr"], "level": LOG_LEVEL},
    "loggers": {
        "django-q": {"level": "WARNING"},  # else three lines for each task
        "django.request": {"level": "ERROR"},
        "django.db.backends": {"level": "INFO"},
    },
}
LOGIN_URL = reverse_lazy("admin:login")
