"""File verbs, for providers whose sandboxes contain Python: each verb executes image/files.py in the sandbox.

The sandbox's own memory and CPU are used. The output is untrusted: it is size-limited and strictly validated."""

import errno
import io
import os
import re
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from typing import BinaryIO

from sandboxes.image import files
from sandboxes.providers.arguments import (
    check_directory_path,
    check_patterns,
    check_range,
    check_relative_path,
    check_root,
    check_slug,
    split_move,
    split_sandbox_path,
)
from sandboxes.providers.base import DATA, GET_FILES_TIMEOUT, WORKSPACE, FileStat, Provider
from sandboxes.providers.errors import (
    BadPath,
    FailureCause,
    FileExists,
    NoSuchFile,
    OutOfSpace,
    ProviderError,
    SandboxUnreadable,
    TooLarge,
    Unavailable,
)
from sandboxes.providers.streams import BoundedBuffer, Pace

# Of each verb but `get_files`, beyond the time that the minimum rate grants. Shorter than a claim without progress.
VERB_TIMEOUT = timedelta(minutes=3)

_ERRORS_BY_EXIT_CODE: dict[int, type[ProviderError]] = {
    files.NO_FILE: NoSuchFile,
    files.BAD_PATH: BadPath,
    files.TOO_LARGE: TooLarge,
    files.EXISTS: FileExists,
}
SIGNAL_EXIT_CODE = 128  # plus the number of the signal that has ended the operation, as for lack of memory
# Texts of an OSError, which is printed with exit code 1 by each version of image/files.py that a sandbox may have.
NO_SPACE_PREFIXES = (f"[Errno {errno.ENOSPC}]", f"[Errno {errno.EDQUOT}]")
_NUMBER_PATTERN, _MODE_PATTERN, _STAMP_PATTERN = (
    re.compile(rb"[0-9]{1,18}"),
    re.compile(rb"[0-7]{1,3}"),
    re.compile(rb"[0-9a-f.]{1,60}"),
)
_KINDS = {b"file", b"directory", b"link", b"other"}


class FileVerbsProvider(Provider):
    """File verbs on top of `_stream_output`. Each has a total time, which grows with the bytes that it transfers."""

    clock: Callable[[], float] = time.monotonic

    @abstractmethod
    def _stream_output(self, ref: str, words: Sequence[str], stdin: BinaryIO | None = None) -> Iterator[bytes]:
        """Execute image/files.py with these arguments in the sandbox, and yield its output.

        Raise the error that `raise_for_exit_code` chooses for an exit code other than 0."""

    def read_file(self, ref: str, path: str, *, limit: int) -> bytes:
        root, parts = split_sandbox_path(path)
        return self._run_in_sandbox(ref, "read", root, str(limit), stdin=_encode_stdin("/".join(parts)), cap=limit)

    def read_range(self, ref: str, path: str, *, start: int, length: int) -> tuple[bytes, int]:
        root, parts = split_sandbox_path(path)
        check_range(start, length)
        words, stdin = ("read_range", root, str(start), str(length)), _encode_stdin("/".join(parts))
        size, _, content = self._run_in_sandbox(ref, *words, stdin=stdin, cap=length + 20).partition(b"\n")
        if not _NUMBER_PATTERN.fullmatch(size):
            raise SandboxUnreadable(f"{ref}: invalid size of {path}", cause=FailureCause.AGENT_FAILED)
        return content[:length], int(size)

    def write_file(self, ref: str, path: str, content: bytes) -> None:
        root, parts = split_sandbox_path(path)
        self._run_in_sandbox(ref, "write", root, stdin=_encode_stdin("/".join(parts), content=content))

    def remove_file(self, ref: str, path: str) -> None:
        root, parts = split_sandbox_path(path)
        self._run_in_sandbox(ref, "remove", root, stdin=_encode_stdin("/".join(parts)))

    def make_directory(self, ref: str, path: str) -> None:
        root, parts = split_sandbox_path(path)
        self._run_in_sandbox(ref, "mkdir", root, stdin=_encode_stdin("/".join(parts)))

    def move_file(self, ref: str, source: str, target: str, *, overwrite: bool) -> None:
        root, old, new = split_move(source, target)
        words = ("move", root, "overwrite" if overwrite else "keep")
        self._run_in_sandbox(ref, *words, stdin=_encode_stdin("/".join(old), "/".join(new)))

    def manifest(
        self, ref: str, root: str, *, under: str = "", deep: bool = True, max_entries: int = 100_000
    ) -> dict[str, FileStat]:
        check_directory_path(root, under)
        words = ("look", root, "deep" if deep else "here", str(max_entries))
        return self._read_listing(ref, words, _encode_stdin(under), under=under, max_entries=max_entries)

    def _read_listing(
        self, ref: str, words: Sequence[str], stdin: BinaryIO, *, under: str = "", max_entries: int
    ) -> dict[str, FileStat]:
        """Execute an operation that prints a listing below `under`."""
        output = BoundedBuffer(420 * max_entries + (4 << 20))
        for chunk in self._pace_output(ref, words, stdin):
            output.add(chunk)
        listing = None if output.truncated else parse_listing(bytes(output), under, max_entries)
        if listing is None:
            raise SandboxUnreadable(f"{ref}: invalid listing of {words[1]}", cause=FailureCause.AGENT_FAILED)
        return listing

    def get_files(
        self,
        ref: str,
        root: str,
        *,
        only: Collection[str] | None = None,
        exclude: Sequence[str] = (),
        exact: bool = False,
        max_bytes: int | None = None,
        timeout: timedelta = GET_FILES_TIMEOUT,
    ) -> Iterator[bytes]:
        patterns = check_patterns(exclude)
        selected = [] if only is None else [check_relative_path(root, path) for path in only]
        # A files.py of an earlier version takes "exact" for "all".
        selection = "only" if only is not None else "exact" if exact else "all"
        words = ("pack", check_root(root), selection, str(len(patterns)))
        chunks = self._stream_output(ref, words, _encode_stdin(*patterns, *selected))
        return Pace(timeout, clock=self.clock).limit(chunks, max_bytes=max_bytes)

    def put_files(self, ref: str, root: str, tar: BinaryIO) -> None:
        self._run_in_sandbox(ref, "unpack", check_root(root), stdin=tar)

    def put_and_list_files(self, ref: str, root: str, tar: BinaryIO, *, max_entries: int = 100_000) -> dict[str, FileStat]:
        return self._read_listing(ref, ("unpack_and_look", check_root(root), str(max_entries)), tar, max_entries=max_entries)

    def remove_files(self, ref: str, root: str, paths: Collection[str]) -> None:
        checked = [check_relative_path(root, path) for path in paths]
        self._run_in_sandbox(ref, "remove_files", check_root(root), stdin=_encode_stdin(*checked))

    def clear(self, ref: str, root: str) -> None:
        recreated = (".home",) if check_root(root) == WORKSPACE else ()
        self._run_in_sandbox(ref, "clear", root, *recreated)

    def size(self, ref: str, root: str) -> int:
        size = self._run_in_sandbox(ref, "size", check_root(root), cap=20).strip()
        if not _NUMBER_PATTERN.fullmatch(size):
            raise SandboxUnreadable(f"{ref}: invalid size of {root}", cause=FailureCause.AGENT_FAILED)
        return int(size)

    def seed(self, ref: str, kind: str, tar: BinaryIO) -> None:
        self._run_in_sandbox(ref, "seed", DATA, check_slug(kind), stdin=tar)

    def _run_in_sandbox(self, ref: str, *words: str, stdin: BinaryIO | None = None, cap: int = 0) -> bytes:
        """Execute image/files.py in the container. Return at most `cap` bytes of its output."""
        out = BoundedBuffer(cap)
        for chunk in self._pace_output(ref, words, stdin):
            out.add(chunk)
        return bytes(out)

    def _pace_output(self, ref: str, words: Sequence[str], stdin: BinaryIO | None) -> Iterator[bytes]:
        """Like `_stream_output`. Raise SandboxUnreadable once it takes longer than VERB_TIMEOUT and its bytes permit."""
        pace = Pace(VERB_TIMEOUT, clock=self.clock)
        return pace.limit(self._stream_output(ref, words, stdin and pace.track_input(stdin)))


