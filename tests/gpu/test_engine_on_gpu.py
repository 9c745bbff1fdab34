"""The engine on a GPU: a CPU's tokens through every tier, FlashInfer with graphs where it can be had, and its memory."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
import torch

from tests.cuda import needs_cuda, needs_flashinfer
from tests.engine_driver import Driver, prompts, small_tiers
from tests.models import make_tiny_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("io_backend", ["direct", "kernel"])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs_cuda)])
def test_tokens_are_those_of_a_cpu_whatever_tier_the_pages_were_in(family, io_backend, device, tmp_path: Path):
    model, asked = make_tiny_model(family, tmp_path / "model"), prompts()
    alone = Driver(model, disable_radix_cache=True)
    expected = [alone.answer(prompt) for prompt in asked]
    alone.close()
    tiers = small_tiers(tmp_path / "store")
    gpu = Driver(model, device=device, dtype="float32", hicache_io_backend=io_backend, **tiers)
    for _ in range(3):
        assert [gpu.answer(prompt) for prompt in asked] == expected
    hits = gpu.stats()["hicache_hit_tokens_total"]
    gpu.close()
    assert hits["host"] > 0
    assert hits["disk"] > 0


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs_flashinfer)])
def test_a_model_that_flashinfer_can_run_does_and_its_decodes_are_graphs(kv_dtype, device, tmp_path: Path):
    model = make_tiny_model("llama", tmp_path / "model", head_dim=128)
    gpu = Driver(model, device=device, dtype="bfloat16", kv_cache_dtype=kv_dtype, max_running_requests=4, page_size=16)
    assert gpu.core.info()["attention_backend"] == "flashinfer"
    assert gpu.core.info()["cuda_graphs"]
    ids = [gpu.add(prompt, tokens=20) for prompt in prompts()]
    gpu.run()
    assert [len(gpu.tokens[rid]) for rid in ids] == [20] * 6
    assert gpu.stats()["hicache_hit_tokens_total"]["device"] > 0
    gpu.close()


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs_cuda)])
def test_the_device_pool_is_its_fraction_of_the_memory_and_is_given_back(device, tmp_path: Path):
    model = make_tiny_model("llama", tmp_path / "model", max_position_embeddings=1 << 24)  # a pool for less would do
    free, total = torch.cuda.mem_get_info()
    gpu = Driver(model, device=device, max_total_tokens=None, mem_fraction_static=0.5, page_size=256)
    pool = gpu.core.info()["tiers"]["device"]["bytes"]
    assert abs(pool - (free - total / 2)) < 0.05 * total
    gpu.close()
    del gpu
    gc.collect()
    torch.cuda.empty_cache()
    assert free - torch.cuda.mem_get_info()[0] < 1 << 30
