"""manage.py second_factor: list and remove the authenticator apps of operators, and renew backup codes."""

from typing import Any

from django.contrib.auth.models import User
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import transaction

from controlplane.console.sign_in.second_factor import devices
from sandboxes import audit
from sandboxes.db import database_time


class Command(BaseCommand):
    help = "Second factor of operators. An app is set up by its user, in the console."

    def add_arguments(self, parser: CommandParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True)
        actions.add_parser("list", help="users with and without an app")
        actions.add_parser("reset", help="remove the app and the backup codes of a user").add_argument("name")
        actions.add_parser("codes", help="replace the backup codes of a user and print them").add_argument("name")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["action"] == "list":
            for user in User.objects.filter(is_active=True).order_by("username"):
                self.stdout.write(f"{user.get_username()}: {'app' if devices.has_app(user) else 'none'}")
            return
        user, now = self._find_user(options["name"]), database_time.now()
        if options["action"] == "reset":
            with transaction.atomic():
                removed = devices.remove_devices(user)
                if removed:
                    audit.record(user, "Remove second factor", actor=audit.COMMAND_LINE, now=now)
            self.stdout.write("The app and the backup codes are removed." if removed else "The user had no app.")
            return
        if not devices.has_app(user):
            raise CommandError("The user has no app. It is set up in the console.")
        with transaction.atomic():
            codes = devices.replace_backup_codes(user)
            audit.record(user, "Replace backup codes", actor=audit.COMMAND_LINE, now=now)
        self.stdout.write("\n".join(codes))

    def _find_user(self, name: str) -> User:
        user = User.objects.filter(username=name).first()
        if user is None:
            raise CommandError(f'There is no user "{name}".')
        return user
