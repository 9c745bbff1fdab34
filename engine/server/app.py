"""The HTTP application: endpoints, errors and the guard around one service."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from fastapi import FastAPI

from engine.server import admin_api, chat_api, hints_api, native_api, openai_api, responses_api
from engine.server.errors import add_error_handlers
from engine.server.guard import Guard
from engine.server.validation import add_validation_handler

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from engine.server.service import Service

__all__ = ["create_app"]


def create_app(service: Service) -> ASGIApp:
    """Make the app around a service whose engine is started. Who started the engine also stops it."""
    app = FastAPI(title="hicache", version=version("hicache"), redirect_slashes=False)
    app.state.service = service
    for api in (chat_api, openai_api, responses_api, native_api, hints_api, admin_api):
        app.include_router(api.router)
    add_error_handlers(app)
    add_validation_handler(app)
    return Guard(app, service.config, service.metrics)
