"""Asks a chat model at an OpenAI-compatible server, with `POST …/chat/completions`."""

import json
import threading
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import httpx

from runtime.core.cancel import Cancel
from runtime.core.errors import EnhancerError, first_line
from runtime.core.settings import LOOPBACK
from runtime.models.enhancers import RemoteEnhancer

# Of an answer, with thoughts that the prompt will not have.
_MOST_TOKENS = 2_048
_CONNECT_SECONDS = 10.0
# A server may load its model first.
ANSWER_SECONDS = 300.0
_MOST_BYTES = 1 << 20
_POLL_SECONDS = 0.1
# What statuses say of the request; others are named.
_STATUSES: Mapping[int, str] = {
    HTTPStatus.UNAUTHORIZED: "enhancer.key_refused",
    HTTPStatus.FORBIDDEN: "enhancer.key_refused",
    HTTPStatus.NOT_FOUND: "enhancer.not_found",
    HTTPStatus.TOO_MANY_REQUESTS: "enhancer.server_busy",
}


def ask_server(
    enhancer: RemoteEnhancer,
    messages: Sequence[Mapping[str, str]],
    cancel: Cancel,
    seconds: float = ANSWER_SECONDS,
) -> str:
    """Return a server's answer to messages. Redirects are not followed, which could send the key elsewhere.

    Args:
        messages: each with "role" and "content".
        seconds: how long an answer may take.

    Raises:
        EnhancerError: if the server cannot be reached, refuses, is silent, or answers in another format.
        CancelledError: on cancel; the connection is closed.
    """
    call = _Call(enhancer, messages, seconds)
    thread = threading.Thread(target=call.run, name="enhancer", daemon=True)
    thread.start()
    end = time.monotonic() + seconds
    try:
        while thread.is_alive():
            cancel.check()
            if time.monotonic() > end:  # it may send a byte now and then
                raise _silent(enhancer, seconds)
            thread.join(_POLL_SECONDS)
    finally:
        call.close()
    if call.error is not None:
        raise call.error
    return call.answer


class _Call:
    """One request, on a thread of its own: nothing interrupts a thread that waits for a server."""

    def __init__(self, enhancer: RemoteEnhancer, messages: Sequence[Mapping[str, str]], seconds: float) -> None:
        self.answer = ""
        self.error: Exception | None = None
        self._enhancer, self._seconds = enhancer, seconds
        self._body = {
            "model": enhancer.model,
            "messages": list(messages),
            "temperature": 0,
            "max_tokens": _MOST_TOKENS,
            "stream": False,
        }
        # A proxy does not reach this machine's servers.
        own = httpx.URL(enhancer.address).host in LOOPBACK
        self._http = httpx.Client(timeout=httpx.Timeout(seconds, connect=_CONNECT_SECONDS), trust_env=not own)

    def run(self) -> None:
        """Send the request and keep the answer, or why there is none."""
        try:
            self.answer = self._asked()
        except EnhancerError as error:
            self.error = error
        except httpx.TimeoutException:
            self.error = _silent(self._enhancer, self._seconds)
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, RuntimeError, ValueError) as error:
            # RuntimeError: the client was closed; ValueError: a proxy's address in the environment.
            self.error = EnhancerError("enhancer.unreachable", address=self._enhancer.address, reason=first_line(error))

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def _asked(self) -> str:
        key = {"Authorization": f"Bearer {self._enhancer.key}"} if self._enhancer.key else {}
        address = f"{self._enhancer.address}/chat/completions"
        with self._http.stream("POST", address, json=self._body, headers=key) as response:
            status = response.status_code
            if status != HTTPStatus.OK:
                data = {"address": self._enhancer.address, "model": self._enhancer.model, "status": status}
                raise EnhancerError(_STATUSES.get(status, "enhancer.status"), **data)
            content = b""
            for chunk in response.iter_bytes():
                content += chunk
                if len(content) > _MOST_BYTES:
                    raise EnhancerError("enhancer.wrong_format", address=self._enhancer.address)
        return self._answer_in(content)

    def _answer_in(self, content: bytes) -> str:
        try:
            values: Any = json.loads(content)
            text = values["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise EnhancerError("enhancer.wrong_format", address=self._enhancer.address) from error
        if text is None:  # only thoughts, in a field of their own
            raise EnhancerError("enhancer.answer_empty")
        if not isinstance(text, str):
            raise EnhancerError("enhancer.wrong_format", address=self._enhancer.address)
        return text


def _silent(enhancer: RemoteEnhancer, seconds: float) -> EnhancerError:
    return EnhancerError("enhancer.silent", address=enhancer.address, seconds=seconds)
