"""Operators' pages on what is stored: of agents, of sandboxes, and what went wrong with it. `leases` names the holders."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from os import SEEK_END
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

from django.conf import settings
from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.core.exceptions import PermissionDenied
from django.db.models import Count, F, Model, Q, QuerySet
from django.http import Http404, HttpRequest, HttpResponseRedirect
from django.http.response import HttpResponseBase
from django.shortcuts import get_object_or_404
from django.urls import URLPattern, path, reverse
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.decorators import display

from sandboxes.admin import formatting
from sandboxes.admin import tabs as slices
from sandboxes.admin.base import (
    HolderDisplayMixin,
    ListTab,
    ReadOnlyModelAdmin,
    SummaryField,
    build_all_fields_fieldset,
    build_sandbox_field,
    list_audit_entries,
)
from sandboxes.admin.downloads import build_attachment_response
from sandboxes.admin.formatting import (
    build_changelist_url,
    format_bytes,
    pluralize,
    render_admin_link,
    render_badge,
    render_meter,
    render_time_ago,
    render_timestamp,
    render_two_lines,
    truncate_text,
)
from sandboxes.models import GONE_STATES, Sandbox
from sandboxes.models.state import AgentData, Attachment, DataEvent, DataFile, DataStorageMode, Snapshot, SnapshotKind
from sandboxes.state import data_tree, pull, workspace
from sandboxes.state.data_tree import DirectoryEntry
from sandboxes.state.merge import CONFLICTS_DIRECTORY
from sandboxes.state.spool import open_spool
from sandboxes.state.workspace import CorruptSnapshot
from sandboxes.storage.base import StoreError

Download = tuple[Any, int, str]  # what is read, its length in bytes, the name it is saved under
MAX_NAMES_SHOWN = 200  # names of one directory
MAX_PANEL_ROWS = 12  # rows of each list beside it
KEEPING_LABELS = {DataStorageMode.SYNC: "copied", DataStorageMode.MOUNT: "mounted"}
KEEPING_NOTES = {
    DataStorageMode.SYNC: "into each sandbox before it is used, and what changed back after",
    DataStorageMode.MOUNT: "one directory, in each sandbox",
}
SNAPSHOT_KIND_LABELS = {
    SnapshotKind.SLEEP: "when it slept",
    SnapshotKind.ASKED: "asked for",
    SnapshotKind.RESTORED: "restored",
    SnapshotKind.FORKED: "forked",
}
DATA_EVENT_LABELS = {
    DataEvent.Kind.CONFLICT: "Conflict",
    DataEvent.Kind.LEFT_OUT: "Left out",
    DataEvent.Kind.FULL: "Full",
    DataEvent.Kind.CORRUPT: "Corrupt",
    DataEvent.Kind.OLDER: "Older copy",
    DataEvent.Kind.DROPPED: "Dropped",
}


class DownloadModelAdmin(ReadOnlyModelAdmin):
    """Pages from which what is stored can be downloaded. It is the agent's own: not everybody who sees them may."""

    def has_read_permission(self, request: HttpRequest, object_id: str | None = None) -> bool:
        return request.user.has_perm("sandboxes.read_agent_data")

    def readable(self, request: HttpRequest, pk: Any) -> Any:
        """The row whose files are wanted, if this user may have them."""
        if not self.has_read_permission(request):
            raise PermissionDenied
        return get_object_or_404(self.model, pk=pk)

    def send(
        self, request: HttpRequest, row: Model, what: str, back: str, read: Callable[[ExitStack], Download]
    ) -> HttpResponseBase:
        """What `read` found, and a line in the row's history; or the page it was asked on, saying why it cannot be read."""
        with ExitStack() as stack:
            try:
                source, length, name = read(stack)
            except (StoreError, CorruptSnapshot) as failed:
                messages.error(request, f"It cannot be read: {failed}")
                return HttpResponseRedirect(back)
            open_yet = stack.pop_all()
        LogEntry.objects.log_actions(request.user.pk, [row], CHANGE, f"Download: {what}")  # type: ignore[arg-type]
        return build_attachment_response(source, length, name, open_yet)


