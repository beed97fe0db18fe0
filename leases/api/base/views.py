"""Base views of the HTTP API for agents.

A handler validates the request, calls one domain function and renders the result. Errors are raised;
`controlplane.errors.handle` turns them into problem documents."""

import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, cast
from urllib.parse import unquote_to_bytes
from uuid import UUID

from django.conf import settings
from django.db import Error as DatabaseError
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from rest_framework.exceptions import MethodNotAllowed
from rest_framework.parsers import BaseParser
from rest_framework.permissions import SAFE_METHODS
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.serializers import Serializer
from rest_framework.views import APIView

from billing import budgets
from billing.api.views import require_single_parameters
from billing.errors import BudgetExhausted
from leases import api_keys, leasing
from leases.api.base import idempotency
from leases.api.base.authentication import Caller, KeyAuthentication, list_accepted_scopes
from leases.api.base.parsers import discard_body, parse_json_object
from leases.api.base.permissions import CanAccessLease, HasKey
from leases.api.base.renderers import Negotiation
from leases.errors import InvalidRequest, LeaseError
from leases.grants import issuers
from leases.grants.issuers import Right
from leases.models import KeyScope, Lease
from sandboxes.audit import Actor
from sandboxes.db import database_time
from sandboxes.providers.errors import BadPath

MAX_SMALL_BODY_BYTES = 64 << 10  # default limit; views that accept documents or files set their own
GIVEN_PATH = "leasehold.path"  # WSGI variable with PATH_INFO as the web server gave it, which Django replaces
RECHECK_SECONDS = 1.0  # after which the key of a request is checked again: before its response, and while its body arrives


class ApiRequest(Request):
    """DRF request whose body is always read by the view's only parser.

    DRF skips the parser of a request without a Content-Length, so a chunked body would count as empty. DRF also responds 415
    before the size limit applies, and for empty bodies; JsonParser therefore checks the media type. A parser that holds the
    whole body leaves it in `raw_body`."""

    user: Caller  # type: ignore[assignment]
    method: str
    raw_body: bytes = b""
    _parsed: Any = None

    def load_json(self, body: bytes) -> None:
        """Parse a body that an authenticator has read. Raises like JsonParser."""
        self.raw_body, self._parsed = body, parse_json_object(self._request, body)

    @property
    def data(self) -> Any:
        """The parser's result: an object, or an iterator over the chunks of the body."""
        if self._parsed is None:
            (parser,) = cast(Sequence[BaseParser], self.parsers)
            self._parsed = parser.parse(self._request, self.content_type, self.parser_context)  # type: ignore[arg-type]
        return self._parsed


def _require_unambiguous_url(request: Request) -> None:
    """Raise BadPath or InvalidRequest for a URL whose decoded path or query is not UTF-8, or ValidationError for a parameter
    that is given twice.

    Django percent-encodes such bytes of a path again, and replaces those of a query: the result names another file."""
    try:
        request.META.get(GIVEN_PATH, "").encode("latin-1").decode()
    except UnicodeError:
        raise BadPath("The path of the URL is not UTF-8.") from None
    for parameter in request.META.get("QUERY_STRING", "").encode("latin-1").split(b"&"):
        try:
            unquote_to_bytes(parameter).decode()
        except UnicodeError:
            name = unquote_to_bytes(parameter.partition(b"=")[0]).decode(errors="replace")
            raise InvalidRequest(name, "The query of the URL is not UTF-8.") from None
    require_single_parameters(request)


