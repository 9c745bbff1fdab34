"""Order between compute and copies on a GPU: neither reads what the other has not written yet."""

from __future__ import annotations

import time
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from hicache.pools import DevicePool, HostPool
from hicache.transfer.choose import copier_maker
from hicache.transfer.operation import CopyOp, Operation, OpKind, OpState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache.transfer.operation import Copier

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]

LAYERS, LAYER_BYTES, PAGES = 8, 1 << 20, 16
PAGE_BYTES = LAYERS * LAYER_BYTES
BOUNDS = tuple(range(0, PAGE_BYTES + 1, LAYER_BYTES))
LONG = 200_000_000
"""Cycles for which the compute is kept busy: about a tenth of a second."""


class Rig:
    """Pools of pages of several layers, a copier between them, and what it posted."""

    def __init__(self, backend: str) -> None:
        self.device, self.host = DevicePool(PAGES, PAGE_BYTES, "cuda"), HostPool(PAGES, PAGE_BYTES, "cuda")
        self.posted: SimpleQueue[Operation] = SimpleQueue()
        assert backend in ("direct", "kernel", "auto")
        self.copier: Copier = copier_maker(self.device, self.host, BOUNDS, backend)(self.posted)  # type: ignore[arg-type]
        self.all = np.arange(PAGES, dtype=np.int32)

    def submit(self, kind: OpKind) -> CopyOp:
        op = CopyOp(kind=kind, on_end=lambda op: None, ids=self.all, src=self.all[::-1].copy(), dst=self.all)
        self.copier.submit(op)
        return op


@pytest.fixture(params=["direct", "kernel", "auto"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(request.param)
    torch.cuda.synchronize()
    yield rig
    rig.copier.close()


def test_a_backup_has_what_compute_submitted_before_it_wrote(rig: Rig) -> None:
    torch.cuda._sleep(LONG)
    rig.device.data.fill_(7)
    op = rig.submit(OpKind.BACKUP)
    assert rig.posted.get(timeout=30) is op
    assert op.state is OpState.DONE
    assert (rig.host.data == 7).all()


def test_a_load_back_leaves_what_compute_submitted_before_it_reads(rig: Rig) -> None:
    rig.host.data[:] = 9
    torch.cuda._sleep(LONG)
    seen = rig.device.data.clone()
    op = rig.submit(OpKind.LOAD_BACK)
    assert rig.posted.get(timeout=30) is op
    assert (seen == 0).all()
    assert (rig.device.data == 9).all()


def test_each_layer_is_there_for_compute_that_has_passed_the_gate(rig: Rig) -> None:
    for turn in range(1, 20):
        rig.host.data[:] = turn
        op = rig.submit(OpKind.LOAD_BACK)
        while op.gate is None:
            time.sleep(0)
        seen = []
        for layer in range(LAYERS):
            op.gate.wait(layer)
            seen.append(rig.device.data[:, BOUNDS[layer] : BOUNDS[layer + 1]].clone())
        assert all(bool((part == turn).all()) for part in seen)
        assert rig.posted.get(timeout=30) is op


def test_a_copy_ends_without_the_device_being_waited_for(rig: Rig) -> None:
    op = rig.submit(OpKind.LOAD_BACK)
    torch.cuda._sleep(20 * LONG)  # compute that the copy does not depend on
    busy = torch.cuda.Event()
    busy.record()
    assert rig.posted.get(timeout=30) is op
    assert not busy.query()
    torch.cuda.synchronize()
