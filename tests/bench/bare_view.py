"""Bare Django view on the measured server: one UPDATE by primary key, without authentication.

This module is a URL configuration, and SETTINGS_MODULE adds it to the product's settings. Under ALONE_PREFIX the view is
called before the product's middleware and URLs, as in a project that contains only this view."""

import uuid
from collections.abc import Callable
from datetime import timedelta

from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.urls import path, resolve
from django.utils import timezone

from controlplane.urls import urlpatterns as product_urlpatterns
from leases.models import Lease
from sandboxes.db import sql

SETTINGS_MODULE = "tests.bench.bare_view_settings"
ALONE_PREFIX = "/alone/"
ALONE_URLS = "tests.bench.bare_view_urls"


def renew_bare(request: HttpRequest, pk: uuid.UUID) -> HttpResponse:
    now = timezone.now()
    sql.update(Lease, "last_activity_at = %s, expires_at = %s WHERE id = %s", now, now + timedelta(hours=4), pk)
    return HttpResponse(b"{}", content_type="application/json")


class AloneMiddleware:
    """Calls the view of a request under ALONE_PREFIX without the middleware that follows."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        if not request.path_info.startswith(ALONE_PREFIX):
            return self.get_response(request)
        view, args, kwargs = resolve(request.path_info, ALONE_URLS)
        response: HttpResponseBase = view(request, *args, **kwargs)
        return response


urlpatterns = [path("api/v1/bare/<uuid:pk>", renew_bare), *product_urlpatterns]
