"""HTML from the Jinja2 templates in `templates/`, with autoescape."""

import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from runtime.core.units import byte_size, memory_size
from runtime.ui import formatting

_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)
_ENVIRONMENT.filters |= {
    "bytes": byte_size,
    "memory": memory_size,
    "duration": formatting.duration,
    "count": formatting.count,
    "quoted": lambda text: f"“{text}”",
    "lower_first": lambda text: f"{text[:1].lower()}{text[1:]}",
    "json": json.dumps,
}


def render(template: str, **values: Any) -> str:
    """Return the HTML of a template; every value is escaped."""
    return _ENVIRONMENT.get_template(template).render(values).strip()
