"""Memory provider and memory store of the simulation: every call is a yield point at which the scheduler injects faults."""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any, BinaryIO

from sandboxes.providers.base import DATA, WORKSPACE, SandboxSpec
from sandboxes.providers.command_results import ExecResult, ExecState, OutputPart, OutputReader
from sandboxes.providers.errors import Unavailable
from sandboxes.providers.memory import File, MemoryProvider, ProgramCall, ProgramResult
from sandboxes.storage.base import StoreError
from sandboxes.storage.memory import MemoryStore
from tests.simulation.scheduler import Actor

if TYPE_CHECKING:
    from tests.simulation.world import Host, World

PROGRAM = "work"
CHUNK_BYTES = 1 << 10  # of a slow transfer
READ_INTERVAL_SECONDS = 5.0  # between two looks at the output of a program
TimeRange = tuple[datetime, datetime]


@dataclass
class Work:
    """One execution of the simulated program: writes files at its start or at its end."""

    run_id: str
    ref: str
    files: dict[str, Any]
    ends_at: float
    writes: dict[str, str]
    removes: Sequence[str]
    report: bytes  # printed at the end, unless the program prints messages
    actor: Actor | None = None  # which waits for the result
    in_time: bool = True  # it ends before its timeout
    finished: bool = False
    killed: bool = False
    messages: Sequence[str] = ()  # lines that it prints, the last one at its end
    printed: int = 0  # number of lines so far

    def apply(self) -> None:
        for path, text in self.writes.items():
            self.files[path] = File(text.encode(), mtime_ns=0)
        for path in self.removes:
            self.files.pop(path, None)

    def finish(self) -> None:
        self.finished = True
        if self.in_time:
            self.printed = len(self.messages)

    @property
    def has_ended(self) -> bool:
        return self.finished or self.killed

    @property
    def output(self) -> bytes:
        """Bytes that it has printed so far."""
        if not self.messages:
            return self.report if self.finished else b""
        return "".join(f"{line}\n" for line in self.messages[: self.printed]).encode()


class SimulatedOutput(OutputReader):
    """Reader of the messages of a program, in parts that may end anywhere."""

    def __init__(self, provider: "SimulatedProvider", work: Work, offset: int) -> None:
        self.provider, self.work, self.offset = provider, work, offset

    def read(self, *, wait: float) -> OutputPart | None:
        world = self.provider.world
        scheduler, until = world.scheduler, world.scheduler.seconds + wait
        while True:
            world.point("provider read output")
            sandbox = self.provider._sandboxes.get(self.work.ref)
            if (self.provider.down and world.faults.enabled) or sandbox is None or sandbox.suspended:
                return None
            if content := self.work.output[self.offset :]:
                size = world.random.randint(1, len(content))
                self.offset += size
                return OutputPart("stdout", content[:size])
            if self.work.has_ended or scheduler.seconds >= until:
                return OutputPart("", ended=self.work.has_ended)
            scheduler.sleep(min(READ_INTERVAL_SECONDS, max(0.001, until - scheduler.seconds)))

    def interrupt(self) -> None:
        """Nothing interrupts a recorder in a history: its process is killed."""

    def close(self) -> None:
        """Nothing to release."""


@dataclass
class Existence:
    """Time ranges in which sandboxes of one provider existed, for the comparison with metered time."""

    since: dict[str, datetime] = field(default_factory=dict)
    ranges: dict[str, TimeRange] = field(default_factory=dict)
    vanished: set[str] = field(default_factory=set)


class SlowStream:
    """Reader or writer that takes a chunk at a time, each after some virtual seconds."""

    def __init__(self, stream: Any, pause: Callable[[], None]) -> None:
        self.stream, self.pause = stream, pause

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def read(self, size: int = -1) -> bytes:
        if size >= 0:
            self.pause()
            return bytes(self.stream.read(min(size, CHUNK_BYTES)))
        return b"".join(iter(lambda: self.read(CHUNK_BYTES), b""))

    def write(self, content: bytes) -> int:
        for start in range(0, len(content), CHUNK_BYTES):
            self.pause()
            self.stream.write(content[start : start + CHUNK_BYTES])
        return len(content)


