"""Every call we make of FlashInfer fits the signatures of the version that is installed. Needs the package, not a GPU."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any
from unittest.mock import create_autospec

import numpy as np
import pytest
import torch

from engine.attention.flashinfer_kernels import FlashInferKernels
from engine.attention.gather import LayerPages
from engine.attention.kernels import AttentionShape
from engine.attention.paged_plan import prefix_tables
from engine.batch import Batch, Chunk, SharedPrefix

if TYPE_CHECKING:
    from engine.attention.kernels import PagedKernel

flashinfer = pytest.importorskip("flashinfer", reason="flashinfer is not installed")

WRAPPERS = ("BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper")
SHAPE = AttentionShape(4, 2, 64, 16, 0.125, 128, 30.0, torch.bfloat16, torch.float8_e4m3fn)
TABLES = prefix_tables(Batch([Chunk(np.zeros(1, np.int32), 16, np.zeros(2, np.int32))] * 2, [SharedPrefix(0, 2, 1)]), 16, 2)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> FlashInferKernels:
    """Kernels over wrappers that check how they are called, and do nothing."""
    for name in WRAPPERS:
        monkeypatch.setattr(flashinfer, name, _checked(getattr(flashinfer, name)))
    monkeypatch.setattr(flashinfer, "merge_state_in_place", create_autospec(flashinfer.merge_state_in_place))
    return FlashInferKernels(torch.device("cpu"))


def _checked(wrapper: Any) -> Any:
    spec = create_autospec(wrapper)
    if hasattr(wrapper, "_plan_impl"):  # `plan` hands all keywords on to it
        accepted = inspect.signature(wrapper._plan_impl).parameters
        spec.return_value.plan.side_effect = lambda *_, **keywords: [accepted[name] for name in keywords]
    return spec


def exercise(kernel: PagedKernel) -> None:
    pages = LayerPages(*(torch.zeros(1, 16, 2, 64, dtype=SHAPE.kv_dtype) for _ in range(2)))
    q = torch.zeros(2, 4, 64, dtype=SHAPE.q_dtype)
    kernel.plan(TABLES, SHAPE)
    kernel.run(q, pages)
    kernel._wrapper.run.return_value = (q, q)
    kernel.run_with_lse(q, pages, q, torch.zeros(2, 4))


@pytest.mark.parametrize("kind", ["prompt", "decode", "prefix"])
def test_wrappers_are_made_planned_and_run_as_their_signatures_say(kernels, kind):
    exercise(getattr(kernels, kind)())


def test_fixed_wrappers_too(kernels):
    exercise(kernels.fixed_decode(2, 8))
    exercise(kernels.fixed_prefix(2, 1, 8))


def test_states_are_merged_as_the_signature_says(kernels):
    q, lse = torch.zeros(2, 4, 64), torch.zeros(2, 4)
    kernels.merge(q, lse, q, lse)


def test_a_log_sum_exp_is_in_base_2_unless_asked_otherwise():
    run = inspect.signature(flashinfer.BatchPrefillWithPagedKVCacheWrapper.run).parameters
    assert "lse_base" not in run or run["lse_base"].default == "log2"
