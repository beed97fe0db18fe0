"""Board of Catan: tiles, numbers, ports, robber, roads, settlements and cities, from the state that a turn receives."""

from collections.abc import Iterable, Mapping
from typing import Any
from xml.etree import ElementTree

from leases.environments.boards.base import Board, Player, UnreadableState
from leases.environments.boards.catan_geometry import SIZE, Point, list_corners, locate_tile, place_nodes, place_tiles

MARGIN = 62.0  # of the sea around the tiles, with room for the ports
COLOURS = {"RED": "#c93a34", "BLUE": "#2f6fd0", "ORANGE": "#f08c22", "WHITE": "#f4f1ea"}
UNKNOWN_COLOUR = "#7a5bb5"
TILE_COLOURS = {"WOOD": "#3f7d45", "BRICK": "#bf6b4a", "SHEEP": "#9ccb63", "WHEAT": "#ecc450", "ORE": "#8d97a5"}
DESERT_COLOUR, SEA_COLOUR, SAND_COLOUR = "#dcc896", "#5aa3cf", "#e9d8a6"
INK, INK_ON_WOOD = "#2b2b2b", "#f2f7ee"
PIPS = {2: 1, 3: 2, 4: 3, 5: 4, 6: 5, 8: 5, 9: 4, 10: 3, 11: 2, 12: 1}
SETTLEMENT = ((-9, 9), (-9, -2), (0, -11), (9, -2), (9, 9))
CITY = ((-14, 10), (-14, -6), (-7, -14), (0, -6), (0, -2), (14, -2), (14, 10))
HIGHLIGHT = {"fill": "none", "stroke": "#111827", "stroke-width": "3", "stroke-dasharray": "5 4"}
PHRASES = {
    "ROLL": "rolls the dice", "END_TURN": "ends the turn", "BUY_DEVELOPMENT_CARD": "buys a development card",
    "PLAY_KNIGHT_CARD": "plays a knight", "PLAY_ROAD_BUILDING": "plays road building", "DISCARD": "discards cards",
    "DISCARD_RESOURCE": "discards cards", "ACCEPT_TRADE": "accepts the trade", "REJECT_TRADE": "rejects the trade",
    "CANCEL_TRADE": "cancels the trade", "CONFIRM_TRADE": "confirms the trade", "OFFER_TRADE": "offers a trade",
    "COUNTER_OFFER": "makes a counter-offer",
}  # fmt: skip


def draw(state: Mapping[str, Any], action: Mapping[str, Any]) -> Board:
    try:
        tiles, nodes = place_tiles(state), place_nodes(state)
        players = _read_players(state)
        svg = _draw_sea(tiles)
        robber = state.get("robber")
        for tile in state["board"]["tiles"]:
            _draw_tile(svg, tiles[tile["id"]], tile)
        _draw_ports(svg, state["board"], nodes)
        if robber in tiles:
            _draw_robber(svg, tiles[robber])
        for name, player in state["players"].items():
            _draw_pieces(svg, _get_colour(name), player, nodes)
        _highlight(svg, action, state, tiles, nodes)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UnreadableState from error
    return Board(ElementTree.tostring(svg, encoding="unicode"), _write_caption(state), players)


def find_player(state: Mapping[str, Any]) -> Player | None:
    name = state.get("you")
    return Player(name.capitalize(), _get_colour(name)) if isinstance(name, str) and name in COLOURS else None


def describe_action(action: Mapping[str, Any]) -> str:
    kind, value = str(action.get("type", "")), action.get("value")
    match kind, value:
        case "BUILD_SETTLEMENT" | "BUILD_CITY", int():
            return f"builds a {kind.removeprefix('BUILD_').lower()} at {value}"
        case "BUILD_ROAD", [int() as start, int() as end]:
            return f"builds a road from {start} to {end}"
        case "MARITIME_TRADE", [*cards, str() as received]:
            given = [card for card in cards if isinstance(card, str)]
            return f"trades {len(given)} {given[0].lower()} for {received.lower()}" if given else ""
        case "OFFER_TRADE", [list() as gives, list() as wants]:
            return f"offers {_join_cards(gives)} for {_join_cards(wants)}"
        case "COUNTER_OFFER", [list() as gives, list() as wants]:
            return f"asks for {_join_cards(gives)} for {_join_cards(wants)}"
        case "CONFIRM_TRADE", [str() as partner, list() as gives, list() as wants]:
            return f"trades {_join_cards(gives)} for {_join_cards(wants)} with {partner.capitalize()}"
        case "MOVE_ROBBER", [_, *others]:
            victim = others[0] if others and isinstance(others[0], str) else ""
            return f"moves the robber and robs {victim.capitalize()}" if victim else "moves the robber"
        case "PLAY_MONOPOLY", str():
            return f"plays monopoly on {value.lower()}"
        case "PLAY_YEAR_OF_PLENTY", [*cards]:
            return f"plays year of plenty for {' and '.join(str(card).lower() for card in cards)}"
    return PHRASES.get(kind, "")


