"""Errors of the HTTP API as OpenAI's: `{"error": {"message", "type", "param", "code"}}`, with the HTTP status."""

import logging
from collections.abc import Callable, Mapping
from http import HTTPStatus

from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from runtime.core.errors import (
    EnhancerError,
    InvalidRequestError,
    LimitError,
    MachineError,
    ModelError,
    OutputError,
    SettingsError,
    StoreError,
    TandemError,
)
from runtime.core.facts import Fact, render, sentence
from runtime.server.api_words import ApiWords

PRIVATE = {"Cache-Control": "private, no-store"}
_MINUTE_SECONDS = 60
# Statuses of errors by their code; others have that of their class.
_STATUSES: Mapping[str, int] = {
    "queue.no_such_job": 404,
    "queue.submission_differs": 409,
    "queue.submission_deleted": 409,
    "server.api_still_stopping": 409,
    "model.not_offered": 404,
    "enhancer.none": 503,
}
_CLASSES: Mapping[type[TandemError], int] = {
    InvalidRequestError: 400,
    LimitError: 429,
    EnhancerError: 502,
    ModelError: 422,
    MachineError: 422,
    OutputError: 507,
    StoreError: 503,
    SettingsError: 503,
}

logger = logging.getLogger(__name__)


class ErrorBody(BaseModel):
    """One error."""

    message: str = Field(description="What is wrong and what to do, for people.")
    type: str = Field(description="The kind of error, as in OpenAI's API.")
    param: str | None = Field(default=None, description="The field or parameter that is wrong.")
    code: str | None = Field(default=None, description="The error, for programs.")


class ErrorAnswer(BaseModel):
    """The body of every response with a status from 400 on."""

    error: ErrorBody


class ApiError(HTTPException):
    """An error with its status.

    Args:
        param: the field or header that it is about.
        headers: of the response.
    """

    def __init__(
        self, status: int, fact: Fact, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(status, headers=dict(headers or {}))
        self.fact = fact
        self.param = param


def refused(status: int, code: str, param: str | None = None, /, **data: object) -> ApiError:
    """Return an error for a code and its data."""
    return ApiError(status, Fact(code, data), param)


def status_of(error: TandemError) -> int:
    """Return the HTTP status of an error."""
    default = next((status for kind, status in _CLASSES.items() if isinstance(error, kind)), 422)
    return _STATUSES.get(error.code, default)


def body_of(fact: Fact, status: int, param: str | None, redact: Callable[[str], str]) -> ErrorBody:
    """Return an error's body."""
    text = render(fact, ApiWords())
    message = redact(f"{text.what} {text.remedy}".strip())
    code = "model_not_found" if fact.code == "model.not_offered" else fact.code
    return ErrorBody(message=message, type=_type_of(status), param=param, code=code)


def answer(status: int, body: ErrorBody, headers: Mapping[str, str] | None = None) -> Response:
    """Return the response for an error."""
    content = ErrorAnswer(error=body).model_dump()
    return JSONResponse(content, status, {**PRIVATE, **(headers or {})})


def handlers(redact: Callable[[str], str]) -> dict[type[Exception], Callable[[Request, Exception], Response]]:
    """Return the handlers of exceptions.

    Args:
        redact: removes from a message what users of the API should not read.
    """

    def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if isinstance(error, ApiError):
            fact, param = error.fact, error.param
        elif error.status_code == HTTPStatus.NOT_FOUND:
            fact, param = Fact("server.api_no_route", {"method": request.method, "path": _path(request)}), None
        elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            allowed = (error.headers or {}).get("Allow", "")
            data = {"method": request.method, "path": _path(request), "allowed": allowed}
            fact, param = Fact("server.api_no_method", data), None
        else:
            fact, param = sentence(error.detail), None
        body = body_of(fact, error.status_code, param, redact)
        return answer(error.status_code, body, error.headers)

    def tandem(_request: Request, error: Exception) -> Response:
        assert isinstance(error, TandemError)
        status = status_of(error)
        minutes = error.data.get("minutes") if isinstance(error, LimitError) else None
        headers = {} if minutes is None else {"Retry-After": str(int(minutes) * _MINUTE_SECONDS)}
        param = error.field if isinstance(error, InvalidRequestError) else _PARAMETERS.get(error.code)
        return answer(status, body_of(error.fact, status, param, redact), headers)

    def internal(_request: Request, error: Exception) -> Response:
        # Starlette raises it again, and uvicorn prints the traceback.
        logger.error("A request failed", exc_info=error)
        return answer(500, body_of(Fact("server.api_internal"), 500, None, redact))

    return {HTTPException: http, TandemError: tandem, Exception: internal}


_PARAMETERS = {"model.not_offered": "model", "model.unknown": "model"}


def _path(request: Request) -> str:
    path = request.url.path[:100]
    return path if path.isprintable() else "of this name"


def _type_of(status: int) -> str:
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return "server_error"
    types = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    return types.get(status, "invalid_request_error")
