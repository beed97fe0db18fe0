"""The doors to statements. They are accounts', not agents': an agent's key is answered 403, and has /costs for its own part."""

from typing import cast

from django.http import HttpResponse
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from rest_framework.exceptions import NotFound, PermissionDenied
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from billing.api import serializers_statements as show
from billing.api.costs import CSV_MEDIA_TYPE, PROBLEM_SCHEMA, Caller, CsvRenderer, build_responses
from billing.models import Statement

NOT_FOUND_RESPONSE = {(404, "application/problem+json"): OpenApiResponse(PROBLEM_SCHEMA, description="Not Found")}


def require_operator(request: Request) -> None:
    if not cast(Caller, request.user).key.operator:
        raise PermissionDenied("Statements are for operators' keys. What your agents cost is at /api/v1/costs.")


class StatementListView(APIView):
    http_method_names = ["get", "head"]
    renderer_classes = [JSONRenderer, CsvRenderer]

    @extend_schema(
        operation_id="statements_list",
        parameters=[show.StatementQuerySerializer],
        responses=build_responses(show.StatementListSerializer) | {(200, CSV_MEDIA_TYPE): OpenApiTypes.STR},
    )
    def get(self, request: Request) -> HttpResponse:
        """Closed months, newest first. Operators' keys only. `Accept: text/csv` is answered with a table of all."""
        require_operator(request)
        form = show.StatementQuerySerializer(data=request.query_params.dict())
        form.is_valid(raise_exception=True)
        said = form.validated_data
        only = {field: said[name] for name, field in (("account", "account__name"), ("month", "month")) if name in said}
        found = Statement.objects.filter(**only).select_related("account").order_by("-month", "account__name")
        if request.accepted_renderer.format == "csv":
            return Response(show.render_statements_csv(found))
        number = found.count()
        results = [show.render_statement(row) for row in found[: said["limit"]]]
        return Response({"left_out": number - len(results), "results": results})


class StatementDetailView(APIView):
    http_method_names = ["get", "head"]
    renderer_classes = [JSONRenderer, CsvRenderer]

    @extend_schema(
        operation_id="statements_get",
        parameters=[
            OpenApiParameter("account", str, OpenApiParameter.PATH, description="Its name."),
            OpenApiParameter("month", str, OpenApiParameter.PATH, description="Such as 2026-11."),
        ],
        responses=build_responses(show.StatementDetailSerializer)
        | {(200, CSV_MEDIA_TYPE): OpenApiTypes.STR}
        | NOT_FOUND_RESPONSE,
    )
    def get(self, request: Request, account: str, month: str) -> HttpResponse:
        """One closed month with its lines: what was used, then what corrects months that were closed before. Operators' keys
        only. `Accept: text/csv` is answered with the lines as a table."""
        require_operator(request)
        when = show.parse_month(month)
        rows = Statement.objects.filter(account__name=account).select_related("account")
        found = rows.filter(month=when).first() if when else None
        if found is None:
            raise NotFound("No such month is closed.")
        if request.accepted_renderer.format == "csv":
            return Response(show.render_lines_csv(found.lines.all()))
        return Response(show.render_statement_detail(found))
