"""A request computes while its pages are being loaded back: each layer waits for its own part, and nothing is shared early."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import engine.core
from hicache.transfer.copier import copy_pages
from hicache.transfer.operation import CopyOp, Operation, OpKind, OpState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from queue import SimpleQueue

    from hicache.pools import DevicePool, HostPool
    from tests.engine_driver import Driver

NAN = 0xFF


class GatedCopier:
    """Moves a layer of a load-back when its gate is passed and not before; load-backs end when the test says so."""

    def __init__(self, device: DevicePool, host: HostPool, bounds: Sequence[int], completions: SimpleQueue[Operation]) -> None:
        self._device, self._host, self._bounds = device.data.numpy(), host.data, bounds
        self._completions = completions
        self.loading: list[CopyOp] = []
        self.passed: list[int] = []

    def submit(self, op: CopyOp) -> None:
        if op.kind is OpKind.LOAD_BACK:
            self._device[op.dst] = NAN
            op.gate = Gate(self, op)
            self.loading.append(op)
            return
        copy_pages(self._device, op.src, self._host, op.dst)
        op.end(OpState.DONE)
        self._completions.put(op)

    def move_layer(self, op: CopyOp, layer: int) -> None:
        part = slice(self._bounds[layer], self._bounds[layer + 1])
        self._device[op.dst, part] = self._host[op.src, part]
        self.passed.append(layer)

    def finish(self, state: OpState = OpState.DONE) -> None:
        for op in self.loading:
            if state is OpState.DONE:
                copy_pages(self._host, op.src, self._device, op.dst)
                op.end(state)
            else:
                op.fail(OSError("lost on the way"))
            self._completions.put(op)
        self.loading.clear()

    def close(self) -> None:
        self.finish()


class Gate:
    def __init__(self, copier: GatedCopier, op: CopyOp) -> None:
        self._copier, self._op = copier, op

    def wait(self, layer: int) -> None:
        self._copier.move_layer(self._op, layer)


PROMPTS = [np.random.default_rng(i).integers(3, 259, 50).tolist() for i in range(4)]


class Rig:
    """An engine with a device pool for two conversations and a host pool for all, and its copier."""

    def __init__(self, start: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch) -> None:
        made: list[GatedCopier] = []

        def maker(device: DevicePool, host: HostPool, bounds: Sequence[int], _: str) -> Callable[..., Any]:
            def make(completions: SimpleQueue[Operation]) -> GatedCopier:
                made.append(GatedCopier(device, host, bounds, completions))
                return made[-1]

            return make

        self.expected = [start(max_total_tokens=512).answer(prompt) for prompt in PROMPTS]
        monkeypatch.setattr(engine.core, "copier_maker", maker)
        self.engine = start(max_total_tokens=128, enable_hierarchical_cache=True, hicache_ratio=4.0)
        self.copier = made[0]
        assert [self.engine.answer(prompt) for prompt in PROMPTS] == self.expected

    def hits(self) -> dict[str, int]:
        return self.engine.stats()["hicache_hit_tokens_total"]


@pytest.fixture
def rig(engine: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(engine, monkeypatch)


def test_an_answer_is_right_though_its_pages_come_layer_by_layer(rig: Rig) -> None:
    assert rig.engine.answer(PROMPTS[0]) == rig.expected[0]
    assert rig.copier.passed == [0, 1]
    assert len(rig.copier.loading) == 1
    assert rig.hits()["host"] == 48


def test_what_was_computed_early_is_shared_once_the_load_has_been_settled(rig: Rig) -> None:
    rid = rig.engine.add(PROMPTS[0], tokens=20)
    for _ in range(5):
        rig.engine.step()
    assert rig.engine.tokens[rid]
    rig.copier.finish()
    rig.engine.run()
    assert rig.engine.tokens[rid][:8] == rig.expected[0]
    before = rig.hits()["device"]
    rig.engine.answer(PROMPTS[0] + rig.engine.tokens[rid][:-1] + [5])
    assert rig.hits()["device"] - before == 68


def test_a_request_that_is_gone_leaves_its_load_to_land(rig: Rig) -> None:
    rid = rig.engine.add(PROMPTS[0], tokens=20)
    for _ in range(3):
        rig.engine.step()
    rig.engine.core.abort(rid)
    rig.copier.finish()
    rig.engine.settle()
    before = rig.hits()["device"]
    assert rig.engine.answer(PROMPTS[0]) == rig.expected[0]
    assert rig.hits()["device"] - before == 48


def test_nobody_starts_early_beside_a_running_request(rig: Rig) -> None:
    running = rig.engine.add([7] * 10, tokens=12)
    rig.engine.step()
    late = rig.engine.add(PROMPTS[0])
    for _ in range(4):
        rig.engine.step()
    assert (len(rig.engine.tokens[running]), len(rig.engine.tokens[late])) == (5, 0)
    rig.copier.finish()
    rig.engine.run()
    assert rig.engine.tokens[late] == rig.expected[0]
    assert rig.copier.passed == []


def test_a_load_that_fails_under_a_running_request_ends_that_and_nothing_else(rig: Rig) -> None:
    rid = rig.engine.add(PROMPTS[0], tokens=20)
    for _ in range(3):
        rig.engine.step()
    rig.copier.finish(OpState.FAILED)
    rig.engine.run()
    assert rig.engine.failed[rid].status == 500
    assert "LoadFailed" in rig.engine.failed[rid].message
    for prompt, expected in zip(PROMPTS[1:], rig.expected[1:], strict=True):
        rid = rig.engine.add(prompt)
        while not rig.engine.core.idle:
            rig.engine.step()
            rig.copier.finish()
        assert rig.engine.tokens[rid] == expected
