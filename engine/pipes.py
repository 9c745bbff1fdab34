"""The engine's end of the pipes to the HTTP server's process.

Messages are small and the queues unbounded, so neither side ever waits to send. If the server's process dies, the engine reads
a Shutdown: it is never orphaned.
"""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING

import zmq

from engine.messages import Shutdown, decode_to_engine, encode

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from engine.messages import ToEngine, ToServer

__all__ = ["LINGER_MS", "EnginePipes"]

LINGER_MS = 2000
"""How long a closing socket may try to deliver what was sent."""


class EnginePipes:
    """Receives ToEngine and sends ToServer. Made and used by the loop's thread only; never blocks except in `wait`."""

    def __init__(self, to_engine: str, to_server: str) -> None:
        self._context = zmq.Context(io_threads=1)
        self._in = self._context.socket(zmq.PULL)
        self._out = self._context.socket(zmq.PUSH)
        for socket in (self._in, self._out):
            socket.set_hwm(0)
            socket.linger = LINGER_MS
        self._in.connect(to_engine)
        self._out.connect(to_server)
        self._poller = zmq.Poller()
        self._poller.register(self._in, zmq.POLLIN)
        parent = multiprocessing.parent_process()
        self._parent = None if parent is None else parent.sentinel
        if self._parent is not None:
            self._poller.register(self._parent, zmq.POLLIN)

    def receive(self) -> list[ToEngine]:
        """All messages that have arrived, in order. Returns at once; a Shutdown(0) stands for the death of the server."""
        messages: list[ToEngine] = []
        ready = dict(self._poller.poll(0))
        if self._in in ready:
            while True:
                try:
                    messages.append(decode_to_engine(self._in.recv(zmq.NOBLOCK)))
                except zmq.Again:
                    break
        if self._parent is not None and self._parent in ready:
            messages.append(Shutdown(drain_s=0.0))
        return messages

    def wait(self, timeout_s: float) -> bool:
        """Sleep until a message is there or `timeout_s` is over; True if `receive` has something."""
        return bool(self._poller.poll(max(0, round(timeout_s * 1000))))

    def send(self, message: ToServer) -> None:
        """Queue one message; never blocks."""
        self._out.send(encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        """Deliver what was sent, for at most LINGER_MS, and release the sockets. Idempotent."""
        self._in.close()
        self._out.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
