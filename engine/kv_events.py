"""Publishes placement events over ZeroMQ, in the form that routers of vLLM and SGLang read.

A message has three parts: topic, sequence number (8 bytes, big-endian), and a msgpack batch [seconds, [event, ...]]. Events are
arrays that begin with their kind: BlockStored and BlockRemoved. Hashes are the first 8 bytes of page keys, as integers.
"""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING, Literal

import msgspec
import zmq

from hicache.errors import ConfigError
from hicache.events import PageStored

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.events import PageRemoved, Tier

__all__ = ["BlockRemoved", "BlockStored", "EventBatch", "EventsConfig", "KvEventPublisher"]

logger = logging.getLogger(__name__)

MEDIUM: dict[Tier, str] = {"device": "GPU", "host": "CPU"}
HIGH_WATER_MARK = 100_000
"""Batches kept for a subscriber that does not keep up; later ones are dropped, and it sees the gap in the sequence."""


class EventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of `--kv-events-config`."""

    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"
    topic: str = ""

    @classmethod
    def parse(cls, text: str) -> EventsConfig | None:
        """Read JSON; None for "" and for the null publisher. Raises ConfigError."""
        if not text:
            return None
        try:
            config = msgspec.convert(json.loads(text), cls)
        except ValueError as error:  # JSON and msgspec errors are ValueErrors
            raise ConfigError(f"--kv-events-config: {error}") from None
        return None if config.publisher == "null" else config


class BlockStored(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Pages that can be found now, each the child of the one before."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str


class BlockRemoved(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Pages that can't be found any more."""

    block_hashes: list[int]
    medium: str


class EventBatch(msgspec.Struct, array_like=True, frozen=True):
    """What one message carries."""

    ts: float
    events: list[BlockStored | BlockRemoved]


class KvEventPublisher:
    """A PUB socket; never blocks. Used by the loop's thread."""

    def __init__(self, config: EventsConfig, page_size: int) -> None:
        """Bind. Raises ConfigError."""
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.PUB)
        self._socket.set_hwm(HIGH_WATER_MARK)
        self._socket.linger = 0
        try:
            self._socket.bind(config.endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"--kv-events-config: {config.endpoint}: {error.strerror}") from error
        self._topic = config.topic.encode()
        self._page_size = page_size
        self._sequence = 0

    def publish(self, events: Sequence[PageStored | PageRemoved]) -> None:
        """Send events, in order, as one batch."""
        if not events:
            return
        batch = EventBatch(time.time(), [self._block(event) for event in events])
        self._socket.send_multipart((self._topic, self._sequence.to_bytes(8, "big"), msgspec.msgpack.encode(batch)))
        self._sequence += 1

    def close(self) -> None:
        """Release the socket. Idempotent."""
        self._socket.close()
        self._context.term()

    def _block(self, event: PageStored | PageRemoved) -> BlockStored | BlockRemoved:
        if not isinstance(event, PageStored):
            return BlockRemoved([_number(event.key)], MEDIUM[event.tier])
        ref = event.ref
        tokens = memoryview(ref.tokens).cast("i").tolist()
        parent = None if ref.parent_key == ref.namespace else _number(ref.parent_key)
        return BlockStored([_number(ref.key)], parent, tokens, self._page_size, None, MEDIUM[event.tier])


def _number(key: bytes) -> int:
    return int.from_bytes(key[:8], "big")
