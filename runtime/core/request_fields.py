"""How a request field is declared: its type, limits and default, and the words that every front end uses for it.

    width: Annotated[int | Auto, Number(label="Width", help="Width in pixels.", group="video", low=1, high=8192)] = AUTO

`core.request` declares the fields. The command line's options, the web form's controls, the HTTP API's parameters, the
JSON schema and the table in docs/commands.md come from these declarations.
"""

import math
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from runtime.core.errors import InvalidRequestError
from runtime.core.facts import shortened
from runtime.core.images import MOST_BOXES, parse_boxes, parse_reference
from runtime.core.loras import END, EXPERTS, MAX_LORAS, MAX_WEIGHT, START, Lora, read_loras
from runtime.core.sparse_attention import SOL, is_sparse, read_sparse
from runtime.core.step_cache import STRENGTHS, read_step_cache

AUTO: Literal["auto"] = "auto"
Auto = Literal["auto"]
ALL = "all"

_WHITESPACE = "\t\n\r"
_LONGEST_FILE = 4_000
_PATH_CHARACTERS = frozenset("/\\")
# Of a width and a height; `SIZE_PATTERN` is for JSON Schema.
SIZE_PATTERN = r"^ *[0-9]{1,5} *[xX×*] *[0-9]{1,5} *$"
_SIZE = re.compile(r"\s*([0-9]{1,5})\s*[xX×*]\s*([0-9]{1,5})\s*")


def read_size(text: str) -> tuple[int, int] | None:
    """Return the width and height that a text such as "832x480", "832 × 480" or "832*480" spells; `None` for others."""
    size = _SIZE.fullmatch(text)
    return None if size is None else (int(size[1]), int(size[2]))


@dataclass(frozen=True)
class RequestField:
    """One field's declaration, as metadata of its annotation: it validates values and describes them.

    Attributes:
        label: the control's label in the web form.
        help: what the field means, in one or two sentences.
        group: where the web form shows it: "prompt", "video", "more", "acceleration", "loras", "image" or "finishing".
        flag: the command line's option, such as "--width"; empty for one that another option sets, or an argument.
        metavar: how the option's value is written in help texts.
        unset: the default as help texts state it.
        docs: the page below docs/ that explains it.
        placeholder: what an empty text field of the web form stands for; fields without one always have a value.
    """

    _: KW_ONLY
    label: str
    help: str
    group: Literal["prompt", "video", "more", "acceleration", "loras", "image", "finishing"]
    flag: str = ""
    metavar: str = ""
    unset: str = "the model's"
    docs: str = ""
    placeholder: str = ""

    # Whether the option can be repeated.
    repeatable: ClassVar[bool] = False

    def check(self, name: str, value: object) -> Any:
        """Return a value as the request keeps it.

        Raises:
            InvalidRequestError: if it is not valid.
        """
        raise NotImplementedError

    def parse(self, text: str) -> object:
        """Return what the text of an option or a text field stands for; `check` validates it."""
        return text

    def json_schema(self) -> JsonSchemaValue:
        """Return the limits as keywords of JSON Schema."""
        return {}

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Validate with `check` before pydantic does."""

        def checked(value: object, info: ValidationInfo) -> Any:
            assert info.field_name is not None
            return self.check(info.field_name, value)

        return core_schema.with_info_before_validator_function(checked, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Describe the field with its label, help text and limits."""
        return {**handler(schema), "title": self.label, "description": self.help, **self.json_schema()}


@dataclass(frozen=True)
class Prompt(RequestField):
    """Text that describes a video, in any script; without control characters.

    Attributes:
        longest: the most characters.
        optional: whether `None` stands for the model's own text.
    """

    longest: int
    optional: bool = False

    def check(self, name: str, value: object) -> str | None:
        """Return the text without surrounding white space."""
        if value is None and self.optional:
            return None
        if not isinstance(value, str):
            raise InvalidRequestError(name, "request.not_text")
        if len(value) > self.longest:
            raise InvalidRequestError(name, "request.text_too_long", characters=len(value), most=self.longest)
        for character in value:
            if character not in _WHITESPACE and unicodedata.category(character) in {"Cc", "Cs"}:
                raise InvalidRequestError(name, "request.control_character", character=f"U+{ord(character):04X}")
        if not self.optional and not value.strip():
            raise InvalidRequestError(name, "request.prompt_empty")
        return value.strip()

    def json_schema(self) -> JsonSchemaValue:
        """Return the longest length."""
        return {"maxLength": self.longest}


