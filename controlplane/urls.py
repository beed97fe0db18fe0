"""URL configuration: /admin/ for operators, /api/v1/ and /mcp for agents, health and metrics for monitoring."""

from django.apps import apps
from django.conf import settings
from django.contrib import admin
from django.urls import include, path
from django.views.generic import RedirectView

from controlplane.optional_imports import without_packages

with without_packages("pygments", *(() if settings.ON_POSTGRES else ("psycopg",))):
    import rest_framework.compat  # noqa: F401 - the browsable API and PostgreSQL's field types, 10 MiB
    import unfold.overrides  # noqa: F401

from drf_spectacular.views import SpectacularSwaggerSplitView

from billing.admin.spending import show_spending
from controlplane import api_document, health, metrics
from controlplane.console import dashboard, inventory, terminals
from controlplane.console.sign_in.configuration import SECOND_FACTOR_APP
from leases.api.mcp.views import McpView

admin.autodiscover()
urlpatterns = [
    path("", RedirectView.as_view(url="/admin/")),
    path("admin/fleet/", dashboard.fleet_fragment, name="fleet"),
    path("admin/spending/", admin.site.admin_view(show_spending), name="spending"),
    path("admin/inventory/", admin.site.admin_view(inventory.show_inventory), name="inventory"),
    path("admin/inventory/adopt/", admin.site.admin_view(inventory.adopt), name="inventory_adopt"),
    path("admin/inventory/destroy/", admin.site.admin_view(inventory.destroy_sandbox), name="inventory_destroy"),
    path("admin/terminals/<uuid:process_id>/", admin.site.admin_view(terminals.show_terminal), name="terminal"),
    *([path("admin/second-factor/", include(f"{SECOND_FACTOR_APP}.urls"))] if apps.is_installed(SECOND_FACTOR_APP) else []),
    path("admin/", admin.site.urls),
    path("api/v1/", include("leases.api.urls")),
    path("api/v1/", include("billing.api.urls")),
    path("api/schema", api_document.show_document, name="schema"),
    path("api/docs", SpectacularSwaggerSplitView.as_view(url_name="schema")),
    path("mcp", McpView.as_view()),
    path("livez", health.livez),
    path("healthz", health.healthz),
    path("readyz", health.readyz),
    path("metrics", metrics.metrics),
]
