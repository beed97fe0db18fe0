"""Release of leases at the end of the process: atexit, and signals whose default action would end it without atexit.

A handler of the application is never replaced: it decides what the signal means, and its exception or sys.exit ends the `with`
block. Where a signal has its default action, a handler is installed while a sandbox is open. It releases the leases, restores
the default and sends the signal again, so that the process ends as it would have without this package.

The threads of the package end before the interpreter does. OpenSSL frees its state at the end of a process, and a thread that
still uses it crashes the process."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING
from weakref import WeakSet

if TYPE_CHECKING:
    from .lease import HeldLease

SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGINT") if hasattr(signal, name)]
MAX_EXIT_SECONDS = 10.0  # for the threads of this package to end; their requests have shorter limits
_threads: WeakSet[ExitingThread] = WeakSet()
_open: dict[int, HeldLease] = {}  # each operation on it is atomic: signal handlers and finalizers take no lock
_installed: set[int] = set()


def register(lease: HeldLease) -> None:
    """Release the lease when the process ends."""
    _open[id(lease)] = lease
    if threading.current_thread() is threading.main_thread():
        _install_handlers()


def unregister(lease: HeldLease) -> None:
    """Forget a lease that was released or does not have to be. Idempotent."""
    _open.pop(id(lease), None)
    if not _open and threading.current_thread() is threading.main_thread():
        _restore_handlers()


def release_all() -> None:
    """Release all open leases, each within the time limit of HeldLease.release_now."""
    for lease in [*_open.values()]:
        lease.release_now()


class ExitingThread(threading.Thread):
    """Daemon thread that ends before the interpreter does."""

    def __init__(self, name: str, target: Callable[[], object] | None = None) -> None:
        super().__init__(name=name, target=target, daemon=True)
        _threads.add(self)

    def stop(self) -> None:
        """Let the thread end soon."""


def _end() -> None:
    """Release all open leases, and wait for the threads of this package."""
    release_all()
    deadline, running = time.monotonic() + MAX_EXIT_SECONDS, [thread for thread in _threads if thread.is_alive()]
    for thread in running:
        thread.stop()
    for thread in running:
        thread.join(max(deadline - time.monotonic(), 0.0))


def _install_handlers() -> None:
    for number in SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _handle)
            _installed.add(number)


def _restore_handlers() -> None:
    for number in [*_installed]:
        _installed.discard(number)
        if signal.getsignal(number) is _handle:
            signal.signal(number, signal.SIG_DFL)


def _handle(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)  # a second signal ends the process at once
    release_all()
    os.kill(os.getpid(), number)


def _forget_all() -> None:
    """Leave the leases of the parent to the parent, in a forked child."""
    _open.clear()
    _restore_handlers()


atexit.register(_end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