@dataclass(frozen=True)
class Name(RequestField):
    """A model's name or folder."""

    def check(self, name: str, value: object) -> str:
        """Return the name."""
        if not isinstance(value, str) or not value.strip() or not value.isprintable():
            raise InvalidRequestError(name, "request.model_name")
        return value


@dataclass(frozen=True)
class UpscalerName(RequestField):
    """An installed upscaler's name, or "auto". Never a path: a page or program cannot open files of its choice."""

    def check(self, name: str, value: object) -> str:
        """Return the name."""
        usable = isinstance(value, str) and value.strip() and value.isprintable() and len(value) <= _LONGEST_FILE
        if not isinstance(value, str) or not usable or not _PATH_CHARACTERS.isdisjoint(value):
            raise InvalidRequestError(name, "request.upscaler_name", value=shortened(value))
        return value

    def json_schema(self) -> JsonSchemaValue:
        """Return the longest length."""
        return {"maxLength": _LONGEST_FILE}


def check_limits(name: str, value: float, low: float, high: float) -> None:
    """Check that a field's number is within limits, both allowed; a whole number may be too large for a float.

    Raises:
        InvalidRequestError: if it is not.
    """
    if not low <= value <= high:
        nearest = low if value < low else high
        raise InvalidRequestError(
            name, "request.out_of_range", value=shortened(value), nearest=nearest, low=low, high=high
        )


@dataclass(frozen=True)
class Number(RequestField):
    """A number, or `open`.

    Attributes:
        low, high: the limits, both allowed.
        whole: whether it is a whole number.
        step: the step of the web form's control.
        open: the value that leaves the choice to Tandem: "auto", or `None`, which JSON may also write as "auto".
    """

    low: float
    high: float
    whole: bool = True
    step: float | None = None
    open: Auto | None = AUTO

    def check(self, name: str, value: object) -> int | float | Auto | None:
        """Return the number; a float without a fraction is a whole number, since JSON has one number type."""
        if value == AUTO or (value is None and self.open is None):
            return self.open
        if self.whole and isinstance(value, float) and value.is_integer():
            value = int(value)
        kinds = int if self.whole else (int, float)
        finite = not isinstance(value, float) or math.isfinite(value)
        limits = {"low": self.low, "high": self.high}
        if isinstance(value, bool) or not isinstance(value, kinds) or not finite:
            code = "request.not_whole" if self.whole else "request.not_a_number"
            raise InvalidRequestError(name, code, value=shortened(value), **limits)
        check_limits(name, value, self.low, self.high)
        return value if self.whole else float(value)

    def parse(self, text: str) -> object:
        """Return the number that a text spells, else the text."""
        for kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                continue
        return text

    def json_schema(self) -> JsonSchemaValue:
        """Return the limits."""
        return {"minimum": self.low, "maximum": self.high}


@dataclass(frozen=True)
class Choice(RequestField):
    """One of several values.

    Attributes:
        choices: the title of each value in the web form, the default first.
        off_flag: an option of the command line without a value, such as "--no-sound", for the value "off"; empty
            without one.
    """

    choices: Mapping[str, str]
    off_flag: str = ""

    def check(self, name: str, value: object) -> str:
        """Return the value; a whole number stands for its digits."""
        if isinstance(value, int) and not isinstance(value, bool) and str(value) in self.choices:
            value = str(value)
        if not isinstance(value, str) or value not in self.choices:
            raise InvalidRequestError(name, "request.not_a_choice", value=shortened(value), choices=list(self.choices))
        return value

    def json_schema(self) -> JsonSchemaValue:
        """Return the values."""
        return {"enum": list(self.choices)}


