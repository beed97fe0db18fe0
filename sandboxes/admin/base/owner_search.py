"""Search of rows by their sandbox or lease, without a condition over two tables.

PostgreSQL answers such a condition by reading the rows newest first. The rows of an environment that ended long ago are found
last."""

from datetime import timedelta
from typing import Any, NamedTuple

from django.contrib.admin import ModelAdmin
from django.db.models import Max, QuerySet
from django.http import HttpRequest

MAX_OWNERS_LISTED = 1000  # of a search; the rows of more owners are found by the join
CLOCK_MARGIN = timedelta(days=1)  # clocks of hosts differ by less


class OwnerSearch(NamedTuple):
    """Foreign key of the searched rows, whose model has a console page with search fields.

    began: column of the searched rows in which no row is later than the end of its owner; empty if there is none.
    ended: column of the owner that has its end, empty before."""

    owner: str
    began: str = ""
    ended: str = ""

    def narrow(self, model_admin: Any, request: HttpRequest, queryset: QuerySet[Any], term: str) -> QuerySet[Any]:
        """Limit the rows to those that a search can find: by a list of at most MAX_OWNERS_LISTED owners, and by their end."""
        owner: Any = queryset.model._meta.get_field(self.owner).related_model
        owner_admin = model_admin.admin_site.get_model_admin(owner)
        owners: QuerySet[Any] = ModelAdmin.get_search_results(owner_admin, request, owner._base_manager.order_by(), term)[0]
        keys = [*owners.values_list("pk", flat=True)[: MAX_OWNERS_LISTED + 1]]
        if len(keys) <= MAX_OWNERS_LISTED:
            queryset = queryset.filter(**{f"{self.owner}__in": keys})
        if keys and self.began and not owners.filter(**{f"{self.ended}__isnull": True}).exists():
            last = owners.aggregate(last=Max(self.ended))["last"]
            queryset = queryset.filter(**{f"{self.began}__lte": last + CLOCK_MARGIN})
        return queryset
