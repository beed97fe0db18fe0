"""Repair of a failing test by a change of one token: operators, comparisons, numbers off by one. Standard library only."""

import io
import shlex
import time
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .working_copy import get_path, run

REPLACEMENTS = {
    "+": ["-"], "-": ["+"], "*": ["/", "+"], "/": ["*", "//"], "//": ["/"], "%": ["//"],
    "<": ["<=", ">"], "<=": ["<"], ">": [">=", "<"], ">=": [">"], "==": ["!="], "!=": ["=="],
    "+=": ["-="], "-=": ["+="], "and": ["or"], "or": ["and"], "True": ["False"], "False": ["True"], "not": [""],
}  # fmt: skip
MAX_FILES = 50


def find_repair(state: dict[str, Any], *, deadline: float) -> str:
    """Change one token so that the tests pass, and return the change as text, "" if no such change is found."""
    output = _test(state, deadline)["output"]
    for path in _list_sources(state, output):
        text = path.read_text()
        for line, old, new, changed in _list_changes(text):
            if time.monotonic() > deadline:
                path.write_text(text)
                return ""
            path.write_text(changed)
            if _test(state, deadline)["exit_code"] == 0:
                return f"{path.relative_to(get_path(state))}:{line}: {old} becomes {new or 'nothing'}"
        path.write_text(text)
    return ""


def passes(state: dict[str, Any], *, deadline: float) -> bool:
    """Return whether the test command succeeds. False without one."""
    return bool(state.get("test_command")) and _test(state, deadline)["exit_code"] == 0


def _test(state: dict[str, Any], deadline: float) -> dict[str, Any]:
    return run(state, f"export PYTHONDONTWRITEBYTECODE=1; {state['test_command']}", deadline - time.monotonic())


def _list_sources(state: dict[str, Any], output: str) -> list[Path]:
    """Return the Python files without tests, those first that the output of the tests names."""
    names = run(state, "git ls-files '*.py'")["output"].splitlines()
    sources = [name for name in names if not Path(name).name.startswith("test_") and "tests" not in Path(name).parts]
    ranked = sorted(sources, key=lambda name: (Path(name).stem not in output, name))
    return [get_path(state) / name for name in ranked[:MAX_FILES]]


def _list_changes(text: str) -> Iterator[tuple[int, str, str, str]]:
    """Yield line, old token, new token and the changed text."""
    lines = text.splitlines(keepends=True)
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (tokenize.TokenError, SyntaxError):
        return
    for token in tokens:
        (row, start), (_, end) = token.start, token.end
        for new in _list_replacements(token):
            line = lines[row - 1]
            changed = [*lines[: row - 1], f"{line[:start]}{new}{line[end:]}", *lines[row:]]
            yield row, token.string, new, "".join(changed)


def _list_replacements(token: tokenize.TokenInfo) -> list[str]:
    if token.type == tokenize.NUMBER and token.string.isdigit():
        return [str(int(token.string) + 1), str(max(int(token.string) - 1, 0))]
    return REPLACEMENTS.get(token.string, []) if token.type in (tokenize.OP, tokenize.NAME) else []


def commit(state: dict[str, Any], message: str) -> bool:
    """Commit the changes of tracked files. Return whether there is a commit after the base."""
    run(state, f"git commit --quiet --all --message {shlex.quote(message)}")
    return run(state, f"test $(git rev-parse HEAD) != {shlex.quote(state['repository']['base'])}")["exit_code"] == 0
