"""Programs of whole components: how each is run, drawn example inputs for, and exported. Shapes are in `programs`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from runtime.core.plan import LatentSize
from runtime.core.request import INTERPOLATOR, SOUND_DECODERS, UPSCALER
from runtime.engines.signatures import IOSignature, Shapes, Size, TensorSignature
from runtime.models.spec import FRAME_PROGRAMS, ModelSpec, is_text_encoder
from runtime.models.vae_groups import GROUP_PROGRAMS, IMAGE_PROGRAM
from runtime.planner.choice.engine_index import ShapeProfile
from runtime.upstream.torch import without_computing

_INPUTS = {
    "text_encoder": ("input_ids", "attention_mask"),
    "text_encoder_2": ("input_ids", "attention_mask"),
    "image_encoder": ("pixels",),
    "vae_encoder_first": ("frames",),
    "vae_encoder_next": ("frames",),
    IMAGE_PROGRAM: ("frames",),
    "transformer": ("latents", "timestep", "text_embeds"),
    "vae_first": ("z",),
    "vae_next": ("z",),
    "vae_clip": ("z",),
    "audio_vae": ("sound",),
    "vocoder": ("spectrum",),
    **dict.fromkeys(GROUP_PROGRAMS, ("z",)),
    **dict.fromkeys(FRAME_PROGRAMS, ("latent_frames",)),
}
_OUTPUTS = {
    "text_encoder": "embeds",
    "text_encoder_2": "embeds",
    "image_encoder": "embeds",
    "vae_encoder_first": "z",
    "vae_encoder_next": "z",
    IMAGE_PROGRAM: "moments",
    "transformer": "velocity",
    "audio_vae": "spectrum",
    "vocoder": "samples",
    **dict.fromkeys(FRAME_PROGRAMS, "decoded_frames"),
}
_WITH_CACHES = frozenset({"vae_next", "vae_encoder_next"})
TEXT_PADDING = "text_padding"
# The text is cut to a multiple of this many tokens, so that prompts of similar length share a shape.
_TEXT_STEP = 8
_WORDS_IN_EXAMPLE = 24
_EXAMPLE_TIMESTEP = 700.0
CACHE = "cache_"
_AXES = ("frames", "height", "width")
_LATENT_AXES = {2: "frames", 3: "height", 4: "width"}
# The dynamic axes of each tensor, with the names of their sizes. The number of a cache's frames is fixed. The decoder's
# first step and both of the encoder's always compute one latent frame, and so have their profiles.
_DYNAMIC_AXES: Mapping[str, Mapping[int, str]] = {
    "latents": _LATENT_AXES,
    "velocity": _LATENT_AXES,
    "z": _LATENT_AXES,
    "moments": _LATENT_AXES,
    "frames": {0: "frames", 1: "height", 2: "width"},
    "latent_frames": {0: "frames", 2: "height", 3: "width"},
    "decoded_frames": {0: "frames", 2: "height", 3: "width"},
    CACHE: {3: "height", 4: "width"},
    "text_embeds": {1: "text"},
}
# Mean and deviation of a spectrogram's logarithms of amplitudes.
_LOUDNESS = -4.0, 2.0
# Pixels of the patterns that an interpolator is verified with, and how far they move, in y and x.
_PATTERN, _MOTION = 16, (2, 3)
# torch takes a size of one as fixed.
SMALLEST_DYNAMIC = 2


@dataclass(frozen=True)
class Program:
    """A program of a model, with its weights.

    Attributes:
        name: see `engines.programs`.
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
        return (*_INPUTS[self.name], *(_cache_names(self.cache_count) if self.name in _WITH_CACHES else ()))

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

        spec, scale = self.spec, self.spec.vae.scale_factor_spatial
        length, channels = spec.max_sequence_length, spec.vae.z_dim
        if self.name == INTERPOLATOR:
            return {"latent_frames": _moving(noise, latent)}
        if self.name in FRAME_PROGRAMS:
            latents = noise(latent[0], channels, *latent[1:])
            # An upscaler takes colors.
            return {"latent_frames": latents.sigmoid() if self.name == UPSCALER else latents}
        if self.name in SOUND_DECODERS:
            module: Any = self.module
            values = noise(*module.input_shape(latent[0]))
            mean, deviation = _LOUDNESS if self.input_names == ("spectrum",) else (0.0, 1.0)
            return {self.input_names[0]: deviation * values + mean}
        words = torch.arange(length, device=self.device)[None, :] < min(_WORDS_IN_EXAMPLE, length)
        if is_text_encoder(self.name):
            vocabulary: Any = self.module.vocabulary
            length = spec.encoders[self.name].max_tokens
            words = torch.arange(length, device=self.device)[None, :] < min(_WORDS_IN_EXAMPLE, length)
            ids = torch.randint(vocabulary, (1, length), generator=generator).to(self.device)
            return {"input_ids": ids * words, "attention_mask": words.long()}
        if self.name == "image_encoder":
            side: Any = self.module.side
            return {"pixels": noise(1, 3, side, side)}
        if self.name == "transformer":
            return {
                "latents": noise(1, spec.transformer.in_channels, *latent),
                # A first latent frame that is given has the timestep 0.
                "timestep": torch.tensor([0.0, _EXAMPLE_TIMESTEP][-spec.timesteps :], device=self.device),
                "text_embeds": after_images(
                    spec, noise(1, length, spec.transformer.text_dim) * words.unsqueeze(-1), noise
                ),
            }

        def clip(frames: int) -> dict[str, torch.Tensor]:
            if not self.name.startswith("vae_encoder"):
                return {"z": noise(1, channels, frames, *latent[1:])}
            count = spec.vae.scale_factor_temporal if self.name == "vae_encoder_next" else 1
            return {"frames": noise(count, latent[1] * scale, latent[2] * scale, 3).clamp(-1.0, 1.0)}

        inputs = clip(latent[0])
        if self.name in _WITH_CACHES:
            # The caches are those of a first step on other noise.
            (before,) = clip(1).values()
            with torch.inference_mode():
                _, *caches = self.module(before[:1])
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
        return cut_text(inputs, self._least_text) if cut and self.cuts_text else inputs

    @property
    def _least_text(self) -> int:
        """The fewest tokens that `cut_text` may leave: those of images are never cut."""
        return self.spec.context_tokens - self.spec.max_sequence_length + SMALLEST_DYNAMIC

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
        if self.name in _WITH_CACHES:
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
            ranges["text"] = self._least_text, self.spec.context_tokens

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
        results = zip(self.output_names, outputs if isinstance(outputs, tuple) else (outputs,), strict=True)
        return IOSignature(
            tuple(describe(name, tensor) for name, tensor in example.items()),
            tuple(describe(name, tensor) for name, tensor in results),
            ranges,
        )