class ApiView(APIView):
    """Base of all views of the HTTP API for agents.

    `now` is the time at which the request was received, or at which its body had been read. A body may take minutes to
    arrive, and a lease that ended meanwhile must not be used."""

    http_method_names = ["get", "head", "post", "put", "patch", "delete"]
    max_body_bytes = MAX_SMALL_BODY_BYTES
    decodes_bodies = False  # the view decodes a body with a Content-Encoding
    key_scope: str = KeyScope.LEASES
    request: ApiRequest
    now: datetime
    started_at: float  # monotonic

    @property
    def default_response_headers(self) -> dict[str, str]:
        return {}  # DRF would send Allow with every response; the exception handler sends it with a 405

    def initialize_request(self, request: HttpRequest, *args: Any, **kwargs: Any) -> ApiRequest:
        self.started_at = time.monotonic()
        return ApiRequest(
            request,
            parsers=self.get_parsers(),
            authenticators=self.get_authenticators(),
            negotiator=self.get_content_negotiator(),
            parser_context=self.get_parser_context(request),
        )

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Refuse unsupported methods before authentication: a 405 needs no key."""
        self.require_method(request)
        self.now = database_time.now()
        super().initial(request, *args, **kwargs)
        _require_unambiguous_url(request)

    def require_method(self, request: Request) -> None:
        method = (request.method or "").lower()
        if method not in self.http_method_names or not hasattr(self, method):
            raise MethodNotAllowed(request.method or "", "Method Not Allowed.")

    def handle_exception(self, exc: Exception) -> Response:
        """Return the problem document. The body of an authenticated request is read first; others must not hold a thread."""
        if isinstance(exc, BudgetExhausted):
            exc = budgets.restrict_refusal(exc, **self.caller.budget_access)
        response = super().handle_exception(exc)
        if response.status_code not in (401, 405):
            discard_body(self.request._request)
        return response

    @property
    def caller(self) -> Caller:
        return self.request.user

    @property
    def actor(self) -> Actor:
        return self.caller.name

    @property
    def key_id(self) -> str:
        return str(self.caller.pk)

    @property
    def right(self) -> Right:
        """Right of the key that this request uses. A grant that the request issues, or a stream that it opens, ends with it."""
        lease: Lease | None = getattr(self, "lease", None)
        scopes = list_accepted_scopes(self.key_scope, reads=self.request.method in SAFE_METHODS)
        return Right(self.caller.issuer, scopes, lease.agent_did if lease else "")

    def require_key(self) -> None:
        """Raise GrantEnded if the key was revoked, has expired or lost the right to this request since it arrived.

        A sender that was authenticated otherwise has no key."""
        if isinstance(self.request.user, Caller):
            issuers.require_alive(self.right, now=database_time.now())

    def iter_while_permitted(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the chunks of a body that may take long, in either direction. Raise the errors of `require_key`."""
        checked_at = time.monotonic()
        for chunk in chunks:
            if time.monotonic() - checked_at >= RECHECK_SECONDS:
                self.require_key()
                checked_at = time.monotonic()
            yield chunk
        if time.monotonic() - checked_at >= RECHECK_SECONDS:
            self.require_key()

    def check_result(self, response: HttpResponseBase) -> HttpResponseBase:
        """Return the response of a request; of a long one a problem document instead, if its key has ended meanwhile.

        Changes that the request has made stay. A streaming response is closed."""
        if response.status_code >= 400 or time.monotonic() - self.started_at < RECHECK_SECONDS:
            return response
        try:
            self.require_key()
        except (LeaseError, DatabaseError) as error:
            if response.streaming:
                response.close()
            return self.handle_exception(error)
        return response

    def finalize_response(self, request: Request, response: Any, *args: Any, **kwargs: Any) -> Any:
        checked: Any = self.check_result(response)
        return super().finalize_response(request, checked, *args, **kwargs)

    def read_body(self) -> Any:
        """Return the body as the view's parser reads it, and set `now` to the time after it. Not for StreamParser.

        Raise GrantEnded if the key has ended while the body arrived."""
        started_at = time.monotonic()
        body = self.request.data
        if time.monotonic() - started_at >= RECHECK_SECONDS:
            self.require_key()
        self.now = database_time.now()
        return body

    def validate_body(self, serializer: Serializer) -> dict[str, Any]:
        """Return the validated body. The serializers are shared between requests: validation stores nothing in them."""
        data: dict[str, Any] = serializer.run_validation(self.read_body())
        return data

    def execute_once(self, act: idempotency.RequestHandler, **options: Any) -> HttpResponse:
        """Read the body, call `act` and return its response; once if the request has an Idempotency-Key.

        Options and errors are those of `idempotency.execute_once`. The body of a request that takes none is also read: the
        server would close the connection otherwise. `act` is called with `now` set to the time after the key was claimed: the
        claim may have waited for the database, and a lease that ended meanwhile must not be used."""
        self.read_body()

        def act_now(run_id: UUID) -> idempotency.StatusAndBody:
            self.now = database_time.now()
            return act(run_id)

        return idempotency.execute_once(
            self.request, self.caller.key, act_now, body=self.request.raw_body, now=self.now, **options
        )

    def consume_creation_token(self) -> None:
        """Count one new lease against the key's rate limit. Raises RateLimited.

        The domain calls this in the transaction that grants a lease. A DRF throttle would also count requests that return an
        existing lease or are refused."""
        api_keys.consume_rate_limit_token(self.caller.key, per_minute=settings.CREATES_PER_MINUTE, now=self.now)


class LeaseApiView(ApiView):
    """Base of views under /leases/{pk}. `lease` is the lease in the URL, to which the key has access."""

    permission_classes = [HasKey, CanAccessLease]
    lease: Lease

    def require_active(self) -> None:
        """Set `now` to the current time. Raises LeaseEnded if the lease has ended by then.

        Called before a large body is read, so that none is read for an ended lease, and again before the write."""
        self.now = database_time.now()
        leasing.require_active(self.lease.pk, now=self.now)


class HotLeaseApiView(LeaseApiView):
    """Fast path of the two most frequent requests, renew and exec.

    `dispatch` takes the steps of APIView.dispatch with the same authentication, permission, parser and error classes. It leaves
    out the steps without effect here: content negotiation, versioning, throttles, response headers, and new instances of
    stateless classes for each request. The handlers return an HttpResponse, which needs no rendering. Measured by
    tests/bench/api_overhead.py: the full dispatch costs a renew 16 % more CPU than none, this one 4 %."""

    _authenticator = KeyAuthentication()
    _permissions = [permission() for permission in LeaseApiView.permission_classes]
    _negotiator = Negotiation()

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        self.args, self.kwargs, self.now, self.started_at = args, kwargs, database_time.now(), time.monotonic()
        self.request = ApiRequest(request, self.get_parsers(), [self._authenticator], self._negotiator, {"view": self})
        try:
            self.require_method(self.request)
            self.request.user, self.request.auth = self._authenticator.authenticate(self.request, kwargs["pk"])
            self.check_permissions(self.request)
            if request.META.get("QUERY_STRING"):
                _require_unambiguous_url(self.request)
            response: HttpResponseBase = getattr(self, self.request.method.lower())(self.request, *args, **kwargs)
            response = self.check_result(response)
        except Exception as error:
            response = self.handle_exception(error)
        return response

    def get_permissions(self) -> list[Any]:
        return self._permissions
