"""What the server process measures; the engine's own metrics are joined to it at `GET /metrics`."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

__all__ = ["ServerMetrics"]

_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_INTER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5)
_E2E_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class ServerMetrics:
    """Counters and histograms of one server, in a registry of its own."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.http_requests = Counter(
            "hicache_http_requests", "HTTP requests answered.", ("method", "path", "status"), registry=registry
        )
        self.http_in_flight = Gauge("hicache_http_in_flight", "HTTP requests being answered.", registry=registry)
        self.disconnects = Counter("hicache_client_disconnects", "Clients gone before their answer.", registry=registry)
        self.sequences = Counter(
            "hicache_sequences", "Sequences ended, by finish reason or error.", ("reason",), registry=registry
        )
        self.first_token = Histogram(
            "hicache_ttft_seconds",
            "From a request's arrival to its first token.",
            buckets=_FIRST_TOKEN_S,
            registry=registry,
        )
        self.inter_token = Histogram(
            "hicache_inter_token_seconds", "Between two tokens of a sequence.", buckets=_INTER_TOKEN_S, registry=registry
        )
        self.e2e = Histogram(
            "hicache_e2e_seconds", "From a request's arrival to its last token.", buckets=_E2E_S, registry=registry
        )

    def render(self) -> str:
        """Prometheus text."""
        return generate_latest(self._registry).decode()
