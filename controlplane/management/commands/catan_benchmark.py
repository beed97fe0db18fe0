"""manage.py catan_benchmark: measure the heuristic of the Catan skill against a player of catanatron."""

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError


class Command(BaseCommand):
    help = "Play the heuristic of the Catan skill against a random player, in this process and without sandboxes."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--games", type=int, default=50)
        parser.add_argument("--opponent", choices=["random", "weighted"], default="random")
        parser.add_argument("--points", type=int, default=10, help="victory points that win a game")
        parser.add_argument("--seed", type=int, default=1, help="seed of the first board; each board is played from both seats")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            from controlplane.games import catan_benchmark
        except ImportError:
            raise CommandError('The benchmark needs catanatron: pip install "leasehold[demo]".') from None
        games = options["games"]
        if games < 1:
            raise CommandError("--games must be at least 1.")
        result = catan_benchmark.run_games(games, options["opponent"], points=options["points"], seed=options["seed"])
        self.stdout.write(
            f"heuristic against {options['opponent']}: {result.wins} of {games} games won ({result.wins / games:.0%}), "
            f"{result.draws} without a winner"
        )
