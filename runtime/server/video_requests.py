"""Bodies of `POST /v1/videos`: JSON or a form, with OpenAI's fields and those of `GenerationRequest`.

OpenAI's `size` is width and height, `input_reference` is the image, and `seconds` may be text. A form has text: numbers
are parsed, `loras` may be repeated or written `loras[]`, and `backends[vae]` names a component, as OpenAI's clients
send them. Images are files of a form, or data URLs; nothing is fetched.
"""

import asyncio
import base64
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote_to_bytes

from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from runtime.core.errors import InvalidRequestError
from runtime.core.facts import cut, shortened
from runtime.core.images import BOXES, by_field, field_of, input_key
from runtime.core.loras import Lora
from runtime.core.request import FIELDS, MAX_SIDE, OFF, GenerationRequest
from runtime.core.request_fields import SIZE_PATTERN, ImageFiles, MaskFile, Number, Prompt, VideoFile, read_size
from runtime.core.untrusted_files import DuplicateNameError, parse_json
from runtime.server.api_errors import refused
from runtime.server.gradio_requests import MAX_BODY_BYTES, MAX_UPLOAD_BYTES, charset_problem
from runtime.server.image_uploads import NAMELESS, plain_name
from runtime.server.visitor_limits import UploadLimit

JSON, FORM = "application/json", "multipart/form-data"
# JSON holds an image or a video as base64; larger ones are sent in a form.
MAX_JSON_BYTES = 8 << 20
_REFERENCE = "input_reference"
VIDEO_FIELDS = tuple(name for name, declared in FIELDS.items() if isinstance(declared, VideoFile))
# Those that can be images instead.
MASK_FIELDS = tuple(name for name, declared in FIELDS.items() if isinstance(declared, MaskFile))
# Those with several images.
_LISTS = {name: declared.most for name, declared in FIELDS.items() if isinstance(declared, ImageFiles)}
_IMAGE_KEY, _VIDEO_KEY = "image_url", "video_url"
# The fields that are files, and the keys of their address in JSON, of which one is given.
_FILES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("image", "last_image", *_LISTS, _REFERENCE), (_IMAGE_KEY,)),
    **dict.fromkeys(VIDEO_FIELDS, (_VIDEO_KEY,)),
    **dict.fromkeys(MASK_FIELDS, (_VIDEO_KEY, _IMAGE_KEY)),
}
_MOST_FILES = len(_FILES) - len(_LISTS) + sum(_LISTS.values())
# Those of a request.
FILE_FIELDS = tuple(name for name in _FILES if name != _REFERENCE)
# Whether a chat model writes the prompt in more detail first.
ENHANCE = "enhance"
_OWN = ("size", _REFERENCE, ENHANCE)
_MOST_FIELDS = 200
_MOST_VALUES = 500
_NESTED = re.compile(r"([a-z_0-9]{1,40})\[([a-z_0-9]{0,40})\]")
_DATA_TYPES = {
    _IMAGE_KEY: re.compile(r"data:image/[a-z0-9.+-]{1,40}"),
    _VIDEO_KEY: re.compile(r"data:video/[a-z0-9.+-]{1,40}"),
}
_BASE64 = "base64"
_EXAMPLES = {_IMAGE_KEY: "data:image/png;base64,…", _VIDEO_KEY: "data:video/mp4;base64,…"}
# JSON with more is read on a thread.
_QUICK_BYTES = 64 << 10
NUMBER_AS_TEXT = {"type": "string", "pattern": r"^ *[+-]?[0-9]+(\.[0-9]+)? *$"}
# Bodies that are larger than the fields of a request: of one user, and of all.
_MOST_UPLOADS, _MOST_UPLOADS_ALL = 2, 4

# The content and name of an image or a video.
File = tuple[bytes, str]


def known_fields() -> list[str]:
    """Return the names of the fields, OpenAI's first."""
    return [
        "prompt",
        "model",
        "seconds",
        *_OWN,
        *(name for name in FIELDS if name not in {"prompt", "model", "seconds"}),
    ]