# --- what belongs to an agent -----------------------------------------------------------------------------------------


@admin.register(AgentData)
class AgentDataAdmin(HolderDisplayMixin, DownloadModelAdmin):
    list_display = ["who", "amount", "changed", "kept", "unsaved"]
    list_filter = ["keeping"]
    search_fields = ["agent_did__startswith"]
    search_help_text = "Agent"
    ordering = ["agent_did"]
    slices = {
        "all": ListTab("All", "No agent has kept anything yet."),
        "unsaved": ListTab(
            "Not stored",
            "Everything that agents changed is stored.",
            lambda now: Q(pk__in=slices.find_unsaved_attachments().values("data")),
        ),
    }
    fieldsets = build_all_fields_fieldset("agent_did", "keeping", "revision", "files", "size_bytes", "created_at", "changed_at")
    change_form_outer_before_template = "admin/sandboxes/agentdata/files.html"

    # --- the list -----------------------------------------------------------------------------------------------------

    def complete(self, rows: list[AgentData]) -> None:
        waiting = slices.find_unsaved_attachments().filter(data__in=rows).order_by()
        counts = dict(waiting.values_list("data").annotate(Count("pk")))
        for row in rows:
            row.waiting = counts.get(row.pk, 0)  # type: ignore[attr-defined]

    @display(description="Agent")
    def who(self, row: AgentData) -> str:
        return row.agent_did

    @display(description="Size")
    def amount(self, row: AgentData) -> SafeString:
        return render_two_lines(format_bytes(row.size_bytes), pluralize(row.files, "file", "files"))

    @display(description="Changed")
    def changed(self, row: AgentData) -> SafeString:
        return render_two_lines(render_time_ago(row.changed_at), f"revision {row.revision:,}")

    @display(description="Kept")
    def kept(self, row: AgentData) -> str:
        return KEEPING_LABELS[DataStorageMode(row.keeping)]

    @display(description="Not stored in")
    def unsaved(self, row: AgentData) -> SafeString | str:
        number = row.waiting  # type: ignore[attr-defined]
        return format_html('<b class="lh-alarm">{}</b>', pluralize(number, "sandbox", "sandboxes")) if number else "–"

    # --- the page -----------------------------------------------------------------------------------------------------

    def page(self, request: HttpRequest, row: AgentData) -> dict[str, Any]:
        where, after = parse_path_param(request, "path"), parse_path_param(request, "after")
        lines = data_tree.list_directory(row, where, after=after, limit=MAX_NAMES_SHOWN + 1)
        itself = data_tree.find_live_files(row).filter(path=where).first()
        may_read = self.has_read_permission(request)
        mounted = row.keeping == DataStorageMode.MOUNT
        attached = list(find_attachments(row)[: MAX_PANEL_ROWS + 1])
        events = list(DataEvent.objects.filter(agent_did=row.agent_did)[: MAX_PANEL_ROWS + 1])
        return {
            "facts": self.facts(row),
            "mounted": mounted,
            "where": formatting.format_path(where),
            "crumbs": build_breadcrumbs(where),
            "there": not where or bool(lines) or itself is not None,
            "in_conflicts": f"{where}/".startswith(f"{CONFLICTS_DIRECTORY}/"),
            "names": self.names(row, lines[:MAX_NAMES_SHOWN] or data_tree.list_single_file(itself), may_read),
            "earlier": build_directory_query(where) if after else "",
            "later": build_directory_query(where, after=lines[MAX_NAMES_SHOWN - 1].name)
            if len(lines) > MAX_NAMES_SHOWN
            else "",
            "may_read": may_read,
            "tar": self.href("tar", row, where) if may_read and not mounted and (lines or not where) else "",
            "attached": [(each, self.condition(row, each)) for each in attached[:MAX_PANEL_ROWS]],
            "more_attached": build_changelist_url("sandboxes_sandbox", slice="live", agent_did=row.agent_did)
            if len(attached) > MAX_PANEL_ROWS
            else "",
            "events": [
                (
                    each,
                    render_data_event(each),
                    truncate_text(formatting.format_path(each.path), 160),
                    formatting.format_path(each.detail),
                )
                for each in events[:MAX_PANEL_ROWS]
            ],
            "all_events": build_changelist_url("sandboxes_dataevent", agent_did=row.agent_did)
            if len(events) > MAX_PANEL_ROWS
            else "",
            "done": list_audit_entries(row, MAX_PANEL_ROWS),
        }

    def facts(self, row: AgentData) -> list[SummaryField]:
        conflicts = data_tree.find_files_below(row, CONFLICTS_DIRECTORY).filter(kind="file").count()
        unsaved = slices.find_unsaved_attachments().filter(data=row).count()
        most = settings.DATA_MOST_BYTES
        return [
            self.agent(row.agent_did),
            SummaryField("Files", f"{row.files:,}", note="and directories and links"),
            SummaryField(
                "Size",
                format_bytes(row.size_bytes),
                note=render_two_lines(render_meter(row.size_bytes, most), f"of {format_bytes(most)}"),
            ),
            SummaryField("Changed", render_time_ago(row.changed_at), note=f"revision {row.revision:,}"),
            SummaryField(
                "Kept", KEEPING_LABELS[DataStorageMode(row.keeping)], note=KEEPING_NOTES[DataStorageMode(row.keeping)]
            ),
            SummaryField(
                "Not stored in",
                pluralize(unsaved, "sandbox", "sandboxes"),
                note="what was changed there is only there" if unsaved else "every change is stored",
                href=build_changelist_url("sandboxes_sandbox", slice="unsaved", agent_did=row.agent_did) if unsaved else "",
                alarm=unsaved > 0,
            ),
            SummaryField(
                "Conflicts kept",
                pluralize(conflicts, "file", "files"),
                note=f"under {CONFLICTS_DIRECTORY}",
                href=build_directory_query(CONFLICTS_DIRECTORY) if conflicts else "",
            ),
        ]

    def names(self, row: AgentData, lines: Sequence[DirectoryEntry], may_read: bool) -> list[dict[str, Any]]:
        """A table of what is in a directory."""
        writers = self.holders({line.holder for line in lines if line.holder})
        return [
            {
                "line": line,
                "name": formatting.format_path(line.name),
                "href": build_directory_query(line.path) if line.kind == data_tree.DIRECTORY else "",
                "conflict": line.path == CONFLICTS_DIRECTORY or line.path.startswith(f"{CONFLICTS_DIRECTORY}/"),
                "amount": "–" if line.kind == "link" else format_bytes(line.size_bytes),
                "files": pluralize(line.files, "file", "files") if line.kind == data_tree.DIRECTORY else "",
                "mode": f"{line.row.mode:04o}" if line.row else "–",
                "target": formatting.format_path(line.row.target) if line.row else "",
                "digest": line.row.digest if line.row else "",
                "at": render_time_ago(line.changed_at),
                "writer": writers[line.holder] if line.holder else "an operator",
                "download": self.href("file", row, line.path) if may_read and line.kind == "file" else "",
            }
            for line in lines
        ]

    def condition(self, row: AgentData, here: Attachment) -> SafeString:
        """How what a sandbox has compares with what is stored."""
        if here.unsaved_since:
            return render_badge("error", "changes not stored")
        behind = row.revision - here.revision
        return (
            render_badge("ok", "up to date")
            if behind <= 0
            else render_badge("cold", f"{pluralize(behind, 'revision', 'revisions')} behind")
        )

    # --- downloads ----------------------------------------------------------------------------------------------------

    def href(self, what: str, row: AgentData, where: str) -> str:
        return reverse(f"admin:sandboxes_agentdata_{what}", args=[row.pk], query={"path": where} if where else None)

    def get_urls(self) -> list[URLPattern]:
        ours = [
            path("<int:pk>/file/", self.admin_site.admin_view(self.file), name="sandboxes_agentdata_file"),
            path("<int:pk>/tar/", self.admin_site.admin_view(self.tar), name="sandboxes_agentdata_tar"),
        ]
        return [*ours, *super().get_urls()]

    def file(self, request: HttpRequest, pk: int) -> HttpResponseBase:
        """The newest version of one file, checked."""
        row = self.readable(request, pk)
        wanted = get_object_or_404(select_file_versions(row), path=parse_path_param(request, "path"), kind="file")

        def read(stack: ExitStack) -> Download:
            content = pull.fetch_contents([wanted], stack, now=timezone.now())
            return content[wanted.path], wanted.size_bytes, wanted.path.rpartition("/")[2]

        return self.send(request, row, wanted.path, self.page_of(row, wanted.path.rpartition("/")[0]), read)

    def tar(self, request: HttpRequest, pk: int) -> HttpResponseBase:
        """A directory with everything below it, checked; without a path, all there is."""
        row, where = self.readable(request, pk), parse_path_param(request, "path")
        wanted = [
            *select_file_versions(row, data_tree.find_files_below(row, where)),
            *(select_file_versions(row).filter(path=where, kind=data_tree.DIRECTORY) if where else ()),
        ]
        if where and not wanted:
            raise Http404

        def read(stack: ExitStack) -> Download:
            whole = stack.enter_context(open_spool())
            pull.write_tar(wanted, whole, now=timezone.now())
            length = whole.seek(0, SEEK_END)
            whole.seek(0)
            return whole, length, "-".join([row.agent_did, *where.split("/")[-1:]]).rstrip("-") + ".tar"

        return self.send(request, row, f"{where}/" if where else "everything", self.page_of(row, where), read)

    def page_of(self, row: AgentData, where: str) -> str:
        return reverse("admin:sandboxes_agentdata_change", args=[row.pk]) + build_directory_query(where)