def raise_for_exit_code(exit_code: int, message: str) -> None:
    """Raise the error of an exit code of image/files.py. Return for 0."""
    if exit_code > SIGNAL_EXIT_CODE:
        raise SandboxUnreadable(
            message.strip() or f"killed by signal {exit_code - SIGNAL_EXIT_CODE}", cause=FailureCause.AGENT_FAILED
        )
    if exit_code == 1 and message.startswith(NO_SPACE_PREFIXES):
        raise OutOfSpace(message.strip())
    if exit_code:
        raise _ERRORS_BY_EXIT_CODE.get(exit_code, Unavailable)(message.strip() or f"exit code {exit_code}")


def _encode_stdin(*words: str, content: bytes = b"") -> BinaryIO:
    """Encode NUL-terminated arguments, and optional content, for the stdin of image/files.py."""
    return io.BytesIO(b"".join(os.fsencode(word) + b"\0" for word in words) + content)


def parse_listing(output: bytes, under: str, max_entries: int) -> dict[str, FileStat] | None:
    """Parse the listing printed by image/files.py. Return None if it is not a valid listing."""
    words, entries = output.split(b"\0"), dict[str, FileStat]()
    if len(words) % 7 != 1 or words[-1] or len(words) > 7 * max_entries + 1:
        return None
    for start in range(0, len(words) - 1, 7):
        path, kind, mode, size, mtime, stamp, target = words[start : start + 7]
        parent_path, _, name = path.rpartition(b"/")
        entry_path, parent = os.fsdecode(path), os.fsdecode(parent_path)
        if (
            len(path) > files.MAX_PATH_BYTES
            or path.startswith(b"/")
            or entry_path in entries
            or not 0 < len(name) <= 255
            or name in (b".", b"..")
            or (parent != under and (parent not in entries or entries[parent].kind != "directory"))
            or kind not in _KINDS
            or not _MODE_PATTERN.fullmatch(mode)
            or not (_NUMBER_PATTERN.fullmatch(size) and _NUMBER_PATTERN.fullmatch(mtime))
            or int(mtime) > files.MAX_MTIME_SECONDS
            or not _STAMP_PATTERN.fullmatch(stamp)
            or len(target) > 4096
            or bool(target) != (kind == b"link")
        ):
            return None
        fields = (kind.decode(), int(mode, 8), int(size), int(mtime), stamp.decode(), os.fsdecode(target))
        entries[entry_path] = FileStat(*fields)
    return entries