@dataclass(frozen=True)
class AttentionKernel(Choice):
    """A kernel of attention; a threshold can follow that of sparse attention, see `core.sparse_attention`."""

    def check(self, name: str, value: object) -> str:
        """Return the kernel, with its threshold where one is given."""
        if isinstance(value, str) and is_sparse(value):
            return read_sparse(name, value)
        return super().check(name, value)

    def json_schema(self) -> JsonSchemaValue:
        """Return the kernels, and the pattern of sparse attention with a threshold."""
        return {"anyOf": [super().json_schema(), {"pattern": f"^{SOL}:[0-9.]+$"}]}


@dataclass(frozen=True)
class Backends(RequestField):
    """A backend for each component, as a mapping or a list such as ["vae=pytorch"]; "all" stands for every component.

    Attributes:
        components: the components that can be named.
        choices: the title of each backend in the web form.
    """

    components: tuple[str, ...]
    choices: Mapping[str, str]

    repeatable: ClassVar[bool] = True

    def check(self, name: str, value: object) -> dict[str, str]:
        """Return the backends by component."""
        for component, backend in (entries := self._entries(name, value)).items():
            if component not in (*self.components, ALL):
                raise InvalidRequestError(
                    name, "request.unknown_component", component=shortened(component), components=self.components
                )
            if not isinstance(backend, str) or backend not in self.choices:
                raise InvalidRequestError(
                    name, "request.unknown_backend", backend=shortened(backend), choices=list(self.choices)
                )
        return entries

    def _entries(self, name: str, value: object) -> dict[str, str]:
        if isinstance(value, Mapping):
            return {component: backend for component, backend in value.items() if backend is not None}
        if not isinstance(value, list | tuple):
            raise InvalidRequestError(name, "request.not_backends", value=shortened(value))
        backends: dict[str, str] = {}
        for entry in value:
            component, separator, backend = entry.partition("=") if isinstance(entry, str) else ("", "", "")
            if not separator:
                raise InvalidRequestError(name, "request.not_a_backend", value=shortened(entry))
            if backends.setdefault(component, backend) != backend:
                raise InvalidRequestError(name, "request.backend_repeated", component=shortened(component))
        return backends

    def json_schema(self) -> JsonSchemaValue:
        """Return the components and backends."""
        return {
            "propertyNames": {"enum": [*self.components, ALL]},
            "additionalProperties": {"enum": list(self.choices)},
        }


@dataclass(frozen=True)
class Loras(RequestField):
    """A list of LoRAs, see `core.loras.read_loras`."""

    repeatable: ClassVar[bool] = True

    def check(self, name: str, value: object) -> tuple[Lora, ...]:
        """Return the LoRAs."""
        return read_loras(value)

    def json_schema(self) -> JsonSchemaValue:
        """Describe text, as in "style:0.8", and objects."""
        lora = {
            "type": "object",
            "properties": {
                "file": {"type": "string"},
                "weight": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_WEIGHT, "default": 1.0},
                "expert": {"enum": list(EXPERTS), "default": EXPERTS[0]},
                "start": {"type": "number", "minimum": START, "exclusiveMaximum": END, "default": START},
                "end": {"type": "number", "exclusiveMinimum": START, "maximum": END, "default": END},
            },
            "required": ["file"],
            "additionalProperties": False,
        }
        return {"maxItems": MAX_LORAS, "items": {"anyOf": [{"type": "string"}, lora]}}


@dataclass(frozen=True)
class ImageFile(RequestField):
    """The file of an image, or its copy, see `core.images`; `None` for no image."""

    # The refusal of what is no file's name.
    no_name: ClassVar[str] = "request.image_file"

    def check(self, name: str, value: object) -> str | None:
        """Return the text."""
        if value is None:
            return None
        if not isinstance(value, str) or not value.strip() or not value.isprintable() or len(value) > _LONGEST_FILE:
            raise InvalidRequestError(name, self.no_name, value=shortened(value))
        try:
            parse_reference(value)
        except ValueError as error:
            raise InvalidRequestError(name, "request.input_reference", value=shortened(value)) from error
        return value

    def json_schema(self) -> JsonSchemaValue:
        """Return the longest length."""
        return {"maxLength": _LONGEST_FILE}


@dataclass(frozen=True)
class VideoFile(ImageFile):
    """The file of a video, or its copy; `None` for no video."""

    no_name: ClassVar[str] = "request.video_file"


