"""Game hosts of `manage.py demo`. Each uses the control plane only through the HTTP API, as any environment does.

The module of a game has:

    CONDITION                                            condition that ends the leases of all players
    create_player(number, did, client) -> Player         player at this position of the order of play
    run_demo(players, environment, host, options, print_line) -> str
                                                         play to the end; returns the outcome as one sentence
"""

import importlib
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True)
class Game:
    """A game of the registry. `extra` is the optional extra with its engine."""

    module: str
    extra: str
    engine: str
    agents: int  # players if the command line names no number
    max_agents: int = 4

    def load(self) -> ModuleType:
        """Import the module of the game. Raise ImportError without its engine."""
        return importlib.import_module(self.module)


@dataclass(frozen=True)
class DemoOptions:
    """Options of the command line that concern a game."""

    points: int = 7
    seed: int | None = None


GAMES = {
    "catan": Game("controlplane.games.catan", "demo", "catanatron", agents=2),
    "coding": Game("controlplane.games.coding", "demo", "git", agents=1, max_agents=1),
    "rpg": Game("controlplane.games.rpg.campaign", "rpg", "textworld", agents=3),
}
