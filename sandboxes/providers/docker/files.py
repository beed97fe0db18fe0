"""File operations of the Docker provider: directly on the host where possible, otherwise by executing image/files.py.

Host access requires root on the engine's machine and costs about a fiftieth of an exec. Anything unexpected or slow falls back
to the exec, which uses the sandbox's own memory and CPU and whose result is authoritative. The output of the exec is untrusted:
it is size-limited and strictly validated."""

import io
import os
import re
import tarfile
import tempfile
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import BinaryIO, TypeVar, cast

from sandboxes.image import files
from sandboxes.providers import tar_validation
from sandboxes.providers.arguments import (
    check_directory_path,
    check_patterns,
    check_range,
    check_relative_path,
    check_root,
    check_slug,
    split_sandbox_path,
)
from sandboxes.providers.base import (
    DATA,
    GET_FILES_TIMEOUT,
    WORKSPACE,
    BadPath,
    FileStat,
    NoSuchFile,
    ProviderError,
    TooLarge,
    Unavailable,
)
from sandboxes.providers.docker import host_files
from sandboxes.providers.docker.commands import AGENT_UID, PYTHON_COMMAND, ContainerCommandProvider
from sandboxes.providers.docker.engine import shares_kernel
from sandboxes.providers.docker.exec_stream import BoundedBuffer
from sandboxes.providers.streams import BoundedWriter, limit_stream

IDLE_TIMEOUT_SECONDS = 60.0  # without progress of a file transfer
HOST_TIMEOUT_SECONDS = 2.0  # per operation on the host
MAX_HOST_SIZED_FILES = 100_000  # files whose sizes are summed on the host
MAX_HOST_FILES, MAX_HOST_TAR_BYTES = 500, 32 << 20  # limits of a tar that is written on the host
T = TypeVar("T")
_ERRORS_BY_EXIT_CODE: dict[int, type[ProviderError]] = {
    files.NO_FILE: NoSuchFile,
    files.BAD_PATH: BadPath,
    files.TOO_LARGE: TooLarge,
}
_NUMBER_PATTERN, _MODE_PATTERN, _STAMP_PATTERN = (
    re.compile(rb"[0-9]{1,18}"),
    re.compile(rb"[0-7]{1,3}"),
    re.compile(rb"[0-9a-f.]{1,60}"),
)
_KINDS = {b"file", b"directory", b"link", b"other"}


