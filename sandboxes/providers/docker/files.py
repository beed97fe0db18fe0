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
from sandboxes.providers.base import (
    DATA,
    WORKSPACE,
    BadPath,
    NoFile,
    Provider,
    ProviderError,
    Stat,
    TooLarge,
    Unavailable,
    below,
    directory_in,
    plain_patterns,
    root_of,
    slug,
    under_roots,
    whole_range,
)
from sandboxes.providers.docker import host_files
from sandboxes.providers.docker.engine import Engine, Kept, Run, shares_kernel

AGENT = 10001  # user id of whatever an agent runs, as in image/Dockerfile
PYTHON = ("python3", "-I", "-S")
IDLE = 60.0  # seconds in which a transfer of files makes some progress
SOON = 2.0  # seconds that something takes at most from outside
MANY = 100_000  # files whose sizes are added up from outside
FEW, SMALL = 500, 32 << 20  # files, and bytes of a tar of them, that are fetched from outside
T = TypeVar("T")
_ERRORS: dict[int, type[ProviderError]] = {
    files.NO_FILE: NoFile,
    files.BAD_PATH: BadPath,
    files.TOO_LARGE: TooLarge,
}
_NUMBER, _MODE, _STAMP = re.compile(rb"[0-9]{1,18}"), re.compile(rb"[0-7]{1,3}"), re.compile(rb"[0-9a-f.]{1,60}")
_KINDS = {b"file", b"directory", b"link", b"other"}


class FilesOfContainers(Provider):
    """The verbs of DockerProvider that are about files."""

    @property
    @abstractmethod
    def _engine(self) -> Engine: ...

    @abstractmethod
    def _running(
        self, ref: str, argv: Sequence[str], env: Mapping[str, str], cwd: str, stdin: BinaryIO | None, mark: str
    ) -> AbstractContextManager[Run]:
        """An exec that has been started. Whoever leaves before it ended has it killed."""

    def read_file(self, ref: str, path: str, *, limit: int) -> bytes:
        root, parts = under_roots(path)
        found = self._from_outside(ref, _known(lambda place: files.read(place, parts, limit)), root)
        if found is not None:
            return found
        return self._inside(ref, "read", root, str(limit), stdin=_words("/".join(parts)), cap=limit)

    def read_range(self, ref: str, path: str, *, start: int, length: int) -> tuple[bytes, int]:
        root, parts = under_roots(path)
        whole_range(start, length)
        found = self._from_outside(ref, _known(lambda place: files.read_range(place, parts, start, length)), root)
        if found is not None:
            return found
        words = ("read_range", root, str(start), str(length))
        size, _, content = self._inside(ref, *words, stdin=_words("/".join(parts)), cap=length + 20).partition(b"\n")
        if not _NUMBER.fullmatch(size):
            raise Unavailable(f"{ref} did not say how large {path} is")
        return content[:length], int(size)

    def write_file(self, ref: str, path: str, content: bytes) -> None:
        root, parts = under_roots(path)
        if not self._done_outside(ref, lambda place: files.write(place, parts, content), root):
            self._inside(ref, "write", root, stdin=_words("/".join(parts), then=content))

    def remove_file(self, ref: str, path: str) -> None:
        root, parts = under_roots(path)
        if not self._done_outside(ref, _known(lambda place: files.remove(place, parts)), root):
            self._inside(ref, "remove", root, stdin=_words("/".join(parts)))

    def manifest(self, ref: str, root: str, *, under: str = "", deep: bool = True, most: int = 100_000) -> dict[str, Stat]:
        directory_in(root, under)

        def look(place: str) -> dict[str, Stat]:
            seen = files.look(place, under, deep=deep, most=most, seconds=SOON)
            return {path: Stat._make(fields) for path, fields in seen}

        found = self._from_outside(ref, _known(look), root)
        if found is not None:
            return found
        words, said = ("look", root, "deep" if deep else "here", str(most)), Kept(420 * most + (4 << 20))
        for chunk in self._saying(ref, words, _words(under)):
            said.add(chunk)
        told = None if said.truncated else _told(bytes(said), under, most)
        if told is None:
            raise Unavailable(f"{ref} does not say plainly what is in {root}")
        return told

    def get_files(
        self, ref: str, root: str, *, only: Collection[str] | None = None, exclude: Sequence[str] = ()
    ) -> Iterator[bytes]:
        patterns, many = plain_patterns(exclude), str(len(exclude))
        if only is None:
            yield from self._saying(ref, ("pack", root_of(root), "all", many), _words(*patterns))
            return
        wanted = [below(root, path) for path in only]
        with tempfile.TemporaryFile() as spool:

            def pack(place: str) -> None:
                files.pack(place, cast(BinaryIO, _Small(spool)), only=wanted, exclude=patterns, seconds=SOON)

            if len(wanted) <= FEW and self._done_outside(ref, pack, root_of(root)):
                spool.seek(0)
                yield from iter(lambda: spool.read(files.CHUNK), b"")
                return
        yield from self._saying(ref, ("pack", root, "only", many), _words(*patterns, *wanted))

    def put_files(self, ref: str, root: str, tar: BinaryIO) -> None:
        root_of(root)
        if tar.seekable() and host_files.is_plain(tar):
            start = tar.tell()
            if self._done_outside(ref, lambda place: files.unpack(place, tar), root):
                return
            tar.seek(start)
        self._inside(ref, "unpack", root, stdin=tar)

    def remove_files(self, ref: str, root: str, paths: Collection[str]) -> None:
        gone = [below(root, path) for path in paths]
        if not self._done_outside(ref, lambda place: files.remove_files(place, gone, seconds=SOON), root_of(root)):
            self._inside(ref, "remove_files", root, stdin=_words(*gone))

    def clear(self, ref: str, root: str) -> None:
        again = (".home",) if root_of(root) == WORKSPACE else ()
        if not self._done_outside(ref, lambda place: files.clear(place, again, seconds=SOON), root):
            self._inside(ref, "clear", root, *again)

    def size(self, ref: str, root: str) -> int:
        found = self._from_outside(ref, lambda place: files.size(place, most=MANY, seconds=SOON), root_of(root))
        if found is not None:
            return found
        said = self._inside(ref, "size", root, cap=20).strip()
        if not _NUMBER.fullmatch(said):
            raise Unavailable(f"{ref} did not say how much is in {root}")
        return int(said)

    def seed(self, ref: str, kind: str) -> None:
        under = f"{files.SKILLS.removeprefix('/opt/')}/{slug(kind)}"
        if not self._done_outside(ref, lambda opt, data: files.seed(opt, under, data, kind), "/opt", DATA):
            self._inside(ref, "seed", DATA, kind)

    def _done_outside(self, ref: str, act: Callable[..., None], *roots: str) -> bool:
        """As _from_outside, of what returns nothing: did it work?"""

        def done(*places: str) -> bool:
            act(*places)
            return True

        return bool(self._from_outside(ref, done, *roots))

    def _from_outside(self, ref: str, act: Callable[..., T], *roots: str) -> T | None:
        """What `act` returns for these places in the sandbox. None if it did not work, for whatever reason: an exec of
        the same then does it, or says in its own words why not. The port's own errors pass."""
        if os.geteuid() != 0 or self._engine.remapped:
            return None
        try:
            with ExitStack() as stack:
                here = self._places(ref, roots, stack)
                stack.enter_context(host_files.acting_as(AGENT))
                return act(*here)
        except (OSError, files.BadPath, files.TooLarge, tarfile.TarError, ValueError):
            return None

    def _places(self, ref: str, roots: Sequence[str], stack: ExitStack) -> list[str]:
        firsts = self._engine.firsts
        with suppress(KeyError, OSError):  # not the first one of that container any more, whoever has its number now
            return [stack.enter_context(host_files.place(*firsts[ref], root)) for root in roots]
        found = self._engine.call("GET", f"/containers/{ref}/json")
        if not shares_kernel(found):
            raise ProcessLookupError(f"the processes of {ref} are not this machine's")
        if len(firsts) > 10_000:
            firsts.clear()
        firsts[ref] = found["State"]["Pid"], found["Id"]
        return [stack.enter_context(host_files.place(*firsts[ref], root)) for root in roots]

    def _inside(self, ref: str, *words: str, stdin: BinaryIO | None = None, cap: int = 0) -> bytes:
        """What image/files.py answers; at most `cap` bytes, whatever the sandbox says."""
        out = Kept(cap)
        for chunk in self._saying(ref, words, stdin):
            out.add(chunk)
        return bytes(out)

    def _saying(self, ref: str, words: Sequence[str], stdin: BinaryIO | None = None) -> Iterator[bytes]:
        err = Kept(4096)
        argv = (*PYTHON, "/opt/leasehold/files.py", *words)
        with self._running(ref, argv, {}, "/", stdin, uuid.uuid4().hex) as run:
            run.idle = IDLE
            try:
                for stream, chunk in run.frames():
                    if stream == 2:
                        err.add(chunk)
                    else:
                        yield chunk
                exit_code, _ = run.ended()
            except TimeoutError as error:
                raise Unavailable(f"{ref} spent {IDLE:.0f} s without progress over {words[0]} in {words[1]}") from error
        if exit_code:
            said = bytes(err).decode(errors="replace").strip() or f"exit code {exit_code}"
            raise _ERRORS.get(exit_code, Unavailable)(said)


