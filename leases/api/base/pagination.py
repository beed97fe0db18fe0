"""Cursor pagination of lists.

Not a DRF pagination class: pages differ in their sort column, some results are built from two queries, and the bodies
are `{"results", "next"}` without `previous`."""

import base64
import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TypeVar
from urllib.parse import urlencode

from django.db.models import Model, Q, QuerySet
from rest_framework.request import Request

from leases.errors import InvalidRequest

DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE = 50, 200
Row = TypeVar("Row")


Position = tuple[datetime, Any]  # timestamp of the sort column and primary key


def paginate(
    rows: QuerySet[Any, Row], sort_column: str, request: Request, *, find_position: Callable[[Row], Position] | None = None
) -> tuple[list[Row], str | None]:
    """Return one page, newest first by the timestamp `sort_column`, and the URL of the next page or None.

    `rows` are instances, unless `find_position` finds the position of a row. The cursor names the last row of the previous
    page, so new rows do not shift the pages. Raises InvalidRequest for an invalid `limit` or `cursor`."""
    limit = parse_limit(request)
    if cursor := request.GET.get("cursor"):
        timestamp, pk = _decode_cursor(cursor, rows.model)
        # The first condition is implied by the second. It is the one by which the index is entered at the cursor: an index
        # scan with OR alone would read all rows that are newer.
        rows = rows.filter(
            Q(**{f"{sort_column}__lte": timestamp}),
            Q(**{f"{sort_column}__lt": timestamp}) | Q(**{sort_column: timestamp, "pk__lt": pk}),
        )
    page = list(rows.order_by(f"-{sort_column}", "-pk")[: limit + 1])
    if len(page) <= limit:
        return page, None
    last: Any = page[limit - 1]
    timestamp, pk = find_position(last) if find_position else (getattr(last, sort_column), last.pk)
    cursor = base64.urlsafe_b64encode(f"{timestamp.astimezone(UTC).isoformat()} {pk}".encode()).decode()
    return page[:limit], f"{request.path}?{urlencode({**request.GET.dict(), 'cursor': cursor})}"


def parse_limit(request: Request) -> int:
    text = request.GET.get("limit", str(DEFAULT_PAGE_SIZE))
    limit = int(text) if re.fullmatch("[0-9]{1,3}", text) else 0
    if not 1 <= limit <= MAX_PAGE_SIZE:
        raise InvalidRequest("limit", f"Must be an integer from 1 to {MAX_PAGE_SIZE}.")
    return limit


def _decode_cursor(cursor: str, model: type[Model]) -> Position:
    try:
        timestamp, pk = base64.b64decode(cursor, altchars=b"-_", validate=True).decode().split(" ")
        key = model._meta.pk.to_python(pk)
        if isinstance(key, int) and key.bit_length() > 63:
            raise ValueError  # outside the range of a database integer
        return datetime.fromisoformat(timestamp).astimezone(UTC), key
    except Exception:  # every decoding error means the same to the client
        raise InvalidRequest("cursor", "Not a cursor issued by this server.") from None
