"""Console pages of agents' persistent data."""

from collections.abc import Sequence
from contextlib import ExitStack
from os import SEEK_END
from typing import Any
from urllib.parse import urlencode

from django.conf import settings
from django.contrib import admin
from django.db.models import Count, F, Q, QuerySet
from django.http import Http404, HttpRequest
from django.http.response import HttpResponseBase
from django.shortcuts import get_object_or_404
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.decorators import display

from sandboxes import formatting, pool_stats
from sandboxes.admin.base.audit import list_audit_entries
from sandboxes.admin.base.changelist import ListTab
from sandboxes.admin.base.downloads import Download, DownloadModelAdmin
from sandboxes.admin.base.formatting import (
    SummaryField,
    build_changelist_url,
    render_admin_link,
    render_badge,
    render_meter,
    render_time_ago,
    render_two_lines,
    truncate_text,
)
from sandboxes.admin.base.model_admin import build_all_fields_fieldset
from sandboxes.admin.base.registry import build_agent_field, render_holders
from sandboxes.admin.data_events import render_data_event
from sandboxes.db import database_time
from sandboxes.formatting import format_bytes, pluralize
from sandboxes.models import GONE_STATES, Sandbox
from sandboxes.models.state import AgentData, Attachment, DataEvent, DataFile, DataStorageMode
from sandboxes.state import data_tree, pull
from sandboxes.state.data_tree import DirectoryEntry
from sandboxes.state.merge import CONFLICTS_DIRECTORY
from sandboxes.state.spool import open_spool

MAX_NAMES_SHOWN = 200  # per page of a directory listing
MAX_PANEL_ROWS = 12  # rows of each panel
KEEPING_LABELS = {DataStorageMode.SYNC: "copied", DataStorageMode.MOUNT: "mounted"}
KEEPING_NOTES = {
    DataStorageMode.SYNC: "synced into a sandbox before each use, changes stored after it",
    DataStorageMode.MOUNT: "one directory mounted into every sandbox",
}


