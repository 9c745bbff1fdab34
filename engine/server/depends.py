"""What endpoints need of the application they belong to."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Header, Request

from engine.server.service import Service

__all__ = ["RoutingKey", "ServiceDep", "get_service"]


def get_service(request: Request) -> Service:
    """The service of the app that the request came to."""
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


ServiceDep = Annotated[Service, Depends(get_service)]

RoutingKey = Annotated[str, Header(alias="x-smg-routing-key", max_length=1024)]
"""The header by which SGLang's router says what a request belongs to; a body's `routing_key` goes before it."""
