"""Repositories and coding tasks in the console: pages, form with the access token, actions, credentials of policies."""

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client

from leases.admin.coding_tasks import CodingTaskAdmin
from leases.coding import repositories, tasks
from leases.coding.models import CodingTask, Repository
from leases.environments import lifecycle
from leases.errors import InvalidRequest
from leases.projects import registry
from sandboxes.egress.allow_list import credentials
from sandboxes.models import EgressCredential, Policy
from tests.admin.conftest import NOW
from tests.support.console import MARKUP, WHY, assert_constant_queries, fetch, get_fields, list_messages, list_rows, row_url

pytestmark = pytest.mark.django_db
REPOSITORIES, TASKS = "/admin/leases/repository/", "/admin/leases/codingtask/"
TOKEN = "ghp_verysecret"
FORGE = {"forge": "github", "api_url": "https://api.github.com", "forge_project": "acme/web"}


def fill_in(**changes: object) -> dict[str, object]:
    """Build the fields of the form of a repository."""
    return {
        "name": "web", "project": "1", "clone_url": "https://github.com/acme/web.git", "base_branch": "main", "depth": "50",
        "max_mib": "500", "max_change_mib": "10", "ssh_key_path": "", "protected_paths": "deploy/*\nops/*", "allowed_paths": "",
        **FORGE, **changes,
    }  # fmt: skip


@pytest.fixture
def repository(db: None) -> Repository:
    url = "https://github.com/acme/web.git"
    row, _ = repositories.save("web", clone_url=url, token=TOKEN, protected_paths=["deploy/*", "ops/*"], now=NOW, **FORGE)
    return row


def create_task(environment: str, **fields: object) -> CodingTask:
    task, _ = tasks.create(environment, repository="web", title=f"Title of {environment}", now=NOW, actor="eve")
    if "head_commit" not in fields and fields.get("status") in ("pushed", "proposed", "merged", "closed"):
        fields["head_commit"] = "c0ffee" * 6
    CodingTask.objects.filter(pk=task.pk).update(**fields)
    task.refresh_from_db()
    return task


# --- repositories -------------------------------------------------------------------------------------------------


def test_administrator_adds_a_repository_whose_token_is_never_rendered(administrator: Client) -> None:
    assert "No repositories yet. Add one" in fetch(administrator, REPOSITORIES)
    answer = administrator.post(f"{REPOSITORIES}add/", fill_in(token=f" {TOKEN} "), follow=True)
    row = Repository.objects.get()
    assert (row.clone_url, row.forge_project, row.protected_paths) == (
        "https://github.com/acme/web.git", "acme/web", ["deploy/*", "ops/*"]
    )  # fmt: skip
    assert repositories.read_token(row) == TOKEN
    assert TOKEN not in answer.content.decode()
    history = f"{REPOSITORIES}{row.pk}/history/"
    for page in (REPOSITORIES, row_url(row), history):
        assert TOKEN not in fetch(administrator, page)
    assert get_fields(administrator, row_url(row))["Access token"].value == "set"
    refused = administrator.post(f"{REPOSITORIES}add/", fill_in(name="other", clone_url="ftp://x", token=TOKEN))
    assert refused.status_code == 200 and TOKEN not in refused.content.decode()
    assert not any(TOKEN in entry.change_message for entry in LogEntry.objects.all())


def test_a_change_without_a_token_keeps_the_stored_one(administrator: Client, repository: Repository) -> None:
    assert administrator.post(row_url(repository), fill_in(base_branch="develop")).status_code == 302
    repository.refresh_from_db()
    assert (repository.base_branch, repositories.read_token(repository)) == ("develop", TOKEN)
    administrator.post(row_url(repository), fill_in(base_branch="develop", token="ghp_other"))
    repository.refresh_from_db()
    assert repositories.read_token(repository) == "ghp_other"


def test_a_token_is_removed_on_request(administrator: Client, repository: Repository) -> None:
    both = administrator.post(row_url(repository), fill_in(remove_token="on", token="x"))
    assert [*both.context["adminform"].form.errors] == ["remove_token"]
    administrator.post(row_url(repository), fill_in(remove_token="on"))
    repository.refresh_from_db()
    assert (repository.sealed_token, repositories.read_token(repository)) == (None, "")
    assert get_fields(administrator, row_url(repository))["Access token"].value == "not set"
    assert "remove_token" not in fetch(administrator, row_url(repository))


@pytest.mark.parametrize(
    "changes",
    [
        {"clone_url": "https://evil.example/acme/web.git"}, {"api_url": "https://evil.example"},
        {"clone_url": "https://github.com:8443/acme/web.git"}, {"clone_url": "https://github.com.evil.example/acme/web.git"},
    ],
)  # fmt: skip
def test_the_stored_token_is_not_sent_to_another_server(
    administrator: Client, repository: Repository, changes: dict[str, str]
) -> None:
    before = Repository.objects.values().get()
    answer = administrator.post(row_url(repository), fill_in(**changes))
    assert answer.status_code == 200 and [*answer.context["adminform"].form.errors] == ["token"]
    assert "names another server" in answer.content.decode()
    assert Repository.objects.values().get() == before
    assert administrator.post(row_url(repository), fill_in(clone_url="https://github.com/acme/site.git")).status_code == 302
    assert administrator.post(row_url(repository), fill_in(**changes, token="ghp_other")).status_code == 302
    assert administrator.post(row_url(repository), fill_in(remove_token="on")).status_code == 302


