"""The cache's configuration is validated once."""

from __future__ import annotations

import dataclasses

import pytest

from hicache.config import CacheConfig, PrefetchConfig
from hicache.errors import ConfigError
from hicache.policies.prefetch import PATIENCE, prefetch_deadline_s
from hicache.policies.write import write_rules


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"device_pages": 0}, "device pool .* at least 1, not 0"),
        ({"device_pages": 1.5}, "device pool .* whole number .* not 1.5"),
        ({"host_pages": -1}, "host pool .* at least 0, not -1"),
        ({"host_pages": "8"}, "host pool .* whole number"),
        ({"write_policy": "write_around"}, "write_through, write_through_selective, write_back, not write_around"),
        ({"eviction": "random"}, "lru, lfu, slru, fifo, priority, adaptive, not random"),
        ({"watermark_low": 0.5, "watermark_high": 0.2}, "low <= high"),
        ({"watermark_high": 1.0}, "high < 1"),
        ({"hash_algo": "md5"}, "xxh3_128, sha256"),
        ({"hit_threshold": 0}, "at least 1"),
    ],
)
def test_what_cannot_work_is_refused(change: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        CacheConfig(**{"device_pages": 4, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"policy": "never"}, "best_effort, wait_complete, timeout, not never"),
        ({"quota": 1.5}, "quota"),
        ({"quota": -0.1}, "quota"),
        ({"threshold_tokens": -1}, "threshold"),
        ({"batch_bytes": 0}, "operation"),
        ({"overlap_tokens": 0.5}, "whole number"),
        ({"timeout_base_s": -1.0}, "timeout"),
        ({"timeout_per_ki_token_s": float("nan")}, "timeout"),
    ],
)
def test_prefetch_that_cannot_work_is_refused(change: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        PrefetchConfig(**change)  # type: ignore[arg-type]


def test_description_names_every_field() -> None:
    config = CacheConfig(device_pages=4)
    assert set(config.describe()) == {field.name for field in dataclasses.fields(config)}
    assert config.describe()["device_pages"] == "4"


def test_deadlines_of_the_prefetch_policies() -> None:
    def deadline(policy: str) -> float:
        config = PrefetchConfig(policy=policy, timeout_base_s=2.0, timeout_per_ki_token_s=0.5)  # type: ignore[arg-type]
        return prefetch_deadline_s(config, 2048)

    assert (deadline("best_effort"), deadline("timeout"), deadline("wait_complete")) == (0.0, 3.0, 3.0 * PATIENCE)


def test_rules_of_the_write_policies() -> None:
    rules = {
        policy: write_rules(CacheConfig(device_pages=4, write_policy=policy, hit_threshold=3))  # type: ignore[arg-type]
        for policy in ("write_through", "write_through_selective", "write_back")
    }
    assert [rule.backup_hits for rule in rules.values()] == [1, 3, None]
    assert [rule.keep_hits for rule in rules.values()] == [1, 3, 1]
    assert [rule.stores_at_once for rule in rules.values()] == [True, True, False]
    assert [rule.in_background for rule in rules.values()] == [False, False, True]
