"""manage.py quickstart: creation of the first superuser."""

import pytest
from django.contrib.auth import authenticate, get_user_model
from django.core.management import CommandError

from sandboxes.db import migrations
from sandboxes.db.migrations import SchemaStatus
from sandboxes.models import Pool
from sandboxes.providers.memory import MemoryProvider
from tests.commands.manage import call

pytestmark = pytest.mark.django_db


def test_the_password_is_shown_once_and_works_and_is_not_stored() -> None:
    output = call("quickstart")
    password = output.splitlines()[0].rsplit(" ", 1)[1]
    user = authenticate(username="operator", password=password)
    assert user is not None
    assert user.is_superuser
    assert password not in user.password
    assert "manage.py changepassword operator" in output
    again = call("quickstart").splitlines()[0]
    assert again == '"operator" is a superuser; manage.py changepassword operator sets a new password.'
    assert get_user_model().objects.get().password == user.password


def test_the_capacity_of_the_default_pool_is_set_and_shown(
    memory: MemoryProvider, monkeypatch: pytest.MonkeyPatch, settings
) -> None:
    monkeypatch.setattr(memory, "total_memory_mib", lambda: 8192)
    line = 'The pool "default" has 12 places: sandboxes of 512 MiB in the 8.0 GiB of the memory provider, less 2.0 GiB.'
    assert line in call("quickstart")
    assert Pool.objects.get(name="default").capacity == 12
    settings.MAX_SANDBOXES = 7
    assert 'The pool "default" has 7 places: LEASEHOLD_MAX_SANDBOXES.' in call("quickstart")


def test_no_superuser_is_created_if_another_one_exists() -> None:
    get_user_model().objects.create_superuser("ada", password="x")
    assert '"ada"' in call("quickstart")
    assert get_user_model().objects.count() == 1


def test_an_ordinary_user_of_that_name_is_not_promoted() -> None:
    get_user_model().objects.create_user("operator")
    with pytest.raises(CommandError, match="not a superuser"):
        call("quickstart")
    assert not get_user_model().objects.get().is_superuser


def test_without_migrations_the_error_names_the_command_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrations, "read_status", lambda: SchemaStatus(unapplied=("leases.0001_initial",)))
    with pytest.raises(CommandError, match="run manage"):
        call("quickstart")
