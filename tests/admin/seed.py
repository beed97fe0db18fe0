"""Demo data for the console, made by domain verbs with past times: `python -m tests.admin.seed` on an empty database.

Includes a lease of forty turns, runs and model calls with every result, sandboxes in every state, a quarantined sandbox, and
pools that are full, draining or unable to start sandboxes."""

import io
import os
import uuid
from datetime import datetime, timedelta
from decimal import Decimal

import django

if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
    django.setup()

from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.auth.models import Group, User
from django.utils import timezone

from billing import costs, metering
from leases import api_keys, budget_enforcement, execution, fork, leasing, snapshots, sweeps, turns
from leases.models import AgentKey, EnvironmentType, Lease
from sandboxes import eviction, pool, processes, providers, runs
from sandboxes import sweeps as below
from sandboxes.egress import model_pricing
from sandboxes.identity import curves, signing
from sandboxes.models import ModelRate, Policy, Pool, Quota, Sandbox, SandboxState, Sweep, Webhook
from sandboxes.processes import ProcessSpec
from sandboxes.providers.base import DATA, Unavailable
from sandboxes.providers.memory import File, Link, MemoryProvider, ProgramCall, ProgramResult
from sandboxes.runs import Command
from sandboxes.state import data_editing, workspace
from sandboxes.webhooks import delivery, outbox, subscriptions
from sandboxes.webhooks.http_post import PostResult
from tests.admin.seed_money import seed_money
from tests.support.billing import create_budget, create_llm_call

HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)
AGENT_DIDS = ["did:plc:ada", "did:plc:grace", "did:web:agents.example.com:alan", "did:plc:" + "z72i7hdynmk6r22z27h6tvur" * 2]


def seed(now: datetime) -> None:
    """Create all demo data, as if it had happened in the hours before `now`."""
    memory = providers.get_provider("memory")
    assert isinstance(memory, MemoryProvider)
    Pool.objects.create(name="demo", provider="memory", capacity=32)
    for name in ("Viewer", "Operator", "Administrator"):
        User.objects.create_user(name.lower(), password=name.lower(), is_staff=True).groups.add(Group.objects.get(name=name))
    User.objects.create_superuser("admin", password="admin")
    EnvironmentType.objects.filter(name="catan").update(turn_argv=["play"])
    _seed_policies()
    _seed_programs(memory)
    _seed_keys(now)
    _seed_webhooks(now)
    _seed_game(now)
    _seed_runs(now)
    _seed_sandbox_states(now)
    _seed_ended_leases(now)
    _seed_cold_sandboxes(memory, now)
    _seed_failures(memory, now)
    _seed_quarantine(memory, now)
    _seed_agent_data(memory, now)
    _seed_pools(memory, now)
    _seed_identities(now)
    _seed_llm_calls(now)
    _seed_deliveries(now)
    _seed_budgets(now)
    _seed_sweeps(now)
    seed_money(now)


def _seed_policies() -> None:
    builders = Policy.objects.create(
        name="builders", writable_root=True, calls_per_minute=240, most_calls_at_once=16, largest_body_kib=16384,
        description="Coding tasks whose image has its compilers' caches outside /workspace.",
    )  # fmt: skip
    players = Policy.objects.create(
        name="players", relay=True, models=["gpt-4o-mini", "claude-3-5-haiku-*", "mistral-small-*"], calls_per_minute=30
    )
    EnvironmentType.objects.filter(name="coding").update(policy=builders)
    EnvironmentType.objects.filter(name="rpg").update(policy=players)


def _acquire_lease(agent: str, environment: str, at: datetime, pool: str = "demo", **options: object) -> Lease:
    options = {"sleep_after": 3 * HOUR} | options
    request = leasing.LeaseRequest(agent_did=agent, environment_id=environment, environment_type="catan", pool=pool, **options)  # type: ignore[arg-type]
    return leasing.acquire(request, now=at, actor="key 3f9a1c20")[0]


def _run_command(lease: Lease, at: datetime, *argv: str) -> None:
    command = Command(argv=argv or ["true"], timeout=MINUTE)
    execution.exec_command(lease.pk, command, now=at, actor="key 3f9a1c20")


def _acquire_used_lease(agent: str, environment: str, at: datetime, pool: str = "demo") -> Lease:
    """Acquire a lease and run a command in its sandbox."""
    lease = _acquire_lease(agent, environment, at, pool)
    _run_command(lease, at)
    return lease


