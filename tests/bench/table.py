"""Table of the measured operations with an aim: recorded by the parts, printed at the end of a run."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

RESULTS_VARIABLE = "BENCH_RESULTS"  # path of the file to which the parts append their rows
HEADER = ("operation", "database", "p50 ms", "p95 ms", "CPU ms", "raw p50", "raw p95", "aim", "reached", "")


class Measured(Protocol):
    """Percentiles in seconds, calls per second, CPU time of one call in microseconds."""

    @property
    def p50(self) -> float: ...
    @property
    def p95(self) -> float: ...
    @property
    def rate(self) -> float: ...
    @property
    def cpu_us(self) -> float: ...


@dataclass(frozen=True)
class Aim:
    """Aim of one operation. A `ratio` is to the raw operation; all limits are maxima, except those of the rate.

    The maximum of p50 in milliseconds may be negative for a difference of two operations. None: no limit."""

    operation: str
    p50_ratio: float | None = None
    p95_ratio: float | None = None
    rate_ratio: float | None = None
    p50_ms: float | None = None
    rate: float | None = None

    def evaluate(self, case: Measured, raw: Measured) -> tuple[str, str, bool]:
        """Return the aim and the reached value as texts, and whether the aim is reached."""
        limits = [
            (self.p50_ratio, case.p50 / raw.p50, "{:.2f}x p50", False),
            (self.p95_ratio, case.p95 / raw.p95, "{:.2f}x p95", False),
            (self.rate_ratio, case.rate / raw.rate, "{:.2f}x rate", True),
            (self.p50_ms, 1e3 * case.p50, "{:.1f} ms", False),
            (self.rate, case.rate, "{:.0f}/s", True),
        ]
        stated = [(limit, reached, text, is_minimum) for limit, reached, text, is_minimum in limits if limit is not None]
        aims = [f"{'≥' if is_minimum else '≤'} {text.format(limit)}" for limit, _, text, is_minimum in stated]
        met = all((reached >= limit) if is_minimum else (reached <= limit) for limit, reached, _, is_minimum in stated)
        return ", ".join(aims), ", ".join(text.format(reached) for _, reached, text, _ in stated), met


@dataclass(frozen=True)
class Row:
    """One line of the table. Durations are in milliseconds; `met` is None if the aim is not evaluated."""

    operation: str
    database: str
    p50: float
    p95: float
    cpu: float
    raw_p50: float
    raw_p95: float
    aim: str
    reached: str
    met: bool | None


def record(operation: str, database: str, case: Measured, raw: Measured, *, aim: Aim | str, reached: str = "") -> None:
    """Append one row to the results of the run, if it collects results. An aim in words is printed and not evaluated.

    `reached` replaces the ratios that are printed for an aim in words."""
    path = os.environ.get(RESULTS_VARIABLE)
    if not path:
        return
    aim_text, met = str(aim), None
    if isinstance(aim, Aim):
        aim_text, reached, met = aim.evaluate(case, raw)
    elif not reached:
        reached = f"{case.p50 / raw.p50:.2f}x p50, {case.rate / raw.rate:.2f}x rate"
    durations = [1e3 * seconds for seconds in (case.p50, case.p95, case.cpu_us / 1e6, raw.p50, raw.p95)]
    with Path(path).open("a") as file:
        file.write(json.dumps(asdict(Row(operation, database, *durations, aim_text, reached, met))) + "\n")


def read_rows(path: Path) -> list[Row]:
    return [Row(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def format_table(rows: Sequence[Row]) -> str:
    """Return the rows as an aligned table, the databases of an operation one below the other."""
    order = {operation: index for index, operation in enumerate(dict.fromkeys(row.operation for row in rows))}
    verdicts = {True: "ok", False: "MISSED", None: ""}
    lines = [HEADER] + [
        (
            row.operation, row.database, f"{row.p50:.2f}", f"{row.p95:.2f}", f"{row.cpu:.2f}" if row.cpu else "-",
            f"{row.raw_p50:.2f}", f"{row.raw_p95:.2f}", row.aim, row.reached, verdicts[row.met],
        )
        for row in sorted(rows, key=lambda row: order[row.operation])
    ]  # fmt: skip
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    numbers = range(2, 7)
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
