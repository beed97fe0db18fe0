"""World of a campaign: rooms, objects, doors and a quest, generated and simulated by TextWorld (MIT).

TextWorld decides which commands are admissible, what each changes, and whether the quest is complete."""

import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

DIRECTIONS = ("north", "east", "south", "west")
OPPOSITES = {"north": "south", "south": "north", "east": "west", "west": "east"}
OBJECTS = 8
FURNITURE = ("c", "s")  # types of containers and supporters


def _import_textworld() -> ModuleType:
    """Import TextWorld, also without Jericho.

    TextWorld imports Jericho, an interpreter of Z-machine files under GPL-2.0 that needs a C compiler and spaCy, with its first
    import. Worlds of this module are files in JSON, which TextWorld plays without Jericho."""
    if "jericho" not in sys.modules and importlib.util.find_spec("jericho") is None:
        absent = ModuleType("jericho")
        absent.__getattr__ = _create_placeholder  # type: ignore[method-assign]
        sys.modules["jericho"] = absent
    return importlib.import_module("textworld")


def _create_placeholder(name: str) -> type[Warning]:
    """Return a class in place of one of Jericho's. Tools read attributes such as `__file__` of every module: there are none."""
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (Warning,), {})


textworld = _import_textworld()


class World:
    """One world, in which the party moves as one."""

    def __init__(self, seed: int, *, rooms: int = 6, quest_length: int = 6) -> None:
        options = textworld.GameOptions()
        options.seeds, options.nb_rooms, options.nb_objects, options.quest_length = seed, rooms, OBJECTS, quest_length
        options.grammar.only_last_action = True  # the text of the quest names its goal, not the way to it
        infos = textworld.EnvInfos(admissible_commands=True, facts=True, won=True, lost=True, objective=True)
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "world.json")
            textworld.generator.make_game(options).save(path)
            self._env = textworld.start(path, infos)
            self._state = self._env.reset()
        self.objective: str = self._state["objective"]
        self.entrance = self.room
        self.rooms = sorted({name for fact in self._state["facts"] for name, kind in _read_arguments(fact) if kind == "r"})

    @property
    def legal(self) -> list[str]:
        """Admissible commands."""
        return sorted(self._state["admissible_commands"])

    @property
    def won(self) -> bool:
        return bool(self._state["won"])

    @property
    def lost(self) -> bool:
        return bool(self._state["lost"])

    @property
    def room(self) -> str:
        return next(place for thing, place in self._list_facts("at") if thing == "P")

    @property
    def inventory(self) -> list[str]:
        return sorted(thing for thing, place in self._list_facts("in") if place == "I")

    def list_exits(self) -> list[str]:
        """Return the directions in which the party can go now."""
        return [direction for direction in DIRECTIONS if f"go {direction}" in self._state["admissible_commands"]]

    def perform(self, command: str) -> None:
        """Execute an admissible command."""
        if command not in self._state["admissible_commands"]:
            raise ValueError(f"not admissible: {command}")
        self._state, _, _ = self._env.step(command)

    def describe(self) -> str:
        """Describe the room: furniture with its visible content, objects, doors and exits."""
        room = self.room
        closed = {things[0] for name in ("closed", "locked") for things in self._list_facts(name)}
        locked = {things[0] for things in self._list_facts("locked")}
        contents: dict[str, list[str]] = {}
        for thing, place in [*self._list_facts("in"), *self._list_facts("on")]:
            contents.setdefault(place, []).append(thing)
        kinds = {name: kind for fact in self._state["facts"] for name, kind in _read_arguments(fact)}
        parts = []
        for thing in sorted(thing for thing, place in self._list_facts("at") if place == room and thing != "P"):
            if thing in closed:
                parts.append(f"{thing} ({'locked' if thing in locked else 'closed'})")
            elif kinds[thing] in FURNITURE:
                parts.append(f"{thing} (with {', '.join(sorted(contents.get(thing, []))) or 'nothing'})")
            else:
                parts.append(thing)
        doors = [
            f"{door} ({'locked' if door in locked else 'closed' if door in closed else 'open'})"
            for door in sorted({things[1] for things in self._list_facts("link") if things[0] == room})
        ]
        return (
            f"You are in the {room}. You see: {'; '.join(parts) or 'nothing'}. "
            f"Doors: {', '.join(doors) or 'none'}. Exits: {', '.join(self.list_exits()) or 'none'}."
        )

    def _list_facts(self, name: str) -> list[tuple[str, ...]]:
        """Return the arguments of the facts with this name."""
        return [tuple(each for each, _ in _read_arguments(fact)) for fact in self._state["facts"] if fact.name == name]


def _read_arguments(fact: Any) -> list[tuple[str, str]]:
    """Return name and type of each argument of a fact."""
    return [(str(argument.name), str(argument.type)) for argument in fact.arguments]
