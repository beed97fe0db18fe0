"""Choice of a command in exploration: the objective first, then keys and doors, then the nearest unknown exit."""

import re
from collections import deque
from collections.abc import Callable
from typing import Any

State = dict[str, Any]
FILLER = {"a", "an", "and", "from", "in", "into", "is", "of", "on", "the", "to", "with", "within", "your"}
VERBS = {  # words of an objective by the command that may complete it
    "take": "take recover retrieve get pick grab find lift fetch",
    "drop": "drop toss throw floor ground leave",
    "put": "put place rest set sit sits stands surface",
    "insert": "insert place put inside stow into",
    "lock": "lock locked",
    "unlock": "unlock unlocked",
    "open": "open opened ajar",
    "close": "close closed shut",
    "eat": "eat eaten consume devour",
    "go": "go enter head move travel walk",
}
TOWN_HP_SHARE = 0.4


def rank_command(state: State, command: str) -> float:
    """Return the score of a command. Commands that repeat a recent note have less."""
    verb = command.partition(" ")[0]
    if command == "return to town":
        return 60 if _needs_town(state) else -5
    if verb == "go":
        return 30 if _choose_direction(state) == command.removeprefix("go ") else 0
    repeated = 40 * _count_repeats(state, command)
    if completes_objective(state["objective"], command):
        return 90 - repeated if verb != "drop" or _names(state, state["room"]) else -4
    if verb == "close" and set(VERBS["lock"].split()) & set(_find_goal(state["objective"]).split()):
        return 40 * _find_wanted(state["objective"], command) - repeated  # what is open cannot be locked
    wanted = _find_wanted(state["objective"], command)
    scores = {"unlock": 70, "open": 50, "take": 45 + 10 * wanted if "key" in command or wanted else 20, "eat": -3}
    return scores.get(verb, -1 if verb in ("examine", "look", "inventory") else -4) - repeated


def completes_objective(objective: str, command: str) -> bool:
    """Return whether the objective names the command's action, and all that the command names."""
    verb, _, rest = command.partition(" ")
    goal = _find_goal(objective)
    words = set(goal.split())
    if not words & set(VERBS.get(verb, verb).split()):
        return False
    things = re.split(r" (?:from|into|in|on|with) ", _normalize(rest))
    return all(
        re.search(rf"\b{re.escape(thing)}\b", goal) for thing in things[: 1 if verb in ("take", "lock", "unlock") else 2]
    )


def _find_goal(objective: str) -> str:
    """Return the normalized objective without its greeting."""
    return _normalize(re.split(r"TextWorld[!.]", objective)[-1])


def _normalize(text: str) -> str:
    return " ".join(re.findall(r"[a-z0-9'-]+", text.casefold()))


def _find_wanted(objective: str, command: str) -> bool:
    """Return whether the objective names the first thing of the command."""
    thing = re.split(r" (?:from|into|in|on|with) ", _normalize(command.partition(" ")[2]))[0]
    return bool(thing) and re.search(rf"\b{re.escape(thing)}\b", _find_goal(objective)) is not None


def _count_repeats(state: State, command: str) -> int:
    notes = [*state.get("memories", []), *state.get("events", [])]
    return sum(note.partition(": ")[2].startswith(f"{command}.") for note in notes)


def _needs_town(state: State) -> bool:
    character = state["character"]
    return character["hp"] <= character["max_hp"] * TOWN_HP_SHARE and character["gold"] >= 3


def _choose_direction(state: State) -> str | None:
    """Return the direction of a room that the objective names if the party carries its object, else of an unknown exit."""
    if any(_names(state, thing) for thing in state["inventory"]):
        way = _find_way(state, lambda room: room is not None and room != state["room"] and _names(state, room))
        if way:
            return way
    return _find_way(state, lambda room: room is None) or _direction_to_older_room(state)


def _names(state: State, thing: str) -> bool:
    """Return whether the objective names a thing or a room."""
    return re.search(rf"\b{re.escape(_normalize(thing))}\b", _find_goal(state["objective"])) is not None


def _find_way(state: State, is_target: Callable[[str | None], bool]) -> str | None:
    """Return the first direction of the shortest known way to a target. None stands for an unknown room."""
    known, start = state["map"], state["room"]
    queue, seen = deque([(start, "")]), {start}
    while queue:
        room, first = queue.popleft()
        for direction in sorted(known.get(room, {})):
            target, way = known[room][direction], first or direction
            if f"go {way}" not in state["legal_actions"]:
                continue
            if is_target(target):
                return str(way)
            if target is not None and target not in seen:
                seen.add(target)
                queue.append((target, way))
    return None


def _direction_to_older_room(state: State) -> str | None:
    """Return the direction of the neighbor that was entered longest ago."""
    notes = [*state.get("memories", []), *state.get("events", [])]
    entered = {
        match[1]: number for number, note in enumerate(notes) if (match := re.match(r"The party enters the ([^.]*)\.", note))
    }
    exits = state["map"].get(state["room"], {})
    ways = [way for way in sorted(exits) if f"go {way}" in state["legal_actions"]]
    return min(ways, key=lambda way: entered.get(exits[way], -1), default=None)
