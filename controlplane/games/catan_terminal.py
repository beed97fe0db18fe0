"""Live view of a Catan game in a terminal: board, players and the last decisions."""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from leases.environments.boards.catan_geometry import Point, place_nodes, place_tiles

COLUMNS_PER_UNIT, LINES_PER_UNIT = 12 / 103.92, 4 / 90  # a tile is 12 columns wide, and a row of tiles 4 lines high
LOG_LINES = 8
MIN_TERMINAL_LINES = 38  # for board, four players, log and frame: a lower terminal would show a part
STYLES = {"RED": "bold red", "BLUE": "bold bright_blue", "ORANGE": "bold dark_orange", "WHITE": "bold white"}
TILE_STYLES = {"WOOD": "green4", "BRICK": "indian_red", "SHEEP": "green_yellow", "WHEAT": "gold1", "ORE": "grey62"}
DESERT_STYLE, EDGE_STYLE = "wheat4", "grey30"
SETTLEMENT, CITY, ROBBER = "\u25b2", "\u25a0", "\u2620"

Cell = tuple[int, int]  # line, column


def draw_board(state: Mapping[str, Any]) -> Text:
    """Draw the board of a turn's state. Raise UnreadableState if the board does not determine the places."""
    tiles, nodes = place_tiles(state), place_nodes(state)
    canvas: dict[Cell, tuple[str, str]] = {}
    for first, second in state["board"]["edges"]:
        _draw_edge(canvas, nodes[first], nodes[second], "\u00b7", EDGE_STYLE)
    for color, player in state["players"].items():
        for first, second in player["roads"]:
            _draw_edge(canvas, nodes[first], nodes[second], "\u2022", STYLES[color])
    for tile in state["board"]["tiles"]:
        line, column = _locate(tiles[tile["id"]])
        style = TILE_STYLES.get(tile["resource"], DESERT_STYLE)
        _write(canvas, line, column, (tile["resource"] or "desert").lower(), style)
        robber = f" {ROBBER}" if tile["id"] == state["robber"] else ""
        _write(canvas, line + 1, column, f"{tile['number'] or ''}{robber}".strip(), style)
    for color, player in state["players"].items():
        for kind, mark in (("SETTLEMENT", SETTLEMENT), ("CITY", CITY)):
            for node in player["buildings"][kind]:
                _write(canvas, *_locate(nodes[node]), mark, STYLES[color])
    return _render(canvas)


def _locate(point: Point) -> Cell:
    return round(point[1] * LINES_PER_UNIT), round(point[0] * COLUMNS_PER_UNIT)


def _draw_edge(canvas: dict[Cell, tuple[str, str]], start: Point, end: Point, mark: str, style: str) -> None:
    (line, column), (last_line, last_column) = _locate(start), _locate(end)
    steps = max(abs(last_line - line), abs(last_column - column) // 2, 1)
    for step in range(1, steps):
        cell = round(line + (last_line - line) * step / steps), round(column + (last_column - column) * step / steps)
        canvas[cell] = mark, style


def _write(canvas: dict[Cell, tuple[str, str]], line: int, column: int, text: str, style: str) -> None:
    """Write a text around a column."""
    start = column - len(text) // 2
    for offset, character in enumerate(text):
        canvas[line, start + offset] = character, style


def _render(canvas: Mapping[Cell, tuple[str, str]]) -> Text:
    lines, columns = [line for line, _ in canvas], [column for _, column in canvas]
    text = Text()
    for line in range(min(lines), max(lines) + 1):
        for column in range(min(columns), max(columns) + 1):
            text.append(*canvas.get((line, column), (" ", "")))
        text.append("\n")
    return text


def draw_players(state: Mapping[str, Any], labels: Mapping[str, str]) -> Table:
    """Draw the public state of each player. `labels` are the agents by color."""
    table = Table(box=None, pad_edge=False)
    for heading in ("Player", "Agent", "Points", "Cards", "Development", "Longest road"):
        table.add_column(heading, justify="left" if heading in ("Player", "Agent") else "right")
    for color, player in state["players"].items():
        numbers = (player["points"], player["cards"], player["development_cards"], player["longest_road"])
        table.add_row(Text(color.capitalize(), STYLES[color]), labels.get(color, ""), *map(str, numbers))
    return table


class GameView:
    """Live view of a game, redrawn after each decision."""

    def __init__(self, console: Console, title: str, labels: Mapping[str, str]) -> None:
        self._title, self._labels = title, labels
        self._log: deque[str] = deque(maxlen=LOG_LINES)
        self._live = Live(console=console, auto_refresh=False)

    def __enter__(self) -> "GameView":
        self._live.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._live.__exit__(*exception)

    def show(self, state: Mapping[str, Any], line: str) -> None:
        """Show a state and add a line to the log."""
        self._log.append(line)
        self._live.update(Panel(Group(*self._list_parts(state)), title=self._title), refresh=True)

    def _list_parts(self, state: Mapping[str, Any]) -> Iterable[Any]:
        return draw_board(state), draw_players(state, self._labels), Text(), *map(Text, self._log)
