"""Actions of operators on rows: confirmation with a reason, one domain call, a message and a log entry."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import structlog
from django import forms
from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import ADDITION, CHANGE, LogEntry
from django.contrib.admin.utils import unquote
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import NON_FIELD_ERRORS, BadRequest, ValidationError
from django.db.models import Model, QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import reverse
from unfold.admin import ModelAdmin
from unfold.decorators import action
from unfold.enums import ActionVariant
from unfold.forms import BaseDialogForm
from unfold.widgets import UnfoldAdminTextInputWidget

from sandboxes.admin.base.audit import get_actor
from sandboxes.db import database_time
from sandboxes.errors import SandboxError
from sandboxes.formatting import pluralize

log = structlog.get_logger(__name__)
MAX_NAMED_ROWS = 10  # in the message about a bulk action of which a part failed
REASON_HELP_TEXT = "Recorded in the history with your user name."


class ReasonForm(BaseDialogForm):
    """Reason for an action, recorded with the operator's name."""

    error_fields: ClassVar[Mapping[str, str]] = {}  # field of a domain error, or its code without one -> field of this form
    reason = forms.CharField(
        min_length=5,
        max_length=200,
        widget=UnfoldAdminTextInputWidget({"autofocus": True, "autocomplete": "off"}),
        help_text=REASON_HELP_TEXT,
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"auto_id": "id_dialog_%s", **kwargs})  # the page behind may have a field of the same name
        self.warnings: list[str] = []

    @property
    def arguments(self) -> dict[str, Any]:
        """Cleaned fields that a verb takes, by name."""
        return {name: value for name, value in self.cleaned_data.items() if not name.startswith("_")}

    def get_warnings(self) -> list[str]:
        """Return the warnings to show after the action has changed something."""
        return self.warnings

    def add_refusal(self, refusal: SandboxError | ValidationError) -> None:
        """Show a refusal at the field that it names, or above the fields."""
        if isinstance(refusal, SandboxError):
            named = {str(refusal.extra.get("field") or refusal.code): [str(refusal)]}
        else:
            named = refusal.message_dict if hasattr(refusal, "error_dict") else {NON_FIELD_ERRORS: refusal.messages}
        for name, texts in named.items():
            field = self.error_fields.get(name, name)
            self.add_error(field if field in self.fields else None, texts)


@dataclass(frozen=True)
class AdminAction:
    """Operation that an operator may run on rows of one model.

    `legal` only decides which buttons are shown and what a confirmation announces; the guard of `verb` decides the outcome."""

    title: str
    warning: str
    done: str  # completes "1 lease <done>."
    refusal_reason: str  # completes "1 skipped: <refusal reason>."
    legal: Callable[[Any], bool]
    verb: Callable[..., bool]  # row, actor, reason, now, further form fields by name -> whether this call changed the row
    icon: str = "play_arrow"
    permissions: tuple[str, ...] = ()  # all required, such as "leases.end_lease"
    danger: bool = False
    creates: bool = False  # a row: the submit button is not red
    apart: bool = False  # on the row's page: an outlined button, apart from the others
    button: str = ""  # on the row's page; by default the title
    bulk_button: str = ""  # in the changelist; by default the title
    enqueue: Callable[[], object] = bool  # called once after rows were changed
    explain_refusal: Callable[[Any], str] | None = None  # row as it is now -> reason, in place of `refusal_reason`
    form: type[ReasonForm] = ReasonForm
    get_next_url: Callable[[Any, ReasonForm], str] | None = None  # page to open afterwards; by default the row's

    @property
    def dialog(self) -> dict[str, Any]:
        return {**_build_dialog(self, self.warning, is_creation=self.creates), "title": f"{self.title}?"}


@dataclass(frozen=True)
class CreateAction:
    """Operation of a changelist that creates a row by a verb, in place of a form of the row's columns."""

    title: str
    description: str
    done: str  # completes "1 lease <done>."
    existing: str  # completes "Nothing changed: <existing>."
    verb: Callable[..., tuple[Model, bool]]  # actor, now, form fields without the reason -> row, whether this call created it
    form: type[ReasonForm]
    permissions: tuple[str, ...]  # all required, such as "leases.grant_lease"
    icon: str = "add"

    @property
    def dialog(self) -> dict[str, Any]:
        return _build_dialog(self, self.description, is_creation=True)


