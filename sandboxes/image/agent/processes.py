"""Processes that the agent starts: the shim of a command, the helper for file operations, and the end of a process tree.

Standard library only: compiled into the sandbox image beside main.py."""

import _socket as socket  # without the standard module's 1.3 MiB of enumerations and helpers
import contextlib
import json
import os
import signal
import struct
import time

PATIENCE_SECONDS = 1.0  # of a kill, after which all processes are stopped for a moment
HELPER_IDLE_SECONDS = 60.0  # after which the helper ends, and its memory is free
F_SETPIPE_SZ, PIPE_BYTES, LARGE_PIPE_BYTES = 1031, 1 << 16, 1 << 18
TIOCSWINSZ = 0x5414
MAX_TERMINAL_SIZE = 1000  # rows or columns


def enlarge_pipe(fd):
    """Let a pipe hold LARGE_PIPE_BYTES instead of PIPE_BYTES, if the user's limit permits."""
    import fcntl

    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, F_SETPIPE_SZ, LARGE_PIPE_BYTES)


class _Pipes:
    """Pipes of a new process. `ends` are the process's: stdin, stdout, stderr and the report."""

    def __init__(self):
        self.fds = []
        try:
            for _ in range(4):
                self.fds += os.pipe()
        except OSError:
            self.close()
            raise
        stdin_reader, self.stdin, stdout, stdout_writer, stderr, stderr_writer, self.report, report_writer = self.fds
        self.outputs = {1: stdout, 2: stderr}
        self.ends = (stdin_reader, stdout_writer, stderr_writer, report_writer)

    def close(self):
        for fd in self.fds:
            os.close(fd)

    def enlarge(self):
        for fd in (self.stdin, self.outputs[1]):
            enlarge_pipe(fd)

    def hand_over(self):
        """Close the ends of the process, and make the agent's non-blocking."""
        for fd in self.ends:
            os.close(fd)
        for fd in (self.stdin, *self.outputs.values(), self.report):
            os.set_blocking(fd, False)


