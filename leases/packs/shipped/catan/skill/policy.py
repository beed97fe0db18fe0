"""Heuristic policy for Catan: ranks the legal actions of a state. Deterministic: ties are broken by a hash of the state."""

import hashlib
import json
from collections import Counter
from typing import Any

from .analysis import COSTS, RESOURCES, Analysis, describe_state
from .tools import MAX_RANKED
from .tools import TOOLS as TOOLS_OF_STATES

__all__ = ["TOOLS", "choose_action", "describe_state", "rank_actions"]

WEIGHTS = {"WOOD": 1.0, "BRICK": 1.0, "SHEEP": 0.8, "WHEAT": 1.2, "ORE": 1.1}
NEW_RESOURCE_BONUS = 2.0
MIN_ROAD_TARGET_VALUE = 3.0
MAX_ROAD_DISTANCE = 3
MAX_SETTLEMENTS = 5
MAX_CITIES = 4
EMBARGO_POINTS = 6  # a leader with as many points gets no trade

Action = dict[str, Any]


def choose_action(state: dict[str, Any]) -> Action | None:
    """Return the best of the state's legal actions, None if there is none."""
    ranked = rank_actions(state)
    return ranked[0] if ranked else None


def rank_actions(state: dict[str, Any]) -> list[Action]:
    """Return the legal actions, best first. The order of `legal_actions` has no effect."""
    scorer = _Scorer(state)
    seed = hashlib.sha256(json.dumps({**state, "legal_actions": []}, sort_keys=True).encode()).digest()

    def key(action: Action) -> tuple[float, bytes]:
        text = json.dumps([action.get("type"), action.get("value")])
        return -round(scorer.score(action), 6), hashlib.sha256(seed + text.encode()).digest()

    return sorted(state["legal_actions"], key=key)


def suggest_actions(state: dict[str, Any]) -> list[Action]:
    """Return the legal actions that the heuristic prefers, best first."""
    return rank_actions(state)[:MAX_RANKED]


TOOLS: dict[str, dict[str, Any]] = {
    **TOOLS_OF_STATES,
    "suggest_actions": {
        "call": suggest_actions,
        "schema": {
            "description": f"The {MAX_RANKED} legal actions that a heuristic prefers, best first.",
            "parameters": {"type": "object", "properties": {}},
        },
    },
}


