"""Facts of a coding task, on its page and as a panel of its environment's page."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from leases.coding.models import CodingTask, CodingTaskStatus
from leases.environments.models import Environment
from sandboxes.admin.base.formatting import (
    SummaryField,
    render_admin_link,
    render_badge,
    render_time_ago,
    truncate_text,
)
from sandboxes.formatting import pluralize

STATUS_BADGES = {
    CodingTaskStatus.OPEN: "active", CodingTaskStatus.PUSHED: "waiting", CodingTaskStatus.PROPOSED: "running",
    CodingTaskStatus.MERGED: "ok", CodingTaskStatus.CLOSED: "expired", CodingTaskStatus.ABANDONED: "expired",
}  # fmt: skip
SHORT_COMMIT_CHARS = 10


@dataclass(frozen=True)
class CodingPanel:
    title: str
    href: str
    description: str
    facts: list[SummaryField]
    refusals: list[str]  # of the last submission


def build_coding_panel(environment: Environment) -> CodingPanel | None:
    """Build the panel, or None if the environment has no coding task."""
    task = CodingTask.objects.select_related("repository").filter(environment=environment).first()
    if task is None:
        return None
    href = reverse("admin:leases_codingtask_change", args=[task.pk])
    return CodingPanel(task.title, href, task.description, build_coding_facts(task), [str(each) for each in task.refusals])


def build_coding_facts(task: CodingTask) -> list[SummaryField]:
    """Build the state of a task, its repository, branch, submissions and pull request."""
    repository = render_admin_link("leases_repository", task.repository_id, task.repository.name)
    facts = [
        SummaryField("State", render_task_status(task), note=_describe_end(task)),
        SummaryField("Repository", repository, note=f"from {task.base_branch} {task.base_commit[:SHORT_COMMIT_CHARS]}"),
        SummaryField("Branch", task.branch, note=task.head_commit[:SHORT_COMMIT_CHARS] or "nothing pushed yet"),
        SummaryField("Submissions", task.submissions, note=render_time_ago(task.submitted_at, "")),
        SummaryField("Pull request", render_pull_request(task), note=task.poll_error, alarm=bool(task.poll_error)),
    ]
    if task.test_command:
        facts.append(SummaryField("Test command", task.test_command))
    return facts


def render_task_status(task: CodingTask) -> SafeString:
    return render_badge(STATUS_BADGES[CodingTaskStatus(task.status)], task.status)


def render_pull_request(task: CodingTask) -> SafeString | str:
    """Link the pull request. The forge chose its URL: any scheme but http and https is shown as text."""
    number = f"#{task.pull_request_number}" if task.pull_request_number else truncate_text(task.pull_request_url, 60)
    if urlsplit(task.pull_request_url).scheme not in ("http", "https"):
        return number or ("none" if task.ended_at else "none yet")
    return format_html('<a class="lh-link" href="{}" rel="noreferrer">{}</a>', task.pull_request_url, number)


def _describe_end(task: CodingTask) -> SafeString | str:
    if task.ended_at:
        return render_time_ago(task.ended_at)
    if task.refusals:
        return f"last submission refused: {pluralize(len(task.refusals), 'reason', 'reasons')}"
    return f"completed by: {task.get_completes_on_display().lower()}"
