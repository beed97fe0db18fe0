"""Console pages of coding tasks."""

from typing import Any

from django.contrib import admin
from django.contrib.admin.utils import quote
from django.db.models import Q
from django.http import HttpRequest
from django.utils.safestring import SafeString
from unfold.decorators import display

from leases.admin.coding_panel import build_coding_facts, render_pull_request, render_task_status
from leases.coding.models import ENDED_TASK_STATUSES, CodingTask, CodingTaskStatus
from sandboxes.admin.base.changelist import ListTab
from sandboxes.admin.base.formatting import (
    SummaryField,
    format_time_until,
    render_admin_link,
    render_time_ago,
    render_timestamp,
    render_two_lines,
    truncate_text,
)
from sandboxes.admin.base.model_admin import ReadOnlyModelAdmin, build_all_fields_fieldset
from sandboxes.formatting import pluralize

NOT_ENDED = ~Q(status__in=ENDED_TASK_STATUSES)
REFUSED = NOT_ENDED & ~Q(refusals=[])
POLL_FAILING = NOT_ENDED & ~Q(poll_error="")


@admin.register(CodingTask)
class CodingTaskAdmin(ReadOnlyModelAdmin):
    list_display = ["task_label", "status_badge", "places", "pull_request", "submitted", "problem"]
    list_filter = ["status", "repository", "completes_on"]
    list_select_related = ["repository"]
    list_defer = ["description", "proposal_body"]
    search_fields = ["environment__pk__startswith", "title__startswith", "branch__startswith"]
    search_help_text = "Environment, title or branch (prefix), or a complete id"
    ordering = ["-created_at", "-pk"]
    list_tabs = {
        "open": ListTab(
            "Open",
            "No open tasks: every task has a pushed commit or has ended. Clients create tasks through the API.",
            lambda now: Q(status=CodingTaskStatus.OPEN),
        ),
        "proposed": ListTab(
            "Proposed",
            "No proposed tasks. A task appears here when its commit is pushed, until its pull request is merged or closed.",
            lambda now: Q(status__in=[CodingTaskStatus.PUSHED, CodingTaskStatus.PROPOSED]),
        ),
        "refused": ListTab(
            "Refused submissions",
            "No refused submissions: the last submission of every task was accepted.",
            lambda now: REFUSED,
        ),
        "poll_errors": ListTab(
            "Poll errors",
            "No poll errors: the forge of every pull request answers.",
            lambda now: POLL_FAILING,
        ),
        "ended": ListTab(
            "Ended",
            "No ended tasks yet. A task ends when its pull request is merged or closed, or its environment ends without one.",
            lambda now: Q(status__in=ENDED_TASK_STATUSES),
        ),
        "all": ListTab("All", "No coding tasks yet. Clients create them through the API, in a repository that is listed here."),
    }
    fieldsets = build_all_fields_fieldset(
        "id", "environment", "repository", "title", "status", "completes_on", "test_command", "base_branch", "base_commit",
        "branch", "head_commit", "pushing_commit", "pull_request_number", "pull_request_url", "proposal_title", "submissions",
        "created_at", "created_by", "submitted_at", "ended_at", "busy_until", "next_poll_at", "poll_error",
    )  # fmt: skip
    change_form_outer_before_template = "admin/leases/codingtask/page.html"

    @display(description="Task")
    def task_label(self, row: CodingTask) -> SafeString:
        return render_two_lines(truncate_text(row.title, 70), row.branch)

    @display(description="State")
    def status_badge(self, row: CodingTask) -> SafeString:
        ended = render_time_ago(row.ended_at, "")
        return render_two_lines(render_task_status(row), ended) if ended else render_task_status(row)

    @display(description="Pull request")
    def pull_request(self, row: CodingTask) -> SafeString | str:
        return render_pull_request(row)

    @display(description="Environment and repository")
    def places(self, row: CodingTask) -> SafeString:
        environment = render_admin_link("leases_environment", quote(row.environment_id), row.environment_id)
        return render_two_lines(environment, render_admin_link("leases_repository", row.repository_id, row.repository.name))

    @display(description="Last submission")
    def submitted(self, row: CodingTask) -> SafeString | str:
        if not row.submissions:
            return "none yet"
        return render_two_lines(render_time_ago(row.submitted_at), pluralize(row.submissions, "submission", "submissions"))

    @display(description="Problem")
    def problem(self, row: CodingTask) -> SafeString | str:
        if row.status in ENDED_TASK_STATUSES:
            return "–"
        first = truncate_text(str(row.refusals[0]), 60) if row.refusals else ""
        parts = [part for part in (first and f"refused: {first}", truncate_text(row.poll_error, 60)) if part]
        return render_two_lines(*parts) if len(parts) == 2 else "".join(parts) or "–"

    def get_page_context(self, request: HttpRequest, row: CodingTask) -> dict[str, Any]:
        environment = render_admin_link("leases_environment", quote(row.environment_id), row.environment_id)
        polled = format_time_until(row.next_poll_at, "next request to the forge", "next request to the forge due")
        return {
            "facts": [
                SummaryField("Environment", environment),
                *build_coding_facts(row),
                SummaryField("Created", render_time_ago(row.created_at), note=f"by {row.created_by}" if row.created_by else ""),
                *(
                    [SummaryField("Ended", render_time_ago(row.ended_at), note=render_timestamp(row.ended_at))]
                    if row.ended_at
                    else []
                ),
                *([SummaryField("Poll", "scheduled", note=polled)] if polled else []),
            ],
            "description": row.description,
            "refusals": [str(refusal) for refusal in row.refusals],
            "proposal_title": row.proposal_title,
            "proposal_body": row.proposal_body,
        }
