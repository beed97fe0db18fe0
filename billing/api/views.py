"""Shared parts of the billing views."""

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

from billing.models import Watermark

CSV_MEDIA_TYPE = "text/csv"


PROBLEM_SCHEMA = {"$ref": "#/components/schemas/Problem"}


ERROR_STATUSES = (400, 401, 403, 405, 406, 500, 503)


def build_responses(body: Any) -> dict[Any, Any]:
    """The responses of one operation."""
    bad = {
        (status, "application/problem+json"): OpenApiResponse(PROBLEM_SCHEMA, description=HTTPStatus(status).phrase)
        for status in ERROR_STATUSES
    }
    return {200: body} | bad


class ApiKey(Protocol):
    operator: bool
    dids: Sequence[str]


class Caller(Protocol):
    """Who calls, as far as it matters here. `require` is PermissionDenied for agents that are not the caller's."""

    key: ApiKey

    def require(self, did: str) -> None: ...


class CsvRenderer(BaseRenderer):
    """What a view has made CSV of already."""

    media_type, format, charset = CSV_MEDIA_TYPE, "csv", "utf-8"

    def render(self, data: Any, accepted_media_type: str | None = None, renderer_context: Any = None) -> Any:
        return data


MAX_RESULTS = 10_000


class CostFilterSerializer(serializers.Serializer):
    """Whose costs, of those that the caller may see."""

    agent = serializers.CharField(required=False, max_length=255, help_text="Of this agent only: its DID.")
    account = serializers.CharField(required=False, max_length=63, help_text="Of this account only.")
    environment = serializers.CharField(required=False, max_length=200, help_text="In this environment only.")
    provider = serializers.CharField(required=False, max_length=32, help_text="At this provider only.")


def validate_query(form: type[Serializer], request: Request) -> dict[str, Any]:
    """What the address asks, by this form; ValidationError names what is wrong, or said twice."""
    if twice := {name: "Said more than once." for name, said in request.query_params.lists() if len(said) > 1}:
        raise ValidationError(twice)
    read = form(data=request.query_params.dict())
    read.is_valid(raise_exception=True)
    found: dict[str, Any] = read.validated_data
    return found


def authorize_agents(request: Request, said: Mapping[str, Any]) -> Sequence[str] | None:
    """Whose costs the caller may see; None: everybody's. PermissionDenied if it asks for another agent's."""
    caller = cast(Caller, request.user)
    if "agent" in said:
        caller.require(said["agent"])
    return None if caller.key.operator else caller.key.dids


def get_metered_at() -> datetime | None:
    return Watermark.objects.filter(name="time").values_list("at", flat=True).first()


def format_day(day: date | None) -> str | None:
    return day.isoformat() if day else None
