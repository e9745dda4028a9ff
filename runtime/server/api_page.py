"""The page on which people read the HTTP API's schema. Nothing of it is fetched from elsewhere."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, select_autoescape
from markupsafe import Markup

_TEMPLATES = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=select_autoescape())
_LIMITS = (("minimum", "from"), ("exclusiveMinimum", "above"), ("maximum", "to"), ("maxLength", "characters up to"))


def render(schema: Mapping[str, Any]) -> str:
    """Return the page of a schema in OpenAPI's format."""
    return _TEMPLATES.get_template("api_page.html").render(schema=schema, kind=_kind)


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
        texts.append(Markup(" or ").join(dict.fromkeys(map(_kind, schema["anyOf"]))))
    elif schema.get("type") == "array" and "items" in schema:
        texts.append(Markup("list of {}").format(_kind(schema["items"])))
    elif "type" in schema:
        texts.append(Markup("{}").format(schema["type"]))
    texts += [Markup("{} {}").format(word, schema[name]) for name, word in _LIMITS if name in schema]
    if schema.get("default") is not None:
        texts.append(Markup("default <code>{}</code>").format(json.dumps(schema["default"])))
    return Markup(", ").join(texts)
