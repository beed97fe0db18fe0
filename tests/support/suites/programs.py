"""Programs of emulated sandboxes that are functions of the test, as those of the memory provider.

A script in the sandbox sends its arguments to this process, which runs the function and returns its output. The function may
read and write the files of the sandbox."""

import base64
import json
import os
import socketserver
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from sandboxes.providers.base import MARK_VARIABLE
from sandboxes.providers.command_results import ExecResult
from sandboxes.providers.memory import Entry, File, Folder, ProgramCall, ProgramResult
from tests.emulators.machine import USER, Machine

DIRECTORY = "/tmp/programs"
JOIN_SECONDS = 20.0
PATH = f"{DIRECTORY}:/usr/local/bin:/usr/bin:/bin"
SCRIPT = """#!/usr/bin/python3 -SE
import base64, json, os, socket, sys
call = {"argv": [os.path.basename(sys.argv[0]), *sys.argv[1:]], "stdin": base64.b64encode(sys.stdin.buffer.read()).decode()}
call |= {"env": dict(os.environ), "cwd": os.getcwd()}
connection = socket.socket(FAMILY)
connection.connect(ADDRESS)
with connection, connection.makefile("rw") as stream:
    stream.write(json.dumps(call) + "\\n")
    stream.flush()
    answer = json.loads(stream.readline())
sys.stdout.buffer.write(base64.b64decode(answer["stdout"]))
sys.stderr.buffer.write(base64.b64decode(answer["stderr"]))
sys.exit(answer["exit_code"])
"""
Program = Callable[[ProgramCall], ProgramResult]


class DiskFiles(MutableMapping[str, Entry]):
    """Files of one sandbox by absolute path, read from its disks and written to them.

    `disks` are directories of this machine by the path in the sandbox, `user` is the owner of files that are written."""

    def __init__(self, disks: Mapping[str, Path], user: int) -> None:
        self._disks, self._user = disks, user

    def _locate(self, path: str) -> Path:
        for root, disk in self._disks.items():
            if path == root or path.startswith(f"{root.rstrip('/')}/"):
                return disk / path[len(root) :].lstrip("/")
        raise KeyError(path)

    def __getitem__(self, path: str) -> Entry:
        found = self._locate(path)
        if found.is_dir():
            return Folder()
        try:
            return File(found.read_bytes())
        except OSError:
            raise KeyError(path) from None

    def __setitem__(self, path: str, entry: Entry) -> None:
        assert isinstance(entry, File)
        target = self._locate(path)
        with suppress(FileNotFoundError):  # the sandbox was destroyed
            target.write_bytes(entry.content)
            os.chown(target, self._user, self._user)

    def __delitem__(self, path: str) -> None:
        if path not in self:
            raise KeyError(path)
        self._locate(path).unlink()

    def __iter__(self) -> Iterator[str]:
        for path, disk in self._disks.items():
            for root, _, names in os.walk(disk):
                yield from (str(Path(path) / Path(root, name).relative_to(disk)) for name in names)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def open_disk(machine: Machine) -> DiskFiles:
    """Return the files of an emulated machine."""
    return DiskFiles({"/": machine.directory / "disk"}, USER)


class _Command:
    """Execution of one command, whose programs run in the thread that waits for the result."""

    def __init__(self, ref: str, timeout: timedelta) -> None:
        self.ref, self.timeout = ref, timeout
        self.calls: SimpleQueue[Any] = SimpleQueue()  # of programs; None: the command has ended
        self.replies: list[SimpleQueue[ProgramResult]] = []
        self.thread: threading.Thread | None = None
        self.outcome: ExecResult | BaseException | None = None
        self.timed_out = self.is_abandoned = False

    @property
    def is_awaited(self) -> bool:
        return self.thread is not None and not self.is_abandoned

    def execute(self, execute: Callable[[], ExecResult]) -> None:
        try:
            self.outcome = execute()
        except BaseException as error:
            self.outcome = error
        self.calls.put(None)


