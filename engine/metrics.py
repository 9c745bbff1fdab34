"""Counters of the engine loop, beside the cache's in one registry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import CollectorRegistry, Metric

    from engine.scheduler import Scheduler

__all__ = ["EngineMetrics"]


class EngineMetrics(Collector):
    """What the loop counts; queue lengths are read when somebody looks."""

    def __init__(self, registry: CollectorRegistry, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.prompt_tokens = Counter("hicache_prompt_tokens", "Prompt tokens taken in", registry=registry)
        self.generated_tokens = Counter("hicache_generated_tokens", "Tokens sampled", registry=registry)
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Requests by phase, and how often one had to give way (called by the registry)."""
        requests = GaugeMetricFamily("hicache_requests", "Requests in the engine by phase", labels=["phase"])
        for phase in ("waiting", "loading", "running"):
            requests.add_metric([phase], len(getattr(self._scheduler, phase)))
        yield requests
        yield CounterMetricFamily(
            "hicache_retracted_requests", "Requests sent back to wait for want of pages", value=self._scheduler.retracted
        )
