"""Admin pages of Django and django-q2 in the theme. The queue's rows are read-only: schedules are defined in code."""

from typing import Any

from django.contrib import admin
from django.contrib.auth.admin import GroupAdmin as DjangoGroupAdmin
from django.contrib.auth.admin import UserAdmin as DjangoUserAdmin
from django.contrib.auth.models import Group, User
from django.http import HttpRequest
from django_q.admin import FailAdmin, QueueAdmin
from django_q.admin import ScheduleAdmin as QScheduleAdmin
from django_q.models import Failure, OrmQ, Schedule, Success
from unfold.admin import ModelAdmin
from unfold.forms import AdminPasswordChangeForm, UserChangeForm, UserCreationForm

for model in (User, Group, Schedule, Success, Failure, OrmQ):
    admin.site.unregister(model)


@admin.register(User)
class UserAdmin(DjangoUserAdmin, ModelAdmin):
    form = UserChangeForm
    add_form = UserCreationForm
    change_password_form = AdminPasswordChangeForm


@admin.register(Group)
class GroupAdmin(DjangoGroupAdmin, ModelAdmin):
    pass


class ReadOnlyQueueAdmin(ModelAdmin):
    """Read-only, because writing a schedule or resubmitting a task permits running any function."""

    actions = None
    search_fields = ["name__startswith", "func__startswith"]

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


@admin.register(Schedule)
class ScheduleAdmin(ReadOnlyQueueAdmin, QScheduleAdmin):
    # Without the last task: successful ones are not kept. The pages of sweeps have the result of the last pass.
    list_display = tuple(name for name in QScheduleAdmin.list_display if name not in ("get_last_run", "get_success"))


@admin.register(Failure)
class FailureAdmin(ReadOnlyQueueAdmin, FailAdmin):
    pass


@admin.register(OrmQ)
class OrmQAdmin(ReadOnlyQueueAdmin, QueueAdmin):
    search_fields = ["key__startswith"]