def _join_cards(cards: list[Any]) -> str:
    return " and ".join(str(card).lower() for card in cards)


def _write_caption(state: Mapping[str, Any]) -> str:
    dice = state.get("dice")
    rolled = f"last roll {dice[0]} + {dice[1]}" if isinstance(dice, list) and len(dice) == 2 else ""
    phase = str(state.get("phase", "")).replace("_", " ").lower()
    return ", ".join(filter(None, [phase, rolled]))


def _read_players(state: Mapping[str, Any]) -> list[Player]:
    return [
        Player(
            str(name).capitalize(),
            _get_colour(name),
            (
                ("points", str(player["points"])),
                ("cards", str(player["cards"])),
                ("development cards", str(player["development_cards"])),
                ("longest road", str(player["longest_road"])),
            ),
        )
        for name, player in state["players"].items()
    ]


def _get_colour(name: str) -> str:
    return COLOURS.get(name, UNKNOWN_COLOUR)


def _get_ink(resource: Any) -> str:
    return INK_ON_WOOD if resource == "WOOD" else INK


# --- drawing ----------------------------------------------------------------------------------------------------------


def _add(parent: ElementTree.Element, tag: str, text: str = "", /, **attributes: Any) -> ElementTree.Element:
    shown = {name.rstrip("_").replace("_", "-"): _format(value) for name, value in attributes.items()}
    element = ElementTree.SubElement(parent, tag, shown)
    element.text = text or None
    return element


