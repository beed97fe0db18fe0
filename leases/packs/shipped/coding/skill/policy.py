"""Heuristic of a coding task without a model: repairs a failing test by a change of one token. Standard library only.

It acts only if the model gave no usable answer: the turn script calls `record_turn` after the model."""

import time
from pathlib import Path
from typing import Any

from .repair import commit, find_repair, passes
from .working_copy import TOOLS as TOOLS_OF_WORKING_COPY
from .working_copy import get_path, run

__all__ = ["TOOLS", "choose_action", "describe_state", "record_turn"]

TOOLS = TOOLS_OF_WORKING_COPY
DEADLINE = time.monotonic() + 45.0  # of the heuristic, since the begin of the turn, which has 60 s
MAX_LISTED_FILES = 100


def choose_action(state: dict[str, Any]) -> dict[str, Any]:
    """Return the action in place of an unusable answer. `record_turn` replaces it."""
    return {"type": "CONTINUE", "note": "No answer of the model."}


def describe_state(state: dict[str, Any]) -> str:
    """Return the files, the commits and the changes of the working copy, for the prompt."""
    if not get_path(state).is_dir():
        return "There is no working copy."
    base = state["repository"]["base"]
    files = run(state, "git ls-files")["output"].splitlines()
    commits = run(state, f"git log --oneline {base}..HEAD")["output"].strip()
    changes = run(state, "git status --short")["output"].strip()
    shown = "\n".join(files[:MAX_LISTED_FILES])
    return f"Files ({len(files)}):\n{shown}\n\nYour commits:\n{commits or 'none'}\n\nNot committed:\n{changes or 'nothing'}"


def record_turn(state: dict[str, Any], action: dict[str, Any], data: Path) -> dict[str, Any] | None:
    """Do the heuristic's work if the action is its own, and return the action to print."""
    if action.get("by") != "heuristic" or not state.get("test_command") or not get_path(state).is_dir():
        return None
    title = str(state["task"]["title"])[:200]
    change = "" if passes(state, deadline=DEADLINE) else find_repair(state, deadline=DEADLINE)
    if not change and not passes(state, deadline=DEADLINE):
        is_last = state.get("turn_number", 1) >= state.get("max_turns", 1)
        reason = "No change of one token makes the tests pass."
        return {"type": "GIVE_UP", "reason": reason, "by": "heuristic"} if is_last else None
    if not commit(state, title):
        return {"type": "GIVE_UP", "reason": "The tests pass already.", "by": "heuristic"}
    summary = f"{change}.\n\n`{state['test_command']}` passes." if change else f"`{state['test_command']}` passes."
    return {"type": "COMPLETE", "title": title, "summary": summary, "by": "heuristic"}
