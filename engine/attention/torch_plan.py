"""Index work of a step that all layers share: where to write, which pages to gather, what to mask.

A step has two kinds of segments. A *prompt segment* is one chunk of several tokens; it attends with its own mask, or causally
without any when it starts at 0. A *decode group* is a set of one-token chunks of similar length, attended together over
gathered keys padded to the longest. Windows differ between layers, so segments exist once for each distinct window.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.batch import Batch, Chunk

__all__ = ["DecodeGroup", "PromptSegment", "Segments", "WriteIndex", "fresh_tails", "plan_segments", "plan_writes"]

GROUP_TOKENS = 16_384
"""Most gathered tokens of a decode group: its keys and values should stay in the CPU's caches."""

PADDING = 1.25
"""Most gathered tokens of a decode group, as a multiple of what its sequences need."""


class WriteIndex(NamedTuple):
    """Page slot and offset in the page of each new token, (T,) int64 each."""

    pages: torch.Tensor
    offsets: torch.Tensor


class PromptSegment(NamedTuple):
    """Rows [begin, end) of the packed step, one sequence.

    pages: int64 slots to gather, or None to attend to the step's own keys (the segment starts at 0).
    keys: half-open range of gathered tokens that take part. mask: float (rows, keys) to add, or None for plain causal.
    """

    begin: int
    end: int
    pages: torch.Tensor | None
    keys: tuple[int, int]
    mask: torch.Tensor | None


class DecodeGroup(NamedTuple):
    """One row each of several sequences.

    rows: int64 (B,) rows of the packed step, or None if they are all rows in order. pages: int64 (B * P,) slots to gather.
    keys: range of gathered tokens of each sequence that take part. mask: float (B, 1, 1, keys) to add, or None.
    """

    rows: torch.Tensor | None
    sequences: int
    pages: torch.Tensor
    keys: tuple[int, int]
    mask: torch.Tensor | None


class Segments(NamedTuple):
    """What the layers of one window attend to."""

    prompts: list[PromptSegment]
    decodes: list[DecodeGroup]


def plan_writes(batch: Batch, page_size: int, device: torch.device) -> WriteIndex:
    """Find the slot and offset of each new token."""
    pages, offsets = [], []
    for chunk in batch.chunks:
        positions = np.arange(chunk.start, chunk.end)
        pages.append(chunk.pages[positions // page_size])
        offsets.append(positions % page_size)
    return WriteIndex(_index(np.concatenate(pages), device), _index(np.concatenate(offsets), device))


def fresh_tails(batch: Batch, page_size: int, device: torch.device) -> torch.Tensor | None:
    """List the last pages that this step begins and doesn't fill: their tails hold another sequence's left-overs."""
    fresh = [
        int(chunk.pages[chunk.end // page_size])
        for chunk in batch.chunks
        if chunk.end % page_size and chunk.start <= chunk.end // page_size * page_size
    ]
    return torch.tensor(fresh, device=device) if fresh else None


def plan_segments(batch: Batch, page_size: int, window: int | None, device: torch.device, dtype: torch.dtype) -> Segments:
    """Split a step into segments for layers of `window`; masks come in `dtype`."""
    prompts, decodes, begin = [], [], 0
    for chunk in batch.chunks:
        if len(chunk.tokens) > 1:
            prompts.append(_plan_prompt(chunk, begin, page_size, window, device, dtype))
        else:
            decodes.append((begin, chunk))
        begin += len(chunk.tokens)
    groups = [
        _plan_group(members, len(batch.chunks), page_size, window, device, dtype)
        for members in _group(decodes, page_size, window)
    ]
    return Segments(prompts, groups)


def _plan_prompt(
    chunk: Chunk, begin: int, page_size: int, window: int | None, device: torch.device, dtype: torch.dtype
) -> PromptSegment:
    """Plan a chunk of several tokens."""
    end = begin + len(chunk.tokens)
    first_key = _first_key(chunk.start, window)
    banded = window is not None and chunk.end > window
    if chunk.start == 0:
        mask = _band(chunk, 0, window, device, dtype) if banded else None
        return PromptSegment(begin, end, None, (0, chunk.end), mask)
    pages, base = _pages(chunk, first_key, page_size)
    mask = _band(chunk, first_key, window, device, dtype)
    return PromptSegment(begin, end, _index(pages, device), (first_key - base, chunk.end - base), mask)


def _plan_group(
    members: list[tuple[int, Chunk]],
    rows: int,
    page_size: int,
    window: int | None,
    device: torch.device,
    dtype: torch.dtype,
) -> DecodeGroup:
    """Plan one-token chunks that are attended together; `rows` is the number of chunks of the step."""
    spans = [_first_key(chunk.start, window) for _, chunk in members]
    gathered = [_pages(chunk, first, page_size) for (_, chunk), first in zip(members, spans, strict=True)]
    width = max(len(pages) for pages, _ in gathered)
    index = np.stack([np.pad(pages, (0, width - len(pages)), mode="edge") for pages, _ in gathered])
    lows = np.array([first - base for first, (_, base) in zip(spans, gathered, strict=True)])
    highs = np.array([chunk.end - base for (_, chunk), (_, base) in zip(members, gathered, strict=True)])
    keys = (int(lows.min()), int(highs.max()))
    mask = None
    if (lows != keys[0]).any() or (highs != keys[1]).any():
        at = np.arange(*keys)
        hidden = (at < lows[:, None]) | (at >= highs[:, None])
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(torch.from_numpy(hidden), -torch.inf)
        mask = mask[:, None, None].to(device)
    order = [row for row, _ in members]
    whole = order == list(range(rows))
    return DecodeGroup(
        None if whole else torch.tensor(order, device=device), len(order), _index(index.reshape(-1), device), keys, mask
    )


def _group(decodes: list[tuple[int, Chunk]], page_size: int, window: int | None) -> list[list[tuple[int, Chunk]]]:
    """Put sequences of similar length together: few calls, little padding. Groups keep the order of rows."""

    def width(item: tuple[int, Chunk]) -> int:
        return item[1].end - _first_key(item[1].start, window)

    groups: list[list[tuple[int, Chunk]]] = []
    needed = 0
    for item in sorted(decodes, key=width, reverse=True):
        if groups:
            padded = (len(groups[-1]) + 1) * max(width(groups[-1][0]), page_size)
            if padded <= GROUP_TOKENS and padded <= PADDING * (needed + width(item)) + 64:
                groups[-1].append(item)
                needed += width(item)
                continue
        groups.append([item])
        needed = width(item)
    return [sorted(group, key=lambda item: item[0]) for group in groups]


def _first_key(start: int, window: int | None) -> int:
    """First position that a query at `start` sees."""
    return 0 if window is None else max(0, start + 1 - window)


def _pages(chunk: Chunk, first_key: int, page_size: int) -> tuple[np.ndarray, int]:
    """Pages that hold positions [first_key, end), and the position the first of them begins at."""
    first = first_key // page_size
    return chunk.pages[first : -(-chunk.end // page_size)], first * page_size


def _band(chunk: Chunk, first_key: int, window: int | None, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Float mask (queries, keys from first_key): 0 where a query sees a key, -inf elsewhere."""
    queries = torch.arange(chunk.start, chunk.end, device=device)[:, None]
    keys = torch.arange(first_key, chunk.end, device=device)[None]
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)


def _index(values: Sequence[int] | np.ndarray, device: torch.device) -> torch.Tensor:
    """An int64 index tensor on the device."""
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(device)
