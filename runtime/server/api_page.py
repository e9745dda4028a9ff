"""The page on which people read the HTTP API's schema. Nothing of it is fetched from elsewhere."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, select_autoescape
from markupsafe import Markup

from runtime.server.video_requests import NUMBER_AS_TEXT

_TEMPLATES = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=select_autoescape())
_LIMITS = (("minimum", "from {}"), ("exclusiveMinimum", "above {}"), ("maximum", "to {}"))


def render(schema: Mapping[str, Any], address: str) -> str:
    """Return the page of a schema in OpenAPI's format.

    Args:
        address: of this server, for the examples.
    """
    template = _TEMPLATES.get_template("api_page.html")
    return template.render(schema=schema, address=address, kind=_kind, example=_example)


def _example(schema: Mapping[str, Any]) -> str | None:
    """Return a value that a field accepts, as JSON."""
    examples = schema.get("examples")
    return json.dumps(examples[0], ensure_ascii=False) if examples else None


def _kind(schema: Mapping[str, Any]) -> Markup:
    """Return the type of a value, with links to the types that it names."""
    texts: list[Markup] = []
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        texts.append(Markup('<a href="#{0}">{0}</a>').format(name))
    elif "enum" in schema:
        texts.append(Markup(", ").join(Markup("<code>{}</code>").format(json.dumps(value)) for value in schema["enum"]))
    elif "const" in schema:
        texts.append(Markup("<code>{}</code>").format(json.dumps(schema["const"])))
    elif "anyOf" in schema:
        kinds = [kind for kind in schema["anyOf"] if kind != NUMBER_AS_TEXT]
        texts.append(Markup(" or ").join(dict.fromkeys(map(_kind, kinds))))
    elif schema.get("format") == "binary":
        texts.append(Markup("file"))
    elif schema.get("type") == "array" and "items" in schema:
        texts.append(Markup("list of {}").format(_kind(schema["items"])))
    elif "type" in schema:
        texts.append(Markup("{}").format(schema["type"]))
    limits = [Markup(text).format(f"{schema[name]:.16g}") for name, text in _LIMITS if name in schema]
    if limits:
        texts.append(Markup(" ").join(limits))
    if "maxLength" in schema:
        texts.append(Markup("at most {} characters").format(schema["maxLength"]))
    if schema.get("default") is not None:
        texts.append(Markup("default <code>{}</code>").format(json.dumps(schema["default"])))
    return Markup(", ").join(texts)
