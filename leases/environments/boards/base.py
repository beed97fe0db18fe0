"""Types of a rendered board."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class UnreadableState(Exception):
    """The state does not have the format of its environment type."""


@dataclass(frozen=True)
class Player:
    """Player as the console shows one: a name, a colour and some numbers."""

    name: str
    colour: str  # CSS colour from a constant of the renderer, never from a state
    facts: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Board:
    """Drawing of a state. `svg` is serialized by xml.etree, which escapes all text."""

    svg: str
    caption: str
    players: Sequence[Player] = ()


class BoardRenderer(Protocol):
    """Module that draws the states of one environment type."""

    def draw(self, state: Mapping[str, Any], action: Mapping[str, Any]) -> Board:
        """Draw a state and mark the place of the action. Raise UnreadableState."""

    def find_player(self, state: Mapping[str, Any]) -> Player | None:
        """Return the player whose turn a state is for, without numbers."""

    def describe_action(self, action: Mapping[str, Any]) -> str:
        """Describe an action in words; empty if it is unknown."""
