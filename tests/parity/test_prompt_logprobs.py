"""Log-probabilities of prompt tokens are those of transformers, whatever was cached, chunked or retracted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.messages import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.engine_driver import Driver


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 259, length).tolist()


def reference(model: Path, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities (len(tokens) - 1, vocab): row i is of the token at i + 1."""
    eager = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.inference_mode():
        return eager(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)


def close_to_reference(driver: Driver, rid: str, model: Path, tokens: list[int], start: int) -> None:
    expected = reference(model, tokens)
    got = driver.prompt_logprobs[rid]
    assert len(got) == len(tokens) - 1 - start
    for position, entry in enumerate(got, start=start):
        row = expected[position]
        assert entry.logprob == pytest.approx(float(row[tokens[position + 1]]), abs=1e-4)
        assert [token for token, _ in entry.top] == row.topk(len(entry.top)).indices.tolist()


@pytest.mark.parametrize("chunk", [7, 2048])
@pytest.mark.parametrize("start", [0, 5, 58, 59])
def test_they_are_transformers_own_from_any_start_and_with_any_chunks(
    engine: Callable[..., Driver], model: Path, start: int, chunk: int
) -> None:
    driver, tokens = engine(chunked_prefill_size=chunk), prompt(60)
    rid = driver.add(tokens, 3, score_from=start, top_logprobs=2)
    driver.run()
    close_to_reference(driver, rid, model, tokens, start)
    assert driver.tokens[rid] == engine().answer(tokens, 3)


def test_a_cached_prompt_is_reused_only_as_far_as_its_logits_are_not_needed(engine: Callable[..., Driver], model: Path) -> None:
    driver, tokens = engine(), prompt(60)
    driver.answer(tokens)
    rid = driver.add(tokens, 1, score_from=22, top_logprobs=0)
    driver.run()
    assert driver.last[rid].cached.total == 20  # whole pages of 4 before position 22
    close_to_reference(driver, rid, model, tokens, 22)


def test_a_prompt_without_an_answer_ends_at_once_and_fills_the_cache(engine: Callable[..., Driver], model: Path) -> None:
    driver, tokens = engine(), prompt(60)
    rid = driver.add(tokens, sampling=SamplingParams(max_new_tokens=0), score_from=0)
    driver.run()
    assert (driver.tokens[rid], driver.last[rid].finish_reason) == ([], "length")
    close_to_reference(driver, rid, model, tokens, 0)
    again = driver.add([*tokens, 7], 1)
    driver.run()
    assert driver.last[again].cached.total == 60


def test_scored_requests_in_a_tight_pool_are_retracted_and_lose_nothing(engine: Callable[..., Driver], model: Path) -> None:
    driver = engine(max_total_tokens=256, chunked_prefill_size=16)
    asked = [prompt(40, seed) for seed in range(6)]
    ids = [driver.add(each, 60, score_from=3, top_logprobs=1) for each in asked]
    driver.run()
    assert driver.stats()["hicache_retracted_requests_total"] > 0
    for rid, tokens in zip(ids, asked, strict=True):
        assert len(driver.tokens[rid]) == 60
        close_to_reference(driver, rid, model, tokens, 3)


def test_a_start_outside_the_prompt_is_refused(engine: Callable[..., Driver]) -> None:
    driver = engine()
    rid = driver.add(prompt(8), 1, score_from=8)
    assert driver.failed[rid].status == 400
