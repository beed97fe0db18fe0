"""Demo data for the console, made by domain verbs with past times: `python -m tests.admin.seed` on an empty database.

Rows for every page: leases and sandboxes in each state, turns, runs and model calls with each result, agent data with a
conflict, pools that are full, draining or unable to start sandboxes, and six weeks of usage and costs with a statement."""

import io
import os
import uuid
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import django

if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
    django.setup()

from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.auth.models import Group, User
from django.utils import timezone

from billing import metering, statements
from billing.dates import start_of_day
from billing.models import Account, Membership
from leases import api_keys, budget_enforcement, call_limits, execution, fork, leasing, snapshots, sweeps, turns
from leases.agent_runs.models import AgentRun
from leases.agent_runs.recorder import store_message
from leases.coding import repositories
from leases.coding import tasks as coding_tasks
from leases.coding.models import CodingTask
from leases.environments import signing as environment_secrets
from leases.models import Agent, AgentKey, EnvironmentType, Lease
from leases.queue import queue
from leases.queue.models import QueuedRun
from leases.queue.queue import QueueOptions
from sandboxes import eviction, processes, providers
from sandboxes.audit import COMMAND_LINE
from sandboxes.identity import signing
from sandboxes.models import Policy, Pool, Quota, Sandbox, SandboxState, Sweep, Webhook
from sandboxes.pool import allocation
from sandboxes.processes import ProcessSpec
from sandboxes.providers.base import DATA
from sandboxes.providers.errors import Rejected, Unavailable
from sandboxes.providers.memory import File, Link, MemoryProvider, ProgramCall, ProgramResult
from sandboxes.runs import operations
from sandboxes.runs.operations import Command
from sandboxes.state import data_editing
from sandboxes.stores import lease_stores
from sandboxes.sweeps import passes
from sandboxes.webhooks import delivery, outbox, subscriptions
from sandboxes.webhooks.http_post import PostResult
from tests.support.actors import console_user
from tests.support.billing import (
    HOUR,
    close_month,
    create_budget,
    create_llm_call,
    create_rate,
    create_time_usage,
    create_token_usage,
    join_account,
    run_billing_sweeps,
)
from tests.support.leases import get_sandbox, run
from tests.support.model_rates import create_rates

DAY, MINUTE = timedelta(days=1), timedelta(minutes=1)
ADA, GRACE, ALAN = "did:plc:ada", "did:plc:grace", "did:web:agents.example.com:alan"
ACTOR = "key 3f9a1c20"


def seed(now: datetime) -> None:
    """Create all demo data, as if it had happened in the hours before `now`."""
    memory = providers.get_provider("memory")
    assert isinstance(memory, MemoryProvider)
    Pool.objects.create(name="demo", provider="memory", capacity=32)
    _seed_users(now)
    _seed_webhooks(now)
    _seed_game(memory, now)
    _seed_sandbox_states(memory, now)
    _seed_failures(memory, now)
    _seed_agent_data(memory, now)
    _seed_pools(memory, now)
    _seed_identities(now)
    _seed_coding_tasks(now)
    _seed_llm_calls(now)
    _seed_usage(now)
    _seed_budgets(now)
    for name, counts, error in (("expire", {"expired": 2}, ""), ("reclaim", {}, "7b0c: engine answered 500")):
        known = {"every": MINUTE, "started_at": now - MINUTE, "succeeded_at": now - MINUTE, "took": MINUTE / 400}
        Sweep.objects.create(name=name, counts=counts, last_error=error, **known)
    Sweep.objects.create(name="heartbeat", every=MINUTE)


def _acquire_lease(agent: str, environment: str, at: datetime, **options: object) -> Lease:
    fields = {"environment_type": "catan", "pool": "demo", "sleep_after": 3 * HOUR} | options
    return leasing.acquire(leasing.LeaseRequest(agent, environment, **fields), now=at, actor=ACTOR)[0]  # type: ignore[arg-type]


