"""A request as the scheduler sees it: from arrival to its last token."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from engine.messages import GenerateRequest, TokenLogprobs
    from engine.sampler import SamplingState
    from hicache.lease import Lease
    from hicache.transfer.operation import LayerGate

__all__ = ["Phase", "Request"]


class Phase(enum.Enum):
    """Where a request is."""

    WAITING = "waiting"
    LOADING = "loading"  # admitted, its pages on their way to the device
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence. Owned by the scheduler.

    limit: tokens, prompt included, at which it ends whatever happens (max_new_tokens, context length and pool size).
    computed: leading tokens whose KV is in its pages. serial: order of arrival. arrived_s: by the scheduler's clock.
    noted: what the schedule policy wrote down when it first saw the request.
    prompt_logprobs: of prompt tokens, as far as they are scored; None unless asked for.
    gate: what the layers of its next step wait by, if it was started before its pages had come.
    """

    message: GenerateRequest
    lease: Lease
    limit: int
    serial: int
    sampling_state: SamplingState
    phase: Phase = Phase.WAITING
    computed: int = 0
    generated: int = 0
    arrived_s: float = 0.0
    noted: float | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    gate: LayerGate | None = None

    @property
    def rid(self) -> str:
        """The id the client's messages carry."""
        return self.message.rid

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return self.lease.num_tokens

    @property
    def uncomputed(self) -> int:
        """Tokens that must be computed before the next one can be sampled; 1 while decoding."""
        return self.lease.num_tokens - self.computed

    @property
    def unscored_from(self) -> int:
        """First position whose logits must still be seen for the prompt's log-probabilities; the tokens' end if none."""
        if self.prompt_logprobs is not None and self.message.score_from is not None:
            position = self.message.score_from + len(self.prompt_logprobs)
            if position < self.lease.prompt_tokens - 1:
                return position
        return self.lease.num_tokens

    def tokens(self, start: int, end: int) -> npt.NDArray[np.int32]:
        """Own copy of the token ids at [start, end)."""
        return np.frombuffer(bytes(self.lease.tokens[4 * start : 4 * end]), np.int32)
