"""Deterministic scheduler: threads that run one at a time, a virtual clock, and a trace of all events.

Each actor is a thread that runs only while it holds the baton. The seeded generator decides at each yield point whether the
actor goes on. Time advances only when the scheduler says so. One seed therefore always gives the same history."""

import hashlib
import heapq
import threading
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Protocol

# In the past, so that files on the real disk are never older than a virtual cutoff.
EPOCH = datetime(2024, 3, 4, 5, 0, tzinfo=UTC)
STACK_BYTES = 1 << 20
RECENT_EVENTS = 400  # printed when a history fails

HISTORY_THREAD = threading.local()  # with the attribute `is_current` in the threads of a history


def is_history_thread() -> bool:
    """Return whether this is the main thread of a history or one of its actors, and not a thread of a vendor's client."""
    return getattr(HISTORY_THREAD, "is_current", False)


class SimulatedCrash(BaseException):
    """End of a killed actor after its history. A BaseException, so that no handler of the product catches it."""


class Context(Protocol):
    """Surroundings of an actor, such as its process. `enter` is called whenever the actor gets the baton."""

    name: str

    def enter(self) -> None: ...


def create_baton() -> threading.Lock:
    """Return a lock that another thread releases to let its waiter go on."""
    baton = threading.Lock()
    baton.acquire()
    return baton


class Actor:
    """One thread of one virtual process."""

    def __init__(self, scheduler: "Scheduler", name: str, act: Callable[[], object], context: Context) -> None:
        self.name, self.act, self.context, self.scheduler = name, act, context, scheduler
        self.wake_at: float | None = scheduler.seconds  # None: never, the actor was killed
        self.done, self.error = False, None  # type: bool, BaseException | None
        self.polls = 0
        self.committed_at = scheduler.seconds  # time of the last commit
        self.cut_off_until = 0.0  # no connection to the database before this virtual time
        self.slowed = False  # waited without progress at least once
        self.stalled = False  # made no progress for so long that others may take over its work
        self.baton = create_baton()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    @property
    def killed(self) -> bool:
        return self.wake_at is None

    def _run(self) -> None:
        HISTORY_THREAD.is_current = True
        self.baton.acquire()
        try:
            if not self.scheduler.detached:
                self.act()
        except SimulatedCrash:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.done = True
            self.scheduler.baton.release()


class Scheduler:
    """Baton, virtual clock, timers and trace of one history."""

    def __init__(self, seed: int) -> None:
        threading.stack_size(STACK_BYTES)
        self.random = Random(seed)
        self.seconds = 0.0
        self.actors: list[Actor] = []
        self.current: Actor | None = None
        self.detached = False
        self.baton = create_baton()
        self.timers: list[tuple[float, int, Callable[[], object]]] = []
        self.timer_count = 0
        self.events, self.digest = 0, hashlib.sha256()
        self.recent: deque[str] = deque(maxlen=RECENT_EVENTS)
        self.print_events = False

    @property
    def time(self) -> datetime:
        return EPOCH + timedelta(seconds=self.seconds)

    def record(self, *parts: object) -> None:
        """Add one event to the trace."""
        line = f"{self.seconds:.6f} {self.current.name if self.current else '-'} {' '.join(map(str, parts))}"
        self.events += 1
        self.digest.update(line.encode(errors="surrogateescape") + b"\n")
        self.recent.append(line)
        if self.print_events:
            print(line)

    def spawn(self, name: str, act: Callable[[], object], context: Context) -> Actor:
        actor = Actor(self, name, act, context)
        self.actors.append(actor)
        return actor

    def call_at(self, seconds: float, act: Callable[[], object]) -> None:
        """Call a function in the main thread once the clock reaches `seconds`."""
        self.timer_count += 1
        heapq.heappush(self.timers, (seconds, self.timer_count, act))

    # --- called by actors -------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Give the baton back. Returns when the scheduler picks this actor again. Does nothing outside of actors."""
        actor = self.current
        if actor is None:
            return
        if self.detached:
            raise SimulatedCrash
        self.baton.release()
        actor.baton.acquire()
        if self.detached:
            raise SimulatedCrash

    def sleep(self, seconds: float) -> None:
        """Wait until the virtual clock has advanced."""
        actor = self.current
        if actor is None:
            self.seconds += seconds
            return
        actor.wake_at = self.seconds + seconds
        self.pause()

    def poll(self, seconds: float) -> None:
        """Replacement of time.sleep. Repeated sleeps of one actor become longer: a slow machine may do that, too."""
        if self.current is None:
            self.sleep(seconds)
            return
        self.current.polls += 1
        self.sleep(max(seconds, min(0.05 * 1.4**self.current.polls, 20.0)))

    def kill(self, actors: list[Actor]) -> None:
        """Never resume these actors. Does not return if the current actor is one of them."""
        for actor in actors:
            actor.wake_at = None
        if self.current in actors:
            self.pause()

    # --- called by the main thread ----------------------------------------------------------------------------------

    def step(self, limit: float | None = None) -> bool:
        """Let one actor that is ready go on, or advance the clock to the next actor or timer, at most to `limit`.

        Returns False if there is nothing to do until `limit`."""
        self._fire_timers()
        waiting = [actor for actor in self.actors if actor.wake_at is not None]
        ready = [actor for actor in waiting if actor.wake_at is not None and actor.wake_at <= self.seconds]
        if ready:
            self._resume(self.random.choice(ready))
            return True
        times = [actor.wake_at for actor in waiting if actor.wake_at is not None]
        times += [self.timers[0][0]] if self.timers else []
        if not times or (limit is not None and min(times) > limit):
            return False
        self.seconds = max(self.seconds, min(times))
        return True

    def run_until(self, seconds: float) -> None:
        """Run actors and timers until the clock reaches `seconds`."""
        while self.seconds < seconds and self.step(seconds):
            pass
        self.seconds = max(self.seconds, seconds)

    def _fire_timers(self) -> None:
        while self.timers and self.timers[0][0] <= self.seconds:
            heapq.heappop(self.timers)[2]()

    def _resume(self, actor: Actor) -> None:
        self.current = actor
        actor.context.enter()
        actor.baton.release()
        self.baton.acquire()
        self.current = None
        if actor.done:
            self.actors.remove(actor)
            actor.thread.join()

    def detach(self) -> None:
        """End all threads. Ports and database refuse every call from now on, so cleanup code has no effect."""
        self.detached = True
        for actor in [*self.actors]:
            actor.wake_at = self.seconds
            self._resume(actor)