class _Small:
    """A file to write to that takes no more than SMALL bytes."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.left = file, SMALL

    def write(self, content: bytes) -> int:
        self.left -= len(content)
        if self.left < 0:
            raise files.TooLarge("this is more than is fetched from outside")
        return self.file.write(content)


def _known(act: Callable[[str], T]) -> Callable[[str], T]:
    """The same; but what is not there from outside is not there inside either."""

    def acted(place: str) -> T:
        try:
            return act(place)
        except FileNotFoundError as error:
            raise NoFile("there is no such file") from error

    return acted


def _words(*words: str, then: bytes = b"") -> BinaryIO:
    """What image/files.py reads from its stdin."""
    return io.BytesIO(b"".join(os.fsencode(word) + b"\0" for word in words) + then)


def _told(said: bytes, under: str, most: int) -> dict[str, Stat] | None:
    """What image/files.py says that it saw, or None if that is not what it would say."""
    words, found = said.split(b"\0"), dict[str, Stat]()
    if len(words) % 7 != 1 or words[-1] or len(words) > 7 * most + 1:
        return None
    for at in range(0, len(words) - 1, 7):
        path, kind, mode, size, mtime, stamp, target = words[at : at + 7]
        above, _, name = path.rpartition(b"/")
        whole, parent = os.fsdecode(path), os.fsdecode(above)
        if (
            len(path) > files.LONGEST
            or path.startswith(b"/")
            or whole in found
            or not 0 < len(name) <= 255
            or name in (b".", b"..")
            or (parent != under and (parent not in found or found[parent].kind != "directory"))
            or kind not in _KINDS
            or not _MODE.fullmatch(mode)
            or not (_NUMBER.fullmatch(size) and _NUMBER.fullmatch(mtime))
            or int(mtime) > files.LATEST
            or not _STAMP.fullmatch(stamp)
            or len(target) > 4096
            or bool(target) != (kind == b"link")
        ):
            return None
        fields = (kind.decode(), int(mode, 8), int(size), int(mtime), stamp.decode(), os.fsdecode(target))
        found[whole] = Stat(*fields)
    return found
