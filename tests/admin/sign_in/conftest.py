"""Fixtures of the sign-in tests: an operator with a password, browsers, a clock, counted password hashes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.hashers import MD5PasswordHasher
from django.contrib.auth.models import User
from django.test import Client

from sandboxes.db import database_time
from tests.conftest import NOW

PASSWORD = "correct horse battery"
LOGIN = "/admin/login/"


@dataclass
class Clock:
    """Time of the console, moved by the test."""

    now: datetime = NOW

    def advance(self, **duration: float) -> None:
        self.now += timedelta(**duration)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(database_time, "now", lambda: clock.now)
    return clock


@pytest.fixture
def hashes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Passwords that were hashed, to verify them or for a user who does not exist."""
    hashed: list[str] = []
    encode = MD5PasswordHasher.encode
    monkeypatch.setattr(MD5PasswordHasher, "encode", lambda self, *args: hashed.append(args[0]) or encode(self, *args))
    return hashed


@pytest.fixture
def ada(db: None) -> User:
    return User.objects.create_superuser("ada", password=PASSWORD)


@pytest.fixture
def configure(settings: Any) -> Callable[..., None]:
    """Change values of the sign-in configuration: configure(user_header="RemoteUser")."""

    def change(**values: Any) -> None:
        settings.SIGN_IN = replace(settings.SIGN_IN, **values)
        settings.AUTHENTICATION_BACKENDS = settings.SIGN_IN.list_backends()

    return change


def sign_in(name: str, password: str, address: str = "192.0.2.1", browser: Client | None = None, **headers: str) -> Any:
    """Send the form of the sign-in page."""
    form = {"username": name, "password": password}
    return (browser or Client()).post(LOGIN, form, REMOTE_ADDR=address, headers=headers)


def is_signed_in(browser: Client, **extra: Any) -> bool:
    return browser.get("/admin/password_change/", **extra).status_code == 200
