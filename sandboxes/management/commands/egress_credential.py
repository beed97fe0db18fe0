"""manage.py egress_credential: credentials that the forward proxy adds to requests for allowed domains."""

import sys
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import transaction

from sandboxes import audit
from sandboxes.db import database_time
from sandboxes.egress.allow_list import credentials
from sandboxes.models import EgressCredential, Policy


class Command(BaseCommand):
    help = "List, set or remove the credentials of allowed domains. `set` reads the Authorization header from stdin."

    def add_arguments(self, parser: ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True)
        actions.add_parser("list", help="print policy, domain and time of the last change of each credential")
        for name, text in {
            "set": 'read a header value such as "Bearer TOKEN" from stdin, and use it from the next request on',
            "remove": "remove the credential; requests are then sent without one, over plain http",
        }.items():
            subparser = actions.add_parser(name, help=text)
            subparser.add_argument("policy", help="name of a policy")
            subparser.add_argument("domain", help="domain on the policy's allow list, such as git.example.org")
            if name == "set":
                subparser.add_argument(
                    "--writes",
                    action="store_true",
                    help="use it for every method; otherwise for GET, HEAD and git's fetch alone",
                )

    def handle(self, *args: Any, action: str, policy: str = "", domain: str = "", writes: bool = False, **options: Any) -> None:
        if action == "list":
            for row in EgressCredential.objects.select_related("policy"):
                use = "every method" if row.writes else "downloads"
                self.stdout.write(f"{row.policy}  {row.domain}  {use}  changed {row.changed_at:%Y-%m-%d %H:%M}")
            return
        found = Policy.objects.filter(name=policy).first()
        if found is None:
            raise CommandError(f"There is no policy {policy!r}.")
        if action == "remove":
            with transaction.atomic():
                if not credentials.remove_credential(found, domain):
                    raise CommandError(f"The policy {policy} has no credential for {domain}.")
                _record(found, "Remove credential", domain)
            self.stdout.write(f"removed: {policy}  {domain}")
            return
        try:
            authorization = sys.stdin.readline().strip()
            with transaction.atomic():
                is_new = credentials.set_credential(found, domain, authorization, writes=writes, now=database_time.now())
                _record(found, "Set credential", f"{domain}, {'every method' if writes else 'downloads'}")
        except credentials.InvalidCredential as error:
            raise CommandError(str(error)) from None
        self.stdout.write(f"{'added' if is_new else 'replaced'}: {policy}  {domain}")


def _record(policy: Policy, action: str, detail: str) -> None:
    audit.record(policy, action, detail, actor=audit.COMMAND_LINE, now=database_time.now())
