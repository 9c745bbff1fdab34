"""Copies that nobody waits for give way to the model; nothing else does."""

from __future__ import annotations

import os
import sys
import threading
from queue import SimpleQueue

import pytest

from hicache.pools import DevicePool, HostPool
from hicache.transfer.copier import ThreadCopier
from hicache.transfer.priority import NICENESS
from hicache.transfer.store_worker import StoreWorker
from storage.memory import MemoryStore

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux only")


def niceness(besides: set[int | None]) -> dict[str, int]:
    """Of the threads that copy, by name, but for those of other tests."""
    threads = {
        t.name: t.native_id for t in threading.enumerate() if t.name.startswith("hicache-") and t.native_id not in besides
    }
    return {name: os.getpriority(os.PRIO_PROCESS, native_id) for name, native_id in threads.items() if native_id is not None}


def test_copies_down_give_way_and_copies_that_are_waited_for_do_not():
    usual = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    host = HostPool(4, 64)
    before = {thread.native_id for thread in threading.enumerate()}
    lowered = max(NICENESS, usual)
    copier = ThreadCopier(DevicePool(4, 64), host, SimpleQueue())
    worker = StoreWorker(MemoryStore(1 << 20), host, SimpleQueue())
    found: dict[str, int] = {}
    try:
        for _ in range(100):
            found = niceness(before)
            if found.get("hicache-backup") == found.get("hicache-storeop") == lowered:
                break
            threading.Event().wait(0.01)
    finally:
        copier.close()
        worker.close()
    assert found.pop("hicache-backup") == found.pop("hicache-storeop") == lowered
    assert set(found.values()) == {usual}
