"""Host memory for pools: mapped, touched, page-locked in chunks or not at all."""

from __future__ import annotations

import gc
import logging
import mmap

import numpy as np
import pytest
import torch

from hicache.host_memory import address_of, map_memory, prefer_node, touch
from hicache.pinning import pin, unpin
from hicache.pools import CHUNK_BYTES, HostPool

CHUNK = 4 * mmap.PAGESIZE


class Locks:
    """Remembers what is locked; the `fails_at`-th registration fails."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.locked: dict[int, int] = {}
        self._fails_at = fails_at

    def register(self, address: int, num_bytes: int) -> None:
        if len(self.locked) == self._fails_at:
            raise OSError("no more memory may be locked")
        self.locked[address] = num_bytes

    def unregister(self, address: int) -> None:
        if address not in self.locked:
            raise OSError("not locked")
        del self.locked[address]


def test_all_of_a_mapping_is_locked_in_chunks_and_released() -> None:
    memory, locks = map_memory(2 * CHUNK + 100), Locks()
    chunks = pin(memory, CHUNK, locks)
    base = address_of(memory)
    assert locks.locked == {base: CHUNK, base + CHUNK: CHUNK, base + 2 * CHUNK: 100}
    unpin(chunks, locks)
    assert not locks.locked


def test_nothing_stays_locked_when_a_chunk_can_not_be() -> None:
    locks = Locks(fails_at=2)
    with pytest.raises(OSError, match="no more memory may be locked"):
        pin(map_memory(4 * CHUNK), CHUNK, locks)
    assert not locks.locked


def test_mapped_memory_is_zero_private_and_written_by_a_touch() -> None:
    memory = map_memory(3 * CHUNK)
    data = np.frombuffer(memory, np.uint8)
    assert not data.any()
    data[:] = 7
    touch(memory)
    assert not data.any()


def test_memory_can_prefer_a_node_that_exists_and_no_other() -> None:
    assert prefer_node(map_memory(CHUNK), 0)
    assert not prefer_node(map_memory(CHUNK), 4000)


def test_more_memory_than_addresses_is_a_memory_error() -> None:
    for num_bytes in (1 << 60, 1 << 80):
        with pytest.raises(MemoryError):
            map_memory(num_bytes)


@pytest.mark.parametrize("page_bytes", [32, 4096, 46_080, 737_280, 3 << 20, (2 << 30) + 4096])
def test_chunks_of_a_host_pool_end_where_pages_of_the_machine_do(page_bytes: int) -> None:
    pool = HostPool(1, page_bytes)
    chunk = pool.chunk_pages * page_bytes
    assert chunk % mmap.PAGESIZE == 0
    assert CHUNK_BYTES // 2 < chunk <= max(CHUNK_BYTES, page_bytes * mmap.PAGESIZE)


def test_a_pool_for_the_cpu_is_not_page_locked() -> None:
    pool = HostPool(4, 64)
    assert (pool.pinned, pool.pinned_bytes) == (False, 0)


def test_a_pool_that_can_not_be_page_locked_is_pageable_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine can page-lock")
    with caplog.at_level(logging.WARNING):
        pool = HostPool(4, 64, "cuda")
    assert (pool.pinned, pool.pinned_bytes) == (False, 0)
    assert "stays pageable, so copies are slower: no CUDA runtime" in caplog.text
    pool.page(3)[:] = bytes(64)


@pytest.mark.gpu
def test_a_pool_for_a_gpu_is_page_locked_and_given_up_with_it() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU here")
    for _ in range(3):  # the same addresses again: a lock that outlived its pool would make the next one fail
        pool = HostPool(16, 1 << 20, "cuda")
        assert pool.pinned_bytes == 16 << 20
        assert torch.from_numpy(pool.data).is_pinned()
        del pool
        gc.collect()
