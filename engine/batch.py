"""A packed batch: the new tokens of several sequences, one after the other, and where their KV lives."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from hicache.transfer.operation import LayerGate

__all__ = ["Batch", "Chunk", "SharedPrefix"]


class Chunk(NamedTuple):
    """One sequence's part of a step: tokens at positions [start, start + len(tokens)).

    tokens: int32 or int64 array (n,), n >= 1.
    start: tokens of this sequence whose KV is in its pages already.
    pages: int32 array of device slots, page i holding positions [i * page_size, (i + 1) * page_size); at least as many as
        start + n tokens need. Borrowed for the step.
    logits: at how many of its last tokens logits are wanted, >= 1.
    """

    tokens: np.ndarray
    start: int
    pages: np.ndarray
    logits: int = 1

    @property
    def end(self) -> int:
        """Context length after the step."""
        return self.start + len(self.tokens)


class SharedPrefix(NamedTuple):
    """Neighbouring one-token chunks [begin, end) of a batch whose first `pages` pages are the same slots, all of them full."""

    begin: int
    end: int
    pages: int


class Batch(NamedTuple):
    """What one forward computes. Chunks keep their order, and so do the logits that come back: each chunk's `logits` rows.

    shared: prefixes worth reading once for several chunks, from chunk 0 on without gaps; a backend may ignore them.
    gates: each layer passes them before it reads pages, since some are still being loaded back.
    """

    chunks: Sequence[Chunk]
    shared: Sequence[SharedPrefix] = ()
    gates: Sequence[LayerGate] = ()

    @property
    def num_tokens(self) -> int:
        """New tokens of all chunks."""
        return sum(len(chunk.tokens) for chunk in self.chunks)
