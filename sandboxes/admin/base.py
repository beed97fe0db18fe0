"""What the operator's pages are made of: lists cut into named slices, pages of facts nobody can edit, acts that ask
first. Billing and leases build theirs from the same parts."""

import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar, cast

from django import forms
from django.contrib import messages
from django.contrib.admin import ShowFacets
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.utils import unquote
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import BadRequest, ValidationError
from django.core.paginator import Paginator
from django.db import models
from django.db.models import Model, Q, QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils import timezone
from django.utils.functional import cached_property
from unfold.admin import ModelAdmin
from unfold.forms import BaseDialogForm
from unfold.views import ChangeList
from unfold.widgets import UnfoldAdminTextInputWidget

from sandboxes.admin.fields import DurationTextField, LineListField, NormalizedDecimalField
from sandboxes.admin.formatting import pluralize, render_admin_link
from sandboxes.errors import SandboxError

LINK_FILTER_FIELDS = ("agent_did", "environment_id", "holder", "sandbox", "lease")  # columns that pages link by


def parse_uuid(said: str) -> uuid.UUID | None:
    """The id that somebody typed in, if it is a whole one."""
    try:
        return uuid.UUID(said.strip())
    except ValueError:
        return None


class CappedPaginator(Paginator):
    """Counts no further than it must: a full count of a big table costs more than the page it is for."""

    template_name, cap, capped = "admin/pagination_capped.html", 1000, False

    @property
    def rows(self) -> QuerySet[Any]:
        return cast(QuerySet[Any], self.object_list)

    @cached_property
    def count(self) -> int:
        found: int = self.rows.order_by().values("pk")[: self.cap + 1].count()
        self.capped = found > self.cap
        return min(found, self.cap)

    @property
    def said(self) -> str:
        meta = self.rows.model._meta
        exact = pluralize(self.count, str(meta.verbose_name), str(meta.verbose_name_plural))
        return f"More than {exact}" if self.capped else exact


@dataclass(frozen=True)
class ListTab:
    """A named part of a list. Its tab, and the number on the fleet page that links to it, are the same rows."""

    title: str
    empty: str  # what a list says that has no such row
    cut: Callable[[datetime], Q] | None = None  # None: every row

    def where(self, now: datetime) -> Q:
        return self.cut(now) if self.cut else Q()


class TabbedChangeList(ChangeList):
    """A list of one slice. The slice stands in the address beside search and filters, and is none of them."""

    root_queryset: QuerySet[Any]
    result_list: Any

    @property
    def part(self) -> ListTab | None:
        slices = self.model_admin.slices
        return slices.get(self.params.get("slice"), next(iter(slices.values()), None))

    @property
    def narrowed(self) -> list[dict[str, str]]:
        """What else than its slice, search and filters the list is cut down by: pages link here with such columns."""
        given = [name for name in LINK_FILTER_FIELDS if name in self.params]
        return [
            {
                "column": str(self.opts.get_field(name).verbose_name),
                "value": self.params[name],
                "without": self.get_query_string(remove=[name]),
            }
            for name in given
        ]

    @property
    def everywhere(self) -> str:
        """Where else to look when this slice has nothing: the same search among all rows."""
        if self.part is None or self.part.cut is None:
            return ""
        return self.get_query_string({"slice": next(name for name, each in self.model_admin.slices.items() if not each.cut)})

    def get_filters_params(self, params: Any = None) -> dict[str, Any]:
        """Without NUL, of which PostgreSQL would say that no text has it."""
        given: dict[str, Any] = super().get_filters_params(params)
        return {name: [each.replace("\0", "") for each in values] for name, values in given.items() if name != "slice"}

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> QuerySet[Any]:
        if self.part:
            self.root_queryset = self.root_queryset.filter(self.part.where(timezone.now()))
        return super().get_queryset(request, exclude_parameters).defer(*self.model_admin.list_defer)

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        self.full_result_count = self.result_count  # they differ: the header offers to show all
        self.result_list = list(self.result_list)
        self.model_admin.complete(self.result_list)


@dataclass(frozen=True)
class SummaryField:
    """One box of the strip on top of a page."""

    label: str
    value: Any
    note: Any = ""
    href: str = ""
    alarm: bool = False


def build_sandbox_field(row: Any) -> SummaryField:
    """The sandbox in which something was, and which of its processes that was."""
    place = render_admin_link("sandboxes_sandbox", row.sandbox_id, row.sandbox)
    return SummaryField("Sandbox", place, note=f"process {row.incarnation} of it")


