"""System checks of the files and directories that variables name: certificates, keys, and directories to write to.

A process that begins to serve opens them later, some only after an hour. The checks open each as the process would."""

import errno
import os
import ssl
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning, register

from controlplane import env
from controlplane.checks import CONFIGURATION

# Errors that pass by themselves once the disk has space. They must not keep a restarted process from serving.
FULL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT)
CERTIFICATES = (  # variables of the certificate and of its key
    ("LEASEHOLD_GATEWAY_CERTIFICATE", "LEASEHOLD_GATEWAY_CERTIFICATE_KEY"),
    ("LEASEHOLD_GATEWAY_INTERNAL_CERTIFICATE", "LEASEHOLD_GATEWAY_INTERNAL_CERTIFICATE_KEY"),
)
AUTHORITIES = ("LEASEHOLD_GATEWAY_AUTHORITY", "LEASEHOLD_GATEWAY_INTERNAL_AUTHORITY")
# A variable, and the one without which it has no effect.
NEEDED_VARIABLES = {
    "LEASEHOLD_GATEWAY_CERTIFICATE": "LEASEHOLD_GATEWAY_LISTEN",
    "LEASEHOLD_GATEWAY_CERTIFICATE_KEY": "LEASEHOLD_GATEWAY_CERTIFICATE",
    "LEASEHOLD_GATEWAY_INTERNAL_LISTEN": "LEASEHOLD_GATEWAY_LISTEN",
    "LEASEHOLD_GATEWAY_INTERNAL_ADDRESS": "LEASEHOLD_GATEWAY_LISTEN",
    "LEASEHOLD_GATEWAY_INTERNAL_CERTIFICATE": "LEASEHOLD_GATEWAY_LISTEN",
    "LEASEHOLD_GATEWAY_INTERNAL_CERTIFICATE_KEY": "LEASEHOLD_GATEWAY_INTERNAL_CERTIFICATE",
    "LEASEHOLD_GATEWAY_INTERNAL_NAME": "LEASEHOLD_GATEWAY_INTERNAL_AUTHORITY",
}


@register(CONFIGURATION)
def check_certificates(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Open and parse certificate and key of a gateway that listens, and the authorities, which other processes use as well."""
    problems = []
    if settings.GATEWAY_LISTEN:
        problems += [problem for pair in CERTIFICATES if _get(pair[0]) and (problem := _find_certificate_problem(*pair))]
    problems += [problem for name in AUTHORITIES if _get(name) and (problem := _find_authority_problem(name))]
    hint = "The files are in PEM format. The user of this process has to be able to read them."
    return [Error(problem, hint=hint, id="leasehold.E017") for problem in problems]


@register(CONFIGURATION)
def check_unused_variables(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Warn of variables without effect, because another one is unset, and of unknown ones that may be another program's."""
    unused = [(name, needed) for name, needed in NEEDED_VARIABLES.items() if _is_set(name) and not _get(needed)]
    return [
        *(Warning(f"{name} is set and has no effect without {needed}.", id="leasehold.W010") for name, needed in unused),
        *(Warning(str(each), id="leasehold.W011") for each in env.find_unknown_variables()),
    ]


@register(CONFIGURATION)
def check_directories(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Require that each directory exists or can be made, and can be written to."""
    return [
        Error(
            f"{directory.variable}: {directory.path} cannot be written to: {problem}.",
            hint="Give the directory to the user of this process, or name another one.",
            id="leasehold.E018",
        )
        for directory in _iter_directories()
        if (problem := find_directory_problem(directory.path))
    ]


def find_directory_problem(path: Path) -> str:
    """Return why a directory cannot be written to, or could not be made. "" if it can. A full disk is no such reason."""
    existing = next(each for each in (path, *path.parents) if each.exists())
    if not existing.is_dir():
        return f"{existing} is not a directory"
    try:
        made = tempfile.mkdtemp(prefix=".leasehold-check-", dir=existing)
    except OSError as error:
        return "" if error.errno in FULL_DISK_ERRORS else f"{error.strerror} in {existing}"
    with suppress(OSError):
        os.rmdir(made)
    return ""


@dataclass(frozen=True)
class _Directory:
    variable: str
    path: Path


def _iter_directories() -> Iterator[_Directory]:
    yield _Directory("LEASEHOLD_STATE_DIR", settings.STATE_DIR)
    yield _Directory("LEASEHOLD_RUNTIME_DIR", settings.RUNTIME_DIR)
    if settings.STORAGE_BACKEND == "filesystem":
        yield _Directory("LEASEHOLD_STORAGE_DIR", settings.STORAGE_DIR)
    database = settings.DATABASES["default"]
    if not settings.ON_POSTGRES and str(database["NAME"]).startswith("/"):
        yield _Directory("DATABASE_URL", Path(database["NAME"]).parent)


def _find_certificate_problem(name: str, key_name: str) -> str:
    key = _get(key_name)
    for each in (name, key_name) if key else (name,):
        if problem := _find_file_problem(each):
            return problem
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(_get(name), key or None, password=lambda: "")
    except (OSError, ValueError) as error:
        names = f"{name}={_get(name)}" + (f" and {key_name}={key}" if key else f", without {key_name},")
        return f"{names} cannot be used as a certificate with its key: {_describe(error)}"
    return ""


def _find_authority_problem(name: str) -> str:
    if problem := _find_file_problem(name):
        return problem
    try:
        ssl.create_default_context(cafile=_get(name))
    except (OSError, ValueError) as error:
        return f"{name}={_get(name)} cannot be used as the certificate of an authority: {_describe(error)}"
    return ""


def _find_file_problem(name: str) -> str:
    try:
        with open(_get(name), "rb") as file:
            file.read(1)
    except OSError as error:
        return f"{name}={_get(name)} cannot be read: {error.strerror}"
    return ""


def _describe(error: Exception) -> str:
    return getattr(error, "reason", "") or str(error)


def _get(name: str) -> str:
    return str(getattr(settings, name.removeprefix("LEASEHOLD_")) or "")


def _is_set(name: str) -> bool:
    variable = env.ENV_VARIABLES[name]
    return bool(_get(name)) and _get(name) != variable.default
