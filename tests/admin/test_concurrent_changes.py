"""Change forms of the console beside concurrent changes of the same row, for every page that has such a form."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.db.models import Model
from django.test import Client, RequestFactory
from django.utils import timezone

from billing.models import Account, Budget, Membership, Rate
from leases import api_keys
from leases.catalog.models import CatalogAgent
from leases.coding import repositories
from leases.coding.models import Repository
from leases.models import Agent, AgentKey, AlternativePool, EnvironmentType
from sandboxes.admin.base.concurrent_changes import SHOWN_VALUES_INPUT
from sandboxes.admin.base.model_admin import ConsoleModelAdmin
from sandboxes.models import Host, Policy, Pool, Quota, Webhook
from sandboxes.webhooks import subscriptions
from tests.support.billing import create_budget, create_rate, join_account
from tests.support.console import fetch, read_form, row_url

pytestmark = pytest.mark.django_db
ADA = "did:plc:ada"
EXACT_TIME = datetime(2027, 3, 4, 5, 6, 7, 891011, tzinfo=UTC)
MULTILINE_ARGV = ["sh", "-c", "echo one\n  echo two\n"]


def create_pool() -> Pool:
    return Pool.objects.create(name="gpu", capacity=3, allowed_images=["a:1", "b:2"])


def create_environment_type() -> EnvironmentType:
    row = EnvironmentType.objects.create(
        name="chess", ttl=timedelta(minutes=90), suspend_after=timedelta(seconds=61), auto_stop=timedelta(0),
        turn_argv=MULTILINE_ARGV, llm_limit=Decimal("1.000000001"), turn_timeout=timedelta(milliseconds=1500),
        pool=create_pool(),
    )  # fmt: skip
    AlternativePool.objects.create(environment_type=row, pool=Pool.objects.create(name="spare"), position=1)
    return row


def create_policy() -> Policy:
    return Policy.objects.create(name="research", models=["m*"], agent_max_cost=Decimal("0.500000000"), allowed_domains=["a.b"])


def create_catalog_agent() -> CatalogAgent:
    kind = EnvironmentType.objects.get(name="catan")
    return CatalogAgent.objects.create(
        name="coder", title="Coder", environment_type=kind, system_prompt="  Be\nbrief.  ", max_cost=Decimal("2.5")
    )


def create_host() -> Host:
    return Host.objects.create(
        pk="0f0e0d0c-0b0a-4908-8706-050403020100", name="rack-1", provider="memory", created_at=timezone.now()
    )


def create_webhook() -> Webhook:
    return subscriptions.add_webhook("https://example.com/", ["lease.ended", "agent_run.ended"], now=timezone.now())[0]


def create_repository() -> Repository:
    return repositories.save(
        "web", clone_url="https://github.com/acme/web.git", token="ghp_old", protected_paths=["a b/*"], now=timezone.now()
    )[0]


def create_key() -> AgentKey:
    return api_keys.issue_key([ADA], name="ci", scopes=["read", "leases"], expires_at=EXACT_TIME, now=timezone.now())[0]


def create_account() -> Account:
    return Account.objects.create(name="lab", title="Lab")


def create_membership() -> Membership:
    Agent.objects.get_or_create(did=ADA)
    return join_account(create_account(), agent=ADA)


@dataclass(frozen=True)
class EditedPage:
    """Row of a page, the input of an operator in its open form, and the concurrent change of another column."""

    create: Callable[[], Model]
    concurrent: dict[str, Any]
    edit: dict[str, str] = field(default_factory=dict)  # empty if the page has no other field


PAGES: dict[type[Model], EditedPage] = {
    Account: EditedPage(create_account, {"title": "Laboratory"}),
    Agent: EditedPage(lambda: Agent.objects.create(did=ADA, name="Ada"), {"name": "Ada L."}),
    AgentKey: EditedPage(create_key, {"scopes": ["read"]}, {"name": "build"}),
    Budget: EditedPage(
        lambda: create_budget(10, warn_percents=[50, 80], grace=timedelta(seconds=90), now=timezone.now()),
        {"amount": Decimal(20)}, {"grace": "30s"},
    ),
    CatalogAgent: EditedPage(create_catalog_agent, {"max_turns": 7}, {"title": "Coder 2"}),
    EnvironmentType: EditedPage(create_environment_type, {"ttl": timedelta(hours=2)}, {"max_ttl": "2d"}),
    Host: EditedPage(create_host, {"name": "rack-2"}),
    Membership: EditedPage(create_membership, {"since": date(2026, 12, 24)}),
    Policy: EditedPage(create_policy, {"relay": True}, {"calls_per_minute": "7"}),
    Pool: EditedPage(create_pool, {"max_starting": 3}, {"warm_target": "1"}),
    Quota: EditedPage(lambda: Quota.objects.create(pool=create_pool(), agent_did=ADA), {"most": 5}, {"guaranteed": "2"}),
    Rate: EditedPage(lambda: create_rate("time", "0.0310", "2099-01-01", "docker"), {"usd": Decimal(7)}, {"source": "invoice"}),
    Repository: EditedPage(create_repository, {"base_branch": "trunk"}, {"depth": "9"}),
    Webhook: EditedPage(create_webhook, {"kinds": []}, {"description": "Ours"}),
}  # fmt: skip
ALL_PAGES = pytest.mark.parametrize("model", PAGES, ids=lambda model: model.__name__)


def read_row(row: Model) -> dict[str, Any]:
    """Return all columns of a row as stored."""
    stored = type(row)._default_manager.get(pk=row.pk)
    return {column.attname: getattr(stored, column.attname) for column in stored._meta.concrete_fields}


def change(row: Model, columns: dict[str, Any]) -> None:
    type(row)._default_manager.filter(pk=row.pk).update(**columns)


def test_every_page_with_a_change_form_is_listed(rf: RequestFactory, superuser: Client) -> None:
    request = rf.get("/")
    request.user = superuser.get("/admin/").wsgi_request.user
    pages = {model: page for model, page in admin.site._registry.items() if isinstance(page, ConsoleModelAdmin)}
    unlisted = {model: page for model, page in pages.items() if model not in PAGES}
    assert not [model for model, page in unlisted.items() if page.has_change_permission(request, model())]


@ALL_PAGES
def test_an_unchanged_form_changes_nothing(model: type[Model], superuser: Client) -> None:
    row = PAGES[model].create()
    before = read_row(row)
    answer = superuser.post(row_url(row), read_form(superuser, row_url(row)))
    assert answer.status_code == 302, answer.context["adminform"].form.errors
    derived = ("spent", "spent_at", "capacity_origin")
    assert not [name for name, value in read_row(row).items() if value != before[name] and name not in derived]
    assert LogEntry.objects.get().get_change_message() in ("No fields changed.", "Change webhook: ")


@ALL_PAGES
def test_a_form_keeps_a_concurrent_change_of_another_field(model: type[Model], superuser: Client) -> None:
    page = PAGES[model]
    row = page.create()
    form = read_form(superuser, row_url(row))
    change(row, page.concurrent)
    answer = superuser.post(row_url(row), form | page.edit)
    assert answer.status_code == 302, answer.context["adminform"].form.errors
    stored = read_row(row)
    assert {name: stored[name] for name in page.concurrent} == page.concurrent
    assert read_form(superuser, row_url(row)).items() >= page.edit.items()


@ALL_PAGES
def test_a_form_posts_the_values_that_it_showed_in_one_input(model: type[Model], superuser: Client) -> None:
    row = PAGES[model].create()
    form = read_form(superuser, row_url(row))
    assert SHOWN_VALUES_INPUT in form
    assert not [name for name in form if name.startswith("initial-") and "-" not in name.removeprefix("initial-")]


def test_a_conflicting_change_saves_nothing_and_names_the_present_value(superuser: Client) -> None:
    row = create_environment_type()
    form = read_form(superuser, row_url(row)) | {"ttl": "1h", "max_ttl": "2d"}
    change(row, {"ttl": timedelta(hours=2)})
    answer = superuser.post(row_url(row), form)
    errors = answer.context["adminform"].form.errors
    assert answer.status_code == 200 and [*errors] == ["ttl"] and "now 2h" in errors["ttl"][0]
    assert "now 2h" in answer.content.decode() and not LogEntry.objects.exists()
    assert read_row(row)["max_ttl"] == timedelta(days=1)
    again = form | {SHOWN_VALUES_INPUT: answer.context["adminform"].form.get_shown_values()}
    assert superuser.post(row_url(row), again).status_code == 302
    assert (read_row(row)["ttl"], read_row(row)["max_ttl"]) == (timedelta(hours=1), timedelta(days=2))


def test_a_row_of_an_inline_keeps_a_concurrent_change(superuser: Client) -> None:
    row = create_environment_type()
    form = read_form(superuser, row_url(row)) | {"max_ttl": "2d"}
    row.alternative_pools.update(position=5)
    assert superuser.post(row_url(row), form).status_code == 302
    assert [each.position for each in row.alternative_pools.all()] == [5]


def test_two_operators_who_enter_the_same_value_do_not_conflict(superuser: Client) -> None:
    row = create_environment_type()
    form = read_form(superuser, row_url(row)) | {"ttl": "2h"}
    change(row, {"ttl": timedelta(hours=2)})
    assert superuser.post(row_url(row), form).status_code == 302


def test_a_conflict_of_secrets_shows_none(superuser: Client) -> None:
    row = create_repository()
    form = read_form(superuser, row_url(row)) | {"token": "ghp_mine"}
    repositories.save("web", token="ghp_theirs", now=timezone.now())
    before = read_row(row)
    page = superuser.post(row_url(row), form)
    assert "another secret, which is not shown" in page.context["adminform"].form.errors["token"][0]
    assert read_row(row) == before
    assert not [secret for secret in ("ghp_mine", "ghp_theirs") if secret in page.content.decode()]


def test_a_change_between_validation_and_save_is_not_undone(superuser: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    row = create_policy()
    form = read_form(superuser, row_url(row)) | {"calls_per_minute": "7"}
    page = admin.site._registry[Policy]
    check = type(page).save_form

    def save_form(*args: Any, **kwargs: Any) -> Any:
        change(row, {"calls_per_minute": 9})
        return check(*args, **kwargs)

    monkeypatch.setattr(type(page), "save_form", save_form)
    answer = superuser.post(row_url(row), form, follow=True)
    assert "Nothing was saved: Calls per minute was changed by another request" in answer.content.decode()
    assert read_row(row)["calls_per_minute"] != 7


def test_malformed_shown_values_save_nothing(superuser: Client) -> None:
    row = create_policy()
    form = read_form(superuser, row_url(row)) | {"calls_per_minute": "7"}
    for text in ("", "{", "[]", "{}", '{"relay": "maybe"}', form[SHOWN_VALUES_INPUT].replace('"8"', '"eight"')):
        answer = superuser.post(row_url(row), form | {SHOWN_VALUES_INPUT: text})
        assert "Open it again" in answer.content.decode(), text
    assert read_row(row)["calls_per_minute"] == 600


@ALL_PAGES
def test_a_viewers_page_has_no_shown_values(model: type[Model], viewer: Client) -> None:
    assert SHOWN_VALUES_INPUT not in fetch(viewer, row_url(PAGES[model].create()))
