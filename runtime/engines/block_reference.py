"""Verifies block engines in a model's first blocks, with their real weights.

The family computes the transformer in float32, one block on the device at a time, with a `_Tap` where jobs have block
engines: it computes each part in PyTorch, runs the engine on the same inputs and weights, and compares both. Once a
timestep the blocks are also computed with the engine in place of its part, and with those of the other parts that the
library has, so that their errors add up.

Of the model's files only the first blocks are read: weights are mapped.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod

import torch
from torch import nn

from runtime.core.plan import EAGER, LatentSize
from runtime.engines.block_programs import TOKENS, BlockPart, BlockProgram
from runtime.engines.component_programs import after_images
from runtime.engines.fp8 import Fp8Part
from runtime.engines.key_parts import tokens_of
from runtime.engines.programs import load_program
from runtime.engines.reference import BlocksOnDevice, full_float32
from runtime.engines.sessions import Session
from runtime.engines.verify import TIMESTEPS, TRAINING_STEPS, Comparison, Verification
from runtime.models.quantization import FP8
from runtime.models.registry import components_of
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_stored
from runtime.planner.choice.engine_index import EngineKey

_BLOCKS = 4
# Latents as smooth as a picture's have one random value per this many.
_COARSE = 4
_FEW_TOKENS = 64


def compare_blocks(
    session: Session,
    spec: ModelSpec,
    component: str,
    key: EngineKey,
    device: str,
    text: torch.Tensor,
    siblings: Mapping[str, Session] | None = None,
) -> Verification:
    """Compare a block engine with PyTorch at each of `verify.TIMESTEPS`, and with few and most tokens a call.

    Args:
        session: the open engine.
        component: whose first blocks it computes; their LoRAs do not matter.
        text: an encoded prompt, (1, text tokens, text width).
        siblings: open engines of other parts, by program, which also compute when errors add up.

    Raises:
        EngineError: if the engine does not take the inputs.
        ModelError: if the weights do not fit the configuration.
        MemoryError, torch.OutOfMemoryError: if memory runs out.
    """
    target, tokens = torch.device(device), tokens_of(key)
    module = load_stored(replace(spec, loras=()), component)
    lists = {name: child for name, child in module.named_children() if isinstance(child, nn.ModuleList)}
    assert lists, "a transformer has blocks"
    for name in lists:
        setattr(module, name, nn.ModuleList())
    nn.Module.to(module, target, torch.float32)
    for name, every in lists.items():
        lists[name] = nn.ModuleList(every[: -(-_BLOCKS // len(lists))])
        setattr(module, name, lists[name])
    denoiser = components_of(spec.family).denoiser(module)
    comparison = Comparison(key.program, key.precision)
    tap = _Tap({**(siblings or {}), key.program: session}, spec, component, key, comparison)
    denoiser.compute(EAGER, None, tap)
    for name, blocks in lists.items():
        delattr(module, name)
        setattr(module, name, BlocksOnDevice(blocks, target))
    size = _size(spec, tokens)
    noise, clip = (tensor.to(target) for tensor in _noise_and_clip(spec, size))
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    if spec.section is None:
        text = after_images(spec, text, draw)
    if spec.section is not None or spec.sound_latents is not None:
        components_of(spec.family).see_noise(denoiser, spec, size, target)
    text = text.to(target)
    for timestep in TIMESTEPS:
        sigma, where = timestep / TRAINING_STEPS, f"t = {timestep:g}"
        inputs = sigma * noise + (1 - sigma) * clip, times_of(spec, timestep).to(target), text
        with full_float32(target):
            tap.begin(where, on_engines=False)
            expected = denoiser(*inputs)
            tap.begin(where, on_engines=True)
            comparison.add(
                denoiser(*inputs), expected, f"the result of {sum(map(len, lists.values()))} blocks, {where}"
            )
    return comparison.result()


def times_of(spec: ModelSpec, timestep: float) -> torch.Tensor:
    """Return a timestep, and 1000 times the guidance scale if the model embeds it; see `Denoiser`."""
    if spec.section is None and spec.embedded_guidance:
        return torch.tensor([timestep, 1000 * spec.defaults.guidance_scale])
    return torch.tensor(timestep)


def random_text(spec: ModelSpec) -> torch.Tensor:
    """Return embeddings for `compare_blocks` of a model whose text encoder is not run."""
    sound, width = spec.sound_latents, spec.transformer.text_dim
    if sound is not None:
        width += sound.text_dim
    text = torch.randn(1, spec.max_sequence_length, width, generator=torch.Generator().manual_seed(0))
    if sound is None:
        text[:, _FEW_TOKENS:] = 0
    return text


def _size(spec: ModelSpec, tokens: int) -> LatentSize:
    """Return the latent size of the model's own clip, with as many frames as fit into one call, but at least one.

    A latent frame that comes before the clip, as that of a character does, is one more.
    """
    defaults, (patch, *_) = spec.defaults, spec.transformer.patch_size
    _, _, frames, height, width = spec.latent_shape(defaults.frames, defaults.height, defaults.width)
    if spec.section is not None:
        return frames, height, width
    a_frame = prod(side // size for side, size in zip((height, width), spec.transformer.patch_size[1:], strict=True))
    return patch * max(1 + spec.leading_latents, min(frames // patch, tokens // a_frame)), height, width


def _noise_and_clip(spec: ModelSpec, size: LatentSize) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noise, and latents as smooth as a clip's with the same variance; each (1, channels, *size).

    Given frames and control videos, which some models take as further channels, are treated alike. If a sound is
    denoised with the frames, its latents follow in both: they are (1, numbers).
    """
    generator, sound = torch.Generator().manual_seed(0), spec.sound_latents
    control = 0 if spec.control_input is None else spec.control_input.channels
    video = _noise_and_smooth(spec.transformer.in_channels + control, size, generator)
    if sound is None:
        return video
    frames = (size[0] - 1) * spec.vae.scale_factor_temporal + 1
    _, channels, *sides = sound.shape(frames, spec.defaults.fps)
    of_sound = _noise_and_smooth(channels, (1, *sides), generator)
    noise, clip = (torch.cat([a.flatten(1), b.flatten(1)], dim=1) for a, b in zip(video, of_sound, strict=True))
    return noise, clip


