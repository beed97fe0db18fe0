"""Export of statements in the FOCUS format, for operator keys only."""

from django.http import HttpResponse, StreamingHttpResponse
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.views import APIView

from billing.api.statements import NOT_FOUND_RESPONSE, StatementDetailQuerySerializer, find_month, require_operator
from billing.api.views import COSTS_SCOPE, CSV_MEDIA_TYPE, CsvRenderer, build_responses, validate_query
from billing.focus.export import AccountMonth, iter_csv
from billing.focus.rows import PRELIMINARY


class FocusQuerySerializer(StatementDetailQuerySerializer):
    daily = serializers.BooleanField(
        default=False,
        help_text="Split each line of a closed month into rows by day, lease and environment, unless its costs have changed "
        "since. A month that is not closed is always split.",
    )


class StatementFocusView(APIView):
    key_scope = COSTS_SCOPE
    http_method_names = ["get", "head"]
    renderer_classes = [*APIView.renderer_classes, CsvRenderer]

    @extend_schema(
        operation_id="statements_export_focus",
        summary="Export a statement in the FOCUS format",
        parameters=[
            OpenApiParameter("account", str, OpenApiParameter.PATH, description="Name of the account."),
            OpenApiParameter("month", str, OpenApiParameter.PATH, description="Month such as 2026-11."),
            FocusQuerySerializer,
        ],
        responses={
            (200, CSV_MEDIA_TYPE): OpenApiTypes.STR,
            **{status: body for status, body in build_responses(None).items() if status != 200},
            **NOT_FOUND_RESPONSE,
        },
    )
    def get(self, request: Request, account: str, month: str) -> HttpResponse | StreamingHttpResponse:
        """Return a month's charges as CSV with the columns of FOCUS 1.0. Operator keys only.

        The sum of `BilledCost` is the total of the statement. A closed month never changes: its rows are the statement's
        lines and the credit used, by day the charges that were stored with it. With
        `preliminary=true` a month that is not closed is returned as it stands; each of its rows has the `x_Status`
        `preliminary`."""
        require_operator(request)
        query = validate_query(FocusQuerySerializer, request)
        source = find_month(account, month, preliminary=query["preliminary"])
        return build_csv_response(source, daily=query["daily"])


def build_csv_response(source: AccountMonth, *, daily: bool) -> StreamingHttpResponse:
    """Return the export of a month as a file. Its rows are read while they are sent."""
    parts = [source.account.name, f"{source.month:%Y-%m}", "focus"]
    parts += ["daily"] if daily else []
    parts += [PRELIMINARY] if source.status == PRELIMINARY else []
    return StreamingHttpResponse(
        iter_csv([source], daily=daily),
        content_type="text/csv; charset=utf-8",
        headers={"Content-Disposition": f'attachment; filename="{"-".join(parts)}.csv"'},
    )
