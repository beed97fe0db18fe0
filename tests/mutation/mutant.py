"""Mutant: a small defect, and the tests that are expected to detect the defect."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One defect: the text `before`, which occurs once in the file `path`, becomes `after`.

    `tests` are pytest node ids or files."""

    name: str
    path: str
    before: str
    after: str
    tests: Sequence[str]
