"""Combinations of settings that must not start, each value being right by itself."""

from collections.abc import Sequence
from math import ceil
from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning, register

from sandboxes.state import mounts

MAX_SOCKET_PATH_BYTES = 107  # bytes of a unix socket's path, without the NUL
MAX_SOCKET_NAME_BYTES = len("/egress/s/16383/llm.sock")  # below RUNTIME_DIR


@register()
def check_queue_retry(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """A task is fetched again `retry` after it was fetched, so by then it must have waited, run and timed out."""
    one: dict[str, Any] = settings.Q_CLUSTER
    longest = one["timeout"] * (ceil(one["queue_limit"] / one["workers"]) + 1)
    if one["retry"] > longest:
        return []
    return [Error(f"Q_CLUSTER: retry is not above {longest}, so tasks would run twice.", id="leasehold.E001")]


@register()
def check_isolation(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    if settings.SANDBOX_PROVIDER not in ("process", "memory") or settings.DEBUG or settings.ALLOW_UNISOLATED:
        return []
    return [
        Error(
            f"SANDBOX_PROVIDER={settings.SANDBOX_PROVIDER} does not isolate and DEBUG is off.",
            hint="Use docker, or set LEASEHOLD_ALLOW_UNISOLATED=1.",
            id="leasehold.E002",
        )
    ]


@register()
def check_exec_timeouts(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    most = settings.EXEC_TIMEOUT_MOST
    wrong = [name for name in ("EXEC_TIMEOUT", "TURN_TIMEOUT") if getattr(settings, name) > most]
    return [Error(f"LEASEHOLD_{name} is above LEASEHOLD_EXEC_TIMEOUT_MOST.", id="leasehold.E003") for name in wrong]


@register()
def check_socket_paths(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    most = MAX_SOCKET_PATH_BYTES - MAX_SOCKET_NAME_BYTES
    if len(str(settings.RUNTIME_DIR.absolute()).encode()) <= most:
        return []
    return [Error(f"LEASEHOLD_RUNTIME_DIR is longer than {most} bytes: no socket fits in it.", id="leasehold.E004")]


@register()
def check_data_mount(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Of new agents alone: one that is mounted already is refused its commands, and told why."""
    if settings.DATA_KEEPING != "mount" or not (why := mounts.find_missing_requirement()):
        return []
    return [Error(f"LEASEHOLD_DATA=mount cannot be had: {why}.", hint="Or use LEASEHOLD_DATA=sync.", id="leasehold.E005")]


@register(deploy=True)
def check_identity_keys(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    if settings.IDENTITY_KEYS:
        return []
    said = "LEASEHOLD_IDENTITY_KEYS is unset: agents' signing keys are encrypted under a key made from SECRET_KEY."
    return [Warning(said, hint="Who changes SECRET_KEY then loses them. See the README.", id="leasehold.W001")]
