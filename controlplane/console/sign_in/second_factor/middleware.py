"""Middleware that lets a user who needs a second factor reach the page for the code only."""

from collections.abc import Callable
from urllib.parse import urlencode

from django.conf import settings
from django.contrib.auth import BACKEND_SESSION_KEY
from django.http import HttpRequest, HttpResponseRedirect
from django.http.response import HttpResponseBase
from django.urls import reverse
from django_otp.middleware import OTPMiddleware

from controlplane.console.sign_in.configuration import PROXY_BACKEND
from controlplane.console.sign_in.second_factor import devices
from controlplane.middleware import STATELESS_PATH_PREFIXES

PAGES_WITHOUT_CODE = ("second_factor", "second_factor_setup", "admin:logout")  # the first two decide by themselves


class SecondFactorMiddleware:
    """Redirect each request of a user who has still to prove the second factor.

    The session is signed in by the password before. No other page is reached with it."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response
        self.with_device = OTPMiddleware(self._require_code)  # sets the device of the session

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        if settings.SIGN_IN.second_factor == "off" or request.path_info.startswith(STATELESS_PATH_PREFIXES):
            return self.get_response(request)
        response: HttpResponseBase = self.with_device(request)
        return response

    def _require_code(self, request: HttpRequest) -> HttpResponseBase:
        if not is_code_missing(request) or request.path in [reverse(name) for name in PAGES_WITHOUT_CODE]:
            return self.get_response(request)
        target = request.get_full_path() if request.method == "GET" else reverse("admin:index")
        return HttpResponseRedirect(f"{reverse('second_factor')}?{urlencode({'next': target})}")


def is_code_missing(request: HttpRequest) -> bool:
    """Return whether the user of this session needs a second factor and has not proved it. A proxy has its own."""
    user = request.user
    if not user.is_authenticated or user.is_verified() or request.session.get(BACKEND_SESSION_KEY) == PROXY_BACKEND:  # type: ignore[attr-defined]
        return False
    mode = settings.SIGN_IN.second_factor
    return mode == "all" or (mode == "superusers" and user.is_superuser) or devices.has_app(user)