@admin.register(AgentData)
class AgentDataAdmin(DownloadModelAdmin):
    list_display = ["agent_label", "amount", "changed", "kept", "unsaved"]
    list_filter = ["keeping"]
    search_fields = ["agent_did__startswith"]
    search_help_text = "Agent (prefix)"
    ordering = ["agent_did"]
    list_tabs = {
        "all": ListTab("All", "No agent data yet. It appears when an agent first writes to /data."),
        "unsaved": ListTab(
            "Not stored",
            "No unsaved data: every change is stored.",
            lambda now: Q(pk__in=pool_stats.find_unsaved_attachments().values("data")),
        ),
    }
    fieldsets = build_all_fields_fieldset("agent_did", "keeping", "revision", "files", "size_bytes", "created_at", "changed_at")
    change_form_outer_before_template = "admin/sandboxes/agentdata/files.html"

    # --- the list -----------------------------------------------------------------------------------------------------

    def annotate_rows(self, rows: list[AgentData]) -> None:
        unsaved = pool_stats.find_unsaved_attachments().filter(data__in=rows).order_by()
        counts = dict(unsaved.values_list("data").annotate(Count("pk")))
        for row in rows:
            row.unsaved_count = counts.get(row.pk, 0)  # type: ignore[attr-defined]

    @display(description="Agent")
    def agent_label(self, row: AgentData) -> str:
        return row.agent_did

    @display(description="Size")
    def amount(self, row: AgentData) -> SafeString:
        return render_two_lines(format_bytes(row.size_bytes), pluralize(row.files, "file", "files"))

    @display(description="Changed")
    def changed(self, row: AgentData) -> SafeString:
        return render_two_lines(render_time_ago(row.changed_at), f"revision {row.revision:,}")

    @display(description="Mode")
    def kept(self, row: AgentData) -> str:
        return KEEPING_LABELS[DataStorageMode(row.keeping)]

    @display(description="Unsaved in")
    def unsaved(self, row: AgentData) -> SafeString | str:
        number = row.unsaved_count  # type: ignore[attr-defined]
        return format_html('<b class="lh-alarm">{}</b>', pluralize(number, "sandbox", "sandboxes")) if number else "–"

    # --- the page -----------------------------------------------------------------------------------------------------

    def get_page_context(self, request: HttpRequest, row: AgentData) -> dict[str, Any]:
        directory, after = parse_path_param(request, "path"), parse_path_param(request, "after")
        entries = data_tree.list_directory(row, directory, after=after, limit=MAX_NAMES_SHOWN + 1)
        single_file = data_tree.find_live_files(row).filter(path=directory).first()
        may_read = self.has_read_permission(request)
        mounted = row.keeping == DataStorageMode.MOUNT
        attached = list(find_attachments(row)[: MAX_PANEL_ROWS + 1])
        events = list(DataEvent.objects.filter(agent_did=row.agent_did)[: MAX_PANEL_ROWS + 1])
        return {
            "facts": self.build_fields(row),
            "mounted": mounted,
            "directory": formatting.format_path(directory),
            "crumbs": build_breadcrumbs(directory),
            "exists": not directory or bool(entries) or single_file is not None,
            "in_conflicts": f"{directory}/".startswith(f"{CONFLICTS_DIRECTORY}/"),
            "names": self.build_file_rows(row, entries[:MAX_NAMES_SHOWN] or data_tree.list_single_file(single_file), may_read),
            "first_page": build_directory_query(directory) if after else "",
            "next_page": build_directory_query(directory, after=entries[MAX_NAMES_SHOWN - 1].name)
            if len(entries) > MAX_NAMES_SHOWN
            else "",
            "may_read": may_read,
            "tar": self.build_download_url("tar", row, directory)
            if may_read and not mounted and (entries or not directory)
            else "",
            "attached": [(each, self.render_sync_state(row, each)) for each in attached[:MAX_PANEL_ROWS]],
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
            "audit": list_audit_entries(row, MAX_PANEL_ROWS),
        }

    def build_fields(self, row: AgentData) -> list[SummaryField]:
        conflicts = data_tree.find_files_below(row, CONFLICTS_DIRECTORY).filter(kind="file").count()
        unsaved = pool_stats.find_unsaved_attachments().filter(data=row).count()
        limit = settings.DATA_MOST_BYTES
        return [
            build_agent_field(row.agent_did),
            SummaryField("Files", f"{row.files:,}", note="including directories and links"),
            SummaryField(
                "Size",
                format_bytes(row.size_bytes),
                note=render_two_lines(render_meter(row.size_bytes, limit), f"of {format_bytes(limit)}"),
            ),
            SummaryField("Changed", render_time_ago(row.changed_at), note=f"revision {row.revision:,}"),
            SummaryField(
                "Mode", KEEPING_LABELS[DataStorageMode(row.keeping)], note=KEEPING_NOTES[DataStorageMode(row.keeping)]
            ),
            SummaryField(
                "Unsaved in",
                pluralize(unsaved, "sandbox", "sandboxes"),
                note="changes exist only there" if unsaved else "every change is stored",
                href=build_changelist_url("sandboxes_sandbox", slice="unsaved", agent_did=row.agent_did) if unsaved else "",
                alarm=unsaved > 0,
            ),
            SummaryField(
                "Conflicts",
                pluralize(conflicts, "file", "files"),
                note=f"under {CONFLICTS_DIRECTORY}",
                href=build_directory_query(CONFLICTS_DIRECTORY) if conflicts else "",
            ),
        ]

    def build_file_rows(self, row: AgentData, entries: Sequence[DirectoryEntry], may_read: bool) -> list[dict[str, Any]]:
        """Build the rows of a directory listing."""
        writers = render_holders({line.holder for line in entries if line.holder})
        return [
            {
                "entry": line,
                "name": formatting.format_path(line.name),
                "href": build_directory_query(line.path) if line.kind == data_tree.DIRECTORY else "",
                "conflict": line.path == CONFLICTS_DIRECTORY or line.path.startswith(f"{CONFLICTS_DIRECTORY}/"),
                "size": "–" if line.kind == "link" else format_bytes(line.size_bytes),
                "files": pluralize(line.files, "file", "files") if line.kind == data_tree.DIRECTORY else "",
                "mode": f"{line.row.mode:04o}" if line.row else "–",
                "target": formatting.format_path(line.row.target) if line.row else "",
                "digest": line.row.digest if line.row else "",
                "at": render_time_ago(line.changed_at),
                "writer": writers[line.holder] if line.holder else "an operator",
                "download": self.build_download_url("file", row, line.path) if may_read and line.kind == "file" else "",
            }
            for line in entries
        ]

    def render_sync_state(self, row: AgentData, attachment: Attachment) -> SafeString:
        """Render whether a sandbox has unsaved changes or lags behind the stored revision."""
        if attachment.unsaved_since:
            return render_badge("error", "unsaved changes")
        behind = row.revision - attachment.revision
        return (
            render_badge("ok", "up to date")
            if behind <= 0
            else render_badge("cold", f"{pluralize(behind, 'revision', 'revisions')} behind")
        )

    # --- downloads ----------------------------------------------------------------------------------------------------

    def build_download_url(self, kind: str, row: AgentData, path: str) -> str:
        return reverse(f"admin:sandboxes_agentdata_{kind}", args=[row.pk], query={"path": path} if path else None)

    def get_urls(self) -> list[URLPattern]:
        downloads = [
            path("<int:pk>/file/", self.admin_site.admin_view(self.download_file), name="sandboxes_agentdata_file"),
            path("<int:pk>/tar/", self.admin_site.admin_view(self.download_tar), name="sandboxes_agentdata_tar"),
        ]
        return [*downloads, *super().get_urls()]

    def download_file(self, request: HttpRequest, pk: int) -> HttpResponseBase:
        """Send the newest version of one file after verifying its digest."""
        row = self.get_readable_row(request, pk)
        wanted = get_object_or_404(select_file_versions(row), path=parse_path_param(request, "path"), kind="file")

        def read(stack: ExitStack) -> Download:
            content = pull.fetch_contents([wanted], stack, now=database_time.now())
            return content[wanted.path], wanted.size_bytes, wanted.path.rpartition("/")[2]

        return self.send_download(request, row, wanted.path, self.get_directory_url(row, wanted.path.rpartition("/")[0]), read)

    def download_tar(self, request: HttpRequest, pk: int) -> HttpResponseBase:
        """Send a directory tree as tar after verifying digests. Without a path, send all of /data."""
        row, directory = self.get_readable_row(request, pk), parse_path_param(request, "path")
        wanted = [
            *select_file_versions(row, data_tree.find_files_below(row, directory)),
            *(select_file_versions(row).filter(path=directory, kind=data_tree.DIRECTORY) if directory else ()),
        ]
        if directory and not wanted:
            raise Http404

        def read(stack: ExitStack) -> Download:
            whole = stack.enter_context(open_spool())
            pull.write_tar(wanted, whole, now=database_time.now())
            length = whole.seek(0, SEEK_END)
            whole.seek(0)
            return whole, length, "-".join([row.agent_did, *directory.split("/")[-1:]]).rstrip("-") + ".tar"

        return self.send_download(
            request, row, f"{directory}/" if directory else "everything", self.get_directory_url(row, directory), read
        )

    def get_directory_url(self, row: AgentData, directory: str) -> str:
        return reverse("admin:sandboxes_agentdata_change", args=[row.pk]) + build_directory_query(directory)


