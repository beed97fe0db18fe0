"""Typed access to environment variables, one function per type.

An invalid value raises ImproperlyConfigured with the variable's name and the accepted values; there is no silent fallback.
A `.env` file beside manage.py is read, too. Variables of the process take precedence over the file.
Each function records the variable in ENV_VARIABLES, from which `manage.py config` prints value and source."""

import base64
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from difflib import get_close_matches
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from django.core.exceptions import ImproperlyConfigured
from environ import Env

from controlplane.env_file import read_env_file
from sandboxes.db import durations

BASE_DIR = Path(__file__).resolve().parent.parent
ACCEPTED_DURATION = f"{durations.ACCEPTED_FORMAT}; at most {durations.MAX_DURATION.days} days"
VARIABLE_PREFIXES = ("LEASEHOLD_", "SANDBOX_", "STORAGE_")


@dataclass(frozen=True)
class EnvVariable:
    """An environment variable: its definition and its current value."""

    name: str
    value: Any
    default: str
    source: str  # "environment", ".env" or "default"; with the alias that was read, if any
    accepts: str
    help: str
    secret: bool = False

    @property
    def display_value(self) -> str:
        """The value as text. A secret that is set is masked."""
        if self.secret and self.value:
            return "********"
        if isinstance(self.value, timedelta):
            return f"{self.value.total_seconds():g}s"
        if isinstance(self.value, list):
            return ",".join(map(str, self.value))
        return "" if self.value is None else str(self.value)


def convert_milliseconds(raw: str) -> str:
    """Return a duration in whole seconds, rounded up."""
    return f"{-(-int(raw) // 1000)}s"


# Names under which other control planes and agent frameworks have the same settings, with the conversion of their values. A
# variable's own name takes precedence.
ALIASES: Mapping[str, tuple[str, Callable[[str], str]]] = {
    "ASH_MAX_SANDBOXES": ("LEASEHOLD_MAX_SANDBOXES", str),
    "ASH_IDLE_TIMEOUT_MS": ("LEASEHOLD_IDLE_TIMEOUT", convert_milliseconds),
    "COLD_CLEANUP_TTL_MS": ("LEASEHOLD_COLD_TTL", convert_milliseconds),
    **{
        f"DEEPAGENTS_{name}": (f"LEASEHOLD_{name}", str)
        for name in (
            "SANDBOX_AUTO_STOP_MINUTES", "SANDBOX_AUTO_DELETE_MINUTES", "SANDBOX_IMAGE", "SANDBOX_TIMEOUT_SECONDS",
            "FALLBACK_TRIGGER_TOKENS", "FALLBACK_KEEP_MESSAGES",
        )
    },
}  # fmt: skip
T = TypeVar("T")
ENV_VARIABLES: dict[str, EnvVariable] = {}
PROCESS_VARIABLE_NAMES = frozenset(os.environ)
ENV_FILE = BASE_DIR / name if (name := os.environ.get("LEASEHOLD_ENV_FILE", ".env")) else None
if ENV_FILE:
    read_env_file(ENV_FILE, is_required="LEASEHOLD_ENV_FILE" in PROCESS_VARIABLE_NAMES)


def text(
    name: str, default: str = "", *, help: str, secret: bool = False, accepts: str = "text", pattern: str = r"(?s:.*)"
) -> str:
    """Read text that matches `pattern` completely, or is empty."""

    def cast(raw: str) -> str:
        if raw and not re.fullmatch(pattern, raw):
            raise ValueError
        return raw

    return _read_variable(name, cast, default, accepts, help, secret)