def _get_sandbox(lease: Lease) -> Sandbox:
    sandbox = pool.find_by_holder(lease.pk)
    assert sandbox
    return sandbox


def _put_to_sleep(lease: Lease, at: datetime) -> None:
    eviction.evict(_get_sandbox(lease).pk, now=at, reason="idle", actor="sweep")


def _seed_programs(memory: MemoryProvider) -> None:
    """Install a turn script that mostly returns actions and sometimes prints no JSON."""

    def play(call: ProgramCall) -> ProgramResult:
        number = int(call.env["TURN_NUMBER"])
        action = b'{"action": "build_road", "edge": [%d, %d], "why": "towards the ore"}' % (number, number + 1)
        return ProgramResult(stdout=action if number % 13 else b"I would rather trade sheep.", took=timedelta(seconds=0.9))

    memory.programs["play"] = play
    trace = b'Traceback (most recent call last):\n  File "/workspace/train.py", line 12, in <module>\n    import torch\n'
    missing = b"ModuleNotFoundError: No module named 'torch'\n"
    memory.programs["python3"] = lambda call: ProgramResult(1, b"epoch 1\n\x1b[31mepoch 2\x1b[0m\n", trace + missing)


def _seed_keys(now: datetime) -> None:
    api_keys.issue_key(AGENT_DIDS[:1], name="ada's own", now=now - 50 * HOUR)
    api_keys.issue_key(AGENT_DIDS, name="tournament server", now=now - 30 * HOUR)
    api_keys.issue_key([], operator=True, name="ci", now=now - 9 * HOUR)
    old, _ = api_keys.issue_key(AGENT_DIDS[1:2], name="lost laptop", now=now - 90 * HOUR)
    api_keys.revoke_key(old.pk, now=now - 80 * HOUR)


def _seed_webhooks(now: datetime) -> None:
    for url, kinds, description in (
        ("https://pager.example.com/leasehold", [], "The people on call."),
        ("https://ledger.example.net/hooks/" + "leasehold-" * 9, ["budget.warning", "budget.exhausted"], "Accounting."),
        ("https://old.example.org/events", ["lease.ended"], ""),
        ("http://127.0.0.1:9000/", ["sandbox.quarantined"], "A script on this machine."),
    ):
        internal = "127" in url
        subscriptions.add_webhook(url, kinds, description=description, internal=internal, now=now - 20 * HOUR, actor="admin")


def _seed_deliveries(now: datetime) -> None:
    """Record a successful, a failing and a disabled webhook."""
    for number, kind in enumerate(("budget.warning", "budget.exhausted")):
        outbox.enqueue_event(kind, key=f"catan {number}", payload={"budget": "catan", "spent": "8.41"}, now=now - HOUR)
    unavailable, gone = PostResult(503, "Status 503 Service Unavailable."), PostResult(410, "Status 410 Gone.")
    for name, answer in (("pager", PostResult(204)), ("ledger", unavailable), ("old", gone)):
        webhook = Webhook.objects.get(url__contains=f"//{name}")
        for _ in range(5):
            if taken := delivery.claim_delivery(webhook.pk, now=now - 9 * MINUTE):
                delivery.record_result(taken, answer, now=now - 9 * MINUTE)
            webhook.refresh_from_db()


def _seed_game(now: datetime) -> None:
    lease = _acquire_lease(AGENT_DIDS[0], "catan-finals-2026", now - 5 * HOUR)
    for number in range(1, 41):
        turns.take_turn(lease.pk, number, {"legal": ["roll"]}, now=now - 5 * HOUR + number * 6 * MINUTE, actor="key 3f9a1c20")


def _seed_runs(now: datetime) -> None:
    lease = _acquire_lease(AGENT_DIDS[1], "coding-task-118", now - 3 * HOUR)
    python = ["python3", "train.py", "--epochs", "2", "--name", "it's here"]
    for minutes, argv in (
        (2, ["echo", "hello from the sandbox"]), (5, python), (9, ["sleep", "600"]), (12, ["oom"]),
        (20, ["head", "-c", "200000", "/dev/zero"]), (26, ["printf", "<script>alert('no')</script>\\n"]),
        (31, ["no-such-program"]),
    ):  # fmt: skip
        command = Command(argv=argv, timeout=timedelta(seconds=30), env={"TOKEN": "x"} if minutes == 5 else {})
        execution.exec_command(lease.pk, command, now=now - 3 * HOUR + minutes * MINUTE, actor="key 3f9a1c20")
    relay = ProcessSpec(["node", "relay-watcher.js"], {"TOKEN": "x"}, name="relay <watcher>")
    for launch in (relay, ProcessSpec(["sleep", "100000"], name="dev server")):
        want = execution.build_sandbox_request(lease, now=now - 2 * HOUR)
        processes.start_process(want, launch, now=now - 2 * HOUR, actor="key 3f9a1c20")


