"""Long lists, a page at a time."""

import base64
import re
from datetime import UTC, datetime
from typing import Any, TypeVar
from urllib.parse import urlencode

from django.db.models import Model, Q, QuerySet
from rest_framework.request import Request

from leases.errors import InvalidRequest

DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE = 50, 200
M = TypeVar("M", bound=Model)


def paginate(every: QuerySet[M], at: str, request: Request) -> tuple[list[M], str | None]:
    """One page, newest first by the moment `at`, and the URL of the next one. A page starts where the last one stopped,
    not at a number: what is added meanwhile shifts nothing."""
    asked = request.GET.get("limit", str(DEFAULT_PAGE_SIZE))
    limit = int(asked) if re.fullmatch("[0-9]{1,3}", asked) else 0
    if not 1 <= limit <= MAX_PAGE_SIZE:
        raise InvalidRequest("limit", f"1 to {MAX_PAGE_SIZE}.")
    if cursor := request.GET.get("cursor"):
        moment, pk = _decode_cursor(cursor, every.model)
        every = every.filter(Q(**{f"{at}__lt": moment}) | Q(**{at: moment, "pk__lt": pk}))
    found = list(every.order_by(f"-{at}", "-pk")[: limit + 1])
    if len(found) <= limit:
        return found, None
    last = found[limit - 1]
    cursor = base64.urlsafe_b64encode(f"{getattr(last, at).astimezone(UTC).isoformat()} {last.pk}".encode()).decode()
    return found[:limit], f"{request.path}?{urlencode({**request.GET.dict(), 'cursor': cursor})}"


def _decode_cursor(cursor: str, model: type[Model]) -> tuple[datetime, Any]:
    try:
        moment, pk = base64.b64decode(cursor, altchars=b"-_", validate=True).decode().split(" ")
        key = model._meta.pk.to_python(pk)
        if isinstance(key, int) and key.bit_length() > 63:
            raise ValueError  # no database compares with it
        return datetime.fromisoformat(moment).astimezone(UTC), key
    except Exception:  # whatever is wrong with it, we did not write it
        raise InvalidRequest("cursor", "Not a cursor that this server gave out.") from None
