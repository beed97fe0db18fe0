"""Speed of the machine during a run, by which budgets of CPU seconds are scaled.

The same test takes up to twice the CPU seconds on a machine whose cores are shared with other work, because the cores' caches,
execution units and clock rates are shared, too."""

import hashlib
import statistics
import time

# CPU seconds of one sample on the idle machine of two cores of which the budgets in table.py are stated.
# `python -m tests.lanes.speed` prints that of this machine.
REFERENCE_SECONDS = 0.020
SAMPLES_AT_ONCE = 3


class Speedometer:
    """Samples of a fixed piece of work, taken while the tests run."""

    def __init__(self) -> None:
        self._samples: list[float] = []

    def sample(self) -> None:
        self._samples += [measure_work() for _ in range(SAMPLES_AT_ONCE)]

    @property
    def slowdown(self) -> float:
        """CPU seconds here per CPU second of the reference machine. At least 1: a faster machine has the same budgets."""
        return max(1.0, self.mean / REFERENCE_SECONDS) if self._samples else 1.0

    @property
    def mean(self) -> float:
        """The mean CPU seconds of a sample. Other processes interrupt a sample as often as a test, and empty the caches."""
        return statistics.mean(self._samples)


def measure_work() -> float:
    """CPU seconds of a fixed mixture of what tests do: allocation, dictionaries, strings and a hash."""
    begun = time.process_time()
    rows = [{"number": number, "text": f"{number:06}"} for number in range(50_000)]
    by_text = {row["text"]: row for row in rows}
    digest = hashlib.sha256("".join(sorted(by_text)).encode())
    assert len(digest.hexdigest()) == 64
    return time.process_time() - begun


if __name__ == "__main__":
    speedometer = Speedometer()
    for _ in range(50):
        speedometer.sample()
    print(f"{speedometer.mean:.4f} s")
