"""An asynchronous client of the HTTP API of a Tandem server on this machine."""

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import TracebackType
from typing import Any

import httpx

from runtime.core.facts import Fact
from runtime.core.request import FIELDS
from runtime.server.api_errors import ErrorBody, body_of

# A deletion may wait for a worker that does not stop, see `VideoApi.delete`.
ANSWER_SECONDS = 120.0
# An event stream is never silent for longer, see `video_events`.
_SILENT_SECONDS = 60.0

# The name, content and file name of an uploaded file, as httpx takes them.
Upload = tuple[str, tuple[str, bytes]]


class ApiCallError(Exception):
    """An error that the API has answered, or that it cannot be reached.

    Attributes:
        status: the HTTP status; 0 without an answer.
        error: the error as the API describes it.
    """

    def __init__(self, status: int, error: ErrorBody) -> None:
        super().__init__(error.message)
        self.status = status
        self.error = error


def call_error(code: str, param: str | None = None, /, **data: object) -> ApiCallError:
    """Return an error of a call that is not sent to the API, for a code and its data."""
    return ApiCallError(0, body_of(Fact(code, data), 400, param, str))


class ApiClient:
    """Calls the API. For one event loop; an asynchronous context manager.

    Every call raises `ApiCallError` if the API answers an error or cannot be reached.

    Args:
        url: the address of the server, with a slash at the end.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        # Variables for proxies do not apply to this machine.
        self._http = httpx.AsyncClient(base_url=url, timeout=ANSWER_SECONDS, trust_env=False)

    async def __aenter__(self) -> "ApiClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def get(self, path: str, headers: Mapping[str, str], **query: Any) -> dict[str, Any]:
        """Return the JSON of a route; parameters that are `None` are left out."""
        given = {name: value for name, value in query.items() if value is not None}
        return _json(await self._request("GET", path, headers, params=given))

    async def delete(self, path: str, headers: Mapping[str, str]) -> dict[str, Any]:
        """Delete what a path names; return the answer."""
        return _json(await self._request("DELETE", path, headers))

    async def post(
        self,
        path: str,
        headers: Mapping[str, str],
        values: Mapping[str, Any],
        files: Sequence[Upload],
        seconds: float = ANSWER_SECONDS,
    ) -> dict[str, Any]:
        """Send values as JSON, or with files as a form; return the answer, which comes within some seconds."""
        body: dict[str, Any] = {"data": _form(values), "files": files} if files else {"json": values}
        return _json(await self._request("POST", path, headers, timeout=seconds, **body))

    async def content(self, path: str, headers: Mapping[str, str], most: int) -> bytes | None:
        """Return a file; `None` if it is larger than `most` bytes."""
        content = bytearray()
        try:
            async with self._http.stream("GET", path, headers=headers) as answer:
                await _check(answer)
                async for part in answer.aiter_bytes():
                    content += part
                    if len(content) > most:
                        return None
        except httpx.HTTPError as error:
            raise self._failure(error) from error
        return bytes(content)

    async def events(self, path: str, headers: Mapping[str, str]) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
        """Yield the names and data of a stream of server-sent events."""
        timeout = httpx.Timeout(ANSWER_SECONDS, read=_SILENT_SECONDS)
        name = ""
        try:
            async with self._http.stream("GET", path, headers=headers, timeout=timeout) as answer:
                await _check(answer)
                async for line in answer.aiter_lines():
                    field, _, value = line.partition(": ")
                    if field == "event":
                        name = value
                    elif field == "data":
                        yield name, json.loads(value)
        except httpx.HTTPError as error:
            raise self._failure(error) from error

    async def _request(self, method: str, path: str, headers: Mapping[str, str], **values: Any) -> httpx.Response:
        try:
            answer = await self._http.request(method, path, headers=headers, **values)
        except httpx.HTTPError as error:
            raise self._failure(error) from error
        await _check(answer)
        return answer

    def _failure(self, error: httpx.HTTPError) -> ApiCallError:
        """Return the error of a call without an answer; "server.mcp_unreachable" if it was not even sent."""
        sent = not isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout))
        return call_error("server.mcp_broken_off" if sent else "server.mcp_unreachable", address=self._url)


async def _check(answer: httpx.Response) -> None:
    """Raise the error of an answer, if it is one."""
    if not answer.is_error:
        return
    await answer.aread()
    try:
        error = ErrorBody.model_validate(answer.json()["error"])
    except (ValueError, KeyError, TypeError):
        raise call_error("server.mcp_no_api", address=str(answer.url), status=answer.status_code) from None
    raise ApiCallError(answer.status_code, error)


def _json(answer: httpx.Response) -> dict[str, Any]:
    try:
        found = answer.json()
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise call_error("server.mcp_no_api", address=str(answer.url), status=answer.status_code)
    return found


def _form(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as the fields of a form, see `video_requests`."""
    fields: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            fields |= {f"{name}[{key}]": _text(entry) for key, entry in value.items()}
        elif isinstance(value, list) and name in FIELDS and FIELDS[name].repeatable:
            fields[f"{name}[]"] = [_text(entry) for entry in value]
        elif isinstance(value, list):
            for entry in value:
                if isinstance(entry, Mapping):  # an image as a data URL
                    for key, text in entry.items():
                        fields.setdefault(f"{name}[{key}]", []).append(_text(text))
            numbers = [_text(entry) for entry in value if not isinstance(entry, Mapping)]
            if numbers:
                fields[name] = ",".join(numbers)
        elif value is not None:
            fields[name] = _text(value)
    return fields


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