def _acquire_used_lease(agent: str, environment: str, at: datetime, **options: object) -> Lease:
    """Acquire a lease and run a command in its sandbox."""
    lease = _acquire_lease(agent, environment, at, **options)
    run(lease, now=at)
    return lease


def _seed_coding_tasks(now: datetime) -> None:
    """Create repositories, and tasks in each state: with a refused submission, a pull request and an error of the forge."""
    forge = {"forge": "github", "api_url": "https://api.github.com", "forge_project": "acme/web"}
    repositories.save("web", clone_url="https://github.com/acme/web.git", token="ghp_secret", now=now - 9 * DAY, **forge)
    repositories.save("calc", clone_url="/srv/git/calc.git", enabled=False, now=now - 20 * DAY)
    repositories.save(
        "docs", clone_url="https://github.com/acme/docs.git", now=now - DAY, **forge | {"forge_project": "acme/docs"}
    )
    pull_request = {"pull_request_number": 7, "pull_request_url": "https://github.com/acme/web/pull/7"}
    for number, (title, fields) in enumerate((
        ("Fix the login form", {"description": "The form loses the name after a wrong password.", "test_command": "make test"}),
        ("Remove the old API", {"refusals": ["deploy/prod.yml: protected path", "a.bin: too large"], "submissions": 2}),
        ("Speed up the search", {"status": "proposed", **pull_request, "submissions": 1, "poll_error": "Status 502."}),
        ("Translate the errors", {"status": "merged", **pull_request, "ended_at": now - HOUR, "submissions": 3}),
        ("Rewrite in another language", {"status": "abandoned", "ended_at": now - 2 * HOUR}),
    )):  # fmt: skip
        at = now - (9 - number) * HOUR
        task, _ = coding_tasks.create(
            f"web-{40 + number}", repository="web", title=title, agents=[GRACE], now=at, actor="key 3f9a1c20"
        )
        given: dict[str, object] = {"head_commit": "c0ffee12" * 5, **fields} if "status" in fields else fields
        submitted = {"submitted_at": at + HOUR} if "submissions" in fields or "pull_request_url" in fields else {}
        CodingTask.objects.filter(pk=task.pk).update(**{"base_commit": "1a2b3c4d" * 5, **submitted, **given})
    for at in (now - 5 * DAY, now - 3 * HOUR):
        environment_secrets.add_secret("web-40", now=at, actor=console_user("admin"))


def _seed_users(now: datetime) -> None:
    """Create a user of each role, API keys and policies."""
    for name in ("Viewer", "Operator", "Administrator"):
        User.objects.create_user(name.lower(), password=name.lower(), is_staff=True).groups.add(Group.objects.get(name=name))
    User.objects.create_superuser("admin", password="admin")
    api_keys.issue_key([ADA, GRACE, ALAN], name="tournament server", now=now - 30 * HOUR)
    api_keys.issue_key([], operator=True, name="ci", now=now - 9 * HOUR)
    old, _ = api_keys.issue_key([GRACE], name="lost laptop", now=now - 90 * HOUR)
    api_keys.revoke_key(old, now=now - 80 * HOUR)
    Policy.objects.create(name="builders", writable_root=True, description="Compilers' caches outside of /workspace.")
    players = Policy.objects.create(name="players", relay=True, models=["gpt-4o-mini"], calls_per_minute=30)
    EnvironmentType.objects.filter(name="catan").update(turn_argv=["play"], policy=players)


def _seed_webhooks(now: datetime) -> None:
    """Create a successful, a failing and a disabled webhook, with deliveries."""
    unavailable, gone = PostResult(503, "Status 503 Service Unavailable."), PostResult(410, "Status 410 Gone.")
    for number, answer in enumerate((PostResult(204), unavailable, gone)):
        url = f"https://receiver-{number}.example.com/leasehold"
        subscriptions.add_webhook(url, [], description="The people on call.", now=now - 20 * HOUR, actor=console_user("admin"))
        outbox.enqueue_event("budget.warning", key=f"{number}", payload={"spent": "8.41"}, now=now - HOUR)
        taken = delivery.claim_delivery(Webhook.objects.get(url=url).pk, now=now - 9 * MINUTE)
        assert taken
        delivery.record_result(taken, answer, now=now - 9 * MINUTE)


