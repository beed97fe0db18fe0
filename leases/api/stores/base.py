"""Base view of a lease's stores."""

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import urlencode
from uuid import UUID

from django.http import HttpResponse
from drf_spectacular.utils import OpenApiParameter
from rest_framework.response import Response

from leases import leasing
from leases.api import schema
from leases.api.pagination import DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE
from leases.api.views import ApiRequest, LeaseApiView
from leases.errors import InvalidRequest
from sandboxes.stores import lease_stores
from sandboxes.stores.lease_stores import LeaseStores
from sandboxes.stores.limits import NAME_PATTERN, NAME_RULES

Item = TypeVar("Item")
SORT_ORDERS = ("newest", "oldest")
ORDER_PARAMETER = OpenApiParameter(
    "order", str, OpenApiParameter.QUERY, enum=SORT_ORDERS, description="What comes first; newest if it is not given."
)


CURSOR_PARAMETER = OpenApiParameter(
    "cursor",
    str,
    OpenApiParameter.QUERY,
    description="The id of an event: the page starts behind it. Follow `next`, or read on from the last event you have seen.",
)


LIMIT_PARAMETER = schema.PAGE_PARAMETERS[1]


class StoreApiView(LeaseApiView):
    def of(self, pk: UUID) -> LeaseStores:
        """The stores of a lease that the caller may see, for reading."""
        return lease_stores.open_stores(self.lease.agent_did, pk)

    def writable(self, pk: UUID) -> LeaseStores:
        """The same for writing: LeaseEnded when the lease is over."""
        return lease_stores.open_stores(leasing.require_active(pk, now=self.now).agent_did, pk)

    def listed(
        self, request: ApiRequest, found: Sequence[Item], more: bool, shown: Callable[[Item], dict[str, Any]], name: str
    ) -> HttpResponse:
        """One page; `name` is the field of what is shown that the next page starts behind."""
        results = [shown(one) for one in found]
        following = None
        if more and results:
            following = f"{request.path}?{urlencode({**request.GET.dict(), 'cursor': results[-1][name]})}"
        return Response({"results": results, "next": following})


def validate_name(name: str, field: str = "name") -> str:
    if not re.fullmatch(NAME_PATTERN, name, re.ASCII):
        raise InvalidRequest(field, f"Not {NAME_RULES}.")
    return name


def parse_name_cursor(request: ApiRequest) -> str:
    cursor = request.GET.get("cursor", "")
    if cursor and not re.fullmatch(NAME_PATTERN, cursor, re.ASCII):
        raise InvalidRequest("cursor", "Not a cursor that this server gave out.")
    return cursor


def parse_limit(request: ApiRequest) -> int:
    asked = request.GET.get("limit", str(DEFAULT_PAGE_SIZE))
    limit = int(asked) if re.fullmatch("[0-9]{1,3}", asked) else 0
    if not 1 <= limit <= MAX_PAGE_SIZE:
        raise InvalidRequest("limit", f"1 to {MAX_PAGE_SIZE}.")
    return limit
