"""Prefixes that are being computed: whoever needs one waits for it instead of computing it again.

A *pioneer* is a request that was admitted and has not finished its prompt. A *follower* waits until its pioneer's first pages
are in memory. It is told as soon as they are, or when its pioneer gives up, for whatever reason; then it is asked anew, and
may become the next pioneer. A pioneer waits for no follower, so nobody waits in a circle.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

from engine.request import Phase
from engine.schedule.trie import PromptTrie

if TYPE_CHECKING:
    from engine.request import Request

__all__ = ["Sharing"]


class Sharing:
    """Pioneers and their followers. A call costs a comparison of one prompt, whatever their numbers.

    least_tokens: what must be spared at least for a request to wait.
    """

    def __init__(self, page_size: int, least_tokens: int) -> None:
        self._least_pages = -(-least_tokens // page_size)
        self._pioneers = PromptTrie(page_size)
        self._followers: dict[Request, list[tuple[int, int, Request]]] = {}
        self._follows: dict[Request, Request] = {}

    def __len__(self) -> int:
        """Followers in all."""
        return len(self._follows)

    @property
    def pioneers(self) -> int:
        """Requests whose prompts are being computed."""
        return len(self._pioneers)

    def begin(self, request: Request) -> None:
        """An admitted request will compute its prompt."""
        self._pioneers.add(request, self._pioneers.full_pages(request.lease))

    def follow(self, request: Request, cached: int) -> bool:
        """Make a waiting request follow a pioneer, if one will compute pages after its `cached` ones; True if so."""
        lease = request.lease
        node, common = self._pioneers.walk(lease, self._pioneers.reusable_pages(lease))
        if common - cached < self._least_pages or common == 0:
            return False
        pioneer = next(self._pioneers.below(node))
        if pioneer.lease.shared >= common:
            return False
        self._wait(request, pioneer, common)
        return True

    def follow_load(self, request: Request) -> bool:
        """Make a waiting request follow one whose load-back brings pages that both need; True if there is one."""
        lease = request.lease
        node, common = self._pioneers.walk(lease, self._pioneers.reusable_pages(lease))
        pioneer = next(self._pioneers.below(node), None)
        if pioneer is None or common == 0 or pioneer.phase is not Phase.LOADING:
            return False
        self._wait(request, pioneer, 1)
        return True

    def progressed(self, request: Request) -> list[Request]:
        """A pioneer has shared more pages; returns the followers that waited for no more than these."""
        heap, told = self._followers.get(request), []
        while heap and heap[0][0] <= request.lease.shared:
            told.append(heappop(heap)[2])
        return self._released(request, told)

    def end(self, request: Request) -> list[Request]:
        """A request has finished its prompt, or will not; returns its followers. Idempotent."""
        self._pioneers.discard(request)
        told = [follower for _, _, follower in sorted(self._followers.pop(request, ()))]
        return self._released(request, told)

    def forget(self, request: Request) -> None:
        """A follower is gone. Others are ignored."""
        self._follows.pop(request, None)

    def _wait(self, request: Request, pioneer: Request, pages: int) -> None:
        self._follows[request] = pioneer
        heappush(self._followers.setdefault(pioneer, []), (pages, request.serial, request))

    def _released(self, pioneer: Request, told: list[Request]) -> list[Request]:
        """Those of `told` that still follow, each once, and no longer do."""
        return [follower for follower in told if self._follows.get(follower) is pioneer and self._follows.pop(follower)]
