"""Authentication backends of the console: passwords behind the throttle, and users that a trusted proxy names."""

from typing import Any

import structlog
from django.contrib.auth.backends import ModelBackend, RemoteUserBackend
from django.contrib.auth.models import User
from django.http import HttpRequest

from controlplane.console.sign_in import audit, throttle
from controlplane.console.sign_in.addresses import find_client_address
from controlplane.console.sign_in.browsers import find_browser_key
from sandboxes.db import database_time

log = structlog.get_logger(__name__)


class PasswordBackend(ModelBackend):
    """Django's backend behind the throttle. Raises SignInThrottled before a password is verified.

    Without a request, as in a command, there is no throttle."""

    def authenticate(
        self, request: HttpRequest | None, username: str | None = None, password: str | None = None, **kwargs: Any
    ) -> User | None:
        if request is None or username is None or password is None:
            return super().authenticate(request, username=username, password=password, **kwargs)
        browser = find_browser_key(request, username)
        address = throttle.build_address_key(find_client_address(request))
        keys = [browser] if browser else [throttle.build_name_key(username), address]
        throttle.admit(keys, now=database_time.now())
        user = super().authenticate(request, username=username, password=password, **kwargs)
        if user is not None:
            throttle.forgive(keys, now=database_time.now())
            if not user.is_staff:
                shown = audit.describe_name(username)
                log.warning("console sign-in refused", user=shown, address=audit.describe_request(request), reason="not staff")
        return user


class ProxyBackend(RemoteUserBackend):
    """Users that a trusted proxy has signed in. An unknown one is created without staff status, groups and permissions."""

    def configure_user(  # type: ignore[override]  # this installation has Django's users
        self, request: HttpRequest | None, user: User, created: bool = True
    ) -> User:
        if created:
            user.set_unusable_password()
            user.save(update_fields=["password"])
            shown = audit.describe_name(user.get_username())
            log.warning("console user created", user=shown, address=audit.describe_request(request), method="proxy")
        return user
