"""Messages between the HTTP server's process and the engine loop's process.

Plain msgspec structs, sent as msgpack over two ZeroMQ pipes (one each way). The loop never waits for the server and the
server never touches the loop's state: what is not in a message does not cross.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

__all__ = [
    "AbortRequest",
    "CacheHint",
    "CachedTokens",
    "ControlReply",
    "ControlRequest",
    "EngineDown",
    "EngineReady",
    "FinishReason",
    "GenerateRequest",
    "GrammarKind",
    "GrammarSpec",
    "PinHint",
    "RequestFailed",
    "SamplingParams",
    "Shutdown",
    "ToEngine",
    "ToServer",
    "TokenLogprobs",
    "TokensOut",
    "decode_to_engine",
    "decode_to_server",
    "encode",
]

FinishReason = Literal["stop", "length", "abort"]
GrammarKind = Literal["json_schema", "regex", "ebnf"]


class GrammarSpec(msgspec.Struct, frozen=True):
    """A grammar that an answer is held to. `source`: a JSON schema as text, a regular expression, or an EBNF (GBNF)."""

    kind: GrammarKind
    source: str


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one sequence is sampled. `temperature` 0 is greedy; `top_k` -1 is off; `seed` None is unseeded.

    max_new_tokens: 0 computes the prompt and ends.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()  # besides the model's own end tokens
    ignore_eos: bool = False
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    min_new_tokens: int = 0
    grammar: GrammarSpec | None = None


class PinHint(msgspec.Struct, frozen=True):
    """Keep the first `tokens` tokens of a prompt where they are for `ttl_s` seconds, once they are computed."""

    tokens: int
    ttl_s: float


class GenerateRequest(msgspec.Struct, tag=True, frozen=True):
    """One sequence to generate (`n` > 1 is that many requests; they share their prompt's pages)."""

    rid: str
    input_ids: list[int]
    sampling: SamplingParams
    cache_salt: str = ""
    extra_key: str = ""
    lora: str = ""
    priority: int = 0
    routing_key: str = ""  # what `--schedule-policy routing-key` groups by
    top_logprobs: int | None = None  # None: no log-probabilities; 0: of the sampled tokens; k: and of the k likeliest
    pin: PinHint | None = None
    score_from: int | None = None  # log-probabilities of prompt tokens after this position too; limits reuse to it


class AbortRequest(msgspec.Struct, tag=True, frozen=True):
    """Forget a request wherever it is. Unknown ids are ignored. No further message comes for it."""

    rid: str


class ControlRequest(msgspec.Struct, tag=True, frozen=True):
    """Ask the loop for something between two steps; answered by one ControlReply with the same id.

    op: "metrics" (Prometheus text), "stats" (the same as a dict), "flush" (forget all cached pages that nobody uses), "info";
    "storage_info", "storage_clear", "storage_detach", "storage_attach" (args: flags that differ from the server's own).
    """

    id: str
    op: str
    args: dict[str, Any] = {}


class CacheHint(msgspec.Struct, tag=True, frozen=True):
    """Bring a prefix up, keep it for a while, or let it go; answered by one ControlReply with the same id."""

    id: str
    op: Literal["prefetch", "pin", "demote"]
    input_ids: list[int]
    cache_salt: str = ""
    extra_key: str = ""
    ttl_s: float = 0.0


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """Finish running requests for at most `drain_s`, flush the cache down to disk, answer EngineDown and exit."""

    drain_s: float = 5.0


class CachedTokens(msgspec.Struct, frozen=True):
    """Prompt tokens that were reused, by the tier their pages were in when the request arrived."""

    device: int = 0
    host: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        """All reused tokens."""
        return self.device + self.host + self.disk


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probability of a sampled token, and of the likeliest ones at its place as (token id, log-probability)."""

    logprob: float
    top: list[tuple[int, float]] = []


class TokensOut(msgspec.Struct, tag=True, frozen=True):
    """New tokens of a request, in order, exactly once. The last message of a request has a `finish_reason`.

    prompt_logprobs: in the first message of a request with `score_from`: of the prompt tokens after that position.
    """

    rid: str
    token_ids: list[int]
    prompt_tokens: int
    cached: CachedTokens
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None


class RequestFailed(msgspec.Struct, tag=True, frozen=True):
    """A request ended without an answer. `status` is an HTTP status: 400 bad input, 503 no capacity, 500 our fault."""

    rid: str
    message: str
    status: int = 500


class ControlReply(msgspec.Struct, tag=True, frozen=True):
    """Answers a ControlRequest; when it could not be done, `error` is set instead of `value`, and `status` an HTTP status."""

    id: str
    value: Any = None
    error: str | None = None
    status: int = 500


class EngineReady(msgspec.Struct, tag=True, frozen=True):
    """The loop takes requests now. `info` says what runs: model, context length, tiers, policies, store path."""

    info: dict[str, Any]


class EngineDown(msgspec.Struct, tag=True, frozen=True):
    """The loop is gone; `error` says why unless it was asked to. `refused`: the configuration or model was refused."""

    error: str | None = None
    refused: bool = False


ToEngine = GenerateRequest | AbortRequest | ControlRequest | CacheHint | Shutdown
ToServer = TokensOut | RequestFailed | ControlReply | EngineReady | EngineDown

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_to_server = msgspec.msgpack.Decoder(ToServer)


def encode(message: ToEngine | ToServer) -> bytes:
    """Encode one message."""
    return _encoder.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    """Decode a message sent to the loop. Raises msgspec.DecodeError."""
    return _to_engine.decode(data)


def decode_to_server(data: bytes) -> ToServer:
    """Decode a message sent to the server. Raises msgspec.DecodeError."""
    return _to_server.decode(data)