def _seed_game(memory: MemoryProvider, now: datetime) -> None:
    """Create a lease of many turns, of which one prints no JSON, with runs of every result and background processes."""

    def play(call: ProgramCall) -> ProgramResult:
        number = int(call.env["TURN_NUMBER"])
        action = b'{"action": "build_road", "edge": [%d, %d]}' % (number, number + 1)
        return ProgramResult(stdout=action if number % 5 else b"I would rather trade sheep.", took=timedelta(seconds=0.9))

    memory.programs["play"] = play
    memory.programs["python3"] = lambda call: ProgramResult(
        1, b"epoch 1\n\x1b[31mepoch 2\x1b[0m\n", b"No module named 'torch'\n"
    )
    lease = _acquire_lease(ADA, "catan-finals-2026", now - 5 * HOUR)
    for number in range(1, 8):
        turns.take_turn(lease.pk, number, {"legal": ["roll"]}, now=now - 5 * HOUR + number * 6 * MINUTE, actor=ACTOR)
    for argv in (
        ["head", "-c", "200000", "/dev/zero"], ["echo", "hello"], ["python3", "train.py", "it's here"], ["sleep", "600"],
        ["oom"], ["no-such-program"], ["printf", "<script>alert('no')</script>\\n"],
    ):  # fmt: skip
        run(lease, *argv, now=now - 3 * HOUR)
    for spec in (
        ProcessSpec(["node", "relay-watcher.js"], {"TOKEN": "x"}, name="relay <watcher>"),
        ProcessSpec(["sleep", "9999"]),
    ):
        processes.start_process(execution.build_sandbox_request(lease, now=now - HOUR), spec, now=now - HOUR, actor=ACTOR)
    _seed_agent_runs(lease, now)


def _seed_agent_runs(lease: Lease, now: datetime) -> None:
    """Create agent runs in several states, with messages, and queued runs."""
    stores = lease_stores.open_stores(lease.agent_did, lease.pk)
    states = ("completed", "failed", "interrupted", "running")
    for number, state in enumerate(states):
        started_at = now - (len(states) - number) * 20 * MINUTE
        row = AgentRun.objects.create(
            lease=lease, cli="claude-code", model="sonnet", state=state, started_at=started_at,
            ended_at=None if state == "running" else started_at + 7 * MINUTE, session_id="7f7ec0b5-5a0c-4b43-a6a4-6b4d2c0b8a10",
            violation="Tool not allowed: WebFetch <b>" if state == "interrupted" else "", message_count=9, turn_count=4,
            result="The test passes now. <script>", recorder_deadline=started_at,
        )  # fmt: skip
        store_message(stores, row, "user", "Fix the failing test <b>at once</b>.", 0, now=started_at)
        tool = {"type": "tool_use", "name": "Bash", "input": {"command": "pytest -q"}}
        text = {"type": "text", "text": "I look at the test."}
        answer = {"type": "assistant", "message": {"id": "m1", "content": [text, tool]}}
        store_message(stores, row, "assistant", answer, 1, now=started_at)
    command = {"kind": "exec", "argv": ["make", "<all>"], "cwd": "/workspace", "shell": None, "timeout_seconds": 60}
    for number in range(4):
        queued = queue.enqueue(
            uuid.uuid4(), agent_did=lease.agent_did, lease=lease if number % 2 else None, pool=lease.pool, request=command,
            secrets={"env": {}}, options=QueueOptions(repeatable=True, max_attempts=3), now=now - number * MINUTE,
        )  # fmt: skip
    error = queue.build_error("exec", "Exit code 2. <b>", retryable=False)
    QueuedRun.objects.filter(pk=queued.pk).update(state="failed", attempt=3, ended_at=now, started_at=now - MINUTE, error=error)


