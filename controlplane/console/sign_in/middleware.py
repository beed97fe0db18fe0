"""Middleware: limits of sessions, answers to throttled sign-ins, the mark of a browser after a sign-in."""

import time
from collections.abc import Callable
from http import HTTPStatus
from math import ceil
from typing import Any

from django.conf import settings
from django.contrib import admin
from django.contrib.auth import logout
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.template.defaultfilters import pluralize

from controlplane.console.sign_in import audit, sessions, throttle
from controlplane.console.sign_in.browsers import find_signed_in_user, mark_browser
from controlplane.console.sign_in.throttle import Kind, SignInThrottled, ThrottleKey
from controlplane.middleware import STATELESS_PATH_PREFIXES
from sandboxes.db import database_time

SECONDS_PER_MINUTE = 60
MAX_FORM_BYTES = 64 << 10


class SessionLimitMiddleware:
    """Sign a user out whose session is too old or idle for too long. Sessions of earlier versions have no clocks and end."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        path = request.path_info
        has_session = settings.SESSION_COOKIE_NAME in request.COOKIES and not path.startswith(STATELESS_PATH_PREFIXES)
        if has_session and request.user.is_authenticated:
            now = database_time.now()
            end = sessions.find_end(request)
            if end is None or now >= end:
                logout(request)
            else:
                sessions.keep(request, now)
        return self.get_response(request)


class SignInMiddleware:
    """Answer a throttled attempt with 429, throttle guesses of the current password, and mark browsers after a sign-in.

    A large form of a client that has not signed in is refused before a thread reads it."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response
        self.throttled_log = audit.SampledLog()

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        if is_too_large(request):
            text = "A form without a sign-in is limited to 64 KiB.\n"
            return HttpResponse(text, status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE, content_type="text/plain")
        response = self.get_response(request)
        if user := find_signed_in_user(request):
            mark_browser(response, user)
        if is_password_change(request) and response.status_code == HTTPStatus.FOUND:
            throttle.forgive([_build_user_key(request)], now=database_time.now())
        return response

    def process_view(self, request: HttpRequest, *args: Any) -> HttpResponse | None:
        """Count an attempt to change the password, which states the current one."""
        if not is_password_change(request):
            return None
        try:
            throttle.admit([_build_user_key(request)], now=database_time.now())
        except SignInThrottled as throttled:
            return self.process_exception(request, throttled)
        return None

    def process_exception(self, request: HttpRequest, exception: Exception) -> HttpResponse | None:
        if not isinstance(exception, SignInThrottled):
            return None
        user = request.POST.get("username") or request.user.get_username()
        values = {"user": audit.describe_name(user), "address": audit.describe_request(request)}
        self.throttled_log.write("console sign-in throttled", at=time.monotonic(), **values)
        wait = describe_wait(exception.seconds)
        context = {
            **admin.site.each_context(request),
            "title": "Too many attempts",
            "retry_at": exception.retry_at,
            "wait": wait,
        }
        response = render(request, "admin/sign_in/throttled.html", context, status=HTTPStatus.TOO_MANY_REQUESTS)
        response["Retry-After"], response["Cache-Control"] = str(exception.seconds), "no-store"
        return response


def is_too_large(request: HttpRequest) -> bool:
    """Return whether a client that has not signed in sends more than a form of the sign-in has."""
    length = request.META.get("CONTENT_LENGTH") or "0"
    if request.path_info.startswith(STATELESS_PATH_PREFIXES) or not length.isdecimal() or int(length) <= MAX_FORM_BYTES:
        return False
    return not request.user.is_authenticated


def describe_wait(seconds: int) -> str:
    """Return a waiting time in seconds, from two minutes on in minutes, rounded up."""
    if seconds >= 2 * SECONDS_PER_MINUTE:
        return f"{ceil(seconds / SECONDS_PER_MINUTE)} minutes"
    return f"{seconds} second{pluralize(seconds)}"


def is_password_change(request: HttpRequest) -> bool:
    """Return whether a signed-in user states the current password to set a new one."""
    match = request.resolver_match
    if match is None or match.view_name != "admin:password_change":
        return False
    return request.method == "POST" and request.user.is_authenticated


def _build_user_key(request: HttpRequest) -> ThrottleKey:
    return throttle.build_key(Kind.USER, str(request.user.pk))
