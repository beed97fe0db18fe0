"""manage.py quickstart: create the first superuser and set the capacity of the default pool."""

import secrets
from typing import Any

from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand, CommandError
from django.db import IntegrityError, transaction

from leases.management.base import report_errors
from sandboxes import audit
from sandboxes.db import database_time, dialect
from sandboxes.hosts import capacity
from sandboxes.management.base import require_migrated
from sandboxes.models import Pool

SUPERUSER_NAME = "operator"


class Command(BaseCommand):
    help = "Create the first superuser unless one exists, and print its password once. Set and print the default capacity."

    def handle(self, *args: Any, **options: Any) -> None:
        with report_errors(options["verbosity"]):
            require_migrated()
            self._create_superuser()
            self._set_capacity()

    def _create_superuser(self) -> None:
        users = get_user_model()._default_manager
        if superuser := users.filter(is_superuser=True, is_active=True).order_by("pk").first():
            self.stdout.write(f'"{superuser}" is a superuser; manage.py changepassword {superuser} sets a new password.')
            return
        password = secrets.token_urlsafe(12)
        try:
            with transaction.atomic():
                user = users.create_superuser(SUPERUSER_NAME, password=password)
                audit.record(user, "Create superuser", actor=audit.COMMAND_LINE, now=database_time.now())
        except IntegrityError as error:
            dialect.raise_unless_unique(error)
            raise CommandError(
                f'The user "{SUPERUSER_NAME}" exists but is not a superuser. Run manage.py createsuperuser.'
            ) from None
        self.stdout.write(f'Log in to /admin/ as "{SUPERUSER_NAME}" with the password {password}')
        self.stdout.write(f"It is stored as a hash and not shown again; manage.py changepassword {SUPERUSER_NAME} changes it.")

    def _set_capacity(self) -> None:
        capacity.update_automatic_capacities(now=database_time.now())
        for pool in Pool.objects.filter(automatic_capacity=True):
            if derived := capacity.try_derive_capacity(pool.provider, pool.memory_mib):
                self.stdout.write(f'The pool "{pool}" has {derived.places:,} places: {derived.origin}.')
