"""Packed chunks over scattered pages against transformers' own eager forward: same logits, same greedy tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.attention.torch_backend import TorchBackend
from engine.batch import Batch, Chunk
from engine.model import LoadedModel, load_model
from engine.runner import ModelRunner
from tests.models import KINDS, VOCAB, make_tiny_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

PAGES = 64
STEPS = [[8, 9, 6], [8, 0, 16], [1, 1, 1], [0, 4, 0], [1, 1, 3], [1, 1, 1]]
"""New tokens of three sequences in each step: prompts in chunks, chunks beside decodes, decodes alone."""


class Pair(NamedTuple):
    """A model on pages and the same on transformers' own attention."""

    paged: LoadedModel
    eager: PreTrainedModel


class Sequences:
    """Three sequences of one pool that advance together."""

    def __init__(self, model: LoadedModel, page_size: int, pages: int = PAGES) -> None:
        geometry = model.geometry(page_size)
        self.pool = torch.full((pages, geometry.page_bytes), 0xFF, dtype=torch.uint8)
        self.runner = ModelRunner(model, TorchBackend(self.pool, geometry, model.layers, model.dtype))
        self.tables = np.random.default_rng(3).permutation(pages)[: pages // 3 * 3].reshape(3, -1).astype(np.int32)
        self.done = [0, 0, 0]

    def step(self, tokens: Sequence[np.ndarray]) -> dict[int, torch.Tensor]:
        """Append tokens; returns logits after the last one by sequence, of the sequences that got any."""
        who = [i for i, new in enumerate(tokens) if len(new)]
        logits = self.runner.forward(Batch([Chunk(tokens[i], self.done[i], self.tables[i]) for i in who]))
        for i in who:
            self.done[i] += len(tokens[i])
        return dict(zip(who, logits, strict=True))


def load_pair(path: str) -> Pair:
    eager = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
    return Pair(load_model(path, device="cpu"), eager.eval())


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return load_pair(str(make_tiny_model(request.param, tmp_path_factory.mktemp(request.param))))


def random_tokens(lengths: Sequence[int], vocab: int) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.integers(3, vocab, n).astype(np.int32) for n in lengths]


def eager_logits(model: PreTrainedModel, tokens: np.ndarray) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.from_numpy(tokens).long()[None], use_cache=False).logits[0].float()


def assert_same_logits(pair: Pair, page_size: int, steps: list[list[int]], vocab: int) -> None:
    totals = np.sum(steps, axis=0)
    tokens = random_tokens(totals, vocab)
    expected = [eager_logits(pair.eager, sequence) for sequence in tokens]
    pages = 3 * int(max(totals))
    sequences = Sequences(pair.paged, page_size, pages)
    for lengths in steps:
        done = list(sequences.done)
        logits = sequences.step([tokens[i][done[i] : done[i] + n] for i, n in enumerate(lengths)])
        for i, row in logits.items():
            torch.testing.assert_close(row, expected[i][sequences.done[i] - 1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("page_size", [1, 16])
def test_logits_of_packed_chunks_are_those_of_whole_prompts(pair, page_size):
    assert_same_logits(pair, page_size, STEPS, VOCAB)


def greedy(model: PreTrainedModel, prompt: np.ndarray, count: int) -> list[int]:
    ids = torch.from_numpy(prompt).long()[None]
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, min_new_tokens=count,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


def paged_greedy(model: LoadedModel, prompts: list[np.ndarray], count: int) -> list[list[int]]:
    sequences = Sequences(model, 16)
    new: list[list[int]] = [[], [], []]
    tokens = prompts
    for _ in range(count):
        logits = sequences.step(tokens)
        for i, row in logits.items():
            new[i].append(int(row.argmax()))
        tokens = [np.array(sequence[-1:], np.int32) for sequence in new]
    return new


def test_greedy_tokens_are_those_of_generate(pair):
    prompts = random_tokens([21, 9, 2], VOCAB)
    expected = [greedy(pair.eager, prompt, 12) for prompt in prompts]
    assert paged_greedy(pair.paged, prompts, 12) == expected


def test_a_page_depends_on_its_tokens_only_and_not_on_chunks_or_neighbours(pair):
    tokens = random_tokens([32, 7, 5], VOCAB)
    alone = Sequences(pair.paged, 8)
    alone.step([tokens[0], tokens[1][:0], tokens[2][:0]])
    beside = Sequences(pair.paged, 8)
    beside.step([tokens[0][:3], tokens[1], tokens[2][:2]])
    beside.step([tokens[0][3:20], tokens[1][:0], tokens[2][2:]])
    beside.step([tokens[0][20:], tokens[1][:0], tokens[2][:0]])
    pages = [s.pool[s.tables[0][:4]].view(torch.float32) for s in (alone, beside)]
    torch.testing.assert_close(pages[0], pages[1], atol=1e-5, rtol=1e-4)


@pytest.fixture(scope="module")
def smollm2() -> Pair:
    paged = load_model("smollm2", device="cpu")
    eager = AutoModelForCausalLM.from_config(paged.config, attn_implementation="eager", dtype=torch.float32)
    eager.load_state_dict(paged.hf.state_dict(), assign=True)
    return Pair(paged, eager.eval())


def test_smollm2_logits_are_those_of_transformers(smollm2):
    assert_same_logits(smollm2, 16, [[20, 3, 9], [9, 14, 0], [1, 1, 1]], smollm2.paged.vocab_size)


@pytest.mark.long
def test_smollm2_greedy_tokens_are_those_of_generate(smollm2):
    questions = ["Name a colour.", "What is gravity?", "Say hello."]
    prompts = [chat(smollm2.paged, question) for question in questions]
    expected = [greedy(smollm2.eager, prompt, 24) for prompt in prompts]
    assert paged_greedy(smollm2.paged, prompts, 24) == expected


def test_smollm2_answers_through_its_chat_template_and_ends_with_its_end_token(smollm2):
    model = smollm2.paged
    answer = paged_greedy(model, [chat(model, "What is the capital of France?")] + [np.array([1], np.int32)] * 2, 8)[0]
    assert answer[-1] in model.eos_token_ids
    assert model.tokenizer.decode(answer) == "The capital of France is Paris."


def chat(model: LoadedModel, question: str) -> np.ndarray:
    message = [{"role": "user", "content": question}]
    return np.array(model.tokenizer.encode_chat(message, options={}, continue_final_message=False), np.int32)