def parse_path_param(request: HttpRequest, name: str) -> str:
    """A path from the address, "" for the topmost directory. Http404 for what no path can be."""
    said = request.GET.get(name, "").strip("/")
    if said and data_tree.describe_path_error(said):
        raise Http404
    return said


def build_directory_query(where: str, **more: str) -> str:
    return "?" + urlencode({"path": where, **more})


def build_breadcrumbs(where: str) -> list[tuple[str, str]]:
    """The directories above and including this one, each with its address."""
    parts = where.split("/") if where else []
    return [
        (formatting.format_path(part), build_directory_query("/".join(parts[: depth + 1]))) for depth, part in enumerate(parts)
    ]


def select_file_versions(row: AgentData, files: QuerySet[DataFile] | None = None) -> QuerySet[DataFile]:
    """Versions with what is needed to read them."""
    return (data_tree.find_live_files(row) if files is None else files).select_related("stored_in", "data")


def find_attachments(row: AgentData) -> QuerySet[Attachment]:
    """The sandboxes that have it now, those first that have something more."""
    here = Attachment.objects.filter(data=row, incarnation=F("sandbox__incarnation")).exclude(sandbox__state__in=GONE_STATES)
    return here.select_related("sandbox").defer("base", "pulling").order_by(F("unsaved_since").asc(nulls_last=True), "pk")


