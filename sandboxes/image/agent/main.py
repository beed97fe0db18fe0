"""Sandbox agent: runs commands for the control plane over one outgoing connection. Process 1 of a sandbox.

    main.py SOCKET SHIM [PORT UPSTREAM]...
    main.py GATEWAY.json SHIM [PORT UPSTREAM]...

The agent connects to SOCKET, or over TLS to the gateway that a JSON file names (remote.py), and answers requests;
sandboxes/agent/protocol.py describes frames and verbs. A run is started at
most once per id, and its result is retained until it is acknowledged, so a control plane that lost its connection repeats the
request and receives the stored result.
Each run has a process of the program SHIM (shim.c), which is a subreaper. Every process of the run stays below its shim,
including daemons with a session and an environment of their own, and is killed through it. One single-threaded loop without
children of its own: a fork bomb cannot starve it. File operations run in processes of the helper (helper.py).
With a JSON file, process 1 also loads the seccomp filter (confinement.py) and guards the memory of the container (memory.py),
because the engine of its sandbox does neither.
The same loop serves a bridge (bridge.py) from each PORT of the loopback interface to the unix socket UPSTREAM, or with UPSTREAM
`gateway` to the gateway of the JSON file, for HTTP requests.
Standard library only; executed by its path as an isolated Python (-I -S)."""

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time

# An isolated Python does not search the program's directory. In the image this file is agent.pyc, above its compiled modules in
# agent/, and beside the source of files.py, whose compilation would take 8 ms.
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [f"{HERE}/agent", HERE]

from connection import GatewayConnection, InvalidRequest  # noqa: E402
from digests import digest_directory  # noqa: E402
from processes import HELPER_IDLE_SECONDS, Helper, Shim  # noqa: E402
from runs import HEAD, MAX_UNWRITTEN_BYTES, STREAM, STREAMS, TAIL, Run  # noqa: E402

MAX_CHUNK_BYTES = 256 << 10  # of output in one response
MAX_RUNS = 256  # retained, running or ended
MIN_RETENTION_SECONDS = 600.0  # of a result that is not acknowledged; older ones make room for further runs
MAX_RETAINED_BYTES = 32 << 20  # of output, over all runs; output beyond is dropped and counted
MAX_ENDED_PROCESSES = 16  # ended background processes whose output is retained
MAX_TOMBSTONES = 65536  # ids of acknowledged runs, which are never started again
MAX_WAIT_SECONDS = 60.0
KILL_STEP_SECONDS = 0.005
REMOTE_UPSTREAM = "gateway"  # of a bridge, in place of the path of a unix socket
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
CGROUP_FILES = {"memory_bytes": ("memory.current", "memory/memory.usage_in_bytes"),
                "cpu": ("cpu.stat", "cpuacct/cpuacct.usage"), "processes": ("pids.current", "pids/pids.current")}  # fmt: skip
_libc = ctypes.CDLL(None)


