"""Base view of the agents' API."""

from datetime import datetime
from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed
from django.http.response import HttpResponseBase
from django.utils import timezone
from rest_framework.serializers import Serializer
from rest_framework.views import APIView

from leases import api_keys
from leases.api import authentication, idempotency, request_body
from leases.api.authentication import Caller

MAX_SMALL_BODY_BYTES = 64 << 10  # bytes, like all of these: a body without a document of the agent's own in it


class AgentApiView(APIView):
    """A view for agents: `caller` and `now` are set before its verb runs.

    APIView is here for the schema. Its own dispatch wraps the request, negotiates, parses and renders, which for one
    JSON document each way costs more than it gives."""

    http_method_names = ["get", "head", "post", "put", "delete"]
    caller: Caller
    now: datetime

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        method = (request.method or "").lower()
        verb = getattr(self, method, None) if method in self.http_method_names else None
        if verb is None:
            return HttpResponseNotAllowed(self.allowed_methods)
        self.now = timezone.now()
        self.caller = authentication.authenticate_request(request, now=self.now)
        answer: HttpResponseBase = verb(request, *args, **kwargs)
        return answer

    @property
    def actor(self) -> str:
        return self.caller.name

    @property
    def key_id(self) -> str:
        return str(self.caller.pk)

    def read(self, request: HttpRequest, form: Serializer, limit: int = MAX_SMALL_BODY_BYTES) -> tuple[bytes, dict[str, Any]]:
        """The body, and what it says after validation."""
        body = request_body.read_body(request, limit)
        said: dict[str, Any] = form.run_validation(request_body.parse_json_object(request, body))
        return body, said

    def once(self, request: HttpRequest, act: idempotency.RequestHandler, **options: Any) -> HttpResponse:
        return idempotency.execute_once(request, self.caller.key, act, now=self.now, **options)

    def admit(self) -> None:
        """One new lease more for this key, or TooMany."""
        api_keys.consume_rate_limit_token(self.caller.key, per_minute=settings.CREATES_PER_MINUTE, now=self.now)
