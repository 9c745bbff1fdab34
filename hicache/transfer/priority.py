"""Who computes first: copies that nobody waits for give way to the model, which on a CPU needs every core at once."""

from __future__ import annotations

import contextlib
import os
import threading

__all__ = ["give_way"]

NICENESS = 10


def give_way() -> None:
    """Lower the calling thread's share of a busy processor; nothing changes while there is an idle one. Linux only."""
    with contextlib.suppress(OSError, AttributeError):
        me = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, me, max(NICENESS, os.getpriority(os.PRIO_PROCESS, me)))
