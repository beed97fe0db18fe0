"""Heuristic policy of the campaign, and the hooks that keep sheet and memory. Deterministic."""

from pathlib import Path
from typing import Any

from .exploration import rank_command
from .sheet import prepare_state, record_turn

__all__ = ["choose_action", "describe_state", "prepare_state", "record_turn"]

State = dict[str, Any]
ROLE_ORDER = ("fighter", "healer", "mage", "rogue")
SUGGESTIONS = 3


def choose_action(state: State) -> dict[str, Any]:
    """Return the best of the state's legal actions."""
    return {"action": rank_actions(state)[0]}


def rank_actions(state: State) -> list[str]:
    """Return the legal actions, best first. The order of `legal_actions` decides between equals."""
    score = {"creation": _score_role, "combat": _score_combat, "exploration": rank_command}.get(
        state.get("phase", ""), _score_town
    )
    return sorted(map(str, state["legal_actions"]), key=lambda action: -score(state, action))


def describe_state(state: State) -> str:
    """Describe the advice for the role, and the actions that the heuristic prefers."""
    role = (state.get("character") or state.get("sheet") or {}).get("role")
    path = Path(__file__).parent / "roles" / f"{role}.md"
    advice = path.read_text(encoding="utf-8") if role in ROLE_ORDER and path.is_file() else ""
    return f"{advice}\nReasonable now, best first: {'; '.join(rank_actions(state)[:SUGGESTIONS])}.".strip()


def _score_role(state: State, action: str) -> float:
    role = action.removeprefix("play ")
    taken = {member["role"] for member in state["party"]}
    return (role not in taken) * 10 - (ROLE_ORDER.index(role) if role in ROLE_ORDER else 9)


def _score_town(state: State, action: str) -> float:
    character = state["character"]
    scores = {
        "rest": 10 * (character["hp"] * 3 <= character["max_hp"] * 2),
        "buy blade": 5,
        "buy potion": 4 * (character["potions"] < 3),
        "wait": 1,
    }
    return scores.get(action, 0)


def _score_combat(state: State, action: str) -> float:
    character, monster = state["character"], state["monster"]
    weak = character["hp"] * 3 <= character["max_hp"]
    verb, _, target = action.partition(" ")
    if verb == "heal":
        member = next(member for member in state["party"] if member["name"] == target)
        return 20 - member["hp"] / member["max_hp"] if member["hp"] * 2 <= member["max_hp"] else 0
    if verb == "guard":
        others = [member for member in state["party"] if member["name"] != state["you"] and member["hp"]]
        return 8 if not weak and any(member["hp"] * 3 <= member["max_hp"] for member in others) else 0
    if verb == "retreat":
        return 0
    finishing = monster["hp"] <= character["attack"]
    scores = {
        "drink": 15 * weak,
        "defend": 9 * weak,
        "ambush": 7,
        "cast": 6 * (monster["hp"] > 4),
        "attack": 16 if finishing else 5,
    }
    return scores.get(verb, 0)
