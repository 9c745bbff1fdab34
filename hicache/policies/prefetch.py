"""Prefetch policies: how long a request waits for its pages to come from disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicache.config import PrefetchConfig

__all__ = ["PATIENCE", "prefetch_deadline_s"]

PATIENCE = 10.0
"""`wait_complete` gives up after this many times the deadline of `timeout`, so a store that hangs blocks nobody for ever."""


def prefetch_deadline_s(config: PrefetchConfig, tokens: int) -> float:
    """Seconds from the start of a prefetch of `tokens` tokens until its request goes on with what has landed.

    0 for `best_effort`: the request goes as soon as it could run.
    """
    match config.policy:
        case "best_effort":
            return 0.0
        case "timeout":
            return config.timeout_s(tokens)
        case "wait_complete":
            return PATIENCE * config.timeout_s(tokens)
