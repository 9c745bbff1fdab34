"""How much of a GPU's memory the device pool gets."""

from __future__ import annotations

from engine.sizing import RUNTIME_BYTES, gpu_pool_bytes

GIB = 1 << 30


def test_the_pool_gets_its_fraction_less_what_is_taken_already():
    assert gpu_pool_bytes(free=64 * GIB, total=80 * GIB, fraction=0.75, step_bytes=GIB) == 44 * GIB


def test_the_pool_leaves_room_for_a_step_whatever_the_fraction():
    assert gpu_pool_bytes(free=64 * GIB, total=80 * GIB, fraction=0.99, step_bytes=3 * GIB) == 61 * GIB - RUNTIME_BYTES
