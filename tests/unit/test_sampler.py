"""The sampler: each parameter does what it says, and a seed decides alone."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from engine.messages import SamplingParams
from engine.sampler import Sampler, SamplingState
from hicache.errors import RequestRefused

VOCAB = 8
LOGITS = torch.tensor([0.0, 2.0, 1.0, -1.0, 3.0, 0.5, -2.0, 1.5])  # likeliest first: 4, 1, 7, 2, 5, 0, 3, 6


def state(prompt=(), top_logprobs=None, vocab=VOCAB, eos=(4,), **params) -> SamplingState:
    return SamplingState(SamplingParams(**params), list(prompt), eos, vocab, top_logprobs)


def draw(count=400, logits=LOGITS, **params) -> Counter[int]:
    """Tokens of one request that sees the same logits again and again."""
    one = state(seed=1, vocab=logits.shape[0], **params)
    return Counter(Sampler().sample(logits[None], [one]).token_ids[0] for _ in range(count))


def test_temperature_0_takes_the_likeliest():
    assert set(draw(5, temperature=0)) == {4}


def test_frequencies_follow_the_softmax_at_the_temperature():
    count = 20_000
    drawn = draw(count, temperature=0.7)
    expected = (LOGITS / 0.7).softmax(-1)
    for token in range(VOCAB):
        p = float(expected[token])
        assert abs(drawn[token] / count - p) < 5 * math.sqrt(p * (1 - p) / count)


def test_top_k_keeps_the_k_likeliest():
    assert set(draw(top_k=3)) == {4, 1, 7}
    assert set(draw(20, top_k=1)) == {4}


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    reached = LOGITS.softmax(-1).sort(descending=True).values.cumsum(-1)
    between = float(reached[1] + reached[2]) / 2
    assert set(draw(top_p=between)) == {4, 1, 7}
    assert set(draw(20, top_p=0.0)) == {4}


def test_top_p_is_a_share_of_what_top_k_left():
    left = LOGITS[[4, 1]].softmax(-1)
    assert set(draw(top_k=2, top_p=float(left[0]) - 0.01)) == {4}
    assert set(draw(top_k=2, top_p=float(left[0]) + 0.01)) == {4, 1}


def test_min_p_is_relative_to_the_likeliest():
    assert set(draw(min_p=math.exp(-1.2))) == {4, 1}


def test_filters_see_the_whole_vocabulary_when_the_likeliest_candidates_do_not_suffice():
    flat = torch.zeros(3000)
    drawn = draw(6000, logits=flat, top_p=0.9)
    assert 2000 < len(drawn) <= 2700
    assert len(draw(3000, logits=flat, min_p=0.5)) > 1500


def test_one_row_filtered_alone_or_beside_a_flat_one_draws_the_same():
    peaked = torch.linspace(20, 0, 3000)
    flat = torch.zeros(3000)
    alone, beside, other = (state(seed=5, vocab=3000, top_p=0.95, temperature=2.0) for _ in range(3))
    for _ in range(50):
        a = Sampler().sample(peaked[None], [alone]).token_ids[0]
        assert Sampler().sample(torch.stack([flat, peaked]), [other, beside]).token_ids[1] == a


def test_a_seed_gives_the_same_tokens_whatever_is_in_the_batch():
    logits = torch.randn(40, 3, VOCAB, generator=torch.Generator().manual_seed(0))
    alone = state(seed=11, temperature=1.3)
    first = [Sampler().sample(step[1:2], [alone]).token_ids[0] for step in logits]
    among = state(seed=11, temperature=1.3)
    others = [state(temperature=0), state(seed=3, top_k=2)]
    second = [Sampler().sample(step, [others[0], among, others[1]]).token_ids[1] for step in logits]
    assert first == second
    assert len(set(first)) > 2


def test_different_seeds_and_no_seed_give_different_tokens():
    flat = torch.zeros(1, 1000)
    sequences = set()
    for seed in (1, 2, None, None):
        one = state(seed=seed, vocab=1000)
        sequences.add(tuple(Sampler().sample(flat, [one]).token_ids[0] for _ in range(8)))
    assert len(sequences) == 4


def test_a_token_of_probability_0_is_never_drawn():
    logits = torch.full((64,), -torch.inf)
    logits[[10, 20]] = 0.0
    assert set(draw(200, logits=logits)) == {10, 20}
    assert set(draw(200, logits=logits, top_p=0.9999)) == {10, 20}


def test_repetition_penalty_divides_what_prompt_or_answer_hold():
    one = state(prompt=[4], temperature=0, repetition_penalty=1.4)
    logits = torch.tensor([[0.0, 2.0, 0.0, 0.0, 2.5, 0.0, 0.0, 1.9]])
    assert [Sampler().sample(logits, [one]).token_ids[0] for _ in range(3)] == [1, 7, 4]


def test_repetition_penalty_lowers_negative_logits_too():
    one = state(prompt=[0], temperature=0, repetition_penalty=2.0, vocab=2, eos=())
    assert Sampler().sample(torch.tensor([[-1.0, -1.5]]), [one]).token_ids == [1]


def test_frequency_penalty_grows_with_each_use_and_ignores_the_prompt():
    one = state(prompt=[4, 4, 4], temperature=0, frequency_penalty=0.6)
    assert [Sampler().sample(LOGITS[None], [one]).token_ids[0] for _ in range(4)] == [4, 4, 1, 4]


def test_presence_penalty_counts_once():
    one = state(temperature=0, presence_penalty=1.2)
    tokens = [Sampler().sample(LOGITS[None], [one]).token_ids[0] for _ in range(4)]
    assert tokens == [4, 1, 4, 4]


def test_bias_is_added_to_the_logits():
    assert set(draw(5, temperature=0, logit_bias={6: 5.5})) == {6}
    assert 4 not in draw(logit_bias={4: -100.0})


def test_a_bias_outside_the_vocabulary_is_refused():
    with pytest.raises(RequestRefused, match="vocabulary of 8"):
        state(logit_bias={8: 1.0})


def test_end_tokens_are_banned_until_the_minimum_is_generated():
    one = state(temperature=0, min_new_tokens=2, eos=(4,), stop_token_ids=(1, 99))
    assert [Sampler().sample(LOGITS[None], [one]).token_ids[0] for _ in range(3)] == [7, 7, 4]


def test_logprobs_are_the_models_own_before_penalties_and_temperature():
    one = state(temperature=0.1, seed=0, logit_bias={6: 100.0}, top_logprobs=2)
    result = Sampler().sample(LOGITS[None], [one])
    expected = LOGITS.log_softmax(-1)
    got = result.logprobs[0]
    assert got is not None
    assert result.token_ids == [6]
    assert got.logprob == pytest.approx(float(expected[6]))
    assert [token for token, _ in got.top] == [4, 1]
    assert [value for _, value in got.top] == pytest.approx(expected[[4, 1]].tolist())


def test_logprobs_come_only_for_rows_that_ask():
    states = [state(temperature=0), state(temperature=0, top_logprobs=0)]
    result = Sampler().sample(LOGITS.expand(2, -1), states)
    assert result.logprobs[0] is None
    assert result.logprobs[1] is not None
    assert result.logprobs[1].top == []


def test_sampling_leaves_the_logits_as_they_were():
    logits = LOGITS[None].clone()
    Sampler().sample(logits, [state(temperature=0.5, logit_bias={1: 3.0}, frequency_penalty=1.0)])
    assert torch.equal(logits[0], LOGITS)