def _seed_sandbox_states(now: datetime) -> None:
    for index in range(5):
        lease = _acquire_lease(f"did:plc:worker{index}", "training-run", now - HOUR - index * MINUTE)
        _run_command(lease, now - 50 * MINUTE + index * MINUTE)
        if index < 3:  # still running
            runs.open_run(_get_sandbox(lease), Command(argv=["make", "all"], timeout=10 * MINUTE), now=now - index * MINUTE)
    warm = _acquire_lease(AGENT_DIDS[2], "warming-up", now - 2 * MINUTE)
    execution.ensure_sandbox_ready(warm.pk, now=now - 2 * MINUTE)
    starting = _acquire_lease(AGENT_DIDS[3], "starting", now - MINUTE)
    pool.reserve_place(execution.build_sandbox_request(starting, now=now), now=now - MINUTE)
    stuck = _acquire_lease("did:plc:stuck", "stalled-start", now - HOUR)
    pool.reserve_place(execution.build_sandbox_request(stuck, now=now), now=now - HOUR)


def _seed_ended_leases(now: datetime) -> None:
    soon = _acquire_lease("did:plc:hurry", "ending-soon", now - 57 * MINUTE, ttl=HOUR)
    overdue = _acquire_lease("did:plc:late", "overdue", now - 62 * MINUTE, ttl=HOUR)
    for lease in (soon, overdue):
        execution.ensure_sandbox_ready(lease.pk, now=lease.leased_at)
    for index, agent in enumerate(AGENT_DIDS):
        gone = _acquire_lease(agent, f"catan-round-{index}", now - 20 * HOUR)
        _run_command(gone, now - 20 * HOUR)
        leasing.end(gone.pk, reason="condition:game.finished", now=now - 19 * HOUR, actor="key 3f9a1c20")
    sweeps.reclaim(now=now - 19 * HOUR)


def _seed_cold_sandboxes(memory: MemoryProvider, now: datetime) -> None:
    """Create two cold sandboxes, two woken from the local copy and the store, and one being evicted."""
    sleeper, moved, away = (
        _acquire_used_lease(f"did:plc:{name}", "long-study", now - 3 * HOUR) for name in ("sleeper", "moved", "away")
    )
    for lease in (sleeper, moved):
        _put_to_sleep(lease, now - 2 * HOUR)
        _run_command(lease, now - 99 * MINUTE)
    for lease in (sleeper, moved, away):
        _put_to_sleep(lease, now - 70 * MINUTE)
    stored = workspace.find_latest(moved.pk)
    assert stored
    workspace.forget_local(stored)
    execution.ensure_sandbox_ready(moved.pk, now=now - 3 * MINUTE, actor="key 3f9a1c20")
    falling = _get_sandbox(_acquire_used_lease("did:plc:falling", "long-study", now - 40 * MINUTE))
    Sandbox.objects.filter(pk=falling.pk).update(idle_at=now - 9 * HOUR)
    below.claim_idle(SandboxState.WAITING, uuid.uuid4(), now=now - MINUTE / 3, limit=1)


def _seed_failures(memory: MemoryProvider, now: datetime) -> None:
    """Create a sandbox whose eviction failed, a lost one and one over its workspace limit."""
    full = _acquire_used_lease("did:plc:hoarder", "archive", now - 50 * MINUTE)
    with memory.fail("get_files", Unavailable("engine answered 500: no space left on device")):
        for minutes in (20, 12):
            _put_to_sleep(full, now - minutes * MINUTE)
    gone = _acquire_used_lease("did:plc:gone", "vanished", now - 30 * MINUTE)
    eviction.mark_lost(_get_sandbox(gone), "no such container: leasehold-4be1", now=now - MINUTE)
    large = _acquire_used_lease("did:plc:large", "data-set", now - 30 * MINUTE)
    Sandbox.objects.filter(pk=_get_sandbox(large).pk).update(workspace_bytes=3 << 30, measured_at=now - 5 * MINUTE)


