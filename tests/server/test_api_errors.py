"""Errors of the HTTP API that have no fact: one line for the client, the traceback in the log."""

import logging
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route
from starlette.testclient import TestClient

from runtime.server import api_errors


def test_the_log_has_the_traceback_of_an_internal_error(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(_request: Request) -> None:
        raise RuntimeError("a secret of /home/anna")

    handlers: Any = api_errors.handlers(str)
    app = Starlette(routes=[Route("/", fail)], exception_handlers=handlers)
    logger = logging.getLogger(api_errors.__name__)
    logger.addHandler(caplog.handler)
    try:
        answer = TestClient(app, raise_server_exceptions=False).get("/")
    finally:
        logger.removeHandler(caplog.handler)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "server.api_internal")
    assert "secret" not in answer.text and "Traceback" not in answer.text
    record = next(one for one in caplog.records if one.name == logger.name)
    assert record.exc_info is not None and isinstance(record.exc_info[1], RuntimeError)
