"""Sandbox agent: runs commands for the control plane over one outgoing connection. Process 1 of a sandbox.

    agent.py SOCKET SHIM PORT UPSTREAM

The agent connects to SOCKET and answers requests; sandboxes/agent/protocol.py describes frames and verbs. A run is started at
most once per id, and its result is retained until it is acknowledged, so a control plane that lost its connection repeats the
request and receives the stored result.
Each run has a process of the program SHIM (shim.c), which is a subreaper. Every process of the run stays below its shim,
including daemons with a session and an environment of their own, and is killed through it. One single-threaded loop without
children of its own: a fork bomb cannot starve it.
The same loop serves the bridge (bridge.py) from PORT of the loopback interface to the unix socket UPSTREAM.
Standard library only; executed by its path as an isolated Python (-I -S)."""

import _socket as socket  # without the standard module's 1.3 MiB of enumerations and helpers
import contextlib
import ctypes
import json
import os
import select
import signal
import struct
import sys
import time

VERSION = 1
HEADER = struct.Struct(">III")  # request id, bytes of the JSON head, bytes of the body
MAX_HEAD_BYTES = 8 << 10
MAX_REQUEST_BODY_BYTES = 4 << 20
MAX_CHUNK_BYTES = 64 << 10  # of output in one response
MAX_UNSENT_BYTES = 1 << 20  # no further request is read while more is unsent
MAX_RUNS = 256  # retained, running or ended
MIN_RETENTION_SECONDS = 600.0  # of a result that is not acknowledged; older ones make room for further runs
MAX_RETAINED_BYTES = 32 << 20  # of output, over all runs; output beyond is dropped and counted
MAX_TOMBSTONES = 65536  # ids of acknowledged runs, which are never started again
MAX_WAIT_SECONDS = 60.0
KILL_STEP_SECONDS = 0.005
PATIENCE_SECONDS = 1.0  # of a kill, after which all processes are stopped for a moment
RECONNECT_SECONDS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
KILLED_EXIT_CODE, NOT_STARTED = 137, -1
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
_libc = ctypes.CDLL(None)


class InvalidRequest(Exception):
    """The request is malformed."""


class Shim:
    """Process of shim.c: parent of one command and of the processes that the command leaves behind."""

    def __init__(self, path, command):
        """Start the command. Raise OSError, KeyError, TypeError or ValueError for an invalid command, with nothing started."""
        argv, env = [path, command["cwd"], *command["argv"]], {**os.environ, **command["env"]}
        stdin, self.stdin = os.pipe()
        (reader_1, stdout), (reader_2, stderr) = os.pipe(), os.pipe()
        self.outputs = {1: reader_1, 2: reader_2}  # open ones by stream
        self.control, control = os.pipe()
        ends = (stdin, stdout, stderr, control)
        try:
            actions = [(os.POSIX_SPAWN_DUP2, fd, target) for target, fd in enumerate(ends)]
            self.pid = os.posix_spawn(path, argv, env, file_actions=actions)
        except BaseException:
            for fd in (self.stdin, reader_1, reader_2, self.control):
                os.close(fd)
            raise
        finally:
            for fd in ends:
                os.close(fd)
        for fd in (self.stdin, reader_1, reader_2, self.control):
            os.set_blocking(fd, False)


class Run:
    """One command: its shim, retained output and result."""

    def __init__(self, shim, deadline, cap, stdin):
        self.shim, self.deadline, self.cap = shim, deadline, cap
        self.unsent = memoryview(stdin)
        self.output = {1: bytearray(), 2: bytearray()}
        self.dropped = {1: 0, 2: 0}  # bytes per stream after the retained ones
        self.exit_code = None
        self.ended_at = self.kill_began = 0.0
        self.timed_out = self.killing = self.shim_gone = self.shim_lost = False
        self.stopped = {}  # pid -> pidfd, during a kill

    def describe(self):
        state = "running" if self.exit_code is None else "ended"
        sizes = {"stdout": [len(self.output[1]), self.dropped[1]], "stderr": [len(self.output[2]), self.dropped[2]]}
        return {"state": state, "exit_code": self.exit_code, "timed_out": self.timed_out, **sizes}


