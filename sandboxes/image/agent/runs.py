"""Runs of the agent: one command each, with its output and its result.

Standard library only: compiled into the sandbox image beside main.py."""

import contextlib
import os
import select
import signal
import time

from processes import PIPE_BYTES, HelperCall, TreeKill, enlarge_pipe

READ_BYTES = 256 << 10  # of a pipe at once
KILLED_EXIT_CODE, NOT_STARTED = 137, -1
MAX_UNREAD_BYTES = 1 << 20  # of a streamed run; its command waits until the client has read
MAX_UNWRITTEN_BYTES = 1 << 20  # of stdin; the client's next write is answered when less is left
MAX_PIPE_BYTES = 1 << 20
MAX_KILL_SECONDS = 60.0
END_OF_TRANSMISSION = b"\x04"
HEAD, STREAM, TAIL = "head", "stream", "tail"  # bytes of output that a run keeps: the first, the unread, the last


class Output:
    """Kept bytes of one stream. Offsets count from the first byte that the command has written."""

    def __init__(self, keep, cap):
        self.keep, self.cap, self.content = keep, cap, bytearray()
        self.start = 0  # offset of the first kept byte
        self.dropped = 0  # bytes after the kept ones

    @property
    def end(self):
        return self.start + len(self.content)

    def is_full(self):
        return self.keep == STREAM and len(self.content) >= MAX_UNREAD_BYTES

    def add(self, chunk, budget):
        """Add output. At most `budget` bytes of a run that keeps the first bytes. Kept output has no gap."""
        if self.keep == HEAD:
            room = 0 if self.dropped else max(min(self.cap - len(self.content), budget), 0)
            self.dropped += max(len(chunk) - room, 0)
            chunk = chunk[:room]
        self.content += chunk
        excess = len(self.content) - self.cap
        if self.keep == TAIL and excess > self.cap >> 2:
            self.release(self.start + excess)

    def read(self, offset, limit):
        """Return (offset of the bytes, bytes). Kept output starts at a later offset if older output was dropped."""
        offset = min(max(offset, self.start), self.end)
        first = offset - self.start
        with memoryview(self.content) as content:
            return offset, bytes(content[first : first + limit])

    def release(self, offset):
        """Drop all bytes before the offset."""
        count = max(min(offset, self.end) - self.start, 0)
        del self.content[:count]
        self.start += count


