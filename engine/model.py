"""Load a transformers decoder so that it runs on pages, or refuse it with one clear line."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

from engine.attention.hook import IMPLEMENTATION
from engine.fingerprint import config_text, digest_fields, digest_files
from engine.gguf import as_folder
from engine.probe import probe
from engine.refusals import check_class, check_config, resolve_context_length
from engine.selfcheck import check_isolation
from engine.tokenizer import load_tokenizer, resolve_model
from hicache.errors import ConfigError, ModelRefused
from hicache.geometry import LayerGeometry, PageGeometry

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from transformers import PreTrainedConfig, PreTrainedModel

    from engine.attention.base import LayerSpec
    from engine.gguf import Source
    from engine.tokenizer import Tokenizer

__all__ = ["LoadedModel", "load_model", "resolve_device", "resolve_dtype"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run on pages.

    hf: the transformers model, in eval mode on `device`, its attention answered by hook.attending. layers: every attention
    layer; page_layers: what a page holds. eos_token_ids: tokens that end an answer. weights: digest of the weight files.
    """

    hf: PreTrainedModel
    tokenizer: Tokenizer
    config: PreTrainedConfig
    device: torch.device
    dtype: torch.dtype
    context_length: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    weights: str
    layers: tuple[LayerSpec, ...] = ()
    page_layers: tuple[LayerGeometry, ...] = ()

    def geometry(self, page_size: int, kv_dtype: str = "auto") -> PageGeometry:
        """The page of this model; `auto` stores KV as the model computes it. 8-bit types go by SGLang's names, too.

        Raises ConfigError.
        """
        dtype = str(self.dtype).removeprefix("torch.") if kv_dtype == "auto" else KV_DTYPES.get(kv_dtype, kv_dtype)
        return PageGeometry(page_size, dtype, self.page_layers)

    def fingerprint(self, geometry: PageGeometry) -> str:
        """Digest of all that determines the bytes of a page but its tokens: configuration (RoPE included), weights, types."""
        fields = {
            "config": config_text(self.config.to_dict()),
            "weights": self.weights,
            "dtype": str(self.dtype),
            "geometry": geometry.describe(),
        }
        return digest_fields(fields)


def load_model(model_path: str, dtype: str = "auto", device: str = "auto", context_length: int | None = None) -> LoadedModel:
    """Load a folder, a GGUF file or a known name, probe it and try it once.

    dtype: auto is float32 on a CPU and the model's own on a GPU. context_length: the model's own if None.
    Raises ConfigError (no such model, no such device) and ModelRefused.
    """
    path = resolve_model(model_path)
    place = resolve_device(device)
    with torch.inference_mode():
        model = _load(path, place, dtype, context_length)
        found = probe(model.hf)
    model = replace(model, layers=found.layers, page_layers=found.pages)
    check_isolation(model)
    return model


def resolve_device(device: str) -> torch.device:
    """The torch device of `auto`, `cpu` or `cuda`. Raises ConfigError."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU")
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def resolve_dtype(dtype: str, device: torch.device, own: torch.dtype | None) -> torch.dtype:
    """The torch dtype of weights and activations; `own` is what the model was saved as. Raises ConfigError."""
    if dtype != "auto":
        if dtype not in DTYPES:
            raise ConfigError(f"--dtype must be one of auto, {', '.join(DTYPES)}, not {dtype}")
        return DTYPES[dtype]
    if device.type == "cpu":
        return torch.float32
    return own if own is not None and own in DTYPES.values() else torch.bfloat16


def _load(path: Path, device: torch.device, dtype: str, context_length: int | None) -> LoadedModel:
    """Load without a probe: layers are empty."""
    own = None if path.is_file() else getattr(torch, str(_config(path).dtype).removeprefix("torch."), None)
    compute = resolve_dtype(dtype, device, own)
    try:
        source = as_folder(path, compute)
        config = _config(source.folder, source.gguf_file)
        length = resolve_context_length(config, context_length)
        hf = _load_weights(source, config, compute, device)
        weights = digest_files([path] if path.is_file() else list(_weight_files(path)))
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        raise ModelRefused(f"{path}: {_one_line(error)}") from error
    tokenizer = load_tokenizer(source.folder if source.gguf_file is None else path)
    text = config.get_text_config(decoder=True)
    return LoadedModel(
        hf=hf,
        tokenizer=tokenizer,
        config=config,
        device=device,
        dtype=compute,
        context_length=length,
        vocab_size=text.vocab_size,
        eos_token_ids=frozenset(_eos_ids(hf, text, tokenizer)),
        weights=weights,
    )


def _config(folder: Path, gguf_file: str | None = None) -> PreTrainedConfig:
    """Read and check the configuration. Raises ModelRefused."""
    extra: dict[str, Any] = {} if gguf_file is None else {"gguf_file": gguf_file}
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, **extra)
    except (OSError, ValueError, KeyError) as error:
        raise ModelRefused(f"{folder}: {_one_line(error)}") from error
    check_config(config)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelRefused(f"{config.model_type} is no language model that transformers can generate with")
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    check_class(model_class)
    return config


def _load_weights(source: Source, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Load the weights onto the device, with attention going through our hook. Raises ModelRefused."""
    extra: dict[str, Any] = {} if source.gguf_file is None else {"gguf_file": source.gguf_file}
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        source.folder,
        config=config,
        dtype=dtype,
        attn_implementation=IMPLEMENTATION,
        local_files_only=True,
        device_map={"": device} if device.type != "cpu" else None,
        output_loading_info=True,
        **extra,
    )
    model: PreTrainedModel
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise ModelRefused(f"{source.folder}: {len(missing)} weights are missing, such as {missing[0]}")
    model.train(False)
    return model


def _weight_files(folder: Path) -> Iterator[Path]:
    """The files that hold a folder's weights; safetensors alone where there are any, since they are what is loaded."""
    files = [file for file in folder.iterdir() if file.suffix in WEIGHT_SUFFIXES]
    safe = [file for file in files if file.suffix == ".safetensors"]
    yield from safe or files


def _eos_ids(hf: PreTrainedModel, text: PreTrainedConfig, tokenizer: Tokenizer) -> Iterator[int]:
    """End tokens by the generation settings, else by the configuration, and always by the tokenizer."""
    configured = getattr(hf.generation_config, "eos_token_id", None)
    if configured is None:
        configured = getattr(text, "eos_token_id", None)
    if configured is not None:
        yield from configured if isinstance(configured, list) else [configured]
    if tokenizer.eos_token_id is not None:
        yield tokenizer.eos_token_id


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
