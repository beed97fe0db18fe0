"""manage.py sign_ins: end the waiting time of a user name or an address after failed attempts to sign in."""

from typing import Any

from django.contrib.auth.models import User
from django.core.management.base import BaseCommand, CommandParser
from django.db import transaction

from controlplane.console.sign_in import throttle
from controlplane.console.sign_in.throttle import Kind
from sandboxes import audit
from sandboxes.db import database_time


class Command(BaseCommand):
    help = "Forget the failed attempts to sign in to the console as a user, or from an address."

    def add_arguments(self, parser: CommandParser) -> None:
        kinds = parser.add_mutually_exclusive_group(required=True)
        kinds.add_argument("--user", metavar="NAME", help="user name, with the codes of the second factor")
        kinds.add_argument("--address", help="client address, of IPv6 its network of 64 bits")

    def handle(self, *args: Any, **options: Any) -> None:
        if name := options["user"]:
            keys = [throttle.build_name_key(name)]
            for user in User.objects.filter(username=name):
                keys += [throttle.build_key(kind, str(user.pk)) for kind in (Kind.CODE, Kind.USER)]
        else:
            keys = [throttle.build_address_key(options["address"])]
        subject = f"user {name}" if name else f"address {options['address']}"
        with transaction.atomic():
            count = throttle.forget(keys)
            if count:
                row = audit.get_installation_row()
                audit.record(row, "Forget failed sign-ins", subject, actor=audit.COMMAND_LINE, now=database_time.now())
        self.stdout.write("The failed attempts are forgotten." if count else "There were no failed attempts.")