def _seed_sandbox_states(memory: MemoryProvider, now: datetime) -> None:
    """Create running, starting, stalled, expiring, ended, cold, woken and evicting sandboxes."""
    busy = _acquire_used_lease(GRACE, "training-run", now - HOUR)
    operations.open_run(get_sandbox(busy), Command(argv=["make", "all"], timeout=10 * MINUTE), now=now - MINUTE)
    for environment, since in (("starting", MINUTE), ("stalled-start", HOUR)):
        lease = _acquire_lease(ALAN, environment, now - since)
        allocation.reserve_place(execution.build_sandbox_request(lease, now=now), now=now - since)
    for environment, minutes in (("ending-soon", 57), ("overdue", 62)):
        _acquire_used_lease("did:plc:hurry", environment, now - minutes * MINUTE, ttl=HOUR)
    gone = _acquire_used_lease(ADA, "catan-round-1", now - 20 * HOUR)
    leasing.end(gone.pk, reason="condition:game.finished", now=now - 19 * HOUR, actor=ACTOR)
    sweeps.reclaim(now=now - 19 * HOUR)
    sleeper, woken, falling = (
        _acquire_used_lease(f"did:plc:{name}", "study", now - 3 * HOUR) for name in ("sleeper", "woken", "idle")
    )
    for lease in (sleeper, woken):
        eviction.evict(get_sandbox(lease).pk, now=now - 2 * HOUR, reason="idle", actor="sweep")
    execution.ensure_sandbox_ready(woken.pk, now=now - 3 * MINUTE, actor=ACTOR)
    Sandbox.objects.filter(pk=get_sandbox(falling).pk).update(idle_at=now - 9 * HOUR)
    passes.claim_idle(SandboxState.WAITING, uuid.uuid4(), now=now - MINUTE / 3, limit=1)


def _seed_failures(memory: MemoryProvider, now: datetime) -> None:
    """Create sandboxes that were lost, grew too large, failed to be evicted or failed to be destroyed."""
    full, lost, large = (_acquire_used_lease("did:plc:hoarder", name, now - HOUR) for name in ("full", "gone", "large"))
    with memory.fail("get_files", Unavailable("engine answered 500: no space left on device")):
        eviction.evict(get_sandbox(full).pk, now=now - 20 * MINUTE, reason="idle", actor="sweep")
    eviction.mark_lost(get_sandbox(lost), "no such container: leasehold-4be1", now=now - MINUTE)
    Sandbox.objects.filter(pk=get_sandbox(large).pk).update(workspace_bytes=3 << 30, measured_at=now - 5 * MINUTE)
    ghost = _acquire_used_lease("did:plc:ghost", "haunted", now - 6 * HOUR)
    leasing.end(ghost.pk, reason="operator", now=now - 5 * HOUR, actor="admin", detail="it was mining coins")
    with memory.fail("destroy", Unavailable("engine answered 500: device or resource busy"), times=100):
        for hour in range(9):
            sweeps.reclaim(now=now - 5 * HOUR + hour * 20 * MINUTE)


def _seed_agent_data(memory: MemoryProvider, now: datetime) -> None:
    """Create an agent with a conflict in its data, snapshots of a workspace, a fork and unsaved data."""
    agent = "did:plc:archivist"
    for path, content in {
        "character.json": b'{"name": "Ada", "class": "scribe"}\n', "memory/2026-11-20.md": b"The harbour master lies. " * 400,
        "maps/coast.png": os.urandom(3 << 20), "maps/odd\nname \u202etxt.exe": b"x\n",
        "maps/a name that is longer than a line of a telephone is wide, and has (brackets).txt": b"x\n",
    }.items():  # fmt: skip
        data_editing.put_file(agent, path, io.BytesIO(content), now=now - 30 * HOUR)
    one, two = (_acquire_used_lease(agent, name, now - 5 * HOUR) for name in ("library", "reading-room"))
    files = memory.files(get_sandbox(one).ref)
    files.update({f"{DATA}/memory/sessions/{number:04}.json": File(b"{}" * number) for number in range(30)})
    files[f"{DATA}/memory/latest"] = Link("2026-11-20.md")
    run(one, "sh", "-c", "echo one >/data/plan.md", now=now - 4 * HOUR)
    memory.files(get_sandbox(two).ref)[f"{DATA}/plan.md"] = File(b"two\n")
    run(two, now=now - 2 * HOUR)
    oldest = snapshots.take_snapshot(one.pk, name="before the exam", now=now - HOUR, actor="operator")
    fork.fork(one, leasing.LeaseRequest(agent, "library-2", "catan", pool="demo"), snapshot=oldest.pk, now=now - HOUR / 2)
    with memory.fail("get_files", Unavailable('engine answered 500: "input/output error"'), times=1):
        run(one, "sh", "-c", "echo x >/data/note.md", now=now - 25 * MINUTE)


