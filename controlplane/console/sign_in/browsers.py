"""Mark of a browser in which a user has signed in before: a signed cookie, with a throttle row of its own."""

import secrets
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.contrib.auth.models import AbstractBaseUser
from django.contrib.auth.signals import user_logged_in
from django.core import signing
from django.dispatch import receiver
from django.http import HttpRequest, HttpResponseBase

from controlplane.console.sign_in.configuration import PASSWORD_BACKEND
from controlplane.console.sign_in.throttle import Kind, ThrottleKey, build_key, build_name_key

SALT = "console browser"
LIFETIME = timedelta(days=90)  # renewed by each sign-in
SIGNED_IN_ATTRIBUTE = "leasehold_signed_in_user"  # of a request that has signed a user in with a password


def get_cookie_name() -> str:
    return f"{settings.COOKIE_PREFIX}leasehold_browser"


@receiver(user_logged_in)
def note_sign_in(sender: Any, request: HttpRequest, user: AbstractBaseUser, **kwargs: Any) -> None:
    if getattr(user, "backend", "") == PASSWORD_BACKEND:
        setattr(request, SIGNED_IN_ATTRIBUTE, user)


def find_signed_in_user(request: HttpRequest) -> AbstractBaseUser | None:
    """Return the user that this request has signed in with a password."""
    return getattr(request, SIGNED_IN_ATTRIBUTE, None)


def find_browser_key(request: HttpRequest, name: str) -> ThrottleKey | None:
    """Return the key of the browser that sends this request, if this user name has signed in there before."""
    try:
        mark = signing.loads(request.COOKIES.get(get_cookie_name(), ""), salt=SALT, max_age=LIFETIME)
    except signing.BadSignature:
        return None
    if mark["name"] != build_name_key(name).digest:
        return None
    return build_key(Kind.BROWSER, f"{mark['id']} {mark['name']}")


def mark_browser(response: HttpResponseBase, user: AbstractBaseUser) -> None:
    """Set the cookie for the user who has just signed in with a password."""
    mark = {"id": secrets.token_urlsafe(16), "name": build_name_key(user.get_username()).digest}
    response.set_cookie(
        get_cookie_name(), signing.dumps(mark, salt=SALT), max_age=LIFETIME, path="/", httponly=True, samesite="Lax",
        secure=settings.SESSION_COOKIE_SECURE,
    )  # fmt: skip
