"""Sizes and weights of one history, drawn from the seed."""

from datetime import timedelta
from random import Random

from tests.support.suites import TEST_PROVIDER

ENVIRONMENT_TYPE = "catan"
MAX_VENDOR_OPERATIONS = 100  # of a history on a vendor's emulator, which executes for real: about a minute
HTTP_WEIGHTS = {"exec": 10, "join": 3, "put": 3, "get": 3, "turn": 3, "process": 1, "one_shot": 2, "release": 1, "fork": 1}


class Options:
    """Sizes and weights of one history. With a `length` it has that many operations, and few leases that sleep often."""

    def __init__(self, random: Random, length: int = 0) -> None:
        self.pool, self.environment_type = "simulated", ENVIRONMENT_TYPE
        self.agents = [f"did:plc:{name}" for name in "abcd"[: random.randint(1, 4)]]
        self.environments = random.choice((1, 1, 2))
        seats = len(self.agents) * self.environments
        self.capacity = random.choice((1, 2, 3, max(1, seats - 1), seats, seats + 2))
        self.slots = random.choice((1, 2, 4, 40))
        self.warm_target = random.choice((0, 0, 0, 1))
        self.guaranteed = random.choice((0, 0, 1))
        self.ttl = timedelta(seconds=random.choice((90, 600, 3600, 4 * 3600, 12 * 3600)))
        self.sleep_after = timedelta(seconds=random.choice((5, 60, 300, 1800)))
        self.data_share = random.choice((0.0, 0.3, 1.0))
        self.seconds = random.choice(((0.0,), (0.0, 1.0, 10.0), (0.0, 20.0, 200.0), (0.0, 0.0, 5.0, 700.0)))
        self.intervals = random.choice(((1.0, 10.0, 70.0), (61.0, 301.0), (70.0, 400.0, 1900.0), (5.0, 61.0, 700.0, 8000.0)))
        self.concurrency = random.choice((1, 2, 3, 6))
        self.operations = random.choice((60, 100, 150, 150, 150, 200, 300, 600))
        self.destroy_tries = random.choice((1, 2, 4, 8))
        self.budget_hours = random.choice((None, None, 0.2, 1.0))
        self.hosts = random.choice((1, 2))
        self.drifts = random.random() < 0.3
        self.takeover = random.random() < 0.7  # a restart takes over the claims of the process that died
        self.sweep_weights = {"idle": 8, "stalled": 4, "reclaim": 4, "expire": 3, "reconcile": 2, "cold": 2, "prune": 2}
        self.weights = {"exec": 30, "sweep": 25, "pass_time": 12, "task": 6}
        self.http_weights = {**HTTP_WEIGHTS}
        for name, weight in {"release": 2, "condition": 1, "snapshot": 3, "restore": 5, "fork": 2, "operator": 1,
                             "vanish": 1, "outage": 1, "host_loss": 3, "http": 30, "queued_run": 12,
                             "agent_run": 8}.items():  # fmt: skip
            if random.random() < 0.5:
                self.weights[name] = weight
        if TEST_PROVIDER != "memory":
            self.weights.pop("agent_run", None)  # the emulators' sandboxes execute for real, and print in real time
        self.has_agent_runs = "agent_run" in self.weights
        if "queued_run" in self.weights:
            self.weights |= {"runner": 5}
        if "queued_run" in self.weights or self.has_agent_runs:
            self.weights |= {"interrupt": 2}
        self.runner_threads = random.choice((1, 2, 4))
        self.suspend_after = random.choice((None, timedelta(seconds=1), timedelta(seconds=30)))
        if self.suspend_after:
            self.sweep_weights["suspend"] = 6
        if random.random() < 0.4:
            self.weights["clock"] = 2
        if TEST_PROVIDER != "memory":
            self.operations = min(self.operations, MAX_VENDOR_OPERATIONS)
        if length:
            self._lengthen(length)

    def _lengthen(self, length: int) -> None:
        self.operations, self.agents, self.environments = length, self.agents[:1], 1
        self.ttl, self.sleep_after, self.budget_hours = timedelta(days=30), timedelta(seconds=5), None
        self.intervals, self.seconds = (61.0, 301.0), (0.0, 1.0, 10.0)
        for name in ("release", "condition", "operator", "vanish", "host_loss"):  # each may end a lease
            self.weights.pop(name, None)
        del self.http_weights["release"]
        self.weights |= {"exec": 20, "nap": 20, "pass_time": 5}
        self.weights |= {name: 8 for name in ("http", "queued_run", "agent_run") if name in self.weights}
