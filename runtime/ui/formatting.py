"""Text and HTML of the page: facts, settings, numbers, and the Jinja2 templates in `templates/`."""

import json
import re
from collections.abc import Collection, Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from runtime.core import facts
from runtime.core.facts import BIDI_CONTROLS, Fact, Text, Words
from runtime.core.request import BACKENDS, FIELDS
from runtime.core.request_fields import Backends, Choice, StepCache
from runtime.core.units import byte_size, counted, estimated_size, memory_size
from runtime.core.units import duration as whole_seconds

_BIDI_CONTROLS = re.compile(f"[{BIDI_CONTROLS}]")
_MINUTE = 60
_HOUR = 3600
# Below this a duration shows tenths.
_FINE_SECONDS = 10


def duration(seconds: float) -> str:
    """Return a measured duration: "0.4 s", "12 s", "3 min 20 s", "1 h 5 min"."""
    if seconds < _FINE_SECONDS:
        return f"{seconds:.1f} s"
    return whole_seconds(seconds)


def time_left(seconds: float | None) -> str:
    """Return an estimate, coarser for longer times: "about 40 s left", "about 3 min left"."""
    if seconds is None:
        return ""
    if seconds < 1:
        return "almost done"
    if seconds < _FINE_SECONDS:
        return f"about {round(seconds)} s left"
    if seconds < 2 * _MINUTE:
        return f"about {5 * round(seconds / 5)} s left"
    if seconds < 2 * _HOUR:
        return f"about {round(seconds / _MINUTE)} min left"
    return f"about {seconds / _HOUR:.1f} h left"


def clock_time(seconds: float | None) -> str:
    """Return a time in seconds since the epoch as local time, "2026-11-20 18:05"; empty for none."""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M") if seconds else ""


def moment(seconds: float | None) -> Markup:
    """Return a time as `clock_time` in an element that times.js shows relative to now: "2 min ago"; empty for none."""
    if not seconds:
        return Markup()
    exact = datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")
    return Markup('<time datetime="{}">{}</time>').format(exact, clock_time(seconds))


def size(width: int, height: int) -> str:
    """Return "192 × 112"."""
    return f"{width} × {height}"


def length(frames: int, fps: int) -> str:
    """Return "33 frames · 2.1 s at 16 fps"."""
    return f"{counted(frames, 'frame')} · {frames / fps:.1f} s at {fps} fps"


class FormWords(Words):
    """Names of settings and components on the form."""

    def setting(self, name: str, value: str | None = None) -> str:
        """Return a control's label, with a value its choice: “Offload”, “Offload: By block”.

        A component's backend is named without a label: “PyTorch” for the VAE decoder.
        """
        component, separator, backend = (value or "").partition("=")
        if name in {"backend", "backends"} and separator:
            return f"“{BACKENDS.get(backend, backend)}” for the {facts.lowered(self.component(component))}"
        declared = FIELDS.get(name)
        label = name.replace("_", " ").capitalize() if declared is None else declared.label
        if value is None:
            return f"“{label}”"
        choices = declared.choices if isinstance(declared, Choice | Backends | StepCache) else {}
        return f"“{label}: {choices.get(value, value)}”"


WORDS = FormWords()


def paragraph(fact: Fact, components: Collection[str] = ()) -> str:
    """Return a fact with its remedy as one paragraph; see `page_text`."""
    return " ".join(filter(None, page_text(fact, components)))


def page_text(fact: Fact, components: Collection[str] = ()) -> Text:
    """Return a fact's text and remedy.

    Args:
        components: those of the model that it is about, if known.
    """
    return facts.render(fact, FormWords(components) if components else WORDS)


def sentences(parts: Iterable[Fact]) -> str:
    """Return the texts of facts, equal ones once."""
    return " ".join(dict.fromkeys(page_text(fact).what for fact in parts))


def shown(value: Any) -> Any:
    """Return text without the controls of its direction, which would also turn what follows it; others as they are."""
    return _BIDI_CONTROLS.sub("", value) if isinstance(value, str) and not isinstance(value, Markup) else value


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
    finalize=shown,
)
_ENVIRONMENT.filters |= {
    "bytes": byte_size,
    "estimated": estimated_size,
    "memory": memory_size,
    "duration": duration,
    "count": counted,
    "moment": moment,
    "quoted": lambda text: f"“{text}”",
    "lower_first": lambda text: f"{text[:1].lower()}{text[1:]}",
    "json": json.dumps,
    "dict": dict,
}


def render(template: str, **values: Any) -> str:
    """Return the HTML of a template; every value is escaped."""
    return _ENVIRONMENT.get_template(template).render(values).strip()
