"""Who is inside a store: calls are let in while it is open, closing waits for them, their errors become StoreError."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING

import lmdb

from storage.errors import StoreError, StoreForkError, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Session", "translated"]


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Raise StoreError for what LMDB and the file system raise."""
    try:
        yield
    except (OSError, lmdb.Error) as error:
        raise StoreError(f"{type(error).__name__}: {error}") from error


class Session:
    """Lets calls in while the store is open, and `end` wait for those inside. Translates their errors."""

    def __init__(self, note_error: Callable[[BaseException], None]) -> None:
        self._note_error = note_error
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._inside = 0
        self._ended = False

    def __enter__(self) -> None:
        if os.getpid() != self._pid:
            raise StoreForkError("the store was opened before fork; open it anew in the child")
        with self._changed:
            if self._ended:
                raise StoreUnavailable("the store is closed")
            self._inside += 1

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._changed:
            self._inside -= 1
            if self._ended:
                self._changed.notify_all()
        if isinstance(error, (OSError, lmdb.Error)):
            self._note_error(error)
            raise StoreError(f"{type(error).__name__}: {error}") from error

    def end(self) -> bool:
        """Let nobody in any more and wait until all are out; False if ended before, or in a forked child."""
        if os.getpid() != self._pid:
            return False
        with self._changed:
            if self._ended:
                return False
            self._ended = True
            self._changed.wait_for(lambda: not self._inside)
            return True
