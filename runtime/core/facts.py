"""Facts: what happened, as a code and data. Each front end renders them with its own names for settings.

    fact = Fact("engine.stale", {"component": "transformer", "differs": ["torch"]})
    render(fact, words).what     "High-noise transformer: the engine was built with another torch."

Errors, warnings and the reasons in a plan are facts. No code parses rendered text. `core.messages` has a template for
every code; `Words` has what a front end calls settings and components.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from string import Formatter
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from runtime.core.environment import installer, program
from runtime.core.messages import MESSAGES
from runtime.core.messages.components import title_of
from runtime.core.units import about, byte_size, counted, duration, latency, memory_size, significant

_ATTENTIONS = {
    "native": "PyTorch's own attention",
    "cudnn": "cuDNN's attention",
    "flash": "FlashAttention 2",
    "flash3": "FlashAttention 3",
    "flash4": "FlashAttention 4",
    "sage": "SageAttention",
    "fp8": "cuDNN's attention in FP8",
    "sol": "Sol-Attn",
}
_QUANTIZATIONS = {"fp8": "FP8 weights", "bnb-8bit": "8-bit weights", "bnb-4bit": "4-bit weights"}
BACKEND_TITLES: Mapping[str, str] = {
    "tensorrt": "TensorRT",
    "tensorrt_rtx": "TensorRT for RTX",
    "inductor": "Inductor",
    "onnxruntime": "ONNX Runtime",
    "pytorch": "PyTorch",
}
# The command line's option for each request field; `core.request` adds those of its fields.
OPTIONS: dict[str, str] = {}
_LONGEST_VALUE = 40
# Of a list of words, and of a word in it.
_MOST_WORDS, _LONGEST_WORD = 12, 30
# Characters that change the direction of the text after them: names could look like other names.
BIDI_CONTROLS = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"


class Fact(BaseModel):
    """One statement without words: a code from `core.messages` and the data that its template needs.

    Attributes:
        code: dotted, lower case, such as "model.folder_missing".
        data: JSON values; a value may be another fact, which is the cause.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    code: str
    data: dict[str, Any] = Field(default_factory=dict)

    def __init__(self, code: str, data: Mapping[str, Any] | None = None) -> None:
        # Stored facts are validated: `data` may be anything then.
        plain = {name: _plain(value) for name, value in data.items()} if isinstance(data, Mapping) else data or {}
        super().__init__(code=code, data=plain)

    def __hash__(self) -> int:
        """Hash by code; facts with the same code and other data are different facts in the same bucket."""
        return hash(self.code)

    def __str__(self) -> str:
        """Return the statement in the words of the command line, for logs."""
        return render(self).what


def sentence(text: str) -> Fact:
    """Return a text that has no code as a fact."""
    return Fact("text", {"what": text, "remedy": ""})


