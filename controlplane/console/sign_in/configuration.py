"""Settings of the sign-in to the console."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from ipaddress import IPv4Network, IPv6Network

from django.core.exceptions import ImproperlyConfigured
from django.urls import reverse_lazy

from controlplane import env

APP = "controlplane.console.sign_in"
SECOND_FACTOR_PACKAGES = ("django_otp", "segno")
SECOND_FACTOR_APP = f"{APP}.second_factor"
SECOND_FACTOR_APPS = ("django_otp", "django_otp.plugins.otp_totp", "django_otp.plugins.otp_static", SECOND_FACTOR_APP)
PASSWORD_BACKEND = f"{APP}.backends.PasswordBackend"
PROXY_BACKEND = f"{APP}.backends.ProxyBackend"
SIGN_IN_MIDDLEWARE = f"{APP}.middleware.SignInMiddleware"
SECOND_FACTOR_MIDDLEWARE = f"{SECOND_FACTOR_APP}.middleware.SecondFactorMiddleware"

SECOND_FACTOR_NAVIGATION = [{"title": "Second factor", "link": reverse_lazy("second_factor_setup")}]


@dataclass(frozen=True)
class SignInConfiguration:
    """Values of the variables. `user_header` is "" without sign-in by a proxy."""

    trusted_proxies: tuple[IPv4Network | IPv6Network, ...]
    user_header: str
    idle_timeout: timedelta
    max_age: timedelta
    second_factor: str  # off, enrolled, superusers or all

    def list_backends(self) -> list[str]:
        return [PASSWORD_BACKEND, *([PROXY_BACKEND] if self.user_header else [])]


def insert_second_factor(middleware: Sequence[str]) -> list[str]:
    """Return the middleware with that of the second factor, which needs the user of a session that has not ended."""
    index = middleware.index(SIGN_IN_MIDDLEWARE)
    return [*middleware[:index], SECOND_FACTOR_MIDDLEWARE, *middleware[index:]]


def read() -> SignInConfiguration:
    """Read the configuration. Raise ImproperlyConfigured."""
    configuration = SignInConfiguration(
        trusted_proxies=tuple(
            env.networks(
                "LEASEHOLD_TRUSTED_PROXIES",
                help="addresses of the reverse proxies whose X-Forwarded-For states the client's address; unset: none",
            )
        ),
        user_header=env.text(
            "LEASEHOLD_USER_HEADER",
            accepts="the name of a header of letters and digits, such as RemoteUser",
            pattern=r"[A-Za-z][A-Za-z0-9]{0,63}",  # WSGI takes - and _ for the same: a client could send the other spelling
            help="header in which a trusted proxy names the user that it has signed in to the console; unset: passwords only",
        ),
        idle_timeout=env.duration(
            "LEASEHOLD_SESSION_IDLE_TIMEOUT", "1h", help="time without a request after which an operator is signed out"
        ),
        max_age=env.duration(
            "LEASEHOLD_SESSION_MAX_AGE", "12h", help="time after which an operator signs in again, also without a pause"
        ),
        second_factor=env.choice(
            "LEASEHOLD_SECOND_FACTOR",
            "off",
            ["off", "enrolled", "superusers", "all"],
            help="users who need a code of their authenticator app beside the password; enrolled: those who have set one up",
        ),
    )
    if configuration.user_header and not configuration.trusted_proxies:
        raise ImproperlyConfigured(
            "LEASEHOLD_USER_HEADER is set and LEASEHOLD_TRUSTED_PROXIES is not: no proxy is trusted to name a user."
        )
    if configuration.second_factor != "off" and (missing := [each for each in SECOND_FACTOR_PACKAGES if not find_spec(each)]):
        raise ImproperlyConfigured(
            f"LEASEHOLD_SECOND_FACTOR={configuration.second_factor} needs {' and '.join(missing)}, which is not installed. "
            "Run: pip install 'leasehold[second-factor]'"
        )
    return configuration
