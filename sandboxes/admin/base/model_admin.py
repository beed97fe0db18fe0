"""Base classes of the console's model admins."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from django.contrib import messages
from django.contrib.admin import ShowFacets
from django.core.exceptions import ValidationError
from django.db import models
from django.db.models import Model
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect

from sandboxes.admin.base.actions import ActionModelAdmin
from sandboxes.admin.base.changelist import CappedPaginator, ListTab, TabbedChangeList, parse_uuid
from sandboxes.admin.base.concurrent_changes import build_form_class
from sandboxes.admin.base.fields import DurationTextField, LineListField, MultilineTextField, NormalizedDecimalField
from sandboxes.admin.base.owner_search import OwnerSearch
from sandboxes.errors import SandboxError


class ConsoleModelAdmin(ActionModelAdmin):
    """Changelist and change page of one model. Rows cannot be deleted."""

    paginator = CappedPaginator
    list_per_page = 50
    list_max_show_all = 0
    show_full_result_count = False
    show_facets = ShowFacets.NEVER
    list_fullwidth = list_filter_submit = list_disable_select_all = True
    list_before_template = "admin/link_filters.html"
    change_form_outer_before_template = "admin/summary.html"
    change_form_before_template = "admin/shown_values.html"
    sortable_by: Sequence[str] = ()  # any order other than the index of `ordering` would sort the whole table for every page
    list_tabs: ClassVar[Mapping[str, ListTab]] = {}  # the first one is the default
    labels: ClassVar[Mapping[str, str]] = {}  # of form fields whose column name is not a label
    list_defer: ClassVar[Sequence[str]] = ()
    owner_search: ClassVar[OwnerSearch | None] = None  # of lists whose search fields are columns of one other table
    filter_columns: ClassVar[Mapping[str, str]] = {}  # filters by a column of the sandbox in place of the row's copy
    formfield_overrides = {
        models.DurationField: {"form_class": DurationTextField},
        models.JSONField: {"form_class": LineListField},
        models.DecimalField: {"form_class": NormalizedDecimalField},
        models.TextField: {"form_class": MultilineTextField},
    }

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[TabbedChangeList]:
        return TabbedChangeList

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest) -> bool:
        return lookup in self.filter_columns.values() or super().lookup_allowed(lookup, value, request)

    def annotate_rows(self, rows: list[Any]) -> None:
        """Set computed attributes on the rows of one changelist page, by one query for all of them."""

    def get_page_context(self, request: HttpRequest, row: Any) -> dict[str, Any]:
        """Template context of a row's page besides its form. `facts` are the summary fields."""
        return {}

    def get_form(self, request: HttpRequest, obj: Any = None, change: bool = False, **kwargs: Any) -> Any:
        form = super().get_form(request, obj, change=change, **{"labels": self.labels, **kwargs})
        return form if obj is None else build_form_class(form)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def save_form(self, request: HttpRequest, form: Any, change: bool) -> Any:
        if change:
            form.lock_row()
        return super().save_form(request, form, change)

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        if change:  # other columns, counters above all, may have changed since the form's row was read
            obj.save(update_fields=form.list_changed_columns())
        else:
            super().save_model(request, obj, form, change)

    def changeform_view(
        self, request: HttpRequest, object_id: str | None = None, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        try:
            response: HttpResponse = super().changeform_view(request, object_id, form_url, extra_context)
        except (ValidationError, SandboxError) as error:  # the row became invalid, or was deleted, after the form was checked
            if request.method != "POST":
                raise
            reason = " ".join(error.messages) if isinstance(error, ValidationError) else str(error)
            messages.error(request, f"Nothing was saved: {reason}")
            return HttpResponseRedirect(request.get_full_path())
        return response

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        if isinstance(self.opts.pk, models.UUIDField) and (pk := parse_uuid(search_term)):
            return queryset.filter(pk=pk), False
        if self.owner_search and search_term.strip():
            queryset = self.owner_search.narrow(self, request, queryset, search_term)
        results: tuple[Any, bool] = super().get_search_results(request, queryset, search_term)
        return results

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any) -> HttpResponse:
        row = kwargs.get("obj")
        if row is not None and row.pk is not None:
            context |= self.get_page_context(request, row)
        response: HttpResponse = super().render_change_form(request, context, *args, **kwargs)
        return response


def build_all_fields_fieldset(*names: str) -> list[tuple[str, dict[str, Any]]]:
    """Build the collapsed fieldset with every column of a read-only row."""
    return [("All fields", {"classes": ["collapse"], "fields": names})]


class ReadOnlyModelAdmin(ConsoleModelAdmin):
    """Console pages of rows that only domain verbs write. Superusers cannot edit them either."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False
