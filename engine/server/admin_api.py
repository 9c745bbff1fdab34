"""Looking at the cache and tending it: /metrics, /cache/stats, /flush_cache."""

from __future__ import annotations

from fastapi import APIRouter, Response

from engine.client import EngineError
from engine.server.depends import ServiceDep  # noqa: TC001 - FastAPI reads the annotation
from engine.server.responses import json_response

__all__ = ["router"]

router = APIRouter(tags=["admin"])


@router.get("/metrics")
async def metrics(service: ServiceDep) -> Response:
    """Prometheus text: the engine's metrics and the server's. Of a dead engine, the server's alone."""
    own = service.metrics.render()
    try:
        engine = str(await service.client.control("metrics"))
    except EngineError:
        engine = ""
    return Response(engine + own, media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/cache/stats")
async def cache_stats(service: ServiceDep) -> Response:
    """The cache's counters as JSON."""
    return json_response(await service.client.control("stats"))


@router.api_route("/flush_cache", methods=["GET", "POST"])
async def flush_cache(service: ServiceDep) -> Response:
    """Forget all cached pages that nobody uses."""
    return json_response(await service.client.control("flush"))