def parse_path_param(request: HttpRequest, name: str) -> str:
    """Parse a path from the query string, "" for /data itself. Raise Http404 for an invalid path."""
    value = request.GET.get(name, "").strip("/")
    if value and data_tree.describe_path_error(value):
        raise Http404
    return value


def build_directory_query(directory: str, **params: str) -> str:
    return "?" + urlencode({"path": directory, **params})


def build_breadcrumbs(directory: str) -> list[tuple[str, str]]:
    """List the names of a directory and its ancestors with their URLs, topmost first."""
    parts = directory.split("/") if directory else []
    return [
        (formatting.format_path(part), build_directory_query("/".join(parts[: depth + 1]))) for depth, part in enumerate(parts)
    ]


def select_file_versions(row: AgentData, files: QuerySet[DataFile] | None = None) -> QuerySet[DataFile]:
    """Select file versions together with the rows needed to read their contents."""
    return (data_tree.find_live_files(row) if files is None else files).select_related("stored_in", "data")


def find_attachments(row: AgentData) -> QuerySet[Attachment]:
    """Select the attachments of existing sandboxes, those with unsaved changes first."""
    attachments = Attachment.objects.filter(data=row, incarnation=F("sandbox__incarnation")).exclude(
        sandbox__state__in=GONE_STATES
    )
    return (
        attachments.select_related("sandbox").defer("base", "pulling").order_by(F("unsaved_since").asc(nulls_last=True), "pk")
    )


def find_attachment(row: Sandbox) -> Attachment | None:
    """Return the attachment of the sandbox's present incarnation and holder to its agent's data."""
    if row.holder is None:
        return None
    attachments = Attachment.objects.filter(pk=row.pk, incarnation=row.incarnation, holder=row.holder)
    return attachments.select_related("data").defer("base", "pulling").first()


def build_agent_data_field(attachment: Attachment) -> SummaryField:
    """Build the size of the agent's data and the sync state of a sandbox."""
    behind = attachment.data.revision - attachment.revision
    missing = f"{pluralize(behind, 'revision', 'revisions')} behind, synced before the next run" if behind > 0 else "up to date"
    return SummaryField(
        "/data",
        render_admin_link("sandboxes_agentdata", attachment.data_id, format_bytes(attachment.data.size_bytes)),
        note="unsaved changes" if attachment.unsaved_since else missing,
        alarm=attachment.unsaved_since is not None,
    )