# --- what a sandbox had when it slept, or was asked for ---------------------------------------------------------------


@admin.register(Snapshot)
class SnapshotAdmin(HolderDisplayMixin, DownloadModelAdmin):
    list_display = ["who", "why", "stored", "amount", "where"]
    list_filter = ["kind"]
    list_select_related = ["sandbox"]
    search_fields = ["sandbox__agent_did__startswith", "sandbox__environment_id__startswith"]
    search_help_text = "Agent or environment, or a whole id"
    ordering = ["-at", "-pk"]
    slices = {
        "kept": ListTab("Kept", "Nothing is stored of any sandbox.", lambda now: Q(forgotten_at__isnull=True)),
        "history": ListTab("History", "Nothing was ever stored of any sandbox."),
    }
    fieldsets = build_all_fields_fieldset(
        "id", "sandbox", "incarnation", "holder", "kind", "name", "at", "key", "size_bytes", "digests", "local", "forgotten_at"
    )
    change_form_outer_before_template = "admin/sandboxes/snapshot/objects.html"

    @display(description="Agent and environment")
    def who(self, row: Snapshot) -> SafeString:
        return render_two_lines(row.sandbox.agent_did, row.sandbox.environment_id)

    @display(description="Stored because")
    def why(self, row: Snapshot) -> SafeString:
        return render_two_lines(SNAPSHOT_KIND_LABELS[SnapshotKind(row.kind)], formatting.format_path(row.name))

    @display(description="Stored")
    def stored(self, row: Snapshot) -> SafeString | str:
        return render_time_ago(row.at)

    @display(description="Size")
    def amount(self, row: Snapshot) -> str:
        return format_bytes(row.size_bytes)

    @display(description="Where")
    def where(self, row: Snapshot) -> str:
        return describe_snapshot_location(row)

    def page(self, request: HttpRequest, row: Snapshot) -> dict[str, Any]:
        may_read = self.has_read_permission(request) and row.forgotten_at is None
        return {
            "facts": [
                SummaryField("Stored", render_time_ago(row.at), note=render_timestamp(row.at)),
                SummaryField("Because", SNAPSHOT_KIND_LABELS[SnapshotKind(row.kind)], note=formatting.format_path(row.name)),
                SummaryField("Size", format_bytes(row.size_bytes), note="as an uncompressed tar"),
                SummaryField(
                    "Where",
                    describe_snapshot_location(row),
                    note=format_html("forgotten {}", render_time_ago(row.forgotten_at)) if row.forgotten_at else "",
                ),
                build_sandbox_field(row),
                self.holder(row.holder),
                self.agent(row.sandbox.agent_did),
            ],
            "objects": [
                (place, row.digests[place], reverse("admin:sandboxes_snapshot_tar", args=[row.pk, place]) if may_read else "")
                for place in sorted(row.digests)
            ],
            "done": list_audit_entries(row, MAX_PANEL_ROWS),
        }

    def get_urls(self) -> list[URLPattern]:
        tar = path("<uuid:pk>/<slug:place>.tar", self.admin_site.admin_view(self.tar), name="sandboxes_snapshot_tar")
        return [tar, *super().get_urls()]

    def tar(self, request: HttpRequest, pk: UUID, place: str) -> HttpResponseBase:
        """One place of a snapshot, as it was stored, checked."""
        row: Snapshot = self.readable(request, pk)
        back = reverse("admin:sandboxes_snapshot_change", args=[row.pk])
        if place not in row.digests:
            raise Http404
        if row.forgotten_at:
            messages.error(request, "It was forgotten: what it stored is gone.")
            return HttpResponseRedirect(back)

        def read(stack: ExitStack) -> Download:
            source, _ = stack.enter_context(workspace.open_snapshot(row, place, now=timezone.now()))
            length = source.seek(0, SEEK_END)
            source.seek(0)
            return source, length, f"{row.sandbox} {row.at:%Y-%m-%d %H-%M-%S} {place}.tar"

        return self.send(request, row, place, back, read)


