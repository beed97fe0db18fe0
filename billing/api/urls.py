"""/api/v1/: what was used and what it costs."""

from django.urls import path

from billing.api import costs, statements

urlpatterns = [
    path("costs", costs.Costs.as_view()),
    path("estimate", costs.Estimates.as_view()),
    path("forecast", costs.Forecasts.as_view()),
    path("statements", statements.Statements.as_view()),
    path("statements/<slug:account>/<str:month>", statements.OneStatement.as_view()),
]
