"""What the tools of the MCP server take: the arguments of each, and their JSON schemas."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from runtime.core.facts import cut
from runtime.core.request import FIELDS
from runtime.server import video_requests
from runtime.server.mcp.api_client import call_error

# The longest that one call waits.
MOST_SECONDS = 3600
WAIT_FIELD = "wait_seconds"
# The fields of a request, without the second name of `image`.
_FIELDS = frozenset({*FIELDS, "size", video_requests.ENHANCE})
_ID = Field(description="The id of the video.", max_length=100)


class Arguments(BaseModel):
    """The arguments of a tool; this one has none."""

    model_config = ConfigDict(extra="forbid")


class WaitArguments(Arguments):
    """The arguments of `wait_for_video`."""

    id: str = _ID
    seconds: float = Field(
        default=300, ge=0, le=MOST_SECONDS, description="Return after this time, even if it has not ended."
    )


class MakeArguments(BaseModel):
    """The argument of `make_video` that is not a field of the request."""

    wait_seconds: float = Field(
        default=0, ge=0, le=MOST_SECONDS, description="Wait up to this time for the video; 0 returns its id at once."
    )


class ListArguments(Arguments):
    """The arguments of `list_videos`."""

    limit: int = Field(default=20, ge=1, le=100, description="Number of videos.")
    after: str | None = Field(default=None, description="The last_id of the previous page.", max_length=100)


class GetArguments(Arguments):
    """The arguments of `get_video`."""

    id: str = _ID
    still: bool = Field(default=True, description="Whether to return a still image of a completed video.")


class DeleteArguments(Arguments):
    """The arguments of `delete_video`."""

    id: str = _ID


AnyArguments = TypeVar("AnyArguments", bound=BaseModel)


def read_arguments(kind: type[AnyArguments], values: Mapping[str, Any]) -> AnyArguments:
    """Return the arguments of a call.

    Raises:
        ApiCallError: for an invalid or unknown one; names it.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = cut(".".join(map(str, first["loc"])), 40)
        problem = str(first["msg"]).rstrip(".")
        raise call_error("server.mcp_argument", name, name=name, problem=problem) from error


def arguments_schema(kind: type[BaseModel]) -> dict[str, Any]:
    """Return the schema of the arguments of a tool."""
    schema = kind.model_json_schema()
    kept: dict[str, Any] = {name: schema[name] for name in ("required", "additionalProperties") if name in schema}
    properties = {name: _simple(described) for name, described in schema.get("properties", {}).items()}
    return {"type": "object", "properties": properties, **kept}


def request_schema(*, paths: bool) -> dict[str, Any]:
    """Return the schema of a request: that of the API without its titles, null, and numbers as text.

    Args:
        paths: whether images and videos may be named by a path.
    """
    schema = video_requests.json_schema("#/$defs/{model}")
    properties = {name: _simple(described) for name, described in schema["properties"].items() if name in _FIELDS}
    for name in video_requests.FILE_FIELDS:
        kind = "video" if name in video_requests.VIDEO_FIELDS else "image"
        file = {"type": "string"} if paths else {"type": "string", "pattern": f"^data:{kind}/"}
        how = "An absolute path or a data URL." if paths else "A data URL."
        is_list = properties[name].get("type") == "array"
        properties[name] = {
            "description": f"{properties[name]['description']} {how}",
            **({"type": "array", "items": file} if is_list else file),
        }
    properties["model"] = {"type": "string", "description": "The id of a model, from list_models."}
    return {
        "type": "object",
        "properties": properties,
        "required": schema["required"],
        "additionalProperties": False,
    }


def make_schema(*, paths: bool) -> dict[str, Any]:
    """Return the schema of `make_video`: that of a request, and how long to wait."""
    schema, own = request_schema(paths=paths), arguments_schema(MakeArguments)
    return {**schema, "properties": {**schema["properties"], **own["properties"]}}


def _simple(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a field without its title, null, and numbers as text."""
    simple = {key: value for key, value in described.items() if key not in {"title", "anyOf"}}
    if "default" in simple and simple["default"] is None:
        del simple["default"]
    left_out = ({"type": "null"}, video_requests.NUMBER_AS_TEXT)
    kinds = [kind for kind in described.get("anyOf", ()) if kind not in left_out]
    if len(kinds) == 1:
        return {**simple, **kinds[0]}
    return {**simple, "anyOf": kinds} if kinds else simple
