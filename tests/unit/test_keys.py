"""Page keys: equal only if everything that determined the KV is equal."""

from __future__ import annotations

import hashlib
import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
import xxhash
from hypothesis import given

from hicache.errors import ConfigError
from hicache.keys import HASH_ALGOS, KeyChain, Namespace, tenant_name

TEXTS = st.text(max_size=5)


def tokens(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


@pytest.mark.parametrize(("algo", "digest"), [("xxh3_128", xxhash.xxh3_128), ("sha256", hashlib.sha256)])
def test_key_is_the_hash_of_the_parent_key_and_the_page(algo: str, digest: type) -> None:
    chain = KeyChain(algo, b"s", 2)
    root = chain.root(Namespace("m"))
    first, second = chain.extend(root, tokens(1, 2, 3, 4))
    assert first == digest(root + tokens(1, 2)).digest()
    assert second == digest(first + tokens(3, 4)).digest()
    assert len(first) == chain.key_bytes == HASH_ALGOS[algo][1]


def test_keys_can_be_extended_page_by_page() -> None:
    chain = KeyChain("xxh3_128", b"s", 2)
    root = chain.root(Namespace("m"))
    at_once = chain.extend(root, tokens(1, 2, 3, 4, 5, 6))
    assert at_once == [*chain.extend(root, tokens(1, 2)), *chain.extend(at_once[0], tokens(3, 4, 5, 6))]


def test_a_partial_page_has_no_key() -> None:
    chain = KeyChain("xxh3_128", b"s", 4)
    root = chain.root(Namespace("m"))
    assert chain.extend(root, tokens(1, 2, 3)) == []
    assert len(chain.extend(root, tokens(1, 2, 3, 4, 5))) == 1
    assert chain.extend(root, b"") == []


def test_same_page_after_another_prefix_has_another_key() -> None:
    chain = KeyChain("xxh3_128", b"s", 1)
    root = chain.root(Namespace("m"))
    assert chain.extend(root, tokens(1, 9))[1] != chain.extend(root, tokens(2, 9))[1]


def test_every_field_of_a_namespace_separates() -> None:
    variants = [
        Namespace("m"),
        Namespace("n"),
        Namespace("m", lora="x"),
        Namespace("m", cache_salt="x"),
        Namespace("m", extra_key="x"),
        Namespace("m", lora="x", cache_salt="x"),
        Namespace("m\x00x"),
        Namespace("mx"),
    ]
    assert len({namespace.encode() for namespace in variants}) == len(variants)


def test_algorithm_secret_and_page_size_separate() -> None:
    chains = [KeyChain(*args) for args in itertools.product(HASH_ALGOS, [b"", b"s", b"t"], [1, 16, 64])]
    assert len({chain.root(Namespace("m")) for chain in chains}) == len(chains)


@given(*[st.tuples(TEXTS, TEXTS, TEXTS, TEXTS)] * 2)
def test_different_namespaces_never_encode_alike(a: tuple[str, ...], b: tuple[str, ...]) -> None:
    assert (Namespace(*a).encode() == Namespace(*b).encode()) == (a == b)


def test_lone_surrogates_are_encoded() -> None:
    assert Namespace("m", cache_salt="\ud800").encode() != Namespace("m", cache_salt="\ud801").encode()
    assert tenant_name("\ud800") != tenant_name("\ud801")


def test_tenant_name_does_not_give_the_salt_away() -> None:
    assert tenant_name("") == ""
    assert "secret" not in tenant_name("secret")
    assert tenant_name("secret") == tenant_name("secret") != tenant_name("other")


def test_unknown_algorithm_is_refused() -> None:
    with pytest.raises(ConfigError, match="xxh3_128, sha256, not md5"):
        KeyChain("md5", b"", 1)
