"""What was asked for.

A `GenerationRequest` is frozen and valid by itself: every value is of the right type and within bounds that hold for
any model. What only a model can judge (strides, frame counts) is judged by `planner.resolve`. Knows nothing about
models, machines or files.
"""

import dataclasses
import math
import unicodedata
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from runtime.core.errors import InvalidRequestError
from runtime.core.loras import Lora, read_loras
from runtime.core.step_cache import NONE, read_step_cache

AUTO: Literal["auto"] = "auto"
Auto = Literal["auto"]

COMPONENTS = ("text_encoder", "transformer", "transformer_2", "vae")
ALL = "all"
BACKENDS = (AUTO, "tensorrt", "inductor", "onnxruntime", "pytorch")
BUILDS = (AUTO, "missing", "never", "always")
OFFLOADS = (AUTO, "none", "model", "group", "sequential")
QUANTIZATIONS = (AUTO, "none", "bnb-8bit", "bnb-4bit", "fp8")
RETRY = "retry"
MAX_GPUS = 16
ON_OUT_OF_MEMORY = (RETRY, "any", "ask")
ATTENTIONS = (AUTO, "native", "cudnn", "flash", "flash3", "flash4", "sage", "fp8")
COMPILES = (AUTO, "never", "always")
VAE_PRECISIONS = (AUTO, "float32", "bfloat16", "float16")

MAX_PROMPT_CHARACTERS = 5_000
MAX_SIDE = 8_192
MAX_FRAMES = 4_001
MAX_FPS = 120
MAX_STEPS = 1_000
MAX_GUIDANCE = 100.0
# Beyond these, with as many steps as there may be, neighbouring noise levels of diffusers' schedulers come to be one.
MIN_SHIFT, MAX_SHIFT = 0.1, 100.0
# JSON and browsers keep integers exact up to here.
MAX_SEED = 2**53 - 1

_WHITESPACE = "\t\n\r"


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One video, as asked for.

    Attributes:
        prompt: what the video shows.
        negative_prompt: what it should not show; `None` takes the model's own default.
        model: a catalogue name or a folder in diffusers' format.
        width, height: pixels.
        frames: number of frames in the clip.
        fps: frames per second of the MP4; does not change what is generated.
        steps: denoising steps.
        guidance_scale: classifier-free guidance of the (high-noise) transformer; 1 or less turns it off.
        guidance_scale_2: the same for the low-noise transformer, where the model has one.
        seed: of the initial noise.
        backends: what runs each component: one of `BACKENDS` by component, or by "all" for those not named.
        build: whether engines are built first: those that are missing, never, or always anew. "auto" builds what is
            missing for a backend that was asked for by name.
        offload: where weights wait while they are not used: on the device ("none"), or in RAM, brought by whole part
            ("model"), by group of blocks ("group") or by layer ("sequential").
        quantization: of the transformers' weights in PyTorch: "none", "bnb-8bit", "bnb-4bit" or "fp8".
        on_out_of_memory: what follows when memory runs out: the job goes on in the next more frugal way that gives the
            same video ("retry"), or in any, which may quantize weights or decode in tiles ("any"), or it ends and says
            which way there is ("ask").
        gpus: how many GPUs share the job; "auto" takes all that are alike, where that is faster.
        loras: what is added to the transformers' weights, see `core.loras.read_loras`.
        step_cache: what is computed once for several denoising steps, see `core.step_cache.read_step_cache`.
        attention: what computes the transformers' attention in PyTorch, one of `ATTENTIONS`; "sage" and "fp8" round to
            8 bits, and are never taken unasked.
        compile: whether the transformers' blocks are compiled in PyTorch: where it pays off for the clip ("auto"),
            "never" or "always".
        shift: how far the scheduler's noise levels are moved towards noise; `None` takes what the model's folder says.
        vae_precision: in which the VAE decodes in PyTorch, one of `VAE_PRECISIONS`; "auto" takes bfloat16 where the
            transformers do.

    Raises:
        InvalidRequestError: for a value out of bounds, naming the field and what would do.
    """

    prompt: str
    negative_prompt: str | None = None
    model: str = "diorama"
    width: int | Auto = AUTO
    height: int | Auto = AUTO
    frames: int | Auto = AUTO
    fps: int | Auto = AUTO
    steps: int | Auto = AUTO
    guidance_scale: float | Auto = AUTO
    guidance_scale_2: float | Auto = AUTO
    seed: int | Auto = AUTO
    backends: Mapping[str, str] = dataclasses.field(default_factory=dict)
    build: str = AUTO
    offload: str = AUTO
    quantization: str = AUTO
    on_out_of_memory: str = RETRY
    gpus: int | Auto = 1
    loras: tuple[Lora, ...] = ()
    step_cache: str = NONE
    attention: str = AUTO
    compile: str = AUTO
    shift: float | None = None
    vae_precision: str = AUTO

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", _text("prompt", self.prompt))
        if not self.prompt:
            raise InvalidRequestError("prompt", "The prompt is empty.", "Say in a sentence what the video shows.")
        if self.negative_prompt is not None:
            object.__setattr__(self, "negative_prompt", _text("negative_prompt", self.negative_prompt))
        if not isinstance(self.model, str) or not self.model.strip() or not self.model.isprintable():
            raise InvalidRequestError(
                "model", "The model's name is empty or unreadable.", "Give a name from `models list`, or a folder."
            )
        for name, low, high in (
            ("width", 1, MAX_SIDE),
            ("height", 1, MAX_SIDE),
            ("frames", 1, MAX_FRAMES),
            ("fps", 1, MAX_FPS),
            ("steps", 1, MAX_STEPS),
            ("seed", 0, MAX_SEED),
            ("gpus", 1, MAX_GPUS),
        ):
            object.__setattr__(self, name, _integer(name, getattr(self, name), low, high))
        for name in ("guidance_scale", "guidance_scale_2"):
            object.__setattr__(self, name, _number(name, getattr(self, name), 0.0, MAX_GUIDANCE))
        object.__setattr__(self, "shift", _or_none("shift", self.shift, MIN_SHIFT, MAX_SHIFT))
        object.__setattr__(self, "backends", _backends(self.backends))
        object.__setattr__(self, "loras", read_loras(self.loras))
        object.__setattr__(self, "step_cache", read_step_cache(self.step_cache))
        for name, known in (
            ("build", BUILDS),
            ("offload", OFFLOADS),
            ("quantization", QUANTIZATIONS),
            ("on_out_of_memory", ON_OUT_OF_MEMORY),
            ("attention", ATTENTIONS),
            ("compile", COMPILES),
            ("vae_precision", VAE_PRECISIONS),
        ):
            if getattr(self, name) not in known:
                raise InvalidRequestError(
                    name, f"{name} is {_shown(getattr(self, name))}.", f"Take one of {', '.join(known)}."
                )

    def backend(self, component: str) -> str:
        """Return the backend that was asked for, for one component."""
        return self.backends.get(component, self.backends.get(ALL, AUTO))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "GenerationRequest":
        """Build a request from a mapping such as JSON; unknown keys are refused."""
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise InvalidRequestError(name, f"There is no setting {name!r}.", f"Settings are: {', '.join(known)}.")
        if "prompt" not in values:
            raise InvalidRequestError("prompt", "There is no prompt.", "Say in a sentence what the video shows.")
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """Return every field by name, as JSON types."""
        return asdict(self)


def label(field: str) -> str:
    """Return a field's name as people read it: `guidance_scale` is "guidance scale"."""
    return field.replace("_", " ")


