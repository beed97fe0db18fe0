"""Console pages of the Git repositories of coding tasks. The access token is written by the form and never shown."""

from datetime import datetime
from typing import Any

from django import forms
from django.contrib import admin
from django.core.exceptions import ValidationError
from django.db.models import Count, Exists, Max, OuterRef, Q
from django.http import HttpRequest
from django.utils.safestring import SafeString
from unfold.decorators import display
from unfold.widgets import UnfoldAdminPasswordWidget, UnfoldBooleanSwitchWidget

from leases.admin.coding_tasks import NOT_ENDED, POLL_FAILING, REFUSED
from leases.coding import repositories
from leases.coding.models import CodingTask, CodingTaskStatus, ForgeKind, Repository
from leases.errors import LeaseError
from sandboxes.admin.base.actions import AdminAction
from sandboxes.admin.base.audit import get_actor
from sandboxes.admin.base.changelist import ListTab
from sandboxes.admin.base.formatting import (
    SummaryField,
    build_changelist_url,
    format_counts,
    render_admin_link,
    render_badge,
    render_time_ago,
    render_timestamp,
    render_two_lines,
    truncate_text,
)
from sandboxes.admin.base.model_admin import ConsoleModelAdmin
from sandboxes.audit import Actor
from sandboxes.db import database_time
from sandboxes.formatting import pluralize

FORGE_LABELS = {ForgeKind.BARE: "no pull requests", ForgeKind.GITHUB: "GitHub API"}
COLUMNS = [
    "clone_url", "base_branch", "forge", "api_url", "forge_project", "ssh_key_path", "depth", "max_mib", "max_change_mib",
    "protected_paths", "allowed_paths",
]  # fmt: skip
TOKEN_RECIPIENTS = ("clone_url", "api_url")
MAX_TOKEN_CHARS = 4096


def _set_enabled(row: Repository, actor: Actor, now: datetime, enabled: bool) -> bool:
    return repositories.set_enabled(row.name, enabled, now=now, actor=actor)


ENABLE_ACTION = AdminAction(
    title="Enable repository",
    warning="New coding tasks may be created in it.",
    done="enabled",
    refusal_reason="already enabled",
    legal=lambda row: not row.enabled,
    verb=lambda row, actor, reason, now: _set_enabled(row, actor, now, True),
    permissions=("leases.enable_repository",),
    button="Enable",
)
DISABLE_ACTION = AdminAction(
    title="Disable repository",
    warning="New coding tasks in it are refused. Existing tasks go on: agents submit, and pull requests are followed.",
    done="disabled",
    refusal_reason="already disabled",
    legal=lambda row: row.enabled,
    verb=lambda row, actor, reason, now: _set_enabled(row, actor, now, False),
    icon="block",
    permissions=("leases.enable_repository",),
    button="Disable",
)