def _seed_pools(memory: MemoryProvider, now: datetime) -> None:
    """Create pools that start nothing, are full or drain, a pre-warmed sandbox, and quotas."""
    Pool.objects.create(name="gpu", provider="memory", capacity=8, image="registry.example.com/gpu:12.4", warm_target=2)
    with memory.fail("create", Rejected('engine answered 404: manifest for "gpu:12.4" not found')):
        passes.warm_pools(now=now - MINUTE)
    Pool.objects.filter(name="demo").update(warm_target=2)
    demo = Pool.objects.get(name="demo")
    allocation.start_warm(demo, now=now - 20 * MINUTE)
    for agent, most, guaranteed in ((ADA, 8, 2), (GRACE, None, 1), ("did:plc:hoarder", 1, 0)):
        Quota.objects.update_or_create(pool=demo, agent_did=agent, defaults={"most": most, "guaranteed": guaranteed})
    for name in ("small", "old-rack"):
        Pool.objects.create(name=name, provider="memory", capacity=1)
        _acquire_used_lease("did:plc:resident", "still-here", now - 20 * MINUTE, pool=name)
    allocation.set_draining(Pool.objects.get(name="old-rack"), draining=True, actor="operator")
    operator = User.objects.get(username="operator")
    LogEntry.objects.log_actions(operator.pk, [demo], CHANGE, "Drain: its rack is moved on Thursday")  # type: ignore[arg-type]


def _seed_identities(now: datetime) -> None:
    """Create a rotated key, a revoked key and service tokens signed with both keys of an agent."""
    signing.create_key(ADA, now=now - 50 * HOUR, actor=console_user("admin"))
    lease = _acquire_lease(ADA, "relay-watch", now - 2 * HOUR)
    for at in (now - 2 * HOUR, now):
        execution.mint_service_token(lease.pk, aud="did:web:relay.example.com#relay", lxm="a.b.c", now=at, actor=ACTOR)
        signing.rotate_key(ADA, now=at, actor=console_user("admin"))
    signing.create_key(GRACE, now=now - 50 * HOUR, actor=console_user("admin"))
    signing.revoke_active_key(GRACE, now=now - HOUR, actor=COMMAND_LINE)


