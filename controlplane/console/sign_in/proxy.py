"""Sign-in by a header of a trusted reverse proxy."""

import re
import time
from typing import Any

from django.conf import settings
from django.contrib.auth.middleware import RemoteUserMiddleware
from django.http import HttpRequest

from controlplane.console.sign_in.addresses import find_client_address, is_from_trusted_proxy
from controlplane.console.sign_in.audit import SampledLog, describe_name
from controlplane.middleware import STATELESS_PATH_PREFIXES

IGNORED_HEADER_LOG = SampledLog()
USER_NAME = re.compile(r"[A-Za-z0-9@.+_-]{1,150}")  # no comma: a header that was sent twice names no user


class ProxySignInMiddleware(RemoteUserMiddleware):
    """Sign in the user that LEASEHOLD_USER_HEADER names, if the connection comes from a trusted proxy.

    A session that began so ends with the first request without the header, or from another peer."""

    header = "leasehold.proxy_user"  # no header of a client has this name in WSGI

    def __call__(self, request: HttpRequest) -> Any:
        if not settings.SIGN_IN.user_header or request.path_info.startswith(STATELESS_PATH_PREFIXES):
            return self.get_response(request)
        name = request.headers.get(settings.SIGN_IN.user_header)
        if name is not None and is_from_trusted_proxy(request) and USER_NAME.fullmatch(name):
            request.META[self.header] = name
        elif name is not None:
            values = {"user": describe_name(name), "address": find_client_address(request)}
            IGNORED_HEADER_LOG.write("user header ignored", at=time.monotonic(), **values)
        return super().__call__(request)