def describe_snapshot_location(row: Snapshot) -> str:
    """Where a wake would find it."""
    if row.forgotten_at:
        return "nowhere any more"
    return "here and in the store" if row.local else "in the store"


def find_snapshots(row: Sandbox) -> QuerySet[Snapshot]:
    """The stored copies of its holder's state: a wake reads the newest, whichever sandbox it was made from."""
    return Snapshot.objects.filter(holder=row.holder) if row.holder else Snapshot.objects.none()


def find_attachment(row: Sandbox) -> Attachment | None:
    """What this sandbox has of its agent's data."""
    if row.holder is None:
        return None
    here = Attachment.objects.filter(pk=row.pk, incarnation=row.incarnation, holder=row.holder)
    return here.select_related("data").defer("base", "pulling").first()


def build_agent_data_field(here: Attachment) -> SummaryField:
    """The agent's data, and how much of it a sandbox has."""
    behind = here.data.revision - here.revision
    missing = f"{pluralize(behind, 'revision', 'revisions')} behind; its next use brings them" if behind > 0 else "up to date"
    return SummaryField(
        "/data",
        render_admin_link("sandboxes_agentdata", here.data_id, format_bytes(here.data.size_bytes)),
        note="its own changes are not stored" if here.unsaved_since else missing,
        alarm=here.unsaved_since is not None,
    )


