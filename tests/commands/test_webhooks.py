"""manage.py webhooks: life of a webhook, test events and errors."""

import pytest
from django.core.management import CommandError

from sandboxes.models import Webhook
from tests.commands.manage import call
from tests.support.servers.receiver import WebhookReceiver, verify_signature

pytestmark = pytest.mark.django_db


def run(*args: str) -> list[str]:
    return call("webhooks", *args).splitlines()


def test_a_webhook_is_added_listed_tested_rotated_and_removed(receiver: WebhookReceiver) -> None:
    kinds = ["--kind", "lease.ended", "--kind", "budget.warning"]
    pk, secret = run("add", receiver.url, "--internal", *kinds, "--description", "me")
    row = Webhook.objects.get()
    assert (str(row.pk), row.kinds, row.description, row.internal) == (pk, ["lease.ended", "budget.warning"], "me", True)
    assert run("list") == [f"{pk} {receiver.url} lease.ended,budget.warning active no attempts"]
    assert run("test", pk) == [f"{receiver.url} answered 204"]
    [new_secret] = run("rotate", pk)
    run("test", pk)
    assert [verify_signature(request, secret) for request in receiver.received] == [True, True]
    assert [verify_signature(request, new_secret) for request in receiver.received] == [False, True]
    assert run("pause", pk) == [f"{receiver.url} paused"] and run("pause", pk) == [f"{receiver.url} was already paused"]
    assert " paused " in run("list")[0]
    assert run("resume", pk) == [f"{receiver.url} resumed"]
    assert run("resume", pk) == [f"{receiver.url} was neither paused nor disabled"]
    assert run("remove", pk) == [f"{receiver.url} removed"]
    assert run("list") == []
    with pytest.raises(CommandError, match="There is no such webhook"):
        run("remove", pk)


def test_an_undelivered_test_event_fails_the_command(receiver: WebhookReceiver) -> None:
    pk, _ = run("add", receiver.url, "--internal")
    receiver.status = 500
    with pytest.raises(CommandError, match="Test delivery failed"):
        run("test", pk)
    assert "Status 500" in run("list")[0]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["add", "http://example.com"], "http is accepted for loopback addresses only"),
        (["add", "https://10.0.0.1/"], "10.0.0.1: the address is private"),
        (["test", "nonsense"], "'nonsense' is not a webhook id"),
    ],
)
def test_an_error_is_one_line(args: list[str], message: str) -> None:
    with pytest.raises(CommandError, match=message):
        run(*args)
    assert not Webhook.objects.exists()
