"""Monthly statements."""

import csv
import re
from collections.abc import Iterable
from datetime import date
from io import StringIO
from typing import Any, cast

from django.http import HttpResponse
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from rest_framework import serializers
from rest_framework.exceptions import NotFound, PermissionDenied
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from billing.api.views import CSV_MEDIA_TYPE, MAX_RESULTS, PROBLEM_SCHEMA, Caller, CsvRenderer, build_responses
from billing.models import BillableItem, Statement, StatementLine
from billing.pricing import format_decimal

NOT_FOUND_RESPONSE = {(404, "application/problem+json"): OpenApiResponse(PROBLEM_SCHEMA, description="Not Found")}


MONTH_PATTERN = re.compile(r"(?P<year>20\d\d)-(?P<month>0[1-9]|1[0-2])", re.ASCII)


def parse_month(said: str) -> date | None:
    """The first day of a month such as 2026-11."""
    found = MONTH_PATTERN.fullmatch(said)
    return date(int(found["year"]), int(found["month"]), 1) if found else None


class MonthField(serializers.CharField):
    """Such as 2026-11."""

    def to_internal_value(self, data: Any) -> Any:
        found = parse_month(super().to_internal_value(data))
        if found is None:
            raise serializers.ValidationError("Not a month such as 2026-11.")
        return found


class StatementQuerySerializer(serializers.Serializer):
    account = serializers.CharField(required=False, max_length=63, help_text="Of this account only.")
    month = MonthField(required=False, help_text="Of this month only, such as 2026-11.")
    limit = serializers.IntegerField(default=1000, min_value=1, max_value=MAX_RESULTS, help_text="Results that are shown.")


class StatementLineSerializer(serializers.Serializer):
    kind = serializers.ChoiceField(StatementLine.Kind.values, help_text="correction: of a month that was closed before.")
    for_month = serializers.CharField(help_text="In which it was used, such as 2026-11.")
    agent = serializers.CharField(help_text="Empty: of no agent, such as a plan, or a sandbox that nobody held yet.")
    provider = serializers.CharField()
    item = serializers.CharField()
    unit = serializers.CharField()
    quantity = serializers.CharField()
    usd = serializers.CharField(help_text="Rounded to cents; below 0 where a correction gives money back.")


class StatementSerializer(serializers.Serializer):
    account = serializers.CharField()
    month = serializers.CharField()
    closed_at = serializers.DateTimeField()
    subtotal_usd = serializers.CharField(help_text="The sum of its lines.")
    credit_used_usd = serializers.CharField()
    total_usd = serializers.CharField(help_text="Below 0: money back.")


class StatementDetailSerializer(StatementSerializer):
    lines = StatementLineSerializer(many=True)


class StatementListSerializer(serializers.Serializer):
    left_out = serializers.IntegerField(help_text="Results past the limit.")
    results = StatementSerializer(many=True)


def require_operator(request: Request) -> None:
    if not cast(Caller, request.user).key.operator:
        raise PermissionDenied("Statements are for operators' keys. What your agents cost is at /api/v1/costs.")


class StatementListView(APIView):
    http_method_names = ["get", "head"]
    renderer_classes = [*APIView.renderer_classes, CsvRenderer]

    @extend_schema(
        operation_id="statements_list",
        parameters=[StatementQuerySerializer],
        responses=build_responses(StatementListSerializer) | {(200, CSV_MEDIA_TYPE): OpenApiTypes.STR},
    )
    def get(self, request: Request) -> HttpResponse:
        """Closed months, newest first. Operators' keys only. `Accept: text/csv` is answered with a table of all."""
        require_operator(request)
        form = StatementQuerySerializer(data=request.query_params.dict())
        form.is_valid(raise_exception=True)
        said = form.validated_data
        only = {field: said[name] for name, field in (("account", "account__name"), ("month", "month")) if name in said}
        found = Statement.objects.filter(**only).select_related("account").order_by("-month", "account__name")
        if request.accepted_renderer.format == "csv":
            return Response(render_statements_csv(found))
        number = found.count()
        results = [render_statement(row) for row in found[: said["limit"]]]
        return Response({"left_out": number - len(results), "results": results})


class StatementDetailView(APIView):
    http_method_names = ["get", "head"]
    renderer_classes = [*APIView.renderer_classes, CsvRenderer]

    @extend_schema(
        operation_id="statements_get",
        parameters=[
            OpenApiParameter("account", str, OpenApiParameter.PATH, description="Its name."),
            OpenApiParameter("month", str, OpenApiParameter.PATH, description="Such as 2026-11."),
        ],
        responses=build_responses(StatementDetailSerializer) | {(200, CSV_MEDIA_TYPE): OpenApiTypes.STR} | NOT_FOUND_RESPONSE,
    )
    def get(self, request: Request, account: str, month: str) -> HttpResponse:
        """One closed month with its lines: what was used, then what corrects months that were closed before. Operators' keys
        only. `Accept: text/csv` is answered with the lines as a table."""
        require_operator(request)
        when = parse_month(month)
        rows = Statement.objects.filter(account__name=account).select_related("account")
        found = rows.filter(month=when).first() if when else None
        if found is None:
            raise NotFound("No such month is closed.")
        if request.accepted_renderer.format == "csv":
            return Response(render_lines_csv(found.lines.all()))
        return Response(render_statement_detail(found))


def render_statement(row: Statement) -> dict[str, Any]:
    """With select_related("account")."""
    return {
        "account": row.account.name,
        "month": f"{row.month:%Y-%m}",
        "closed_at": row.closed_at,
        "subtotal_usd": str(row.subtotal),
        "credit_used_usd": str(row.credit_used),
        "total_usd": str(row.total),
    }


def render_statement_detail(row: Statement) -> dict[str, Any]:
    return render_statement(row) | {"lines": [render_statement_line(line) for line in row.lines.all()]}


def render_statement_line(line: StatementLine) -> dict[str, Any]:
    return {
        "kind": line.kind,
        "for_month": f"{line.for_month:%Y-%m}",
        "agent": line.agent_did,
        "provider": line.provider,
        "item": line.item,
        "unit": BillableItem(line.item).label,
        "quantity": format_decimal(line.quantity),
        "usd": str(line.usd),
    }


def render_lines_csv(lines: Iterable[StatementLine]) -> str:
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*StatementLineSerializer().fields])
    for line in lines:
        writer.writerow(render_statement_line(line).values())
    return text.getvalue()


def render_statements_csv(rows: Iterable[Statement]) -> str:
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*StatementSerializer().fields])
    for row in rows:
        shown = render_statement(row)
        writer.writerow([*(shown | {"closed_at": row.closed_at.isoformat()}).values()])
    return text.getvalue()
