"""What paged attention kernels are told about a step: which pages each query may see, as flat arrays.

A kernel takes sequences one after the other. `indptr` arrays say where each begins: sequence i has queries
[qo_indptr[i], qo_indptr[i + 1]) and pages kv_indices[kv_indptr[i] : kv_indptr[i + 1]], the last of which holds
last_page_len[i] tokens. Queries are the last tokens of their sequence, so that causality and windows need no positions.

When decodes share the beginning of their contexts, that is read once for all of them: a cascade of two levels, the shared
prefix and what is each sequence's own, attended separately and merged.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.batch import Batch, SharedPrefix

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from engine.batch import Chunk

    Ints = npt.NDArray[np.int32]

__all__ = ["PagedTables", "Placement", "arrange", "own_tables", "placement", "plan_tables", "prefix_tables"]


class PagedTables(NamedTuple):
    """Sequences of a step as a paged kernel takes them, int32 each.

    qo_indptr and kv_indptr (n + 1,), kv_indices (kv_indptr[-1],), last_page_len (n,): 1 to page_size, 0 without pages.
    """

    qo_indptr: Ints
    kv_indptr: Ints
    kv_indices: Ints
    last_page_len: Ints

    @property
    def rows(self) -> int:
        """Queries of all sequences."""
        return int(self.qo_indptr[-1])


class Placement(NamedTuple):
    """Page slot and offset in the page of each new token, (T,) int64 each."""

    pages: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]


def placement(chunks: Sequence[Chunk], page_size: int) -> Placement:
    """Find where each new token's KV goes."""
    pages, offsets = [], []
    for chunk in chunks:
        positions = np.arange(chunk.start, chunk.end)
        pages.append(chunk.pages[positions // page_size])
        offsets.append(positions % page_size)
    return Placement(np.concatenate(pages).astype(np.int64), np.concatenate(offsets))


def plan_tables(chunks: Sequence[Chunk], page_size: int, window: int | None) -> PagedTables:
    """All that the queries of each chunk see. With a window, pages that no query of a chunk sees are left out."""
    firsts = [_first_page(chunk.start, window, page_size) for chunk in chunks]
    return _tables(chunks, firsts, page_size)


def own_tables(batch: Batch, page_size: int) -> PagedTables:
    """What the queries see besides the shared prefixes: the lower level of a cascade, for all rows of the batch."""
    firsts = [0] * len(batch.chunks)
    for group in batch.shared:
        firsts[group.begin : group.end] = [group.pages] * (group.end - group.begin)
    return _tables(batch.chunks, firsts, page_size)


def prefix_tables(batch: Batch, page_size: int, groups: int) -> PagedTables:
    """The shared prefixes: the upper level of a cascade, for rows [0, batch.shared[-1].end). Every query sees all of one.

    groups: how many sequences the arrays describe; those beyond the batch's have neither queries nor pages.
    """
    shared = batch.shared
    assert len(shared) <= groups, f"{len(shared)} prefixes for {groups} places"
    assert all(a.end == b.begin for a, b in itertools.pairwise(shared)), "shared prefixes leave gaps"
    pages = [batch.chunks[group.begin].pages[: group.pages] for group in shared]
    spare = groups - len(shared)
    return PagedTables(
        _indptr([group.end - group.begin for group in shared] + [0] * spare),
        _indptr([group.pages for group in shared] + [0] * spare),
        np.concatenate(pages) if pages else np.empty(0, np.int32),
        np.array([page_size] * len(shared) + [0] * spare, np.int32),
    )


def arrange(batch: Batch, page_size: int, least_tokens: int, groups: int) -> tuple[Batch, npt.NDArray[np.int64] | None]:
    """Find the prefixes of a batch of decodes that are worth a cascade, and put those that share one side by side.

    least_tokens: tokens of reading that a prefix must save. groups: how many prefixes at most. Returns the batch, with
    `shared` set, and where each chunk of the given batch has gone; the batch as it was and None if nothing is worth it.
    """
    heads = [chunk.pages[: chunk.start // page_size] for chunk in batch.chunks]
    found = [group for group in _split(list(range(len(heads))), 0, heads) if group.saved * page_size >= least_tokens]
    if not found:
        return batch, None
    found = sorted(found, key=lambda group: -group.saved)[:groups]
    order = [row for group in found for row in group.rows]
    order += sorted(set(range(len(heads))) - set(order))
    shared, begin = [], 0
    for group in found:
        shared.append(SharedPrefix(begin, begin + len(group.rows), group.pages))
        begin += len(group.rows)
    return batch._replace(chunks=[batch.chunks[row] for row in order], shared=shared), np.argsort(np.array(order))


class _Group(NamedTuple):
    """Rows that share their first `pages` pages."""

    rows: list[int]
    pages: int

    @property
    def saved(self) -> int:
        """Pages that need not be read, since another row of the group reads them."""
        return (len(self.rows) - 1) * self.pages


def _split(rows: list[int], depth: int, heads: list[Ints]) -> list[_Group]:
    """Divide rows that share `depth` pages into the groups that together save most."""
    branches: dict[int, list[int]] = {}
    for row in rows:
        if len(heads[row]) > depth:
            branches.setdefault(int(heads[row][depth]), []).append(row)
    out = []
    for members in branches.values():
        if len(members) > 1:
            whole = _Group(members, _common(members, depth, heads))
            parts = _split(members, whole.pages, heads)
            out += [whole] if whole.saved >= sum(part.saved for part in parts) else parts
    return out


def _common(rows: list[int], depth: int, heads: list[Ints]) -> int:
    """How many pages all rows share; they are known to share `depth`."""
    first = heads[rows[0]]
    length = min(len(heads[row]) for row in rows)
    for row in rows[1:]:
        differ = np.flatnonzero(first[depth:length] != heads[row][depth:length])
        if len(differ):
            length = depth + int(differ[0])
    return length


def _tables(chunks: Sequence[Chunk], firsts: Sequence[int], page_size: int) -> PagedTables:
    """Describe chunks that see their pages from `firsts` on."""
    pages = [chunk.pages[first : -(-chunk.end // page_size)] for chunk, first in zip(chunks, firsts, strict=True)]
    return PagedTables(
        _indptr([len(chunk.tokens) for chunk in chunks]),
        _indptr([len(run) for run in pages]),
        np.concatenate(pages).astype(np.int32, copy=False),
        np.array([(chunk.end - 1) % page_size + 1 for chunk in chunks], np.int32),
    )


def _first_page(start: int, window: int | None, page_size: int) -> int:
    """The first page that a query at `start` sees."""
    return 0 if window is None else max(0, start + 1 - window) // page_size


def _indptr(lengths: Sequence[int]) -> Ints:
    out = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=out[1:])
    return out
