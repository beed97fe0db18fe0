"""Files in containers: from outside where that can be done, else by an exec of image/files.py.

From outside is for root on the engine's own machine, and costs a fiftieth of an exec. Whatever is unexpected there, or
takes long, is left to the exec, which has the sandbox's memory and the sandbox's time to spend, and decides.
What the exec says is a sandbox's word: it is bounded and taken apart with care."""

import io
import os
import re
import tarfile
import tempfile
import uuid
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import IO, BinaryIO, TypeVar, cast

from sandboxes.image import files
from sandboxes.providers import tar_validation
from sandboxes.providers.base import (
    DATA,
    WORKSPACE,
    BadPath,
    FileStat,
    NoSuchFile,
    Provider,
    ProviderError,
    TooLarge,
    Unavailable,
    check_directory_path,
    check_patterns,
    check_range,
    check_relative_path,
    check_root,
    check_slug,
    split_sandbox_path,
)
from sandboxes.providers.docker import host_files
from sandboxes.providers.docker.engine import BoundedBuffer, Engine, EngineExec, shares_kernel

AGENT_UID = 10001  # user id of whatever an agent runs, as in image/Dockerfile
PYTHON_COMMAND = ("python3", "-I", "-S")
IDLE_TIMEOUT_SECONDS = 60.0  # seconds in which a transfer of files makes some progress
HOST_TIMEOUT_SECONDS = 2.0  # seconds that something takes at most from outside
MAX_HOST_SIZED_FILES = 100_000  # files whose sizes are added up from outside
MAX_HOST_FILES, MAX_HOST_TAR_BYTES = 500, 32 << 20  # files, and bytes of a tar of them, that are fetched from outside
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


