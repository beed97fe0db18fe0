"""Management commands that change configuration, access or money leave a record without secrets."""

import io
import sys
from typing import Any

import pytest
from django.core.management import call_command
from django.utils import timezone

from leases import api_keys
from leases.coding import repositories
from sandboxes.models import OperatorAction, Policy, Pool, Quota
from sandboxes.webhooks import subscriptions
from tests.support.model_rates import create_rates

pytestmark = pytest.mark.django_db
ADA = "did:plc:ada"
SECRET = "Bearer hidden-token"
ACTIONS: list[tuple[list[str], str, str]] = [
    (["rate", "add", "docker", "0.5", "vcpu-hour", "--source", "page"], "Add rate", "usd "),
    (["rate", "add", "--model", "m", "--input", "3", "--source", "page"], "Add model rate", "3 USD per million tokens"),
    (["rate", "reprice", "--from", "2099-01-01T00:00Z", "--apply"], "Price calls again", "calls from 2099-01-01 00:00 UTC"),
    (["account", "add", "lab", "--title", "Lab"], "Add account", "title Lab"),
    (["account", "assign", ADA, "house2"], "Assign agent", "house2 from "),
    (["create_key", "--agent", ADA, "--scope", "read"], "Create API key", f"dids [{ADA}], operator no, scopes [read]"),
    (["rotate_key", "{key}"], "Rotate API key", "overlap 86400s"),
    (["revoke_key", "{key}"], "Revoke API key", ""),
    (["limits", "key", "{key}", "--max-gpus", "2"], "Set limits", "max_gpus none → 2"),
    (["project", "create", "acme"], "Create project", ""),
    (["project", "move", "tenant", ADA], "Move agent", "(tenant)"),
    (["policy", "set", "open", "--calls-per-minute", "7"], "Change policy", "calls_per_minute 600 → 7"),
    (["egress_credential", "set", "open", "git.example.org"], "Set credential", "git.example.org, downloads"),
    (["pool", "set", "box", "--warm-target", "1"], "Change pool", "warm_target 0 → 1"),
    (["pool", "drain", "box"], "Drain pool", ""),
    (["environment_type", "set", "catan", "--ttl", "2h"], "Change environment type", "ttl 14400s → 7200s"),
    (["quota", "set", "box", ADA, "--most", "3"], "Set quota", "most 5 → 3"),
    (["quota", "remove", "box", ADA], "Remove quota", "before: most 5, guaranteed 0"),
    (["webhooks", "add", "https://example.com/new"], "Add webhook", "kinds []"),
    (["webhooks", "pause", "{webhook}"], "Pause webhook", ""),
    (["webhooks", "rotate", "{webhook}"], "Rotate webhook secret", ""),
    (["webhooks", "remove", "{webhook}"], "Remove webhook", ""),
    (["repository", "add", "web", "--depth", "9", "--token"], "Change repository", "depth 50 → 9"),
    (["stop", "--all", "--end-leases"], "Stop all work", "ends leases"),
]


@pytest.fixture
def names(pool: Pool) -> dict[str, str]:
    """Create the rows that the commands name."""
    now = timezone.now()
    key, _ = api_keys.issue_key([ADA], now=now)
    call_command("account", "add", "house2", stdout=io.StringIO())
    call_command("project", "create", "tenant", stdout=io.StringIO())
    Policy.objects.create(name="open", allowed_domains=["git.example.org"])
    box = Pool.objects.create(name="box", provider="memory", capacity=2)
    Quota.objects.create(pool=box, agent_did=ADA, most=5)
    repositories.save("web", clone_url="https://github.com/acme/web.git", now=now)
    webhook, _ = subscriptions.add_webhook("https://example.com/", now=now)
    create_rates("other", input="1", since=now)
    OperatorAction.objects.all().delete()
    return {"key": key.prefix, "webhook": str(webhook.pk)}


@pytest.mark.parametrize(("command", "action", "detail"), ACTIONS, ids=lambda value: " ".join(value[:2]) if value else "")
def test_a_command_records_its_change_without_secrets(
    command: list[str], action: str, detail: str, names: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(SECRET))
    output = io.StringIO()
    call_command(*[word.format(**names) for word in command], stdout=output)
    recorded: Any = OperatorAction.objects.get()
    assert (recorded.action, recorded.actor) == (action, "command line") and detail in recorded.detail
    secrets = {word for word in output.getvalue().split() if word.startswith(("lh_", "whsec_"))} | {SECRET}
    assert not [secret for secret in secrets if secret in f"{recorded.detail} {recorded.object_text}"]
