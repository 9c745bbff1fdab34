"""Which model this is, as far as its KV is concerned: two models of one fingerprint may share pages.

Weights are identified by content, so a moved or copied folder keeps its pages and weights updated in place lose them. Big
files are sampled: the start of every tensor of a safetensors file, which any update of a tensor changes; evenly spaced
blocks of other files.
"""

from __future__ import annotations

import json
import os
import struct
from typing import TYPE_CHECKING, Any, BinaryIO

import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

__all__ = ["config_text", "digest_fields", "digest_files"]

WHOLE_BYTES = 256 << 20
"""Files up to this size are hashed whole."""

READ_BYTES = 8 << 20
TENSOR_BYTES = 4 << 10
BLOCK_BYTES = 64 << 10
BLOCKS = 256

VOLATILE = frozenset({"transformers_version", "dtype", "torch_dtype"})
"""Configuration keys that don't change what the weights compute; the dtype in use is a field of its own."""


def digest_fields(fields: Mapping[str, str]) -> str:
    """Hash named texts, each framed by name and length, so that no two different mappings meet."""
    state = xxhash.xxh3_128(b"hicache.fingerprint")
    for name, value in sorted(fields.items()):
        for part in (name.encode(), value.encode("utf-8", "surrogatepass")):
            state.update(struct.pack("<Q", len(part)) + part)
    return state.hexdigest()


def config_text(config: Mapping[str, Any]) -> str:
    """A configuration as canonical JSON, without what depends on where or with which version it was loaded."""
    return json.dumps(_stable(config), sort_keys=True, default=str)


def digest_files(files: Sequence[Path], whole_bytes: int = WHOLE_BYTES) -> str:
    """Hash names, sizes and content of weight files; above `whole_bytes` content is sampled. Raises OSError."""
    state = xxhash.xxh3_128()
    for path in sorted(files, key=lambda file: file.name):
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            name = path.name.encode("utf-8", "surrogateescape")
            state.update(struct.pack("<QQ", size, len(name)) + name)
            for part in _content(file, path.suffix, size, whole_bytes):
                state.update(part)
    return state.hexdigest()


def _content(file: BinaryIO, suffix: str, size: int, whole_bytes: int) -> Iterator[bytes]:
    """The bytes of a file that identify it."""
    if size <= whole_bytes:
        while part := file.read(READ_BYTES):
            yield part
        return
    ranges = _safetensors_ranges(file) if suffix == ".safetensors" else _spaced_ranges(size)
    for start, length in ranges:
        file.seek(start)
        yield file.read(length)


def _safetensors_ranges(file: BinaryIO) -> Iterable[tuple[int, int]]:
    """(start, length) of the header and of the beginning of each tensor."""
    header_bytes = struct.unpack("<Q", file.read(8))[0]
    header = json.loads(file.read(header_bytes))
    base = 8 + header_bytes
    yield 0, base
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            yield base + begin, min(end - begin, TENSOR_BYTES)


def _spaced_ranges(size: int) -> Iterable[tuple[int, int]]:
    """(start, length) of evenly spaced blocks, the first and the last included."""
    last = max(0, size - BLOCK_BYTES)
    return ((i * last // (BLOCKS - 1), BLOCK_BYTES) for i in range(BLOCKS))


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _stable(v) for k, v in value.items() if not str(k).startswith("_") and k not in VOLATILE}
    return [_stable(v) for v in value] if isinstance(value, (list, tuple)) else value
