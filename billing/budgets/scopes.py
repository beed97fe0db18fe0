"""Budget scopes: matching of budgets with leases, usage and costs."""

from collections.abc import Collection
from datetime import datetime
from functools import reduce
from operator import or_

from django.db.models import Q, QuerySet, Value
from django.db.models.functions import Coalesce

from billing.budgets.model_patterns import build_model_condition, build_model_filter
from billing.dates import to_utc_date
from billing.models import HOUSE_ACCOUNT_NAME, Budget, Membership, Tab
from billing.models.budgets import Scope
from billing.totals import build_account_filters
from sandboxes.db.sql import ALWAYS, Statement

TAB_COLUMNS = {
    Scope.AGENT: "agent_did",
    Scope.KEY: "key_id",
    Scope.ENVIRONMENT_TYPE: "environment_type",
    Scope.PROJECT: "project",
}
TABS = Tab._meta.db_table
ACCOUNT_NAMES_SQL = "billing_membership JOIN billing_account ON billing_account.id = billing_membership.account_id"
# Name of the account that an agent belongs to on a day, with the SQL of the agent and of the day. NULL: the house account.
ACCOUNT_ON_DAY_SQL = (
    f"(SELECT name FROM {ACCOUNT_NAMES_SQL} WHERE agent_did = %(agent)s AND since <= %(day)s ORDER BY since DESC LIMIT 1)"  # noqa: S608
)
_account_of_usage = ACCOUNT_ON_DAY_SQL % {"agent": "facts.agent_did", "day": "facts.day"}
ACCOUNT_USAGE_SQL = f"agent_did IN (SELECT agent_did FROM {ACCOUNT_NAMES_SQL} WHERE name = %s) AND {_account_of_usage} = %s"  # noqa: S608
HOUSE_USAGE_SQL = f"(agent_did NOT IN (SELECT agent_did FROM billing_membership) OR COALESCE({_account_of_usage}, %s) = %s)"  # noqa: S608
_own_scopes = " OR ".join(f"scope = '{scope.value}' AND subject = tab.{column}" for scope, column in TAB_COLUMNS.items())
_own_account = ACCOUNT_ON_DAY_SQL % {"agent": "tab.agent_did", "day": "%s"}
# Budgets that apply to a lease. Parameters: the lease, and the day for its account.
LEASE_BUDGET_SQL = (
    f"EXISTS (SELECT 1 FROM {TABS} AS tab WHERE tab.holder = %s AND (scope = 'all' OR {_own_scopes} "  # noqa: S608
    f"OR scope = 'account' AND subject = COALESCE({_own_account}, '{HOUSE_ACCOUNT_NAME}')))"
)


def find_open_tabs(budget: Budget, *, now: datetime) -> QuerySet[Tab]:
    """Find the tabs of the active leases in a budget's scope. An account's scope is the leases of its current members."""
    return Tab.objects.filter(_build_tab_filter(budget, now=now), closed_at__isnull=True)


def _build_tab_filter(budget: Budget, *, now: datetime) -> Q:
    if budget.scope == Scope.ACCOUNT:
        return _build_member_filter(budget.subject, now)
    return Q() if budget.scope == Scope.ALL else Q(**{TAB_COLUMNS[Scope(budget.scope)]: budget.subject})


def _build_member_filter(account: str, now: datetime) -> Q:
    current_memberships = Membership.objects.on(to_utc_date(now))
    if account == HOUSE_ACCOUNT_NAME:
        return ~Q(agent_did__in=current_memberships.exclude(account__name=HOUSE_ACCOUNT_NAME).values("agent_did"))
    return Q(agent_did__in=current_memberships.filter(account__name=account).values("agent_did"))


def build_tab_filter(tab: Tab, *, now: datetime) -> Q:
    """Match the budgets that apply to the lease of a tab."""
    values = ((scope, getattr(tab, column)) for scope, column in TAB_COLUMNS.items() if scope != Scope.AGENT)
    own = (Q(scope=scope, subject=value) for scope, value in values if value)
    return reduce(or_, own, build_agent_filter(tab.agent_did, now=now))