class Agent(GatewayConnection):
    """Connection to the control plane, and the runs of this sandbox."""

    def __init__(self, path, shim_path, remote=None, guard=None):
        super().__init__(path, remote)
        self.shim_path, self.guard = shim_path, guard
        self.runs, self.tombstones, self.retained_bytes = {}, {}, 0
        self.exit_codes = {}  # of ended background processes whose output was dropped
        self.helper = Helper(run_helper)
        self.waits = []  # (deadline, run id, request id, predicate, answer)
        wakeup, signals = os.pipe()
        for fd in (wakeup, signals):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(signals, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)  # commands of the same user could send these
        self.watch(wakeup, select.EPOLLIN, lambda _: self.reap(wakeup))

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
        runs = self.runs.values()
        times = [run.deadline for run in runs if run.exit_code is None or run.idle] + [wait[0] for wait in self.waits]
        if self.connection is None:
            times.append(self.next_attempt)
        elif self.remote:
            times.append(self.received_at + self.remote.silence_seconds)
        if self.helper.channel and not self.helper.is_kept:
            times.append(self.helper.used_at + HELPER_IDLE_SECONDS)
        if self.guard and any(not run.shim_gone for run in runs):
            times.append(self.guard.next_look)
        if any(run.killing for run in runs):
            times.append(now + KILL_STEP_SECONDS)
        earliest = min(times, default=float("inf"))
        return max(earliest - now, 0) if earliest < float("inf") else -1

    def drop_requests(self):
        self.waits = []

    # Verbs

    def dispatch(self, request_id, head, body):
        verbs = {"ping": self.ping, "exec": self.exec, "wait": self.wait, "read": self.read, "write": self.write,
                 "ack": self.ack, "kill": self.kill, "signal": self.signal, "resize": self.resize, "list": self.list_runs,
                 "stats": self.stats}  # fmt: skip
        if not isinstance(head, dict) or head.get("verb") not in verbs or not isinstance(head.get("run", ""), str):
            raise InvalidRequest
        verbs[head["verb"]](request_id, head, body)

    def ping(self, request_id, head, body):
        self.respond(request_id, {"boot": self.boot})
        if head.get("prepare"):
            with contextlib.suppress(OSError):  # too many processes: the first operation starts the helper
                self.helper.prepare()

    def list_runs(self, request_id, head, body):
        runs = self.exit_codes | {run_id: run.exit_code for run_id, run in self.runs.items()}
        if "runs" in head:
            runs = {run_id: runs[run_id] for run_id in head["runs"] if run_id in runs}
        self.respond(request_id, {"boot": self.boot}, json.dumps(runs).encode())

    def stats(self, request_id, head, body):
        """Respond with the current resource usage of the sandbox, as far as its cgroup is visible."""
        found = {}
        for name, paths in CGROUP_FILES.items():
            for path in paths:
                with contextlib.suppress(OSError), open(f"/sys/fs/cgroup/{path}") as file:
                    content = file.read().split()
                    number = int(content[1] if content[0] == "usage_usec" else content[0])
                    found["cpu_micros" if name == "cpu" else name] = number // 1000 if path.startswith("cpuacct") else number
        self.respond(request_id, {"boot": self.boot, **found})

    def exec(self, request_id, head, body):
        """Start a run, unless its id is known. A request for another boot of the agent starts nothing."""
        run_id = head["run"]
        if head["boot"] != self.boot:
            self.respond(request_id, {"run": run_id, "state": "unknown"})
            return
        if run_id in self.tombstones or run_id in self.exit_codes:
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
        for run in self.runs.values():
            if run.shim_gone and run.ended_at < oldest:
                self.forget(run)
                return True
        return False

    def start(self, run_id, head, body):
        """Start a run. Return False if no process can be created: too many processes or descriptors, or a command too long."""
        size, keep = head["command_bytes"], head.get("keep", HEAD)
        if keep not in (HEAD, STREAM, TAIL):
            raise InvalidRequest
        try:
            command = json.loads(body[:size])
            if "words" in command:
                process = self.helper.call(command["words"])
            else:
                process = Shim(self.shim_path, command, merge=keep == TAIL)
                self.helper.is_kept = False
        except OSError:
            return False
        if keep == TAIL:
            self.drop_ended_processes()
        self.runs[run_id] = run = Run(self, run_id, process, head)
        run.write(0, body[size:], not head.get("open", False))
        return True

    def drop_ended_processes(self):
        """Drop the output of all but the last ended background processes. Their exit codes stay known."""
        ended = sorted((run for run in self.runs.values() if run.keep == TAIL and run.shim_gone), key=lambda run: run.ended_at)
        for run in ended[: 1 - MAX_ENDED_PROCESSES]:
            self.exit_codes[run.id] = run.exit_code
            run.close()
            del self.runs[run.id]
        if len(self.exit_codes) > MAX_TOMBSTONES:
            del self.exit_codes[next(iter(self.exit_codes))]

    def wait(self, request_id, head, body):
        run = self.find(request_id, head)
        if run is None:
            return
        deadline = time.monotonic() + min(float(head["wait"]), MAX_WAIT_SECONDS)
        self.answer_later(deadline, run.id, request_id, lambda: self.is_ready(run), lambda: self.summary(run, head))

    def is_ready(self, run):
        """Return whether the run has ended, a background process has started, or a streamed run has output."""
        if run.exit_code is not None or (run.keep == TAIL and run.command_pid):
            return True
        return run.keep == STREAM and len(run.outputs[1].content) >= MAX_CHUNK_BYTES

    def summary(self, run, head):
        """State with the output of a short run, so that one request is enough for it."""
        state, outputs = run.describe(), run.outputs.values()
        if run.exit_code is not None and head.get("digest"):
            state["digest"] = digest_directory(head["digest"])
        complete = run.exit_code is not None and not any(output.start or output.is_full() for output in outputs)
        if not complete or run.keep == TAIL or sum(len(output.content) for output in outputs) > MAX_CHUNK_BYTES:
            return state, b""
        return state | {"inline": True}, b"".join(bytes(output.content) for output in outputs)

    def read(self, request_id, head, body):
        """Return output from a byte offset, at once if there is some, else when there is or the run ends."""
        run = self.find(request_id, head)
        if run is None:
            return
        stream, offset = STREAMS[head["stream"]], head["offset"]
        run.release(stream, offset)
        run.touch()
        deadline = time.monotonic() + min(float(head["wait"]), MAX_WAIT_SECONDS)
        limit = min(head.get("limit", MAX_CHUNK_BYTES), MAX_CHUNK_BYTES)

        def answer():
            start, content, more = run.read(stream, offset, limit)
            return {**run.describe(), "offset": start, "more": more}, content

        self.answer_later(
            deadline, run.id, request_id, lambda: run.outputs[stream].end > offset or run.exit_code is not None, answer
        )

    def write(self, request_id, head, body):
        """Pass stdin to a run from a byte offset, and answer when there is room for more. A repeated request adds nothing."""
        run = self.find(request_id, head)
        if run is None:
            return
        run.touch()
        run.write(head["offset"], body, head["last"])
        deadline = time.monotonic() + min(float(head["wait"]), MAX_WAIT_SECONDS)
        self.answer_later(
            deadline,
            run.id,
            request_id,
            lambda: len(run.unwritten) < MAX_UNWRITTEN_BYTES or run.exit_code is not None,
            lambda: ({**run.describe(), "written": run.written}, b""),
        )

    def signal(self, request_id, head, body):
        run = self.find(request_id, head)
        if run is not None:
            run.send_signal(head["signal"])
            self.respond(request_id, {"run": run.id, **run.describe()})

    def resize(self, request_id, head, body):
        run = self.find(request_id, head)
        if run is not None:
            if run.process.terminal is not None:
                run.process.resize(head["rows"], head["columns"])
            self.respond(request_id, {"run": run.id, **run.describe()})

    def ack(self, request_id, head, body):
        """Drop the result of an ended run. Its id stays known. Idempotent."""
        run = self.runs.get(head["run"])
        if run is not None and run.exit_code is not None:
            self.forget(run)
        self.respond(request_id, {"run": head["run"]})

    def forget(self, run):
        run.drop_output()
        self.tombstones[run.id] = None
        self.remove_if_done(run)
        if len(self.tombstones) > MAX_TOMBSTONES:
            del self.tombstones[next(iter(self.tombstones))]

    def remove_if_done(self, run):
        """Remove a run that was acknowledged and of which no process is left."""
        if run.shim_gone and not run.killing and run.id in self.tombstones and self.runs.pop(run.id, None):
            run.close()

    def kill(self, request_id, head, body):
        """Kill all processes of a run and of its parts, RUN/PART, and answer when they are gone. Idempotent."""
        runs = [run for name, run in self.runs.items() if name == head["run"] or name.startswith(head["run"] + "/")]
        if not runs:
            self.respond(request_id, {"run": head["run"], "state": "unknown"})
            return
        for run in runs:
            run.kill()
            if head.get("forget"):
                run.abandon()
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

    def retention_budget(self):
        return MAX_RETAINED_BYTES - self.retained_bytes

    def refuse(self, run):
        """Forget a run whose shim could not create a process. Its request is answered as if it had not been accepted."""
        waits, self.waits = self.waits, []
        for wait in waits:
            if wait[1] == run.id:
                self.respond(wait[2], {"run": run.id, "state": "busy"})
            else:
                self.waits.append(wait)
        run.close()
        del self.runs[run.id]

    def reap(self, wakeup):
        with contextlib.suppress(BlockingIOError):
            os.read(wakeup, 4096)
        with contextlib.suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                for process in (self.helper, *(run.process for run in self.runs.values())):
                    if process.pid == pid:
                        process.pid = 0  # the number may be reused

    def check_deadlines(self, now):
        self.guard_memory(now)
        for run in [*self.runs.values()]:
            run.check_deadline(now)
        if self.helper.is_idle(now):
            self.helper.end()
        if self.waits:
            self.answer_waits(now)
        if self.remote and self.connection and now >= self.received_at + self.remote.silence_seconds:
            self.disconnect()  # the gateway's machine may be gone without an end of the connection

    def guard_memory(self, now):
        """Begin to kill a run if the memory of the container is nearly used up."""
        runs = [run for run in self.runs.values() if not run.shim_gone]
        if self.guard and runs:
            with contextlib.suppress(OSError, ValueError):  # a look that failed is repeated
                if victim := self.guard.find_victim(runs, now):
                    victim.kill_for_memory()

    def count_oom_kills(self):
        """Return the number of processes that the kernel has killed for lack of memory, 0 without a guard."""
        with contextlib.suppress(OSError, ValueError):
            return self.guard.count_kills() if self.guard else 0
        return 0

    def list_strays(self, parents):
        """List children of the agent that it did not start: processes whose shim was killed."""
        known = {run.process.pid for run in self.runs.values() if not run.shim_gone} | {self.helper.pid}
        return {pid for pid, (parent, _) in parents.items() if parent == os.getpid() and pid not in known}


