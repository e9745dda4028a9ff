"""Colors, style and script of the page, from `frontend_assets/`. Everything is local: no font or file is fetched."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import gradio as gr

from runtime.ui.formatting import render

ASSETS = Path(__file__).parents[2] / "frontend_assets"
ICON = ASSETS / "icon.svg"
# In this order; the later ones use the first.
_SCRIPTS = ("page.js", "panels.js", "restore.js", "compare.js")
_STYLES = ("style.css", "panels.css")

_SANS = ("ui-sans-serif", "system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans", "sans-serif")
_MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace")


def theme() -> gr.themes.Base:
    """Return the theme: gradio's base with the colors of `theme.json`, in system fonts."""
    values = _values()
    dark = {f"{name}_dark": value for name, value in values["dark"].items()}
    return gr.themes.Base(font=_SANS, font_mono=_MONO).set(**values["both"], **values["light"], **dark)


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
    """Return the example prompts: title and prompt each."""
    return list(json.loads(_text("examples.json")))


def _values() -> dict[str, dict[str, str]]:
    return dict(json.loads(_text("theme.json")))


@cache
def _text(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")
