"""Sidebar, tabs and environment label of the console."""

from collections.abc import Mapping
from typing import Any

from django.conf import settings
from django.contrib import admin
from django.http import HttpRequest
from django.urls import reverse

from controlplane.console.dashboard import can_view, get_fleet_summary, get_url_name
from sandboxes.admin.base.formatting import build_changelist_url
from sandboxes.admin.base.model_admin import ConsoleModelAdmin

# group -> [(title, icon, "app.model", URL name if the page is not the model's list)]
MENU: Mapping[str, list[tuple[str, ...]]] = {
    "Leases": [
        ("Environments", "sports_esports", "leases.environment"),
        ("Leases", "contract", "leases.lease"),
        ("Turns", "casino", "leases.turn"),
        ("Agent runs", "robot_2", "leases.agentrun"),
        ("Queued runs", "low_priority", "leases.queuedrun"),
        ("Agents", "smart_toy", "leases.agent"),
        ("Agent catalog", "storefront", "leases.catalogagent"),
        ("API keys", "key", "leases.agentkey"),
        ("Projects", "group_work", "leases.project"),
        ("Environment types", "category", "leases.environmenttype"),
        ("Packs", "inventory_2", "sandboxes.packversion"),
    ],
    "Coding": [
        ("Coding tasks", "task_alt", "leases.codingtask"),
        ("Repositories", "code", "leases.repository"),
    ],
    "Sandboxes": [
        ("Sandboxes", "deployed_code", "sandboxes.sandbox"),
        ("Inventory", "inventory", "sandboxes.host", "inventory"),
        ("Runs", "terminal", "sandboxes.run"),
        ("Processes", "memory", "sandboxes.process"),
        ("Readings", "speed", "sandboxes.reading"),
        ("Model calls", "forum", "sandboxes.llmcall"),
        ("Connections", "public", "sandboxes.egressconnection"),
        ("Model rates", "sell", "sandboxes.tokenrate"),
        ("Pools", "database", "sandboxes.pool"),
        ("Image templates", "layers", "sandboxes.imagetemplate"),
        ("Hosts", "dns", "sandboxes.host"),
        ("Policies", "policy", "sandboxes.policy"),
        ("Quotas", "pie_chart", "sandboxes.quota"),
    ],
    "Billing": [
        ("Spending", "bar_chart", "billing.costrecord", "spending"),
        ("Cost records", "receipt_long", "billing.costrecord"),
        ("Usage records", "timer", "billing.usagerecord"),
        ("Rates", "price_change", "billing.rate"),
        ("Accounts", "account_balance_wallet", "billing.account"),
        ("Memberships", "group_add", "billing.membership"),
        ("Credits", "redeem", "billing.credit"),
        ("Statements", "request_quote", "billing.statement"),
        ("Budgets", "savings", "billing.budget"),
    ],
    "Identity": [
        ("Signing keys", "fingerprint", "sandboxes.signingkey"),
        ("Service tokens", "confirmation_number", "sandboxes.mintedtoken"),
        ("AT Protocol accounts", "alternate_email", "leases.atprotoaccount"),
        ("AT Protocol records", "library_books", "leases.atprotorecord"),
    ],
    "State": [
        ("Agent data", "folder_shared", "sandboxes.agentdata"),
        ("Snapshots", "history", "sandboxes.snapshot"),
        ("Data events", "rule", "sandboxes.dataevent"),
    ],
    "Webhooks": [
        ("Webhooks", "webhook", "sandboxes.webhook"),
        ("Events", "campaign", "sandboxes.event"),
        ("Deliveries", "outgoing_mail", "sandboxes.delivery"),
    ],
    "Health": [
        ("Sweeps", "cleaning_services", "sandboxes.sweep"),
        ("Schedules", "schedule", "django_q.schedule"),
        ("Queue", "low_priority", "django_q.ormq"),
        ("Failed tasks", "error", "django_q.failure"),
    ],
    "Access": [
        ("Operator actions", "fact_check", "sandboxes.operatoraction"),
        ("Users", "person", "auth.user"),
        ("Groups", "group", "auth.group"),
    ],
}


def build_sidebar(request: HttpRequest) -> list[dict[str, Any]]:
    """Build the sidebar: pages the user may view, with the number of quarantined sandboxes as a badge."""
    groups: list[dict[str, Any]] = [{"items": [{"title": "Dashboard", "icon": "monitoring", "link": reverse("admin:index")}]}]
    for title, items in MENU.items():
        visible = [_build_menu_item(*item) for item in items if can_view(request, item[2])]
        groups += [{"title": title, "items": visible}] if visible else []
    return groups


def _build_menu_item(title: str, icon: str, model: str, page: str = "") -> dict[str, Any]:
    badge = str(get_fleet_summary().quarantine or "") if model == "sandboxes.sandbox" else ""
    link = reverse(page) if page else build_changelist_url(model.replace(".", "_"))
    return {"title": title, "icon": icon, "link": link, "badge": badge}


def build_tabs(request: HttpRequest) -> list[dict[str, Any]]:
    """Build the tabs of the changelist on display. Links keep its search and filters."""
    for model, page in admin.site._registry.items():
        if isinstance(page, ConsoleModelAdmin) and page.list_tabs and request.path == build_changelist_url(get_url_name(model)):
            selected = request.GET.get("slice")
            active = selected if selected in page.list_tabs else next(iter(page.list_tabs))
            params = {name: value for name, value in request.GET.items() if name not in ("slice", "p", "e")}
            items = [
                {
                    "title": tab.title,
                    "link": build_changelist_url(get_url_name(model), **{**params, "slice": name}),
                    "active": name == active,
                }
                for name, tab in page.list_tabs.items()
            ]
            return [{"models": [model._meta.label_lower], "items": items}]
    return []


def build_environment_label(request: HttpRequest) -> list[str]:
    """Label of the environment on every page, with its colour."""
    return ["Development", "info"] if settings.DEBUG else ["Production", "danger"]
