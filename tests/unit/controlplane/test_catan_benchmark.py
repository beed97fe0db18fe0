"""Strength of the Catan heuristic. Boards, dice and the order of legal actions follow the seed: the results repeat."""

import pytest

from controlplane.games.catan_benchmark import run_games


@pytest.mark.parametrize("opponent", ["random", "weighted"])
def test_heuristic_beats_the_random_players(opponent: str) -> None:
    result = run_games(4, opponent, points=6, seed=1)
    assert (result.wins, result.draws) == (4, 0)


def test_same_seed_repeats_the_result() -> None:
    assert run_games(2, "weighted", points=4, seed=5) == run_games(2, "weighted", points=4, seed=5)
