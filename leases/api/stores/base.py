"""Base view of the stores of a lease: chat history, audit log, artifacts, session index.

The stores can be written while the lease is active (410 afterwards), and read until LEASEHOLD_KEEP_STATE after its end. A
write does not renew the lease."""

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import urlencode

from django.http import HttpResponse
from drf_spectacular.utils import OpenApiParameter
from rest_framework.response import Response

from leases.api.base import schema
from leases.api.base.views import ApiRequest, LeaseApiView
from leases.errors import InvalidRequest
from sandboxes.stores import lease_stores
from sandboxes.stores.lease_stores import LeaseStores
from sandboxes.stores.limits import NAME_PATTERN, NAME_RULES

Item = TypeVar("Item")
SORT_ORDERS = ("newest", "oldest")
ORDER_PARAMETER = OpenApiParameter(
    "order", str, OpenApiParameter.QUERY, enum=SORT_ORDERS, description="Sort order. Default: newest first."
)
CURSOR_PARAMETER = OpenApiParameter(
    "cursor",
    str,
    OpenApiParameter.QUERY,
    description="Id of the event before the first result: taken from `next`, or of the last event already read.",
)
LIMIT_PARAMETER = schema.PAGE_PARAMETERS[1]


class StoreApiView(LeaseApiView):
    def open_for_reading(self) -> LeaseStores:
        return lease_stores.open_stores(self.lease.agent_did, self.lease.pk)

    def open_for_writing(self) -> LeaseStores:
        """Return the stores of the lease. Raises LeaseEnded if the lease is not active. Called after the body was read."""
        self.require_active()
        return self.open_for_reading()

    def build_page(
        self, items: Sequence[Item], more: bool, serialize: Callable[[Item], dict[str, Any]], cursor_field: str
    ) -> HttpResponse:
        """Return one page. `cursor_field` names the field of the last result after which the next page starts."""
        results = [serialize(item) for item in items]
        next_url = None
        if more and results:
            query = urlencode({**self.request.GET.dict(), "cursor": results[-1][cursor_field]})
            next_url = f"{self.request.path}?{query}"
        return Response({"results": results, "next": next_url})


def validate_name(name: str, field: str = "name") -> str:
    if not re.fullmatch(NAME_PATTERN, name, re.ASCII):
        raise InvalidRequest(field, f"Not {NAME_RULES}.")
    return name


def parse_name_cursor(request: ApiRequest) -> str:
    cursor = request.GET.get("cursor", "")
    if cursor and not re.fullmatch(NAME_PATTERN, cursor, re.ASCII):
        raise InvalidRequest("cursor", "Not a cursor issued by this server.")
    return cursor
