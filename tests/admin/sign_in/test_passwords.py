"""Passwords that operators may choose, in the console and in commands."""

from io import StringIO

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import User
from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.core.management import CommandError, call_command
from django.test import Client

from tests.commands.manage import call

GOOD = "correct horse battery"
BAD = {
    "password1234": "too common",
    "short-one-1": "too short",
    "9081726354109": "entirely numeric",
    "operator-4711": "too similar",
}


@pytest.mark.parametrize(("password", "reason"), BAD.items())
def test_a_weak_password_is_refused_with_its_reason(password: str, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        validate_password(password, User(username="operator-4711"))


@pytest.mark.parametrize(("password", "reason"), BAD.items())
def test_console_refuses_a_weak_password(password: str, reason: str, superuser: Client) -> None:
    form = {"username": "operator-4711", "password1": password, "password2": password, "usable_password": "true"}
    page = superuser.post("/admin/auth/user/add/", form).content.decode()
    assert reason in page and not User.objects.filter(username="operator-4711").exists()


@pytest.mark.django_db
@pytest.mark.parametrize(("password", "reason"), [*BAD.items(), ("", "too short")])
def test_createsuperuser_without_a_terminal_refuses_a_weak_password(
    password: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DJANGO_SUPERUSER_PASSWORD", password)
    with pytest.raises(CommandError, match=f"DJANGO_SUPERUSER_PASSWORD is not accepted.*{reason}"):
        call_command("createsuperuser", interactive=False, username="operator-4711", email="")
    assert not User.objects.exists()


@pytest.mark.django_db
def test_createsuperuser_without_a_terminal_accepts_a_good_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DJANGO_SUPERUSER_PASSWORD", GOOD)
    call_command("createsuperuser", interactive=False, username="ada", email="", stdout=StringIO())
    assert User.objects.get().check_password(GOOD)


@pytest.mark.django_db
def test_password_of_quickstart_is_valid() -> None:
    password = call("quickstart").splitlines()[0].rsplit(" ", 1)[1]
    validate_password(password, get_user_model().objects.get())


def test_existing_passwords_stay_valid(db: None) -> None:
    User.objects.create_superuser("ada", password="old")
    assert Client().post("/admin/login/", {"username": "ada", "password": "old"}).status_code == 302