class Shim:
    """Process of shim.c: parent of one command and of the processes that the command leaves behind."""

    def __init__(self, path, command, *, merge):
        """Start the command, with both streams in stdout if `merge`.

        Raise OSError, KeyError, TypeError or ValueError for an invalid command, with nothing started."""
        argv, env = [path, command["cwd"], *command["argv"]], {**os.environ, **command["env"]}
        self.terminal = None
        pipes = _Pipes()
        try:
            stdin, stdout, stderr, report = pipes.ends
            ends = stdin, stdout, stdout if merge else stderr, report
            if "terminal" in command:
                ends = self._open_terminal(pipes, command["terminal"])
            actions = [(os.POSIX_SPAWN_DUP2, fd, target) for target, fd in enumerate(ends)]
            self.pid = os.posix_spawn(path, argv, env, file_actions=actions)
        except BaseException:
            pipes.close()
            raise
        pipes.hand_over()
        self.stdin, self.outputs, self.report = pipes.stdin, pipes.outputs, pipes.report
        if self.terminal is not None:
            for fd in (self.stdin, *self.outputs.values()):
                os.close(fd)
            self.stdin, self.outputs = os.dup(self.terminal), {1: self.terminal}

    def _open_terminal(self, pipes, size):
        """Return the descriptors of a process with a new terminal. The agent's side becomes `terminal`."""
        self.terminal, other = os.openpty()
        pipes.fds += [self.terminal, other]
        pipes.ends = (*pipes.ends, other)
        self.resize(*size)
        os.set_blocking(self.terminal, False)
        return other, other, other, pipes.ends[3]

    def resize(self, rows, columns):
        """Set the size of the terminal. Raise ValueError."""
        import fcntl  # only for commands with a terminal

        if not all(type(value) is int and 0 < value <= MAX_TERMINAL_SIZE for value in (rows, columns)):
            raise ValueError
        fcntl.ioctl(self.terminal, TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


class HelperCall:
    """One operation of files.py, in a process that the helper forks and that has no children."""

    terminal, pid = None, 0

    def __init__(self, pipes, channel):
        self.stdin, self.outputs, self.report = pipes.stdin, pipes.outputs, pipes.report
        self.channel = channel  # to the helper that has received it


class Helper:
    """Process that executes `run`, a function of a descriptor and of whether to load all modules at once.

    Started at its first use and ended when it has been idle, or prepared and kept until the first command starts.

    A fork of the agent, because a new Python would need ten times as long to start. It stays undumpable."""

    def __init__(self, run):
        self.run, self.channel, self.pid, self.used_at, self.is_kept = run, None, 0, 0.0, False

    def prepare(self):
        """Start the helper unless it runs, and keep it until `is_kept` is cleared. Raise OSError."""
        self.is_kept = True
        if self.channel is None:
            self.start()

    def is_idle(self, now):
        return self.channel is not None and not self.is_kept and now >= self.used_at + HELPER_IDLE_SECONDS

    def call(self, words):
        """Start an operation. Raise OSError if no process can be created."""
        if self.channel is None:
            self.start()
        self.used_at = time.monotonic()
        pipes = _Pipes()
        try:
            pipes.enlarge()
            self._send(words, pipes.ends)
        except BaseException:
            pipes.close()
            raise
        pipes.hand_over()
        return HelperCall(pipes, self.channel)

    def _send(self, words, ends):
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("4i", *ends))]
        content = json.dumps(words).encode()
        try:
            self.channel.sendmsg([content], rights)
        except (BrokenPipeError, ConnectionResetError):  # the helper was killed
            self.end()
            self.start()
            self.channel.sendmsg([content], rights)

    def start(self):
        ours, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.pid = os.fork()
            if self.pid == 0:
                self._become(other.fileno())
        except OSError:
            ours.close()
            raise
        finally:
            other.close()
        ours.setblocking(False)
        self.channel = ours

    def _become(self, channel):
        """Close all descriptors of the agent, and execute `run`, in the new process."""
        try:
            signal.set_wakeup_fd(-1)
            os.setsid()
            null = os.open("/dev/null", os.O_RDWR)
            for target, fd in enumerate((null, null, null, channel)):
                os.dup2(fd, target)
            for fd in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, 3}:
                with contextlib.suppress(OSError):  # the descriptor of the listing
                    os.close(fd)
            self.run(3, self.is_kept)
        finally:
            os._exit(1)

    def kill(self):
        """Kill the helper. Operations that it has not begun are refused."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.end()

    def replace(self, call):
        """Let the next operation start another helper, if this one has received `call` and was killed before it began.

        The kernel closes the descriptors of a killed process in any order. An operation could still be sent to its socket."""
        if call.channel is self.channel:
            self.end()

    def end(self):
        if self.channel is not None:
            self.channel.close()
            self.channel = None


class TreeKill:
    """Kill of all processes below a shim, or of those that a killed shim has left to process 1.

    All processes are stopped before any is killed, because a stopped process cannot fork. A fork bomb may be faster. After
    PATIENCE_SECONDS the kernel therefore stops every process of the sandbox at once; the others continue afterwards."""

    def __init__(self):
        self.stopped, self.began = {}, time.monotonic()  # pid -> pidfd

    def step(self, list_roots, spared):
        """Stop all members of the tree, or kill them if all are stopped. Return whether none is left.

        `list_roots` returns the roots of the tree among the processes that it is given. The pids in `spared` are not killed."""
        if os.getpid() == 1 and time.monotonic() - self.began > PATIENCE_SECONDS:
            self.began = time.monotonic()
            self._kill_frozen(list_roots, spared)
            return False
        parents = list_processes()
        members = list_descendants(parents, list_roots(parents)) - spared
        fresh = members - self.stopped.keys()
        for pid in fresh:
            with contextlib.suppress(OSError):
                fd = os.pidfd_open(pid)
                if list_processes((pid,)).get(pid) == parents[pid]:
                    signal.pidfd_send_signal(fd, signal.SIGSTOP)
                    self.stopped[pid] = fd
                else:
                    os.close(fd)
        if fresh:
            return False
        for pid in spared:  # a command may have stopped its shim
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        for fd in self.stopped.values():
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        self.close()
        return not members

    def _kill_frozen(self, list_roots, spared):
        with frozen():
            parents = list_processes()
            for pid in list_descendants(parents, list_roots(parents)) - spared:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def close(self):
        for fd in self.stopped.values():
            os.close(fd)
        self.stopped = {}


@contextlib.contextmanager
def frozen():
    """Stop all other processes of the sandbox during the block. Only for process 1: elsewhere they would be the machine's."""
    assert os.getpid() == 1
    with contextlib.suppress(ProcessLookupError):  # no other process
        os.kill(-1, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGCONT)


def list_processes(pids=None):
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


def list_descendants(parents, roots):
    """Return the roots and all processes below them. A zombie's children have been adopted already."""
    members = set(roots) & parents.keys()
    while more := {pid for pid, (parent, _) in parents.items() if parent in members} - members:
        members |= more
    return members
