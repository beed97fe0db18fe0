"""Release of leases at the end of the process: atexit, and signals whose default action would end it without atexit.

A handler of the application is never replaced: it decides what the signal means, and its exception or sys.exit ends the `with`
block. Where a signal has its default action, a handler is installed while a sandbox is open. It releases the leases, restores
the default and sends the signal again, so that the process ends as it would have without this package."""

from __future__ import annotations

import atexit
import os
import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .lease import HeldLease

SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGINT") if hasattr(signal, name)]
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


atexit.register(release_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
