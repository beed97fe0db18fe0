"""The doors to what was used and what it costs. Who calls, and what errors look like, is settled in the settings: this app
knows neither keys nor leases."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from http import HTTPStatus
from typing import Any, Protocol, cast

from django.http import HttpResponse
from django.utils import timezone
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiResponse, extend_schema
from rest_framework.exceptions import ValidationError
from rest_framework.renderers import BaseRenderer, JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.serializers import Serializer
from rest_framework.views import APIView

from billing.api import serializers as show
from billing.estimate import EstimateError, Scenario, estimate
from billing.forecast import forecast
from billing.models import Rate, Watermark
from billing.pricing import format_decimal
from billing.totals import sum_costs

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


class CostsView(APIView):
    http_method_names = ["get", "head"]
    renderer_classes = [JSONRenderer, CsvRenderer]

    @extend_schema(
        operation_id="costs_get",
        parameters=[show.CostQuerySerializer],
        responses=build_responses(show.CostReportSerializer) | {(200, CSV_MEDIA_TYPE): OpenApiTypes.STR},
    )
    def get(self, request: Request) -> HttpResponse:
        """What this key's agents have used and what that cost; with an operator's key that of all. `Accept: text/csv`, or
        `format=csv`, is answered with a table of everything."""
        said = validate_query(show.CostQuerySerializer, request)
        agents = authorize_agents(request, said)
        by, limit, since, until = said.pop("by"), said.pop("limit"), said.pop("since", None), said.pop("until", None)
        found = sum_costs(by, since=since, until=until, agents=agents, **said)
        if request.accepted_renderer.format == "csv":
            return Response(show.render_costs_csv(by, found))
        return Response(
            {
                "by": by,
                "since": show.format_day(since),
                "until": show.format_day(until),
                "metered_at": get_metered_at(),
                "total_usd": format_decimal(sum((total.usd for total in found), show.ZERO_USD)),
                "left_out": max(len(found) - limit, 0),
                "results": [show.render_cost_total(total) for total in found[:limit]],
            }
        )


class EstimateView(APIView):
    http_method_names = ["get", "head"]

    @extend_schema(
        operation_id="estimate_get",
        parameters=[show.EstimateQuerySerializer],
        responses=build_responses(show.EstimateSerializer),
    )
    def get(self, request: Request) -> HttpResponse:
        """What so many agents would cost in a month, by the rates that are valid now."""
        said = validate_query(show.EstimateQuerySerializer, request)
        try:
            found = estimate(Scenario(**said), Rate.objects.all(), now=timezone.now())
        except EstimateError as wrong:
            raise ValidationError({wrong.field: str(wrong)}) from None
        return Response(show.render_estimate(found))


class ForecastView(APIView):
    http_method_names = ["get", "head"]

    @extend_schema(
        operation_id="forecast_get",
        parameters=[show.ForecastQuerySerializer],
        responses=build_responses(show.ForecastSerializer),
    )
    def get(self, request: Request) -> HttpResponse:
        """What this month will cost if the days to come cost what the last ones have, and when a budget is spent: of this
        key's agents, with an operator's key of all."""
        said = validate_query(show.ForecastQuerySerializer, request)
        found = forecast(now=timezone.now(), agents=authorize_agents(request, said), **said)
        return Response({"metered_at": get_metered_at(), **show.render_forecast(found)})
