"""Gauges: what is read when somebody looks, and never kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric

    from hicache.tiers import Tiers

__all__ = ["pool_gauges"]


def pool_gauges(t: Tiers) -> Iterator[Metric]:
    """What the slots of each tier are used for, and what is in flight."""
    pages = GaugeMetricFamily("hicache_pages", "Slots of a tier by what holds them", labels=["tier", "state"])
    private = t.device.owned - t.tree.device_pages
    pages.add_metric(["device", "free"], t.device.free)
    pages.add_metric(["device", "pinned"], t.tree.pinned_device_pages)
    pages.add_metric(["device", "cached"], t.tree.device_pages - t.tree.pinned_device_pages)
    pages.add_metric(["device", "private"], private)
    pages.add_metric(["host", "free"], t.host.free)
    pages.add_metric(["host", "cached"], t.host.owned)
    capacity = GaugeMetricFamily("hicache_capacity_pages", "Slots of a tier", labels=["tier"])
    capacity.add_metric(["device"], t.device.capacity)
    capacity.add_metric(["host"], t.host.capacity)
    flight = GaugeMetricFamily("hicache_operations_in_flight", "Operations that have not ended")
    flight.add_metric([], t.in_flight)
    yield from (pages, capacity, flight)
