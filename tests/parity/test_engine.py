"""The engine's greedy tokens are transformers' own, whatever the cache did to the pages in between."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine_driver import Driver, prompts, small_tiers
from tests.models import make_tiny_model

if TYPE_CHECKING:
    from pathlib import Path

FAMILIES = ("llama", "qwen3", "mistral", "gemma3_text", "gpt_oss")
ANSWER = 8
POLICIES = ("write_through", "write_through_selective", "write_back")


def reference(model: Path, asked: list[list[int]]) -> list[list[int]]:
    eager = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager", dtype=torch.float32).eval()
    out = []
    for prompt in asked:
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(ANSWER):
                tokens.append(int(eager(torch.tensor([tokens])).logits[0, -1].argmax()))
        out.append(tokens[len(prompt) :])
    return out


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(request.param, tmp_path_factory.mktemp(request.param))


def test_tokens_are_the_same_without_the_cache_with_it_and_from_disk(model: Path, tmp_path: Path) -> None:
    asked = prompts()
    expected = reference(model, asked)

    off = Driver(model, disable_radix_cache=True, chunked_prefill_size=16)
    ids = [off.add(prompt) for prompt in asked]
    off.run()
    assert [off.tokens[rid] for rid in ids] == expected
    assert off.stats()["hicache_hit_tokens_total"] == {"device": 0, "host": 0, "disk": 0}
    off.close()

    tiers = small_tiers(tmp_path / "store")
    on = Driver(model, **tiers)
    for _ in range(3):
        assert [on.answer(prompt) for prompt in asked] == expected
    hits = on.stats()["hicache_hit_tokens_total"]
    on.close()
    assert hits["host"] > 0
    assert hits["disk"] > 0

    again = Driver(model, **tiers)
    assert again.answer(asked[3]) == expected[3]
    assert again.stats()["hicache_hit_tokens_total"] == {"device": 0, "host": 0, "disk": (len(asked[3]) - 1) // 4 * 4}
    again.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_are_the_same_when_requests_run_together_under_pressure(policy: str, tmp_path: Path) -> None:
    model = make_tiny_model("llama", tmp_path / "model")
    asked = prompts()
    expected = reference(model, asked)
    engine = Driver(
        model,
        enable_hierarchical_cache=True,
        hicache_write_policy=policy,
        max_total_tokens=160,
        hicache_ratio=1.2,
        hicache_storage_backend="memory",
        hicache_storage_backend_extra_config='{"prefetch_threshold": 1}',
        chunked_prefill_size=24,
        max_running_requests=4,
    )
    for _ in range(4):
        ids = [engine.add(prompt) for prompt in asked]
        engine.run()
        assert [engine.tokens[rid] for rid in ids] == expected
    assert engine.stats()["hicache_lookup_tokens_total"] == 4 * sum(map(len, asked))
    engine.close()