@dataclass(frozen=True)
class MaskFile(VideoFile):
    """The file of a video, or of an image that holds for all frames, or its copy, or boxes; `None` for none."""

    no_name: ClassVar[str] = "request.mask_file"

    def check(self, name: str, value: object) -> str | None:
        """Return the text, that of boxes as `core.images.BoxMask.reference` writes it."""
        text = super().check(name, value)
        try:
            boxes = None if text is None else parse_boxes(text)
        except ValueError as error:
            raise InvalidRequestError(name, "request.boxes", value=shortened(value), most=MOST_BOXES) from error
        return text if boxes is None else boxes.reference


@dataclass(frozen=True)
class ImageFiles(ImageFile):
    """The files of several images, or their copies, see `core.images`.

    Attributes:
        most: how many there can be.
    """

    most: int

    repeatable: ClassVar[bool] = True

    def check(self, name: str, value: object) -> Any:
        """Return the texts, without empty ones."""
        if not isinstance(value, list | tuple):
            raise InvalidRequestError(name, self.no_name, value=shortened(value))
        files = [file for file in (super(ImageFiles, self).check(name, entry) for entry in value) if file is not None]
        if len(files) > self.most:
            raise InvalidRequestError(name, "request.too_many_images", count=len(files), most=self.most)
        return tuple(files)

    def json_schema(self) -> JsonSchemaValue:
        """Return the largest number and the longest length."""
        return {"maxItems": self.most, "items": {"type": "string", "maxLength": _LONGEST_FILE}}


@dataclass(frozen=True)
class Scales(RequestField):
    """One number or several, as a number, a list, or text such as "1, 0.5".

    Attributes:
        low, high: the limits of each, both allowed.
        most, least: how many there can be; if there can be none, empty text stands for none.
    """

    low: float
    high: float
    most: int
    least: int = 1

    def check(self, name: str, value: object) -> tuple[float, ...]:
        """Return the numbers."""
        if isinstance(value, str) and len(value) <= _LONGEST_FILE:
            value = self.parse(value)
        entries = list(value) if isinstance(value, list | tuple) else [value]
        if not self.least <= len(entries) <= self.most:
            raise InvalidRequestError(name, "request.scales", value=shortened(value), most=self.most)
        return tuple(self._checked(name, entry) for entry in entries)

    def _checked(self, name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InvalidRequestError(name, "request.not_numbers", value=shortened(value), low=self.low, high=self.high)
        check_limits(name, value, self.low, self.high)
        return float(value)

    def parse(self, text: str) -> object:
        """Return the numbers that a text spells, with commas between them, else the text."""
        if not self.least and not text.strip():
            return []
        try:
            return [float(part) for part in text.split(",")]
        except ValueError:
            return text

    def json_schema(self) -> JsonSchemaValue:
        """Describe a number, text, and a list of numbers."""
        number = {"type": "number", "minimum": self.low, "maximum": self.high}
        several = {"type": "array", "items": number, "minItems": self.least, "maxItems": self.most}
        return {"anyOf": [number, several, {"type": "string", "pattern": rf"^[0-9., ]{'+' if self.least else '*'}$"}]}


@dataclass(frozen=True)
class Sides(Scales):
    """A number for each of four sides: left, top, right and bottom, or one for all; see `Scales`."""

    def check(self, name: str, value: object) -> tuple[float, ...]:
        """Return four numbers."""
        numbers = super().check(name, value)
        if len(numbers) not in {1, self.most}:
            raise InvalidRequestError(name, "request.sides", value=shortened(value))
        return numbers * (self.most // len(numbers))


@dataclass(frozen=True)
class StepCache(RequestField):
    """A cache across denoising steps, see `core.step_cache.read_step_cache`.

    Attributes:
        choices: the title of each kind in the web form.
    """

    choices: Mapping[str, str] = field(default_factory=dict)

    def check(self, name: str, value: object) -> str:
        """Return the kind, with its strength where one is given."""
        return read_step_cache(value)

    def json_schema(self) -> JsonSchemaValue:
        """Return examples: a strength can follow the kind."""
        return {"examples": [*self.choices, *(f"{kind}:{strengths.most:g}" for kind, strengths in STRENGTHS.items())]}
