"""Management commands that change configuration, access or money leave a record without secrets."""

import argparse
import io
import shutil
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command, get_commands, load_command_class
from django.utils import timezone
from django_otp.plugins.otp_totp.models import TOTPDevice

from billing import budgets
from billing.models import Budget
from controlplane.console.sign_in import throttle
from controlplane.console.sign_in.models import SignInThrottle
from leases import api_keys
from leases.atproto import accounts
from leases.coding import repositories
from leases.environments import lifecycle
from leases.models import Agent, Lease
from leases.packs.folder import SHIPPED_DIRECTORY
from sandboxes.audit import CONTROL_PLANE
from sandboxes.egress.allow_list import credentials
from sandboxes.hosts import registry
from sandboxes.identity import signing
from sandboxes.models import Host, ImageTemplate, Installation, OperatorAction, Policy, Pool, Quota
from sandboxes.providers.base import SandboxSpec
from sandboxes.providers.memory import MemoryProvider
from sandboxes.state import data_editing
from sandboxes.sweeps import installation
from sandboxes.templates import builds
from sandboxes.webhooks import subscriptions
from tests.support.billing import advance_and_price
from tests.support.model_rates import create_rates

pytestmark = pytest.mark.django_db
ADA = "did:plc:ada"
SECRET = "Bearer hidden-token"
OWN_APPS = ("leases", "billing", "sandboxes", "controlplane")
LEASE = "use of a lease, as by an agent's key: its events, runs or transitions have the command line"
GAME = "one for each game: the row has the time, and the events of its leases have the command line"
READS = "changes nothing"
PROCESS = "a process, or a step of its start or upgrade, which no operator's choice changes"
RECORDED_ELSEWHERE = {"state keep": "needs a mount: tests/unit/sandboxes/state/test_mounts.py"}
# Command, or command and action -> the reason why it has no entry of ACTIONS.
NOT_RECORDED = {
    **dict.fromkeys(
        [
            "account list", "account show", "atproto list", "atproto records", "budget list", "catalog list", "catalog show",
            "check", "config", "costs", "egress_credential list", "environment list", "environment show",
            "environment_type list", "environment_type show", "estimate", "identity list", "identity show", "installation show",
            "key list", "key show", "lease list", "lease show", "lease calls", "pack list", "pack check", "policy list",
            "policy show", "pool list", "pool show", "project list", "quota list", "rate list", "repository list", "runs stats",
            "runs list", "sandboxes list", "sandboxes show", "second_factor list", "state ls", "state get", "state export",
            "state snapshots", "statements list", "statements show", "statements export", "template list", "template show",
            "template log", "webhooks list", "catan_benchmark", "processes list", "processes show", "processes log",
            "files ls", "files get", "shells list",
        ],
        READS,
    ),
    **dict.fromkeys(
        [
            "acquire", "join", "exec", "restart", "release", "lease renew", "run_once", "run_agent", "turn", "condition",
            "files put", "files rm", "processes start", "processes signal", "processes kill", "shells create", "shells delete",
            "snapshot take", "snapshot restore", "snapshot fork",
        ],
        LEASE,
    ),
    **dict.fromkeys(["environment create", "environment start", "environment end"], GAME),
    **dict.fromkeys(["egress", "qcluster", "runner", "up", "migrate", "sweep", "sync_schedules", "build_image"], PROCESS),
    "atproto retry": "repeats requests that had failed: the records have their attempts",
    "createsuperuser": "Django's command: the row of the user has the time",
    "demo": "plays a game of its own: its keys are recorded as those of create_key",
    "webhooks test": "sends one event: its delivery is a row",
}  # fmt: skip
ACTIONS: list[tuple[list[str], str, str]] = [
    (["rate", "add", "docker", "0.5", "vcpu-hour", "--source", "page"], "Add rate", "usd "),
    (["rate", "add", "--model", "m", "--input", "3", "--source", "page"], "Add model rate", "3 USD per million tokens"),
    (
        ["rate", "reprice", "--from", "2099-01-01T00:00Z", "--apply"],
        "Price calls again",
        "calls from 2099-01-01 00:00 UTC; result: 0 of 0 calls",
    ),
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
    (["stop", "--all", "--end-leases"], "Stop all work", "ends leases; result: 1 lease ended"),
    (["catalog", "add", "helper", "--title", "Helper", "--environment-type", "coding"], "Add catalog agent", "title Helper"),
    (["catalog", "set", "tester", "--title", "Tester"], "Change catalog agent", "→ Tester"),
    (["account", "set", "house2", "--title", "House"], "Change account", "title none → House"),
    (["policy", "add", "other"], "Add policy", ""),
    (["pool", "add", "rack", "--capacity", "1", "--provider", "memory"], "Add pool", "capacity 1"),
    (["pool", "resume", "drained"], "Resume pool", ""),
    (["environment_type", "add", "chess"], "Add environment type", ""),
    (["lease", "limit", "{lease}", "--tokens", "7"], "Limit model calls", "7 tokens instead of no token limit"),
    (["egress_credential", "remove", "open", "git.example.org"], "Remove credential", "git.example.org"),
    (["budget", "add", "10", "usd", "day", "--all"], "Create budget", ""),
    (["budget", "set", "{budget}", "--amount", "20"], "Change budget", "amount 10 → 20"),
    (["budget", "top-up", "{budget}", "5"], "Top up budget", "5 USD"),
    (["budget", "remove", "{budget}"], "Delete budget", ""),
    (["webhooks", "resume", "{paused}"], "Resume webhook", ""),
    (["repository", "disable", "web"], "Disable repository", ""),
    (["repository", "enable", "closed"], "Enable repository", ""),
    (["repository", "remove", "web"], "Remove repository", "https://github.com/acme/web.git"),
    (["rate", "import", "public", "--only", "gpt-4o", "--apply"], "Add model rate", "USD per million tokens"),
    (["statements", "close", "--account", "house", "--month", "2026-01"], "Close month", "total 0"),
    (["meter", "--again"], "Derive usage and costs again", "result: usage: "),
    (["environment", "phase", "game-1", "combat"], "Set phase", "combat"),
    (["environment", "add", "game-1", ADA], "Add participants", ADA),
    (["environment", "remove", "game-1", "did:plc:in"], "Remove participant", "did:plc:in"),
    (["environment", "access", "game-1", "project"], "Change access", "open to its project"),
    (["environment", "pools", "catan", "box", "--cheapest"], "Set pools", "pools [box], cheapest_pool yes"),
    (["identity", "create", "did:plc:new"], "Create signing key", "ES256K"),
    (["identity", "import", "did:plc:new"], "Create signing key", "ES256K"),
    (["identity", "rotate", "{signer}"], "Rotate signing key", " replaced by did:key:"),
    (["identity", "revoke", "{signer}"], "Revoke signing key", "did:key:"),
    (["identity", "reencrypt"], "Encrypt secrets again", "result: 0 encrypted again, 0 not decrypted"),
    (
        ["atproto", "set", ADA, "--service-url", "https://pds.example.com", "--password-stdin"],
        "Set AT Protocol account",
        "service_url https://pds.example.com",
    ),
    (["atproto", "remove", "{signer}"], "Remove AT Protocol account", "https://pds.example.com"),
    (["pack", "upgrade", "catan", "--type", "chess2"], "Assign pack version", "no pack → catan"),
    (["pack", "add", "{folder}"], "Add pack version", "digest "),
    (["template", "build", "tools", "--base", "debian", "--run", "true"], "Build template", ""),
    (["template", "remove", "old"], "Remove template", ""),
    (["runs", "interrupt", "--agent", ADA], "Interrupt runs", f"agent {ADA}; result: 0 interrupted"),
    (["state", "put", "{signer}", "{file}", "notes/new"], "Store file", "notes/new"),
    (["state", "rm", "{signer}", "notes/old"], "Remove files", "notes/old: 1 paths"),
    (["state", "import", "{signer}", "{directory}"], "Import files", "1 paths of a directory"),
    (["hosts", "--lost", "silent"], "Declare host lost", ""),
    (["hosts", "--resume-starts", "paused"], "Resume starts", ""),
    (["installation", "confirm", "--yes"], "Confirm installation", "accepted: "),
    (
        ["sandboxes", "destroy", "memory", "{orphan}", "--reason", "unused"],
        "Destroy sandbox without owner",
        "result: destroyed",
    ),
    (["sandboxes", "adopt", "memory", "{orphan}", "--reason", "unused"], "Adopt sandbox", "unused"),
    (["second_factor", "reset", "olga"], "Remove second factor", ""),
    (["second_factor", "codes", "olga"], "Replace backup codes", ""),
    (["sign_ins", "--user", "olga"], "Forget failed sign-ins", "user olga"),
    (["quickstart"], "Create superuser", ""),
]