@dataclass(frozen=True)
class ListAction:
    """Operation of a changelist on no single row."""

    title: str
    description: str
    done: str  # a sentence
    unchanged: str  # completes "Nothing changed: <unchanged>."
    verb: Callable[..., bool]  # actor, now, form fields by name -> whether this call changed something
    form: type[ReasonForm]
    permissions: tuple[str, ...]  # all required, such as "leases.interrupt_run"
    icon: str
    button: str
    enqueue: Callable[[], object] = bool  # called once if something was changed

    @property
    def dialog(self) -> dict[str, Any]:
        return {**_build_dialog(self, self.description, is_creation=False), "title": f"{self.title}?"}


def _build_dialog(declared: AdminAction | CreateAction | ListAction, description: str, *, is_creation: bool) -> dict[str, Any]:
    return {
        "title": declared.title, "description": description, "form_class": declared.form, "form_submit_text": declared.title,
        "is_creation": is_creation,
    }  # fmt: skip


class ActionModelAdmin(ModelAdmin):
    """Model admin whose actions are declared as data.

    `row_actions` become buttons on a row's page that open a dialog; `bulk_actions` become choices of the changelist that open
    a confirmation page; `create_actions` and `list_actions` become buttons of the changelist that open a dialog. Keys are the
    names in URLs and form posts. Other apps add theirs with `add_actions`."""

    row_actions: ClassVar[dict[str, AdminAction]] = {}
    bulk_actions: ClassVar[dict[str, AdminAction]] = {}
    create_actions: ClassVar[dict[str, CreateAction]] = {}
    list_actions: ClassVar[dict[str, ListAction]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        row_actions, bulk_actions = cls.row_actions, cls.bulk_actions
        cls.row_actions, cls.bulk_actions = {}, {}
        cls.add_actions(row_actions, bulk_actions)
        for name, declared in cls.create_actions.items():
            setattr(cls, name, _build_create_method(name, declared))
            setattr(cls, f"has_{name}_permission", _build_permission_method(declared))
        for name, listed in cls.list_actions.items():
            setattr(cls, name, _build_list_method(name, listed))
            setattr(cls, f"has_{name}_permission", _build_permission_method(listed))
        cls.actions_list = [*cls.create_actions, *cls.list_actions]

    @classmethod
    def add_actions(cls, row_actions: Mapping[str, AdminAction], bulk_actions: Mapping[str, AdminAction] | None = None) -> None:
        """Add actions to every page of this class. Call before the URLconf is loaded, which is when their URLs are made."""
        for name, declared in row_actions.items():
            cls.row_actions[name] = declared
            setattr(cls, name, _build_row_method(name, declared))
        for name, declared in (bulk_actions or {}).items():
            cls.bulk_actions[name] = declared
            setattr(cls, name, _build_bulk_method(name, declared))
        for name, declared in {**row_actions, **(bulk_actions or {})}.items():
            setattr(cls, f"has_{name}_permission", _build_permission_method(declared))
        cls.actions_detail, cls.actions = [*cls.row_actions], [*cls.bulk_actions]

    def run_row_action(self, request: HttpRequest, object_id: str, declared: AdminAction, form: ReasonForm) -> HttpResponse:
        """Run an action on one row after its dialog was submitted."""
        row = self.get_object(request, unquote(object_id))
        if row is None:
            raise Http404
        try:
            changed = self._run_verb(request, declared, row, **form.arguments)
        except (SandboxError, ValidationError) as refusal:  # the model may have rules that the form does not have
            if isinstance(refusal, SandboxError) and refusal.has_changed:
                declared.enqueue()
            return _show_refusal(request, declared, form, refusal)
        if changed:
            declared.enqueue()
            self._report_success(request, declared, form)
        else:
            row.refresh_from_db()
            reason = declared.explain_refusal(row) if declared.explain_refusal else declared.refusal_reason
            messages.warning(request, f"Nothing changed: {reason}.")
        next_url = declared.get_next_url(row, form) if declared.get_next_url else self.get_row_url(row)
        # A plain redirect would be followed by htmx, which would put the whole page into the dialog.
        return HttpResponse(headers={"HX-Redirect": next_url})

    def run_create_action(self, request: HttpRequest, declared: CreateAction, form: ReasonForm) -> HttpResponse:
        """Create a row after the dialog was submitted, log it, and open its page."""
        arguments = form.arguments
        reason = arguments.pop("reason")
        try:
            row, is_new = declared.verb(get_actor(request), database_time.now(), **arguments)
        except SandboxError as refusal:
            return _show_refusal(request, declared, form, refusal)
        if is_new:
            LogEntry.objects.log_actions(request.user.pk, [row], ADDITION, f"{declared.title}: {reason}")  # type: ignore[arg-type]
            self._report_success(request, declared, form)
        else:
            messages.warning(request, f"Nothing changed: {declared.existing}.")
        return HttpResponse(headers={"HX-Redirect": self.get_row_url(row)})

    def run_list_action(self, request: HttpRequest, declared: ListAction, form: ReasonForm) -> HttpResponse:
        """Run an action after the dialog was submitted, log it, and return to the changelist."""
        try:
            changed = declared.verb(get_actor(request), database_time.now(), **form.arguments)
        except SandboxError as refusal:
            if refusal.has_changed:
                self._log_list_action(request, declared, form)
                declared.enqueue()
            return _show_refusal(request, declared, form, refusal)
        if changed:
            self._log_list_action(request, declared, form)
            declared.enqueue()
            messages.success(request, declared.done)
        else:
            messages.warning(request, f"Nothing changed: {declared.unchanged}.")
        return HttpResponse(headers={"HX-Redirect": reverse(f"admin:{self.opts.label_lower.replace('.', '_')}_changelist")})

    def _log_list_action(self, request: HttpRequest, declared: ListAction, form: ReasonForm) -> None:
        LogEntry.objects.create(  # type: ignore[misc]
            user=request.user, content_type=ContentType.objects.get_for_model(self.model), action_flag=CHANGE,
            object_repr=str(self.opts.verbose_name_plural), change_message=f"{declared.title}: {form.cleaned_data['reason']}",
        )  # fmt: skip

    def _report_success(self, request: HttpRequest, declared: AdminAction | CreateAction, form: ReasonForm) -> None:
        messages.success(request, f"{pluralize(1, *self._verbose_names)} {declared.done}.")
        for warning in form.get_warnings():
            messages.warning(request, warning)

    def get_row_url(self, row: Model) -> str:
        return reverse(f"admin:{self.opts.label_lower.replace('.', '_')}_change", args=[row.pk])

    def run_bulk_action(self, request: HttpRequest, queryset: QuerySet[Any], declared: AdminAction) -> HttpResponse | None:
        """Confirm and run an action on the rows selected in the changelist. The confirmation page fixes the selection."""
        selected = request.POST.getlist(ACTION_CHECKBOX_NAME)
        rows = list(queryset.filter(pk__in=selected))
        form = ReasonForm(request=request, data=request.POST if "confirm" in request.POST else None)
        if not form.is_valid():
            context = {
                **self.admin_site.each_context(request),
                "title": f"{declared.title}?", "declared": declared, "form": form, "opts": self.opts, "selected": selected,
                "rows": [(row, declared.legal(row)) for row in rows], "legal": sum(map(declared.legal, rows)),
                "action": request.POST["action"],
            }  # fmt: skip
            return TemplateResponse(request, "admin/confirm.html", context)
        self._run_for_rows(request, declared, rows, len(selected), form.cleaned_data["reason"])
        return None

    def _run_for_rows(self, request: HttpRequest, declared: AdminAction, rows: list[Any], selected: int, reason: str) -> None:
        """Call the verb for each row and report the outcome. A failure is recorded, and the next row is tried."""
        changed, failed, has_changed = [], [], False
        for row in rows:
            try:
                if self._run_verb(request, declared, row, reason):
                    changed.append(str(row))
            except SandboxError as refusal:
                failed.append(f"{row} ({refusal})")
                has_changed |= refusal.has_changed
            except Exception as error:  # the operator must learn which of the other rows were changed
                log.exception("action failed", action=declared.title, row=str(row.pk), exc_info=error)
                failed.append(f"{row} (internal error, see the log)")
        if changed or has_changed:
            declared.enqueue()
        names = f": {_join_capped(changed)}" if changed and failed else ""
        sentences = [f"{pluralize(len(changed), *self._verbose_names)} {declared.done}{names}."] if changed else []
        if skipped := selected - len(changed) - len(failed):
            sentences.append(f"{skipped} skipped: {declared.refusal_reason}.")
        if failed:
            sentences.append(f"{len(failed)} failed: {_join_capped(failed)}.")
        level = messages.ERROR if failed else messages.WARNING if skipped else messages.SUCCESS
        messages.add_message(request, level, " ".join(sentences))

    def response_action(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        for selected in request.POST.getlist(ACTION_CHECKBOX_NAME):
            try:
                self.opts.pk.clean(selected, None)
            except ValidationError:
                raise BadRequest(f"Not a valid row id: {selected[:80]!r}") from None
        response: HttpResponse | None = super().response_action(request, queryset)
        return response

    def _run_verb(self, request: HttpRequest, declared: AdminAction, row: Any, reason: str, **fields: Any) -> bool:
        """Call the verb for one row, and log the change at once: a failure of a later row must not lose the entry."""
        try:
            if not declared.verb(row, get_actor(request), reason, database_time.now(), **fields):
                return False
        except SandboxError as refusal:
            if refusal.has_changed:
                _log_row_action(request, declared, row, reason)
            raise
        _log_row_action(request, declared, row, reason)
        return True

    def get_actions_detail(self, request: HttpRequest, object_id: Any) -> list[Any]:
        """Hide the buttons of actions that are not legal in the row's present state."""
        offered = super().get_actions_detail(request, object_id)
        row = self.get_object(request, unquote(str(object_id))) if offered else None
        return [each for each in offered if row and self.row_actions[each.method.original_function_name].legal(row)]

    @property
    def _verbose_names(self) -> tuple[str, str]:
        return str(self.opts.verbose_name), str(self.opts.verbose_name_plural)


def _log_row_action(request: HttpRequest, declared: AdminAction, row: Model, reason: str) -> None:
    LogEntry.objects.log_actions(request.user.pk, [row], CHANGE, f"{declared.title}: {reason}")  # type: ignore[arg-type]


def _join_capped(names: list[str]) -> str:
    """Join names for a message, which a cookie may have to hold."""
    rest = len(names) - MAX_NAMED_ROWS
    return ", ".join(names[:MAX_NAMED_ROWS]) + (f" and {rest} more" if rest > 0 else "")


def _build_row_method(name: str, declared: AdminAction) -> Any:
    def run(self: ActionModelAdmin, request: HttpRequest, form: ReasonForm, object_id: str) -> HttpResponse:
        return self.run_row_action(request, object_id, declared, form)

    run.__name__ = name  # Unfold finds an action by the name of its function
    return action(
        description=f"{declared.button or declared.title}…",
        permissions=[name],
        icon=declared.icon,
        variant=ActionVariant.DANGER if declared.danger and not declared.apart else ActionVariant.DEFAULT,
        attrs={"data-apart": "true"} if declared.apart else None,
        dialog=declared.dialog,
    )(run)


def _build_bulk_method(name: str, declared: AdminAction) -> Any:
    def run(self: ActionModelAdmin, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        return self.run_bulk_action(request, queryset, declared)

    run.__name__ = name
    return action(description=declared.bulk_button or f"{declared.title}…", permissions=[name])(run)


def _build_create_method(name: str, declared: CreateAction) -> Any:
    def run(self: ActionModelAdmin, request: HttpRequest, form: ReasonForm) -> HttpResponse:
        return self.run_create_action(request, declared, form)

    run.__name__ = name
    return action(
        description=f"{declared.title}…",
        permissions=[name],
        icon=declared.icon,
        dialog=declared.dialog,
    )(run)


def _build_list_method(name: str, declared: ListAction) -> Any:
    def run(self: ActionModelAdmin, request: HttpRequest, form: ReasonForm) -> HttpResponse:
        return self.run_list_action(request, declared, form)

    run.__name__ = name
    return action(
        description=f"{declared.button}…",
        permissions=[name],
        icon=declared.icon,
        variant=ActionVariant.DANGER,
        dialog=declared.dialog,
    )(run)


def _show_refusal(
    request: HttpRequest,
    declared: AdminAction | CreateAction | ListAction,
    form: ReasonForm,
    refusal: SandboxError | ValidationError,
) -> HttpResponse:
    """Render the open dialog again, with the refusal at its field."""
    form.add_refusal(refusal)
    context = {"dialog": declared.dialog, "form": form, "form_submit_text": declared.title}
    return TemplateResponse(request, "unfold/helpers/dialog.html", context)


def _build_permission_method(declared: AdminAction | CreateAction | ListAction) -> Any:
    def has_permission(self: ActionModelAdmin, request: HttpRequest, object_id: str | None = None) -> bool:
        return request.user.has_perms(declared.permissions)

    return has_permission
