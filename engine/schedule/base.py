"""What the scheduler asks of a policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.request import Request

__all__ = ["SchedulePolicy"]


class SchedulePolicy(Protocol):
    """An ordered collection of waiting requests that could be admitted now. Used on the loop's thread.

    No call's cost grows with the number of waiting requests (but for logarithms), so a step costs the same at any length of
    the queue. A request's tokens and lease don't change while it is in here.
    """

    def add(self, request: Request) -> None:
        """Take a request in: it has arrived, was retracted, or what it waited for is there."""
        ...

    def discard(self, request: Request) -> None:
        """Let a request go that is aborted or must wait for something else. Those not in here are ignored."""
        ...

    def take(self, request: Request) -> None:
        """Let a request go because it was admitted."""
        ...

    def first(self, running: Sequence[Request]) -> Request | None:
        """Who goes next; it stays in here. None if nobody is. The answer changes only with what happens in between."""
        ...

    def landed(self, request: Request) -> None:
        """The first `request.lease.shared` pages of an admitted request are in memory by now, for others to reuse."""
        ...