@dataclass(frozen=True)
class AdminAction:
    """What an operator may do to rows of one kind. The verb's guard decides; `legal` only says what to expect."""

    title: str
    warning: str
    done: str  # "1 lease <done>."
    refusal_reason: str  # "1 skipped: <illegal>."
    legal: Callable[[Any], bool]
    verb: Callable[..., bool]  # row, actor, reason, now, and by name what else its form asks -> did this call change it?
    after: Callable[[], object] = bool
    explain_refusal: Callable[[Any], str] | None = None  # row as it is now -> "Nothing changed: <because>."; else `illegal`
    form: type[forms.Form] | None = None  # a Reason that asks something else, too

    @property
    def dialog(self) -> dict[str, Any]:
        return {
            "title": f"{self.title}?",
            "description": self.warning,
            "form_class": self.form or ReasonForm,
            "form_submit_text": self.title,
        }


class ReasonForm(BaseDialogForm):
    """Why: written into the row's own history beside who."""

    reason = forms.CharField(
        min_length=5,
        max_length=200,
        widget=UnfoldAdminTextInputWidget({"autofocus": True, "autocomplete": "off"}),
        help_text="Kept in the history, beside your name.",
    )


class ConsoleModelAdmin(ModelAdmin):
    """A list and a page for each row. Nothing is ever deleted here."""

    paginator = CappedPaginator
    list_per_page = 50
    list_max_show_all = 0
    show_full_result_count = False
    show_facets = ShowFacets.NEVER
    list_fullwidth = list_filter_submit = list_disable_select_all = True
    list_before_template = "admin/narrowed.html"
    change_form_outer_before_template = "admin/strip.html"
    sortable_by: Sequence[str] = ()  # by anything but the index of `ordering`, a big table is sorted for every page
    slices: ClassVar[Mapping[str, ListTab]] = {}  # the first is shown by default
    acts: ClassVar[Mapping[str, AdminAction]] = {}  # by the method in actions_detail that offers it
    labels: ClassVar[Mapping[str, str]] = {}  # of form fields whose column name is no word
    list_defer: ClassVar[Sequence[str]] = ()
    formfield_overrides = {
        models.DurationField: {"form_class": DurationTextField},
        models.JSONField: {"form_class": LineListField},
        models.DecimalField: {"form_class": NormalizedDecimalField},
    }

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[TabbedChangeList]:
        return TabbedChangeList

    def complete(self, rows: list[Any]) -> None:
        """Add to the rows of one page of the list what takes a query of its own."""

    def page(self, request: HttpRequest, row: Any) -> dict[str, Any]:
        """The context of a row's page beyond its form; `facts` become the strip."""
        return {}

    def get_form(self, request: HttpRequest, obj: Any = None, change: bool = False, **kwargs: Any) -> Any:
        return super().get_form(request, obj, change=change, **{"labels": self.labels, **kwargs})

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        if change:  # its other columns may have changed since the form's row was read: counters, above all
            obj.save(update_fields=form.changed_data)
        else:
            super().save_model(request, obj, form, change)

    def changeform_view(
        self, request: HttpRequest, object_id: str | None = None, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        try:
            answer: HttpResponse = super().changeform_view(request, object_id, form_url, extra_context)
        except ValidationError as late:  # it was right when its form was checked
            if request.method != "POST":
                raise
            messages.error(request, f"Nothing was saved: {' '.join(late.messages)}")
            return HttpResponseRedirect(request.get_full_path())
        return answer

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        if isinstance(self.opts.pk, models.UUIDField) and (pk := parse_uuid(search_term)):
            return queryset.filter(pk=pk), False
        found: tuple[Any, bool] = super().get_search_results(request, queryset, search_term)
        return found

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any) -> HttpResponse:
        row = kwargs.get("obj")
        if row is not None and row.pk is not None:
            context |= self.page(request, row)
        answer: HttpResponse = super().render_change_form(request, context, *args, **kwargs)
        return answer

    # --- acts: each asks first, calls one verb, says what changed, and leaves a log entry -----------------------------

    def answer(self, request: HttpRequest, object_id: str, act: AdminAction, form: ReasonForm) -> HttpResponse:
        """The dialog on a row's page was sent."""
        row = self.get_object(request, unquote(object_id))
        if row is None:
            raise Http404
        said = {name: value for name, value in form.cleaned_data.items() if not name.startswith("_")}
        try:
            changed = self._carry_out(request, act, [row], **said)
        except SandboxError as refused:  # the dialog stays open and says so
            form.add_error(None, str(refused))
            asked = {"dialog": act.dialog, "form": form, "form_submit_text": act.title}
            return TemplateResponse(request, "unfold/helpers/dialog.html", asked)
        if changed:
            messages.success(request, f"{pluralize(1, *self._verbose_names)} {act.done}.")
        else:
            row.refresh_from_db()
            messages.warning(
                request, f"Nothing changed: {act.explain_refusal(row) if act.explain_refusal else act.refusal_reason}."
            )
        # htmx would follow a redirect and put the whole page into the dialog.
        return HttpResponse(headers={"HX-Redirect": self.after(act, row, form)})

    def after(self, act: AdminAction, row: Any, form: ReasonForm) -> str:
        """The page to look at once an act was done."""
        return reverse(f"admin:{self.opts.label_lower.replace('.', '_')}_change", args=[row.pk])

    def response_action(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        for chosen in request.POST.getlist(ACTION_CHECKBOX_NAME):
            try:
                self.opts.pk.clean(chosen, None)
            except ValidationError:
                raise BadRequest(f"Not the id of a row: {chosen[:80]!r}") from None
        answer: HttpResponse | None = super().response_action(request, queryset)
        return answer

    def ask(self, request: HttpRequest, queryset: QuerySet[Any], act: AdminAction) -> HttpResponse | None:
        """An action of the list: a page that asks first. Which rows are meant is fixed when it asks."""
        chosen = request.POST.getlist(ACTION_CHECKBOX_NAME)
        rows = list(queryset.filter(pk__in=chosen))
        form = ReasonForm(request=request, data=request.POST if "confirm" in request.POST else None)
        if not form.is_valid():
            context = {
                **self.admin_site.each_context(request),
                "title": f"{act.title}?", "act": act, "form": form, "opts": self.opts, "chosen": chosen,
                "rows": [(row, act.legal(row)) for row in rows], "legal": sum(map(act.legal, rows)),
                "action": request.POST["action"],
            }  # fmt: skip
            return TemplateResponse(request, "admin/confirm.html", context)
        changed = self._carry_out(request, act, rows, form.cleaned_data["reason"])
        skipped = len(chosen) - changed
        said = [f"{pluralize(changed, *self._verbose_names)} {act.done}."] if changed else []
        said += [f"{skipped} skipped: {act.refusal_reason}."] if skipped else []
        messages.add_message(request, messages.WARNING if skipped else messages.SUCCESS, " ".join(said))
        return None

    def _carry_out(self, request: HttpRequest, act: AdminAction, rows: list[Any], reason: str, **more: Any) -> int:
        actor = request.user.get_username()
        changed = [row for row in rows if act.verb(row, actor, reason, timezone.now(), **more)]
        if changed:
            LogEntry.objects.log_actions(request.user.pk, changed, CHANGE, f"{act.title}: {reason}")  # type: ignore[arg-type]
            act.after()
        return len(changed)

    def get_actions_detail(self, request: HttpRequest, object_id: Any) -> list[Any]:
        """Only acts that are legal now. What makes the difference is the verb's guard: this hides buttons."""
        offered = super().get_actions_detail(request, object_id)
        row = self.get_object(request, unquote(str(object_id))) if offered else None
        return [each for each in offered if row and self.acts[each.method.original_function_name].legal(row)]

    @property
    def _verbose_names(self) -> tuple[str, str]:
        return str(self.opts.verbose_name), str(self.opts.verbose_name_plural)


@dataclass(frozen=True)
class AuditEntry:
    """What an operator did to a row, from the log."""

    at: datetime
    what: str
    why: str
    who: str


def list_audit_entries(row: Model, most: int) -> list[AuditEntry]:
    """What operators did to a row, newest first."""
    kind = ContentType.objects.get_for_model(row, for_concrete_model=False)
    entries = LogEntry.objects.filter(content_type=kind, object_id=str(row.pk)).select_related("user")[:most]
    parted = [(entry, *entry.get_change_message().partition(": ")) for entry in entries]
    return [AuditEntry(entry.action_time, what, why, entry.user.get_username()) for entry, what, _, why in parted]


def build_all_fields_fieldset(*names: str) -> list[tuple[str, dict[str, Any]]]:
    """Every column of a row of facts, folded away under what its page makes of them."""
    return [("All fields", {"classes": ["collapse"], "fields": names})]


class ReadOnlyModelAdmin(ConsoleModelAdmin):
    """Rows that verbs wrote: to be read. Not even a superuser edits them."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False


class HolderDisplayMixin:
    """What pages here say of a holder. `leases` overrides it: for this app a holder is only an id."""

    def holder(self, pk: uuid.UUID) -> SummaryField:
        return SummaryField("Holder", str(pk))

    def holders(self, pks: Collection[uuid.UUID]) -> Mapping[uuid.UUID, Any]:
        """Each of these in the words of a table."""
        return {pk: str(pk) for pk in pks}

    def agent(self, did: str) -> SummaryField:
        return SummaryField("Agent", did or "–")
