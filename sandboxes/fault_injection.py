"""Call hooks of the in-memory provider and store: recorded calls, concurrent operations and injected failures in tests."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import ClassVar

Hook = Callable[[str], None]  # receives the first argument of the call: a sandbox's reference or a key


class HookedCalls:
    """Mixin of a port's implementation whose methods run inside `hooked_call`.

    Hooks run outside every lock, so they may raise, block at a barrier, simulate a crash or run a concurrent operation."""

    port: ClassVar[type]  # abstract base class, whose methods accept hooks

    def clear_hooks(self) -> None:
        """Remove all hooks and recorded calls. Call this method in the constructor."""
        self._hooks: defaultdict[tuple[str, str], list[Hook]] = defaultdict(list)
        self.calls: list[tuple[str, str]] = []  # (method, first argument)

    def before(self, method: str, hook: Hook) -> ExitStack:
        """Run a hook before each call of this method, until the hooks are cleared or the returned stack is closed (also by
        `with`). Raise ValueError if the port has no such method."""
        return self._add_hook("before", method, hook)

    def after(self, method: str, hook: Hook) -> ExitStack:
        """Run a hook after each successful call of this method, before the caller gets the result. Removed as in `before`."""
        return self._add_hook("after", method, hook)

    def fail(self, method: str, error: BaseException, *, times: int | None = None) -> ExitStack:
        """Make the next `times` calls of this method (None: all) raise `error` without effect. Removed as in `before`."""
        remaining = itertools.repeat(None) if times is None else itertools.repeat(None, times)

        def raise_error(subject: str) -> None:
            for _ in remaining:
                raise error

        return self._add_hook("before", method, raise_error)

    @contextmanager
    def hooked_call(self, method: str, subject: str) -> Iterator[None]:
        """Record a call, and run its hooks before and, unless the body raises, after the body."""
        self.calls.append((method, subject))
        for hook in [*self._hooks["before", method]]:
            hook(subject)
        yield
        for hook in [*self._hooks["after", method]]:
            hook(subject)

    def _add_hook(self, when: str, method: str, hook: Hook) -> ExitStack:
        if not callable(getattr(self.port, method, None)):
            raise ValueError(f"{method} is not a method of {self.port.__name__}")
        hooks, removal = self._hooks[when, method], ExitStack()
        hooks.append(hook)

        @removal.callback
        def remove() -> None:
            with suppress(ValueError):
                hooks.remove(hook)

        return removal
