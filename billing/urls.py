"""/api/v1/: what was used and what it costs."""

from django.urls import path

from billing import api, api_statements

urlpatterns = [
    path("costs", api.Costs.as_view()),
    path("estimate", api.Estimates.as_view()),
    path("forecast", api.Forecasts.as_view()),
    path("statements", api_statements.Statements.as_view()),
    path("statements/<slug:account>/<str:month>", api_statements.OneStatement.as_view()),
]
