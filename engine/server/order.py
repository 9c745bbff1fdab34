"""One OpenAI request as the sequences that it asks for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from engine.messages import CachedTokens, GenerateRequest
from engine.server.responses import usage_of
from engine.server.service import Job
from engine.server.values import as_stops

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.messages import PinHint, SamplingParams
    from engine.server.responses import Usage
    from engine.server.schemas import OpenAIBody
    from engine.server.service import Answer, Piece, Service

__all__ = ["Order", "counted"]


@dataclass(frozen=True)
class Order:
    """The sequences of one OpenAI request: `n` for each prompt, those of a prompt next to each other."""

    service: Service
    id: str
    body: OpenAIBody
    prompts: Sequence[list[int]]
    max_new_tokens: int
    top_logprobs: int | None
    score_from: int | None = None
    pin: PinHint | None = None
    routing_key: str = ""  # where the body has none

    @property
    def n(self) -> int:
        """Answers a prompt."""
        return self.body.n or 1

    @cached_property
    def jobs(self) -> list[Job]:
        """One job a sequence. Raises ApiError for more than can be queued, before any is made."""
        self.service.check_room(len(self.prompts) * self.n)
        return [self._job(ids, p * self.n + i, i) for p, ids in enumerate(self.prompts) for i in range(self.n)]

    @cached_property
    def _sampling(self) -> SamplingParams:
        """How the first answer to each prompt is sampled."""
        return self.body.sampling(self.max_new_tokens)

    def usage(self, answers: Sequence[Answer]) -> Usage:
        """Tokens of all sequences; a prompt and what was reused of it count once."""
        firsts = answers[:: self.n]
        cached = CachedTokens(
            sum(answer.cached.device for answer in firsts),
            sum(answer.cached.host for answer in firsts),
            sum(answer.cached.disk for answer in firsts),
        )
        prompt_tokens = sum(len(ids) for ids in self.prompts)
        completion_tokens = sum(len(answer.token_ids) for answer in answers)
        return usage_of(prompt_tokens, completion_tokens, cached, by_tier=self.service.config.enable_cache_report)

    def _job(self, ids: list[int], index: int, sibling: int) -> Job:
        body, sampling = self.body, self._sampling
        if sampling.seed is not None and sibling:  # the same seed would give the same answer n times
            sampling = msgspec.structs.replace(sampling, seed=_next_seed(sampling.seed, sibling))
        request = GenerateRequest(
            rid=f"{self.id}-{index}",
            input_ids=ids,
            sampling=sampling,
            cache_salt=body.cache_salt,
            extra_key=body.extra_key,
            priority=body.priority,
            routing_key=body.routing_key or self.routing_key,
            top_logprobs=self.top_logprobs,
            score_from=self.score_from,
            pin=self.pin if sibling == 0 else None,
        )
        return Job(request, as_stops(body.stop), body.skip_special_tokens)


def _next_seed(seed: int, sibling: int) -> int:
    """A seed for a sibling, within 63 bits."""
    return (seed + sibling) & (2**63 - 1)


def counted(piece: Piece) -> Piece:
    """A piece without what only a whole answer needs."""
    return piece._replace(text="", logprobs=None, prompt_logprobs=None)