def boolean(name: str, default: bool, *, help: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    return _read_variable(
        name, lambda raw: words[raw.strip().lower()], str(int(default)), "1, 0, true, false, yes, no, on, off", help
    )


def optional_integer(name: str, *, help: str, minimum: int = 0, maximum: int = 10**9) -> int | None:
    """Read an integer; None if the variable is unset or empty."""

    def cast(raw: str) -> int | None:
        if raw and not minimum <= int(raw) <= maximum:
            raise ValueError
        return int(raw) if raw else None

    return _read_variable(name, cast, "", f"a whole number from {minimum} to {maximum}", help)


def integer(name: str, default: int, *, help: str, minimum: int = 0, maximum: int = 10**9) -> int:
    def cast(raw: str) -> int:
        if not minimum <= int(raw) <= maximum:
            raise ValueError
        return int(raw)

    return _read_variable(name, cast, str(default), f"a whole number from {minimum} to {maximum}", help)


def duration(name: str, default: str, *, help: str) -> timedelta:
    return _read_variable(name, durations.parse_duration, default, ACCEPTED_DURATION, help)


def optional_duration(name: str, *, help: str) -> timedelta | None:
    """Read a duration; None if the variable is unset or empty."""
    return _read_variable(name, lambda raw: durations.parse_duration(raw) if raw else None, "", ACCEPTED_DURATION, help)


def decimal(name: str, default: str, *, help: str) -> Decimal:
    def cast(raw: str) -> Decimal:
        value = Decimal(raw) if re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", raw, re.ASCII) else Decimal(0)
        if not value:
            raise ValueError
        return value

    return _read_variable(name, cast, default, "a decimal number above 0, with at most six decimal places", help)


def choice(name: str, default: str, options: Iterable[str], *, help: str) -> str:
    options = list(options)

    def cast(raw: str) -> str:
        if raw not in options:
            raise ValueError
        return raw

    return _read_variable(name, cast, default, "one of " + ", ".join(options), help)


def string_list(
    name: str, default: str, *, help: str, accepts: str = "a comma-separated list", pattern: str = r"(?s:.*)"
) -> list[str]:
    """Read parts separated by commas, each of which matches `pattern` completely."""

    def parse(raw: str) -> list[str]:
        parts = [part.strip() for part in raw.split(",") if part.strip()]
        if not all(re.fullmatch(pattern, part) for part in parts):
            raise ValueError
        return parts

    return _read_variable(name, parse, default, accepts, help)


def path(name: str, default: str, *, help: str) -> Path:
    """Read an absolute path: a relative one would depend on the directory in which each process was started."""
    return Path(_read_path(name, default, help))


def make_directory(name: str, directory: Path, *, mode: int = 0o777) -> None:
    """Make the directory of a variable, unless it exists. Raise ImproperlyConfigured if that fails."""
    try:
        directory.mkdir(mode=mode, parents=True, exist_ok=True)
    except OSError as error:
        raise ImproperlyConfigured(f"{name}: the directory {directory} cannot be made: {error.strerror}.") from None


def optional_path(name: str, *, help: str) -> str:
    """Read an absolute path; "" if the variable is unset or empty."""
    return _read_path(name, "", help)


def _read_path(name: str, default: str, help: str) -> str:
    def cast(raw: str) -> str:
        if (raw or default) and not os.path.isabs(raw):
            raise ValueError
        return raw

    return _read_variable(name, cast, default, "an absolute path", help)


def networks(name: str, *, help: str) -> list[IPv4Network | IPv6Network]:
    def parse(value: str) -> list[IPv4Network | IPv6Network]:
        return [ip_network(part.strip()) for part in value.split(",") if part.strip()]

    return _read_variable(name, parse, "", "networks such as 10.20.0.0/16, separated by commas", help)


def origin(name: str, *, help: str) -> str:
    """Read scheme, host and port, in lower case, without the default port; "" if the variable is unset or empty."""

    def cast(raw: str) -> str:
        if not raw:
            return ""
        if not re.fullmatch(r"https?://([a-z0-9]([a-z0-9.-]*[a-z0-9])?|\[[0-9a-f:.]+\])(:[0-9]+)?/?", raw.lower()):
            raise ValueError
        parts = urlsplit(raw.lower())  # raises ValueError for an invalid IPv6 address, and `port` for one above 65535
        port = parts.port if parts.port != {"http": 80, "https": 443}[parts.scheme] else None
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        return f"{parts.scheme}://{host}" + (f":{port}" if port is not None else "")

    return _read_variable(name, cast, "", "an http:// or https:// URL of a host, without user, path and query", help)


def keys(name: str, *, help: str) -> list[bytes]:
    """Read comma-separated keys of 32 bytes, each in standard or URL-safe base64."""

    def cast(raw: str) -> list[bytes]:
        parts = raw.translate(str.maketrans("-_", "+/")).split(",") if raw else []
        parsed = [base64.b64decode(part.strip(), validate=True) for part in parts]
        if any(len(key) != 32 for key in parsed):
            raise ValueError
        return parsed

    accepts = "keys of 32 bytes in base64, separated by commas (openssl rand -base64 32)"
    return _read_variable(name, cast, "", accepts, help, secret=True)


def database(name: str, default: str, *, help: str) -> dict[str, Any]:
    """Read Django connection settings from a URL. Only SQLite and PostgreSQL are supported."""

    def cast(raw: str) -> dict[str, Any]:
        parsed = dict(Env.db_url_config(raw))
        if parsed.get("ENGINE") not in ("django.db.backends.sqlite3", "django.db.backends.postgresql") or not parsed["NAME"]:
            raise ValueError
        is_file = parsed["ENGINE"].endswith("sqlite3") and parsed["NAME"] != ":memory:"
        if is_file and not os.path.isabs(parsed["NAME"]):
            raise ValueError
        return parsed

    accepts = "sqlite:////absolute/path, or postgres://user:password@host:port/name"
    return _read_variable(name, cast, default, accepts, help, secret=True)


def list_secrets() -> list[str]:
    """Return the values of all secret variables, for redaction: of a database its password, of keys each in base64."""
    secrets: list[str] = []
    for variable in ENV_VARIABLES.values():
        if not variable.secret or not variable.value:
            continue
        if isinstance(variable.value, dict):
            secrets.append(str(variable.value.get("PASSWORD") or ""))
        elif isinstance(variable.value, list):
            secrets += (base64.b64encode(key).decode() for key in variable.value)
        else:
            secrets.append(str(variable.value))
    return secrets


@dataclass(frozen=True)
class UnknownVariable:
    """A variable with one of VARIABLE_PREFIXES that nothing reads, and the name that was probably meant."""

    name: str
    suggestion: str = ""

    @property
    def is_mistake(self) -> bool:
        """Return whether the variable was meant for this program. Other programs have variables with the shorter prefixes."""
        return self.name.startswith("LEASEHOLD_") or bool(self.suggestion)

    def __str__(self) -> str:
        suggested = f"; did you mean {self.suggestion}?" if self.suggestion else "."
        return f"{self.name} is not a variable of Leasehold{suggested}"


def find_unknown_variables() -> list[UnknownVariable]:
    """Return the unknown variables with one of VARIABLE_PREFIXES, usually spelling mistakes. The settings must be loaded."""
    known = {*ENV_VARIABLES, *ALIASES}
    is_in_cluster = "KUBERNETES_SERVICE_HOST" in os.environ
    unknown = []
    for name in sorted(os.environ):
        if not name.startswith(VARIABLE_PREFIXES) or name in known or name in UNLISTED_VARIABLES:
            continue
        if is_in_cluster and SERVICE_LINK_PATTERN.fullmatch(name):
            continue
        matches = get_close_matches(name, ENV_VARIABLES, n=1, cutoff=0.8)
        unknown.append(UnknownVariable(name, matches[0] if matches else ""))
    return unknown


def require_known_variables() -> None:
    """Raise ImproperlyConfigured for variables that were meant for this program and that nothing reads."""
    if mistakes := [str(each) for each in find_unknown_variables() if each.is_mistake]:
        raise ImproperlyConfigured("\n".join(mistakes))


CLIENT_VARIABLES = {"LEASEHOLD_AGENT", "LEASEHOLD_API_KEY", "LEASEHOLD_URL"}  # of package `leasehold`, in a shared environment
ADAPTER_VARIABLES = {"LEASEHOLD_KEY", "LEASEHOLD_RECORDS"}  # of leases/adapters, and of the LiteLLM callback
# Of the scripts in .ci and of the tests; of a process sandbox, in which an agent may run a command of this program.
TEST_VARIABLES = {"LEASEHOLD_CACHE", "LEASEHOLD_CANARY", "LEASEHOLD_REQUIRE_SERVICES", "LEASEHOLD_TEST_PROVIDER"}
SANDBOX_VARIABLES = {"LEASEHOLD_RUN", "LEASEHOLD_SANDBOX", "LEASEHOLD_WORKSPACE"}
UNLISTED_VARIABLES = {"LEASEHOLD_ENV_FILE"} | CLIENT_VARIABLES | ADAPTER_VARIABLES | TEST_VARIABLES | SANDBOX_VARIABLES
# Variables that a cluster sets in a Pod for each Service of the namespace, such as one that is named `leasehold`.
SERVICE_LINK_PATTERN = re.compile(
    r"[A-Z0-9_]+_(?:SERVICE_HOST|SERVICE_PORT(?:_[A-Z0-9_]+)?|PORT(?:_[0-9]+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)?)"
)


def _read_variable(name: str, cast: Callable[[str], T], default: str, accepts: str, help: str, secret: bool = False) -> T:
    given, convert = _find_given_name(name)
    raw = os.environ.get(given)
    source = "default" if raw is None else "environment" if given in PROCESS_VARIABLE_NAMES else ".env"
    try:
        value = cast(default if raw is None else convert(raw))
    except (ValueError, KeyError, AttributeError, TypeError):
        raw_text = "(hidden)" if secret else repr(str(raw)[:80])
        takes = "a whole number of milliseconds" if convert is convert_milliseconds else accepts
        raise ImproperlyConfigured(f"{given}={raw_text} is not accepted. It takes {takes}. ({help})") from None
    if given != name:
        source = f"{source}: {given}"
    ENV_VARIABLES[name] = EnvVariable(name, value, default, source, accepts, help, secret)
    return value


def _find_given_name(name: str) -> tuple[str, Callable[[str], str]]:
    """Return the name under which a variable is set, its own if none is, and the conversion of its value."""
    if name not in os.environ:
        for alias, (target, convert) in ALIASES.items():
            if target == name and alias in os.environ:
                return alias, convert
    return name, str
