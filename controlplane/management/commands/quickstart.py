"""manage.py quickstart: what a migrated database still lacks before somebody can log in."""

import secrets
from typing import Any

from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand, CommandError
from django.db import IntegrityError, transaction

from controlplane import health
from leases.management.base import report_errors

SUPERUSER_NAME = "operator"


class Command(BaseCommand):
    help = "Make the first superuser, with a password that is shown once; nothing, if there is one. Safe to repeat."

    def handle(self, *args: Any, **options: Any) -> None:
        with report_errors(options["verbosity"]):
            if health.find_unapplied_migrations():
                raise CommandError("Migrations are not applied: run manage.py migrate first.")
            users = get_user_model()._default_manager
            if there := users.filter(is_superuser=True, is_active=True).order_by("pk").first():
                self.stdout.write(f'"{there}" is superuser; manage.py changepassword {there} renews the password.')
                return
            password = secrets.token_urlsafe(12)
            try:
                with transaction.atomic():
                    users.create_superuser(SUPERUSER_NAME, password=password)
            except IntegrityError:
                raise CommandError(
                    f'The user "{SUPERUSER_NAME}" is no superuser. manage.py createsuperuser makes one.'
                ) from None
        self.stdout.write(f'Log in to /admin/ as "{SUPERUSER_NAME}" with the password {password}')
        self.stdout.write(
            f"It is stored as a hash and not shown again; manage.py changepassword {SUPERUSER_NAME} sets your own."
        )