@pytest.fixture
def names(pool: Pool, memory: MemoryProvider, settings: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """Create the rows and the files that the commands name."""
    now = timezone.now()
    settings.ORPHAN_GRACE = timedelta(0)
    monkeypatch.setattr(MemoryProvider, "builds_images", True)
    for method in ("remove_image", "remove_build"):  # of an engine that has the image no more
        monkeypatch.setattr(MemoryProvider, method, lambda self, name: None)
    monkeypatch.setattr(builds, "build", lambda pk, *, now, on_output: ImageTemplate.objects.update(state="ready", image="x"))
    signer = "did:plc:signer"
    for did in (ADA, signer):
        Agent.objects.get_or_create(did=did)
    key, _ = api_keys.issue_key([ADA], now=now)
    call_command("account", "add", "house2", stdout=io.StringIO())
    call_command("project", "create", "tenant", stdout=io.StringIO())
    call_command("catalog", "add", "tester", "--title", "T", "--environment-type", "coding", stdout=io.StringIO())
    policy = Policy.objects.create(name="open", allowed_domains=["git.example.org"])
    credentials.set_credential(policy, "git.example.org", "Bearer x", writes=False, now=now)
    box = Pool.objects.create(name="box", provider="memory", capacity=2)
    Pool.objects.create(name="drained", provider="memory", capacity=2, draining=True)
    Quota.objects.create(pool=box, agent_did=ADA, most=5)
    for name, enabled in (("web", True), ("closed", False)):
        repositories.save(name, clone_url="https://github.com/acme/web.git", enabled=enabled, now=now)
    webhook, _ = subscriptions.add_webhook("https://example.com/", now=now)
    paused, _ = subscriptions.add_webhook("https://example.com/paused", now=now)
    subscriptions.pause_webhook(paused, now=now)
    create_rates("other", input="1", since=now)
    budget = budgets.create_budget(Budget(scope="all", unit="usd", amount=10, period="day"), now=now)[0]
    lifecycle.create(
        lifecycle.NewEnvironment("game-1", "catan", agents=["did:plc:in"], open_to_project=False), now=now, actor=CONTROL_PLANE
    )
    call_command("acquire", "--agent", "did:plc:in", "--environment", "game-1", "--type", "catan", stdout=io.StringIO())
    signing.create_key(signer, now=now)
    accounts.set_account(signer, service_url="https://pds.example.com", password="p", now=now)
    data_editing.put_file(signer, "notes/old", io.BytesIO(b"1"), now=now)
    ImageTemplate.objects.create(
        host=registry.get_local_host("memory", now=now), name="old", version="ab" * 32, base="debian", commands=["true"],
        state="ready", image="x",
    )  # fmt: skip
    engine = {"provider": "memory", "heartbeat_at": now - timedelta(hours=1)}
    Host.objects.create(id=uuid4(), created_at=now, name="silent", engine_id="engine-s", **engine)
    Host.objects.create(
        id=uuid4(), created_at=now, name="paused", engine_id="engine-p", starts_paused_until=now + timedelta(hours=1), **engine
    )
    orphan = f"leasehold-{uuid4().hex}-1"
    memory.create(SandboxSpec(orphan, str(pool.owner), memory_mib=2048))
    user = User.objects.create_user("olga")
    TOTPDevice.objects.create(user=user, confirmed=True)
    name_key = throttle.build_name_key("olga")
    SignInThrottle.objects.create(
        kind=name_key.kind, digest=name_key.digest, failures=3, next_allowed_at=now, last_attempt_at=now
    )
    folder = Path(shutil.copytree(SHIPPED_DIRECTORY / "coding", tmp_path / "coding"))
    (folder / "pack.toml").write_text((folder / "pack.toml").read_text().replace('version = "', 'version = "9.'))
    file = tmp_path / "import" / "file"
    file.parent.mkdir()
    file.write_bytes(b"1")
    OperatorAction.objects.all().delete()
    return {
        "lease": str(Lease.objects.get(environment_id="game-1").pk),
        "key": key.prefix, "webhook": str(webhook.pk), "paused": str(paused.pk), "budget": str(budget.pk), "signer": signer,
        "orphan": orphan, "folder": str(folder), "file": str(file), "directory": str(file.parent),
    }  # fmt: skip


def mark_as_restored() -> None:
    installation.mark_places(now=timezone.now())
    Installation.objects.update(generation=0)


def meter_nothing() -> None:
    advance_and_price(timezone.now())


# Commands that need a state in which others are refused, or which takes time.
PREPARATIONS: dict[str, Callable[[], object]] = {
    "installation": mark_as_restored,
    "statements": meter_nothing,
}


def iter_commands() -> Iterator[str]:
    """Yield the name of each own command, or the command and the action for each of its actions."""
    for name, app in get_commands().items():
        if str(app).partition(".")[0] not in OWN_APPS:
            continue
        parser = load_command_class(app, name).create_parser("manage.py", name)
        actions = [
            choice
            for argument in parser._actions
            if isinstance(argument, argparse._SubParsersAction) or argument.dest == "action"
            for choice in argument.choices or ()
        ]
        yield from (f"{name} {action}" for action in actions) if actions else [name]


def test_every_command_is_recorded_or_has_a_reason() -> None:
    every = {*iter_commands()}
    pairs = {" ".join(words[:2]) for words, _, _ in ACTIONS}
    recorded = {pair if pair in every else pair.partition(" ")[0] for pair in pairs}
    assert every == recorded | NOT_RECORDED.keys() | RECORDED_ELSEWHERE.keys()
    assert not recorded & NOT_RECORDED.keys()


@pytest.mark.parametrize(("command", "action", "detail"), ACTIONS, ids=[" ".join(words[:2]) for words, *_ in ACTIONS])
def test_a_command_records_its_change_without_secrets(
    command: list[str], action: str, detail: str, names: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    PREPARATIONS.get(command[0], bool)()
    secret = "7" * 64 if command[:2] == ["identity", "import"] else SECRET
    monkeypatch.setattr(sys, "stdin", io.StringIO(secret))
    output = io.StringIO()
    call_command(*[word.format(**names) for word in command], stdout=output)
    recorded, *further = OperatorAction.objects.all()  # an import of prices records each rate
    assert {each.action for each in further} <= {action}
    assert (recorded.action, recorded.actor) == (action, "command line") and detail in recorded.summary
    words = set(output.getvalue().split())
    secrets = {word for word in words if word.startswith(("lh_", "whsec_"))} | {secret}
    if command[:2] == ["second_factor", "codes"]:
        secrets |= words
    assert not [each for each in secrets if each in f"{recorded.summary} {recorded.object_text}"]