class ContainerFilesProvider(Provider):
    """The verbs of DockerProvider that are about files."""

    @property
    @abstractmethod
    def _engine(self) -> Engine: ...

    @abstractmethod
    def _running(
        self, ref: str, argv: Sequence[str], env: Mapping[str, str], cwd: str, stdin: BinaryIO | None, mark: str
    ) -> AbstractContextManager[EngineExec]:
        """An exec that has been started. Whoever leaves before it ended has it killed."""

    def read_file(self, ref: str, path: str, *, limit: int) -> bytes:
        root, parts = split_sandbox_path(path)
        found = self._call_on_host(ref, _translate_missing_file(lambda place: files.read(place, parts, limit)), root)
        if found is not None:
            return found
        return self._inside(ref, "read", root, str(limit), stdin=_encode_stdin("/".join(parts)), cap=limit)

    def read_range(self, ref: str, path: str, *, start: int, length: int) -> tuple[bytes, int]:
        root, parts = split_sandbox_path(path)
        check_range(start, length)
        found = self._call_on_host(
            ref, _translate_missing_file(lambda place: files.read_range(place, parts, start, length)), root
        )
        if found is not None:
            return found
        words = ("read_range", root, str(start), str(length))
        size, _, content = self._inside(ref, *words, stdin=_encode_stdin("/".join(parts)), cap=length + 20).partition(b"\n")
        if not _NUMBER_PATTERN.fullmatch(size):
            raise Unavailable(f"{ref} did not say how large {path} is")
        return content[:length], int(size)

    def write_file(self, ref: str, path: str, content: bytes) -> None:
        root, parts = split_sandbox_path(path)
        if not self._try_on_host(ref, lambda place: files.write(place, parts, content), root):
            self._inside(ref, "write", root, stdin=_encode_stdin("/".join(parts), then=content))

    def remove_file(self, ref: str, path: str) -> None:
        root, parts = split_sandbox_path(path)
        if not self._try_on_host(ref, _translate_missing_file(lambda place: files.remove(place, parts)), root):
            self._inside(ref, "remove", root, stdin=_encode_stdin("/".join(parts)))

    def manifest(self, ref: str, root: str, *, under: str = "", deep: bool = True, most: int = 100_000) -> dict[str, FileStat]:
        check_directory_path(root, under)

        def look(place: str) -> dict[str, FileStat]:
            seen = files.scan(place, under, deep=deep, most=most, seconds=HOST_TIMEOUT_SECONDS)
            return {path: FileStat._make(fields) for path, fields in seen}

        found = self._call_on_host(ref, _translate_missing_file(look), root)
        if found is not None:
            return found
        words, said = ("look", root, "deep" if deep else "here", str(most)), BoundedBuffer(420 * most + (4 << 20))
        for chunk in self._stream_output(ref, words, _encode_stdin(under)):
            said.add(chunk)
        told = None if said.truncated else _parse_listing(bytes(said), under, most)
        if told is None:
            raise Unavailable(f"{ref} does not say plainly what is in {root}")
        return told

    def get_files(
        self, ref: str, root: str, *, only: Collection[str] | None = None, exclude: Sequence[str] = ()
    ) -> Iterator[bytes]:
        patterns, many = check_patterns(exclude), str(len(exclude))
        if only is None:
            yield from self._stream_output(ref, ("pack", check_root(root), "all", many), _encode_stdin(*patterns))
            return
        wanted = [check_relative_path(root, path) for path in only]
        with tempfile.TemporaryFile() as spool:

            def pack(place: str) -> None:
                files.pack(
                    place, cast(BinaryIO, _BoundedWriter(spool)), only=wanted, exclude=patterns, seconds=HOST_TIMEOUT_SECONDS
                )

            if len(wanted) <= MAX_HOST_FILES and self._try_on_host(ref, pack, check_root(root)):
                spool.seek(0)
                yield from iter(lambda: spool.read(files.CHUNK_BYTES), b"")
                return
        yield from self._stream_output(ref, ("pack", root, "only", many), _encode_stdin(*patterns, *wanted))

    def put_files(self, ref: str, root: str, tar: BinaryIO) -> None:
        check_root(root)
        if tar.seekable() and tar_validation.is_plain_tar(tar):
            start = tar.tell()
            if self._try_on_host(ref, lambda place: files.unpack(place, tar), root):
                return
            tar.seek(start)
        self._inside(ref, "unpack", root, stdin=tar)

    def remove_files(self, ref: str, root: str, paths: Collection[str]) -> None:
        gone = [check_relative_path(root, path) for path in paths]
        if not self._try_on_host(
            ref, lambda place: files.remove_files(place, gone, seconds=HOST_TIMEOUT_SECONDS), check_root(root)
        ):
            self._inside(ref, "remove_files", root, stdin=_encode_stdin(*gone))

    def clear(self, ref: str, root: str) -> None:
        again = (".home",) if check_root(root) == WORKSPACE else ()
        if not self._try_on_host(ref, lambda place: files.clear(place, again, seconds=HOST_TIMEOUT_SECONDS), root):
            self._inside(ref, "clear", root, *again)

    def size(self, ref: str, root: str) -> int:
        found = self._call_on_host(
            ref, lambda place: files.size(place, most=MAX_HOST_SIZED_FILES, seconds=HOST_TIMEOUT_SECONDS), check_root(root)
        )
        if found is not None:
            return found
        said = self._inside(ref, "size", root, cap=20).strip()
        if not _NUMBER_PATTERN.fullmatch(said):
            raise Unavailable(f"{ref} did not say how much is in {root}")
        return int(said)

    def seed(self, ref: str, kind: str) -> None:
        under = f"{files.SKILLS_DIRECTORY.removeprefix('/opt/')}/{check_slug(kind)}"
        if not self._try_on_host(ref, lambda opt, data: files.seed(opt, under, data, kind), "/opt", DATA):
            self._inside(ref, "seed", DATA, kind)

    def _try_on_host(self, ref: str, act: Callable[..., None], *roots: str) -> bool:
        """As _from_outside, of what returns nothing: did it work?"""

        def done(*places: str) -> bool:
            act(*places)
            return True

        return bool(self._call_on_host(ref, done, *roots))

    def _call_on_host(self, ref: str, act: Callable[..., T], *roots: str) -> T | None:
        """What `act` returns for these places in the sandbox. None if it did not work, for whatever reason: an exec of
        the same then does it, or says in its own words why not. The port's own errors pass."""
        if os.geteuid() != 0 or self._engine.has_user_remapping:
            return None
        try:
            with ExitStack() as stack:
                here = self._open_places(ref, roots, stack)
                stack.enter_context(host_files.impersonate_user(AGENT_UID))
                return act(*here)
        except (OSError, files.BadPath, files.TooLarge, tarfile.TarError, ValueError):
            return None

    def _open_places(self, ref: str, roots: Sequence[str], stack: ExitStack) -> list[str]:
        first_processes = self._engine.first_processes
        with suppress(KeyError, OSError):  # not the first one of that container any more, whoever has its number now
            return [stack.enter_context(host_files.open_container_directory(*first_processes[ref], root)) for root in roots]
        found = self._engine.call("GET", f"/containers/{ref}/json")
        if not shares_kernel(found):
            raise ProcessLookupError(f"the processes of {ref} are not this machine's")
        if len(first_processes) > 10_000:
            first_processes.clear()
        first_processes[ref] = found["State"]["Pid"], found["Id"]
        return [stack.enter_context(host_files.open_container_directory(*first_processes[ref], root)) for root in roots]

    def _inside(self, ref: str, *words: str, stdin: BinaryIO | None = None, cap: int = 0) -> bytes:
        """What image/files.py answers; at most `cap` bytes, whatever the sandbox says."""
        out = BoundedBuffer(cap)
        for chunk in self._stream_output(ref, words, stdin):
            out.add(chunk)
        return bytes(out)

    def _stream_output(self, ref: str, words: Sequence[str], stdin: BinaryIO | None = None) -> Iterator[bytes]:
        err = BoundedBuffer(4096)
        argv = (*PYTHON_COMMAND, "/opt/leasehold/files.py", *words)
        with self._running(ref, argv, {}, "/", stdin, uuid.uuid4().hex) as run:
            run.idle = IDLE_TIMEOUT_SECONDS
            try:
                for stream, chunk in run.frames():
                    if stream == 2:
                        err.add(chunk)
                    else:
                        yield chunk
                exit_code, _ = run.ended()
            except TimeoutError as error:
                raise Unavailable(
                    f"{ref} spent {IDLE_TIMEOUT_SECONDS:.0f} s without progress over {words[0]} in {words[1]}"
                ) from error
        if exit_code:
            said = bytes(err).decode(errors="replace").strip() or f"exit code {exit_code}"
            raise _ERRORS_BY_EXIT_CODE.get(exit_code, Unavailable)(said)


