"""Colors, style and script of the page, from `frontend_assets/`. Everything is local: no font or file is fetched."""

import base64
import json
from functools import cache
from pathlib import Path
from typing import Any

import gradio as gr
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from runtime.models.catalogue import EMBEDDED
from runtime.models.spec import ModelSpec
from runtime.server.gradio_requests import OWN
from runtime.ui.formatting import render

ASSETS = Path(__file__).parents[2] / "frontend_assets"
ICON = ASSETS / "icon.svg"
# In this order; the later ones use the first.
_SCRIPTS = (
    "page.js", "form.js", "own_presets.js", "popovers.js", "stage.js", "group.js", "transport.js", "alerts.js",
    "times.js", "panels.js", "prompts.js", "enhance.js", "gallery.js", "queue.js", "images.js", "control.js", "mask.js",
    "metadata.js", "restore.js", "export.js", "compare.js", "before.js", "menus.js", "models.js", "decode.js",
    "loras.js", "settings.js", "palette.js",
)  # fmt: skip
_STYLES = ("style.css", "form.css", "stage.css", "panels.css", "engines.css", "settings.css")

# `style.css` declares the first; the others serve scripts that it lacks.
_SANS = ("Tandem Sans", "ui-sans-serif", "system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans", "sans-serif")
_MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace")


def theme() -> gr.themes.Base:
    """Return the theme: gradio's base with the colors of `theme.json`, in its own fonts."""
    values = _values()
    dark = {f"{name}_dark": value for name, value in values["dark"].items()}
    return gr.themes.Base(font=_SANS, font_mono=_MONO).set(**values["both"], **values["light"], **dark)


def files() -> list[Mount]:
    """Return the routes of the font files that `style.css` names, and of the examples' clips.

    The login page needs the fonts: no login is needed for either.
    """
    return [Mount(f"{OWN}{name}", StaticFiles(directory=ASSETS / name)) for name in ("fonts", "examples")]


def manifest() -> Route:
    """Return the route of the manifest that Gradio's page names; Gradio has one for installed pages only."""
    icon = {"src": "favicon.ico", "sizes": "any", "type": "image/svg+xml"}
    values = {"name": "Tandem", "icons": [icon], "start_url": "./", "display": "browser"}

    def answer(_request: Request) -> Response:
        return JSONResponse(values, media_type="application/manifest+json")

    return Route("/manifest.json", answer)


def head() -> str:
    """Return the end of the page's head: title, style and scripts, inline so that the page is styled at once."""
    # Gradio sets its colors only once its own script runs.
    backgrounds = {name: _values()[name]["body_background_fill"] for name in ("light", "dark")}
    return render(
        "head.html", styles=map(_text, _STYLES), scripts=map(_text, _SCRIPTS), backgrounds=backgrounds.items()
    )


def icon_svg() -> str:
    """Return the icon as inline SVG that screen readers skip, for use next to text."""
    return _text("icon.svg").replace('role="img" aria-label="Tandem"', 'aria-hidden="true" focusable="false"').strip()


def examples() -> list[dict[str, Any]]:
    """Return the examples: title, prompt, seed, and the file of the clip that they gave."""
    return list(json.loads(_text("examples.json")))


def picture_of(spec: ModelSpec) -> str:
    """Return a frame of a model that ships with Tandem as a data URI, empty for other models."""
    path = ASSETS / "models" / f"{spec.name}.webp"
    if spec.directory.parent != EMBEDDED or not path.is_file():
        return ""
    return f"data:image/webp;base64,{base64.b64encode(path.read_bytes()).decode()}"


def _values() -> dict[str, dict[str, str]]:
    return dict(json.loads(_text("theme.json")))


@cache
def _text(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")
