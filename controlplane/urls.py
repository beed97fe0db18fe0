"""Every door: /admin/ for operators, /api/v1/ for agents, /healthz and /readyz for whoever watches."""

from django.contrib import admin
from django.urls import path
from django.views.generic import RedirectView

urlpatterns = [
    path("", RedirectView.as_view(url="/admin/")),
    path("admin/", admin.site.urls),
]