class _Scorer:
    """Scores of actions. END_TURN has 0: an action below 0 is worse than to end the turn."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state, self.seen = state, Analysis(state)
        self.you = self.seen.you
        self.places = self.seen.reachable_nodes(self.you)
        self.goals = self._list_goals()

    def score(self, action: Action) -> float:
        method = getattr(self, f"_score_{str(action.get('type')).lower()}", None)
        return float(method(action.get("value"))) if method else 1.0

    def _list_goals(self) -> list[str]:
        """Return the builds that have a place, best first."""
        buildings = self.seen.players[self.you]["buildings"]
        goals = []
        if buildings["SETTLEMENT"] and len(buildings["CITY"]) < MAX_CITIES:
            goals.append("CITY")
        if self.places and len(buildings["SETTLEMENT"]) < MAX_SETTLEMENTS:
            goals.append("SETTLEMENT")
        elif len(buildings["SETTLEMENT"]) < MAX_SETTLEMENTS:
            goals.append("ROAD")
        return [*goals, "DEVELOPMENT_CARD"]

    def _node_value(self, node: int) -> float:
        own = self.seen.production[self.you]
        pips = self.seen.node_production(node)
        value = sum(WEIGHTS[kind] * n for kind, n in pips.items())
        return value + NEW_RESOURCE_BONUS * sum(not own[kind] for kind in pips) + self.seen.port_value(node)

    def _score_build_city(self, node: int) -> float:
        return 1000 + self._node_value(node)

    def _score_build_settlement(self, node: int) -> float:
        return 900 + self._node_value(node)

    def _score_buy_development_card(self, _: None) -> float:
        return 300 if not self._delays_goal(COSTS["DEVELOPMENT_CARD"]) else -1

    def _score_build_road(self, edge: list[int]) -> float:
        value = self._road_value(edge)
        if self.state["phase"] in ("SETUP", "ROAD_BUILDING"):
            return 100 + value
        if self.places or value < MIN_ROAD_TARGET_VALUE or "ROAD" not in self.goals:
            return -1
        return 400 + value

    def _road_value(self, edge: list[int]) -> float:
        """Return the value of the best free node that the road leads to, less for each further road."""
        ends = {node for road, owner in self.seen.roads.items() if owner == self.you for node in road}
        ends |= {node for node, (owner, _) in self.seen.buildings.items() if owner == self.you}
        frontier, seen, best = {node for node in edge if node not in ends}, set(ends), 0.0
        for distance in range(MAX_ROAD_DISTANCE):
            free = [self._node_value(node) for node in frontier if self.seen.is_free(node)]
            best = max([best, *(value / (1 + 0.5 * distance) for value in free)])
            seen |= frontier
            open_nodes = {node for node in frontier if self.seen.buildings.get(node, (self.you, 0))[0] == self.you}
            frontier = {
                other
                for node in open_nodes
                for other in self.seen.neighbors[node] - seen
                if (min(node, other), max(node, other)) not in self.seen.roads
            }
        return best

    def _delays_goal(self, spent: dict[str, int]) -> bool:
        """Return whether these cards are needed for a city or settlement that lacks at most one card."""
        rest = {kind: n - spent.get(kind, 0) for kind, n in self.seen.hand.items()}
        return any(
            sum(self.seen.missing(goal).values()) <= 1
            and sum(self.seen.missing(goal, rest).values()) > sum(self.seen.missing(goal).values())
            for goal in self.goals
            if goal in ("CITY", "SETTLEMENT")
        )

    def _score_maritime_trade(self, value: list[str | None]) -> float:
        """Score a trade by the goal that it completes or brings closer without loss."""
        given, asked = Counter(kind for kind in value[:-1] if kind), str(value[-1])
        hand = {kind: n - given[kind] + (kind == asked) for kind, n in self.seen.hand.items()}
        for rank, goal in enumerate(self.goals):
            before = sum(self.seen.missing(goal).values())
            after = sum(self.seen.missing(goal, hand).values())
            if not before:
                return -1
            if not after:
                return 800 - 100 * rank
            if after < before and (rank == 0 or sum(self.seen.hand.values()) > 7):
                return 200 - 10 * rank - after
        return -1

    def _score_offer_trade(self, value: list[list[str]]) -> float:
        """Score an offer by the goal that it completes. Cheaper than the bank, so it is tried first."""
        gives, wants = value
        for rank, goal in enumerate(self.goals):
            if not self.seen.missing(goal):
                return -1
            if not self.seen.missing(goal, self._hand_after(gives, wants)):
                return 850 - 100 * rank
        return -1

    def _score_accept_trade(self, _: None) -> float:
        trade = self.state["trade"]
        gain = self._is_gain(trade["wants"], trade["gives"]) and not self._is_embargoed(trade["from"])
        return 100 if gain else -1

    def _score_counter_offer(self, value: list[list[str]]) -> float:
        gives, wants = value
        gain = self._is_gain(wants, gives) and not self._is_embargoed(self.state["trade"]["from"])
        return 50 - len(gives) if gain else -1

    def _score_confirm_trade(self, value: list[Any]) -> float:
        partner, gives, wants = value
        useful = self._score_offer_trade([gives, wants]) > 0 or self._is_gain(gives, wants)
        gain = useful and not self._is_embargoed(partner)
        return 500 - 10 * self.seen.players[partner]["points"] - len(gives) if gain else -1

    def _score_reject_trade(self, _: None) -> float:
        return 0

    def _score_cancel_trade(self, _: None) -> float:
        return 0

    def _is_embargoed(self, partner: str) -> bool:
        """Return whether the partner leads and is close to the victory."""
        points = {color: player["points"] for color, player in self.seen.players.items()}
        return points[partner] >= max(EMBARGO_POINTS, *points.values())

    def _is_gain(self, given: list[str], received: list[str]) -> bool:
        """Return whether an exchange brings the best goal closer."""
        before, after = self.seen.missing(self.goals[0]), self.seen.missing(self.goals[0], self._hand_after(given, received))
        return sum(after.values()) < sum(before.values())

    def _hand_after(self, given: list[str], received: list[str]) -> dict[str, int]:
        change = Counter(received)
        change.subtract(given)
        return {kind: n + change[kind] for kind, n in self.seen.hand.items()}

    def _score_move_robber(self, value: list[Any]) -> float:
        coordinate, victim = value[0], value[1]
        tile = next(row["id"] for row in self.seen.tiles.values() if row["coordinate"] == coordinate)
        leader = self.seen.leader()
        harm = sum(
            self.seen.robber_exposure(tile, color) * (2 if color == leader else 1)
            for color in self.seen.players
            if color != self.you
        )
        steal = (1.5 if victim == leader else 1.0) if victim else 0.0
        return 100 + harm + steal - 4 * self.seen.robber_exposure(tile, self.you)

    def _score_roll(self, _: None) -> float:
        return 100

    def _score_play_knight_card(self, _: None) -> float:
        if self.state["phase"] == "BEFORE_ROLL":
            return 200 if self.seen.robber_exposure(self.seen.robber, self.you) else 50
        return 250

    def _score_play_road_building(self, _: None) -> float:
        return 350

    def _score_play_monopoly(self, kind: str) -> float:
        others = sum(pips[kind] for color, pips in self.seen.production.items() if color != self.you)
        needed = sum(self.seen.missing(goal).get(kind, 0) for goal in self.goals)
        return 500 + others + 3 * needed

    def _score_play_year_of_plenty(self, kinds: list[str]) -> float:
        taken = Counter(kinds)
        hand = {kind: n + taken[kind] for kind, n in self.seen.hand.items()}
        for rank, goal in enumerate(self.goals):
            if self.seen.missing(goal) and not self.seen.missing(goal, hand):
                return 850 - 10 * rank
        return 10 - sum(self.seen.missing(self.goals[0], hand).values())

    def _score_discard(self, kinds: list[str] | None) -> float:
        """Score a discard by the balance of the rest; without a value the game host chooses the cards."""
        if not isinstance(kinds, list):
            return 100
        given = Counter(kinds)
        return 100 - sum(max(0, self.seen.hand[kind] - given[kind]) ** 2 for kind in RESOURCES)

    def _score_end_turn(self, _: None) -> float:
        return 0
