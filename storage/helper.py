"""A second thread for large calls, that never makes them wait for it to be scheduled."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

__all__ = ["Begun", "Helper"]


class Helper:
    """One thread that does work handed to it, in order. Any thread may hand it some."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, name)

    def begin(self, do: Callable[[], None]) -> Begun:
        """Have `do` called in the helper; the caller goes on, and must call `finish` or `abandon`."""
        return Begun(self._executor.submit(do), do)

    def close(self) -> None:
        """Wait for what was begun, and end the thread."""
        self._executor.shutdown()


class Begun:
    """Work handed to a helper. Used by the thread that handed it over."""

    def __init__(self, job: Future[None], do: Callable[[], None]) -> None:
        self._job = job
        self._do = do
        self._finished = False

    def finish(self) -> None:
        """Wait for the work, or do it here if the helper has not got round to it. Raises what the work raises; once."""
        if self._finished:
            return
        self._finished = True
        if self._job.cancel():
            self._do()
        else:
            self._job.result()

    def abandon(self) -> None:
        """Make sure that the work is not running and won't be; what it raises is dropped."""
        self._finished = True
        if not self._job.cancel():
            wait([self._job])
