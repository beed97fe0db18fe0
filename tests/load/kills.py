"""Random kills: a victim at each interval, chosen by a seed."""

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from tests.load.client import Attempt
from tests.load.system import System

SWEEP_TOLERANCE_SECONDS = 1.0
RECOVERY_KINDS = {
    "egress": ("model",),
    "engine": ("write", "read", "model"),
    "sandbox": ("write", "read"),
}  # requests that need this victim


@dataclass(frozen=True)
class Kill:
    """One kill. `at` is of the monotonic clock."""

    victim: str
    at: float
    wall: float
    detail: str


@dataclass
class Killer:
    """Kills one victim at each interval. Runs in the main thread, because the engine dies with the thread that starts it."""

    system: System
    seed: int
    interval: float
    victims: Sequence[str]
    kills: list[Kill] = field(default_factory=list)
    supervisor_deaths: int = 0

    def run(self, seconds: float, interrupted: threading.Event) -> None:
        """Kill for `seconds`. Restart `manage.py up` if it has ended, and count its deaths."""
        chooser, began = random.Random(self.seed), time.monotonic()
        next_at = began + self.interval
        while time.monotonic() < began + seconds and not interrupted.is_set():
            if not self.system.is_supervised():
                self.supervisor_deaths += 1
                self.system.home.up()
            if time.monotonic() >= next_at:
                next_at += self.interval
                self._kill(chooser)
            time.sleep(0.2)

    def _kill(self, chooser: random.Random) -> None:
        victim = chooser.choice(self.victims)
        details = random.Random(chooser.getrandbits(64))  # so that the next choice does not depend on this kill
        at, wall = time.monotonic(), time.time()
        detail = self.system.victims[victim](details)
        self.kills.append(Kill(victim, at, wall, detail))
        print(f"{time.strftime('%H:%M:%S', time.gmtime(wall))} killed {victim}: {detail}", flush=True)


def measure_recovery(kill: Kill, attempts: list[Attempt], sweeps: list[tuple[float, float]]) -> float | None:
    """Return the seconds from a kill to the first success of a request that began after it, or of a sweep for the worker."""
    if kill.victim == "worker":
        newer = [at for at, newest in sweeps if newest > kill.wall + SWEEP_TOLERANCE_SECONDS]
        return min(newer) - kill.at if newer else None
    kinds = RECOVERY_KINDS.get(kill.victim)
    ended = [
        attempt.ended_at
        for attempt in attempts
        if attempt.started_at >= kill.at and 200 <= attempt.status < 300 and (not kinds or attempt.kind in kinds)
    ]
    return min(ended) - kill.at if ended else None


def summarize_kills(kills: list[Kill], attempts: list[Attempt], sweeps: list[tuple[float, float]]) -> list[str]:
    """One line a victim: number of kills, recovery time as median and maximum."""
    lines = []
    for victim in sorted({kill.victim for kill in kills}):
        own = [kill for kill in kills if kill.victim == victim]
        times = [time for kill in own if (time := measure_recovery(kill, attempts, sweeps)) is not None]
        recovery = (
            f"first success after {median(times):5.1f} s (median), {max(times):5.1f} s (maximum)" if times else "no success"
        )
        lines.append(f"{victim:10} {len(own):4} kills   {recovery}")
    return lines
