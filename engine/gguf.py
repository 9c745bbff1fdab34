"""A GGUF model as a Hugging Face folder, made once and kept in the user's cache folder.

transformers takes about 25 s to parse and dequantise a 98 MB GGUF, and one second to load what comes out of it.
"""

from __future__ import annotations

import copy
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from engine.config import cache_home
from engine.fingerprint import digest_fields, digest_files

__all__ = ["Source", "as_folder"]

logger = logging.getLogger(__name__)


class Source(NamedTuple):
    """What transformers loads from: a folder, and the GGUF file in it if it is one."""

    folder: Path
    gguf_file: str | None = None


def as_folder(path: Path, dtype: torch.dtype) -> Source:
    """The folder to load a model from. A GGUF is converted to `dtype` first, unless that was done before.

    If the conversion can't be kept (a full or read-only disk), that is logged and the source is the GGUF itself. Raises
    OSError if the GGUF can't be read, and what transformers raises for one that it doesn't know.
    """
    if path.is_dir():
        return Source(path)
    folder = _conversion(path, dtype)
    if folder.is_dir():
        return Source(folder)
    try:
        _convert(path, folder, dtype)
    except _NotKept as error:
        logger.warning("the converted model could not be kept in %s: %s", folder.parent, error)
        return Source(path.parent, path.name)
    return Source(folder)


class _NotKept(Exception):
    """The conversion could not be written."""


def _conversion(gguf: Path, dtype: torch.dtype) -> Path:
    """Where the conversion of a GGUF's content belongs, whether it exists or not."""
    fields = {"content": digest_files([gguf]), "dtype": str(dtype), "transformers": transformers.__version__}
    return cache_home() / "gguf" / f"{gguf.stem}-{digest_fields(fields)}"


def _convert(gguf: Path, folder: Path, dtype: torch.dtype) -> None:
    """Convert into `folder`, which appears whole or not at all."""
    where, name = gguf.parent, gguf.name
    config = AutoConfig.from_pretrained(where, gguf_file=name, local_files_only=True)
    plain = copy.deepcopy(config)  # loading marks its own as quantised
    model = AutoModelForCausalLM.from_pretrained(where, gguf_file=name, config=config, dtype=dtype, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name, local_files_only=True)
    model_class: Any = type(model)
    with torch.device("meta"):
        # transformers saves no model that came from a GGUF, but a twin of it
        twin = model_class._from_config(plain, dtype=dtype)
    twin.load_state_dict(model.state_dict(), assign=True)
    twin.generation_config = model.generation_config
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=".converting-", dir=folder.parent))
        try:
            twin.save_pretrained(draft)
            tokenizer.save_pretrained(draft)
            if not folder.is_dir():  # another process may have been faster
                draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        raise _NotKept(str(error)) from error
