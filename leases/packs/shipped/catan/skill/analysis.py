"""Analysis of a Catan state: production, ports, robber exposure, affordable builds, trade rates. Standard library only."""

from collections import Counter
from typing import Any

RESOURCES = ("WOOD", "BRICK", "SHEEP", "WHEAT", "ORE")
COSTS: dict[str, dict[str, int]] = {
    "CITY": {"WHEAT": 2, "ORE": 3},
    "SETTLEMENT": {"WOOD": 1, "BRICK": 1, "SHEEP": 1, "WHEAT": 1},
    "DEVELOPMENT_CARD": {"SHEEP": 1, "WHEAT": 1, "ORE": 1},
    "ROAD": {"WOOD": 1, "BRICK": 1},
}
MAX_LISTED_NODES = 5


def count_pips(number: int | None) -> int:
    """Return the number of the 36 dice results that give this number, 0 for the desert."""
    return 6 - abs(7 - number) if number else 0


class Analysis:
    """Indexes of one state. Pips are expected cards per 36 rolls of a settlement; a city counts twice."""

    def __init__(self, state: dict[str, Any]) -> None:
        board = state["board"]
        self.you: str = state["you"]
        self.players: dict[str, dict[str, Any]] = state["players"]
        self.hand: dict[str, int] = state["hand"]
        self.rates: dict[str, int] = state["trade_rates"]
        self.robber: int = state["robber"]
        self.tiles: dict[int, dict[str, Any]] = {tile["id"]: tile for tile in board["tiles"]}
        self.nodes: dict[int, dict[str, Any]] = {node["id"]: node for node in board["nodes"]}
        self.tile_nodes: dict[int, list[int]] = {
            tile: [node for node, row in self.nodes.items() if tile in row["tiles"]] for tile in self.tiles
        }
        self.neighbors: dict[int, set[int]] = {node: set() for node in self.nodes}
        for a, b in board["edges"]:
            self.neighbors[a].add(b)
            self.neighbors[b].add(a)
        self.buildings: dict[int, tuple[str, int]] = {
            node: (color, 2 if kind == "CITY" else 1)
            for color, player in self.players.items()
            for kind, nodes in player["buildings"].items()
            for node in nodes
        }
        self.roads: dict[tuple[int, int], str] = {
            (min(edge), max(edge)): color for color, player in self.players.items() for edge in player["roads"]
        }
        self.production: dict[str, Counter[str]] = {color: self._sum_production(color) for color in self.players}

    def node_production(self, node: int) -> Counter[str]:
        """Return the pips of a settlement at this node by resource, the robber ignored."""
        pips: Counter[str] = Counter()
        for tile in self.nodes[node]["tiles"]:
            if self.tiles[tile]["resource"]:
                pips[self.tiles[tile]["resource"]] += count_pips(self.tiles[tile]["number"])
        return pips

    def _sum_production(self, color: str) -> Counter[str]:
        total: Counter[str] = Counter()
        for node, (owner, size) in self.buildings.items():
            if owner == color:
                for kind, pips in self.node_production(node).items():
                    total[kind] += pips * size
        return total

    def port_value(self, node: int) -> float:
        """Return the value of the node's port in pips: of a 2:1 port by the own production of its resource."""
        port = self.nodes[node]["port"]
        if port is None:
            return 0.0
        if port == "ANY":
            return 1.0 if min(self.rates.values()) > 3 else 0.0
        return 0.2 * (self.production[self.you][port] + self.node_production(node)[port])

    def robber_exposure(self, tile: int, color: str) -> int:
        """Return the pips that this color loses while the robber is on the tile."""
        pips = count_pips(self.tiles[tile]["number"])
        sizes = (self.buildings[node][1] for node in self.tile_nodes[tile] if self._is_owner(node, color))
        return pips * sum(sizes)

    def _is_owner(self, node: int, color: str) -> bool:
        return node in self.buildings and self.buildings[node][0] == color

    def is_free(self, node: int) -> bool:
        """Return whether the distance rule permits a settlement at this node."""
        return node not in self.buildings and not self.neighbors[node] & self.buildings.keys()

    def reachable_nodes(self, color: str) -> set[int]:
        """Return the nodes at this color's roads at which a settlement may be built."""
        ends = {node for edge, owner in self.roads.items() if owner == color for node in edge}
        return {node for node in ends if self.is_free(node)}

    def missing(self, build: str, hand: dict[str, int] | None = None) -> dict[str, int]:
        """Return the cards that the hand lacks for a build, empty if the build is affordable."""
        held = self.hand if hand is None else hand
        return {kind: n - held.get(kind, 0) for kind, n in COSTS[build].items() if n > held.get(kind, 0)}

    def leader(self) -> str:
        """Return the strongest other color: by points, then by production."""
        others = [color for color in self.players if color != self.you]
        return max(others, key=lambda color: (self.players[color]["points"], self.production[color].total(), color))


def describe_state(state: dict[str, Any]) -> str:
    """Build a short text about a state for the prompt of a model."""
    seen = Analysis(state)
    lines = ["# Analysis of the state", "", "Pips: expected cards per 36 rolls."]
    for color, pips in seen.production.items():
        lines.append(f"- production of {color}{' (you)' if color == seen.you else ''}: {_format_counts(pips)}")
    for build in COSTS:
        missing = seen.missing(build)
        lines.append(f"- {build}: {'missing ' + _format_counts(missing) if missing else 'affordable'}")
    lines.append(f"- trade rates: {_format_counts(seen.rates)}")
    robbed = seen.robber_exposure(seen.robber, seen.you)
    lines.append(f"- the robber on tile {seen.robber} costs you {robbed} pips; leader of the others: {seen.leader()}")
    setup = state.get("phase") == "SETUP"
    places = [node for node in seen.nodes if seen.is_free(node)] if setup else list(seen.reachable_nodes(seen.you))
    places.sort(key=lambda node: (-seen.node_production(node).total(), node))
    for node in places[:MAX_LISTED_NODES]:
        port = f", port {seen.nodes[node]['port']}" if seen.nodes[node]["port"] else ""
        lines.append(f"- settlement place {node}: {_format_counts(seen.node_production(node))}{port}")
    return "\n".join(lines)


def _format_counts(counts: dict[str, int]) -> str:
    return " ".join(f"{kind} {n}" for kind, n in counts.items()) or "none"