def _noise_and_smooth(
    channels: int, size: Sequence[int], generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noise, and smooth values with the same variance; each (1, channels, *size)."""
    noise = torch.randn(1, channels, *size, generator=generator)
    coarse = torch.randn(1, channels, *(-(-side // _COARSE) for side in size), generator=generator)
    smooth = nn.functional.interpolate(coarse, size=list(size), mode="trilinear")
    return noise, smooth / smooth.std()


class _Tap:
    """Compares an engine with a part of each block; has the interface of `execution.block_engines.BlockEngines`.

    Args:
        sessions: engines by program.
        key: of the engine to compare; the others have its precision.
        comparison: receives the outputs.

    Attributes:
        failed: always false.
    """

    failed = False

    def __init__(
        self, sessions: Mapping[str, Session], spec: ModelSpec, component: str, key: EngineKey, comparison: Comparison
    ) -> None:
        self._sessions = sessions
        self._program = key.program
        self._tokens = tokens_of(key)
        self._fp8: dict[str, Fp8Part] = {}
        self._comparison = comparison
        self._parts: dict[str, BlockPart] = {}
        for name in spec.block_programs:
            loaded = load_program(spec, component, name, device="cpu", dtype="float32")
            assert isinstance(loaded, BlockProgram)
            self._parts[name] = loaded.part
            if key.precision == FP8:
                self._fp8[name] = Fp8Part(loaded.part)
        self._where = ""
        self._block = 0
        self._on_engines = False
        self._lengths_compared = False

    def __deepcopy__(self, _: object) -> "_Tap":
        """Return the same: blocks are copied with all that they refer to."""
        return self

    def begin(self, where: str, *, on_engines: bool) -> None:
        """Start a pass.

        Args:
            where: its timestep, as text.
            on_engines: whether the engines compute their parts; otherwise PyTorch does, and each call is compared.
        """
        self._where, self._block, self._on_engines = where, 0, on_engines

    def weights(
        self, block: nn.Module, _: torch.device, programs: Collection[str] | None = None
    ) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Return a block's weights by program and input."""
        self._block += 1
        return {
            program: {name: block.get_parameter(path) for name, path in part.weights.items()}
            for program, part in self._parts.items()
            if programs is None or program in programs
        }

    def chunks(self, tokens: int) -> list[slice]:
        """Divide tokens into slices of at most those of one call."""
        return [slice(start, min(start + self._tokens, tokens)) for start in range(0, tokens, self._tokens)]

    def outputs(self, program: str, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Allocate a program's outputs for the tokens of a tensor."""
        part = self._parts[program]
        return tuple(like.new_empty((1, *part.tensors[name].shape(like.shape[1]))) for name in part.outputs)

    def run(
        self,
        program: str,
        inputs: Mapping[str, torch.Tensor],
        weights: Mapping[str, Mapping[str, torch.Tensor]],
        outputs: Sequence[torch.Tensor],
        in_pytorch: Callable[[], torch.Tensor | tuple[torch.Tensor, ...]],
    ) -> None:
        """Compute one part of a block, by PyTorch or by the engine; compare the engine's result with PyTorch's."""
        tensors = {**{name: tensor[0] for name, tensor in inputs.items()}, **weights[program]}
        if self._on_engines and program in self._sessions:
            computed = self._infer(program, tensors)
        else:
            values = in_pytorch()
            computed = values if isinstance(values, tuple) else (values,)
        for output, result in zip(outputs, computed, strict=True):
            output.copy_(result.reshape(output.shape))
        if program == self._program and not self._on_engines:
            self._compare(tensors, [output[0] for output in outputs], f"block {self._block}, {self._where}")
            if not self._lengths_compared:
                self._lengths_compared = True
                for tokens in (_FEW_TOKENS, self._tokens):
                    self._compare(
                        {name: self._of_length(name, tensor, tokens) for name, tensor in tensors.items()},
                        [_repeated(output[0], tokens) for output in outputs],
                        f"{tokens} tokens of block {self._block}, {self._where}",
                    )

    def rejects(self, _: torch.Tensor) -> bool:
        """Let every result pass."""
        return False

    def _infer(self, program: str, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        part = self._fp8.get(program)
        outputs = self._sessions[program].infer(**(tensors if part is None else part.quantized(tensors)))
        return tuple(outputs[name] for name in self._parts[program].outputs)

    def _compare(self, tensors: Mapping[str, torch.Tensor], expected: Sequence[torch.Tensor], where: str) -> None:
        names = self._parts[self._program].outputs
        for name, output, reference in zip(names, self._infer(self._program, tensors), expected, strict=True):
            self._comparison.add(output.to(reference.device), reference, f"{name} of {where}")
            if name in tensors:
                # The stream may be so large that even an engine that adds nothing to it is near.
                result = output.to(reference.device)
                self._comparison.add_change(result, reference, tensors[name], f"{name} of {where}")

    def _of_length(self, name: str, tensor: torch.Tensor, tokens: int) -> torch.Tensor:
        sizes = self._parts[self._program].tensors[name].sizes
        return _repeated(tensor, tokens) if sizes[0] == TOKENS else tensor


def _repeated(tensor: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return a number of tokens from a tensor (tokens, …), repeated as needed."""
    return tensor[torch.arange(tokens, device=tensor.device) % len(tensor)]