def json_schema(reference: str) -> dict[str, Any]:
    """Return the schema of a request in JSON, from the declarations of the fields.

    Args:
        reference: template of the references to definitions.
    """
    schema = GenerationRequest.model_json_schema(ref_template=reference)
    properties: dict[str, Any] = schema["properties"]
    for name in FILE_FIELDS:
        described = {key: properties[name][key] for key in ("title", "description")}
        schema_of_file = _file_schema(_FILES[name])
        if name in _LISTS:
            (item,) = schema_of_file["anyOf"]
            schema_of_file = {"anyOf": [{"type": "array", "items": item, "maxItems": _LISTS[name]}]}
        if name in MASK_FIELDS:
            schema_of_file["anyOf"].append({"type": "string", "pattern": f"^{BOXES}"})
        properties[name] = {**described, "default": None, **schema_of_file}
    properties["model"]["description"] = "The ID of a model, from GET /v1/models."
    properties["backends"]["examples"] = [{"vae": "onnxruntime"}]
    properties["loras"]["examples"] = [["style:0.8"]]
    extra = {
        "size": {
            "title": "Size",
            "description": "Width and height of the video in pixels; replaces the fields width and height, and unless "
            "upscale is given, the video is not upscaled.",
            "anyOf": [{"type": "string", "pattern": SIZE_PATTERN}],
            "examples": ["832x480"],
        },
        _REFERENCE: {
            "title": "Input reference",
            "description": "The same as image.",
            **_file_schema(_FILES[_REFERENCE]),
        },
        ENHANCE: {
            "title": "Enhance",
            "description": "Whether the chat model that the owner has set writes the prompt in more detail first. The "
            "answer comes after that.",
            "default": False,
            "anyOf": [{"type": "boolean"}],
        },
    }
    for name, described in (properties | extra).items():
        if name not in schema["required"]:
            _accept(described, {"type": "null"}, *[NUMBER_AS_TEXT] * isinstance(FIELDS.get(name), Number))
    return {**schema, "title": "CreateVideo", "properties": {**properties, **extra}, "additionalProperties": False}


def _file_schema(keys: Sequence[str]) -> dict[str, Any]:
    """Return the schema of an image or a video in JSON."""
    files = [
        {
            "type": "object",
            "properties": {key: {"type": "string", "pattern": f"^{_EXAMPLES[key].partition('/')[0]}/"}},
            "required": [key],
            "additionalProperties": False,
        }
        for key in keys
    ]
    return {"anyOf": files, "examples": [{key: _EXAMPLES[key]} for key in keys]}


def _accept(described: dict[str, Any], *also: dict[str, str]) -> None:
    """Let the schema of a field accept more types."""
    kinds = described.pop("anyOf", None)
    if kinds is None:
        kinds = [{key: described.pop(key) for key in ("type", "enum") if key in described}]
    described["anyOf"] = [*kinds, *(kind for kind in also if kind not in kinds)]


def form_schema(reference: str) -> dict[str, Any]:
    """Return the schema of a request in a form; see `json_schema`."""
    schema = json_schema(reference)
    file = {"type": "string", "format": "binary"}
    files = {
        name: {key: value for key, value in schema["properties"][name].items() if key in {"title", "description"}}
        | ({"type": "array", "items": file, "maxItems": _LISTS[name]} if name in _LISTS else file)
        for name in _FILES
    }
    repeatable = {
        name: schema["properties"][name] | {"examples": [example]}
        for name, example in (("backends", "vae=onnxruntime"), ("loras", "style:0.8"))
    }
    return {**schema, "title": "CreateVideoForm", "properties": {**schema["properties"], **files, **repeatable}}


class BodyReader:
    """Reads bodies within limits. For one event loop."""

    def __init__(self) -> None:
        self._uploads = UploadLimit(_MOST_UPLOADS, _MOST_UPLOADS_ALL, lambda: refused(429, "server.uploads_busy"))

    async def read(self, request: Request, user: str) -> tuple[dict[str, Any], dict[str, File]]:
        """Return the values of a request's fields, and its images and videos. The values are not validated.

        The images and videos have keys as in `ResolvedRequest.inputs`.

        Raises:
            HTTPException: if the body is too large, incomplete, or not valid.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in {JSON, FORM}:
            raise refused(415, "server.api_media_type", given=shortened(kind))
        charset = charset_problem(request.headers["content-type"])
        if charset is not None:
            raise refused(415, "server.api_charset", given=shortened(charset))
        body = await self._body(request, user, MAX_JSON_BYTES if kind == JSON else MAX_UPLOAD_BYTES)
        if kind == FORM:
            values, files = await _from_form(request, body)
        elif len(body) > _QUICK_BYTES:
            values, files = await asyncio.to_thread(_from_json, body)
        else:
            values, files = _from_json(body)
        return set_values(values), files

    async def _body(self, request: Request, user: str, most: int) -> bytes:
        """Read a body; the large ones of few requests at once, since each takes its size of memory."""
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > most:
            raise refused(413, "server.body_too_large", maximum=most)
        stream, body = request.stream(), bytearray()

        async def read(limit: int) -> bool:
            """Read until more than `limit` bytes are there; return whether the body has ended before."""
            try:
                async for chunk in stream:
                    body.extend(chunk)
                    if len(body) > limit:
                        return False
            except ClientDisconnect as error:
                raise refused(400, "server.request_incomplete") from error
            return True

        if not await read(MAX_BODY_BYTES):
            with self._uploads.receiving(user):
                if len(body) > most or not await read(most):
                    raise refused(413, "server.body_too_large", maximum=most)
        return bytes(body)


def set_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a program has set: without null, which stands for a default, and with numbers as numbers.

    Args:
        values: of fields, by name; unknown names are kept.
    """
    fields = {}
    for name, value in values.items():
        optional = name in (*FIELDS, *_OWN) and name != "prompt"
        if value is not None or not optional:
            declared = FIELDS.get(name)
            fields[name] = declared.parse(value) if isinstance(declared, Number) and isinstance(value, str) else value
    return fields


