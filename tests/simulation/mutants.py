"""Known faults, each put back into a copy of the tree by replacements of source text. The simulation has to find each one."""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutation.__main__ import copy_tree, run_process

WORKSPACE, LIFECYCLE, SWEEPS = "sandboxes/state/workspace.py", "sandboxes/lifecycle.py", "sandboxes/sweeps/passes.py"
REGISTRY = "sandboxes/hosts/registry.py"
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
    # One counter for failed stores and failed destroys, which a use does not reset.
    "unstored-sandbox-given-up": [
        Replacement(EVICTION, "persist_failures=failures,", "persist_failures=failures, tries=F('tries') + 1,"),
        Replacement(
            SWEEPS,
            "if sandbox.tries >= settings.DESTROY_TRIES and not workspace.has_unsaved_state(sandbox):",
            "if sandbox.tries >= settings.DESTROY_TRIES:",
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
            '        raise Unavailable(f"{_describe_place(sandbox)}, which this process does not reach.")\n',
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
    # The fence and the budget are checked with the time at which the request began.
    "fence-at-start-of-request": [
        Replacement(EXECUTION, "guard=LeaseGuard(lease.pk, clock_from(now),", "guard=LeaseGuard(lease.pk, lambda: now,"),
    ],
}


def run_mutant(changes: Sequence[Replacement], *, seed: int, seeds: int, jobs: int) -> int:
    """Search the seeds in a mutated copy of the tree. Return 0 if a seed fails, else 1."""
    with tempfile.TemporaryDirectory(prefix="lh-simulation-") as temporary:
        tree = Path(temporary)
        copy_tree(tree)
        for change in changes:
            path = tree / change.path
            source = path.read_text() if path.is_file() else ""
            if source.count(change.before) != 1:
                print(f"{change.path} does not have this text once: {change.before!r}")
                return 2
            path.write_text(source.replace(change.before, change.after))
        numbers = ["--seed", str(seed), "--seeds", str(seeds), "--jobs", str(jobs)]
        with run_process([sys.executable, "-m", "tests.simulation", "--stop", *numbers], tree) as search:
            assert search.stdout
            for line in search.stdout:
                print(line, end="", flush=True)
            return int(search.wait() != 1)


__all__ = ["MUTANTS", "run_mutant"]