class _BoundedWriter:
    """A file to write to that takes no more than SMALL bytes."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.left = file, MAX_HOST_TAR_BYTES

    def write(self, content: bytes) -> int:
        self.left -= len(content)
        if self.left < 0:
            raise files.TooLarge("this is more than is fetched from outside")
        return self.file.write(content)


def _translate_missing_file(act: Callable[[str], T]) -> Callable[[str], T]:
    """The same; but what is not there from outside is not there inside either."""

    def acted(place: str) -> T:
        try:
            return act(place)
        except FileNotFoundError as error:
            raise NoSuchFile("there is no such file") from error

    return acted


def _encode_stdin(*words: str, then: bytes = b"") -> BinaryIO:
    """What image/files.py reads from its stdin."""
    return io.BytesIO(b"".join(os.fsencode(word) + b"\0" for word in words) + then)


def _parse_listing(said: bytes, under: str, most: int) -> dict[str, FileStat] | None:
    """What image/files.py says that it saw, or None if that is not what it would say."""
    words, found = said.split(b"\0"), dict[str, FileStat]()
    if len(words) % 7 != 1 or words[-1] or len(words) > 7 * most + 1:
        return None
    for at in range(0, len(words) - 1, 7):
        path, kind, mode, size, mtime, stamp, target = words[at : at + 7]
        above, _, name = path.rpartition(b"/")
        whole, parent = os.fsdecode(path), os.fsdecode(above)
        if (
            len(path) > files.MAX_PATH_BYTES
            or path.startswith(b"/")
            or whole in found
            or not 0 < len(name) <= 255
            or name in (b".", b"..")
            or (parent != under and (parent not in found or found[parent].kind != "directory"))
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
        found[whole] = FileStat(*fields)
    return found