class ContainerFilesProvider(ContainerCommandProvider):
    """File verbs of DockerProvider."""

    def read_file(self, ref: str, path: str, *, limit: int) -> bytes:
        root, parts = split_sandbox_path(path)
        content = self._call_on_host(ref, _translate_missing_file(lambda directory: files.read(directory, parts, limit)), root)
        if content is not None:
            return content
        return self._run_in_container(ref, "read", root, str(limit), stdin=_encode_stdin("/".join(parts)), cap=limit)

    def read_range(self, ref: str, path: str, *, start: int, length: int) -> tuple[bytes, int]:
        root, parts = split_sandbox_path(path)
        check_range(start, length)
        result = self._call_on_host(
            ref, _translate_missing_file(lambda directory: files.read_range(directory, parts, start, length)), root
        )
        if result is not None:
            return result
        words = ("read_range", root, str(start), str(length))
        size, _, content = self._run_in_container(ref, *words, stdin=_encode_stdin("/".join(parts)), cap=length + 20).partition(
            b"\n"
        )
        if not _NUMBER_PATTERN.fullmatch(size):
            raise Unavailable(f"{ref}: invalid size of {path}")
        return content[:length], int(size)

    def write_file(self, ref: str, path: str, content: bytes) -> None:
        root, parts = split_sandbox_path(path)
        if not self._try_on_host(ref, lambda directory: files.write(directory, parts, content), root):
            self._run_in_container(ref, "write", root, stdin=_encode_stdin("/".join(parts), content=content))

    def remove_file(self, ref: str, path: str) -> None:
        root, parts = split_sandbox_path(path)
        if not self._try_on_host(ref, _translate_missing_file(lambda directory: files.remove(directory, parts)), root):
            self._run_in_container(ref, "remove", root, stdin=_encode_stdin("/".join(parts)))

    def manifest(
        self, ref: str, root: str, *, under: str = "", deep: bool = True, max_entries: int = 100_000
    ) -> dict[str, FileStat]:
        check_directory_path(root, under)

        def scan(directory: str) -> dict[str, FileStat]:
            entries = files.scan(directory, under, deep=deep, max_entries=max_entries, seconds=HOST_TIMEOUT_SECONDS)
            return {path: FileStat._make(fields) for path, fields in entries}

        entries_on_host = self._call_on_host(ref, _translate_missing_file(scan), root)
        if entries_on_host is not None:
            return entries_on_host
        words = ("look", root, "deep" if deep else "here", str(max_entries))
        output = BoundedBuffer(420 * max_entries + (4 << 20))
        for chunk in self._stream_output(ref, words, _encode_stdin(under)):
            output.add(chunk)
        listing = None if output.truncated else _parse_listing(bytes(output), under, max_entries)
        if listing is None:
            raise Unavailable(f"{ref}: invalid listing of {root}")
        return listing

    def get_files(
        self,
        ref: str,
        root: str,
        *,
        only: Collection[str] | None = None,
        exclude: Sequence[str] = (),
        max_bytes: int | None = None,
        timeout: timedelta = GET_FILES_TIMEOUT,
    ) -> Iterator[bytes]:
        chunks = self._stream_files(ref, root, only, check_patterns(exclude), max_bytes)
        return limit_stream(chunks, max_bytes=max_bytes, timeout=timeout)

    def _stream_files(
        self, ref: str, root: str, only: Collection[str] | None, patterns: Sequence[str], max_bytes: int | None
    ) -> Iterator[bytes]:
        pattern_count = str(len(patterns))
        if only is None:
            yield from self._stream_output(ref, ("pack", check_root(root), "all", pattern_count), _encode_stdin(*patterns))
            return
        selected = [check_relative_path(root, path) for path in only]
        max_host_bytes = MAX_HOST_TAR_BYTES if max_bytes is None else min(MAX_HOST_TAR_BYTES, max_bytes)
        with tempfile.TemporaryFile() as spool:

            def pack(directory: str) -> None:
                files.pack(
                    directory,
                    cast(BinaryIO, BoundedWriter(spool, max_host_bytes, "The tar exceeds the limit for reading on the host.")),
                    only=selected,
                    exclude=patterns,
                    seconds=HOST_TIMEOUT_SECONDS,
                )

            if len(selected) <= MAX_HOST_FILES and self._try_on_host(ref, pack, check_root(root)):
                spool.seek(0)
                yield from iter(lambda: spool.read(files.CHUNK_BYTES), b"")
                return
        yield from self._stream_output(ref, ("pack", root, "only", pattern_count), _encode_stdin(*patterns, *selected))

    def put_files(self, ref: str, root: str, tar: BinaryIO) -> None:
        check_root(root)
        if tar.seekable() and tar_validation.is_plain_tar(tar):
            start = tar.tell()
            if self._try_on_host(ref, lambda directory: files.unpack(directory, tar), root):
                return
            tar.seek(start)
        self._run_in_container(ref, "unpack", root, stdin=tar)

    def remove_files(self, ref: str, root: str, paths: Collection[str]) -> None:
        checked = [check_relative_path(root, path) for path in paths]
        if not self._try_on_host(
            ref, lambda directory: files.remove_files(directory, checked, seconds=HOST_TIMEOUT_SECONDS), check_root(root)
        ):
            self._run_in_container(ref, "remove_files", root, stdin=_encode_stdin(*checked))

    def clear(self, ref: str, root: str) -> None:
        recreated = (".home",) if check_root(root) == WORKSPACE else ()
        if not self._try_on_host(ref, lambda directory: files.clear(directory, recreated, seconds=HOST_TIMEOUT_SECONDS), root):
            self._run_in_container(ref, "clear", root, *recreated)

    def size(self, ref: str, root: str) -> int:
        size_on_host = self._call_on_host(
            ref,
            lambda directory: files.size(directory, max_entries=MAX_HOST_SIZED_FILES, seconds=HOST_TIMEOUT_SECONDS),
            check_root(root),
        )
        if size_on_host is not None:
            return size_on_host
        size = self._run_in_container(ref, "size", root, cap=20).strip()
        if not _NUMBER_PATTERN.fullmatch(size):
            raise Unavailable(f"{ref}: invalid size of {root}")
        return int(size)

    def seed(self, ref: str, kind: str) -> None:
        under = f"{files.SKILLS_DIRECTORY.removeprefix('/opt/')}/{check_slug(kind)}"
        if not self._try_on_host(ref, lambda opt, data: files.seed(opt, under, data, kind), "/opt", DATA):
            self._run_in_container(ref, "seed", DATA, kind)

    def _try_on_host(self, ref: str, function: Callable[..., None], *roots: str) -> bool:
        """Call `function` as `_call_on_host` does. Return whether it succeeded."""

        def call(*directories: str) -> bool:
            function(*directories)
            return True

        return bool(self._call_on_host(ref, call, *roots))

    def _call_on_host(self, ref: str, function: Callable[..., T], *roots: str) -> T | None:
        """Call `function` with the host paths of directories of the sandbox, with the agent's permissions.

        Return None after any failure: the caller then executes the same operation in the container, whose error is
        authoritative. Provider errors are passed on."""
        if os.geteuid() != 0 or self._engine.has_user_remapping:
            return None
        try:
            with ExitStack() as stack:
                directories = self._open_directories(ref, roots, stack)
                stack.enter_context(host_files.impersonate_user(AGENT_UID))
                return function(*directories)
        except (OSError, files.BadPath, files.TooLarge, tarfile.TarError, ValueError):
            return None

    def _open_directories(self, ref: str, roots: Sequence[str], stack: ExitStack) -> list[str]:
        """Open directories of the container through /proc. Raise OSError if its processes are not visible here."""
        first_processes = self._engine.first_processes
        with suppress(KeyError, OSError):  # the container was restarted: the cached process is gone or unrelated
            return [stack.enter_context(host_files.open_container_directory(*first_processes[ref], root)) for root in roots]
        inspected = self._engine.call("GET", f"/containers/{ref}/json")
        if not shares_kernel(inspected):
            raise ProcessLookupError(f"the processes of {ref} do not run on this kernel")
        if len(first_processes) > 10_000:
            first_processes.clear()
        first_processes[ref] = inspected["State"]["Pid"], inspected["Id"]
        return [stack.enter_context(host_files.open_container_directory(*first_processes[ref], root)) for root in roots]

    def _run_in_container(self, ref: str, *words: str, stdin: BinaryIO | None = None, cap: int = 0) -> bytes:
        """Execute image/files.py in the container. Return at most `cap` bytes of its output."""
        out = BoundedBuffer(cap)
        for chunk in self._stream_output(ref, words, stdin):
            out.add(chunk)
        return bytes(out)

    def _stream_output(self, ref: str, words: Sequence[str], stdin: BinaryIO | None = None) -> Iterator[bytes]:
        err = BoundedBuffer(4096)
        argv = (*PYTHON_COMMAND, "/opt/leasehold/files.py", *words)
        with self._running(ref, argv, {}, "/", stdin, uuid.uuid4().hex) as run:
            run.idle_timeout = IDLE_TIMEOUT_SECONDS
            try:
                for stream, chunk in run.frames():
                    if stream == 2:
                        err.add(chunk)
                    else:
                        yield chunk
                exit_code, _ = run.wait()
            except TimeoutError as error:
                raise Unavailable(f"{ref}: no progress of {words[0]} in {words[1]} for {IDLE_TIMEOUT_SECONDS:.0f} s") from error
        if exit_code:
            message = bytes(err).decode(errors="replace").strip() or f"exit code {exit_code}"
            raise _ERRORS_BY_EXIT_CODE.get(exit_code, Unavailable)(message)


def _translate_missing_file(function: Callable[[str], T]) -> Callable[[str], T]:
    """Wrap a host operation: a missing file is definitive and needs no exec to confirm it."""

    def call(directory: str) -> T:
        try:
            return function(directory)
        except FileNotFoundError as error:
            raise NoSuchFile("The file does not exist.") from error

    return call


def _encode_stdin(*words: str, content: bytes = b"") -> BinaryIO:
    """Encode NUL-terminated arguments, and optional content, for the stdin of image/files.py."""
    return io.BytesIO(b"".join(os.fsencode(word) + b"\0" for word in words) + content)


def _parse_listing(output: bytes, under: str, max_entries: int) -> dict[str, FileStat] | None:
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
