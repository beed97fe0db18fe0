"""One run of the load: start the system, drive agents and kills, wait until quiet, check, report."""

import json
import random
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.load import checks, weather
from tests.load.agents import Agent
from tests.load.client import AttemptLog, Client
from tests.load.kills import Killer, summarize_kills
from tests.load.ledger import Findings
from tests.load.observer import Observer
from tests.load.system import System, run_system
from tests.support.servers.receiver import WebhookReceiver

BUDGET_SHARE = 0.2  # of the run's time, as the budget in hours of the first agent
RAISED_BUDGET_HOURS = 1000
MAX_LISTED_FAULTS = 10
EVENT = "lease.ended"  # to which the receivers of webhooks subscribe
BILLED_TOLERANCE = 1.05  # billed time to the time in which containers existed, listed once a second


@dataclass(frozen=True)
class Plan:
    """Parameters of a run."""

    minutes: float
    kill_every: float  # seconds
    agents: int
    seed: int
    live_restore: bool
    victims: Sequence[str]
    keep: bool  # do not remove the directory with logs


def run_load(plan: Plan) -> int:
    """Run the load and print its figures. Return the exit code: 1 if a promise was broken."""
    directory = Path(tempfile.mkdtemp(prefix="lh-load-"))
    directory.chmod(0o755)  # PostgreSQL runs as another user
    interrupted = threading.Event()

    def interrupt(number: int, frame: object) -> None:
        """End the load with its checks at the first signal, and at once at the second."""
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)
    print(f"seed {plan.seed}, {plan.agents} agents, {plan.minutes:g} minutes, a kill every {plan.kill_every:g} s, {directory}")
    try:
        with run_system(directory, live_restore=plan.live_restore) as system, weather.run_receivers() as receivers:
            for receiver in receivers:
                system.manage("webhooks", "add", receiver.url, "--internal", "--kind", EVENT)
            return _drive(system, plan, interrupted, receivers)
    finally:
        if plan.keep:
            print(f"logs: {directory}")
        else:
            shutil.rmtree(directory)


def _drive(system: System, plan: Plan, interrupted: threading.Event, receivers: tuple[WebhookReceiver, WebhookReceiver]) -> int:
    findings, log, stop = Findings(), AttemptLog(), threading.Event()
    agents = _create_agents(system, plan, findings, log, stop)
    hours = f"{plan.minutes / 60 * BUDGET_SHARE:.4f}"
    budget = system.manage("budget", "add", hours, "hours", "ever", "--agent", agents[0].did, "--grace", "10s")
    print(budget.strip())
    observer, killer = Observer(system), Killer(system, plan.seed, plan.kill_every, plan.victims)
    threads = [threading.Thread(target=act, daemon=True) for act in (observer.run, *(agent.run for agent in agents))]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    killer.run(plan.minutes * 60, interrupted)
    system.manage(
        "budget", "set", str(system.select("SELECT id FROM billing_budget")[0][0]), "--amount", str(RAISED_BUDGET_HOURS)
    )
    stop.set()
    duration = time.monotonic() - began
    for thread in threads[1:]:
        thread.join()
    quiet_after, sweep_failures = checks.wait_until_quiet(system)
    observer.stop()
    threads[0].join()
    faults = findings.failures | checks.find_faults(system) | {"sweeps that fail at the end": sweep_failures}
    billed = checks.read_billed_seconds(system)
    is_too_much = billed > observer.existing_seconds * BILLED_TOLERANCE
    faults["time billed without a container"] = [f"{billed:.0f} s"] if is_too_much else []
    faults |= checks.find_delivery_faults(system, *receivers)
    faults["supervisor died"] = ["manage.py up ended"] * killer.supervisor_deaths
    _print_figures(system, findings, log, killer, observer, duration, quiet_after)
    return _print_faults(faults)


def _create_agents(system: System, plan: Plan, findings: Findings, log: AttemptLog, stop: threading.Event) -> list[Agent]:
    dids = [option for number in range(plan.agents) for option in ("--agent", f"did:web:agent{number}.example")]
    key = json.loads(system.manage("create_key", "--json", *dids))["key"]
    return [
        Agent(number, Client(system.home.port, key, log, random.Random(f"{plan.seed} {number}")), findings, stop)
        for number in range(plan.agents)
    ]


def _print_figures(
    system: System, findings: Findings, log: AttemptLog, killer: Killer, observer: Observer, duration: float, quiet_after: float
) -> None:
    print(f"\nload for {duration:.0f} s, quiet {quiet_after:.0f} s after the last request")
    print("\n".join(summarize_kills(killer.kills, log.attempts, observer.sweeps)))
    statuses = Counter(f"{each.status} {each.code}".strip() if each.status else "no answer" for each in log.attempts)
    print(f"\n{len(log.attempts)} requests, {len(log.attempts) / duration:.1f} a second")
    _print_counts(statuses)
    print()
    _print_counts(findings.counts)
    print()
    _print_counts(dict(system.select("SELECT 'leases ended: ' || end_reason, count(*) FROM leases_lease GROUP BY 1")))
    _print_counts(dict(system.select("SELECT 'runs ' || outcome, count(*) FROM sandboxes_run GROUP BY 1")))
    _print_counts(dict(system.select("SELECT 'model calls ' || outcome, count(*) FROM sandboxes_llmcall GROUP BY 1")))
    _print_counts(dict(system.select("SELECT 'transitions ' || code, count(*) FROM sandboxes_transition GROUP BY 1")))
    billed, running, existing = checks.read_billed_seconds(system), observer.running_seconds, observer.existing_seconds
    print(f"billed {billed:.0f} s of sandbox time; containers ran for {running:.0f} s and existed for {existing:.0f} s")


def _print_counts(counts: Mapping[str, int]) -> None:
    for name, number in sorted(counts.items(), key=lambda item: -item[1]):
        print(f"{number:8}  {name}")


def _print_faults(faults: Mapping[str, list[str]]) -> int:
    print()
    for name, found in faults.items():
        print(f"{len(found):8}  {name}")
        for line in found[:MAX_LISTED_FAULTS]:
            print(f"{'':10}{line[:400]}")
    return 1 if any(faults.values()) else 0
