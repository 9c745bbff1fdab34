"""The bytes of one page record: a header of whole blocks, then the payload.

| field        | bytes | meaning                                              |
| ------------ | ----- | ---------------------------------------------------- |
| magic        | 4     | `HKVP`                                               |
| version      | 2     | RECORD_VERSION                                       |
| key length   | 2     | of key, parent key and namespace, each               |
| token length | 4     | bytes of tokens                                      |
| payload len  | 4     | bytes                                                |
| namespace, key, parent key, tokens | as said above                           |
| header sum   | 8     | xxh3-64 of everything above                          |
| checksum     | 8     | xxh3-64 of the payload, seeded with the header sum   |

Zeros fill the header's last block. Integers are little-endian. The checksum covers the header too, because its seed does.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import xxhash

from storage.base import PageRef

__all__ = [
    "BLOCK_BYTES",
    "RECORD_VERSION",
    "SUMS_BYTES",
    "Header",
    "checksum",
    "decode_header",
    "frame",
    "header_bytes",
    "padded_bytes",
    "seal",
    "sums_fit",
]

RECORD_VERSION = 1
BLOCK_BYTES = 4096

_MAGIC = b"HKVP"
_FIXED = struct.Struct("<4sHHII")
_SUMS = struct.Struct("<QQ")
SUMS_BYTES = _SUMS.size
_MAX_PAYLOAD_BYTES = 2**32 - 1

checksum = xxhash.xxh3_64_intdigest
"""`checksum(payload, header_sum)`; releases the GIL for large payloads."""


class Header(NamedTuple):
    """A decoded header whose own sum fits. The payload is still to be verified against `checksum`."""

    version: int
    ref: PageRef
    payload_bytes: int
    header_sum: int
    checksum: int


def header_bytes(key_bytes: int, token_bytes: int) -> int:
    """Bytes from a record's start to its payload: a multiple of BLOCK_BYTES."""
    return padded_bytes(_FIXED.size + 3 * key_bytes + token_bytes)


def padded_bytes(framed_bytes: int) -> int:
    """Bytes of a header whose frame has `framed_bytes`."""
    return -(-(framed_bytes + SUMS_BYTES) // BLOCK_BYTES) * BLOCK_BYTES


def frame(ref: PageRef, payload_bytes: int) -> bytes:
    """Encode all that a header says of `ref`, up to its sums. Equal frames mean that every field agrees."""
    key, parent_key, namespace, tokens = ref
    if len(parent_key) != len(key) or len(namespace) != len(key):
        raise ValueError("key, parent key and namespace must have one length")
    return b"".join((_fixed(len(key), len(tokens), payload_bytes), namespace, key, parent_key, tokens))


@lru_cache(1024)
def _fixed(key_bytes: int, token_bytes: int, payload_bytes: int) -> bytes:
    if payload_bytes > _MAX_PAYLOAD_BYTES:
        raise ValueError(f"a payload of {payload_bytes} bytes is over 4 GiB")
    return _FIXED.pack(_MAGIC, RECORD_VERSION, key_bytes, token_bytes, payload_bytes)


def seal(framed: bytes, payload: memoryview) -> bytes:
    """Append the sums to a frame: the whole header but its padding."""
    header_sum = checksum(framed)
    return framed + _SUMS.pack(header_sum, checksum(payload, header_sum))


def sums_fit(header: bytes | bytearray | memoryview, at: int, framed: bytes, payload: memoryview) -> bool:
    """Tell whether the sums at offset `at` of a header fit its frame and its payload."""
    header_sum, payload_sum = _SUMS.unpack_from(header, at)
    return bool(payload_sum == checksum(payload, header_sum) and header_sum == checksum(framed))


def decode_header(data: bytes | memoryview) -> Header | None:
    """Decode a header, or return None if it is not one or its own sum does not fit.

    The version is reported as found; only the magic, the lengths and the header sum are judged here.
    """
    data = bytes(data)
    if len(data) < _FIXED.size:
        return None
    magic, version, key_bytes, token_bytes, payload_bytes = _FIXED.unpack_from(data)
    end = _FIXED.size + 3 * key_bytes + token_bytes
    if magic != _MAGIC or len(data) < end + SUMS_BYTES:
        return None
    header_sum, payload_sum = _SUMS.unpack_from(data, end)
    if header_sum != checksum(data[:end]):
        return None
    cuts = [_FIXED.size + n * key_bytes for n in range(4)]
    namespace, key, parent = (data[a:b] for a, b in pairwise(cuts))
    ref = PageRef(key, parent, namespace, data[cuts[3] : end])
    return Header(version, ref, payload_bytes, header_sum, payload_sum)
