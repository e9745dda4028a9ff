"""Programs: the modules that are exported and built as engines, with their input and output tensors.

A component has one program, a VAE decoder up to two. The tensors are the same for every backend and precision. The
batch size is 1:

    text_encoder  input_ids, attention_mask (1, L) int64                        -> embeds (1, L, D), zero in the padding
    transformer   latents (1, C, F, H, W), timestep (1,), text_embeds (1, L, D) -> velocity, like latents
    vae_first     z (1, C, 1, h, w)                                             -> frames (1, H, W, 3), cache_0 …
    vae_next      z (1, C, n, h, w), cache_0 …                                  -> frames (4n, H, W, 3), cache_0 …
    vae_clip      z (1, C, n, h, w)                                             -> frames (4(n - 1) + 1, H, W, 3)

A transformer may also have programs of block engines (`ModelSpec.block_programs`), whose tensors the family defines:
see `BlockPart`.

A VAE decoder has either `vae_first` and `vae_next`, which decode a clip in steps, or `vae_clip`; `ModelSpec.programs`
states which. An imported engine may be a `vae_clip` for any family.

Tensors are float32, except the int64 inputs and the caches, which have the dtype that the program computes in. Frames
are in -1 to 1.

Engine keys contain a hash of this module's code and that of `engines.fp8` (`key_parts.export_revision`): changing them
makes every engine stale.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import torch
from pydantic import TypeAdapter

from runtime.core.errors import EngineError
from runtime.core.plan import ComponentPlan, LatentSize, is_block_program
from runtime.engines.fp8 import ACTIVATIONS, Fp8Part
from runtime.engines.key_parts import BLOCK_TOKENS
from runtime.models.quantization import FP8
from runtime.models.registry import components_of
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_module
from runtime.planner.engine_index import ShapeProfile
from runtime.upstream.torch import without_computing

_INPUTS = {
    "text_encoder": ("input_ids", "attention_mask"),
    "transformer": ("latents", "timestep", "text_embeds"),
    "vae_first": ("z",),
    "vae_next": ("z",),
    "vae_clip": ("z",),
}
_OUTPUTS = {"text_encoder": "embeds", "transformer": "velocity"}
TEXT_PADDING = "text_padding"
# The text is cut to a multiple of this many tokens, so that prompts of similar length share a shape.
_TEXT_STEP = 8
_WORDS_IN_EXAMPLE = 24
_EXAMPLE_TIMESTEP = 700.0
CACHE = "cache_"
_AXES = ("frames", "height", "width")
_LATENT_AXES = {2: "frames", 3: "height", 4: "width"}
# The dynamic axes of each tensor, with the names of their sizes. A cache always has two frames. The VAE's first step
# always takes and returns one frame, so the profiles of `vae_first` have one frame too.
_DYNAMIC_AXES: Mapping[str, Mapping[int, str]] = {
    "latents": _LATENT_AXES,
    "velocity": _LATENT_AXES,
    "z": _LATENT_AXES,
    "frames": {0: "frames", 1: "height", 2: "width"},
    CACHE: {3: "height", 4: "width"},
    "text_embeds": {1: "text"},
}
_SMALLEST_DYNAMIC = 2
# Keys of an engine file's metadata: for its `IOSignature`, and for {name: [dtype, shape]} of the weights that a session
# must supply.
METADATA_KEY = "tandem.edges"
WEIGHTS_KEY = "tandem.weights"

# The named size of the axis that counts tokens.
TOKENS = "tokens"

# Makes the exportable form of a program: a module that takes and returns the tensors above. Arguments: the model, the
# program's name, and a function that loads the component's weights. The form has these attributes:
#   text encoder   vocabulary: number of tokens
#   VAE step       cache_count: number of caches
#   transformer    cuts_text: whether it also takes `text_padding`, see `cut_text`; optional
# For a program of block engines it is a `BlockPart`; the weights are not loaded.
MakeForm = Callable[[ModelSpec, str, Callable[[], torch.nn.Module]], torch.nn.Module]


# The size of an axis: fixed, or (name, factor) for a multiple of a named size.
Size = int | tuple[str, int]
# The shapes of all inputs by name, at a profile's minimum, optimum and maximum.
Shapes = tuple[Mapping[str, tuple[int, ...]], Mapping[str, tuple[int, ...]], Mapping[str, tuple[int, ...]]]


@dataclass(frozen=True)
class TensorSignature:
    """Name, torch dtype (by name) and sizes of one input or output."""

    name: str
    dtype: str
    sizes: tuple[Size, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def shape(self, named_sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape for given values of the named sizes."""
        return tuple(size if isinstance(size, int) else named_sizes[size[0]] * size[1] for size in self.sizes)


