"""Looking at the cache and tending it: /metrics, /cache/stats, /flush_cache."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Response

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


@router.get("/flush_cache")
@router.post("/flush_cache")
async def flush_cache(service: ServiceDep) -> Response:
    """Forget all cached pages that nobody uses."""
    return json_response(await service.client.control("flush"))


@router.get("/hicache/storage-backend")
async def storage_info(service: ServiceDep) -> Response:
    """What the attached store holds."""
    return json_response(await service.client.control("storage_info"))


@router.put("/hicache/storage-backend")
async def attach_storage(service: ServiceDep, flags: Annotated[dict[str, Any], Body()]) -> Response:
    """Attach a store to the running cache. Body: `hicache_storage_*` flags that differ from the server's own."""
    return json_response(await service.client.control("storage_attach", flags))


@router.delete("/hicache/storage-backend")
async def detach_storage(service: ServiceDep) -> Response:
    """Go on without the store; answers when it is closed. Requests that run are not disturbed."""
    return json_response(await service.client.control("storage_detach"))


@router.api_route("/clear_hicache_storage_backend", methods=["POST"])
async def clear_storage(service: ServiceDep) -> Response:
    """Delete every record of the attached store."""
    return json_response(await service.client.control("storage_clear"))
