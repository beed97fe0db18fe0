"""URLs below /admin/second-factor/."""

from django.contrib import admin
from django.urls import path

from controlplane.console.sign_in.second_factor import views

urlpatterns = [
    path("", admin.site.admin_view(views.ask_code), name="second_factor"),
    path("setup/", admin.site.admin_view(views.set_up), name="second_factor_setup"),
]
