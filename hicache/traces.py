"""Block-hash traces: what requests asked for, as ids of blocks of tokens, one request a line of JSON.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ..., 60]}

`timestamp` is in milliseconds, `hash_ids` names the blocks of the prompt from its start, the last one perhaps partly filled.
The format is that of the traces published with Mooncake (Qin et al., arXiv 2407.00079).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import numpy as np

from hicache.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import numpy.typing as npt

    Ids = npt.NDArray[np.int32]

__all__ = ["Request", "Trace", "read_trace"]


class Request(NamedTuple):
    """One request. `blocks`: int32, one id a block; two requests share an id only where their whole prefix is the same."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: Ids


class Trace(NamedTuple):
    """Requests in the order of their arrival. `unique_blocks`: ids are [1, unique_blocks]."""

    requests: list[Request]
    unique_blocks: int

    @property
    def blocks(self) -> int:
        """Block references in all."""
        return sum(len(request.blocks) for request in self.requests)


class _Prefixes:
    """Numbers block prefixes: a block is told by its hash and all that comes before it."""

    def __init__(self) -> None:
        self.count = 0
        self._ids: dict[tuple[int, object], int] = {}

    def number(self, hashes: Iterable[object]) -> Ids:
        at, out, ids = 0, [], self._ids
        for each in hashes:
            known = ids.get((at, each))
            if known is None:
                self.count += 1
                known = ids[at, each] = self.count
            out.append(known)
            at = known
        return np.array(out, np.int32)


def read_trace(path: Path, limit: int | None = None) -> Trace:
    """Read a trace, or its first `limit` requests. Raises ConfigError for a file that is none."""
    prefixes = _Prefixes()
    requests: list[Request] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if limit is not None and len(requests) == limit:
                    break
                if line.strip():
                    requests.append(_request(line, number, path, prefixes))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    if not requests:
        raise ConfigError(f"{path}: no requests")
    if not prefixes.count:
        raise ConfigError(f"{path}: no request has a block")
    requests.sort(key=lambda request: request.arrival_s)
    return Trace(requests, prefixes.count)


class _Line(msgspec.Struct):
    """A line as it is written. Times are in milliseconds, lengths in tokens."""

    timestamp: float
    input_length: Annotated[int, msgspec.Meta(ge=0)]
    hash_ids: list[int | str]
    output_length: Annotated[int, msgspec.Meta(ge=0)] = 0


def _request(line: bytes, number: int, path: Path, prefixes: _Prefixes) -> Request:
    try:
        raw = msgspec.json.decode(line, type=_Line)
    except (ValueError, RecursionError) as error:  # msgspec's errors, and bytes that are no text
        raise ConfigError(f"{path}, line {number}: {error}") from None
    return Request(raw.timestamp / 1000, raw.input_length, raw.output_length, prefixes.number(raw.hash_ids))
