"""Changelists with tabs, a capped row count and filters by link columns."""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

from django.contrib.admin import AllValuesFieldListFilter
from django.core.paginator import Paginator
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils.functional import cached_property
from unfold.views import ChangeList

from sandboxes.db import database_time
from sandboxes.formatting import pluralize

LINK_FILTER_FIELDS = ("agent_did", "environment_id", "holder", "sandbox", "lease")  # columns that other pages link by


def parse_uuid(text: str) -> uuid.UUID | None:
    """Parse a complete UUID typed by a user, or return None."""
    try:
        return uuid.UUID(text.strip())
    except ValueError:
        return None


class CappedPaginator(Paginator):
    """Paginator that counts at most 1,000 rows: counting all of a large table costs more than rendering the page."""

    template_name, cap, capped = "admin/pagination_capped.html", 1000, False

    @property
    def rows(self) -> QuerySet[Any]:
        return cast(QuerySet[Any], self.object_list)

    @cached_property
    def count(self) -> int:
        number: int = self.rows.order_by().values("pk")[: self.cap + 1].count()
        self.capped = number > self.cap
        return min(number, self.cap)

    @property
    def summary(self) -> str:
        meta = self.rows.model._meta
        exact = pluralize(self.count, str(meta.verbose_name), str(meta.verbose_name_plural))
        return f"More than {exact}" if self.capped else exact


@dataclass(frozen=True)
class ListTab:
    """Named subset of a changelist. The dashboard tile that links to a tab counts the same rows."""

    title: str
    empty_text: str
    build_filter: Callable[[datetime], Q] | None = None  # None: every row

    def get_filter(self, now: datetime) -> Q:
        return self.build_filter(now) if self.build_filter else Q()


class KnownValuesFilter(AllValuesFieldListFilter):
    """Filter by a text column, with a choice for each known value. Django's filter reads all rows for the choices."""

    known_values: Sequence[str] = ()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.lookup_choices: Any = sorted(self.known_values)


class TabbedChangeList(ChangeList):
    """Changelist of the tab named by the query parameter `slice`, which is kept apart from search and filters."""

    root_queryset: QuerySet[Any]
    result_list: Any

    @property
    def tab(self) -> ListTab | None:
        tabs = self.model_admin.list_tabs
        return tabs.get(self.params.get("slice"), next(iter(tabs.values()), None))

    @property
    def link_filters(self) -> list[dict[str, str]]:
        """Active filters by link columns, each with the query string that removes it."""
        return [
            {
                "column": str(self.opts.get_field(name).verbose_name),
                "value": self.params[name],
                "remove_url": self.get_query_string(remove=[name]),
            }
            for name in LINK_FILTER_FIELDS
            if name in self.params
        ]

    @property
    def all_rows_url(self) -> str:
        """Query string of the tab with every row, search and filters kept. Empty if this tab has every row."""
        if self.tab is None or self.tab.build_filter is None:
            return ""
        unfiltered = next(name for name, tab in self.model_admin.list_tabs.items() if not tab.build_filter)
        return self.get_query_string({"slice": unfiltered})

    def get_filters_params(self, params: Any = None) -> dict[str, Any]:
        """Strip NUL, which PostgreSQL rejects in text."""
        filters: dict[str, Any] = super().get_filters_params(params)
        columns = self.model_admin.filter_columns
        return {
            columns.get(name, name): [value.replace("\0", "") for value in values]
            for name, values in filters.items()
            if name != "slice"
        }

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> QuerySet[Any]:
        if self.tab:
            self.root_queryset = self.root_queryset.filter(self.tab.get_filter(database_time.now()))
        return super().get_queryset(request, exclude_parameters).defer(*self.model_admin.list_defer)

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        self.full_result_count = self.result_count  # Unfold offers "Show all" if the two differ
        self.result_list = list(self.result_list)
        self.model_admin.annotate_rows(self.result_list)
