"""Tools that a model may call in its turn: values of places, roads and trades, and the ranking of the legal actions."""

from typing import Any

from .analysis import COSTS, RESOURCES, Analysis, count_pips

MAX_RANKED = 10

State = dict[str, Any]


def evaluate_node(state: State, node: int) -> dict[str, Any]:
    """Return production, port and availability of a node."""
    seen = Analysis(state)
    row = seen.nodes[node]
    tiles = [seen.tiles[tile] for tile in row["tiles"]]
    return {
        "pips": dict(seen.node_production(node)),
        "tiles": [
            {"resource": tile["resource"], "number": tile["number"], "pips": count_pips(tile["number"])} for tile in tiles
        ],
        "port": row["port"],
        "port_value": round(seen.port_value(node), 2),
        "is_free": seen.is_free(node),
        "is_reachable": node in seen.reachable_nodes(seen.you),
    }


def evaluate_builds(state: State) -> dict[str, Any]:
    """Return the missing cards of each build, none if it is affordable, and the bank's rates."""
    seen = Analysis(state)
    return {"missing": {build: seen.missing(build) for build in COSTS}, "bank_rates": seen.rates}


def evaluate_trade(state: State, gives: list[str], gets: list[str]) -> dict[str, Any]:
    """Return the missing cards of each build after an exchange of cards."""
    seen = Analysis(state)
    hand = dict(seen.hand)
    for kind in gives:
        hand[kind] -= 1
    for kind in gets:
        hand[kind] += 1
    if set(hand) - set(RESOURCES) or min(hand.values()) < 0:
        raise ValueError("these cards are not in your hand")
    return {"missing": {build: seen.missing(build, hand) for build in COSTS}, "hand": hand}


def evaluate_robber(state: State, tile: int) -> dict[str, int]:
    """Return the pips that each player loses while the robber is on a tile."""
    seen = Analysis(state)
    return {color: seen.robber_exposure(tile, color) for color in seen.players}


def _build_schema(description: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"description": description, "parameters": parameters}


CARDS = {"type": "array", "items": {"type": "string", "enum": [*RESOURCES]}}
INTEGER = {"type": "integer"}
TOOLS: dict[str, dict[str, Any]] = {
    "evaluate_node": {
        "call": evaluate_node,
        "schema": _build_schema("Production, port and availability of a node for a settlement or city.", node=INTEGER),
    },
    "evaluate_builds": {
        "call": evaluate_builds, "schema": _build_schema("Missing cards of each build, and the rates of the bank."),
    },
    "evaluate_trade": {
        "call": evaluate_trade,
        "schema": _build_schema("Missing cards of each build after a trade.", gives=CARDS, gets=CARDS),
    },
    "evaluate_robber": {
        "call": evaluate_robber,
        "schema": _build_schema("Pips that each player loses with the robber on this tile.", tile=INTEGER),
    },
}  # fmt: skip
