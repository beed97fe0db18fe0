"""Places of the tiles and nodes of a Catan board, in units of a drawing.

The state names the tiles around each node, not its place. A node lies at a corner that has exactly these tiles; of the two
free corners of an outer tile, the edges of the board tell which is which."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from leases.environments.boards.base import UnreadableState

Point = tuple[float, float]
SIZE = 60.0  # side of a tile
MAX_TILES, MAX_NODES, MAX_EDGES = 100, 300, 500


def place_tiles(state: Mapping[str, Any]) -> dict[int, Point]:
    """Return the centre of each tile by its id."""
    tiles = state["board"]["tiles"]
    if not 0 < len(tiles) <= MAX_TILES:
        raise UnreadableState
    return {tile["id"]: locate_tile(tile["coordinate"]) for tile in tiles}


def locate_tile(coordinate: list[int]) -> Point:
    x, _, z = (int(part) for part in coordinate)
    return SIZE * math.sqrt(3) * (x + z / 2), SIZE * 1.5 * z


def list_corners(centre: Point, size: float = SIZE) -> list[Point]:
    angles = [math.radians(60 * number - 30) for number in range(6)]
    return [(centre[0] + size * math.cos(angle), centre[1] + size * math.sin(angle)) for angle in angles]


def place_nodes(state: Mapping[str, Any]) -> dict[int, Point]:
    """Return the place of each node by its id. Raise UnreadableState if the board does not determine it."""
    board = state["board"]
    if len(board["nodes"]) > MAX_NODES or len(board["edges"]) > MAX_EDGES:
        raise UnreadableState
    corners = _group_corners(place_tiles(state))
    candidates = {node["id"]: list(corners.get(frozenset(node["tiles"]), [])) for node in board["nodes"]}
    neighbours: dict[int, list[int]] = {node: [] for node in candidates}
    for first, second in board["edges"]:
        neighbours[first].append(second)
        neighbours[second].append(first)
    placed = {node: places[0] for node, places in candidates.items() if len(places) == 1}
    waiting = [node for node in candidates if node not in placed]
    for _ in range(len(waiting)):  # each pass places a node or the board is not determined
        for node in waiting:
            known = [placed[other] for other in neighbours[node] if other in placed]
            fitting = [
                place for place in candidates[node]
                if place not in placed.values() and all(math.dist(place, other) < SIZE * 1.1 for other in known)
            ]  # fmt: skip
            if len(fitting) == 1:
                placed[node] = fitting[0]
        waiting = [node for node in waiting if node not in placed]
        if not waiting:
            return placed
    if waiting:
        raise UnreadableState
    return placed


def _group_corners(tiles: Mapping[int, Point]) -> dict[frozenset[int], list[Point]]:
    """Return the corners of the board by the tiles around them."""
    around: dict[tuple[int, int], set[int]] = {}
    places: dict[tuple[int, int], Point] = {}
    for tile, centre in tiles.items():
        for corner in list_corners(centre):
            key = round(corner[0] / 4), round(corner[1] / 4)
            near = next((each for each in _list_near(key) if each in around), key)
            around.setdefault(near, set()).add(tile)
            places.setdefault(near, corner)
    grouped: dict[frozenset[int], list[Point]] = {}
    for key, ids in around.items():
        grouped.setdefault(frozenset(ids), []).append(places[key])
    return grouped


def _list_near(key: tuple[int, int]) -> Iterable[tuple[int, int]]:
    """Yield a key and those beside it: rounding may separate equal corners of two tiles."""
    return ((key[0] + x, key[1] + y) for x in (0, -1, 1) for y in (0, -1, 1))
