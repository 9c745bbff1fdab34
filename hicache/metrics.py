"""Counters of the cache, in a Prometheus registry of its own. Only counters are kept; gauges are read when somebody looks.

Ratios come besides, over a sliding window, from the same counts.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client import Metric

    from hicache.transfer.operation import Operation

__all__ = ["TIERS", "CacheMetrics", "TierHits"]

TIERS = ("device", "host", "disk")
WINDOW_S = 300.0
_COPY_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class TierHits(NamedTuple):
    """Tokens of one request's prompt that were reused, by the tier their pages were in when it arrived."""

    device: int = 0
    host: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        """All reused tokens."""
        return self.device + self.host + self.disk


class CacheMetrics(Collector):
    """What the cache counts. Incremented by the owner thread; may be read from any."""

    def __init__(self, gauges: Callable[[], Iterable[Metric]], clock: Callable[[], float]) -> None:
        self.registry = registry = CollectorRegistry()
        self._gauges = gauges
        self._clock = clock
        self._window: deque[tuple[float, int, TierHits]] = deque()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"hicache_{name}", text, labels, registry=registry)

        self.lookup_tokens = counter("lookup_tokens", "Prompt tokens looked up, once a request")
        self.hit_tokens = counter("hit_tokens", "Prompt tokens reused, by the tier they were in at arrival", "tier")
        self.miss_tokens = counter("miss_tokens", "Prompt tokens computed")
        self.recomputed_tokens = counter("recomputed_hit_tokens", "Tokens found in a tier but computed all the same", "reason")
        self.overlap_tokens = counter(
            "overlap_tokens", "Hit tokens of requests that computed the front while the back was read, by what was done", "what"
        )
        self.transfer_bytes = counter("transfer_bytes", "Bytes moved between tiers", "op")
        self.transfer_pages = counter("transfer_pages", "Pages moved between tiers", "op")
        self.operations = counter("operations", "Operations ended", "op", "state")
        self.evicted_pages = counter("evicted_pages", "Copies given up to make room", "tier")
        self.dropped_pages = counter("dropped_pages", "Pages lost from every tier, or not taken into one", "reason")
        self.store_errors = counter("store_errors", "Failures of the disk store", "kind")
        self.transfer_seconds = Histogram(
            "hicache_transfer_seconds", "Time from submission to end", ("op",), buckets=_COPY_BUCKETS, registry=registry
        )
        for tier in TIERS:
            self.hit_tokens.labels(tier)
        registry.register(self)

    def count_lookup(self, tokens: int, hits: TierHits) -> None:
        """Count one request's prompt: every token is a hit in one tier or a miss."""
        self.lookup_tokens.inc(tokens)
        self.miss_tokens.inc(tokens - hits.total)
        for tier, count in zip(TIERS, hits, strict=True):
            if count:
                self.hit_tokens.labels(tier).inc(count)
        now = self._clock()
        self._window.append((now, tokens, hits))
        self._trim(now)

    def count_operation(self, op: Operation, pages: int, page_bytes: int) -> None:
        """Count an operation that ended, with the pages it really moved."""
        self.operations.labels(op.kind, op.state).inc()
        self.transfer_seconds.labels(op.kind).observe(op.ended_s - op.started_s)
        if pages:
            self.transfer_pages.labels(op.kind).inc(pages)
            self.transfer_bytes.labels(op.kind).inc(pages * page_bytes)

    def hit_rates(self) -> dict[str, float]:
        """Share of the prompt tokens of the last minutes that each tier gave; 0 where nothing was asked."""
        self._trim(self._clock())
        asked = sum(tokens for _, tokens, _ in self._window)
        return {tier: sum(hits[i] for _, _, hits in self._window) / asked if asked else 0.0 for i, tier in enumerate(TIERS)}

    def as_numbers(self) -> dict[str, object]:
        """Every metric by name as a number, or as numbers by label; histograms by sum and count."""
        out: dict[str, object] = {}
        for family in self.registry.collect():
            for sample in family.samples:
                if sample.name.endswith(("_created", "_bucket")):
                    continue
                if not sample.labels:
                    out[sample.name] = sample.value
                    continue
                group = out.setdefault(sample.name, {})
                assert isinstance(group, dict)
                group["/".join(sample.labels.values())] = sample.value
        return out

    def collect(self) -> Iterator[Metric]:
        """Gauges, read now (called by the registry)."""
        rate = GaugeMetricFamily("hicache_tier_hit_rate", "Hit share of the last five minutes", labels=["tier"])
        for tier, share in self.hit_rates().items():
            rate.add_metric([tier], share)
        yield rate
        yield from self._gauges()

    def _trim(self, now: float) -> None:
        window = self._window
        while window and window[0][0] < now - WINDOW_S:
            window.popleft()
