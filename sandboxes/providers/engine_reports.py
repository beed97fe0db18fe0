"""Reports of an engine about itself: seal, set-up problems, quotas."""

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True)
class SealReport:
    """Result of a check that a sandbox reaches the gateway alone. `text` has a line for each destination that was tried."""

    sealed: bool
    text: str


@dataclass(frozen=True)
class SetupProblem:
    """Problem of an engine's configuration that an operator has to solve. `solution` may have several lines."""

    message: str
    solution: str
    prevents_starts: bool  # otherwise sandboxes start, and less works


class QuotaMeasure(StrEnum):
    """Property of sandboxes by which they use up a quota."""

    SANDBOXES = "sandboxes"  # their number
    MEMORY_MIB = "memory_mib"
    MILLICPUS = "millicpus"


@dataclass(frozen=True)
class EngineQuota:
    """Limit of the engine on one resource of all sandboxes together.

    The amounts are None if they cannot be compared with sandboxes: the texts of the engine are shown then."""

    name: str  # of the object that sets the limit
    resource: str  # as the engine calls it
    hard: str
    used: str  # empty: not counted yet
    hard_amount: int | None = None
    used_amount: int | None = None
    unit: str = ""  # of the amounts: "Mi" or "m" as in quantities of Kubernetes, empty for a number
    measure: QuotaMeasure = QuotaMeasure.SANDBOXES
    amount_per_measure: float = 1.0  # that a sandbox uses for each one of the measure
