"""Faults of one history: which kinds occur at all, and how often. Drawn from the seed."""

from dataclasses import dataclass, field
from random import Random

# Seconds that a slow call takes. The longest exceed every fixed deadline of the product.
SLOW_SECONDS = (2.0, 15.0, 45.0, 100.0, 240.0, 400.0, 900.0)
MAX_CHUNK_SECONDS = 60.0  # between two chunks of a slow transfer
MAX_RATES = {
    "switch": 0.5,
    "kill": 0.002,
    "kill at checkpoint": 0.1,  # between two steps of a transition
    "provider before": 0.03,  # the call fails without effect
    "provider after": 0.03,  # the call takes effect, and its answer is lost
    "provider slow": 0.02,
    "provider late": 0.02,  # the answer takes long
    "store before": 0.2,
    "store after": 0.05,
    "store slow": 0.05,
    "store late": 0.05,
    "provider transfer": 0.2,  # a transfer that takes minutes, and makes progress
    "store transfer": 0.2,
    "commit before": 0.004,
    "commit after": 0.004,
    "statement": 0.002,
    "task repeated": 0.5,  # the worker does not acknowledge a task that it has executed
    "answer lost": 0.3,  # of the HTTP API
    "late start": 0.3,  # of the command of an agent run, after its row was written
    "end unrecorded": 0.2,  # the database does not respond after an attempt of a queued run, for longer than a usual failover
    "runner kill": 0.4,  # of the process of an attempt, within half a minute of its start
    "pause": 0.002,  # of the whole actor, at any point
}


@dataclass
class Faults:
    """Rates by kind, per point at which the fault may occur. Kinds without a rate do not occur in this history."""

    rates: dict[str, float] = field(default_factory=dict)
    enabled: bool = True

    def occurs(self, kind: str, random: Random) -> bool:
        rate = self.rates.get(kind, 0.0) if self.enabled else 0.0
        return rate > 0 and random.random() < rate


def draw_faults(random: Random) -> Faults:
    """Draw the rates of one history. Each history has few kinds of faults, so that they do not hide each other."""
    density = random.choice((0.15, 0.4, 0.7))
    rates = {kind: limit * 10 ** random.uniform(-1, 0) for kind, limit in MAX_RATES.items() if random.random() < density}
    rates["switch"] = MAX_RATES["switch"] * 10 ** random.uniform(-1.5, 0)
    return Faults(rates)