class Works:
    """Programs and sandboxes of one host's provider. Programs take virtual time, and go on when the process that waits dies."""

    world: "World"
    host: "Host"
    down: bool

    if TYPE_CHECKING:

        @property
        def _sandboxes(self) -> Any:
            """Existing sandboxes by name, with `spec`, `files` and `suspended`."""

    def _reset_works(self) -> None:
        self.existence = Existence()
        self.works: list[Work] = []
        self.outputs: dict[str, Work] = {}  # of programs that print messages, by their runs
        self.executions: Counter[str] = Counter()
        self.down = False

    def last_engine_id(self) -> str:
        return self.host.name

    def list_witnessed(self) -> set[str]:
        """Return the names of sandboxes that a client other than the product's lists. Optional."""
        return set()

    def _end_sandbox(self, ref: str) -> None:
        if ref in self._sandboxes and ref in self.existence.since:
            self.existence.ranges[ref] = (self.existence.since.pop(ref), self.world.scheduler.time)
        self._stop_works([work for work in self.works if work.ref == ref])

    def _stop_works(self, works: Collection[Work]) -> None:
        for work in works:
            work.killed = True
            self.works.remove(work)

    def _find_ref(self, call: ProgramCall) -> str:
        """Return the sandbox of a program."""
        [ref] = [name for name, sandbox in self._sandboxes.items() if sandbox.files is call.files]
        return ref

    def _work(self, call: ProgramCall) -> ProgramResult:
        """Report the present files, then write and remove files, at the start or at the end of the virtual duration."""
        scheduler, order = self.world.scheduler, json.loads(call.stdin or call.argv[1])  # the state of a turn is on stdin
        ref = self._find_ref(call)
        run_id = call.env["LEASEHOLD_RUN"]
        seen = read_tree(call.files)
        self.executions[run_id] += 1
        self.world.promises.check_execution(ref, run_id, order, seen)
        seconds = min(order["seconds"], call.timeout.total_seconds())
        report = json.dumps(seen).encode()
        work = Work(run_id, ref, call.files, scheduler.seconds + seconds, order["write"], order["remove"], report)
        work.actor = scheduler.current
        if order.get("messages"):
            self._schedule_messages(work, order)
        if order["early"]:
            work.apply()
        work.in_time = order["seconds"] < call.timeout.total_seconds()
        if seconds:
            self.works.append(work)
            scheduler.call_at(work.ends_at, lambda: self._finish(work, order))
            while not work.finished and not work.killed:
                scheduler.sleep(min(5.0, max(0.001, work.ends_at - scheduler.seconds)))
        elif not order["early"]:
            work.apply()
        if work.killed:
            return ProgramResult(137, stdout=work.output)
        work.finish()
        return ProgramResult(stdout=work.output, took=timedelta(seconds=order["seconds"]))

    def _schedule_messages(self, work: Work, order: dict[str, Any]) -> None:
        """Print the messages one after the other during the virtual duration, the result at the end."""
        work.messages = self.world.promises.messages[work.run_id] = build_messages(order["op"], order["messages"])
        self.outputs[work.run_id] = work
        scheduler = self.world.scheduler

        def print_next() -> None:
            if not work.has_ended:
                work.printed += 1

        for number in range(order["messages"]):
            at = order["seconds"] * (number + 1) / (order["messages"] + 1)
            if at < order["timeout"]:
                scheduler.call_at(scheduler.seconds + at, print_next)

    def _finish(self, work: Work, order: dict[str, Any]) -> None:
        if work.killed:
            return
        self.works.remove(work)
        work.finish()
        if work.in_time and not order["early"]:
            work.apply()
        if work.actor is None or work.actor.killed:
            self._end_abandoned(work)

    def _end_abandoned(self, work: Work) -> None:
        """End a program whose waiting process is dead."""


