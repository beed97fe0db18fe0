"""Lines that an agent has written, and the comparison with what it reads."""

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Ledger:
    """Expected lines of one file: acknowledged ones must be present, those without a known outcome may be."""

    acknowledged: set[str] = field(default_factory=set)
    uncertain: set[str] = field(default_factory=set)

    def copy(self) -> "Ledger":
        return Ledger(set(self.acknowledged), set(self.uncertain))


@dataclass
class Findings:
    """Broken promises, and counts of events, of all agents."""

    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, name: str, number: int = 1) -> None:
        with self.lock:
            self.counts[name] += number

    def compare(self, place: str, ledger: Ledger, content: str) -> None:
        """Compare the lines of a file with its ledger."""
        lines = Counter(content.split())
        with self.lock:
            self.counts["reads verified"] += 1
            self.lost += _describe(place, "lost", ledger.acknowledged - lines.keys())
            self.doubled += _describe(place, "doubled", (line for line, number in lines.items() if number > 1))
            self.foreign += _describe(place, "foreign", lines.keys() - ledger.acknowledged - ledger.uncertain)

    @property
    def failures(self) -> dict[str, list[str]]:
        return {
            "acknowledged writes lost": sorted({*self.lost}),
            "commands executed twice": sorted({*self.doubled}),
            "lines of others": sorted({*self.foreign}),
            "requests stuck": self.stuck,
            "unexpected answers": self.unexpected,
        }


def _describe(place: str, fault: str, lines: Iterable[str]) -> list[str]:
    return [f"{place}: {line} {fault}" for line in sorted(lines)]
