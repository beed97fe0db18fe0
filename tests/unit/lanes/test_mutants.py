"""Snippets of the mutation tests, which a change of the code can leave behind."""

from collections import Counter
from pathlib import Path

import pytest

from tests.mutation.mutant import Mutant
from tests.mutation.mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_snippet_of_a_mutant_occurs_once(mutant: Mutant) -> None:
    assert (ROOT / mutant.path).read_text().count(mutant.before) == 1


def test_names_of_mutants_are_unique() -> None:
    assert [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1] == []
