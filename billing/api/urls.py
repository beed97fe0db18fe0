"""/api/v1/: what was used and what it costs."""

from django.urls import path

from billing.api import costs, estimates, statements

urlpatterns = [
    path("costs", costs.CostsView.as_view()),
    path("estimate", estimates.EstimateView.as_view()),
    path("forecast", estimates.ForecastView.as_view()),
    path("statements", statements.StatementListView.as_view()),
    path("statements/<slug:account>/<str:month>", statements.StatementDetailView.as_view()),
]
