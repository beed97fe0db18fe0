"""Seccomp filter of process 1 and of all processes that it starts, where the engine has no profile of ours.

The image's build has compiled the filter (syscalls.py). Standard library only: compiled into the sandbox image beside
main.py."""

import ctypes
import os

PR_SET_SECCOMP, SECCOMP_MODE_FILTER, PR_SET_NO_NEW_PRIVS = 22, 2, 38
INSTRUCTION_BYTES = 8


class Program(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def load_filter(path):
    """Load the filter in this file, for good. Raise OSError: without its filter no sandbox starts."""
    with open(path, "rb") as file:
        content = file.read()
    libc = ctypes.CDLL(None, use_errno=True)
    program = Program(len(content) // INSTRUCTION_BYTES, content)
    no = ctypes.c_ulong(0)
    for option, value, argument in (
        (PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), no),
        (PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), ctypes.byref(program)),
    ):
        if libc.prctl(option, value, argument, no, no):
            raise OSError(ctypes.get_errno(), f"The seccomp filter is refused: {os.strerror(ctypes.get_errno())}")