@dataclass(frozen=True)
class IOSignature:
    """The input and output tensors of an engine: stored in the engine file, checked on every call.

    Inductor's libraries read memory without checking sizes, so a tensor of another shape must never reach one.

    Attributes:
        inputs: in the order of the program's arguments.
        outputs: in the order in which the program returns them.
        ranges: minimum and maximum of each named size.
    """

    inputs: tuple[TensorSignature, ...]
    outputs: tuple[TensorSignature, ...]
    ranges: Mapping[str, tuple[int, int]]

    @property
    def names(self) -> frozenset[str]:
        """The inputs' names."""
        return frozenset(tensor.name for tensor in self.inputs)

    def to_text(self) -> str:
        """Return the signature as JSON."""
        return _SIGNATURE.dump_json(self).decode()

    @classmethod
    def from_text(cls, text: str) -> "IOSignature":
        """Parse the result of `to_text`.

        Raises:
            ValueError: if the text is invalid.
        """
        return _SIGNATURE.validate_json(text)

    def convert(
        self, inputs: Mapping[str, torch.Tensor], device: torch.device
    ) -> tuple[list[torch.Tensor], dict[str, int]]:
        """Return the inputs in order, contiguous, with the engine's dtypes and on its device, and the named sizes.

        Raises:
            EngineError: if the names differ, or a shape is one that the engine was not built for.
        """
        if set(inputs) != self.names:
            raise EngineError("engine.other_inputs", expected=sorted(self.names), given=sorted(inputs))
        named_sizes: dict[str, int] = {}
        for tensor in self.inputs:
            self._check(tensor, tuple(inputs[tensor.name].shape), named_sizes)
        converted = [inputs[one.name].to(device=device, dtype=one.torch_dtype).contiguous() for one in self.inputs]
        return converted, named_sizes

    def _check(self, tensor: TensorSignature, shape: tuple[int, ...], named_sizes: dict[str, int]) -> None:
        """Raise an `EngineError` if a shape does not match; add its named sizes to `named_sizes`."""
        matches = len(shape) == len(tensor.sizes)
        for size, given in zip(tensor.sizes, shape, strict=False):
            if isinstance(size, int):
                matches &= given == size
            else:
                name, factor = size
                low, high = self.ranges[name]
                count, rest = divmod(given, factor)
                matches &= not rest and low <= count <= high and named_sizes.setdefault(name, count) == count
        if not matches:
            expected = "×".join(self._size_text(size) for size in tensor.sizes)
            given_text = "×".join(map(str, shape))
            raise EngineError("engine.other_shape", tensor=tensor.name, expected=expected, given=given_text)

    def _size_text(self, size: Size) -> str:
        if isinstance(size, int):
            return str(size)
        low, high = self.ranges[size[0]]
        return f"({low * size[1]} to {high * size[1]})"


_SIGNATURE = TypeAdapter(IOSignature)