def _format(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _format_points(points: Iterable[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _draw_sea(tiles: Mapping[int, Point]) -> ElementTree.Element:
    reach = SIZE + MARGIN
    left, right = min(x for x, _ in tiles.values()) - reach, max(x for x, _ in tiles.values()) + reach
    top, bottom = min(y for _, y in tiles.values()) - reach, max(y for _, y in tiles.values()) + reach
    svg = ElementTree.Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg", "role": "img", "class": "lh-board",
            "viewBox": f"{left:.0f} {top:.0f} {right - left:.0f} {bottom - top:.0f}",
            "font-family": "Georgia, serif", "text-anchor": "middle",
        },
    )  # fmt: skip
    _add(svg, "title", "Board of Catan")
    _add(svg, "rect", x=left, y=top, width=right - left, height=bottom - top, rx=28, fill=SEA_COLOUR)
    for centre in tiles.values():
        shore = _format_points(list_corners(centre, SIZE + 11))
        _add(svg, "polygon", points=shore, fill=SAND_COLOUR, stroke=SAND_COLOUR, stroke_width=6, stroke_linejoin="round")
    return svg


def _draw_tile(svg: ElementTree.Element, centre: Point, tile: Mapping[str, Any]) -> None:
    x, y = centre
    resource, number = tile["resource"], tile["number"]
    group = _add(svg, "g")
    _add(group, "title", f"tile {tile['id']}: {str(resource or 'desert').lower()} {number or ''}".strip())
    colour = TILE_COLOURS.get(resource, DESERT_COLOUR)
    _add(group, "polygon", points=_format_points(list_corners(centre, SIZE - 2)), fill=colour, stroke="#00000033")
    _add(group, "text", str(resource or "desert").lower(), x=x, y=y - 27, font_size=12, fill=_get_ink(resource))
    if isinstance(number, int):
        ink = "#b3261e" if number in (6, 8) else INK
        _add(group, "circle", cx=x, cy=y + 4, r=19, fill="#fbf3dc", stroke="#00000040")
        _add(group, "text", str(number), x=x, y=y + 8, font_size=19, font_weight="bold", fill=ink)
        pips = PIPS.get(number, 0)
        for pip in range(pips):
            _add(group, "circle", cx=x + 4.6 * (pip - (pips - 1) / 2), cy=y + 15, r=1.7, fill=ink)


def _draw_ports(svg: ElementTree.Element, board: Mapping[str, Any], nodes: Mapping[int, Point]) -> None:
    by_id = {node["id"]: node for node in board["nodes"]}
    centre = (sum(x for x, _ in nodes.values()) / len(nodes), sum(y for _, y in nodes.values()) / len(nodes))
    for first, second in board["edges"]:
        kind = by_id[first]["port"]
        is_coast = len(set(by_id[first]["tiles"]) & set(by_id[second]["tiles"])) == 1
        if not kind or kind != by_id[second]["port"] or not is_coast:
            continue
        start, end = nodes[first], nodes[second]
        x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
        normal = (end[1] - start[1], start[0] - end[0])
        outward = 1 if normal[0] * (x - centre[0]) + normal[1] * (y - centre[1]) > 0 else -1
        x, y = (x + outward * normal[0] / SIZE * 36, y + outward * normal[1] / SIZE * 36)
        for place in (start, end):
            _add(svg, "line", x1=x, y1=y, x2=place[0], y2=place[1], stroke="#7a5a36", stroke_width=4, stroke_linecap="round")
        rate, name = ("3:1", "any") if kind == "ANY" else ("2:1", str(kind).lower())
        _add(svg, "circle", cx=x, cy=y, r=19, fill=TILE_COLOURS.get(kind, "#fdfdfb"), stroke="#7a5a36", stroke_width=2)
        _add(svg, "text", rate, x=x, y=y + 1, font_size=13, font_weight="bold", fill=_get_ink(kind))
        _add(svg, "text", name, x=x, y=y + 12, font_size=10, fill=_get_ink(kind))


def _draw_robber(svg: ElementTree.Element, centre: Point) -> None:
    x, y = centre[0] + 27, centre[1] + 4
    group = _add(svg, "g", fill="#1f1f23", stroke="#ffffff", stroke_width=1.5)
    _add(group, "title", "robber")
    _add(group, "path", d=f"M{x - 11:.1f} {y + 18:.1f} Q{x:.1f} {y - 26:.1f} {x + 11:.1f} {y + 18:.1f} Z")
    _add(group, "circle", cx=x, cy=y - 10, r=7)


def _draw_pieces(svg: ElementTree.Element, colour: str, player: Mapping[str, Any], nodes: Mapping[int, Point]) -> None:
    for first, second in player["roads"]:
        start, end = _shorten(nodes[first], nodes[second])
        line: dict[str, Any] = {"x1": start[0], "y1": start[1], "x2": end[0], "y2": end[1], "stroke_linecap": "round"}
        _add(svg, "line", stroke=INK, stroke_width=12, **line)
        _add(svg, "line", stroke=colour, stroke_width=8, **line)
    for kind, shape in (("SETTLEMENT", SETTLEMENT), ("CITY", CITY)):
        for node in player["buildings"][kind]:
            x, y = nodes[node]
            outline = _format_points((x + dx, y + dy) for dx, dy in shape)
            piece = _add(svg, "polygon", points=outline, fill=colour, stroke=INK, stroke_width=2, stroke_linejoin="round")
            _add(piece, "title", f"{kind.lower()} at {node}")


def _shorten(start: Point, end: Point, share: float = 0.2) -> tuple[Point, Point]:
    dx, dy = (end[0] - start[0]) * share, (end[1] - start[1]) * share
    return (start[0] + dx, start[1] + dy), (end[0] - dx, end[1] - dy)


def _highlight(
    svg: ElementTree.Element,
    action: Mapping[str, Any],
    state: Mapping[str, Any],
    tiles: Mapping[int, Point],
    nodes: Mapping[int, Point],
) -> None:
    """Mark the place of the action. The state is the one before the action."""
    colour = _get_colour(str(state.get("you")))
    match action.get("type"), action.get("value"):
        case "BUILD_SETTLEMENT" | "BUILD_CITY", int() as node if node in nodes:
            x, y = nodes[node]
            _add(svg, "circle", cx=x, cy=y, r=17, fill=colour, fill_opacity=0.55)
            ElementTree.SubElement(svg, "circle", {"cx": f"{x:.1f}", "cy": f"{y:.1f}", "r": "17", **HIGHLIGHT})
        case "BUILD_ROAD", [int() as first, int() as second] if first in nodes and second in nodes:
            start, end = _shorten(nodes[first], nodes[second], 0.1)
            line = {"x1": start[0], "y1": start[1], "x2": end[0], "y2": end[1]}
            _add(svg, "line", stroke=colour, stroke_opacity=0.7, stroke_width=12, **line)
            _add(svg, "line", stroke=INK, stroke_width=3, stroke_dasharray="5 4", **line)
        case "MOVE_ROBBER", [[int(), int(), int()] as coordinate, *_]:
            if (centre := locate_tile(coordinate)) in tiles.values():
                ElementTree.SubElement(svg, "polygon", {"points": _format_points(list_corners(centre, SIZE - 5)), **HIGHLIGHT})
