"""Log of sign-ins: user name and client address of each failure and success, never a password."""

from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import structlog
from django.contrib.auth.models import AbstractBaseUser
from django.contrib.auth.signals import user_logged_in, user_logged_out, user_login_failed
from django.dispatch import receiver
from django.http import HttpRequest

from controlplane.console.sign_in import sessions
from controlplane.console.sign_in.addresses import find_client_address
from controlplane.console.sign_in.configuration import PROXY_BACKEND

log = structlog.get_logger(__name__)
MAX_NAME_CHARACTERS = 150
LOG_INTERVAL_SECONDS = 1.0  # between two lines about requests that cost a stranger nothing
SEPARATORS = " =\"'\\"  # of the values of a line in text form


@dataclass
class SampledLog:
    """At most one line in LOG_INTERVAL_SECONDS, with the number of omitted ones."""

    lock: Lock = field(default_factory=Lock)
    logged_at: float = float("-inf")  # monotonic clock
    omitted: int = 0

    def write(self, event: str, *, at: float, **values: Any) -> None:
        with self.lock:
            if at - self.logged_at < LOG_INTERVAL_SECONDS:
                self.omitted += 1
                return
            omitted, self.omitted, self.logged_at = self.omitted, 0, at
        log.warning(event, omitted=omitted, **values)


def describe_name(name: object) -> str:
    """Return a user name for the log: shortened, and without characters that would begin a line, a value or a direction."""
    text = str(name)
    shown = "".join(_escape(each) for each in text[:MAX_NAME_CHARACTERS])
    return shown + ("…" if len(text) > MAX_NAME_CHARACTERS else "")


def _escape(character: str) -> str:
    if character.isprintable() and character not in SEPARATORS:
        return character
    return f"\\x{ord(character):02x}" if character < "\u0100" else f"\\u{ord(character):04x}"


def describe_request(request: HttpRequest | None) -> str:
    return find_client_address(request) if request else "none"


@receiver(user_logged_in)
def record_sign_in(sender: Any, request: HttpRequest, user: AbstractBaseUser, **kwargs: Any) -> None:
    sessions.begin(request)
    method = "proxy" if getattr(user, "backend", "") == PROXY_BACKEND else "password"
    log.info("console sign-in", user=describe_name(user.get_username()), address=describe_request(request), method=method)


@receiver(user_login_failed)
def record_failed_sign_in(sender: Any, credentials: dict[str, Any], request: HttpRequest | None = None, **kwargs: Any) -> None:
    method = "proxy" if "remote_user" in credentials else "password"
    name = describe_name(credentials.get("remote_user") or credentials.get("username") or "")
    log.warning("console sign-in failed", user=name, address=describe_request(request), method=method)


@receiver(user_logged_out)
def record_sign_out(sender: Any, request: HttpRequest, user: AbstractBaseUser | None, **kwargs: Any) -> None:
    if user is not None:
        log.info("console sign-out", user=describe_name(user.get_username()), address=describe_request(request))
