"""The cache's configuration: frozen, validated once, printed at start."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, get_args

from hicache.checks import check_count
from hicache.errors import ConfigError
from hicache.keys import HASH_ALGOS

__all__ = [
    "CacheConfig",
    "EvictionPolicy",
    "PrefetchConfig",
    "PrefetchPolicy",
    "StorageAdmission",
    "WritePolicy",
]

WritePolicy = Literal["write_through", "write_through_selective", "write_back"]
PrefetchPolicy = Literal["best_effort", "wait_complete", "timeout"]
StorageAdmission = Literal["all", "second-sight"]
EvictionPolicy = Literal["lru", "lfu", "slru", "fifo", "priority", "adaptive"]


@dataclass(frozen=True, slots=True)
class PrefetchConfig:
    """When a request waits for pages to come from disk, and for how long.

    threshold_tokens: a disk hit shorter than this is left alone. timeout_base_s and timeout_per_ki_token_s: the deadline of
    `timeout`, base + per 1,024 tokens. quota: share of the host pool that waiting requests may hold for prefetches.
    batch_bytes: pages are read in operations of about so many bytes.
    overlap_tokens: under `timeout`, what a request computes at the front of its hit while the back is being read is at least
    this much a step; where less would do, it waits instead.
    """

    policy: PrefetchPolicy = "timeout"
    threshold_tokens: int = 256
    timeout_base_s: float = 1.0
    timeout_per_ki_token_s: float = 0.25
    quota: float = 0.5
    batch_bytes: int = 16 << 20
    overlap_tokens: int = 64

    def __post_init__(self) -> None:
        if self.policy not in get_args(PrefetchPolicy):
            raise ConfigError(f"prefetch policy must be one of {', '.join(get_args(PrefetchPolicy))}, not {self.policy}")
        check_count("the prefetch threshold in tokens", self.threshold_tokens, least=0)
        check_count("the bytes of a prefetch's operation", self.batch_bytes)
        check_count("the tokens to compute while others are read", self.overlap_tokens)
        for seconds in (self.timeout_base_s, self.timeout_per_ki_token_s):
            if not 0 <= seconds < math.inf:
                raise ConfigError(f"a prefetch timeout must be 0 s or more, not {seconds}")
        if not 0 <= self.quota <= 1:
            raise ConfigError(f"the prefetch quota is a share of the host pool, 0 to 1, not {self.quota}")

    def timeout_s(self, tokens: int) -> float:
        """Deadline of a prefetch of `tokens` tokens, from its start."""
        return self.timeout_base_s + self.timeout_per_ki_token_s * tokens / 1024


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Sizes are in pages; 0 host pages means one tier (no hierarchical cache).

    reuse: False computes every prompt anew (`--disable-radix-cache`).
    watermark_low, watermark_high: shares of a pool; write_back demotes in the background when fewer than `low` slots are
    free, until `high` are. hit_threshold: hits at which write_through_selective backs a page up. storage_admission: which pages
    go to disk; second-sight: those asked for twice or more.
    """

    device_pages: int
    host_pages: int = 0
    reuse: bool = True
    write_policy: WritePolicy = "write_through"
    eviction: EvictionPolicy = "lru"
    prefetch: PrefetchConfig = PrefetchConfig()
    hit_threshold: int = 2
    storage_admission: StorageAdmission = "all"
    watermark_low: float = 0.05
    watermark_high: float = 0.10
    hash_algo: str = "xxh3_128"

    def __post_init__(self) -> None:
        check_count("the size of the device pool in pages", self.device_pages)
        check_count("the size of the host pool in pages", self.host_pages, least=0)
        check_count("the hit threshold", self.hit_threshold)
        literals = {"write_policy": WritePolicy, "eviction": EvictionPolicy, "storage_admission": StorageAdmission}
        for name, choices in literals.items():
            if getattr(self, name) not in get_args(choices):
                raise ConfigError(f"{name} must be one of {', '.join(get_args(choices))}, not {getattr(self, name)}")
        if self.hash_algo not in HASH_ALGOS:
            raise ConfigError(f"hash_algo must be one of {', '.join(HASH_ALGOS)}, not {self.hash_algo}")
        if not 0 <= self.watermark_low <= self.watermark_high < 1:
            raise ConfigError("watermarks must satisfy 0 <= low <= high < 1")

    def describe(self) -> dict[str, str]:
        """Every field by name, for the start-up message and `/get_server_info`."""
        return {field.name: str(getattr(self, field.name)) for field in fields(self)}