def _read_sentences(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        return value
    return [sentence(item) if isinstance(item, str) else item for item in value]


# Facts as they are stored. Earlier versions stored sentences, also in MP4 files; they are read as facts.
Warnings = Annotated[tuple[Fact, ...], BeforeValidator(_read_sentences)]


class Text(NamedTuple):
    """A rendered fact: one line that describes it and, for errors, one line with the remedy."""

    what: str
    remedy: str = ""


class Words:
    """Names of settings and components in a front end; this class has those of the command line.

    Args:
        components: those of the model that facts are about, if known; see `core.messages.components`.
    """

    def __init__(self, components: Collection[str] = ()) -> None:
        self.components = components

    def setting(self, name: str, value: str | None = None) -> str:
        """Return how a request field, or one of its values, is named: "--offload", "--offload group"."""
        flag = OPTIONS.get(name, f"--{name.replace('_', '-')}")
        return flag if value is None else f"{flag} {value}"

    def component(self, name: str) -> str:
        """Return a component's title."""
        return title_of(name, self.components)

    def backend(self, name: str) -> str:
        """Return a backend's title."""
        return BACKEND_TITLES.get(name, name)

    def attention(self, name: str) -> str:
        """Return the title of an attention kernel."""
        return _ATTENTIONS.get(name.partition(":")[0], name)

    def quantization(self, name: str) -> str:
        """Return the name of quantized weights."""
        return _QUANTIZATIONS.get(name, name)


class _Settings:
    """`{set[offload]}` and `{set[offload=group]}` in a template."""

    def __init__(self, words: Words) -> None:
        self._words = words

    def __getitem__(self, key: str) -> str:
        name, separator, value = key.partition("=")
        return self._words.setting(name, value if separator else None)


class _Template(Formatter):
    """`str.format` with more conversions, such as `{free:memory}`: see `format_field`."""

    def __init__(self, words: Words) -> None:
        self._words = words

    def format_field(self, value: Any, format_spec: str) -> str:
        """Format one value; a fact among the data is rendered first."""
        if isinstance(value, Fact):
            text = render(value, self._words)
            if format_spec == "advice":
                return f"{text.what} {text.remedy}".strip()
            if format_spec == "badge":
                return short(value, self._words)
            value = text.remedy if format_spec == "remedy" else text.what
        words = self._words
        conversions: Mapping[str, Callable[[], str]] = {
            "memory": lambda: memory_size(value),
            "bytes": lambda: byte_size(value),
            "duration": lambda: duration(value),
            "about": lambda: about(value),
            "latency": lambda: latency(value),
            "times": lambda: significant(value, 3),
            "gib": lambda: f"{value / (1 << 30):.1f} GB",
            "or": lambda: " or ".join(map(str, value)),
            "kernel": lambda: words.attention(value),
            "weights": lambda: words.quantization(value),
            "latencies": lambda: ", ".join(f"{name} {latency(seconds)}" for name, seconds in sorted(value.items())),
            "component": lambda: words.component(value),
            "lower_component": lambda: lowered(words.component(value)),
            # {"names": …, "among": all components of the model}
            "named_components": lambda: ", ".join(lowered(title_of(part, value["among"])) for part in value["names"]),
            "lower_components": lambda: " or ".join(
                lowered(title_of(part, (*words.components, *value))) for part in value
            ),
            "setting": lambda: words.setting(*([value] if isinstance(value, str) else value)),  # name, [name, value]
            "list": lambda: ", ".join(self.format_field(item, "") for item in value),
            "words": lambda: first_words(value, "“{}”"),
            "sentence": lambda: str(value).rstrip("."),  # without the full stop, to be continued
            "sentences": lambda: " ".join(self.format_field(item, "") for item in value),
            "remedy": lambda: str(value),
            "appended": lambda: "".join(f"; {self.format_field(item, 'clause')}" for item in value),
            "measured": lambda: "measured here" if value else "estimated",
            "clause": lambda: lowered(str(value).rstrip(".")),  # a sentence inside another one
            "clauses": lambda: ", ".join(self.format_field(item, "clause") for item in value),
            "settings": lambda: " ".join(words.setting(name, item) for name, item in value.items()),  # by name
            "backend": lambda: words.backend(value),
            "field": lambda: str(value).replace("_", " ").capitalize(),
        }
        if format_spec in conversions:
            return conversions[format_spec]()
        if format_spec.startswith("n "):  # {gpus:n GPU} is "1 GPU", "2 GPUs"
            return counted(value, format_spec[2:])
        return format(value, format_spec) if value is not None else ""


def _values(words: Words) -> dict[str, Any]:
    """Return what every template may use besides its data."""
    return {"set": _Settings(words), "tandem": program(), "installer": installer()}


def shortened(value: object) -> str:
    """Return a user's value for a message: one line, at most about 40 characters."""
    return cut(repr(value), _LONGEST_VALUE)


def cut(text: str, most: int) -> str:
    """Return a text, or its first characters and an ellipsis if it is longer."""
    return text if len(text) <= most else f"{text[:most]}…"


def first_words(words: Sequence[str], form: str = "{}") -> str:
    """Return the first of many words of a prompt, as form.js does: "dragon, castle and 3 more".

    Args:
        form: of each word.
    """
    short = (cut(word, _LONGEST_WORD) for word in words[:_MOST_WORDS])
    rest = len(words) - _MOST_WORDS
    return ", ".join(map(form.format, short)) + (f" and {rest} more" if rest > 0 else "")


def lowered(text: str) -> str:
    """Return text with a lower-case first letter, unless its first word has other capitals: GPU, PyTorch."""
    rest = text.partition(" ")[0][1:]
    return text[:1].lower() + text[1:] if rest == rest.lower() else text


def capitalized(text: str) -> str:
    """Return text with an upper-case first letter, unless its first word is a name with digits, such as wan2.2-a14b."""
    first = text.partition(" ")[0]
    return text if any(character.isdigit() for character in first) else text[:1].upper() + text[1:]


def as_text(fact: Fact, words: Words | None = None) -> str:
    """Return a fact's sentence and remedy in one line; see `render`."""
    return " ".join(render(fact, words)).strip()


def render(fact: Fact, words: Words | None = None) -> Text:
    """Return a fact as text, in the words of a front end, by default the command line.

    A code that has no template, for instance from a newer Tandem's job store, is rendered as the code and its data.
    """
    words = words or Words()
    message = MESSAGES.get(fact.code)
    if message is None:
        return Text(f"{fact.code} {fact.data or ''}".strip())
    values = {**_values(words), **fact.data}
    template = _Template(words)
    try:
        return Text(template.vformat(message.what, (), values), template.vformat(message.remedy, (), values))
    except (KeyError, TypeError, ValueError, AttributeError):  # stored by another version, with other data
        return Text(f"{fact.code} {fact.data or ''}".strip())


def short(fact: Fact, words: Words | None = None) -> str:
    """Return a fact in a few words, lower case, without a full stop: its `badge`, else its text up to a colon."""
    words = words or Words()
    message = MESSAGES.get(fact.code)
    if message is None or not message.badge:
        return lowered(render(fact, words).what.partition(":")[0].rstrip("."))
    try:
        return _Template(words).vformat(message.badge, (), {**_values(words), **fact.data})
    except (KeyError, TypeError, ValueError, AttributeError):  # stored by another version, with other data
        return fact.code


def _plain(value: Any) -> Any:
    """Convert a value to JSON types: paths to text, tuples to lists. Facts are unchanged."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()  # paths may contain bytes that are not UTF-8
    if value is None or isinstance(value, bool | int | float | Fact):
        return value
    if isinstance(value, Mapping):
        if value.keys() == {"code", "data"}:  # a fact that was read back from JSON
            return Fact(value["code"], value["data"])
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return str(value)
