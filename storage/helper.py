"""A second thread for large calls, that never makes them wait for it to be scheduled."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Begun", "Helper"]

Result = TypeVar("Result")


class Helper:
    """One thread that does work handed to it, in order. Any thread may hand it some; it starts with the first.

    A hand-over costs a third of an executor's, and counts: a large call is a few milliseconds.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def begin(self, do: Callable[[], Result]) -> Begun[Result]:
        """Have `do` called in the helper; the caller goes on, and must call `finish` or `abandon`."""
        if self._thread is None:
            self._start()
        begun = Begun(do)
        self._jobs.put(begun.run)
        return begun

    def both(self, here: Callable[[], object], beside: Callable[[], Result]) -> Result:
        """Call `here` while the helper calls `beside`, and return what `beside` does once both have ended.

        Raises what either raises, `here` first. To gain from it, `here` must be in calls that release the GIL.
        """
        begun = self.begin(beside)
        try:
            here()
            return begun.finish()
        except BaseException:
            begun.abandon()
            raise

    def close(self) -> None:
        """Wait for what was begun, and end the thread."""
        with self._lock:
            if self._thread is not None:
                self._jobs.put(None)
                self._thread.join()

    # helpers

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while (run := self._jobs.get()) is not None:
            run()
            del run  # or the buffers it holds would live until the next


class Begun(Generic[Result]):
    """Work handed to a helper. Used by the thread that handed it over, but for `run`."""

    def __init__(self, do: Callable[[], Result]) -> None:
        self._do = do
        self._claim = threading.Lock()  # taken for good by who does the work, or drops it
        self._running = threading.Lock()
        self._running.acquire()
        self._error: BaseException | None = None
        self._result: Result

    def run(self) -> None:
        """Do the work, unless someone else has begun to."""
        if not self._claim.acquire(blocking=False):
            return
        try:
            self._result = self._do()
        except BaseException as error:
            self._error = error
        self._running.release()

    def finish(self) -> Result:
        """Wait for the work, or do it here if the helper has not got round to it. Raises what it raises."""
        self.run()
        self._wait()
        if self._error is not None:
            raise self._error
        return self._result

    def abandon(self) -> None:
        """Make sure that the work is not running and won't be; what it raises is dropped."""
        if not self._claim.acquire(blocking=False):
            self._wait()

    # helpers

    def _wait(self) -> None:
        with self._running:
            pass
