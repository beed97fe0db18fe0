"""Checks of arguments of a provider's verbs, without I/O."""

import os
import re
from collections.abc import Mapping, Sequence

from sandboxes.providers.base import DATA, WORKSPACE
from sandboxes.providers.errors import BadPath, Rejected


def split_sandbox_path(path: str) -> tuple[str, tuple[str, ...]]:
    """Split an absolute sandbox path into its root (/workspace or /data) and parts, without I/O. Raise BadPath."""
    parts = path.split("/")
    if len(parts) < 3 or parts[0] or "/" + parts[1] not in (WORKSPACE, DATA):
        raise BadPath(f"A path must lie under {WORKSPACE} or {DATA}.")
    if any(part in ("", ".", "..") for part in parts[2:]) or "\0" in path:
        raise BadPath("A path must not contain empty parts, '.', '..' or NUL.")
    try:
        is_too_long = len(os.fsencode(path)) > 4000 or any(len(os.fsencode(part)) > 255 for part in parts)
    except UnicodeEncodeError:
        raise BadPath("A path must be valid Unicode, or bytes decoded by os.fsdecode.") from None
    if is_too_long:
        raise BadPath("A path must not exceed 4000 bytes, or 255 bytes between slashes.")
    return "/" + parts[1], tuple(parts[2:])


def check_root(path: str) -> str:
    """Return `path` if it is /workspace or /data. Raise BadPath."""
    if path not in (WORKSPACE, DATA):
        raise BadPath(f"The root must be {WORKSPACE} or {DATA}.")
    return path


def check_relative_path(root: str, path: str) -> str:
    """Return `path` if it is a valid path relative to `root` and not empty. Raise BadPath."""
    split_sandbox_path(f"{check_root(root)}/{path}")
    return path


def check_directory_path(root: str, under: str) -> str:
    """Return `under` if it is a valid path relative to `root`, or "" for the root itself. Raise BadPath."""
    return check_relative_path(root, under) if under else check_root(root) and under


def split_move(source: str, target: str) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Return the root of a move, and the parts of both paths. Raise BadPath, also for paths in different roots."""
    (root, old), (target_root, new) = split_sandbox_path(source), split_sandbox_path(target)
    if root != target_root:
        raise BadPath(f"A file cannot be moved between {WORKSPACE} and {DATA}.")
    return root, old, new


def check_range(start: int, length: int) -> None:
    """Raise Rejected if the offset or the length is negative."""
    if start < 0 or length < 0:
        raise Rejected("The offset and the length of a byte range must not be negative.")


def check_patterns(exclude: Sequence[str]) -> Sequence[str]:
    """Return the patterns if they are valid text without NUL. Raise Rejected."""
    for pattern in exclude:
        try:
            if b"\0" in os.fsencode(pattern):
                raise Rejected("A pattern must not contain NUL.")
        except UnicodeEncodeError:
            raise Rejected("A pattern must be valid Unicode.") from None
    return exclude


def check_slug(kind: str) -> str:
    """Return `kind` if it is a slug. Raise Rejected."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", kind):
        raise Rejected("The kind of an environment must be 1 to 100 characters of a-z, A-Z, 0-9, - and _.")
    return kind


def check_command(argv: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
    """Raise Rejected unless the command can be passed to a program."""
    if not argv:
        raise Rejected("argv must not be empty.")
    if not cwd.startswith("/"):
        raise Rejected("cwd must be an absolute path.")
    if any(not key or "=" in key for key in env):
        raise Rejected("The name of an environment variable must not be empty or contain '='.")
    for word in (*argv, *env, *env.values(), cwd):
        if "\0" in word or not _is_encodable(word):
            raise Rejected("Arguments, environment and cwd must be valid Unicode without NUL.")


def _is_encodable(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True