def after_images(spec: ModelSpec, text: torch.Tensor, noise: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Return a text's embeddings after those of images, which `noise` draws, if the model attends to any."""
    images = spec.image_input
    if images is None or not images.tokens:
        return text
    drawn = noise(1, images.tokens, images.width)
    return torch.cat([F.pad(drawn, (0, text.shape[2] - images.width)), text], dim=1)


def cut_text(inputs: dict[str, torch.Tensor], least: int = 1) -> dict[str, torch.Tensor]:
    """Return the transformer's inputs without most of the text's zero padding; `text_padding` (1,) is the number cut.

    All padding tokens have the same key and value, so attention needs only one of them, weighted by their number. The
    result is exact. On a CPU this saves a quarter of a small transformer's time.

    Args:
        least: the fewest tokens to leave.
    """
    embeds = inputs["text_embeds"]
    length = embeds.shape[1]
    used = embeds[0].any(dim=1).nonzero()
    words = max(int(used[-1].item()) + 1 if len(used) else 0, least)
    cut = min(-(-words // _TEXT_STEP) * _TEXT_STEP, length)
    padding = torch.full((1,), float(length - cut), device=embeds.device)
    return inputs | {"text_embeds": embeds[:, :cut].contiguous(), TEXT_PADDING: padding}


def _moving(noise: Callable[..., torch.Tensor], latent: LatentSize) -> torch.Tensor:
    """Return pairs of frames, (n, 6, h, w) in 0 to 1, of smooth patterns that move by a few pixels.

    In noise there is no motion to find: the places that are read would depend on rounding.
    """
    count, height, width = latent
    coarse = noise(count, 3, -(-height // _PATTERN) + 1, -(-width // _PATTERN) + 1)
    size = (height + _MOTION[0], width + _MOTION[1])
    pattern = F.interpolate(coarse, size=size, mode="bicubic", align_corners=False).sigmoid()
    return torch.cat([pattern[..., :height, :width], pattern[..., -height:, -width:]], 1)


def _cache_names(count: int) -> list[str]:
    return [f"{CACHE}{index}" for index in range(count)]
