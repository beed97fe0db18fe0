"""File operations for the agent: a fork of the agent that has loaded files.py, and forks for each operation.

The operations arrive over a sequential-packet socket. Each message is a JSON list, the command line of files.py, with four
descriptors: stdin, stdout, stderr and the report, to which the operation writes "S PID" and "CODE" as the shim does. Ends when
the agent closes the socket. Unlike the agent, the helper can be killed by commands of the same user. Standard library only."""

import _socket as socket  # without the standard module's enumerations and helpers
import json
import os
import signal
import struct

import files

NOT_STARTED, FAILED = -1, 1
MAX_MESSAGE_BYTES = 64 << 10
REPORT_FD = 3
TAR_VERBS = ("pack", "unpack", "unpack_and_look")
CONNECT_VERB = "connect"  # words: the verb and a TCP port
RIGHTS = struct.Struct("4i")


def serve(descriptor, load_all):
    """Execute operations until the agent closes the socket with this descriptor.

    The module for tars stays out of memory until the first operation that needs it, unless `load_all`."""
    if load_all:
        import tarfile
    channel = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    while True:
        content, ancillary, _, _ = channel.recvmsg(MAX_MESSAGE_BYTES, socket.CMSG_SPACE(RIGHTS.size))
        if not content:
            return
        fds = [fd for _, _, rights in ancillary for fd in RIGHTS.unpack(rights)]
        words = json.loads(content)
        if words[0] in TAR_VERBS:
            import tarfile  # noqa: F401 - in this process, so that only the first of these operations waits for it
        try:
            if os.fork() == 0:
                operate(words, fds)
        except OSError:  # too many processes
            os.write(fds[REPORT_FD], b"%d\n" % NOT_STARTED)
        for fd in fds:
            os.close(fd)


def operate(words, fds):
    """Execute one command line of files.py, or relay a connection to a port, and end this process."""
    code = FAILED
    try:
        for target, fd in enumerate(fds):
            os.dup2(fd, target)  # also closes the socket
        for fd in fds:
            if fd > REPORT_FD:
                os.close(fd)
        os.write(REPORT_FD, b"S %d\n" % os.getpid())
        if words[0] == CONNECT_VERB:
            from ports import relay

            code = relay(int(words[1]))
        else:
            code = files.main(words)
    except BrokenPipeError:
        pass  # the agent has lost its interest
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace"))
    finally:
        os.write(REPORT_FD, b"%d\n" % code)
        os._exit(0)
