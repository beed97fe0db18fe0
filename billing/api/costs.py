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
from billing.costs import costs
from billing.estimate import Scenario, Unpriceable, estimate, forecast
from billing.models import Rate, Watermark
from billing.pricing import plain

CSV = "text/csv"
PROBLEM = {"$ref": "#/components/schemas/Problem"}
ERRORS = (400, 401, 403, 405, 406, 500, 503)


def answers(body: Any) -> dict[Any, Any]:
    """The responses of one operation."""
    bad = {
        (status, "application/problem+json"): OpenApiResponse(PROBLEM, description=HTTPStatus(status).phrase)
        for status in ERRORS
    }
    return {200: body} | bad


class Key(Protocol):
    operator: bool
    dids: Sequence[str]


class Caller(Protocol):
    """Who calls, as far as it matters here. `require` is PermissionDenied for agents that are not the caller's."""

    key: Key

    def require(self, did: str) -> None: ...


class Table(BaseRenderer):
    """What a view has made CSV of already."""

    media_type, format, charset = CSV, "csv", "utf-8"

    def render(self, data: Any, accepted_media_type: str | None = None, renderer_context: Any = None) -> Any:
        return data


def asked(form: type[Serializer], request: Request) -> dict[str, Any]:
    """What the address asks, by this form; ValidationError names what is wrong, or said twice."""
    if twice := {name: "Said more than once." for name, said in request.query_params.lists() if len(said) > 1}:
        raise ValidationError(twice)
    read = form(data=request.query_params.dict())
    read.is_valid(raise_exception=True)
    found: dict[str, Any] = read.validated_data
    return found


def agents_of(request: Request, said: Mapping[str, Any]) -> Sequence[str] | None:
    """Whose costs the caller may see; None: everybody's. PermissionDenied if it asks for another agent's."""
    caller = cast(Caller, request.user)
    if "agent" in said:
        caller.require(said["agent"])
    return None if caller.key.operator else caller.key.dids


def metered_at() -> datetime | None:
    return Watermark.objects.filter(name="time").values_list("at", flat=True).first()


class Costs(APIView):
    http_method_names = ["get", "head"]
    renderer_classes = [JSONRenderer, Table]

    @extend_schema(
        operation_id="costs_get",
        parameters=[show.CostsAsked],
        responses=answers(show.CostsShown) | {(200, CSV): OpenApiTypes.STR},
    )
    def get(self, request: Request) -> HttpResponse:
        """What this key's agents have used and what that cost; with an operator's key that of all. `Accept: text/csv`, or
        `format=csv`, is answered with a table of everything."""
        said = asked(show.CostsAsked, request)
        agents = agents_of(request, said)
        by, limit, since, until = said.pop("by"), said.pop("limit"), said.pop("since", None), said.pop("until", None)
        found = costs(by, since=since, until=until, agents=agents, **said)
        if request.accepted_renderer.format == "csv":
            return Response(show.to_csv(by, found))
        return Response(
            {
                "by": by,
                "since": show.day_shown(since),
                "until": show.day_shown(until),
                "metered_at": metered_at(),
                "total_usd": plain(sum((total.usd for total in found), show.NOTHING)),
                "left_out": max(len(found) - limit, 0),
                "results": [show.cost_shown(total) for total in found[:limit]],
            }
        )


class Estimates(APIView):
    http_method_names = ["get", "head"]

    @extend_schema(operation_id="estimate_get", parameters=[show.EstimateAsked], responses=answers(show.EstimateShown))
    def get(self, request: Request) -> HttpResponse:
        """What so many agents would cost in a month, by the rates that are valid now."""
        said = asked(show.EstimateAsked, request)
        try:
            found = estimate(Scenario(**said), Rate.objects.all(), now=timezone.now())
        except Unpriceable as wrong:
            raise ValidationError({wrong.field: str(wrong)}) from None
        return Response(show.estimate_shown(found))


class Forecasts(APIView):
    http_method_names = ["get", "head"]

    @extend_schema(operation_id="forecast_get", parameters=[show.ForecastAsked], responses=answers(show.ForecastShown))
    def get(self, request: Request) -> HttpResponse:
        """What this month will cost if the days to come cost what the last ones have, and when a budget is spent: of this
        key's agents, with an operator's key of all."""
        said = asked(show.ForecastAsked, request)
        found = forecast(now=timezone.now(), agents=agents_of(request, said), **said)
        return Response({"metered_at": metered_at(), **show.forecast_shown(found)})