def run_helper(channel, load_all):
    sys.path.append(os.path.dirname(HERE))  # of files.py in the source tree
    from helper import serve

    serve(channel, load_all)


def main(path, shim_path, *bridges):
    for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):  # return the memory of acknowledged output to the system
        _libc.mallopt(option, 64 << 10)
    _libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # its memory and descriptors are hidden from commands of the same user
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # no effect in process 1
    remote = guard = None
    if path.endswith(".json"):
        from remote import Gateway

        remote = Gateway(path)
        guard = confine() if os.getpid() == 1 else None
    agent = Agent(path, shim_path, remote, guard)
    for port, upstream in zip(bridges[::2], bridges[1::2], strict=True):
        listen(agent, int(port), upstream)
    agent.serve()


def confine():
    """Load the seccomp filter, and return the guard of the container's memory, if it is limited."""
    from confinement import load_filter
    from memory import create_guard

    load_filter(f"{HERE}/seccomp.bpf")
    return create_guard()


def listen(agent, port, upstream):
    """Serve the bridge of one port."""
    if upstream == REMOTE_UPSTREAM:
        from remote import GatewayBridge

        GatewayBridge(agent, port, agent.remote)
    else:
        from bridge import Bridge

        Bridge(agent, port, upstream)


if __name__ == "__main__":
    main(*sys.argv[1:])
