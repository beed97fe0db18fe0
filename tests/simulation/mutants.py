"""Known faults, each put back into a copy of the tree by replacements of source text. The simulation has to find each one."""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutation.__main__ import copy_tree, exit_on_sigterm, run_process

WORKSPACE, LIFECYCLE, SWEEPS = "sandboxes/state/workspace.py", "sandboxes/lifecycle.py", "sandboxes/sweeps/passes.py"
REGISTRY, QUEUE = "sandboxes/hosts/registry.py", "leases/queue/queue.py"
AGENT_RUNS, RECORDER = "leases/agent_runs/lifecycle.py", "leases/agent_runs/recorder.py"
EVICTION, TASKS, EXECUTION = "sandboxes/eviction.py", "leases/tasks.py", "leases/execution.py"


@dataclass(frozen=True)
class Replacement:
    """`before` occurs exactly once in the file at `path`."""

    path: str
    before: str
    after: str


MUTANTS: dict[str, Sequence[Replacement]] = {
    # A failed delete of an old copy counts as "not stored", and a stored state counts although runs began after it.
    "failed-delete-of-old-copy": [
        Replacement(
            WORKSPACE,
            "        _forget_superseded(snapshot.holder, now=clock())\n",
            "        forget_older(snapshot.holder, now=clock())\n",
        ),
        Replacement(LIFECYCLE, '"persisted = FALSE, persist_failures = 0 "', '"persist_failures = 0 "'),
    ],
    # One counter for failed stores and failed destroys, which neither a new eviction nor a use resets. A sandbox that is given
    # up is destroyed without a last attempt to store its state.
    "unstored-sandbox-given-up": [
        Replacement(EVICTION, "tries=1, idle_at=None,", "idle_at=None,"),
        Replacement(SWEEPS, "tries=1, idle_at=None,", "idle_at=None,"),
        Replacement(EVICTION, "tries=0, persist_failures=failures,", "tries=F('tries') + 1, persist_failures=failures,"),
        Replacement(
            SWEEPS,
            "if sandbox.tries >= settings.DESTROY_TRIES and not workspace.has_unsaved_state(sandbox):",
            "if sandbox.tries >= settings.DESTROY_TRIES and "
            'Sandbox.objects.filter(unchanged, pk=sandbox.pk).update(final_persist="none"):',
        ),
    ],
    # A task that is delivered twice restores twice.
    "restore-delivered-twice": [
        Replacement(TASKS, "str(operation(request_id=request_id).pk)", "str(operation(request_id=None).pk)"),
    ],
    # Every worker acts on the sandboxes of every host, and believes the "no such sandbox" of its own engine.
    "two-hosts": [
        Replacement(REGISTRY, '    return Q(**{f"{prefix}host__in": find_local_host_ids()})\n', "    return Q()\n"),
        Replacement(
            REGISTRY,
            "        raise Unavailable(message, cause=FailureCause.ENGINE_UNREACHABLE, provider=sandbox.provider)\n",
            "        return provider\n",
        ),
        Replacement(
            REGISTRY,
            "        return sandbox.host_id is not None and sandbox.host_id == get_local_host_id(sandbox.provider)\n",
            "        return True\n",
        ),
    ],
    # Deadlines of work in progress are not extended.
    "fixed-deadlines": [
        Replacement(
            "sandboxes/claims.py",
            "            if self.clock() + self.ttl >= self.deadline + RENEWAL_INTERVAL:\n                self.keep()\n",
            "",
        ),
    ],
    # A runner renews all attempts that bear its name, also those that no thread executes any more.
    "attempts-renewed-by-name": [
        Replacement(
            QUEUE, "    if not attempts:\n        return 0\n", "    attempts = attempts or [Attempt(uuid.UUID(int=0), 0)]\n"
        ),
        Replacement(QUEUE, "filter(executing, runner=runner,", "filter(runner=runner,"),
    ],
    # A command with an unknown outcome is executed again, whether or not the client has permitted that.
    "unknown-outcome-repeated": [
        Replacement(
            "leases/queue/attempts.py",
            "    is_repeated = row.repeatable and queue.count_executions(row) < row.max_attempts\n",
            "    is_repeated = True\n",
        ),
    ],
    # The command of an agent run begins although a sweep has closed the run, and nothing records it.
    "agent-run-after-its-close": [
        Replacement(
            AGENT_RUNS,
            "        if not own.update(recorder_deadline=self.row.recorder_deadline):\n            raise AgentRunClosed()\n",
            "        own.update(recorder_deadline=self.row.recorder_deadline)\n",
        ),
    ],
    # A recorder that takes over begins with the first message again.
    "recording-restarted": [
        Replacement(RECORDER, "Position(row.stdout_offset, row.stderr_offset), slot,", "Position(0, row.stderr_offset), slot,"),
    ],
    # The time follows the clock of the host, corrected by a skew that is measured once a minute.
    "skew-of-the-last-minute": [
        Replacement(
            "sandboxes/db/database_time.py",
            "        return self.at.wall + correction + timedelta(seconds=read_uptime() - self.at.uptime)\n",
            "        return timezone.now() + correction\n",
        ),
        Replacement(
            "sandboxes/db/database_time.py",
            "        return abs(later.wall - self.wall - elapsed) > TOLERATED_SKEW\n",
            "        return abs(elapsed) > CHECK_INTERVAL_SECONDS * TOLERATED_SKEW\n",
        ),
    ],
    # The fence and the budget are checked with the time at which the request began.
    "fence-at-start-of-request": [
        Replacement(EXECUTION, "guard=LeaseGuard(lease.pk, clock_from(now),", "guard=LeaseGuard(lease.pk, lambda: now,"),
    ],
}


class MutantRefused(Exception):
    """The replacements do not fit the present source text."""


def apply_replacements(name: str, changes: Sequence[Replacement], tree: Path) -> None:
    """Change the files below `tree`. Raise MutantRefused, before any change of that file, if one does not fit."""
    for change in changes:
        path = tree / change.path
        source = path.read_text() if path.is_file() else ""
        if source.count(change.before) != 1:
            raise MutantRefused(f"mutant {name}: {change.path} does not have this text exactly once: {change.before!r}")
        mutated = source.replace(change.before, change.after)
        try:
            compile(mutated, change.path, "exec")
        except SyntaxError as error:
            raise MutantRefused(f"mutant {name}: {change.path} would not be valid Python: {error}") from error
        path.write_text(mutated)


def run_mutant(name: str, *, seed: int, seeds: int, jobs: int, length: int = 0) -> int:
    """Search the seeds in a mutated copy of the tree. Return 0 if a seed fails, 1 if none does, 2 if the mutant is refused."""
    exit_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="lh-simulation-") as temporary:
        tree = Path(temporary)
        copy_tree(tree)
        try:
            apply_replacements(name, MUTANTS[name], tree)
        except MutantRefused as refused:
            print(refused)
            return 2
        numbers = ["--seed", str(seed), "--seeds", str(seeds), "--jobs", str(jobs), "--length", str(length)]
        with run_process([sys.executable, "-m", "tests.simulation", "--stop", *numbers], tree) as search:
            assert search.stdout
            for line in search.stdout:
                print(line, end="", flush=True)
            return int(search.wait() != 1)


__all__ = ["MUTANTS", "MutantRefused", "Replacement", "apply_replacements", "run_mutant"]
