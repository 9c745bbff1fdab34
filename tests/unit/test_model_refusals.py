"""Models that can't be run correctly on pages are refused with one line; those that only look odd are not."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, BloomConfig, BloomForCausalLM, T5Config

from engine.model import load_model, resolve_device, resolve_dtype
from engine.refusals import check_config, resolve_context_length
from engine.selfcheck import check_isolation
from hicache.errors import ConfigError, ModelRefused
from tests.models import make_tiny_model, make_tiny_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from engine.model import LoadedModel


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> LoadedModel:
    return load_model(str(make_tiny_model("llama", tmp_path_factory.mktemp("llama"))), device="cpu")


def refuse(folder: Path, match: str, context_length: int | None = None) -> None:
    with pytest.raises(ModelRefused, match=match) as caught:
        load_model(str(folder), device="cpu", context_length=context_length)
    assert "\n" not in str(caught.value)


def test_a_missing_path_is_refused():
    with pytest.raises(ConfigError, match="no such folder"):
        load_model("/nowhere/at/all")


def test_a_folder_without_a_model_is_refused(tmp_path):
    refuse(tmp_path, str(tmp_path))


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"not a model")
    refuse(tmp_path / "model.gguf", "model.gguf")


def test_a_folder_without_weights_is_refused(tmp_path):
    make_tiny_model("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    refuse(tmp_path, "safetensors")


def test_truncated_weights_are_refused(tmp_path):
    make_tiny_model("llama", tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    refuse(tmp_path, str(tmp_path))


def test_a_model_that_never_calls_the_attention_function_is_refused(tmp_path):
    BloomForCausalLM(BloomConfig(vocab_size=259, hidden_size=32, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    make_tiny_tokenizer().save_pretrained(tmp_path)
    refuse(tmp_path, "BloomForCausalLM computes attention by itself")


def test_an_encoder_decoder_is_refused(tmp_path):
    T5Config(d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2).save_pretrained(tmp_path)
    refuse(tmp_path, "encoder-decoder")


@pytest.mark.parametrize(
    ("kind", "what"),
    [("llama4_text", "chunked_attention"), ("qwen3_next", "linear_attention"), ("jamba", ""), ("falcon_h1", ""), ("mamba", "")],
)
def test_chunked_attention_and_recurrent_layers_are_refused(kind, what):
    with pytest.raises(ModelRefused, match=f"{kind} has layers of type .*{what}"):
        check_config(CONFIG_MAPPING[kind]())


def test_a_model_that_attends_in_both_directions_is_refused(tmp_path):
    make_tiny_model("gemma3_text", tmp_path, use_bidirectional_attention=True)
    refuse(tmp_path, "both directions")


def test_a_layer_that_attends_twice_is_refused(tmp_path):
    make_tiny_model("diffllama", tmp_path)
    refuse(tmp_path, "more than once")


def test_a_model_that_masks_by_itself_is_refused(tmp_path):
    make_tiny_model("doge", tmp_path)
    refuse(tmp_path, "own attention mask")


def test_a_model_that_mixes_tokens_outside_attention_is_refused(llama):
    def shift(module: torch.nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (args[0] + args[0].roll(1, dims=1),)

    check_isolation(llama)
    hook = llama.hf.model.layers[1].mlp.register_forward_pre_hook(shift)
    try:
        with pytest.raises(ModelRefused, match="chunks beside another"):
            check_isolation(llama)
    finally:
        hook.remove()


def test_layers_that_write_to_the_same_pages_are_found(llama):
    first, second, *others = llama.layers
    with pytest.raises(ModelRefused, match="chunks beside another"):
        check_isolation(replace(llama, layers=(first, second._replace(pages_of=0), *others)))


def test_weights_that_lack_a_tensor_are_refused(tmp_path):
    make_tiny_model("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    refuse(tmp_path, "1 weights are missing, such as model.layers.1.mlp.up_proj.weight")


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 128,
}


def test_longrope_is_refused_beyond_its_original_length_and_runs_within(tmp_path):
    make_tiny_model("phi3", tmp_path, rope_parameters=LONGROPE, original_max_position_embeddings=128)
    refuse(tmp_path, "give --context-length 128 or less")
    refuse(tmp_path, "give --context-length 128 or less", context_length=129)
    assert load_model(str(tmp_path), device="cpu", context_length=128).context_length == 128


def test_dynamic_rope_runs_up_to_the_models_own_length_where_it_never_changes(tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    make_tiny_model("llama", tmp_path, rope_parameters=rope)
    assert load_model(str(tmp_path), device="cpu").context_length == 512
    refuse(tmp_path, "ends at 512 tokens", context_length=513)


def test_rope_of_one_kind_of_layer_is_looked_at_too():
    config = CONFIG_MAPPING["gemma3_text"](max_position_embeddings=512)
    config.rope_parameters = {"full_attention": {**LONGROPE}, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    with pytest.raises(ModelRefused, match="longrope"):
        resolve_context_length(config, None)
    assert resolve_context_length(config, 100) == 100


def test_an_unknown_dtype_and_a_missing_gpu_are_refused():
    with pytest.raises(ConfigError, match="--dtype must be one of"):
        resolve_dtype("int7", torch.device("cpu"), None)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="torch sees no GPU"):
            resolve_device("cuda")


def test_auto_dtype_is_float32_on_a_cpu_and_the_models_own_on_a_gpu():
    assert resolve_dtype("auto", torch.device("cpu"), torch.bfloat16) is torch.float32
    assert resolve_dtype("auto", torch.device("cuda"), torch.float16) is torch.float16
    assert resolve_dtype("auto", torch.device("cuda"), None) is torch.bfloat16
    assert resolve_dtype("bfloat16", torch.device("cpu"), None) is torch.bfloat16


def test_layers_that_share_kv_read_the_pages_of_their_source(tmp_path):
    model = load_model(str(make_tiny_model("gemma3n_text", tmp_path)), device="cpu")
    assert [(layer.pages_of, layer.writes) for layer in model.layers] == [(0, True), (1, True), (0, False), (1, False)]
    assert len(model.page_layers) == 2


def test_end_tokens_are_those_of_generation_settings_and_tokenizer(tmp_path):
    make_tiny_model("llama", tmp_path, eos_token_id=[5, 9])
    assert load_model(str(tmp_path), device="cpu").eos_token_ids == {5, 9, 2}