def _backends(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(
            "backends", f"backends is {_shown(value)}.", 'Give a backend by component, as in {"vae": "pytorch"}.'
        )
    for component, backend in value.items():
        if component not in (*COMPONENTS, ALL):
            raise InvalidRequestError(
                "backends",
                f"There is no component {_shown(component)}.",
                f"Components are {', '.join(COMPONENTS)}; {ALL} stands for every one.",
            )
        if backend not in BACKENDS:
            raise InvalidRequestError(
                "backends", f"There is no backend {_shown(backend)}.", f"Take one of {', '.join(BACKENDS)}."
            )
    return dict(value)


def _text(field: str, value: object) -> str:
    name = label(field)
    if not isinstance(value, str):
        raise InvalidRequestError(field, f"The {name} is not text.", "Write it as a sentence.")
    if len(value) > MAX_PROMPT_CHARACTERS:
        raise InvalidRequestError(
            field,
            f"The {name} has {len(value):,} characters; at most {MAX_PROMPT_CHARACTERS:,} are read.",
            "Shorten it to what the video should show.",
        )
    for character in value:
        if character not in _WHITESPACE and unicodedata.category(character) in {"Cc", "Cs"}:
            raise InvalidRequestError(
                field,
                f"The {name} holds the control character U+{ord(character):04X}.",
                "Remove it, or type the text again.",
            )
    return value.strip()


def _integer(field: str, value: object, low: int, high: int) -> int | Auto:
    if value == AUTO:
        return AUTO
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(
            field, f"{label(field)} is {_shown(value)}, not a whole number.", f"Give one from {low} to {high}, or auto."
        )
    if not low <= value <= high:
        raise InvalidRequestError(field, f"{label(field)} is {_shown(value)}.", f"Give one from {low} to {high}.")
    return value


def _number(field: str, value: object, low: float, high: float) -> float | Auto:
    if value == AUTO:
        return AUTO
    # A whole number may be too large for a float.
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or (isinstance(value, float) and not math.isfinite(value))
    ):
        raise InvalidRequestError(
            field, f"{label(field)} is {_shown(value)}, not a number.", f"Give one from {low:g} to {high:g}, or auto."
        )
    if not low <= value <= high:
        raise InvalidRequestError(field, f"{label(field)} is {_shown(value)}.", f"Give one from {low:g} to {high:g}.")
    return float(value)


def _or_none(field: str, value: object, low: float, high: float) -> float | None:
    number = AUTO if value is None else _number(field, value, low, high)
    return None if isinstance(number, str) else number


def _shown(value: object) -> str:
    text = repr(value)
    limit = 40
    return text if len(text) <= limit else text[:limit] + "…"
