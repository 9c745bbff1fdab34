"""Sampling where the logits are: the same tokens as on a CPU, seed for seed."""

from __future__ import annotations

import pytest
import torch

from engine.messages import SamplingParams
from engine.sampler import Sampler, SamplingState
from tests.cuda import needs_cuda

VOCAB, STEPS = 5000, 30
CASES = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 0.8},
    "filtered": {"temperature": 1.1, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"temperature": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    "bias and bans": {"temperature": 0.9, "logit_bias": {7: 20.0, 8: -5.0}, "min_new_tokens": STEPS},
}


def draw(device: str) -> list[list[int]]:
    """Tokens of one request a case, all in one batch, over several steps."""
    states = [SamplingState(SamplingParams(seed=i, **case), [1, 2, 3], (4,), VOCAB) for i, case in enumerate(CASES.values())]
    generator = torch.Generator().manual_seed(0)
    out = []
    for _ in range(STEPS):
        logits = torch.randn(len(states), VOCAB, generator=generator) * 3
        out.append(Sampler().sample(logits.to(device), states).token_ids)
    return out


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs_cuda)])
def test_tokens_are_those_of_a_cpu(device):
    assert draw(device) == draw("cpu")


def test_a_seed_gives_the_same_tokens_again():
    assert draw("cpu") == draw("cpu")
