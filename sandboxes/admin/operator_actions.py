"""Console pages of operator actions by API keys and commands."""

from typing import Any

from django.apps import apps
from django.contrib import admin
from django.http import HttpRequest
from django.urls import NoReverseMatch
from django.utils.safestring import SafeString
from unfold.decorators import display

from sandboxes.admin.base.changelist import ListTab
from sandboxes.admin.base.formatting import SummaryField, render_admin_link, render_time_ago, render_timestamp, render_two_lines
from sandboxes.admin.base.model_admin import ReadOnlyModelAdmin, build_all_fields_fieldset
from sandboxes.models import OperatorAction

ORDER_NOTE = "of an order, recorded before its effect; not known if its process ended first"


@admin.register(OperatorAction)
class OperatorActionAdmin(ReadOnlyModelAdmin):
    list_display = ["action_label", "object_label", "actor", "time"]
    ordering = ["-at", "-pk"]
    list_tabs = {
        "all": ListTab(
            "All",
            "No operator actions yet. Changes by operators' API keys and commands appear here, those of the console in the "
            "history of the row.",
        )
    }
    fieldsets = build_all_fields_fieldset(
        "kind", "object_id", "object_text", "action", "detail", "is_order", "result", "actor", "at"
    )

    @display(description="Action")
    def action_label(self, row: OperatorAction) -> SafeString:
        return render_two_lines(row.action, row.summary)

    @display(description="Object")
    def object_label(self, row: OperatorAction) -> SafeString:
        return render_two_lines(row.object_text, _name_kind(row))

    @display(description="Time")
    def time(self, row: OperatorAction) -> SafeString | str:
        return render_time_ago(row.at)

    def get_page_context(self, request: HttpRequest, row: OperatorAction) -> dict[str, Any]:
        return {
            "facts": [
                SummaryField("Action", row.action, note=row.detail),
                *([SummaryField("Result", row.result or "not known", note=ORDER_NOTE)] if row.is_order else []),
                SummaryField(_name_kind(row).capitalize(), _render_object(row)),
                SummaryField("By", row.actor),
                SummaryField("Time", render_timestamp(row.at)),
            ]
        }


def _name_kind(row: OperatorAction) -> str:
    """Return the name of the changed row's model. A later version may not have the model."""
    app, _, model = row.kind.partition(".")
    known = apps.all_models.get(app, {}).get(model)
    return str(known._meta.verbose_name) if known else row.kind


def _render_object(row: OperatorAction) -> SafeString | str:
    """Link to the changed row, if it still exists."""
    app, _, model = row.kind.partition(".")
    known = apps.all_models.get(app, {}).get(model)
    if known is None or not known._default_manager.filter(pk=row.object_id).exists():
        return f"{row.object_text} (deleted)"
    try:
        return render_admin_link(row.kind.replace(".", "_"), row.object_id, row.object_text)
    except NoReverseMatch:
        return row.object_text