def switch_of(values: Mapping[str, Any], name: str) -> bool:
    """Return a value that is true or false, also as text; false by default.

    Raises:
        InvalidRequestError: if it is neither.
    """
    match values.get(name):
        case True | "true":
            return True
        case None | False | "false":
            return False
        case _:
            raise InvalidRequestError(name, "server.api_not_a_switch")


def request_of(values: Mapping[str, Any], copies: Mapping[str, str]) -> GenerationRequest:
    """Return the request that a body describes.

    Args:
        values: as `BodyReader.read` returns them, with a model.
        copies: of its images and videos by keys as in `ResolvedRequest.inputs`, see `core.images`.

    Raises:
        InvalidRequestError: for an invalid value; names the body's field.
    """
    fields = {name: value for name, value in values.items() if name not in _OWN}
    unknown = next((name for name in fields if name not in FIELDS), None)
    if unknown is not None:
        raise InvalidRequestError(
            cut(unknown, 40), "request.unknown_field", name=shortened(unknown), known=known_fields()
        )
    if "size" in values:
        conflict = next((name for name in ("width", "height") if name in fields), None)
        if conflict is not None:
            raise InvalidRequestError("size", "server.api_excludes", name="size", other=conflict)
        fields["width"], fields["height"] = _size(values["size"])
        # Programs that name a size get it, also of a model whose videos are usually upscaled.
        fields.setdefault("upscale", OFF)
    for name in FILE_FIELDS:
        if fields.get(name) is not None and not is_boxes(name, fields[name]):
            raise _no_file(name)
    switch_of(values, ENHANCE)
    request = GenerationRequest.from_mapping({**fields, **by_field(copies)})
    by_name(request.loras)
    return request


def by_name(loras: Sequence[Lora]) -> tuple[Lora, ...]:
    """Return the LoRAs after checking that all are given by name; a page or program cannot open files of its choice.

    Raises:
        InvalidRequestError: for a path.
    """
    for lora in loras:
        if not lora.is_name:
            raise InvalidRequestError("loras", "form.lora_is_path", file=lora.file[:60])
    return tuple(loras)


def _from_json(body: bytes) -> tuple[dict[str, Any], dict[str, File]]:
    try:
        values = parse_json(body, max_values=_MOST_VALUES)
    except DuplicateNameError as error:
        name = cut(error.name, 40)
        raise refused(400, "server.api_field_repeated", name, name=shortened(error.name)) from error
    except ValueError as error:
        raise refused(400, "server.api_not_json", problem=cut(str(error).partition("\n")[0], 100)) from error
    if not isinstance(values, dict):
        raise refused(400, "server.not_an_object")
    files: dict[str, File] = {}
    for name, keys in _FILES.items():
        given = values.pop(name, None)
        if is_boxes(name, given):
            values[name] = given
            continue
        entries = given if name in _LISTS and isinstance(given, list) else [] if given is None else [given]
        for entry in entries:
            parts = {key: value for key, value in entry.items() if value is not None} if isinstance(entry, dict) else {}
            match [*parts.items()]:
                case [(key, str(url))] if key in keys:
                    _add_file(files, name, (_data_of(url, name), _nameless(name)))
                case _:
                    raise _no_file(name)
    return values, files


def is_boxes(field: str, value: object) -> bool:
    """Return whether the value of a field of files describes boxes instead, see `core.images.BoxMask`."""
    return field in MASK_FIELDS and isinstance(value, str) and value.startswith(BOXES)


def _nameless(field: str) -> str:
    """Return how messages name a file that was sent without a name."""
    return field if field in VIDEO_FIELDS else NAMELESS


