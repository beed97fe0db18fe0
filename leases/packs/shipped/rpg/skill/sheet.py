"""Character sheet and memory of the agent in its /data.

    character.json       the sheet: kept across turns, sleeps and campaigns
    memory/rpg.jsonl     notes, one JSON object a line, oldest first

Both files are replaced atomically. A turn that is played again replaces its notes."""

import json
import os
from pathlib import Path
from typing import Any

State = dict[str, Any]
SHEET_KEYS = ("name", "role", "level", "xp", "gold", "potions", "blade", "max_hp", "campaigns")
MAX_NOTES = 300
NOTES_TOLD = 30


def prepare_state(state: State, data: Path) -> State:
    """Add the notes of earlier turns and, at the creation, the sheet. A sheet decides the role, if that is offered."""
    notes = _read_notes(data)
    state["memories"] = [str(note["text"]) for note in notes if _turn_of(note) != _turn_of(state)][-NOTES_TOLD:]
    sheet = read_sheet(data)
    if state.get("phase") == "creation" and sheet:
        state["sheet"] = sheet
        if f"play {sheet.get('role')}" in state["legal_actions"]:
            state["legal_actions"] = [f"play {sheet['role']}"]
    return state


def record_turn(state: State, action: dict[str, Any], data: Path) -> dict[str, Any]:
    """Update sheet and notes. At the creation, return the action with the sheet, which the game host then continues."""
    if state.get("phase") == "creation":
        role = str(action.get("action", "")).removeprefix("play ")
        kept = state.get("sheet") or {}
        sheet = kept if kept.get("role") == role else {"name": state.get("you"), "role": role, "level": 1, "xp": 0}
        action = {**action, "character": sheet}
    else:
        sheet = {key: state["character"][key] for key in SHEET_KEYS if key in state["character"]}
    _replace(data / "character.json", json.dumps(sheet, indent=1))
    turn = {"campaign": state.get("campaign"), "turn_number": state.get("turn_number")}
    texts = [*state.get("events", []), f"{state.get('you')} chose: {action.get('action')}"]
    notes = [note for note in _read_notes(data) if _turn_of(note) != _turn_of(state)] + [
        {**turn, "text": text} for text in texts
    ]
    _replace(data / "memory" / "rpg.jsonl", "".join(json.dumps(note) + "\n" for note in notes[-MAX_NOTES:]))
    return action


def read_sheet(data: Path) -> dict[str, Any]:
    """Return the sheet, empty if there is none."""
    try:
        sheet = json.loads((data / "character.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return sheet if isinstance(sheet, dict) else {}


def _turn_of(source: dict[str, Any]) -> tuple[Any, Any]:
    return source.get("campaign"), source.get("turn_number")


def _read_notes(data: Path) -> list[dict[str, Any]]:
    """Return the notes. Lines that the agent has damaged are left out."""
    notes = []
    try:
        lines = (data / "memory" / "rpg.jsonl").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    for line in lines:
        try:
            note = json.loads(line)
        except ValueError:
            continue
        if isinstance(note, dict) and "text" in note:
            notes.append(note)
    return notes


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