class SimulatedProvider(Works, MemoryProvider):
    """Memory provider of one host."""

    def __init__(self, world: "World", host: "Host") -> None:
        self.world, self.host = world, host
        self._reset_works()
        self.retaining = set[str]()  # runs whose results stay in their sandboxes until they are acknowledged
        super().__init__()
        self.programs[PROGRAM] = self._work

    def engine_id(self) -> str:
        self.world.enter_call("provider", "engine_id", "", self._refuse)
        return self.host.name

    @contextmanager
    def hooked_call(self, method: str, subject: str) -> Iterator[None]:
        self.world.enter_call("provider", method, subject, self._refuse)
        yield
        self.world.leave_call("provider", method, subject, self._refuse)

    def _refuse(self, message: str) -> Exception:
        return Unavailable(message)

    def create(self, spec: SandboxSpec) -> str:
        with self.hooked_call("create", spec.name):
            if spec.name not in self._sandboxes:
                self.existence.since[spec.name] = self.world.scheduler.time
                self.world.promises.check_slot(self, spec)
            with self.world.uninterrupted():
                super().create(spec)
        return spec.name

    def destroy(self, ref: str) -> None:
        with self.hooked_call("destroy", ref):
            self.world.promises.check_destroy(self, ref)
            self._end_sandbox(ref)
            with self.world.uninterrupted():
                super().destroy(ref)

    def exec(self, ref: str, argv: Sequence[str], *, mark: str, retain: bool = False, **options: Any) -> ExecResult:
        if retain:
            self.retaining.add(mark)
        return super().exec(ref, argv, mark=mark, retain=retain, **options)

    def find_exec(self, ref: str, mark: str) -> ExecState | None:
        state = super().find_exec(ref, mark)
        is_running = mark in self.retaining and any(work.ref == ref and work.run_id == mark for work in self.works)
        return ExecState(running=True) if state is None and is_running else state

    def _end_abandoned(self, work: Work) -> None:
        sandbox = self._sandboxes.get(work.ref)
        if sandbox and work.run_id in self.retaining:
            exit_code = 0 if work.in_time else 137
            sandbox.retained[work.run_id] = ExecResult(exit_code, stdout=work.output, timed_out=not work.in_time)

    def vanish(self, ref: str) -> None:
        self.existence.vanished.add(ref)
        self._end_sandbox(ref)
        super().vanish(ref)

    def get_files(self, ref: str, root: str, **options: Any) -> Iterator[bytes]:
        chunks = super().get_files(ref, root, **options)
        if not self.world.occurs("provider transfer"):
            return chunks
        return iter(partial(SlowStream(BytesIO(b"".join(chunks)), self.world.pause_transfer).read, CHUNK_BYTES), b"")

    def put_files(self, ref: str, root: str, tar: BinaryIO) -> None:
        slow = self.world.occurs("provider transfer")
        super().put_files(ref, root, SlowStream(tar, self.world.pause_transfer) if slow else tar)  # type: ignore[arg-type]

    def open_output(self, ref: str, mark: str, *, stdout: int, stderr: int) -> OutputReader | None:
        with self.hooked_call("open_output", ref):
            self._running(ref)
            work = self.outputs.get(mark)
            return SimulatedOutput(self, work, stdout) if work and work.ref == ref else None

    def acknowledge_exec(self, ref: str, mark: str) -> None:
        self.outputs.pop(mark, None)
        super().acknowledge_exec(ref, mark)

    def kill(self, ref: str, mark: str) -> None:
        with self.hooked_call("kill", ref):
            self._get(ref)
            self.world.promises.check_kill(self, mark)
            self._stop_works([work for work in self.works if work.ref == ref and work.run_id == mark])


class SimulatedStore(MemoryStore):
    """Store that all hosts share."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.down = False
        super().__init__()

    @contextmanager
    def hooked_call(self, method: str, subject: str) -> Iterator[None]:
        self.world.enter_call("store", method, subject, self._refuse)
        yield
        self.world.leave_call("store", method, subject, self._refuse)

    def upload(self, key: str, source: BinaryIO) -> None:
        slow = self.world.occurs("store transfer")
        super().upload(key, SlowStream(source, self.world.pause_transfer) if slow else source)  # type: ignore[arg-type]

    def download(self, key: str, target: BinaryIO, *, start: int = 0, length: int | None = None) -> bool:
        slow = self.world.occurs("store transfer")
        sink: Any = SlowStream(target, self.world.pause_transfer) if slow else target
        return super().download(key, sink, start=start, length=length)

    def _refuse(self, message: str) -> Exception:
        return StoreError("memory", "call", message)


def build_messages(operation: str, count: int) -> list[str]:
    """Return the lines of an agent's program: answers of its model, and the result."""
    answers = [{"type": "assistant", "text": f"{operation} {number}", "turn_id": str(number)} for number in range(count)]
    return [json.dumps(message) for message in (*answers, {"type": "result", "text": operation})]


def read_tree(files: dict[str, Any]) -> dict[str, str]:
    """Return the simulated program's files by path."""
    names = (f"{WORKSPACE}/f", f"{DATA}/d")
    return {path: entry.content.decode() for path, entry in files.items() if path.startswith(names) and isinstance(entry, File)}