def _seed_identities(now: datetime) -> None:
    """Create a rotated key, a revoked key and service tokens signed with them."""
    for index, agent in enumerate(AGENT_DIDS[:3]):
        private = curves.generate_key(["ES256K", "ES256"][index % 2])
        signing.create_key(agent, now=now - 50 * HOUR, actor="admin", private=private)
    for minutes, fragment in ((300, ""), (40, "#relay"), (0, "#relay")):
        at = now - minutes * MINUTE
        lease = _acquire_lease(AGENT_DIDS[0], "relay-watch", at)
        claims = {"aud": "did:web:relay.example.com" + fragment, "lxm": "com.atproto.sync.subscribeRepos"}
        execution.mint_service_token(lease.pk, now=at, actor="key 3f9a1c20", **claims)
        if minutes == 300:
            signing.rotate_key(AGENT_DIDS[0], now=now - 200 * MINUTE, actor="admin")
    signing.revoke_active_key(AGENT_DIDS[1], now=now - HOUR, actor="command line")


def _seed_llm_calls(now: datetime) -> None:
    """Create model calls of leases without a limit, within their limit and over it."""
    ModelRate.objects.create(pattern="*", input_usd="3", output_usd="15", valid_from=now - 90 * 24 * HOUR)
    for pattern, prices in (("gpt-4o-mini*", ("0.15", "0.075", "0.6")), ("claude-3-5-haiku-*", ("0.8", "0.08", "4"))):
        known = dict(zip(("input_usd", "cached_usd", "output_usd"), prices, strict=True))
        ModelRate.objects.create(pattern=pattern, valid_from=now - 30 * 24 * HOUR, **known)
    ModelRate.objects.create(pattern="gpt-4o-mini*", input_usd="0.12", output_usd="0.5", valid_from=now + 5 * 24 * HOUR)
    EnvironmentType.objects.filter(name="coding").update(llm_limit="2.5")
    for environment, limit, count in (("catan-finals-2026", None, 60), ("essay", "5", 24), ("essay-2", "0.05", 40)):
        lease = Lease.objects.filter(agent_did=AGENT_DIDS[0], environment_id=environment, status="active").first()
        lease = lease or _acquire_used_lease(AGENT_DIDS[0], environment, now - 2 * HOUR)
        if limit:
            leasing.set_spend_limit(lease.pk, Decimal(limit), now=now - HOUR, actor="operator", detail="it writes long essays")
        for number in range(count):
            _create_llm_call(lease, number, now - count * 2 * MINUTE + number * 2 * MINUTE)


def _create_llm_call(lease: Lease, number: int, at: datetime) -> None:
    """One of CALL_OUTCOMES, in turn; the first of them is the most frequent one."""
    outcome, kind, status, code, priced = CALL_OUTCOMES[max(number % 24 - 12, 0)]
    model = "" if kind == "relay" else ["gpt-4o-mini-2024-07-18", "claude-3-5-haiku-20241022"][number % 2]
    took = timedelta(seconds=0.4 + number % 7 * 2.3) if outcome != "refused" else timedelta(0)
    counts = (1800 + 410 * number, 1024 * (number % 3), 90 + 13 * number)
    tokens = dict(zip(("input_tokens", "cached_tokens", "output_tokens"), counts, strict=True))
    create_llm_call(
        lease, sandbox=_get_sandbox(lease), kind=kind, model=model, code=code, streamed=number % 2 == 0, started_at=at,
        path="/v1/messages" if model else "/xrpc/com.atproto.sync.subscribeRepos", deadline_at=at + HOUR, outcome=outcome,
        status=status, priced=priced, sent_bytes=2300 * (number + 1) if model else 0, received_bytes=911 * (number + 2),
        first_byte_at=at + took / 3 if took and status else None, ended_at=at + took if outcome != "open" else None,
        logged_at=at + MINUTE if outcome != "open" else None, recorded_at=at + MINUTE if priced == "record" else None,
        cost=model_pricing.calculate_price(ModelRate.objects.all(), model, *counts, at) if priced else None,
        **tokens if model and outcome in ("ok", "cut") else dict.fromkeys(tokens),
    )  # fmt: skip