def test_a_change_keeps_a_repository_disabled(administrator: Client, repository: Repository) -> None:
    repositories.set_enabled("web", False, now=NOW)
    assert administrator.post(row_url(repository), fill_in(depth="9")).status_code == 302
    repository.refresh_from_db()
    assert (repository.depth, repository.enabled) == (9, False)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("clone_url", {"clone_url": "ftp://x"}), ("clone_url", {"clone_url": "https://me:pw@github.com/acme/web.git"}),
        ("api_url", {"api_url": "http://example.com"}), ("api_url", {"api_url": ""}),
        ("forge_project", {"forge_project": "web"}),
        ("base_branch", {"base_branch": "-x"}), ("depth", {"depth": "0"}), ("max_mib", {"max_mib": "99999"}),
        ("protected_paths", {"protected_paths": "\n".join(map(str, range(65)))}),
        ("allowed_paths", {"allowed_paths": "x" * 201}),
        ("name", {"name": "a b"}), ("name", {"name": ""}), ("project", {"project": "999999"}), ("token", {"token": "x" * 4097}),
    ],
)  # fmt: skip
def test_an_invalid_repository_is_refused_at_its_field(administrator: Client, field: str, changes: dict[str, str]) -> None:
    answer = administrator.post(f"{REPOSITORIES}add/", fill_in(**changes))
    assert answer.status_code == 200 and [*answer.context["adminform"].form.errors] == [field]
    assert not Repository.objects.exists()


def test_a_taken_name_and_a_project_of_other_tasks_are_refused(administrator: Client, repository: Repository) -> None:
    create_task("task-1")
    acme, _ = registry.create("acme", now=NOW)
    before = Repository.objects.values().get()
    taken = administrator.post(f"{REPOSITORIES}add/", fill_in(clone_url="https://evil.example/x.git", token="stolen"))
    moved = administrator.post(row_url(repository), fill_in(project=str(acme.pk)))
    assert [[*answer.context["adminform"].form.errors] for answer in (taken, moved)] == [["name"], ["project"]]
    assert Repository.objects.values().get() == before


def test_the_name_of_a_repository_does_not_change(administrator: Client, repository: Repository) -> None:
    administrator.post(row_url(repository), fill_in(name="mine", depth="7"))
    repository.refresh_from_db()
    assert (repository.name, repository.depth) == ("web", 7)
    assert repositories.read_token(repository) == TOKEN


def test_operator_disables_a_repository_and_new_tasks_are_refused(operator: Client, repository: Repository) -> None:
    create_task("task-1")
    operator.post(row_url(repository, "disable"), WHY)
    with pytest.raises(InvalidRequest, match="disabled"):
        create_task("task-2")
    page = fetch(operator, row_url(repository))
    assert "1 repository disabled." in page and "Enable…" in page and "Disable…" not in page and 'name="_save"' not in page
    assert list_rows(operator, f"{REPOSITORIES}?slice=disabled") == [repository]
    assert "disabled" in fetch(operator, REPOSITORIES)
    operator.post(row_url(repository, "disable"), WHY)
    assert list_messages(operator.get(row_url(repository))) == ["Nothing changed: already disabled."]
    operator.post(row_url(repository, "enable"), WHY)
    assert create_task("task-2").repository == repository
    assert [entry.get_change_message() for entry in LogEntry.objects.order_by("pk")] == [
        "Disable repository: it was agreed", "Enable repository: it was agreed",
    ]  # fmt: skip


def test_viewers_and_operators_read_a_repository_without_its_token(
    as_role: Callable[..., Client], repository: Repository
) -> None:
    for role in ("Viewer", "Operator"):
        page = fetch(as_role(role), row_url(repository))
        assert TOKEN not in page and 'name="token"' not in page and "github.com/acme/web.git" in page
        assert as_role(role).post(f"{REPOSITORIES}add/", fill_in(name="x")).status_code == 403
    assert as_role("None").get(REPOSITORIES).status_code == 403


def test_repository_page_counts_tasks_and_shows_problems(viewer: Client, repository: Repository) -> None:
    none = get_fields(viewer, row_url(repository))
    assert (none["Last submission"].value, none["Poll errors"].value, none["Poll errors"].alarm) == ("none yet", "0", False)
    create_task("task-1", refusals=["a.bin: too large"], submissions=1, submitted_at=NOW)
    create_task("task-2", status="proposed", poll_error=f"Status 502. {MARKUP}", submitted_at=NOW - timedelta(hours=1))
    create_task("task-3", status="merged", ended_at=NOW, poll_error="old", refusals=["old"])
    shown = get_fields(viewer, row_url(repository))
    assert (shown["Tasks"].value, shown["Tasks"].note) == ("3", "1 open, 1 proposed, 1 merged")
    assert "Title of task-1" in shown["Last submission"].note
    assert (shown["Poll errors"].value, shown["Poll errors"].alarm, shown["Refused submissions"].value) == ("1", True, "1")
    assert [task.environment_id for task in list_rows(viewer, shown["Poll errors"].href)] == ["task-2"]
    assert [task.environment_id for task in list_rows(viewer, shown["Refused submissions"].href)] == ["task-1"]
    assert len(list_rows(viewer, shown["Tasks"].href)) == 3
    page = fetch(viewer, row_url(repository))
    assert "Status 502." in page and MARKUP not in page
    assert "1 poll error, 1 refused submission" in fetch(viewer, REPOSITORIES)
    assert list_rows(viewer, f"{REPOSITORIES}?slice=failing") == [repository]


