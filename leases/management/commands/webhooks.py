"""manage.py webhooks: manage webhook subscriptions. A secret is printed once, when it is created."""

from argparse import ArgumentParser
from typing import Any
from uuid import UUID

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError

from leases.management.base import report_errors
from sandboxes.audit import COMMAND_LINE
from sandboxes.db import database_time
from sandboxes.models import Webhook
from sandboxes.models.webhooks import NOT_REMOVED, SUBSCRIBABLE_EVENT_TYPES
from sandboxes.webhooks import delivery, subscriptions


class Command(BaseCommand):
    help = "Manage webhooks, which receive events as signed HTTP requests. Secrets are stored encrypted."

    def add_arguments(self, parser: ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        actions.add_parser("list", help="list all webhooks, newest first")
        add = actions.add_parser("add", help="add a webhook; prints its id and, only this time, its signing secret")
        add.add_argument("url", metavar="URL", help="https URL; http only for a loopback address")
        add.add_argument(
            "--kind",
            action="append",
            dest="kinds",
            choices=SUBSCRIBABLE_EVENT_TYPES,
            default=[],
            help="event type to send, repeatable; default: all",
        )
        add.add_argument("--internal", action="store_true", help="allow a private address")
        add.add_argument("--description", default="", help="receiver and purpose")
        for name, help in (
            ("test", "send a test event; exit code 1 if it is not delivered"),
            ("pause", "stop sending events until the webhook is resumed"),
            ("resume", "send events again, also to a disabled webhook"),
            ("rotate", "print a new secret; the old secret also signs for one more day"),
            ("remove", "remove the webhook"),
        ):
            actions.add_parser(name, help=help).add_argument("webhook", metavar="ID")

    def handle(self, *args: Any, action: str, verbosity: int, **options: Any) -> None:
        with report_errors(verbosity):
            getattr(self, f"_{action}")(**{name: value for name, value in options.items() if name in OPTION_NAMES})

    def _list(self) -> None:
        for row in Webhook.objects.filter(NOT_REMOVED):
            kinds = ",".join(row.kinds) or "all"
            last = f"{row.last_at:%Y-%m-%dT%H:%M:%SZ} {row.last_error or row.last_status}" if row.last_at else "no attempts"
            self.stdout.write(f"{row.pk} {row.url} {kinds} {row.state} {last}")

    def _add(self, url: str, kinds: list[str], internal: bool, description: str) -> None:
        try:
            row, secret = subscriptions.add_webhook(
                url, kinds, internal=internal, description=description, now=database_time.now(), actor=COMMAND_LINE
            )
        except ValidationError as error:
            raise CommandError(" ".join(error.messages)) from None
        self.stdout.write(f"{row.pk}\n{secret}")

    def _test(self, webhook: str) -> None:
        row = _find_webhook(webhook)
        attempt = delivery.send_test_event(row, now=database_time.now(), actor=COMMAND_LINE)
        attempt.refresh_from_db()
        self.stdout.write(f"{row.url} answered {attempt.last_status}")

    def _pause(self, webhook: str) -> None:
        row = _find_webhook(webhook)
        paused = subscriptions.pause_webhook(row, now=database_time.now(), actor=COMMAND_LINE)
        self.stdout.write(f"{row.url} {'paused' if paused else 'was already paused'}")

    def _resume(self, webhook: str) -> None:
        row = _find_webhook(webhook)
        resumed = subscriptions.resume_webhook(row, now=database_time.now(), actor=COMMAND_LINE)
        self.stdout.write(f"{row.url} {'resumed' if resumed else 'was neither paused nor disabled'}")

    def _rotate(self, webhook: str) -> None:
        secret = subscriptions.rotate_secret(_find_webhook(webhook), now=database_time.now(), actor=COMMAND_LINE)
        if secret is None:
            raise CommandError("The webhook was rotated or removed concurrently.")
        self.stdout.write(secret)

    def _remove(self, webhook: str) -> None:
        row = _find_webhook(webhook)
        subscriptions.remove_webhook(row, now=database_time.now(), actor=COMMAND_LINE)
        self.stdout.write(f"{row.url} removed")


OPTION_NAMES = {"url", "kinds", "internal", "description", "webhook"}


def _find_webhook(text: str) -> Webhook:
    try:
        row = Webhook.objects.filter(NOT_REMOVED, pk=UUID(text)).first()
    except ValueError:
        raise CommandError(f"{text[:80]!r} is not a webhook id.") from None
    if row is None:
        raise CommandError("There is no such webhook.")
    return row
