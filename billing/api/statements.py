"""Monthly statements of accounts, for operator keys only. Agents use /costs."""

import csv
import re
from collections.abc import Iterable, Sequence
from datetime import date
from io import StringIO
from typing import Any, cast

from django.db.models import QuerySet
from django.http import HttpResponse
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from rest_framework import serializers
from rest_framework.exceptions import NotFound, PermissionDenied
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from billing import statements
from billing.api.views import (
    COSTS_SCOPE,
    CSV_MEDIA_TYPE,
    MAX_RESULTS,
    PROBLEM_SCHEMA,
    Caller,
    CsvRenderer,
    build_responses,
    validate_query,
)
from billing.focus.export import AccountMonth, open_month
from billing.models import Account, BillableItem, Statement, StatementLine
from billing.pricing import format_decimal

NOT_FOUND_RESPONSE = {(404, "application/problem+json"): OpenApiResponse(PROBLEM_SCHEMA, description="Not Found")}
MONTH_PATTERN = re.compile(r"(?P<year>20\d\d)-(?P<month>0[1-9]|1[0-2])", re.ASCII)


def parse_month(text: str) -> date | None:
    """Return the first day of a month such as 2026-11, None if `text` is not a month."""
    match = MONTH_PATTERN.fullmatch(text)
    return date(int(match["year"]), int(match["month"]), 1) if match else None


class MonthField(serializers.CharField):
    """Month such as 2026-11, as its first day."""

    def to_internal_value(self, data: Any) -> Any:
        month = parse_month(super().to_internal_value(data))
        if month is None:
            raise serializers.ValidationError("Not a month such as 2026-11.")
        return month


class StatementQuerySerializer(serializers.Serializer):
    account = serializers.CharField(required=False, max_length=63, help_text="Only statements of this account.")
    month = MonthField(required=False, help_text="Only statements of this month, such as 2026-11.")
    limit = serializers.IntegerField(default=1000, min_value=1, max_value=MAX_RESULTS, help_text="Maximum number of results.")


class StatementLineSerializer(serializers.Serializer):
    kind = serializers.ChoiceField(
        StatementLine.Kind.values, help_text="Usage of this month, or correction of an earlier month."
    )
    for_month = serializers.CharField(help_text="Month of the usage, such as 2026-11.")
    agent = serializers.CharField(help_text="DID; empty for a plan or a sandbox that no lease held.")
    provider = serializers.CharField()
    item = serializers.CharField()
    unit = serializers.CharField()
    quantity = serializers.CharField()
    free = serializers.CharField(help_text="Part of the quantity within the allowance.")
    rate_usd = serializers.CharField(help_text="USD per unit; empty for model calls, whose cost is stated.")
    rate_from = serializers.CharField(help_text="Start of the rate; empty without a rate.")
    usd = serializers.CharField(
        help_text="(quantity - free) x rate_usd, rounded half up to cents. A correction is the difference to what was billed."
    )
    status = serializers.CharField(help_text="final, or preliminary for a month that is not closed.")
    estimated_usd = serializers.CharField(help_text="Estimated part of `usd`.")
    unpriced_calls = serializers.IntegerField(
        help_text="Number of model calls without a price, which `usd` does not include; negative in a correction of calls "
        "that have a price since."
    )
    model = serializers.CharField(
        help_text="Model of the calls; empty for other items, for calls that name no model, and for all models together on "
        "statements of earlier versions."
    )
    input_tokens = serializers.IntegerField(
        help_text="Tokens of the model calls, with those read from and written to the cache; a difference in a correction."
    )
    cached_tokens = serializers.IntegerField(help_text="Part of `input_tokens` that was read from the cache.")
    cache_written_tokens = serializers.IntegerField(help_text="Part of `input_tokens` that was written to the cache.")
    output_tokens = serializers.IntegerField(help_text="Includes reasoning.")
    estimated_tokens = serializers.IntegerField(
        allow_null=True,
        help_text="Estimated tokens of calls whose usage is unknown or incomplete, beside `input_tokens` and `output_tokens`; "
        "null on statements of earlier versions.",
    )


class StatementSerializer(serializers.Serializer):
    account = serializers.CharField()
    month = serializers.CharField()
    closed_at = serializers.DateTimeField(allow_null=True, help_text="Null if the month is not closed.")
    subtotal_usd = serializers.CharField(help_text="Sum of the lines.")
    credit_used_usd = serializers.CharField()
    total_usd = serializers.CharField(help_text="Amount due; negative: refund.")
    estimated_usd = serializers.CharField(help_text="Estimated part of the usage of this month, without corrections.")
    unpriced_calls = serializers.IntegerField(
        help_text="Number of model calls of this month without a price, which the amounts do not include."
    )


class StatementDetailSerializer(StatementSerializer):
    lines = StatementLineSerializer(many=True)


class StatementDetailQuerySerializer(serializers.Serializer):
    preliminary = serializers.BooleanField(default=False, help_text="Also return the month if it is not closed yet.")


class StatementListSerializer(serializers.Serializer):
    left_out = serializers.IntegerField(help_text="Number of results beyond the limit.")
    results = StatementSerializer(many=True)


def require_operator(request: Request) -> None:
    if not cast(Caller, request.user).key.operator:
        raise PermissionDenied("Statements require an operator's key. /api/v1/costs has the costs of this key's agents.")


