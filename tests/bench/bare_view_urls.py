"""URLs of the bare view without the product."""

from django.urls import path

from tests.bench.bare_view import renew_bare

urlpatterns = [path("alone/<uuid:pk>", renew_bare)]
