"""System checks for combinations of settings that are invalid although each value is valid."""

import os
from collections.abc import Sequence
from math import ceil
from typing import Any
from urllib.parse import urlsplit

from django.apps import AppConfig
from django.conf import settings
from django.contrib.admin.checks import check_admin_app
from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError
from django.urls import get_resolver

from controlplane import env
from controlplane.public_address import get_host
from sandboxes import providers
from sandboxes.db import dialect, pooler
from sandboxes.hosts.directories import UnsafeDirectory, check_private_directory
from sandboxes.providers import load_class
from sandboxes.providers.engine_reports import SetupProblem
from sandboxes.providers.errors import ProviderError
from sandboxes.providers.kubernetes import configuration as kubernetes
from sandboxes.providers.registry import DEVELOPMENT_PROVIDERS, PROVIDERS
from sandboxes.providers.remote.configuration import find_missing_variable, get_configuration
from sandboxes.state import mounts

CONFIGURATION = "configuration"  # tag of the checks that long-running commands require: they load no pages of the console
LONG_RUNNING = (CONFIGURATION, Tags.caches, Tags.compatibility, Tags.files, Tags.security)  # those of such a command
ENGINE = "engine"  # tag of the check that asks the engine: check --deploy
WILDCARD_HOSTS = ("0.0.0.0", "[::]")  # noqa: S104 - compared, not bound
LOOPBACK_HOSTS = ("127.", "localhost:", "[::1]")
SECOND_LEVEL_LABELS = ("ac", "co", "com", "edu", "gov", "ne", "net", "or", "org")  # below which a country registers domains
MAX_SOCKET_PATH_BYTES = 107  # limit of the kernel, without the terminating NUL
MAX_SOCKET_NAME_BYTES = len("/egress/s/16383/llm.sock")  # longest socket path, relative to RUNTIME_DIR