CALL_OUTCOMES = [
    ("ok", "llm", 200, "", "record"), ("ok", "llm", 200, "", "upstream"), ("ok", "llm", 200, "", "rate"),
    ("ok", "llm", 200, "", ""), ("cut", "llm", 200, "caller_gone", "rate"), ("failed", "llm", 502, "upstream_failed", ""),
    ("lost", "llm", None, "", ""), ("refused", "llm", 402, "spend_limit_reached", ""),
    ("refused", "llm", 403, "model_not_allowed", ""), ("refused", "relay", 403, "relay_not_allowed", ""),
    ("ok", "relay", 101, "", ""), ("open", "llm", None, "", ""),
]  # fmt: skip


def _seed_pools(memory: MemoryProvider, now: datetime) -> None:
    """One that starts nothing, one whose places are taken from each other, one that drains; and who may have how much."""
    gpu = Pool.objects.create(name="gpu", provider="memory", capacity=8, image="registry.example.com/gpu:12.4", warm_target=2)
    with memory.fail("create", Unavailable('engine answered 404: manifest for "registry.example.com/gpu:12.4" not found')):
        below.warm_pools(now=now - MINUTE)
    Pool.objects.filter(pk=gpu.pk).update(warm_paused_until=now + 9 * MINUTE)
    demo = Pool.objects.get(name="demo")
    demo.warm_target = 4
    demo.save(update_fields=["warm_target"])
    for minutes in (30, 20, 10):
        pool.start_warm(demo, now=now - minutes * MINUTE)
    execution.ensure_sandbox_ready(_acquire_lease("did:plc:quick", "claimed", now - 2 * MINUTE).pk, now=now - 2 * MINUTE)
    for agent, most, guaranteed in (
        (AGENT_DIDS[0], 8, 2), (AGENT_DIDS[1], None, 1), ("did:plc:large", 1, 0), ("did:plc:new", 5, 3)
    ):  # fmt: skip
        Quota.objects.update_or_create(pool=demo, agent_did=agent, defaults={"most": most, "guaranteed": guaranteed})
    Pool.objects.create(name="small", provider="memory", capacity=2)
    for index in range(6):
        _acquire_used_lease(f"did:plc:crowd{index}", "queue", now - HOUR + index * MINUTE, pool="small")
    old = Pool.objects.create(name="old-rack", provider="memory", capacity=6)
    _acquire_used_lease("did:plc:resident", "still-here", now - 20 * MINUTE, pool="old-rack")
    pool.set_draining(old, draining=True, actor="operator")
    operator = User.objects.get(username="operator")
    LogEntry.objects.log_actions(operator.pk, [old], CHANGE, "Drain: its rack is moved on Thursday")  # type: ignore[arg-type]


def _seed_quarantine(memory: MemoryProvider, now: datetime) -> None:
    for index in range(2):
        lease = _acquire_lease(f"did:plc:ghost{index}", "haunted", now - 6 * HOUR)
        execution.ensure_sandbox_ready(lease.pk, now=now - 6 * HOUR)
        leasing.end(lease.pk, reason="operator", now=now - 5 * HOUR, actor="admin", detail="it was mining coins")
    trouble = 'engine answered 500: "device or resource busy: cannot unmount /var/lib/docker/overlay2/merged"'
    with memory.fail("destroy", Unavailable(trouble), times=100):
        for hour in range(9):
            sweeps.reclaim(now=now - 5 * HOUR + hour * 20 * MINUTE)
    lost = _acquire_lease("did:plc:retry", "trying-again", now - HOUR)
    execution.ensure_sandbox_ready(lost.pk, now=now - HOUR)
    leasing.release(lost.pk, now=now - 4 * MINUTE, actor="key 3f9a1c20")
    with memory.fail("destroy", Unavailable(trouble), times=100):
        sweeps.reclaim(now=now - 3 * MINUTE)
    Sandbox.objects.filter(agent_did="did:plc:retry").update(deadline_at=now + MINUTE)


