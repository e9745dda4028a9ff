"""`tests.sharing_app`, which writes the routes of each page to `routes-<port>.json` in the cache folder.

Each file has the methods of the routes by path, and the page's panels with words of their source, among them their
actions.
"""

import inspect
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from runtime.server.connections import PageServer
from runtime.ui import panels

_WORDS = re.compile(r'"([a-z][a-z-]{2,20})"')
_start, _panel_routes = PageServer.start, panels.routes
_panels: dict[str, list[str]] = {}


def _found(routes: Iterable[Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield path and methods of each route below `routes`."""
    for route in routes:
        if hasattr(route, "original_router"):  # FastAPI's include_router
            yield from _found(route.original_router.routes)
        elif hasattr(route, "methods"):
            yield route.path, sorted(route.methods or ())
        else:
            yield f"{route.path}/{{path:path}}", ["GET"]


def _record_panels(by_name: Mapping[str, panels.Panel]) -> Any:
    for name, panel in by_name.items():
        source = "".join(
            inspect.getsource(kind) for kind in type(panel).__mro__ if kind.__module__.startswith("runtime")
        )
        _panels[name] = sorted(set(_WORDS.findall(source)))
    return _panel_routes(by_name)


def _record_routes(self: PageServer, app: Any) -> None:
    (port, *_) = {one.getsockname()[1] for one in self._sockets}
    methods: dict[str, list[str]] = {}
    for path, names in _found(app.routes):
        methods[path] = sorted({*methods.get(path, ()), *names})
    file = Path(os.environ["TANDEM_CACHE_DIR"], f"routes-{port}.json")
    file.write_text(json.dumps({"routes": methods, "panels": _panels}), encoding="utf-8")
    _start(self, app)


# Also in the process of the visitors' page, which imports this module again.
vars(panels)["routes"] = _record_panels
setattr(PageServer, "start", _record_routes)  # noqa: B010 - mypy refuses an assignment to a method
os.environ["HF_HUB_OFFLINE"] = "1"

if __name__ == "__main__":
    from tests import sharing_app

    sharing_app.main()