@register(Tags.admin)
def check_admin_pages(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Check the admin pages once urls.py has loaded them. Django's own check may run before."""
    get_resolver().url_patterns  # noqa: B018 - loads the URL configuration
    return check_admin_app(app_configs)


@register(CONFIGURATION)
def check_queue_retry(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Require a retry time in which a fetched task can wait, run and time out; otherwise the queue runs it twice."""
    queue: dict[str, Any] = settings.Q_CLUSTER
    longest = queue["timeout"] * (ceil(queue["queue_limit"] / queue["workers"]) + 1)
    if queue["retry"] > longest:
        return []
    return [Error(f"Q_CLUSTER: retry must be above {longest}, or tasks run twice.", id="leasehold.E001")]


@register(CONFIGURATION)
def check_database_pooler(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Refuse a pooler in transaction mode that is not declared: it gives one client's prepared statements to another."""
    if not pooler.is_undeclared():
        return []
    hint = "Set LEASEHOLD_DATABASE_POOLER=transaction, or pool_mode=session in the pooler."
    return [Error(pooler.UNDECLARED, hint=hint, id="leasehold.E019")]


@register(CONFIGURATION)
def check_database_connections(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Compare the connections that the processes of this host may use with those of the server."""
    try:
        usable = dialect.count_usable_connections()
    except DatabaseError:
        return []  # reported by the command itself
    needed = count_database_connections()
    if usable is None or needed <= usable:
        return []
    message = f"The processes of this host may use {needed} connections at once, and PostgreSQL has {usable} for them."
    return [Warning(message, hint="Raise max_connections, or lower LEASEHOLD_DATABASE_CONNECTIONS.", id="leasehold.W012")]


def count_database_connections() -> int:
    """Return the maximum number of connections of the processes that `manage.py up` starts. See docs/operations.md."""
    web, queue, egress = ceil(settings.WEB_THREADS * 7 / 4) + 4, settings.QUEUE_WORKERS + 4, 9
    bound = settings.DATABASE_CONNECTIONS or web + queue + egress
    if settings.PROFILE == "small":
        return int(min(web + queue + egress, bound))
    return int(min(web, bound) * settings.WEB_WORKERS + min(queue, bound) + min(egress, bound))


@register(CONFIGURATION)
def check_isolation(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    if settings.SANDBOX_PROVIDER not in DEVELOPMENT_PROVIDERS or settings.DEBUG or settings.ALLOW_UNISOLATED:
        return []
    return [
        Error(
            f"SANDBOX_PROVIDER={settings.SANDBOX_PROVIDER} does not isolate, and DEBUG is off.",
            hint="Use docker, or set LEASEHOLD_ALLOW_UNISOLATED=1.",
            id="leasehold.E002",
        )
    ]


@register(CONFIGURATION)
def check_provider_packages(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Check SANDBOX_PROVIDER. The provider of a pool is checked when the pool first needs a sandbox."""
    if settings.SANDBOX_PROVIDER == "auto":
        return []
    try:
        load_class(settings.SANDBOX_PROVIDER)
    except ImproperlyConfigured as error:
        return [Error(str(error), hint=PROVIDERS[settings.SANDBOX_PROVIDER].install_command, id="leasehold.E007")]
    return []


@register(CONFIGURATION)
def check_provider_key(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Check that the credentials for the vendor behind SANDBOX_PROVIDER are set."""
    if settings.SANDBOX_PROVIDER not in settings.REMOTE_PROVIDERS:
        return []
    try:
        get_configuration(settings.SANDBOX_PROVIDER)
    except ImproperlyConfigured as error:
        return [Error(str(error), hint=f"Set {find_missing_variable(settings.SANDBOX_PROVIDER)}.", id="leasehold.E008")]
    return []


@register(CONFIGURATION)
def check_kubernetes(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Check that sandboxes of the default provider can join the gateway."""
    if settings.SANDBOX_PROVIDER != "kubernetes" or not (variable := kubernetes.find_missing_variable()):
        return []
    message = f"SANDBOX_PROVIDER=kubernetes needs {variable}, which is not set: the agents of sandboxes join the gateway."
    return [Error(message, hint=f"Set {variable}. See docs/kubernetes.md.", id="leasehold.E009")]


@register(CONFIGURATION)
def check_gateway(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Warn if agents in remote sandboxes would have no models."""
    if settings.SANDBOX_PROVIDER not in settings.REMOTE_PROVIDERS or settings.GATEWAY_URL:
        return []
    message = (
        f"LEASEHOLD_GATEWAY_URL is unset: sandboxes of {settings.SANDBOX_PROVIDER} have no models. Commands and files work."
    )
    hint = "Commands and files work. Serve the gateway and set its public address: docs/providers.md, Models."
    return [Warning(message, hint=hint, id="leasehold.W002")]


@register(CONFIGURATION)
def check_internal_address(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Require an address by which other machines reach a gateway that listens on all addresses of its own."""
    host = settings.GATEWAY_INTERNAL_LISTEN.rpartition(":")[0]
    if not settings.GATEWAY_LISTEN or host not in WILDCARD_HOSTS or settings.GATEWAY_INTERNAL_ADDRESS:
        return []
    message = f"LEASEHOLD_GATEWAY_INTERNAL_LISTEN={settings.GATEWAY_INTERNAL_LISTEN} is no address that others can connect to."
    return [Error(message, hint="Set LEASEHOLD_GATEWAY_INTERNAL_ADDRESS.", id="leasehold.E010")]


@register(CONFIGURATION)
def check_internal_tls(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Require both sides of TLS of a gateway's internal port: a gateway also connects to others. Warn without TLS."""
    certificate, authority = settings.GATEWAY_INTERNAL_CERTIFICATE, settings.GATEWAY_INTERNAL_AUTHORITY
    if not settings.GATEWAY_LISTEN:
        return []
    if bool(certificate) != bool(authority):
        missing = "LEASEHOLD_GATEWAY_INTERNAL_" + ("AUTHORITY" if certificate else "CERTIFICATE")
        message = f"{missing} is unset: the internal port has TLS on one side only."
        return [Error(message, hint=f"Set {missing}, or neither. See docs/providers.md.", id="leasehold.E012")]
    if not certificate:
        is_local = settings.GATEWAY_INTERNAL_LISTEN.startswith(LOOPBACK_HOSTS)
        message = f"LEASEHOLD_GATEWAY_INTERNAL_LISTEN={settings.GATEWAY_INTERNAL_LISTEN} is not encrypted."
        hint = "Set LEASEHOLD_GATEWAY_INTERNAL_CERTIFICATE and LEASEHOLD_GATEWAY_INTERNAL_AUTHORITY."
        return [] if is_local else [Warning(message, hint=hint, id="leasehold.W003")]
    return []


@register(CONFIGURATION)
def check_shared_state(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Refuse a control plane in a cluster whose state would be lost with its Pod."""
    if settings.SANDBOX_PROVIDER != "kubernetes" or kubernetes.SERVICE_HOST_VARIABLE not in os.environ or settings.DEBUG:
        return []
    problems = []
    if not settings.ON_POSTGRES:
        problems.append(("DATABASE_URL is SQLite", "Set DATABASE_URL to a PostgreSQL database."))
    if settings.STORAGE_BACKEND == "filesystem":
        problems.append(("STORAGE_BACKEND=filesystem", "Set STORAGE_BACKEND=s3 and the variables of the bucket."))
    return [
        Error(f"{problem}, and this process runs in a cluster: its Pods share no directory.", hint=hint, id="leasehold.E011")
        for problem, hint in problems
    ]


@register(ENGINE, deploy=True)
def check_engine(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Ask the engine of the default provider whether it is configured. Not part of the other checks, which make no calls.

    The checks of the configuration have already reported a provider that cannot be used."""
    name = settings.SANDBOX_PROVIDER
    try:
        problems = providers.get_provider(name).find_setup_problems() if name in PROVIDERS else []
    except ImproperlyConfigured:
        return []
    except ProviderError as error:
        hint = "Check its address and credentials, and repeat: manage.py check --deploy --tag engine."
        return [Warning(f"The engine of the {name} provider was not checked: {error}", hint=hint, id="leasehold.W004")]
    return [_describe_problem(problem) for problem in problems]


def _describe_problem(problem: SetupProblem) -> CheckMessage:
    hint = f"Add to the Role, see docs/kubernetes.md:\n{problem.solution}"
    if problem.prevents_starts:
        return Error(problem.message, hint=hint, id="leasehold.E013")
    return Warning(problem.message, hint=hint, id="leasehold.W005")


def list_engine_problems() -> list[str]:
    """Return the lines to print at the start of a process about the engine. They prevent no start: the API works without it."""
    return [line for message in check_engine(None) for line in str(message).splitlines()]


@register(CONFIGURATION)
def check_exec_timeouts(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    limit = settings.EXEC_TIMEOUT_MOST
    names = [name for name in ("EXEC_TIMEOUT", "TURN_TIMEOUT") if getattr(settings, name) > limit]
    return [Error(f"LEASEHOLD_{name} exceeds LEASEHOLD_EXEC_TIMEOUT_MOST.", id="leasehold.E003") for name in names]


@register(CONFIGURATION)
def check_socket_paths(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    limit = MAX_SOCKET_PATH_BYTES - MAX_SOCKET_NAME_BYTES
    if len(str(settings.RUNTIME_DIR.absolute()).encode()) <= limit:
        return []
    return [
        Error(f"LEASEHOLD_RUNTIME_DIR exceeds {limit} bytes, so the paths of its sockets are too long.", id="leasehold.E004")
    ]


@register(CONFIGURATION)
def check_runtime_directory(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Check an existing directory only. The first use creates it with the same check."""
    try:
        check_private_directory(settings.RUNTIME_DIR)
    except FileNotFoundError:
        return []
    except (UnsafeDirectory, OSError) as error:
        return [Error(str(error), id="leasehold.E006")]
    return []


@register(CONFIGURATION)
def check_data_mount(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Check the default mode of new agents only. Commands of an agent that already uses mount mode fail with the reason."""
    if settings.DATA_KEEPING != "mount" or not (missing := mounts.find_missing_requirement()):
        return []
    return [
        Error(
            f"LEASEHOLD_DATA=mount is unavailable: {missing}.",
            hint="Alternatively use LEASEHOLD_DATA=sync.",
            id="leasehold.E005",
        )
    ]


@register(CONFIGURATION, deploy=True)
def check_preview_domain(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Require a site of its own for previews: a page in a sandbox sets cookies for all hosts of its site."""
    if not settings.PREVIEW_DOMAIN:
        return []
    stream_host = urlsplit(settings.STREAM_URL).hostname or ""
    names = [name for name in (*settings.ALLOWED_HOSTS, stream_host) if find_site(name)]
    shared = [name for name in names if find_site(name) == find_site(settings.PREVIEW_DOMAIN)]
    if not shared:
        return []
    message = f"LEASEHOLD_PREVIEW_DOMAIN and {shared[0]} are of one site: a page in a sandbox can set cookies of the console."
    return [Error(message, hint="Use a registered domain that no other service uses.", id="leasehold.E014")]


@register(CONFIGURATION, deploy=True)
def check_public_url(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Require a stated public address, and one scheme for all that belongs to it."""
    if not settings.PUBLIC_URL:
        if settings.DEBUG:
            return []
        message = (
            "LEASEHOLD_PUBLIC_URL is unset: behind a TLS proxy signed URLs are http:// and the console's cookies not Secure."
        )
        hint = "Set it to the address of the console, such as https://leasehold.example.com. See docs/operations.md, TLS."
        return [Error(message, hint=hint, id="leasehold.E015")]
    if not settings.PUBLIC_URL.startswith("https://"):
        if get_host(settings.PUBLIC_URL).startswith(("127.", "localhost", "[::1]")):
            return []
        message = f"LEASEHOLD_PUBLIC_URL={settings.PUBLIC_URL} is not encrypted: keys, cookies and signed URLs can be read."
        return [Warning(message, hint="Put a TLS proxy in front. See docs/operations.md, TLS.", id="leasehold.W007")]
    plain = [origin for origin in settings.CSRF_TRUSTED_ORIGINS if not origin.startswith("https://")]
    plain += [settings.STREAM_URL] if settings.STREAM_URL.startswith("http://") else []
    return [
        Error(f"{url} is http:// and LEASEHOLD_PUBLIC_URL is https://.", hint="Use https://.", id="leasehold.E015")
        for url in plain
    ]


def find_site(host: str) -> str:
    """Return the last labels of a name that are its site: two, or three as in example.co.uk. "" for an address or one label."""
    labels = host.lower().strip(".").split(".")
    if len(labels) < 2 or labels[-1].isdigit() or ":" in host:
        return ""
    is_second_level = len(labels[-1]) == 2 and labels[-2] in SECOND_LEVEL_LABELS
    return ".".join(labels[-3:] if is_second_level else labels[-2:])


@register(CONFIGURATION, deploy=True)
def check_env_file(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    if env.ENV_FILE is None or not env.ENV_FILE.exists() or not env.ENV_FILE.stat().st_mode & 0o077:
        return []
    message = f"Other users of this machine may read {env.ENV_FILE}: with SECRET_KEY they can sign URLs of terminals and files."
    return [Warning(message, hint=f"Run: chmod 600 {env.ENV_FILE}", id="leasehold.W006")]


@register(CONFIGURATION, deploy=True)
def check_identity_keys(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    if settings.IDENTITY_KEYS:
        return []
    message = "LEASEHOLD_IDENTITY_KEYS is unset: signing keys of agents are encrypted under a key derived from SECRET_KEY."
    return [
        Warning(
            message,
            hint="They cannot be decrypted after a change of SECRET_KEY. See docs/security.md, Secrets.",
            id="leasehold.W001",
        )
    ]