class StatementListView(APIView):
    key_scope = COSTS_SCOPE
    http_method_names = ["get", "head"]
    renderer_classes = [*APIView.renderer_classes, CsvRenderer]

    @extend_schema(
        operation_id="statements_list",
        summary="List statements",
        parameters=[StatementQuerySerializer],
        responses=build_responses(StatementListSerializer) | {(200, CSV_MEDIA_TYPE): OpenApiTypes.STR},
    )
    def get(self, request: Request) -> HttpResponse:
        """Return the statements of closed months, newest first. Operator keys only.

        `Accept: text/csv` or `format=csv` returns all results as a table."""
        require_operator(request)
        parameters = validate_query(StatementQuerySerializer, request)
        filters = {
            field: parameters[name] for name, field in (("account", "account__name"), ("month", "month")) if name in parameters
        }
        rows = Statement.objects.filter(**filters).select_related("account").order_by("-month", "account__name")
        if request.accepted_renderer.format == "csv":
            return Response(render_statements_csv(rows))
        count = rows.count()
        results = [render_statement(row) for row in rows[: parameters["limit"]]]
        return Response({"left_out": count - len(results), "results": results})


class StatementDetailView(APIView):
    key_scope = COSTS_SCOPE
    http_method_names = ["get", "head"]
    renderer_classes = [*APIView.renderer_classes, CsvRenderer]

    @extend_schema(
        operation_id="statements_get",
        summary="Get a statement",
        parameters=[
            OpenApiParameter("account", str, OpenApiParameter.PATH, description="Name of the account."),
            OpenApiParameter("month", str, OpenApiParameter.PATH, description="Month such as 2026-11."),
            StatementDetailQuerySerializer,
        ],
        responses=build_responses(StatementDetailSerializer) | {(200, CSV_MEDIA_TYPE): OpenApiTypes.STR} | NOT_FOUND_RESPONSE,
    )
    def get(self, request: Request, account: str, month: str) -> HttpResponse:
        """Return one statement with its lines: usage, then corrections of earlier closed months. Operator keys only.

        `Accept: text/csv` or `format=csv` returns the lines as a table. With `preliminary=true` a month that is not closed is
        returned as it stands; each of its lines has the status `preliminary`."""
        require_operator(request)
        query = validate_query(StatementDetailQuerySerializer, request)
        source = find_month(account, month, preliminary=query["preliminary"])
        if request.accepted_renderer.format == "csv":
            lines = find_lines(source.statement) if source.statement else source.lines
            return Response(render_lines_csv(lines, preliminary=source.statement is None))
        if source.statement is None:
            return Response(render_preview_detail(source.account, source.month, source.lines))
        return Response(render_statement_detail(source.statement))


def find_month(account: str, month: str, *, preliminary: bool) -> AccountMonth:
    """Return the month of an account that a URL names. Raise NotFound if it is not closed, unless `preliminary` is set."""
    owner, first_day = Account.objects.filter(name=account).first(), parse_month(month)
    source = open_month(owner, first_day, preliminary=preliminary) if owner and first_day else None
    if source is None:
        raise NotFound("There is no such statement. preliminary=true returns a month that is not closed.")
    return source


def find_lines(row: Statement) -> QuerySet[StatementLine]:
    """Return the lines of a statement with their rates, in one query."""
    return row.lines.select_related("rate")


def render_statement(row: Statement) -> dict[str, Any]:
    """Serialize a statement. Needs select_related("account")."""
    return {
        "account": row.account.name,
        "month": f"{row.month:%Y-%m}",
        "closed_at": row.closed_at,
        "subtotal_usd": str(row.subtotal),
        "credit_used_usd": str(row.credit_used),
        "total_usd": str(row.total),
        "estimated_usd": str(row.estimated_usd),
        "unpriced_calls": row.unpriced,
    }


def render_statement_detail(row: Statement) -> dict[str, Any]:
    return render_statement(row) | {"lines": [render_statement_line(line) for line in find_lines(row)]}


def render_preview_detail(account: Account, month: date, lines: Sequence[StatementLine]) -> dict[str, Any]:
    """Serialize the lines of an open month like a statement that uses the credit of now."""
    draft = statements.build_statement(account, month, lines)
    return render_statement(draft) | {"lines": [render_statement_line(line, preliminary=True) for line in lines]}


def render_statement_line(line: StatementLine, *, preliminary: bool = False) -> dict[str, Any]:
    return {
        "kind": line.kind,
        "for_month": f"{line.for_month:%Y-%m}",
        "agent": line.agent_did,
        "provider": line.provider,
        "item": line.item,
        "unit": BillableItem(line.item).label,
        "quantity": format_decimal(line.quantity),
        "free": format_decimal(line.free),
        "rate_usd": format_decimal(line.rate.usd) if line.rate else "",
        "rate_from": f"{line.rate.valid_from:%Y-%m-%dT%H:%M:%SZ}" if line.rate else "",
        "usd": str(line.usd),
        "status": "preliminary" if preliminary else "final",
        "estimated_usd": str(line.estimated_usd),
        "unpriced_calls": line.unpriced,
        "model": line.model,
        "input_tokens": line.input_tokens,
        "cached_tokens": line.cached_tokens,
        "cache_written_tokens": line.cache_written_tokens,
        "output_tokens": line.output_tokens,
        "estimated_tokens": line.estimated_tokens,
    }


def render_lines_csv(lines: Iterable[StatementLine], *, preliminary: bool = False) -> str:
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*StatementLineSerializer().fields])
    for line in lines:
        writer.writerow(render_statement_line(line, preliminary=preliminary).values())
    return text.getvalue()


def render_statements_csv(rows: Iterable[Statement]) -> str:
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*StatementSerializer().fields])
    for row in rows:
        values = render_statement(row)
        writer.writerow([*(values | {"closed_at": row.closed_at.isoformat()}).values()])
    return text.getvalue()
