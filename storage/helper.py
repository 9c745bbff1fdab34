"""A second thread for large calls, that never makes them wait for it to be scheduled."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

__all__ = ["Begun", "Helper"]

Result = TypeVar("Result")


class Helper:
    """One thread that does work handed to it, in order. Any thread may hand it some."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, name)

    def begin(self, do: Callable[[], Result]) -> Begun[Result]:
        """Have `do` called in the helper; the caller goes on, and must call `finish` or `abandon`."""
        return Begun(self._executor.submit(do), do)

    def close(self) -> None:
        """Wait for what was begun, and end the thread."""
        self._executor.shutdown()


class Begun(Generic[Result]):
    """Work handed to a helper. Used by the thread that handed it over."""

    def __init__(self, job: Future[Result], do: Callable[[], Result]) -> None:
        self._job = job
        self._do = do

    def finish(self) -> Result:
        """Wait for the work, or do it here if the helper has not got round to it; to be called once. Raises what it raises."""
        return self._do() if self._job.cancel() else self._job.result()

    def abandon(self) -> None:
        """Make sure that the work is not running and won't be; what it raises is dropped."""
        if not self._job.cancel():
            wait([self._job])