def _seed_llm_calls(now: datetime) -> None:
    """Create model calls and a relay call of every result, in a lease with a spend limit."""
    for usd, since in (("0.15", now - 30 * DAY), ("0.12", now + 5 * DAY)):
        create_rates("gpt-4o-mini*", input=usd, cache_read="0.075", output="0.6", since=since)
    lease = _acquire_used_lease(ADA, "essay", now - 2 * HOUR)
    limits = {"usd": Decimal("0.005"), "tokens": 200_000}
    call_limits.change_call_limits(
        lease.pk, limits, now=now - HOUR, actor=console_user("operator"), detail="it writes long essays"
    )
    for number, (outcome, status, code, priced) in enumerate((
        ("ok", 200, "", "record"), ("ok", 200, "", "upstream"), ("ok", 200, "", "rate"), ("ok", 200, "", ""),
        ("cut", 200, "caller_gone", "rate"), ("failed", 502, "upstream_failed", ""), ("lost", None, "", ""),
        ("refused", 402, "spend_limit_reached", ""), ("refused", 403, "relay_not_allowed", ""), ("ok", 101, "", ""),
        ("open", None, "", ""),
    )):  # fmt: skip
        at, kind = now - (20 - number) * MINUTE, "relay" if code == "relay_not_allowed" or status == 101 else "llm"
        create_llm_call(
            lease, sandbox=get_sandbox(lease), kind=kind, outcome=outcome, status=status, code=code, priced=priced,
            path="/v1/messages", model="gpt-4o-mini" if kind == "llm" else "", cost=Decimal("0.002") if priced else None,
            started_at=at, deadline_at=at + HOUR, ended_at=None if outcome == "open" else at + MINUTE / 20, sent_bytes=2300,
        )  # fmt: skip


def _seed_usage(now: datetime) -> None:
    """Create six weeks of usage and costs, accounts with statements, and credits."""
    today = now.astimezone(UTC).date()
    month, began = today.replace(day=1), now - 45 * DAY
    last = (month - DAY).replace(day=1)
    research, house = Account.objects.create(name="research", title="Research group"), Account.objects.get(name="house")
    for agent in (ADA, GRACE):
        join_account(research, agent=agent)
    create_rate("time", "0.031", f"{began:%Y-%m-%d}", "docker", source="The rack's invoice")
    create_rate("time", "0.035", f"{now + 20 * DAY:%Y-%m-%d}", "docker", source="Next year's contract")
    for number in range(45):
        at = start_of_day((began + number * DAY).date())
        for agent, hours in ((ADA, 2 + number % 7), (GRACE, number % 5), (ALAN, 3)):
            create_time_usage(at, hours * HOUR, agent, provider="cloudflare" if agent == ALAN else "docker")
        create_token_usage(
            at, f"{number}.0041237", number + 1, agent=ADA, input_tokens=900, output_tokens=70, model="gpt-4o-mini"
        )
    run_billing_sweeps(now)
    for first in statements.find_open_months(research, now=now):
        if first <= last:
            close_month(research, first, now=now)
    for agent, account, since in (("did:plc:hurry", research, month), (GRACE, house, today + 5 * DAY)):
        Agent.objects.get_or_create(did=agent)
        Membership.objects.create(agent_did=agent, account=account, since=since)
    mistake = statements.grant_credit(research, Decimal(400), now=now - HOUR, actor="admin", reason="For the workshop")
    statements.reverse_credit(mistake.pk, now=now, actor="admin", reason="It was the other group's")
    statements.grant_credit(research, Decimal("12.50"), now=now, actor="admin", reason="Lost state on Tuesday")
    create_time_usage(now - HOUR, MINUTE, ADA)  # not yet priced


def _seed_budgets(now: datetime) -> None:
    """Create budgets of every level: within, warned, exhausted with an ended lease, and off."""
    _acquire_used_lease("did:plc:thrifty", "essay-3", now - 2 * HOUR)
    metering.meter_usage(now=now)
    create_budget("0.9", "hours", "ever", scope="agent", subject="did:plc:thrifty", now=now - HOUR)
    budget_enforcement.enforce_budgets(now=now)
    key = AgentKey.objects.get(name="tournament server")
    for amount, unit, fields in (
        ("4000", "hours", {}), ("0.05", "usd", {"scope": "agent", "subject": ADA, "hard": False}),
        ("140", "hours", {"scope": "agent", "subject": ALAN, "warn_percents": [60]}),
        ("12.5", "usd", {"scope": "agent", "subject": GRACE, "active": False}),
        ("1200", "usd", {"scope": "account", "subject": "house"}), ("25", "usd", {"scope": "key", "subject": str(key.pk)}),
    ):  # fmt: skip
        create_budget(amount, unit, "ever", now=now - MINUTE, **fields)


if __name__ == "__main__":
    seed(timezone.now())
