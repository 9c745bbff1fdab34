"""Whatever our own OpenAPI allows, and what it does not, is answered without a 5xx."""

from __future__ import annotations

from typing import Any

import schemathesis
from hypothesis import HealthCheck, given, settings

from engine.config import ServeConfig
from engine.tokenizer import Tokenizer
from tests.http_server import http_server
from tests.models import make_tiny_tokenizer

EXAMPLES = 25


def test_no_request_is_answered_with_a_server_error() -> None:
    config = ServeConfig(model_path="scripted", max_queued_requests=4096)
    with http_server(config, Tokenizer(make_tiny_tokenizer())) as http:
        schema: Any = schemathesis.openapi.from_url(f"{http.base_url}/openapi.json")
        operations = [found.ok() for found in schema.get_all_operations()]
        assert len(operations) > 20
        for operation in operations:
            check(operation)


def check(operation: Any) -> None:
    """Send an operation what its schema allows."""

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
    @given(case=operation.as_strategy())
    def answered(case: Any) -> None:
        response = case.call(timeout=30)
        assert response.status_code < 500, (operation.label, response.status_code, response.text)

    answered()