def _no_file(field: str) -> InvalidRequestError:
    code = "server.api_mask" if field in MASK_FIELDS else "server.api_video"
    return InvalidRequestError(field, code if field in VIDEO_FIELDS else "server.api_image")


def _data_of(url: str, field: str) -> bytes:
    """Return the content of a data URL, as in RFC 2397; base64 may have line breaks, as in MIME, and lack its end."""
    head, comma, text = url.strip().partition(",")
    kind, *parameters = [part.strip().lower() for part in head.split(";")]
    if not comma or not any(_DATA_TYPES[key].fullmatch(kind) for key in _FILES[field]):
        raise _no_file(field)
    data = unquote_to_bytes(text)
    if _BASE64 not in parameters:
        return data
    data = b"".join(data.split())
    try:
        return base64.b64decode(data if data.endswith(b"=") else data + b"=" * (-len(data) % 4), validate=True)
    except ValueError as error:
        raise _no_file(field) from error


async def _from_form(request: Request, body: bytes) -> tuple[dict[str, Any], dict[str, File]]:
    replayed = Request(request.scope, _replay(body))
    try:
        form = await replayed.form(max_files=_MOST_FILES, max_fields=_MOST_FIELDS, max_part_size=MAX_BODY_BYTES)
    except HTTPException as error:
        raise _not_a_form(cut(error.detail, 100)) from error
    except (ValueError, LookupError, AssertionError) as error:
        raise _not_a_form("its parts cannot be read") from error
    try:
        return await _read_form(form)
    finally:
        await form.close()


def _not_a_form(problem: str) -> HTTPException:
    return refused(400, "server.api_not_a_form", problem=problem.rstrip("."), fields=_MOST_FIELDS, files=_MOST_FILES)


async def _read_form(form: FormData) -> tuple[dict[str, Any], dict[str, File]]:
    values: dict[str, Any] = {}
    files: dict[str, File] = {}
    for key, value in form.multi_items():
        nested = _NESTED.fullmatch(key)
        name, inner = (key, None) if nested is None else (nested[1], nested[2])
        if isinstance(value, UploadFile):
            if name not in _FILES or (inner is not None and (inner or name not in _LISTS)):
                raise InvalidRequestError(cut(key, 40), "server.api_image")
            # Browsers send a file field that was left empty as a file without name and content.
            if value.filename or value.size:
                _add_file(files, name, (await value.read(), plain_name(value.filename or _nameless(name))))
        elif inner is None and is_boxes(name, value):
            _add_text(values, name, None, value)
        elif name in _FILES:
            if inner not in _FILES[name] and (inner or value):
                raise _no_file(name)
            if value:
                _add_file(files, name, (_data_of(value, name), _nameless(name)))
        else:
            _add_text(values, name, inner, value)
    return values, files


def _add_text(values: dict[str, Any], name: str, inner: str | None, text: str) -> None:
    """Add the text of a form's field to the values; without text, the field is not set, unless it is a prompt.

    Args:
        inner: the name in brackets, such as a component of `backends`; empty for an entry of a list.
    """
    declared = FIELDS.get(name)
    if declared is not None and declared.repeatable:
        if not text:
            return
        if inner:
            mapping = values.setdefault(name, {})
            if isinstance(mapping, dict) and inner not in mapping:
                mapping[inner] = text
                return
        else:
            entries = values.setdefault(name, [])
            if isinstance(entries, list):
                entries.append(text)
                return
    elif inner is not None:
        key = f"{name}[{inner}]"
        raise InvalidRequestError(key, "request.unknown_field", name=shortened(key), known=known_fields())
    elif name not in values:
        values[name] = text if text or isinstance(declared, Prompt) or name not in (*FIELDS, *_OWN) else None
        return
    raise refused(400, "server.api_field_repeated", cut(name, 40), name=shortened(name))


def _add_file(files: dict[str, File], name: str, file: File) -> None:
    field = "image" if name == _REFERENCE else name
    if name in _LISTS:
        count = sum(field_of(key) == name for key in files)
        if count == _LISTS[name]:
            raise InvalidRequestError(name, "request.too_many_images", count=count + 1, most=count)
        field = input_key(name, count)
    if field in files:
        alias = "image" if name == _REFERENCE else _REFERENCE
        raise InvalidRequestError(name, "server.api_excludes", name=name, other=alias)
    files[field] = file


def _size(value: object) -> tuple[int, int]:
    size = read_size(value) if isinstance(value, str) else None
    if size is None or max(size) > MAX_SIDE:
        raise InvalidRequestError("size", "settings.not_a_size", source="size", value=shortened(value))
    return size


def _replay(body: bytes) -> Any:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive
