"""File operations for the agent: a process that has loaded files.py, and forks for each operation.

    helper.py    descriptor 3 is a sequential-packet socket

Each message is a JSON list, the command line of files.py, with four descriptors: stdin, stdout, stderr and the report, to
which the operation writes "S PID" and "CODE" as the shim does. Ends when the agent closes the socket. Unlike the agent, the
helper can be killed and traced by commands of the same user, who gain no access to files by that. Standard library only."""

import json
import os
import signal
import socket
import sys

DIRECTORY = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [DIRECTORY, os.path.dirname(DIRECTORY)]  # an isolated Python does not search the program's directory

import files  # noqa: E402

NOT_STARTED, FAILED = -1, 1
MAX_MESSAGE_BYTES = 64 << 10
REPORT_FD = 3


def main():
    channel = socket.socket(fileno=REPORT_FD)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    while True:
        content, fds, _, _ = socket.recv_fds(channel, MAX_MESSAGE_BYTES, 4)
        if not content:
            return
        try:
            if os.fork() == 0:
                operate(json.loads(content), fds)
        except OSError:  # too many processes
            os.write(fds[REPORT_FD], b"%d\n" % NOT_STARTED)
        for fd in fds:
            os.close(fd)


def operate(words, fds):
    """Execute one command line of files.py, and end this process."""
    code = FAILED
    try:
        for target, fd in enumerate(fds):
            os.dup2(fd, target)  # also closes the socket
        for fd in fds:
            if fd > REPORT_FD:
                os.close(fd)
        os.write(REPORT_FD, b"S %d\n" % os.getpid())
        code = files.main(words)
    except BrokenPipeError:
        pass  # the agent has lost its interest
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace"))
    finally:
        os.write(REPORT_FD, b"%d\n" % code)
        os._exit(0)


if __name__ == "__main__":
    main()
