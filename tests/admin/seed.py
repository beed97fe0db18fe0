"""Rows to look at, made by the verbs with `now` in the past: `python -m tests.admin.seed` on an empty database.

A lease of forty turns, runs that ended in every way, sandboxes in every state, a destroy that never worked."""

import os
from datetime import datetime, timedelta

import django

if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
    django.setup()

from django.contrib.auth.models import Group, User
from django.utils import timezone

from leases import acting, keys, leasing, sweeps, turns
from leases.models import EnvironmentType, Lease
from sandboxes import pool, providers, runs
from sandboxes.models import Pool, Sandbox, Sweep
from sandboxes.providers.base import Unavailable
from sandboxes.providers.memory import Call, MemoryProvider, Outcome
from sandboxes.runs import Command

HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)
PLAYERS = [
    "did:plc:ada",
    "did:plc:grace",
    "did:web:agents.example.com:alan",
    "did:plc:" + "z72i7hdynmk6r22z27h6tvur" * 2,
]


def seed(now: datetime) -> None:
    """Everything below, as if it had happened in the hours before `now`."""
    memory = providers.get("memory")
    assert isinstance(memory, MemoryProvider)
    Pool.objects.create(name="demo", provider="memory", capacity=24)
    for name in ("Viewer", "Operator", "Administrator"):
        User.objects.create_user(name.lower(), password=name.lower(), is_staff=True).groups.add(Group.objects.get(name=name))
    User.objects.create_superuser("admin", password="admin")
    EnvironmentType.objects.filter(name="catan").update(turn_argv=["play"])
    _program(memory)
    _keys(now)
    _game(now)
    _runs(now)
    _states(now)
    _ends(now)
    _quarantine(memory, now)
    _sweeps(now)


def _lease(agent: str, environment: str, at: datetime, **ask: object) -> Lease:
    wish = leasing.Ask(agent_did=agent, environment_id=environment, environment_type="catan", pool="demo", **ask)  # type: ignore[arg-type]
    return leasing.acquire(wish, now=at, actor="key 3f9a1c20")[0]


def _program(memory: MemoryProvider) -> None:
    """A player that rolls, builds, and once in a while says something that is no move."""

    def play(call: Call) -> Outcome:
        number = int(call.env["TURN_NUMBER"])
        if number % 13 == 0:
            return Outcome(stdout=b"I would rather trade sheep.", took=timedelta(seconds=0.4))
        said = b'{"action": "build_road", "edge": [%d, %d], "why": "towards the ore"}' % (number, number + 1)
        return Outcome(stdout=said if number % 3 else b'{"action": "roll"}', took=timedelta(seconds=0.9))

    memory.programs["play"] = play
    trace = b'Traceback (most recent call last):\n  File "/workspace/train.py", line 12, in <module>\n    import torch\n'
    missing = b"ModuleNotFoundError: No module named 'torch'\n"
    memory.programs["python3"] = lambda call: Outcome(1, b"epoch 1\n\x1b[31mepoch 2\x1b[0m\n", trace + missing)


def _keys(now: datetime) -> None:
    keys.issue(PLAYERS[:1], name="ada's own", now=now - 50 * HOUR)
    keys.issue(PLAYERS, name="tournament server", now=now - 30 * HOUR)
    keys.issue([], operator=True, name="ci", now=now - 9 * HOUR)
    old, _ = keys.issue(PLAYERS[1:2], name="lost laptop", now=now - 90 * HOUR)
    keys.revoke(old.pk, now=now - 80 * HOUR)


def _game(now: datetime) -> None:
    lease = _lease(PLAYERS[0], "catan-finals-2026", now - 5 * HOUR)
    for number in range(1, 41):
        turns.take_turn(lease.pk, number, {"legal": ["roll"]}, now=now - 5 * HOUR + number * 6 * MINUTE, actor="key 3f9a1c20")


def _runs(now: datetime) -> None:
    lease = _lease(PLAYERS[1], "coding-task-118", now - 3 * HOUR)
    for minutes, argv in (
        (2, ["echo", "hello from the sandbox"]),
        (5, ["python3", "train.py", "--epochs", "2", "--name", "it's here"]),
        (9, ["sleep", "600"]),
        (12, ["oom"]),
        (20, ["head", "-c", "200000", "/dev/zero"]),
        (26, ["printf", "<script>alert('no')</script>\\n"]),
        (31, ["no-such-program"]),
    ):
        command = Command(argv=argv, timeout=timedelta(seconds=30), env={"TOKEN": "x"} if minutes == 5 else {})
        acting.exec_in(lease.pk, command, now=now - 3 * HOUR + minutes * MINUTE, actor="key 3f9a1c20")


