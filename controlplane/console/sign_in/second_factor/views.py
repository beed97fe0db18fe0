"""Pages that ask for a code and that set up an authenticator app."""

import re
from typing import Any

import segno
import structlog
from django.contrib import admin
from django.contrib.auth.models import AbstractBaseUser
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters
from django_otp import login
from django_otp.models import Device

from controlplane.console.sign_in import audit, throttle
from controlplane.console.sign_in.second_factor import devices
from controlplane.console.sign_in.second_factor.middleware import is_code_missing
from controlplane.console.sign_in.throttle import Kind
from sandboxes.db import database_time

log = structlog.get_logger(__name__)
CODE = re.compile(r"[0-9]{6}|[a-z2-7]{8}")  # of an app, or a backup code
SECRET = "second_factor_secret"  # noqa: S105 - key in the session of the secret that is being set up


@sensitive_post_parameters("code")
@never_cache
def ask_code(request: HttpRequest) -> HttpResponse:
    """Ask for a code, and continue at `next`. A user without an app sets one up first."""
    if not is_code_missing(request):
        return HttpResponseRedirect(find_next(request))
    if not devices.has_app(_get_user(request)):
        return HttpResponseRedirect(f"{reverse('second_factor_setup')}?{request.GET.urlencode()}")
    if request.method != "POST":
        return _render(request, "code.html", "Second factor")
    key = throttle.build_key(Kind.CODE, str(request.user.pk))
    throttle.admit([key], now=database_time.now())
    code = read_code(request)
    device = devices.verify_code(_get_user(request), code) if CODE.fullmatch(code) else None
    values = {"user": audit.describe_name(request.user.get_username()), "address": audit.describe_request(request)}
    if device is None:
        log.warning("console second factor failed", **values)
        return _render(request, "code.html", "Second factor", error="This code is not valid. Each code is accepted once.")
    throttle.forgive([key], now=database_time.now())
    _confirm(request, device)
    log.info("console second factor", method=device.name, **values)
    return HttpResponseRedirect(find_next(request))


@sensitive_post_parameters("code")
@never_cache
def set_up(request: HttpRequest) -> HttpResponse:
    """Show a new secret, and set the app up once a code proves that the app has the secret. Show the backup codes once.

    A user who has an app proves the second factor before, because the new app replaces the present one."""
    user = _get_user(request)
    has_app = devices.has_app(user)
    if has_app and is_code_missing(request):
        return HttpResponseRedirect(f"{reverse('second_factor')}?{request.GET.urlencode()}")
    error = ""
    if request.method == "POST" and (secret := request.session.get(SECRET)):
        enrolled = devices.enroll(user, secret, read_code(request), now=database_time.now())
        if enrolled:
            device, codes = enrolled
            del request.session[SECRET]
            _confirm(request, device)
            shown = audit.describe_name(user.get_username())
            log.info("console second factor set up", user=shown, address=audit.describe_request(request))
            return _render(request, "backup_codes.html", "Backup codes", codes=codes)
        error = "This code is not valid. Compare the time of the device, and enter the code that the app shows now."
    else:
        secret = request.session[SECRET] = devices.generate_secret()
    image = segno.make(devices.build_address(secret, user), error="m").svg_data_uri(scale=4, border=4, light="#fff")
    encoded = devices.encode_secret(secret)
    return _render(request, "setup.html", "Set up the second factor", error=error, image=image, secret=encoded, has_app=has_app)


def read_code(request: HttpRequest) -> str:
    """Return the code of the form without spaces, as apps show codes in groups."""
    return "".join(request.POST.get("code", "")[:40].split()).lower()


def find_next(request: HttpRequest) -> str:
    target = request.GET.get("next", "")
    return target if url_has_allowed_host_and_scheme(target, allowed_hosts=None) else reverse("admin:index")


def _confirm(request: HttpRequest, device: Device) -> None:
    """Record in the session, under a new key, that the user has proved the second factor."""
    login(request, device)
    request.session.cycle_key()


def _get_user(request: HttpRequest) -> AbstractBaseUser:
    assert request.user.is_authenticated  # admin_view
    return request.user


def _render(request: HttpRequest, template: str, title: str, **context: Any) -> HttpResponse:
    values = {**admin.site.each_context(request), "title": title, "next": find_next(request), **context}
    return render(request, f"admin/sign_in/{template}", values)
