"""Who goes first among the waiting: the policies by name."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Literal, get_args

from engine.schedule.base import SchedulePolicy
from engine.schedule.cache_aware import CacheAware
from engine.schedule.depth_first import DepthFirst
from engine.schedule.max_wait import BoundedWait
from engine.schedule.orders import ByRoutingKey, InRandomOrder, by_arrival, by_output, by_priority
from engine.schedule.prefixes import LongestPrefixMatch
from hicache.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache.cache import HiCache

__all__ = ["SchedulePolicy", "SchedulePolicyName", "make_policy"]

SchedulePolicyName = Literal["fcfs", "lpm", "dfs-weight", "lof", "random", "priority", "routing-key", "cache-aware"]


def make_policy(
    name: str,
    cache: HiCache,
    max_wait_s: float = 10.0,
    clock: Callable[[], float] = time.monotonic,
    rng: random.Random | None = None,
) -> SchedulePolicy:
    """The policy that `--schedule-policy` names. clock: the scheduler's. Raises ConfigError."""
    if name == "fcfs":
        return by_arrival()
    return BoundedWait(_by_name(name, cache, rng or random.Random()), max_wait_s, clock)


def _by_name(name: str, cache: HiCache, rng: random.Random) -> SchedulePolicy:
    match name:
        case "lpm":
            return LongestPrefixMatch(cache)
        case "dfs-weight":
            return DepthFirst(cache)
        case "lof":
            return by_output()
        case "random":
            return InRandomOrder(rng)
        case "priority":
            return by_priority()
        case "routing-key":
            return ByRoutingKey()
        case "cache-aware":
            return CacheAware(cache)
    raise ConfigError(f"schedule policy must be one of {', '.join(get_args(SchedulePolicyName))}, not {name}")