def _states(now: datetime) -> None:
    for index in range(5):
        lease = _lease(f"did:plc:worker{index}", "training-run", now - HOUR - index * MINUTE)
        acting.exec_in(lease.pk, Command(argv=["true"], timeout=MINUTE), now=now - 50 * MINUTE + index * MINUTE)
        if index < 3:  # still at it
            sandbox = pool.of(lease.pk)
            assert sandbox
            runs.open_run(sandbox, Command(argv=["make", "all"], timeout=10 * MINUTE), now=now - index * MINUTE)
    warm = _lease(PLAYERS[2], "warming-up", now - 2 * MINUTE)
    acting.sandbox_for(warm.pk, now=now - 2 * MINUTE)
    starting = _lease(PLAYERS[3], "starting", now - MINUTE)
    pool.reserve(acting.want_for(starting, now=now), now=now - MINUTE)
    stuck = _lease("did:plc:stuck", "stalled-start", now - HOUR)
    pool.reserve(acting.want_for(stuck, now=now), now=now - HOUR)


def _ends(now: datetime) -> None:
    soon = _lease("did:plc:hurry", "ending-soon", now - 57 * MINUTE, ttl=HOUR)
    overdue = _lease("did:plc:late", "overdue", now - 62 * MINUTE, ttl=HOUR)
    for lease in (soon, overdue):
        acting.sandbox_for(lease.pk, now=lease.leased_at)
    for index, agent in enumerate(PLAYERS):
        gone = _lease(agent, f"catan-round-{index}", now - 20 * HOUR)
        acting.exec_in(gone.pk, Command(argv=["true"], timeout=MINUTE), now=now - 20 * HOUR)
        leasing.end(gone.pk, reason="condition:game.finished", now=now - 19 * HOUR, actor="key 3f9a1c20")
    sweeps.reclaim(now=now - 19 * HOUR)


def _quarantine(memory: MemoryProvider, now: datetime) -> None:
    for index in range(2):
        lease = _lease(f"did:plc:ghost{index}", "haunted", now - 6 * HOUR)
        acting.sandbox_for(lease.pk, now=now - 6 * HOUR)
        leasing.end(lease.pk, reason="operator", now=now - 5 * HOUR, actor="admin", why="it was mining coins")
    trouble = 'engine answered 500: "device or resource busy: cannot unmount /var/lib/docker/overlay2/merged"'
    with memory.fail("destroy", Unavailable(trouble), times=100):
        for hour in range(9):
            sweeps.reclaim(now=now - 5 * HOUR + hour * 20 * MINUTE)
    lost = _lease("did:plc:retry", "trying-again", now - HOUR)
    acting.sandbox_for(lost.pk, now=now - HOUR)
    leasing.release(lost.pk, now=now - 4 * MINUTE, actor="key 3f9a1c20")
    with memory.fail("destroy", Unavailable(trouble), times=100):
        sweeps.reclaim(now=now - 3 * MINUTE)
    Sandbox.objects.filter(agent_did="did:plc:retry").update(deadline_at=now + MINUTE)


def _sweeps(now: datetime) -> None:
    for name, age, every, counts, error in (
        ("expire", 20, MINUTE, {"expired": 2}, ""),
        ("reclaim", 25, MINUTE, {"destroyed": 3}, "7b0c: engine answered 500"),
        ("stalled", 40, MINUTE, {}, ""),
        ("reconcile", 900, 5 * MINUTE, {"orphans destroyed": 1}, 'pool "demo", docker: the daemon did not answer'),
    ):
        at = now - timedelta(seconds=age)
        Sweep.objects.create(
            name=name, every=every, started_at=at, succeeded_at=at, took=timedelta(milliseconds=140), counts=counts,
            last_error=error,
        )  # fmt: skip
    Sweep.objects.create(name="heartbeat", every=MINUTE)


if __name__ == "__main__":
    seed(timezone.now())
