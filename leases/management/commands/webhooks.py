"""manage.py webhooks: who is told what happens here. A secret is printed once, when it is made."""

from argparse import ArgumentParser
from typing import Any
from uuid import UUID

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError
from django.utils import timezone

from leases.management.base import report_errors
from sandboxes.models import Webhook
from sandboxes.models.webhooks import NOT_REMOVED, SUBSCRIBABLE_EVENT_TYPES
from sandboxes.webhooks import delivery, subscriptions

ACTOR = "command line"


class Command(BaseCommand):
    help = "Webhooks: addresses that are told what happens here, by signed requests. Secrets are stored encrypted."

    def add_arguments(self, parser: ArgumentParser) -> None:
        acts = parser.add_subparsers(dest="act", required=True, metavar="ACT")
        acts.add_parser("list", help="every webhook, the newest first")
        add = acts.add_parser("add", help="print its id and, this once, the secret that signs what it is sent")
        add.add_argument("url", metavar="URL", help="https; or http, for an address of this machine")
        add.add_argument(
            "--kind",
            action="append",
            dest="kinds",
            choices=SUBSCRIBABLE_EVENT_TYPES,
            default=[],
            help="of events; default: all",
        )
        add.add_argument("--internal", action="store_true", help="its address need not be public")
        add.add_argument("--description", default="", help="who listens there, and for what")
        for name, help in (
            ("test", "send it an event that says only that; exit code 1 if it does not arrive"),
            ("pause", "tell it nothing until it is resumed"),
            ("resume", "tell it again, also after it was given up"),
            ("rotate", "print another secret; the one before signs as well for a day"),
            ("remove", "tell it nothing any more"),
        ):
            acts.add_parser(name, help=help).add_argument("webhook", metavar="ID")

    def handle(self, *args: Any, act: str, verbosity: int, **given: Any) -> None:
        with report_errors(verbosity):
            getattr(self, f"_{act}")(**{name: value for name, value in given.items() if name in OPTION_NAMES})

    def _list(self) -> None:
        for row in Webhook.objects.filter(NOT_REMOVED):
            kinds = ",".join(row.kinds) or "all"
            last = f"{row.last_at:%Y-%m-%dT%H:%M:%SZ} {row.last_error or row.last_status}" if row.last_at else "never tried"
            self.stdout.write(f"{row.pk} {row.url} {kinds} {row.state} {last}")

    def _add(self, url: str, kinds: list[str], internal: bool, description: str) -> None:
        try:
            row, secret = subscriptions.add_webhook(
                url, kinds, internal=internal, description=description, now=timezone.now(), actor=ACTOR
            )
        except ValidationError as wrong:
            raise CommandError(" ".join(wrong.messages)) from None
        self.stdout.write(f"{row.pk}\n{secret}")

    def _test(self, webhook: str) -> None:
        row = _find_webhook(webhook)
        sent = delivery.send_test_event(row, now=timezone.now(), actor=ACTOR)
        sent.refresh_from_db()
        self.stdout.write(f"{row.url} answered {sent.last_status}")

    def _pause(self, webhook: str) -> None:
        row = _find_webhook(webhook)
        self.stdout.write(f"{row.url} {'is' if subscriptions.pause_webhook(row.pk, actor=ACTOR) else 'was'} paused")

    def _resume(self, webhook: str) -> None:
        row = _find_webhook(webhook)
        resumed = subscriptions.resume_webhook(row.pk, now=timezone.now(), actor=ACTOR)
        self.stdout.write(f"{row.url} {'is told again' if resumed else 'was neither paused nor given up'}")

    def _rotate(self, webhook: str) -> None:
        secret = subscriptions.rotate_secret(_find_webhook(webhook), now=timezone.now(), actor=ACTOR)
        if secret is None:
            raise CommandError("Somebody else has just rotated or removed it.")
        self.stdout.write(secret)

    def _remove(self, webhook: str) -> None:
        row = _find_webhook(webhook)
        subscriptions.remove_webhook(row.pk, now=timezone.now(), actor=ACTOR)
        self.stdout.write(f"{row.url} is told nothing any more")


OPTION_NAMES = {"url", "kinds", "internal", "description", "webhook"}


def _find_webhook(text: str) -> Webhook:
    try:
        row = Webhook.objects.filter(NOT_REMOVED, pk=UUID(text)).first()
    except ValueError:
        raise CommandError(f"{text[:80]!r} is not the id of a webhook.") from None
    if row is None:
        raise CommandError("There is no such webhook.")
    return row
