"""System checks of the sign-in to the console."""

from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning, register

CONFIGURATION = "configuration"  # tag of the checks that long-running commands require


@register(CONFIGURATION)
def check_trusted_proxies(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Refuse a network of all addresses: each client would then choose its address, and with a user header its user."""
    if all(network.prefixlen for network in settings.SIGN_IN.trusted_proxies):
        return []
    message = "LEASEHOLD_TRUSTED_PROXIES contains every address: each client could state another address or user."
    return [Error(message, hint="Name the addresses of the reverse proxies only.", id="leasehold.E016")]


@register(CONFIGURATION, deploy=True)
def check_client_addresses(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Warn if all sign-ins behind a proxy seem to come from one address."""
    is_behind_proxy = settings.PUBLIC_URL.startswith("https://") or settings.CSRF_TRUSTED_ORIGINS
    if settings.SIGN_IN.trusted_proxies or not is_behind_proxy:
        return []
    message = (
        "LEASEHOLD_TRUSTED_PROXIES is unset behind a proxy: all sign-ins count for one address, and the log names no other."
    )
    hint = "Name the address of the proxy, such as 127.0.0.1. See docs/sign-in.md, Client address."
    return [Warning(message, hint=hint, id="leasehold.W008")]


@register(CONFIGURATION, deploy=True)
def check_second_factor(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    if settings.SIGN_IN.second_factor in ("superusers", "all") or settings.SIGN_IN.user_header:
        return []
    message = f"LEASEHOLD_SECOND_FACTOR={settings.SIGN_IN.second_factor}: superusers may sign in with a password alone."
    hint = "Set it to superusers or all, or let a proxy sign users in. See docs/sign-in.md."
    return [Warning(message, hint=hint, id="leasehold.W009")]
