"""Export of an agent's data to a tar or a local directory."""

import os
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from shutil import copyfileobj
from typing import BinaryIO

from sandboxes.hosts.directories import chmod_no_follow
from sandboxes.models.state import AgentData
from sandboxes.state import data_tree, pull
from sandboxes.state.data_editing import InvalidDataPath
from sandboxes.state.data_tree import DIRECTORY
from sandboxes.storage.base import CHUNK_BYTES


def export_tar(data: AgentData, out: BinaryIO, *, now: datetime) -> int:
    """Write all live paths to a seekable file as a tar, with verified content. Return the number of paths. Raise StoreError."""
    rows = list(data_tree.find_live_files(data).select_related("stored_in", "data"))
    pull.write_tar(rows, out, now=now)
    return len(rows)


def export_directory(data: AgentData, root: Path, *, now: datetime) -> int:
    """Write all live paths into an empty or new directory. Return the number of paths. Raise StoreError or OSError.

    Links are created last, so that no file is written through a link."""
    root.mkdir(parents=True, exist_ok=True)
    if any(root.iterdir()):
        raise InvalidDataPath(f"{root} is not empty.")
    rows = sorted(data_tree.find_live_files(data).select_related("stored_in", "data"), key=lambda row: row.path)
    if invalid := next((row.path for row in rows if data_tree.describe_path_error(row.path)), None):
        raise InvalidDataPath(f"{invalid!r} would be written outside {root}.")
    with ExitStack() as stack:
        content = pull.fetch_contents([row for row in rows if row.kind == "file"], stack, now=now)
        for row in rows:
            path = root / row.path
            (path if row.kind == DIRECTORY else path.parent).mkdir(parents=True, exist_ok=True)
            if row.kind == "file":
                with path.open("xb") as out:
                    copyfileobj(content[row.path], out, CHUNK_BYTES)
                chmod_no_follow(path, row.mode)
                os.utime(path, (row.mtime, row.mtime))
    for row in rows:
        if row.kind == "link":
            (root / row.path).symlink_to(row.target)
    for row in reversed(rows):  # deepest first: a directory's mode may forbid changes below it
        if row.kind == DIRECTORY:
            chmod_no_follow(root / row.path, row.mode)
    return len(rows)