class ProgramServer(ABC):
    """Programs of the sandboxes of one emulator. A program runs in the thread that waits for its command.

    Without such a thread, as for a background process, it runs in a thread of the server."""

    def __init__(self) -> None:
        self.programs: dict[str, Program] = {}
        self._commands: dict[str, _Command] = {}  # by mark
        self._server = self._create_server()
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @abstractmethod
    def _create_server(self) -> socketserver.TCPServer:
        """Return a server of which each thread handles one program."""

    @abstractmethod
    def find_files(self, ref: str) -> DiskFiles | None:
        """Return the files of a sandbox. None if there is no such sandbox."""

    @abstractmethod
    def find_directory(self, ref: str) -> Path | None:
        """Return the directory of this machine that is DIRECTORY in a sandbox. None if there is no such sandbox."""

    def install(self, ref: str) -> None:
        """Write a script for each program."""
        if (directory := self.find_directory(ref)) is None:
            return
        directory.mkdir(mode=0o755, exist_ok=True)
        address = self._server.server_address
        for name in self.programs:
            script = directory / name
            if not script.exists():
                text = SCRIPT.replace("FAMILY", str(int(self._server.address_family))).replace("ADDRESS", repr(address))
                script.write_text(text)
                script.chmod(0o755)

    def run(self, ref: str, mark: str, timeout: timedelta, execute: Callable[[], ExecResult]) -> ExecResult:
        """Execute a command of a sandbox in another thread, and run its programs in this one.

        The time that a program took is simulated. A program that took its timeout or longer has exceeded it."""
        self.install(ref)
        command = self._commands[mark] = _Command(ref, timeout)
        command.thread = threading.Thread(target=command.execute, args=(execute,), daemon=True)
        command.thread.start()
        try:
            while (received := command.calls.get()) is not None:
                call, reply = received
                result = ProgramResult(137)
                try:
                    result = self.programs[call.argv[0]](call)
                finally:
                    command.timed_out |= result.took >= timeout
                    reply.put(result)
        finally:
            command.is_abandoned = True
        if isinstance(command.outcome, BaseException):
            raise command.outcome
        assert command.outcome
        return self.correct(mark, command.outcome)

    def correct(self, mark: str, result: ExecResult) -> ExecResult:
        """Return the result of a command with the simulated timeout of its program."""
        command = self._commands.get(mark)
        return replace(result, exit_code=137, timed_out=True) if command and command.timed_out else result

    def get_ref(self, mark: str) -> str:
        """Return the sandbox of a command whose program runs."""
        return self._commands[mark].ref

    def end_abandoned(self, mark: str, result: ProgramResult) -> None:
        """End a program for which nothing waits any more, and return once its command has ended."""
        command = self._commands[mark]
        command.timed_out |= result.took >= command.timeout
        for reply in command.replies:
            reply.put(result)
        assert command.thread
        command.thread.join(JOIN_SECONDS)

    def _answer(self, received: dict[str, Any]) -> ProgramResult:
        mark = received["env"].get(MARK_VARIABLE, "")
        command = self._commands.get(mark, _Command("", timedelta.max))
        found = self.find_files(command.ref)
        files: Any = {} if found is None else found
        stdin = base64.b64decode(received["stdin"])
        call = ProgramCall(received["argv"], stdin, received["env"], received["cwd"], files, command.timeout)
        if not command.is_awaited:
            return self.programs[call.argv[0]](call)
        reply = SimpleQueue[ProgramResult]()
        command.replies.append(reply)
        command.calls.put((call, reply))
        return reply.get()

    def _build_handler(self) -> type[socketserver.StreamRequestHandler]:
        answer = self._answer

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                result = answer(json.loads(self.rfile.readline()))
                content = {"stdout": result.stdout, "stderr": result.stderr}
                fields = {name: base64.b64encode(value).decode() for name, value in content.items()}
                with suppress(OSError):  # the command was killed
                    self.wfile.write(json.dumps({**fields, "exit_code": result.exit_code}).encode() + b"\n")

        return Handler


class MachinePrograms(ProgramServer):
    """Programs of emulated machines, which have the network of this machine."""

    def __init__(self, find_machine: Callable[[str], Machine | None]) -> None:
        self._find_machine = find_machine
        super().__init__()

    def _create_server(self) -> socketserver.ThreadingTCPServer:
        server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), self._build_handler())
        server.daemon_threads = True
        return server

    def find_files(self, ref: str) -> DiskFiles | None:
        machine = self._find_machine(ref)
        return open_disk(machine) if machine else None

    def find_directory(self, ref: str) -> Path | None:
        machine = self._find_machine(ref)
        return machine.directory / "disk" / DIRECTORY.lstrip("/") if machine else None