def _seed_agent_data(memory: MemoryProvider, now: datetime) -> None:
    """Create an agent with much data and a conflict, snapshots of a workspace, and unsaved data."""
    agent = "did:plc:archivist"
    tree = {
        "character.json": b'{"name": "Ada", "class": "scribe"}\n',
        "memory/2026-11-20.md": b"# Monday\n" + b"The harbour master lies. " * 400,
        "memory/2026-11-21.md": b"# Tuesday\n" + b"He does not. " * 90,
        "skills/catan/prompt.md": b"Trade early.\n",
        "campaign/maps/coast.png": os.urandom(3 << 20),
        "campaign/a name that is a good deal longer than a line of a telephone is wide, and has (brackets).txt": b"x\n",
        "campaign/odd\nname \u202etxt.exe": b"x\n",
    }
    for path, content in tree.items():
        data_editing.put_file(agent, path, io.BytesIO(content), mode=0o755 if "exe" in path else 0o644, now=now - 30 * HOUR)
    one, two = (_acquire_used_lease(agent, name, now - 5 * HOUR) for name in ("library", "reading-room"))
    for number in range(230):
        memory.files(_get_sandbox(one).ref)[f"{DATA}/memory/sessions/{number:04}.json"] = File(b"{}" * number)
    memory.files(_get_sandbox(one).ref)[f"{DATA}/memory/latest"] = Link("2026-11-21.md")
    memory.files(_get_sandbox(one).ref)[f"{DATA}/campaign/" + "long/" * 220 + "way"] = File(b"x")
    _run_command(one, now - 4 * HOUR, "sh", "-c", "echo one >/data/plan.md")
    memory.files(_get_sandbox(two).ref)[f"{DATA}/plan.md"] = File(b"two\n")
    _run_command(two, now - 2 * HOUR, "sh", "-c", "true")
    for name, minutes in (("before the exam", 90), ("", 60)):
        snapshots.take_snapshot(one.pk, name=name, now=now - minutes * MINUTE, actor="operator")
    oldest = workspace.find_by_holder(one.pk).last()
    assert oldest
    fork.fork(one, leasing.LeaseRequest(agent, "library-2", "catan", pool="demo"), snapshot=oldest.pk, now=now - 30 * MINUTE)
    stuck = _acquire_used_lease("did:plc:stubborn", "annex", now - 40 * MINUTE)
    with memory.fail("get_files", Unavailable('engine answered 500: "input/output error"'), times=1):
        _run_command(stuck, now - 25 * MINUTE, "sh", "-c", "echo x >/data/note.md")


def _seed_budgets(now: datetime) -> None:
    """Create budgets of every level: within, warned, exhausted and off."""
    _acquire_used_lease("did:plc:thrifty", "essay-3", now - 2 * HOUR)
    metering.meter_usage(now=now - HOUR)
    create_budget("0.9", "hours", "ever", scope="agent", subject="did:plc:thrifty", now=now - HOUR)
    budget_enforcement.enforce_budgets(now=now - HOUR)  # ends its lease
    metering.meter_usage(now=now)
    costs.price_usage(now=now)
    for scope, subject, amount, unit, period, more in (
        ("all", "", "400", "hours", "month", {}),
        ("agent", AGENT_DIDS[0], "0.05", "usd", "ever", {"hard": False}),
        ("agent", AGENT_DIDS[1], "3.3", "hours", "ever", {}),
        ("environment_type", "catan", "50", "hours", "ever", {"grace": 4 * HOUR}),
        ("key", str(AgentKey.objects.get(name="tournament server").pk), "25", "usd", "day", {"warn_percent": 60}),
        ("agent", AGENT_DIDS[2], "12.5", "usd", "month", {"active": False}),
        ("account", "house", "1200", "usd", "month", {"warn_percent": 90}),
    ):
        create_budget(amount, unit, period, scope=scope, subject=subject, now=now - MINUTE, **more)


def _seed_sweeps(now: datetime) -> None:
    for name, age, every, counts, error in (
        ("expire", 20, MINUTE, {"expired": 2}, ""), ("reclaim", 25, MINUTE, {"destroyed": 3}, "7b0c: engine answered 500"),
        ("stalled", 40, MINUTE, {}, ""),
        ("reconcile", 900, 5 * MINUTE, {"orphans destroyed": 1}, 'pool "demo", docker: the daemon did not answer'),
    ):  # fmt: skip
        at, took = now - timedelta(seconds=age), timedelta(milliseconds=140)
        known = {"every": every, "started_at": at, "succeeded_at": at, "took": took}
        Sweep.objects.create(name=name, counts=counts, last_error=error, **known)
    Sweep.objects.create(name="heartbeat", every=MINUTE)


if __name__ == "__main__":
    seed(timezone.now())