def build_agent_filter(agent_did: str, *, now: datetime) -> Q:
    """Match the budgets that apply to every lease of an agent."""
    account = Membership.objects.on(to_utc_date(now)).filter(agent_did=agent_did).values("account__name")
    subject = Coalesce(account, Value(HOUSE_ACCOUNT_NAME))
    return Q(scope=Scope.ALL) | Q(scope=Scope.AGENT, subject=agent_did) | Q(scope=Scope.ACCOUNT, subject=subject)


def build_tabs_filter(tabs: QuerySet[Tab], scopes: Collection[Scope] = (Scope.KEY, Scope.ENVIRONMENT_TYPE, Scope.PROJECT)) -> Q:
    """Match the budgets of these scopes that name an attribute of one of the tabs."""
    columns = ((scope, TAB_COLUMNS[scope]) for scope in scopes)
    return reduce(or_, (Q(scope=scope, subject__in=tabs.exclude(**{column: ""}).values(column)) for scope, column in columns))


def find_visible_budgets(key_id: str, dids: Collection[str], *, now: datetime) -> QuerySet[Budget]:
    """Find the active budgets that apply to leases of these agents, or to leases acquired with this key."""
    current_memberships = Membership.objects.on(to_utc_date(now)).filter(agent_did__in=dids)
    accounts = dict(current_memberships.values_list("agent_did", "account__name"))
    by_tab = build_tabs_filter(Tab.objects.filter(agent_did__in=dids), (Scope.ENVIRONMENT_TYPE, Scope.PROJECT))
    return Budget.objects.filter(
        Q(scope=Scope.ALL)
        | Q(scope=Scope.AGENT, subject__in=dids)
        | Q(scope=Scope.KEY, subject=key_id)
        | by_tab
        | Q(scope=Scope.ACCOUNT, subject__in={accounts.get(did, HOUSE_ACCOUNT_NAME) for did in dids}),
        active=True,
    )


def build_usage_filters(budget: Budget, began: datetime) -> list[Q]:
    """Build disjoint filters of a budget's usage records from `began` on.

    An account's records are the usage of each agent on the days of its membership."""
    if budget.scope == Scope.ACCOUNT:
        return build_account_filters(budget.subject, to_utc_date(began))
    return [_build_holder_filter(budget)]


def build_call_filters(budget: Budget, began: datetime) -> list[Q]:
    """Build disjoint filters of a budget's model calls from `began` on: of usage records, and of calls with a `day`."""
    return [part & build_model_filter(budget.model) for part in build_usage_filters(budget, began)]


def build_usage_condition(budget: Budget) -> Statement:
    """Build the condition of `build_usage_filters` in SQL, for rows `facts` with the columns agent_did, holder and day."""
    if budget.scope == Scope.ALL:
        return ALWAYS
    if budget.scope == Scope.AGENT:
        return Statement("agent_did = %s", (budget.subject,))
    if budget.scope == Scope.ACCOUNT:
        return Statement(HOUSE_USAGE_SQL if budget.subject == HOUSE_ACCOUNT_NAME else ACCOUNT_USAGE_SQL, (budget.subject,) * 2)
    column = TAB_COLUMNS[Scope(budget.scope)]
    return Statement(f"holder IN (SELECT holder FROM {TABS} WHERE {column} = %s)", (budget.subject,))  # noqa: S608


def build_call_condition(budget: Budget) -> Statement:
    """Build the condition of `build_call_filters` in SQL, for rows `facts` as above with the column model, too."""
    owned, named = build_usage_condition(budget), build_model_condition(budget.model)
    return Statement(f"{owned.text} AND {named.text}", (*owned.values, *named.values)) if budget.model else owned


def build_cost_filter(budget: Budget) -> Q:
    """Match a budget's cost records. An account's records include its plans."""
    return Q(account__name=budget.subject) if budget.scope == Scope.ACCOUNT else _build_holder_filter(budget)


def _build_holder_filter(budget: Budget) -> Q:
    if budget.scope in (Scope.KEY, Scope.ENVIRONMENT_TYPE, Scope.PROJECT):
        return Q(holder__in=Tab.objects.filter(**{TAB_COLUMNS[Scope(budget.scope)]: budget.subject}).values("holder"))
    return Q(agent_did=budget.subject) if budget.scope == Scope.AGENT else Q()
