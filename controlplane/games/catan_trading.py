"""Trades between players of Catan: offers, answers, counter-offers. catanatron has trades with the bank only.

A player may offer cards after the roll. Each player who has the wanted cards accepts, rejects or makes a counter-offer, and the
player confirms one answer or cancels. Lists of cards are always seen by the player whose turn it is: `gives` and `wants`."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from catanatron import Color, Game
from catanatron.models.actions import generate_playable_actions
from catanatron.models.enums import RESOURCES, ActionPrompt
from catanatron.state_functions import player_freqdeck_add, player_has_rolled, player_num_resource_cards

MAX_OFFERS_PER_TURN = 2
MIN_PARTNERS = 2  # between two players a gain of one is a loss of the other
TRADE_TYPES = frozenset({"OFFER_TRADE", "ACCEPT_TRADE", "REJECT_TRADE", "COUNTER_OFFER", "CONFIRM_TRADE", "CANCEL_TRADE"})

Encoded = dict[str, Any]  # action as agents see it: type and value
DecisionRequest = Callable[[Color, list[Encoded], "Trade"], Encoded]  # decision of a player about a trade


@dataclass
class Trade:
    """An offer of the player whose turn it is, and the answers to it."""

    player: Color
    gives: list[str]
    wants: list[str]
    answers: dict[Color, Encoded] = field(default_factory=dict)

    def encode(self) -> dict[str, Any]:
        answers = {color.value: answer for color, answer in self.answers.items()}
        return {"from": self.player.value, "gives": self.gives, "wants": self.wants, "answers": answers}


@dataclass
class OfferBook:
    """Offers of the current turn. A player cannot repeat an offer within a turn."""

    made: list[Any] = field(default_factory=list)

    @property
    def left(self) -> int:
        return MAX_OFFERS_PER_TURN - len(self.made)

    def list_offers(self, game: Game, color: Color) -> list[Encoded]:
        """Return the offers of one card for one card that the player may make now."""
        state = game.state
        if not self.left or state.current_prompt != ActionPrompt.PLAY_TURN or not player_has_rolled(state, color):
            return []
        others = [other for other in state.colors if other != color]
        if len(others) < MIN_PARTNERS or not any(player_num_resource_cards(state, other) for other in others):
            return []
        held = [kind for kind in RESOURCES if player_num_resource_cards(state, color, kind)]
        values = [[[given], [wanted]] for given in held for wanted in RESOURCES if wanted != given]
        return [_encode("OFFER_TRADE", value) for value in values if value not in self.made]


def negotiate(game: Game, color: Color, offer: Encoded, ask: DecisionRequest) -> Color | None:
    """Ask the other players, then the player, and move the cards. Return the partner, None without a trade."""
    gives, wants = offer["value"]
    trade = Trade(color, gives, wants)
    for other in _list_players_after(game, color):
        if _has_cards(game, other, wants):
            answer = ask(other, _list_answers(game, trade), trade)
            if answer["type"] != "REJECT_TRADE":
                trade.answers[other] = answer
    confirmations = {
        other: answer["value"] or [gives, wants]
        for other, answer in trade.answers.items()
        if _has_cards(game, color, (answer["value"] or [gives])[0])
    }
    if not confirmations:
        return None
    legal = [_encode("CONFIRM_TRADE", [other.value, *cards]) for other, cards in confirmations.items()]
    chosen = ask(color, [_encode("CANCEL_TRADE", None), *legal], trade)
    if chosen["type"] != "CONFIRM_TRADE":
        return None
    partner = Color(chosen["value"][0])
    _exchange(game, color, partner, *confirmations[partner])
    return partner


def _list_answers(game: Game, trade: Trade) -> list[Encoded]:
    """Return the answers to an offer: a counter-offer asks for one card more, or for another one."""
    others = [kind for kind in RESOURCES if kind not in (*trade.gives, *trade.wants)]
    counters = [[*trade.gives, *trade.gives], *([kind] for kind in others)]
    return [
        _encode("REJECT_TRADE", None),
        _encode("ACCEPT_TRADE", None),
        *(_encode("COUNTER_OFFER", [gives, trade.wants]) for gives in counters),
    ]


def _encode(kind: str, value: Any) -> Encoded:
    return {"type": kind, "value": value}


def _list_players_after(game: Game, color: Color) -> Sequence[Color]:
    colors = list(game.state.colors)
    start = colors.index(color)
    return [*colors[start + 1 :], *colors[:start]]


def _has_cards(game: Game, color: Color, cards: Sequence[str]) -> bool:
    return all(player_num_resource_cards(game.state, color, kind) >= count for kind, count in Counter(cards).items())


def _exchange(game: Game, player: Color, partner: Color, gives: Sequence[str], wants: Sequence[str]) -> None:
    given, wanted = Counter(gives), Counter(wants)
    change = [wanted[kind] - given[kind] for kind in RESOURCES]
    player_freqdeck_add(game.state, player, change)
    player_freqdeck_add(game.state, partner, [-count for count in change])
    game.state.playable_actions = generate_playable_actions(game.state)