# --- what went wrong --------------------------------------------------------------------------------------------------


@admin.register(DataEvent)
class DataEventAdmin(HolderDisplayMixin, ReadOnlyModelAdmin):
    list_display = ["what", "where", "said", "who", "writer", "when"]
    list_filter = ["kind"]
    search_fields = ["agent_did__startswith", "path__startswith"]
    search_help_text = "Agent, or the beginning of a path"
    ordering = ["-pk"]
    slices = {
        "all": ListTab("All", "Nothing about stored state was worth telling."),
        "conflicts": ListTab("Conflicts", "No two sandboxes changed one file.", lambda now: Q(kind=DataEvent.Kind.CONFLICT)),
        "lost": ListTab(
            "Spoiled or lost",
            "Everything that was stored could be read, and nothing was dropped.",
            lambda now: Q(kind__in=[DataEvent.Kind.CORRUPT, DataEvent.Kind.OLDER, DataEvent.Kind.DROPPED]),
        ),
    }
    fieldsets = build_all_fields_fieldset("kind", "agent_did", "holder", "at", "path", "detail")

    def complete(self, rows: list[DataEvent]) -> None:
        writers = self.holders({row.holder for row in rows if row.holder})
        for row in rows:
            row.writer = writers[row.holder] if row.holder else "–"  # type: ignore[attr-defined]

    @display(description="What")
    def what(self, row: DataEvent) -> SafeString:
        return render_data_event(row)

    @display(description="Path")
    def where(self, row: DataEvent) -> SafeString:
        return format_html('<span class="lh-command">{}</span>', truncate_text(formatting.format_path(row.path)) or "–")

    @display(description="Why")
    def said(self, row: DataEvent) -> str:
        return truncate_text(formatting.format_path(row.detail), 160)

    @display(description="Agent")
    def who(self, row: DataEvent) -> str:
        return row.agent_did

    @display(description="Lease")
    def writer(self, row: DataEvent) -> Any:
        return row.writer  # type: ignore[attr-defined]

    @display(description="When")
    def when(self, row: DataEvent) -> SafeString | str:
        return render_time_ago(row.at)

    def page(self, request: HttpRequest, row: DataEvent) -> dict[str, Any]:
        return {
            "facts": [
                SummaryField("What", render_data_event(row)),
                SummaryField("When", render_time_ago(row.at), note=render_timestamp(row.at)),
                self.agent(row.agent_did),
                *([self.holder(row.holder)] if row.holder else []),
                SummaryField("Path", formatting.format_path(row.path) or "–"),
                SummaryField("Why", formatting.format_path(row.detail) or "–"),
            ]
        }


def render_data_event(row: DataEvent) -> SafeString:
    return render_badge(row.kind, DATA_EVENT_LABELS[DataEvent.Kind(row.kind)])
