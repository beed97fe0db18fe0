"""/api/v1/: what was used and what it costs."""

from django.urls import path

from billing import api

urlpatterns = [
    path("costs", api.Costs.as_view()),
    path("estimate", api.Estimates.as_view()),
]
