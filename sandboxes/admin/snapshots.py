"""Console pages of snapshots."""

from contextlib import ExitStack
from os import SEEK_END
from typing import Any
from uuid import UUID

from django.contrib import admin, messages
from django.db.models import Q, QuerySet
from django.http import Http404, HttpRequest, HttpResponseRedirect
from django.http.response import HttpResponseBase
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.decorators import display

from sandboxes import formatting
from sandboxes.admin.base.audit import list_audit_entries
from sandboxes.admin.base.changelist import ListTab
from sandboxes.admin.base.downloads import Download, DownloadModelAdmin
from sandboxes.admin.base.formatting import (
    SummaryField,
    build_sandbox_field,
    render_time_ago,
    render_timestamp,
    render_two_lines,
)
from sandboxes.admin.base.model_admin import build_all_fields_fieldset
from sandboxes.admin.base.owner_search import OwnerSearch
from sandboxes.admin.base.registry import build_agent_field, build_holder_field
from sandboxes.db import database_time
from sandboxes.formatting import format_bytes
from sandboxes.models import Sandbox
from sandboxes.models.state import Snapshot, SnapshotKind
from sandboxes.state import workspace
from sandboxes.state.exact_tars import OMISSION_KINDS

MAX_PANEL_ROWS = 12  # rows of the panel of operators' actions
MAX_OMITTED_PATHS = 5
SNAPSHOT_KIND_LABELS = {
    SnapshotKind.SLEEP: "evicted",
    SnapshotKind.ASKED: "on request",
    SnapshotKind.RESTORED: "restored",
    SnapshotKind.FORKED: "forked",
    SnapshotKind.FOUND: "found unrecorded",
}


@admin.register(Snapshot)
class SnapshotAdmin(DownloadModelAdmin):
    list_display = ["agent_label", "reason_label", "stored", "amount", "location"]
    list_filter = ["kind"]
    list_select_related = ["sandbox"]
    search_fields = ["sandbox__agent_did__startswith", "sandbox__environment_id__startswith"]
    owner_search = OwnerSearch("sandbox")
    search_help_text = "Agent or environment (prefix), or a complete id"
    ordering = ["-at", "-pk"]
    list_tabs = {
        "kept": ListTab(
            "Stored",
            "No stored snapshots. One is made when a sandbox is evicted or on request.",
            lambda now: Q(forgotten_at__isnull=True),
        ),
        "history": ListTab("History", "No snapshots yet. One is made when a sandbox is evicted or on request."),
    }
    fieldsets = build_all_fields_fieldset(
        "id", "sandbox", "incarnation", "holder", "kind", "name", "at", "key", "size_bytes", "digests", "omitted", "local",
        "vendor_snapshot", "vendor_host", "vendor_expires_at", "forgotten_at",
    )  # fmt: skip
    change_form_outer_before_template = "admin/sandboxes/snapshot/objects.html"

    @display(description="Agent and environment")
    def agent_label(self, row: Snapshot) -> SafeString:
        return render_two_lines(row.sandbox.agent_did, row.sandbox.environment_id)

    @display(description="Reason")
    def reason_label(self, row: Snapshot) -> SafeString:
        return render_two_lines(SNAPSHOT_KIND_LABELS[SnapshotKind(row.kind)], formatting.format_path(row.name))

    @display(description="Stored")
    def stored(self, row: Snapshot) -> SafeString | str:
        return render_time_ago(row.at)

    @display(description="Size")
    def amount(self, row: Snapshot) -> str:
        return format_bytes(row.size_bytes)

    @display(description="Location")
    def location(self, row: Snapshot) -> str:
        return describe_snapshot_location(row)

    def get_page_context(self, request: HttpRequest, row: Snapshot) -> dict[str, Any]:
        may_read = self.has_read_permission(request) and row.forgotten_at is None
        return {
            "facts": [
                SummaryField("Stored", render_time_ago(row.at), note=render_timestamp(row.at)),
                SummaryField("Reason", SNAPSHOT_KIND_LABELS[SnapshotKind(row.kind)], note=formatting.format_path(row.name)),
                SummaryField("Size", format_bytes(row.size_bytes), note="as an uncompressed tar"),
                SummaryField(
                    "Location",
                    describe_snapshot_location(row),
                    note=format_html("deleted {}", render_time_ago(row.forgotten_at)) if row.forgotten_at else "",
                ),
                SummaryField("Not kept", describe_omissions(row), note=describe_omitted_paths(row)),
                build_sandbox_field(row),
                build_holder_field(row.holder),
                build_agent_field(row.sandbox.agent_did),
            ],
            "objects": [
                (place, row.digests[place], reverse("admin:sandboxes_snapshot_tar", args=[row.pk, place]) if may_read else "")
                for place in sorted(row.digests)
            ],
            "audit": list_audit_entries(row, MAX_PANEL_ROWS),
        }

    def get_urls(self) -> list[URLPattern]:
        tar = path("<uuid:pk>/<slug:place>.tar", self.admin_site.admin_view(self.download_tar), name="sandboxes_snapshot_tar")
        return [tar, *super().get_urls()]

    def download_tar(self, request: HttpRequest, pk: UUID, place: str) -> HttpResponseBase:
        """Send one directory of a snapshot as the stored tar, after verifying its digest."""
        row: Snapshot = self.get_readable_row(request, pk)
        back = reverse("admin:sandboxes_snapshot_change", args=[row.pk])
        if place not in row.digests:
            raise Http404
        if row.forgotten_at:
            messages.error(request, "The snapshot was deleted from the store.")
            return HttpResponseRedirect(back)

        def read(stack: ExitStack) -> Download:
            source, _ = stack.enter_context(workspace.open_snapshot(row, place, now=database_time.now()))
            length = source.seek(0, SEEK_END)
            source.seek(0)
            return source, length, f"{row.sandbox} {row.at:%Y-%m-%d %H-%M-%S} {place}.tar"

        return self.send_download(request, row, place, back, read)


def describe_snapshot_location(row: Snapshot) -> str:
    """Name the places that a wake could read the snapshot from."""
    if row.forgotten_at:
        return "deleted"
    places = "local copy and store" if row.local else "store"
    return f"{places}, vendor's snapshot" if row.vendor_snapshot else places


def describe_omissions(row: Snapshot) -> str:
    """Count what the snapshot does not keep, by kind."""
    return ", ".join(f"{each['count']:,} {OMISSION_KINDS[each['kind']]}" for each in row.omitted) or "nothing"


def describe_omitted_paths(row: Snapshot) -> str:
    paths = dict.fromkeys(formatting.format_path(path) for each in row.omitted for path in each["paths"])
    return ", ".join([*paths][:MAX_OMITTED_PATHS])


def find_snapshots(row: Sandbox) -> QuerySet[Snapshot]:
    """Select the snapshots of the holder's state, newest first. A wake reads the newest, also one of another sandbox."""
    return Snapshot.objects.filter(holder=row.holder) if row.holder else Snapshot.objects.none()
