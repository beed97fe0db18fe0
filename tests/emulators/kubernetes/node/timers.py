"""Event loop in a thread: timers of Pods, and their network connections."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class Loop:
    """Event loop that runs in a thread until `close`."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="kubernetes-emulator-loop", daemon=True)
        self._thread.start()

    def call_later(self, seconds: float, function: Callable[[], object]) -> None:
        """Call a function that does not block after some seconds."""
        self.loop.call_soon_threadsafe(self.loop.call_later, seconds, function)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine in the loop, and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def close(self) -> None:
        self.run(self._cancel_tasks())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _cancel_tasks(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
