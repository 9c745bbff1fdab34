"""Page keys: a chained hash of the namespace and the tokens, page by page.

`key_i = H(key_{i-1} ‖ tokens of page i as int32 little-endian)`, and `key_{-1} = H(namespace)`: two pages have one key only if
everything that determined their KV is the same. xxh3-128 is fast and not collision-resistant; a secret random to the store
seeds the chain, so an outsider can't compute collisions. sha256 is there for those who want a cryptographic chain.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import xxhash

from hicache.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["HASH_ALGOS", "RECORD_FORMAT", "KeyChain", "Namespace", "tenant_name"]

RECORD_FORMAT = 1
"""Version of what a page key stands for; raised when the meaning of stored bytes changes."""


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


HASH_ALGOS: dict[str, tuple[Callable[[bytes], bytes], int]] = {
    "xxh3_128": (xxhash.xxh3_128_digest, 16),
    "sha256": (_sha256, 32),
}


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything but tokens that must match for KV to be shared.

    fingerprint: of the model: config, weights, KV dtype, geometry, RoPE.
    lora, cache_salt, extra_key: of the request; each a tagged field, so a LoRA named like a salt still differs.
    """

    fingerprint: str
    lora: str = ""
    cache_salt: str = ""
    extra_key: str = ""

    def encode(self) -> bytes:
        """Length-framed, domain-tagged bytes: no two different namespaces encode alike."""
        fields = {
            "record_format": str(RECORD_FORMAT),
            "model": self.fingerprint,
            "lora": self.lora,
            "cache_salt": self.cache_salt,
            "extra_key": self.extra_key,
        }
        out = [b"hicache.namespace"]
        for tag, value in fields.items():
            for part in (tag.encode(), value.encode("utf-8", "surrogatepass")):
                out += (struct.pack("<I", len(part)), part)
        return b"".join(out)


def tenant_name(cache_salt: str) -> str:
    """The name a salt's tenant has in a store: "" without a salt, else a digest that does not give the salt away."""
    return (
        hashlib.sha256(b"hicache.tenant" + cache_salt.encode("utf-8", "surrogatepass")).hexdigest()[:16] if cache_salt else ""
    )


class KeyChain:
    """Computes page keys under one algorithm and one secret. Any thread.

    root(namespace): key of the empty prefix: the parent key of every first page, and the namespace's digest.
    """

    def __init__(self, algo: str, secret: bytes, page_size: int) -> None:
        if algo not in HASH_ALGOS:
            raise ConfigError(f"hash algorithm must be one of {', '.join(HASH_ALGOS)}, not {algo}")
        self._hash, self.key_bytes = HASH_ALGOS[algo]
        self._algo = algo
        self._secret = secret
        self._page_bytes = 4 * page_size
        self.root = lru_cache(maxsize=1024)(self._root)  # asked for by every request

    def _root(self, namespace: Namespace) -> bytes:
        framed = f"{self._algo}:{self._page_bytes}:".encode() + struct.pack("<I", len(self._secret)) + self._secret
        return self._hash(framed + namespace.encode())

    def extend(self, parent: bytes, tokens: bytes | memoryview) -> list[bytes]:
        """Keys of the full pages in `tokens` (int32 little-endian), which follow the page whose key is `parent`."""
        size, digest = self._page_bytes, self._hash
        data = bytes(tokens)
        keys = []
        for at in range(0, len(data) - size + 1, size):
            parent = digest(parent + data[at : at + size])
            keys.append(parent)
        return keys
