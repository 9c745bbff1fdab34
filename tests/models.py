"""Tiny random models of many families, saved as Hugging Face folders with a byte-level tokenizer, to load or serve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["KINDS", "make_tiny_model", "make_tiny_tokenizer"]

SPECIAL = ("<pad>", "<bos>", "<eos>")
VOCAB = len(SPECIAL) + 256

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_SHARED = {
    "sliding_window": 5,
    "num_kv_shared_layers": 2,
    "layer_types": _ALTERNATING,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
}

KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 5},
    "phi3": {},
    "gemma2": {"sliding_window": 5, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": 5, "query_pre_attn_scalar": 16, "layer_types": _ALTERNATING},
    "gemma3n_text": {
        **_SHARED,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": [96] * 4,
    },
    "gemma4_text": {**_SHARED, "global_head_dim": 32},
    "gpt_oss": {"sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": _ALTERNATING},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 512},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "q_lora_rank": 32,
        "kv_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "first_k_dense_replace": 1,
        "head_dim": None,
    },
}
"""What each family sets beyond a common small shape. Windows are short, so that short prompts outgrow them."""


def make_tiny_model(kind: str, path: Path, **overrides: Any) -> Path:
    """Save a random model of a family, always the same one, with its tokenizer; returns `path`.

    kind: a key of KINDS or any other transformers model type. overrides: configuration keys; None removes one.
    """
    values = {**_BASE, **KINDS.get(kind, {}), **overrides}
    config = CONFIG_MAPPING[kind](**{key: value for key, value in values.items() if value is not None})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():  # initial weights are so small that a wrong attention hardly shows
                parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(path)
    make_tiny_tokenizer().save_pretrained(path)
    return path


def make_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of one token a byte, with a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = RawTokenizer(models.BPE({token: i for i, token in enumerate([*SPECIAL, *alphabet])}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    tokenizer.chat_template = (
        "{% for message in messages %}<bos>{{ message['role'] }}: {{ message['content'] }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}<bos>assistant: {% endif %}"
    )
    return tokenizer
