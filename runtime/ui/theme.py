"""Colours, style and script of the page, from `frontend_assets/`. Everything is local: no font or file is fetched."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import gradio as gr

ASSETS = Path(__file__).parents[2] / "frontend_assets"
ICON = ASSETS / "icon.svg"
# In this order: the later ones use the first.
_SCRIPTS = ("page.js", "panels.js", "restore.js", "compare.js")
_STYLES = ("style.css", "panels.css")

_SANS = ("ui-sans-serif", "system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans", "sans-serif")
_MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace")


def theme() -> gr.themes.Base:
    """Return the theme: gradio's base with the colours of `theme.json`, in system fonts."""
    values = _values()
    dark = {f"{name}_dark": value for name, value in values["dark"].items()}
    return gr.themes.Base(font=_SANS, font_mono=_MONO).set(**values["both"], **values["light"], **dark)


def head() -> str:
    """Return what goes into the page's head: title, style and script, inline so that nothing flashes in later."""
    ground = {name: _values()[name]["body_background_fill"] for name in ("light", "dark")}
    return (
        "<title>Tandem</title>\n"
        '<meta name="color-scheme" content="light dark">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<style>{''.join(map(_text, _STYLES))}\n"
        # gradio knows its colours only once its own script runs; the ground must have them from the first moment.
        + "".join(f'html[data-theme="{name}"] body {{ background: {fill}; }}\n' for name, fill in ground.items())
        + "</style>\n"
        + "".join(f"<script>{_text(name)}</script>" for name in _SCRIPTS)
    )


def icon_svg() -> str:
    """Return the icon as inline SVG without a name of its own, for use beside text."""
    return _text("icon.svg").replace('role="img" aria-label="Tandem"', 'aria-hidden="true" focusable="false"').strip()


def examples() -> list[dict[str, Any]]:
    """Return the example prompts: title and prompt each."""
    return list(json.loads(_text("examples.json")))


def _values() -> dict[str, dict[str, str]]:
    return dict(json.loads(_text("theme.json")))


@cache
def _text(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")
