"""Operators' pages on programs in the background of sandboxes."""

from typing import Any

from django.contrib import admin
from django.db.models import Q
from django.http import HttpRequest
from django.utils import timezone
from django.utils.safestring import SafeString
from unfold.decorators import display

from sandboxes.admin.base import Fact, Facts, Held, Slice, all_fields, place_of
from sandboxes.admin.formatting import ago, badge, command, path, shortened, span, stamp, two
from sandboxes.models import Ending, Process

COLOURS = {Ending.EXITED: "ok", Ending.KILLED: "cold", Ending.GONE: "cold", Ending.FAILED: "error"}


@admin.register(Process)
class ProcessAdmin(Held, Facts):
    list_display = ["line", "condition", "lasted", "started", "who"]
    list_filter = ["state"]
    list_select_related = ["sandbox"]
    search_fields = ["agent_did__startswith", "sandbox__environment_id__startswith"]
    search_help_text = "Agent or environment, or a whole id"
    ordering = ["-started_at", "-pk"]
    slices = {
        "running": Slice("Running", "Nothing runs in the background now.", lambda now: Q(ended_at__isnull=True)),
        "all": Slice("All", "Nothing was ever started in the background."),
    }
    fieldsets = all_fields(
        "id", "sandbox", "holder", "agent_did", "incarnation", "name", "argv", "cwd", "env_names", "started_at", "starts_by",
        "state", "ended_at", "exit_code", "note",
    )  # fmt: skip

    @display(description="Command")
    def line(self, row: Process) -> SafeString:
        return two(shortened(command(row.argv)), path(row.name))

    @display(description="State")
    def condition(self, row: Process) -> SafeString:
        return condition(row)

    @display(description="Ran for")
    def lasted(self, row: Process) -> str:
        return lasted(row)

    @display(description="Started")
    def started(self, row: Process) -> SafeString | str:
        return ago(row.started_at)

    @display(description="Agent and environment")
    def who(self, row: Process) -> SafeString:
        return two(row.agent_did, row.sandbox.environment_id)

    def page(self, request: HttpRequest, row: Process) -> dict[str, Any]:
        return {
            "facts": [
                Fact("State", condition(row), note=row.note),
                Fact("Ran for" if row.ended_at else "Running for", lasted(row), note="as far as was noticed"),
                Fact("Started", ago(row.started_at), note=stamp(row.started_at)),
                place_of(row),
                self.holder(row.holder),
                self.agent(row.agent_did),
                Fact("Command", shortened(command(row.argv)), note=path(row.name)),
                Fact("Directory", path(row.cwd), note=", ".join(row.env_names) or "no variables"),
            ]
        }


def condition(row: Process) -> SafeString:
    said = f"exit {row.exit_code}" if row.state == Ending.EXITED else row.state
    failed = row.state == Ending.EXITED and row.exit_code != 0
    return badge("failed" if failed else COLOURS.get(Ending(row.state), row.state), said)


def lasted(row: Process) -> str:
    return span((row.ended_at or timezone.now()) - row.started_at)