def get_server(url: str) -> str:
    """Return scheme, host and port of a URL. A path or a URL of another form is returned whole."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}".lower() if separator else url


class RepositoryForm(forms.ModelForm):
    """Settings of a repository, validated as repositories.save does."""

    secret_columns = {"token": "sealed_token", "remove_token": "sealed_token"}
    token = forms.CharField(
        required=False, max_length=MAX_TOKEN_CHARS, label="Access token",
        widget=UnfoldAdminPasswordWidget({"autocomplete": "new-password"}),
        help_text="For https and the forge's API. Stored encrypted, never shown.",
    )  # fmt: skip
    remove_token = forms.BooleanField(required=False, label="Remove access token", widget=UnfoldBooleanSwitchWidget)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.instance.sealed_token is not None and "token" in self.fields:
            self.fields["token"].help_text += " Empty: the stored token is kept."

    def clean(self) -> dict[str, Any]:
        cleaned: dict[str, Any] = super().clean() or {}
        if cleaned.get("token") and cleaned.get("remove_token"):
            self.add_error("remove_token", "Enter a new access token or remove the stored one.")
        if not self.errors and self.instance.sealed_token is not None and self.get_token() is None:
            self._require_same_servers()
        is_taken = self.instance.pk is None and Repository.objects.filter(name=cleaned.get("name", "")).exists()
        if self.errors or is_taken:  # Django reports a taken name afterwards
            return cleaned
        try:
            repositories.build(**self.build_values(), now=database_time.now())
        except LeaseError as refusal:
            field = str(refusal.extra.get("field", ""))
            self.add_error(field if field in self.fields else None, str(refusal))
        return cleaned

    def _require_same_servers(self) -> None:
        """Refuse to send the stored token to a server that this change has chosen."""
        for name in TOKEN_RECIPIENTS:
            if get_server(self.cleaned_data[name]) not in ("", get_server(self.initial[name])):
                label = self.fields[name].label
                self.add_error("token", f"The {label} names another server. Enter the token again, or remove it.")

    def build_values(self) -> dict[str, Any]:
        """Build the arguments of repositories.build: every column of a new repository, the changed ones of another."""
        is_new = self.instance.pk is None
        values: dict[str, Any] = {"name": self.cleaned_data["name"] if is_new else self.instance.name}
        names = ["project", *COLUMNS] if is_new else self.changed_data
        values |= {name: self.cleaned_data[name] for name in COLUMNS if name in names}
        return values | ({"project": self.cleaned_data["project"].name} if "project" in names else {})

    def get_token(self) -> str | None:
        """Return the new token, "" if the stored one is removed, None for no change."""
        return "" if self.cleaned_data.get("remove_token") else self.cleaned_data.get("token") or None


@admin.register(Repository)
class RepositoryAdmin(ConsoleModelAdmin):
    form = RepositoryForm
    list_display = ["repository_label", "state", "forge_label", "tasks", "submitted", "problems"]
    list_filter = ["forge", "project"]
    list_defer = ["sealed_token"]
    search_fields = ["name__startswith", "clone_url__contains"]
    search_help_text = "Name (prefix) or part of the clone URL"
    ordering = ["name"]
    list_tabs = {
        "all": ListTab("All", "No repositories yet. Add one, then clients create coding tasks in it through the API."),
        "failing": ListTab(
            "Poll errors",
            "No poll errors: the forge of every pull request answers.",
            lambda now: Q(Exists(CodingTask.objects.filter(POLL_FAILING, repository=OuterRef("pk")))),
        ),
        "disabled": ListTab(
            "Disabled", "No disabled repositories: new tasks may be created in all.", lambda now: Q(enabled=False)
        ),
    }
    labels = {
        "clone_url": "Clone URL", "api_url": "API URL", "forge_project": "Project at the forge", "ssh_key_path": "SSH key file",
        "depth": "Depth (commits)", "max_mib": "Maximum size (MiB)", "max_change_mib": "Maximum size of a submission (MiB)",
    }  # fmt: skip
    row_actions = {"enable": ENABLE_ACTION, "disable": DISABLE_ACTION}

    def get_readonly_fields(self, request: HttpRequest, obj: Repository | None = None) -> list[str]:
        return ["name"] if obj else []  # the stored token is bound to the name, and clients name the repository

    def get_fieldsets(self, request: HttpRequest, obj: Repository | None = None) -> Any:
        may_edit = self.has_change_permission(request, obj) if obj else self.has_add_permission(request)
        removal = ["remove_token"] if obj and obj.sealed_token is not None else []
        return [
            (None, {"fields": ["name", "project", "clone_url", "base_branch"]}),
            ("Credentials", {"fields": [*(["token", *removal] if may_edit else []), "ssh_key_path"]}),
            ("Forge", {"fields": ["forge", "api_url", "forge_project"]}),
            ("Limits", {"fields": ["depth", "max_mib", "max_change_mib"]}),
            ("Paths", {"fields": ["protected_paths", "allowed_paths"]}),
        ]

    def annotate_rows(self, rows: list[Repository]) -> None:
        tasks = CodingTask.objects.filter(repository__in=[row.pk for row in rows]).order_by()
        counted = tasks.values("repository").annotate(
            total=Count("pk"), unfinished=Count("pk", filter=NOT_ENDED), failing=Count("pk", filter=POLL_FAILING),
            refused=Count("pk", filter=REFUSED), latest=Max("submitted_at"),
        )  # fmt: skip
        counts = {each["repository"]: each for each in counted}
        for row in rows:
            row.counts = counts.get(row.pk, {})  # type: ignore[attr-defined]

    @display(description="Repository")
    def repository_label(self, row: Repository) -> SafeString:
        return render_two_lines(row.name, truncate_text(row.clone_url, 60))

    @display(description="State")
    def state(self, row: Repository) -> SafeString:
        return render_state(row)

    @display(description="Forge")
    def forge_label(self, row: Repository) -> SafeString | str:
        label = FORGE_LABELS[ForgeKind(row.forge)]
        return render_two_lines(label, row.forge_project) if row.forge_project else label

    @display(description="Tasks")
    def tasks(self, row: Repository) -> SafeString | str:
        counts = row.counts  # type: ignore[attr-defined]
        return (
            render_two_lines(f"{counts['unfinished']:,} not ended", f"{counts['total']:,} in total") if counts else "none yet"
        )

    @display(description="Last submission")
    def submitted(self, row: Repository) -> SafeString | str:
        return render_time_ago(row.counts.get("latest"), "none yet")  # type: ignore[attr-defined]

    @display(description="Problems")
    def problems(self, row: Repository) -> str:
        counts = row.counts  # type: ignore[attr-defined]
        return format_problems(counts.get("failing", 0), counts.get("refused", 0)) or "–"

    def get_page_context(self, request: HttpRequest, row: Repository) -> dict[str, Any]:
        return {
            "facts": [
                SummaryField("State", render_state(row), note="new tasks may be created" if row.enabled else "no new tasks"),
                SummaryField("Access token", "not set" if row.sealed_token is None else "set", note=_describe_token(row)),
                SummaryField("Project", render_admin_link("leases_project", row.project_id, row.project.name)),
                *_build_task_fields(row),
                SummaryField("Added", render_time_ago(row.created_at), note=render_timestamp(row.created_at)),
            ]
        }

    def save_model(self, request: HttpRequest, obj: Repository, form: Any, change: bool) -> None:
        try:
            row, _ = repositories.save(
                **form.build_values(), token=form.get_token(), now=database_time.now(), actor=get_actor(request)
            )
        except LeaseError as refusal:  # became invalid after the form was checked
            raise ValidationError(str(refusal)) from None
        obj.pk = row.pk


def format_problems(failing: int, refused: int) -> str:
    parts = [
        pluralize(failing, "poll error", "poll errors") if failing else "",
        pluralize(refused, "refused submission", "refused submissions") if refused else "",
    ]
    return ", ".join(part for part in parts if part)


def render_state(row: Repository) -> SafeString:
    return render_badge("ok", "enabled") if row.enabled else render_badge("off", "disabled")


def _describe_token(row: Repository) -> str:
    return "" if row.sealed_token is None else "stored encrypted; cannot be shown"


def _build_task_fields(row: Repository) -> list[SummaryField]:
    """Build the number of tasks by status, the last submission, and the problems of tasks that have not ended."""
    counts = dict(row.tasks.order_by().values_list("status").annotate(Count("pk")))
    by_status = format_counts({label: counts.get(status, 0) for status, label in CodingTaskStatus.choices})
    latest = row.tasks.filter(submitted_at__isnull=False).order_by("-submitted_at").first()
    failing = row.tasks.filter(POLL_FAILING)
    refused = row.tasks.filter(REFUSED).count()
    newest = failing.first()
    return [
        SummaryField("Tasks", f"{sum(counts.values()):,}", note=by_status.lower(), href=_build_tasks_url(row, "all")),
        SummaryField(
            "Last submission", render_time_ago(latest.submitted_at if latest else None, "none yet"),
            note=render_admin_link("leases_codingtask", latest.pk, truncate_text(latest.title, 50)) if latest else "",
        ),
        SummaryField(
            "Poll errors", f"{failing.count():,}", note=truncate_text(newest.poll_error, 120) if newest else "",
            href=_build_tasks_url(row, "poll_errors"), alarm=newest is not None,
        ),
        SummaryField("Refused submissions", f"{refused:,}", href=_build_tasks_url(row, "refused")),
    ]  # fmt: skip


def _build_tasks_url(row: Repository, tab: str) -> str:
    return build_changelist_url("leases_codingtask", slice=tab, repository__id__exact=row.pk)
