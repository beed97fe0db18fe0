"""Every door: /admin/ for operators, /api/v1/ for agents, /livez, /healthz, /readyz and /metrics for whoever watches."""

from django.contrib import admin
from django.urls import include, path
from django.views.generic import RedirectView
from drf_spectacular.views import SpectacularAPIView, SpectacularSwaggerSplitView

from billing.admin_spending import spending
from controlplane import console, health, metrics

urlpatterns = [
    path("", RedirectView.as_view(url="/admin/")),
    path("admin/fleet/", console.fragment, name="fleet"),
    path("admin/spending/", admin.site.admin_view(spending), name="spending"),
    path("admin/", admin.site.urls),
    path("api/v1/", include("leases.urls")),
    path("api/v1/", include("billing.urls")),
    path("api/schema", SpectacularAPIView.as_view(), name="schema"),
    path("api/docs", SpectacularSwaggerSplitView.as_view(url_name="schema")),
    path("livez", health.livez),
    path("healthz", health.healthz),
    path("readyz", health.readyz),
    path("metrics", metrics.metrics),
]
