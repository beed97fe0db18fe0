"""Common part of the lifecycle of remote sandboxes: look-up, destruction, and calls that need a running sandbox."""

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from django.conf import settings

from sandboxes.providers.base import Provider
from sandboxes.providers.errors import FailureCause, Missing, ProviderError, Rejected, Unavailable
from sandboxes.providers.remote import absence
from sandboxes.providers.remote.errors import Conflict, NotFound

STOP_TIMEOUT_SECONDS = 55.0  # besides the last request; together below MAX_SUSPEND_TIME
REMOVAL_TIMEOUT_SECONDS = 60.0  # of a sandbox that the vendor has begun to delete
Result = TypeVar("Result")


class Pause:
    """Increasing pauses between looks at a vendor's state, up to a second, until a deadline (monotonic seconds)."""

    def __init__(self, deadline: float) -> None:
        self._deadline, self._seconds = deadline, 0.05

    def wait(self, problem: str) -> None:
        """Wait for the next look. Raise Unavailable with this text at the deadline."""
        if time.monotonic() >= self._deadline:
            raise Unavailable(problem, cause=FailureCause.TIMEOUT)
        time.sleep(self._seconds)
        self._seconds = min(2 * self._seconds, 1.0)


class RemoteLifecycle(Provider):
    """Lifecycle verbs of a provider whose sandboxes run at a vendor."""

    can_suspend = False
    suspend_keeps_processes = False

    @abstractmethod
    def _look_up(self, ref: str) -> Any:
        """Ask the vendor once for a sandbox, and return its description.

        Raise NotFound for the vendor's own document of absence, and Unavailable for every other answer."""

    def _is_listed(self, ref: str) -> bool:
        """Return whether the vendor's list names the sandbox, for the proof of its absence. Raise Unavailable."""
        return any(found.ref == ref for found in self.list_all())

    def _get(self, ref: str) -> Any:
        """Return the description of a sandbox. Raise Missing if its absence is proven, and Unavailable."""
        return absence.look_up(ref, lambda: self._look_up(ref), lambda: self._is_listed(ref))

    def _settle_create(self, ref: str, failed: ProviderError) -> Any:
        """Return the description of a sandbox whose create has failed, if it exists: the outcome was a success, or repeated.

        Otherwise raise the error of the create. An object that the vendor did not find is then one that the request names, such
        as the image: Rejected."""
        try:
            return self._look_up(ref)
        except Unavailable:
            if isinstance(failed, NotFound):
                raise Rejected(str(failed), cause=FailureCause.IMAGE_UNUSABLE) from failed
            raise failed from None

    @contextmanager
    def _proving_absence(self, ref: str) -> Iterator[None]:
        """Raise Missing in place of NotFound if the absence of the sandbox is proven."""
        try:
            yield
        except NotFound:
            self._get(ref)
            raise

    @abstractmethod
    def _delete(self, ref: str) -> None:
        """Ask the vendor to delete a sandbox. Raise NotFound, Conflict while its state does not permit that, Unavailable."""

    def _look_up_remains(self, ref: str) -> Any:
        """Like `_look_up`, and also return a sandbox that is being deleted."""
        return self._look_up(ref)

    def destroy(self, ref: str) -> None:
        """Ask for the deletion until the absence is proven. An answer to the request alone proves nothing."""
        pause = Pause(time.monotonic() + REMOVAL_TIMEOUT_SECONDS)
        while True:
            with suppress(NotFound, Conflict):  # a conflict: in a state that ends by itself, such as starting
                self._delete(ref)
            try:
                absence.look_up(ref, lambda: self._look_up_remains(ref), lambda: self._is_listed(ref))
            except Missing:
                return
            pause.wait(f"{ref} is still being deleted")

    @abstractmethod
    def _wait_running(self, ref: str, deadline: float) -> None:
        """Return once the vendor's exec works. Raise Unavailable at the deadline (monotonic seconds), Missing."""

    def _call_running(self, ref: str, call: Callable[[], Result]) -> Result:
        """Make a call that needs a running sandbox. If it fails in a stopped one, start the sandbox and repeat the call.

        A call that was refused is repeated in a running sandbox, too: a concurrent call may have started it since."""
        try:
            return call()
        except Missing:
            raise
        except ProviderError as error:
            if self.inspect(ref).running and not isinstance(error, Rejected):
                raise
        self._wait_running(ref, time.monotonic() + settings.SANDBOX_START_TIMEOUT.total_seconds())
        return call()

    def suspend(self, ref: str) -> None:
        if not self.can_suspend:
            raise Rejected(f"The {self.name} provider cannot stop a sandbox without the loss of its files.")
        self._stop(ref, time.monotonic() + STOP_TIMEOUT_SECONDS)

    def _stop(self, ref: str, deadline: float) -> None:
        """Stop a sandbox, and return once it is stopped with its files. Idempotent.

        Raise Missing, and Unavailable at the deadline (monotonic seconds) or if the outcome is not known."""
        raise NotImplementedError

    def resume(self, ref: str) -> None:
        if self.can_suspend:
            self._wait_running(ref, time.monotonic() + settings.SANDBOX_START_TIMEOUT.total_seconds())
