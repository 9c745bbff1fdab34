"""Who goes first among the waiting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from hicache.errors import ConfigError

if TYPE_CHECKING:
    from engine.request import Request
    from hicache.cache import HiCache

__all__ = ["FirstComeFirstServed", "LongestPrefixMatch", "SchedulePolicy", "make_policy"]


class SchedulePolicy(Protocol):
    """Orders waiting requests. Called once a step, on the loop's thread."""

    def order(self, waiting: list[Request]) -> list[Request]:
        """The waiting requests, the next one first. May return the list it was given; must not change it."""
        ...


class FirstComeFirstServed:
    """By arrival. A retracted request keeps its place."""

    def order(self, waiting: list[Request]) -> list[Request]:
        """Waiting requests are kept by arrival already."""
        return waiting


class LongestPrefixMatch:
    """By length of the prefix that is in memory now, longest first; ties by arrival."""

    def __init__(self, cache: HiCache) -> None:
        self._cache = cache

    def order(self, waiting: list[Request]) -> list[Request]:
        """Match anew, since the tree has changed since they came."""
        return sorted(waiting, key=lambda request: -self._cache.cached_pages(request.lease))


def make_policy(name: str, cache: HiCache) -> SchedulePolicy:
    """The policy that `--schedule-policy` names. Raises ConfigError."""
    match name:
        case "fcfs":
            return FirstComeFirstServed()
        case "lpm":
            return LongestPrefixMatch(cache)
    raise ConfigError(f"schedule policy must be fcfs or lpm, not {name}")