# --- tasks --------------------------------------------------------------------------------------------------------


def test_each_tab_of_coding_tasks_lists_its_own_rows(viewer: Client, repository: Repository) -> None:
    for name, part in CodingTaskAdmin.list_tabs.items():
        assert part.empty_text in fetch(viewer, f"{TASKS}?slice={name}")
    create_task("open")
    create_task("refused", refusals=["no"])
    create_task("pushed", status="pushed")
    create_task("proposed", status="proposed", poll_error="Status 502.")
    create_task("merged", status="merged", ended_at=NOW, poll_error="old", refusals=["old"])
    create_task("abandoned", status="abandoned", ended_at=NOW)
    shown = {
        name: {row.environment_id for row in list_rows(viewer, f"{TASKS}?slice={name}")} for name in CodingTaskAdmin.list_tabs
    }
    ended = {"merged", "abandoned"}
    assert shown == {
        "open": {"open", "refused"}, "proposed": {"pushed", "proposed"}, "refused": {"refused"}, "poll_errors": {"proposed"},
        "ended": ended, "all": {"open", "refused", "pushed", "proposed", *ended},
    }  # fmt: skip
    assert {row.environment_id for row in list_rows(viewer, f"{TASKS}?slice=all&q=pro")} == {"proposed"}


def test_task_page_links_its_environment_repository_and_pull_request(viewer: Client, repository: Repository) -> None:
    task = create_task(
        "task:1", status="proposed", description=MARKUP, proposal_title="My fix", proposal_body=MARKUP, refusals=[MARKUP],
        pull_request_number=7, pull_request_url="https://forge.example/acme/web/pull/7", submissions=2, submitted_at=NOW,
    )  # fmt: skip
    environment = lifecycle.find("task:1")
    pull_request = '<a class="lh-link" href="https://forge.example/acme/web/pull/7" rel="noreferrer">#7</a>'
    for url in (row_url(task), f"{TASKS}?slice=all"):
        page = fetch(viewer, url)
        assert pull_request in page and row_url(repository) in page and MARKUP not in page
        assert "/admin/leases/environment/task_3A1/change/" in page
    page = fetch(viewer, row_url(task))
    assert "My fix" in page and "by eve" in page and "Last submission refused" in page
    panel = fetch(viewer, "/admin/leases/environment/task_3A1/change/")
    assert row_url(task) in panel and row_url(repository) in panel and environment.pk in panel


def test_lists_cost_as_many_queries_for_many_tasks_as_for_few(viewer: Client, repository: Repository) -> None:
    def create(numbers: range) -> None:
        for number in numbers:
            create_task(f"task-{number}", submitted_at=NOW, refusals=["no"])
            repositories.save(f"calc-{number}", clone_url="/srv/git/calc.git", now=NOW)

    assert_constant_queries(viewer, [REPOSITORIES, TASKS, f"{TASKS}?slice=refused", row_url(repository)], 16, create)


# --- credentials of policies --------------------------------------------------------------------------------------


def test_credentials_of_a_policy_are_listed_and_removed_by_administrators(
    administrator: Client, as_role: Callable[..., Client]
) -> None:
    policy = Policy.objects.create(name="builders", allowed_domains=["git.example.org", "pypi.example.org"])
    assert "Credentials" not in get_fields(administrator, row_url(policy))
    for domain, writes in (("git.example.org", True), ("pypi.example.org", False)):
        credentials.set_credential(policy, domain, f"Bearer {TOKEN}", writes=writes, now=NOW)
    Policy.objects.filter(pk=policy.pk).update(allowed_domains=[])  # a credential that is not used any more exists, too
    page = fetch(as_role("Viewer"), row_url(policy))
    assert "git.example.org, every method, set" in page and "pypi.example.org, downloads, set" in page and TOKEN not in page
    url = row_url(policy, "remove_credential")
    assert as_role("Operator").post(url, {**WHY, "domain": "git.example.org"}).status_code == 403
    assert "domain" in administrator.post(url, {**WHY, "domain": "x.example.org"}).context["form"].errors
    assert EgressCredential.objects.count() == 2
    administrator.post(url, {**WHY, "domain": "git.example.org"})
    assert EgressCredential.objects.get().domain == "pypi.example.org"
    assert LogEntry.objects.get().get_change_message() == "Remove credential: it was agreed"
    assert "1 policy updated: the credential is removed." in fetch(administrator, row_url(policy))
