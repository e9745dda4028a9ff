"""Malformed requests for each route of a page, as its running router lists them."""

import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz.raw_http import Request

_PARAMETER = re.compile(r"\{[^}]*\}")
# Percent-encoded: NUL, a lone surrogate, a bidirectional control, a line break.
_PARTS = (
    "x", "../../../etc/passwd", "..%2f..%2f..%2fetc%2fpasswd", "%2e%2e/%2e%2e", "%00", "%ED%A0%80", "%E2%80%AE",
    "%0d%0aX-Bad:%20y", "NaN", "-1", "%FF%FE", "a" * 3000, "queue", "generate", "predict",
    "0" * 8 + ".mp4", "//etc/passwd", "%255c..",
)  # fmt: skip
_QUERIES = (
    "", "?", "?session_hash=%00", "?session_hash=../../x&page=NaN", "?x=" + "a" * 5000, "?%ED%A0%80=%FF",
    "?session_hash=unknown",
)  # fmt: skip
_JSON: tuple[Any, ...] = (
    None, [], "x", 5, {}, float("nan"), 10**400,
    {"data": float("nan"), "fn_index": float("inf"), "session_hash": "\ud800"},
    {"data": {}, "fn_index": [], "session_hash": 5, "event_id": {}, "action": None},
    {"data": ["\0\x1b\u202e"] * 30, "fn_index": 10**40, "session_hash": "../x", "trigger_id": "NaN"},
    {"data": [], "fn_index": 0, "event_id": "0" * 32},  # without a session
    {"action": 5, "target": [], "values": 1, "view": "", "form": {}, "drawn": None},
    {"action": "\ud800", "target": "\0", "values": {}, "view": {"pages": float("nan")}, "form": [5], "drawn": {}},
)  # fmt: skip
_BODIES = (
    *(json.dumps(value).encode() for value in _JSON),
    b"", b"{", b"\xff\xfe\0", b"[" * 20_000, b'{"data":' * 5000, b"x" * 300_000, b'{"a": "\0\x1b"}', b"a=b&c=%ED%A0%80",
)  # fmt: skip
_TYPES = (b"application/json", b"application/x-www-form-urlencoded", b"multipart/form-data", b"text/plain; charset=x")
# Of each method of a route.
_FEW = 4
_OTHER_METHODS = ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "POST", "GET")


@dataclass(frozen=True)
class Routes:
    """Routes of a page.

    Attributes:
        methods: of each route, by path with parameters in braces.
        panels: words of the source of each panel, among them its actions.
    """

    methods: Mapping[str, Sequence[str]] = field(default_factory=dict)
    panels: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @classmethod
    def read(cls, cache: Path, port: int) -> "Routes":
        """Return the routes that `tests.fuzz.app` has written."""
        found = json.loads((cache / f"routes-{port}.json").read_text(encoding="utf-8"))
        return cls(found["routes"], found["panels"])

    def malformed(self, few: Collection[str] = ()) -> Iterator[tuple[str, Request]]:
        """Yield malformed requests for each route, with its path; those of one route differ in all their parts.

        Args:
            few: paths of routes with only a few of them.
        """
        for path, methods in sorted(self.methods.items()):
            wrong = next(one for one in _OTHER_METHODS if one not in methods)
            for method in (*methods, wrong):
                bodies = _BODIES if method == "POST" else (b"",)
                parts = _PARTS if _PARAMETER.search(path) else ("",)
                count = max(len(bodies), len(parts), len(_QUERIES)) if method != wrong else 3
                every = zip(*map(itertools.cycle, (parts, _QUERIES, bodies, _TYPES)), strict=False)
                for part, query, body, kind in itertools.islice(every, min(count, _FEW) if path in few else count):
                    target = part.join(_PARAMETER.split(path)) + query
                    headers = {b"Content-Type": kind} if body else {}
                    yield path, Request(method.encode(), target.encode(), headers, body)