class Agent:
    """Connection to the control plane, and the runs of this sandbox."""

    def __init__(self, path, shim_path):
        self.path, self.shim_path, self.boot = path, shim_path, os.urandom(16).hex()
        self.runs, self.tombstones, self.retained_bytes = {}, {}, 0
        self.connection, self.received, self.unsent = None, bytearray(), bytearray()
        self.attempts, self.next_attempt = 0, 0.0
        self.waits = []  # [deadline, run id, request id, predicate, answer]
        self.handlers = {}  # fd -> function(events)
        self.epoll = select.epoll()
        wakeup, signals = os.pipe()
        for fd in (wakeup, signals):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(signals, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)  # commands of the same user could send these
        self.watch(wakeup, select.EPOLLIN, lambda _: self.reap(wakeup))

    def watch(self, fd, events, handler):
        if fd in self.handlers:
            self.epoll.modify(fd, events)
        else:
            self.epoll.register(fd, events)
        self.handlers[fd] = handler

    def unwatch(self, fd):
        if self.handlers.pop(fd, None):
            self.epoll.unregister(fd)

    def serve(self):
        """Answer requests until the process is killed."""
        while True:
            now = time.monotonic()
            if self.connection is None and now >= self.next_attempt:
                self.connect()
            self.check_deadlines(now)
            ready = self.epoll.poll(self.pause(now))
            for fd, events in ready:
                if handler := self.handlers.get(fd):
                    handler(events)

    def pause(self, now):
        times = [run.deadline for run in self.runs.values() if run.exit_code is None] + [wait[0] for wait in self.waits]
        if self.connection is None:
            times.append(self.next_attempt)
        if any(run.killing for run in self.runs.values()):
            times.append(now + KILL_STEP_SECONDS)
        return max(min(times) - now, 0) if times else -1

    # Connection

    def connect(self):
        connection = socket.socket(socket.AF_UNIX)
        connection.setblocking(False)  # a full backlog is an error
        try:
            connection.connect(self.path)
        except OSError:
            connection.close()
            self.postpone_connect()
            return
        self.connection = connection
        self.watch(connection.fileno(), select.EPOLLIN, self.transfer)
        self.respond(0, {"protocol": "leasehold-agent", "version": VERSION, "boot": self.boot})

    def postpone_connect(self):
        """Set the time of the next attempt: later and later, until a gateway sends a request."""
        delay = RECONNECT_SECONDS[min(self.attempts, len(RECONNECT_SECONDS) - 1)]
        self.attempts, self.next_attempt = self.attempts + 1, time.monotonic() + delay

    def disconnect(self):
        self.unwatch(self.connection.fileno())
        self.connection.close()
        self.connection, self.received, self.unsent, self.waits = None, bytearray(), bytearray(), []
        self.postpone_connect()

    def transfer(self, events):
        try:
            if events & select.EPOLLOUT:
                self.flush()
            if events & ~select.EPOLLOUT:
                chunk = self.connection.recv(1 << 18)
                if not chunk:
                    raise ConnectionError
                self.received += chunk
            self.parse()
        except BlockingIOError:
            pass
        except (OSError, InvalidRequest, ValueError, KeyError, TypeError):
            self.disconnect()

    def parse(self):
        while self.connection and len(self.unsent) < MAX_UNSENT_BYTES and len(self.received) >= HEADER.size:
            request_id, head_size, body_size = HEADER.unpack_from(self.received)
            if head_size > MAX_HEAD_BYTES or body_size > MAX_REQUEST_BODY_BYTES:
                raise InvalidRequest
            end = HEADER.size + head_size + body_size
            if len(self.received) < end:
                break
            head = json.loads(bytes(self.received[HEADER.size : HEADER.size + head_size]))
            body = bytes(self.received[HEADER.size + head_size : end])
            del self.received[:end]
            self.attempts = 0
            self.dispatch(request_id, head, body)

    def respond(self, request_id, head, body=b""):
        content = json.dumps(head, separators=(",", ":")).encode()
        self.unsent += HEADER.pack(request_id, len(content), len(body)) + content + body
        self.flush()

    def flush(self):
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                del self.unsent[: self.connection.send(self.unsent)]
        reading = select.EPOLLIN if len(self.unsent) < MAX_UNSENT_BYTES else 0
        self.watch(self.connection.fileno(), reading | (select.EPOLLOUT if self.unsent else 0), self.transfer)

    # Verbs

    def dispatch(self, request_id, head, body):
        verbs = {"ping": self.ping, "exec": self.exec, "wait": self.wait, "read": self.read, "ack": self.ack,
                 "kill": self.kill, "list": self.list_runs}  # fmt: skip
        if not isinstance(head, dict) or head.get("verb") not in verbs or not isinstance(head.get("run", ""), str):
            raise InvalidRequest
        verbs[head["verb"]](request_id, head, body)

    def ping(self, request_id, head, body):
        self.respond(request_id, {"boot": self.boot})

    def list_runs(self, request_id, head, body):
        runs = {run_id: run.exit_code for run_id, run in self.runs.items()}
        content = json.dumps(runs).encode()
        self.respond(request_id, {"boot": self.boot}, content)

    def exec(self, request_id, head, body):
        """Start a run, unless its id is known. A request for another boot of the agent starts nothing."""
        run_id = head["run"]
        if head["boot"] != self.boot:
            self.respond(request_id, {"run": run_id, "state": "unknown"})
            return
        if run_id in self.tombstones:
            self.respond(request_id, {"run": run_id, "state": "acknowledged"})
            return
        if run_id not in self.runs and not (self.make_room() and self.start(run_id, head, body)):
            self.respond(request_id, {"run": run_id, "state": "busy"})
            return
        self.wait(request_id, head, body)

    def make_room(self):
        """Drop the oldest unacknowledged result, if necessary. Return whether another run may start."""
        if len(self.runs) < MAX_RUNS:
            return True
        oldest = time.monotonic() - MIN_RETENTION_SECONDS
        for run_id, run in self.runs.items():
            if run.shim_gone and run.ended_at < oldest:
                self.forget(run_id, run)
                return True
        return False

    def start(self, run_id, head, body):
        """Start a run. Return False if no process can be created: too many processes or descriptors, or a command too long."""
        size = head["command_bytes"]
        try:
            shim = Shim(self.shim_path, json.loads(body[:size]))
        except OSError:
            return False
        run = Run(shim, time.monotonic() + head["timeout"], head["cap"], body[size:])
        self.runs[run_id] = run
        for stream, fd in shim.outputs.items():
            self.watch(fd, select.EPOLLIN, lambda _, stream=stream: self.read_output(run, stream))
        self.watch(shim.control, select.EPOLLIN, lambda _: self.read_status(run_id, run))
        self.feed(run)
        return True

    def wait(self, request_id, head, body):
        run = self.find(request_id, head)
        if run is None:
            return
        deadline = time.monotonic() + min(float(head["wait"]), MAX_WAIT_SECONDS)
        self.answer_later(deadline, head["run"], request_id, lambda: run.exit_code is not None, lambda: self.summary(run))

    def summary(self, run):
        """State with the output of a short run, so that one request is enough for it."""
        state, sizes = run.describe(), (len(run.output[1]), len(run.output[2]))
        if run.exit_code is None or sum(sizes) > MAX_CHUNK_BYTES:
            return state, b""
        return state | {"inline": True}, bytes(run.output[1] + run.output[2])

    def read(self, request_id, head, body):
        """Return output from a byte offset, at once if there is some, else when there is or the run ends."""
        run = self.find(request_id, head)
        if run is None:
            return
        stream, offset = {"stdout": 1, "stderr": 2}[head["stream"]], head["offset"]
        deadline = time.monotonic() + min(float(head["wait"]), MAX_WAIT_SECONDS)

        def answer():
            return run.describe(), bytes(run.output[stream][offset : offset + MAX_CHUNK_BYTES])

        self.answer_later(
            deadline, head["run"], request_id, lambda: len(run.output[stream]) > offset or run.exit_code is not None, answer
        )

    def ack(self, request_id, head, body):
        """Drop the result of an ended run. Its id stays known. Idempotent."""
        run = self.runs.get(head["run"])
        if run is not None and run.exit_code is not None:
            self.forget(head["run"], run)
        self.respond(request_id, {"run": head["run"]})

    def forget(self, run_id, run):
        self.retained_bytes -= len(run.output[1]) + len(run.output[2])
        run.output, run.cap = {1: bytearray(), 2: bytearray()}, 0
        self.tombstones[run_id] = None
        if run.shim_gone:
            del self.runs[run_id]
        if len(self.tombstones) > MAX_TOMBSTONES:
            del self.tombstones[next(iter(self.tombstones))]

    def kill(self, request_id, head, body):
        """Kill all processes of a run and of its parts, RUN/PART, and answer when they are gone. Idempotent."""
        runs = [run for name, run in self.runs.items() if name.split("/")[0] == head["run"]]
        if not runs:
            self.respond(request_id, {"run": head["run"], "state": "unknown"})
            return
        for run in runs:
            run.killing = not run.shim_gone
        deadline = time.monotonic() + MAX_WAIT_SECONDS
        self.answer_later(
            deadline, head["run"], request_id, lambda: not any(run.killing for run in runs), lambda: (runs[0].describe(), b"")
        )

    def find(self, request_id, head):
        run = None if head["run"] in self.tombstones else self.runs.get(head["run"])
        if run is None:
            state = "acknowledged" if head["run"] in self.tombstones else "unknown"
            self.respond(request_id, {"run": head["run"], "state": state})
        return run

    def answer_later(self, deadline, run_id, request_id, is_ready, answer):
        self.waits.append((deadline, run_id, request_id, is_ready, answer))
        self.answer_waits(time.monotonic())

    def answer_waits(self, now):
        waits, self.waits = self.waits, []
        for wait in waits:
            deadline, run_id, request_id, is_ready, answer = wait
            if self.connection is None:
                return
            if not is_ready() and now < deadline:
                self.waits.append(wait)
                continue
            head, body = answer()
            try:
                self.respond(request_id, {"run": run_id, **head}, body)
            except OSError:
                self.disconnect()

    # Runs

    def read_output(self, run, stream):
        """Retain available output. Return False if there is none."""
        fd = run.shim.outputs.get(stream)  # a closed descriptor's number may belong to another run already
        if fd is None:
            return False
        try:
            chunk = os.read(fd, MAX_CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not chunk:
            self.unwatch(fd)
            os.close(run.shim.outputs.pop(stream))
            return False
        room = max(min(run.cap - len(run.output[stream]), MAX_RETAINED_BYTES - self.retained_bytes), 0)
        if run.dropped[stream] or run.exit_code is not None:
            room = 0  # retained output has no gap; after the end it does not change
        run.output[stream] += chunk[:room]
        self.retained_bytes += len(chunk[:room])
        run.dropped[stream] += len(chunk) - len(chunk[:room]) if run.exit_code is None else 0
        self.answer_waits(time.monotonic())
        return True

    def feed(self, run):
        fd = run.shim.stdin
        try:
            while run.unsent:
                run.unsent = run.unsent[os.write(fd, run.unsent) :]
        except BlockingIOError:
            self.watch(fd, select.EPOLLOUT, lambda _: self.feed(run))
            return
        except OSError:
            pass  # the program closed its stdin
        run.unsent = memoryview(b"")
        self.unwatch(fd)
        os.close(fd)

    def read_status(self, run_id, run):
        """Record the exit code from the shim, and the shim's own end."""
        try:
            content = os.read(run.shim.control, 4096)
        except BlockingIOError:
            return
        if content:
            code, _, message = content.partition(b" ")
            if int(code) == NOT_STARTED:
                self.refuse(run_id, run)
            else:
                self.end(run, int(code), message)
            return
        self.unwatch(run.shim.control)
        os.close(run.shim.control)
        run.shim_gone = True
        if run.exit_code is None:  # the shim was killed; process 1 has adopted its processes
            run.shim_lost = run.killing = True
            self.end(run, KILLED_EXIT_CODE, b"")
        else:
            self.finish_kill(run)
        if run_id in self.tombstones:
            self.runs.pop(run_id, None)

    def refuse(self, run_id, run):
        """Forget a run whose shim could not create a process. Its request is answered as if it had not been accepted."""
        waits, self.waits = self.waits, []
        for wait in waits:
            if wait[1] == run_id:
                self.respond(wait[2], {"run": run_id, "state": "busy"})
            else:
                self.waits.append(wait)
        for fd in (*run.shim.outputs.values(), run.shim.control, *([run.shim.stdin] if run.unsent else [])):
            self.unwatch(fd)
            os.close(fd)
        self.runs.pop(run_id)

    def end(self, run, code, message):
        for stream in (1, 2):
            while self.read_output(run, stream):  # output written before the exit
                pass
        run.output[2] += message
        self.retained_bytes += len(message)
        run.exit_code, run.ended_at = KILLED_EXIT_CODE if run.timed_out else code, time.monotonic()
        self.answer_waits(time.monotonic())

    def reap(self, wakeup):
        with contextlib.suppress(BlockingIOError):
            os.read(wakeup, 4096)
        with contextlib.suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                for run in self.runs.values():
                    if run.shim and run.shim.pid == pid:
                        run.shim.pid = 0  # the number may be reused

    def check_deadlines(self, now):
        for run in self.runs.values():
            if run.exit_code is None and not run.timed_out and now >= run.deadline:
                run.timed_out = run.killing = True
                run.deadline = now + MAX_WAIT_SECONDS
            if run.killing:
                self.kill_step(run)
        if self.waits:
            self.answer_waits(now)

    def kill_step(self, run):
        """Stop all processes of a run, or kill them if all are stopped: a stopped process cannot fork.

        A fork bomb may be faster. After PATIENCE_SECONDS the kernel therefore stops every process of the sandbox at once, and
        those of other runs continue after the kill."""
        run.kill_began = run.kill_began or time.monotonic()
        if os.getpid() == 1 and time.monotonic() - run.kill_began > PATIENCE_SECONDS:
            run.kill_began = 0.0
            self.kill_frozen(run)
            return
        parents = _list_processes()
        roots = self.list_strays(parents) if run.shim_lost else {run.shim.pid}
        members = _list_descendants(parents, roots) - ({run.shim.pid} if not run.shim_lost else set())
        fresh = members - run.stopped.keys()
        for pid in fresh:
            with contextlib.suppress(OSError):
                fd = os.pidfd_open(pid)
                if _list_processes((pid,)).get(pid) == parents[pid]:
                    signal.pidfd_send_signal(fd, signal.SIGSTOP)
                    run.stopped[pid] = fd
                else:
                    os.close(fd)
        if fresh:
            return
        if not run.shim_lost:  # a command may have stopped its shim
            with contextlib.suppress(ProcessLookupError):
                if run.shim.pid:
                    os.kill(run.shim.pid, signal.SIGCONT)
        for fd in run.stopped.values():
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            os.close(fd)
        run.stopped = {}
        if not members and (run.shim_lost or run.shim_gone):
            self.finish_kill(run)

    def kill_frozen(self, run):
        with contextlib.suppress(ProcessLookupError):  # no other process
            os.kill(-1, signal.SIGSTOP)
        try:
            parents = _list_processes()
            roots = self.list_strays(parents) if run.shim_lost else {run.shim.pid}
            for pid in _list_descendants(parents, roots) - ({run.shim.pid} if not run.shim_lost else set()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGCONT)

    def finish_kill(self, run):
        for fd in run.stopped.values():
            os.close(fd)
        run.stopped, run.killing, run.kill_began = {}, False, 0.0
        self.answer_waits(time.monotonic())

    def list_strays(self, parents):
        """List children of the agent that are not shims: processes whose shim was killed."""
        shims = {run.shim.pid for run in self.runs.values() if run.shim and not run.shim_gone}
        return {pid for pid, (parent, _) in parents.items() if parent == os.getpid() and pid not in shims}


def _list_processes(pids=None):
    """Return pid -> (parent, start time) of all processes that are not zombies."""
    found = {}
    for pid in pids or [int(name) for name in os.listdir("/proc") if name.isdigit()]:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                state, parent, *rest = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if state not in (b"Z", b"X"):
            found[pid] = int(parent), rest[17]
    return found


def _list_descendants(parents, roots):
    """Return the roots and all processes below them. A zombie's children have been adopted already."""
    members = set(roots) & parents.keys()
    while more := {pid for pid, (parent, _) in parents.items() if parent in members} - members:
        members |= more
    return members


def main(path, shim_path, port="", upstream=""):
    for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):  # return the memory of acknowledged output to the system
        _libc.mallopt(option, 64 << 10)
    _libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # its memory and descriptors are hidden from commands of the same user
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # no effect in process 1
    agent = Agent(path, shim_path)
    if port:
        sys.path.insert(0, os.path.dirname(__file__))  # an isolated Python does not search the program's directory
        from bridge import Bridge

        Bridge(agent, int(port), upstream)
    agent.serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
