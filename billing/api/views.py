"""Shared parts of the billing views. The settings supply authentication and error handling: billing cannot import leases."""

from collections.abc import Mapping, Sequence
from datetime import date, datetime
from http import HTTPStatus
from typing import Any, Protocol, cast

from drf_spectacular.utils import OpenApiResponse
from rest_framework import serializers
from rest_framework.exceptions import ValidationError
from rest_framework.renderers import BaseRenderer
from rest_framework.request import Request
from rest_framework.serializers import Serializer
from rest_framework.settings import api_settings

from billing.models import Watermark

CSV_MEDIA_TYPE = "text/csv"
COSTS_SCOPE = "costs"  # of the API key, for `key_scope` of each view; the configured permission class requires it
PROBLEM_SCHEMA = {"$ref": "#/components/schemas/Problem"}
ERROR_STATUSES = (400, 401, 403, 405, 500, 503)


def build_responses(body: Any) -> dict[Any, Any]:
    """Return the responses of one operation: `body` for 200, a problem document for each error."""
    problems = {
        (status, "application/problem+json"): OpenApiResponse(PROBLEM_SCHEMA, description=HTTPStatus(status).phrase)
        for status in ERROR_STATUSES
    }
    return {200: body} | problems


class ApiKey(Protocol):
    operator: bool
    dids: Sequence[str]


class Caller(Protocol):
    """Part of the authenticated caller that billing uses. `require` raises PermissionDenied for an agent of another key."""

    key: ApiKey

    def require(self, did: str) -> None: ...


class CsvRenderer(BaseRenderer):
    """Return the CSV text that the view has built."""

    media_type, format, charset = CSV_MEDIA_TYPE, "csv", "utf-8"

    def render(self, data: Any, accepted_media_type: str | None = None, renderer_context: Any = None) -> Any:
        return data


MAX_RESULTS = 10_000


class CostFilterSerializer(serializers.Serializer):
    """Filters on cost records."""

    agent = serializers.CharField(required=False, max_length=255, help_text="DID: only costs of this agent.")
    account = serializers.CharField(required=False, max_length=63, help_text="Only costs of this account.")
    environment = serializers.CharField(required=False, max_length=200, help_text="Only costs in this environment.")
    provider = serializers.CharField(required=False, max_length=32, help_text="Only costs at this provider.")


def require_single_parameters(request: Request) -> None:
    """Raise ValidationError with the names of the query parameters that are given more than once."""
    if repeated := {name: "Must be given at most once." for name, values in request.query_params.lists() if len(values) > 1}:
        raise ValidationError(repeated)


def validate_query(serializer_class: type[Serializer], request: Request) -> dict[str, Any]:
    """Return the validated query parameters. Raises ValidationError for invalid, repeated and unknown parameters."""
    require_single_parameters(request)
    query = serializer_class(data=request.query_params.dict())
    query.is_valid(raise_exception=True)
    if unknown := request.query_params.keys() - query.fields.keys() - {api_settings.URL_FORMAT_OVERRIDE}:
        raise ValidationError(dict.fromkeys(sorted(unknown), "Unknown query parameter."))
    parameters: dict[str, Any] = query.validated_data
    return parameters


def authorize_agents(request: Request, query: Mapping[str, Any]) -> Sequence[str] | None:
    """Return the agents whose costs the caller may read, None for all. Raises PermissionDenied for an agent of another key."""
    caller = cast(Caller, request.user)
    if "agent" in query:
        caller.require(query["agent"])
    return None if caller.key.operator else caller.key.dids


def get_metered_at() -> datetime | None:
    return Watermark.objects.filter(name="time").values_list("at", flat=True).first()


def format_day(day: date | None) -> str | None:
    return day.isoformat() if day else None
