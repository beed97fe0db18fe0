"""Routes of the billing API under /api/v1/."""

from django.urls import path

from billing.api import costs, estimates, focus, statements

urlpatterns = [
    path("costs", costs.CostsView.as_view()),
    path("estimate", estimates.EstimateView.as_view()),
    path("estimate/comparison", estimates.ComparisonView.as_view()),
    path("forecast", estimates.ForecastView.as_view()),
    path("statements", statements.StatementListView.as_view()),
    path("statements/<slug:account>/<str:month>", statements.StatementDetailView.as_view()),
    path("statements/<slug:account>/<str:month>/focus.csv", focus.StatementFocusView.as_view()),
]