@dataclass(frozen=True)
class Program:
    """A program of a model, with its weights.

    Attributes:
        name: "text_encoder", "transformer", "vae_first", "vae_next" or "vae_clip".
        module: the exportable form, in evaluation mode.
        spec: the model.
    """

    name: str
    module: torch.nn.Module
    spec: ModelSpec

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def cache_count(self) -> int:
        """The number of caches that a step of the VAE returns; 0 for other programs."""
        return int(getattr(self.module, "cache_count", 0))

    @property
    def input_names(self) -> tuple[str, ...]:
        """The inputs in the order of the module's arguments."""
        return (*_INPUTS[self.name], *(_cache_names(self.cache_count) if self.name == "vae_next" else ()))

    @property
    def output_names(self) -> tuple[str, ...]:
        """The outputs in the order in which the module returns them."""
        return (_OUTPUTS.get(self.name, "frames"), *_cache_names(self.cache_count))

    @property
    def cuts_text(self) -> bool:
        """Whether the form can take a text without its padding; see `cut_text`."""
        return bool(getattr(self.module, "cuts_text", False))

    @torch.inference_mode()
    def run(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Run the module in PyTorch, with the interface of a session."""
        outputs = self.module(*(inputs[name] for name in self.input_names))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return dict(zip(self.output_names, outputs, strict=True))

    def inputs(self, latent: LatentSize, seed: int = 0) -> dict[str, torch.Tensor]:
        """Return random inputs of the magnitudes that a clip has. They are drawn on the CPU, so equal on every device.

        Args:
            latent: (frames, height, width) as a `ShapeProfile` of this program counts them.
        """
        generator = torch.Generator("cpu").manual_seed(seed)

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(self.device)

        length, channels = self.spec.max_sequence_length, self.spec.vae.z_dim
        words = torch.arange(length, device=self.device)[None, :] < min(_WORDS_IN_EXAMPLE, length)
        if self.name == "text_encoder":
            vocabulary: Any = self.module.vocabulary
            ids = torch.randint(vocabulary, (1, length), generator=generator).to(self.device)
            return {"input_ids": ids * words, "attention_mask": words.long()}
        if self.name == "transformer":
            return {
                "latents": noise(1, channels, *latent),
                "timestep": torch.full((1,), _EXAMPLE_TIMESTEP, device=self.device),
                "text_embeds": noise(1, length, self.spec.transformer.text_dim) * words.unsqueeze(-1),
            }
        inputs = {"z": noise(1, channels, *latent)}
        if self.name == "vae_next":
            # The caches are those of a first step on other noise.
            before = noise(1, channels, 1, *latent[1:])
            with torch.inference_mode():
                _, *caches = self.module(before)
            inputs |= dict(zip(_cache_names(len(caches)), caches, strict=True))
        return inputs

    def example(self, profile: ShapeProfile, *, cut: bool = False) -> dict[str, torch.Tensor]:
        """Return the tensors that the program is exported with: `inputs` at the profile's optimal size.

        Args:
            cut: whether the transformer's text is cut by `cut_text`.
        """
        inputs = self.inputs(profile.opt)
        # Tensors created in inference mode cannot be traced.
        inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        return cut_text(inputs) if cut and self.cuts_text else inputs

    def shapes(self, profile: ShapeProfile) -> Shapes:
        """Return the shapes of all inputs by name at the profile's minimum, optimum and maximum. Computes nothing."""

        def at(latent: LatentSize) -> Mapping[str, tuple[int, ...]]:
            with without_computing(real_weights=True):
                return {name: tuple(tensor.shape) for name, tensor in self.inputs(latent).items()}

        return at(profile.min), at(profile.opt), at(profile.max)

    def export(self, profile: ShapeProfile, *, cut: bool = False) -> torch.export.ExportedProgram:
        """Export with `torch.export`; sizes are dynamic where the profile's minimum and maximum differ.

        Args:
            cut: whether the transformer takes text that `cut_text` has cut, of any length.
        """
        example = self.example(profile, cut=cut)
        signature = self.signature(profile, example)
        dims = {name: torch.export.Dim(name, min=low, max=high) for name, (low, high) in signature.ranges.items()}
        shapes: list[Any] = [
            {
                axis: dims[size[0]] if size[1] == 1 else size[1] * dims[size[0]]
                for axis, size in enumerate(tensor.sizes)
                if not isinstance(size, int)
            }
            for tensor in signature.inputs
        ]
        if self.name == "vae_next":
            # The caches are one variadic argument.
            shapes = [shapes[0], tuple(shapes[1:])]
        with torch.no_grad():
            return torch.export.export(self.module, tuple(example.values()), dynamic_shapes=tuple(shapes), strict=False)

    def signature(self, profile: ShapeProfile, example: dict[str, torch.Tensor]) -> IOSignature:
        """Return the input and output tensors of an engine for `profile`.

        Args:
            example: `example(profile)`.
        """
        patches = self.spec.transformer.patch_size if self.name == "transformer" else (1, 1, 1)
        dynamic: dict[str, int] = {}
        ranges: dict[str, tuple[int, int]] = {}
        for axis, patch in enumerate(patches):
            if profile.min[axis] != profile.max[axis]:
                dynamic[_AXES[axis]] = profile.opt[axis] // patch
                ranges[_AXES[axis]] = -(-profile.min[axis] // patch), profile.max[axis] // patch
        if TEXT_PADDING in example:
            dynamic["text"] = example["text_embeds"].shape[1]
            ranges["text"] = _SMALLEST_DYNAMIC, self.spec.max_sequence_length

        def describe(name: str, tensor: torch.Tensor) -> TensorSignature:
            named = _DYNAMIC_AXES.get(CACHE if name.startswith(CACHE) else name, {})
            sizes: list[Size] = list(tensor.shape)
            for axis, size in named.items():
                # Sizes of pixels and caches are multiples of those of the latents.
                if size in dynamic:
                    sizes[axis] = size, tensor.shape[axis] // dynamic[size]
            return TensorSignature(name, str(tensor.dtype).removeprefix("torch."), tuple(sizes))

        # Fake tensors give the output shapes without computing.
        with without_computing(real_weights=True) as mode, torch.no_grad():
            outputs = self.module(*(mode.from_tensor(tensor) for tensor in example.values()))
        given = zip(self.output_names, outputs if isinstance(outputs, tuple) else (outputs,), strict=True)
        return IOSignature(
            tuple(describe(name, tensor) for name, tensor in example.items()),
            tuple(describe(name, tensor) for name, tensor in given),
            ranges,
        )


class BlockTensor(NamedTuple):
    """Sizes of an input or output of a `BlockPart`, `TOKENS` for the tokens, and its dtype if not the precision."""

    sizes: tuple[int | str, ...]
    dtype: str = ""

    def shape(self, tokens: int) -> tuple[int, ...]:
        """Return the shape for a number of tokens."""
        return tuple(tokens if isinstance(size, str) else size for size in self.sizes)


class BlockPart(Protocol):
    """The form of a block engine's program: a part of a transformer's block that computes each token by itself.

    It is called with `inputs` and then `weights`, and returns `outputs`, in these orders.

    Attributes:
        inputs, outputs: names.
        weights: the path of the parameter within a block, by the name of the input for it.
        tensors: by name.
    """

    inputs: ClassVar[tuple[str, ...]]
    outputs: ClassVar[tuple[str, ...]]
    weights: ClassVar[Mapping[str, str]]
    tensors: Mapping[str, BlockTensor]


@dataclass(frozen=True)
class BlockProgram(Program):
    """A program of block engines, whose weights are inputs. Its profiles do not depend on the latents' size.

    Attributes:
        dtype: the dtype of activations, by name.
        placed: the device of its inputs.
        tokens: the most tokens of one call.
    """

    dtype: str
    placed: torch.device
    tokens: int

    @property
    def part(self) -> BlockPart:
        """The form."""
        return cast("BlockPart", self.module)

    @property
    def device(self) -> torch.device:
        return self.placed

    @property
    def input_names(self) -> tuple[str, ...]:
        return (*self.part.inputs, *self.part.weights)

    @property
    def output_names(self) -> tuple[str, ...]:
        return self.part.outputs

    def inputs(self, latent: LatentSize, seed: int = 0) -> dict[str, torch.Tensor]:
        """Return random inputs for `tokens` tokens; products with the weights keep the magnitude of activations."""
        return self.inputs_for(self.tokens, seed)

    def inputs_for(self, tokens: int, seed: int = 0) -> dict[str, torch.Tensor]:
        """Return random inputs for a number of tokens. They are drawn on the CPU, so equal on every device."""
        generator = torch.Generator("cpu").manual_seed(seed)

        def draw(name: str) -> torch.Tensor:
            tensor = self.part.tensors[name]
            values = torch.randn(tensor.shape(tokens), generator=generator)
            if isinstance(self.module, Fp8Part):
                return self.module.drawn(name, values).to(self.device, getattr(torch, tensor.dtype or self.dtype))
            values = values / values.shape[1] ** 0.5 if name in self.part.weights and values.ndim > 1 else values
            return values.to(self.device, getattr(torch, tensor.dtype or self.dtype))

        return {name: draw(name) for name in self.input_names}

    def shapes(self, profile: ShapeProfile) -> Shapes:
        full = self.shapes_of(self.tokens)
        return self.shapes_of(1), full, full

    def shapes_of(self, tokens: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of all inputs for a number of tokens."""
        return {name: self.part.tensors[name].shape(tokens) for name in self.input_names}

    def export(self, profile: ShapeProfile, *, cut: bool = False) -> torch.export.ExportedProgram:
        tokens = torch.export.Dim(TOKENS, min=_SMALLEST_DYNAMIC, max=self.tokens)
        shapes = [
            {axis: tokens for axis, size in enumerate(self.part.tensors[name].sizes) if size == TOKENS}
            for name in self.input_names
        ]
        example = tuple(
            torch.empty(tensor.shape(self.tokens), dtype=getattr(torch, tensor.dtype or self.dtype), device=self.device)
            for tensor in map(self.part.tensors.__getitem__, self.input_names)
        )
        # The inputs of an `Fp8Part` are one variadic argument.
        dynamic = (tuple(shapes),) if isinstance(self.module, Fp8Part) else tuple(shapes)
        with torch.no_grad():
            return torch.export.export(self.module, example, dynamic_shapes=dynamic, strict=False)

    def signature(self, profile: ShapeProfile, example: dict[str, torch.Tensor]) -> IOSignature:
        def describe(name: str) -> TensorSignature:
            tensor = self.part.tensors[name]
            sizes = tuple(size if isinstance(size, int) else (size, 1) for size in tensor.sizes)
            return TensorSignature(name, tensor.dtype or self.dtype, sizes)

        return IOSignature(
            tuple(map(describe, self.input_names)),
            tuple(map(describe, self.output_names)),
            {TOKENS: (1, self.tokens)},
        )


def load_program(
    spec: ModelSpec, component: str, name: str, *, device: str, dtype: str, tokens: int = BLOCK_TOKENS
) -> Program:
    """Load a component's weights and return one of its programs.

    Args:
        component: the component to load; "transformer" and "transformer_2" have the same program, "transformer".
        name: one of `key_parts.runnable_programs`, or of the model's block programs, which need no weights.
        device: a torch device.
        dtype: "float32", "bfloat16", "float16", or "fp8" for a block engine (`engines.fp8`).
        tokens: the most tokens in one call of a block engine.

    Raises:
        ModelError: if the weights do not fit the configuration.
    """
    part = ComponentPlan(backend="pytorch", device=device, dtype=dtype, weights_bytes=0, reasons=())
    make_form: MakeForm = components_of(spec.family).make_form
    form = make_form(spec, name, lambda: load_module(spec, component, part)).eval()
    if is_block_program(name):
        if dtype == FP8:
            form, dtype = Fp8Part(form), ACTIVATIONS
        return BlockProgram(name, form.to(device), spec, dtype, torch.device(device), tokens)
    return Program(name, form, spec)


def cut_text(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the transformer's inputs without most of the text's zero padding; `text_padding` (1,) is the number cut.

    All padding tokens have the same key and value, so attention needs only one of them, weighted by their number. The
    result is exact. On a CPU this saves a quarter of a small transformer's time.
    """
    embeds = inputs["text_embeds"]
    length = embeds.shape[1]
    used = embeds[0].any(dim=1).nonzero()
    words = int(used[-1].item()) + 1 if len(used) else 1
    cut = min(-(-words // _TEXT_STEP) * _TEXT_STEP, length)
    padding = torch.full((1,), float(length - cut), device=embeds.device)
    return inputs | {"text_embeds": embeds[:, :cut].contiguous(), TEXT_PADDING: padding}


def _cache_names(count: int) -> list[str]:
    return [f"{CACHE}{index}" for index in range(count)]


@contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """Disable TF32 in a `with` block; by default, cuDNN rounds the inputs of convolutions to 10 bits of mantissa."""
    backends: Any = torch.backends
    settings = (backends.cudnn.conv, backends.cuda.matmul) if device.type == "cuda" else ()
    before = [setting.fp32_precision for setting in settings]
    for setting in settings:
        setting.fp32_precision = "ieee"
    try:
        yield
    finally:
        for setting, precision in zip(settings, before, strict=True):
            setting.fp32_precision = precision
