"""Placement events as a router reads them: the stream adds up to what the cache holds, parents before children."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import zmq

from engine.config import ServeConfig
from engine.kv_events import BlockStored, EventBatch, EventsConfig
from hicache.errors import ConfigError
from tests.engine_driver import Driver
from tests.models import make_tiny_model

if TYPE_CHECKING:
    from pathlib import Path

    from hicache.cache import HiCache

MEDIUM = {"device": "GPU", "host": "CPU"}


class Follower:
    """A subscriber that keeps what it was told of."""

    def __init__(self, endpoint: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.connect(endpoint)
        self.socket.subscribe(b"kv")
        self.held: dict[str, set[int]] = {"GPU": set(), "CPU": set()}
        self.sequence = 0

    def read(self) -> None:
        """Take in all that has arrived, checking order on the way."""
        while self.socket.poll(200):
            topic, number, data = self.socket.recv_multipart()
            assert topic == b"kv"
            assert int.from_bytes(number, "big") == self.sequence
            self.sequence += 1
            for event in msgspec.msgpack.decode(data, type=EventBatch).events:
                self.take(event)

    def take(self, event: Any) -> None:
        held = self.held[event.medium]
        if isinstance(event, BlockStored):
            assert event.block_size == 4
            assert len(event.token_ids) == 4
            parent = event.parent_block_hash
            assert parent is None or any(parent in tier for tier in self.held.values()), "a child before its parent"
            assert not held.intersection(event.block_hashes), "announced twice"
            held.update(event.block_hashes)
        else:
            assert held.issuperset(event.block_hashes), "removed and never announced"
            held.difference_update(event.block_hashes)

    def close(self) -> None:
        self.socket.close(0)
        self.context.term()


def in_cache(cache: HiCache) -> dict[str, set[int]]:
    """Keys by tier, from tree and table."""
    t = cache._t
    out: dict[str, set[int]] = {"GPU": set(), "CPU": set()}
    for node in t.tree.nodes():
        refs = t.refs(node, 0, len(node.pages))
        for page, ref in zip(node.pages, refs, strict=True):
            for tier, slot in (("device", t.table.device_slot), ("host", t.table.host_slot)):
                if slot[page] >= 0:
                    out[MEDIUM[tier]].add(int.from_bytes(ref.key[:8], "big"))
    return out


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_events_add_up_to_what_the_cache_holds(policy: str, tmp_path: Path) -> None:
    model = make_tiny_model("llama", tmp_path / "model", num_hidden_layers=2)
    endpoint = f"ipc://{tmp_path}/events"
    driver = Driver(
        model,
        max_total_tokens=256,
        enable_hierarchical_cache=True,
        hicache_ratio=1.5,
        hicache_write_policy=policy,
        hicache_storage_backend="memory",
        hicache_storage_backend_extra_config='{"prefetch_threshold": 1}',
        kv_events_config=f'{{"endpoint": "{endpoint}", "topic": "kv"}}',
    )
    follower = Follower(endpoint)
    follower.socket.poll(200)  # lets the subscription arrive
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 259, 90).tolist() for _ in range(6)]
    for _ in range(3):
        for prompt in prompts:
            driver.answer(prompt)
        driver.settle()
        driver.step()
        follower.read()
        assert follower.held == in_cache(driver.core.cache)
        assert follower.held["GPU"]
        assert follower.held["CPU"]
    driver.core.cache.flush()
    driver.step()
    follower.read()
    assert follower.held == {"GPU": set(), "CPU": set()} == in_cache(driver.core.cache)
    follower.close()
    driver.close()


@pytest.mark.parametrize(
    "text",
    ["{", '{"publisher": "kafka"}', '{"endpoint": "nowhere://x"}', '{"port": 5557}'],
    ids=["json", "publisher", "place", "key"],
)
def test_a_configuration_that_can_not_work_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--kv-events-config"):
        Driver(make_tiny_model("llama", tmp_path / "model", num_hidden_layers=1), kv_events_config=text)


def test_nothing_is_published_unless_asked_for() -> None:
    assert EventsConfig.parse(ServeConfig(model_path="m").kv_events_config) is None
    assert EventsConfig.parse('{"publisher": "null"}') is None
