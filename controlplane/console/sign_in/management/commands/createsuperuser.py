"""manage.py createsuperuser: Django's command, which verifies the password of DJANGO_SUPERUSER_PASSWORD, too."""

import os
from typing import Any

from django.contrib.auth.management.commands.createsuperuser import Command as DjangoCommand
from django.contrib.auth.models import User
from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.core.management.base import CommandError

PASSWORD_VARIABLE = "DJANGO_SUPERUSER_PASSWORD"  # noqa: S105 - the name of a variable


class Command(DjangoCommand):
    requires_migrations_checks = False  # the check prints a notice, and the missing table is reported by manage.py

    def handle(self, *args: Any, **options: Any) -> str | None:
        password = os.environ.get(PASSWORD_VARIABLE)
        if password is not None and not options["interactive"]:
            names = {name: options.get(name) or "" for name in ("username", "email")}
            try:
                validate_password(password, User(**names))
            except ValidationError as refused:
                raise CommandError(f"{PASSWORD_VARIABLE} is not accepted. {' '.join(refused.messages)}") from None
        return super().handle(*args, **options)