class Run:
    """One command: its process, output and result. `loop` is the agent."""

    def __init__(self, loop, run_id, process, head):
        self.loop, self.id, self.process = loop, run_id, process
        self.keep = head.get("keep", HEAD)
        self.outputs = {stream: Output(self.keep, head["cap"]) for stream in (1, 2)}
        self.idle = head.get("idle", 0)  # seconds without a request for this run, after which it ends; 0: no limit
        self.deadline = self._limit = time.monotonic() + head["timeout"] if head["timeout"] else float("inf")
        self.unwritten, self.written, self.stdin_ended = bytearray(), 0, False  # written: bytes of stdin received
        self.exit_code = None
        self.ended_at = 0.0
        self.timed_out = self.shim_gone = self.shim_lost = False
        self.out_of_memory = False  # killed, or one of its processes, for lack of memory
        self._oom_kills_before = loop.count_oom_kills()
        self.is_abandoned = False  # no client will read the result
        self.command_pid = 0  # once the command has started; also its process group
        self.killing = None
        self._report, self._unsent_signals = b"", {}
        for stream, fd in process.outputs.items():
            loop.watch(fd, select.EPOLLIN, lambda _, stream=stream: self.read_output(stream))
        loop.watch(process.report, select.EPOLLIN, lambda _: self.read_report())
        self.touch()

    def touch(self):
        """Begin the idle time anew."""
        if self.idle and not self.timed_out:
            self.deadline = min(time.monotonic() + self.idle, self._limit if self.exit_code is None else float("inf"))

    def describe(self):
        state = "running" if self.exit_code is None else "ended"
        sizes = {name: [self.outputs[stream].end, self.outputs[stream].dropped] for name, stream in STREAMS.items()}
        of_ended = {} if self.exit_code is None else {"age": round(time.monotonic() - self.ended_at, 3)}
        if self.out_of_memory and of_ended:
            of_ended["oom"] = True
        return {"state": state, "exit_code": self.exit_code, "timed_out": self.timed_out, **of_ended, **sizes}

    def count_kept(self):
        return sum(len(output.content) for output in self.outputs.values()) if self.keep == HEAD else 0

    # Output

    def read_output(self, stream):
        """Keep available output. Return False if there is none, or no room for it."""
        fd = self.process.outputs.get(stream)  # a closed descriptor's number may belong to another run already
        if fd is None:
            return False
        output = self.outputs[stream]
        if output.is_full():
            self.loop.unwatch(fd)  # until output is released
            return False
        try:
            chunk = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:  # a terminal whose program has ended
            chunk = b""
        if not chunk:
            self.loop.unwatch(fd)
            del self.process.outputs[stream]
            if fd != self.process.terminal:
                os.close(fd)
            self.loop.answer_waits(time.monotonic())
            return False
        if len(chunk) >= PIPE_BYTES and fd != self.process.terminal:
            enlarge_pipe(fd)
        if self.exit_code is None or self.keep != HEAD:  # a result does not change after the end
            self._add(output, chunk)
        return True

    def _add(self, output, chunk):
        before = self.count_kept()
        output.add(chunk, self.loop.retention_budget())
        self.loop.retained_bytes += self.count_kept() - before
        self.loop.answer_waits(time.monotonic())

    def release(self, stream, offset):
        """Drop output that the client of a streamed run has read."""
        output = self.outputs[stream]
        if self.keep != STREAM:
            return
        was_full = output.is_full()
        output.release(offset)
        if was_full and not output.is_full() and stream in self.process.outputs:
            fd = self.process.outputs[stream]
            self.loop.watch(fd, select.EPOLLIN, lambda _: self.read_output(stream))

    def drop_output(self):
        self.loop.retained_bytes -= self.count_kept()
        for output in self.outputs.values():
            output.release(output.end)
            output.cap = 0
        self.idle = 0

    # Stdin

    def write(self, offset, content, is_last):
        """Accept stdin from a byte offset. Bytes that were received before are skipped, so a request may be repeated."""
        if offset > self.written:
            raise ValueError
        fresh = content[self.written - offset :]
        self.unwritten += fresh
        self.written += len(fresh)
        self.stdin_ended = self.stdin_ended or is_last
        self.feed()

    def feed(self):
        fd = self.process.stdin
        if fd is None:
            self.unwritten.clear()
            return
        try:
            while self.unwritten:
                del self.unwritten[: os.write(fd, self.unwritten[:READ_BYTES])]
        except BlockingIOError:
            self.loop.watch(fd, select.EPOLLOUT, lambda _: self.feed())
            return
        except OSError:  # the program closed its stdin
            self.unwritten.clear()
            self.stdin_ended = True
        self.loop.unwatch(fd)
        if self.stdin_ended:
            self._close_stdin()
        self.loop.answer_waits(time.monotonic())

    def _close_stdin(self):
        if self.process.stdin is not None:
            if self.process.terminal is not None:
                with contextlib.suppress(OSError):
                    os.write(self.process.stdin, END_OF_TRANSMISSION)
            self.loop.unwatch(self.process.stdin)
            os.close(self.process.stdin)
            self.process.stdin = None

    # Result

    def read_report(self):
        """Record the start and the exit code from the report of the shim or helper, and its end."""
        try:
            content = os.read(self.process.report, 4096)
        except BlockingIOError:
            return
        if not content:
            self._finish()
            return
        self._report += content
        while b"\n" in self._report:
            line, _, self._report = self._report.partition(b"\n")
            code, _, message = line.partition(b" ")
            if code == b"S":
                self.command_pid = int(message)
                self.process.pid = self.process.pid or self.command_pid
                for number in self._unsent_signals:
                    self.send_signal(number)
                self.loop.answer_waits(time.monotonic())
            elif int(code) == NOT_STARTED:
                self.loop.refuse(self)
                return
            else:
                self.end(int(code), message + b"\n" if message else b"")

    def _finish(self):
        self.loop.unwatch(self.process.report)
        os.close(self.process.report)
        self.process.report = None
        self.shim_gone = True
        if self.exit_code is None and isinstance(self.process, HelperCall) and not self.command_pid:  # the helper was killed
            self.loop.helper.replace(self.process)
            self.loop.refuse(self)
            return
        if self.exit_code is None:  # the shim was killed; process 1 has adopted its processes
            self.shim_lost = not isinstance(self.process, HelperCall)
            if self.shim_lost and self.killing is None:
                self.killing = TreeKill()
            self.end(KILLED_EXIT_CODE, b"")
        if self.killing and not self.shim_lost:
            self.finish_kill()
        self.loop.remove_if_done(self)

    def drain(self):
        """Read output that is in the pipes. A child of the command may be writing more without end."""
        for stream in (1, 2):
            for _ in range(MAX_PIPE_BYTES // READ_BYTES):
                if not self.read_output(stream):
                    break

    def end(self, code, message):
        self.drain()
        self.outputs[1 if self.keep == TAIL else 2].content += message
        self.loop.retained_bytes += len(message) if self.keep == HEAD else 0
        self.exit_code = KILLED_EXIT_CODE if self.timed_out or self.out_of_memory else code
        if code == KILLED_EXIT_CODE and not self.timed_out:  # else the kernel has killed a process of another run
            self.out_of_memory |= self.loop.count_oom_kills() > self._oom_kills_before
        self.ended_at = time.monotonic()
        self.loop.answer_waits(time.monotonic())
        if self.is_abandoned:
            self.loop.forget(self)

    def read(self, stream, offset, limit):
        """Return (offset of the bytes, bytes, whether more can be read at once)."""
        self.release(stream, offset)
        if self.exit_code is not None and self.keep == STREAM:
            self.drain()
        output = self.outputs[stream]
        offset, content = output.read(offset, limit)
        return offset, content, offset + len(content) < output.end or output.is_full()

    def send_signal(self, number):
        """Send a signal to the command and its process group, if it runs. Raise ValueError for an invalid number.

        The command may print before the shim reports its start. The signal is then sent after the report."""
        if not 0 < number < signal.NSIG:
            raise ValueError
        if not self.command_pid:
            self._unsent_signals[number] = None
        elif self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.command_pid, number)

    def close(self):
        """Close all descriptors."""
        terminal = {self.process.terminal} if self.process.terminal is not None else set()
        for fd in {*self.process.outputs.values(), self.process.report, self.process.stdin} - {None} | terminal:
            self.loop.unwatch(fd)
            os.close(fd)
        self.process.outputs, self.process.report, self.process.stdin, self.process.terminal = {}, None, None, None

    # Kill

    def kill(self):
        """Begin to kill all processes of the run."""
        if self.killing is None and not self.shim_gone:
            self.killing = TreeKill()

    def kill_for_memory(self, now):
        """Kill all processes of the run, which are stopped, with `oom` in its result if it has not ended yet."""
        self.out_of_memory |= self.exit_code is None
        self.kill()
        for _ in ("note the processes", "kill them"):
            self.kill_step(now)

    def kill_step(self, now):
        if isinstance(self.process, HelperCall):
            if self.process.report is None:
                return
            if not self.process.pid:  # the helper has not begun with it, and may have been stopped by a command
                self.loop.helper.kill()
                return
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)
            return
        roots = self.loop.list_strays if self.shim_lost else lambda _: {self.process.pid}
        spared = {self.process.pid} if self.process.pid and not self.shim_lost else set()
        if self.killing.step(roots, spared) and (self.shim_lost or self.shim_gone):
            self.finish_kill()

    def finish_kill(self):
        self.killing.close()
        self.killing = None
        self.loop.answer_waits(time.monotonic())

    def abandon(self):
        """Drop the result, now or once the run has ended."""
        self.is_abandoned = True
        if self.exit_code is not None:
            self.loop.forget(self)

    def check_deadline(self, now):
        if self.exit_code is not None and self.idle and now >= self.deadline:  # no client has read the output to its end
            self.abandon()
        if self.exit_code is None and not self.timed_out and now >= self.deadline:
            self.timed_out = True
            if now < self._limit:  # idle: the client has gone
                self.abandon()
            self.deadline = self._limit = now + MAX_KILL_SECONDS
            self.kill()
        if self.killing:
            self.kill_step(now)


STREAMS = {"stdout": 1, "stderr": 2}
