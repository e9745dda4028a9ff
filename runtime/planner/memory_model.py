"""Memory model: bytes of weights and working set of each stage, from the architecture alone. Pure, no torch.

A `MemoryStrategy` decides which weights are on the device meanwhile. Tests in tests/planner/ compare both with
measurements on an H200 and, for decoding, on a CPU.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod

from runtime.core.estimates import MemoryStrategy, StageMemory
from runtime.core.plan import EngineRef, ExecutionPlan, LatentSize, Speed, Split, is_block_program
from runtime.core.request import SOUND_DECODERS
from runtime.core.step_cache import FIRST_BLOCK, MAGCACHE, NONE, TAYLORSEER, kind_of
from runtime.core.tiles import times_decoded
from runtime.models.spec import (
    CONNECTORS,
    IMAGE_ENCODER,
    LATENT_UPSAMPLER,
    VAE_ENCODER,
    ImageInput,
    ModelSpec,
    RefinementSpec,
    SoundLatents,
    SoundPart,
    is_text_encoder,
    is_transformer,
)
from runtime.models.vae_groups import CLIP_PROGRAM

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}

# Bytes per weight of a block's linear layers; other weights are not quantized. bnb-4bit: half a byte, and a float32
# scale per 64 weights; the others have one scale per row, which is negligible.
_QUANTIZED_BYTES: Mapping[str, float] = {"bnb-8bit": 1.0, "bnb-4bit": 0.5 + 4 / 64, "fp8": 1.0}

# Most latent frames in one call of the VAE's decoder. More gain nothing, and cancelling waits for a call to end.
# Measured: on 2 cores the embedded model decodes in 4.4 s with 1, 3.9 with 2, 4.6 with 4, 5.4 with 8, which exceed the
# caches; on an H200 a decoder of 96 channels gains 10 % from 4.
_MAX_DECODE_CHUNK = {"cpu": 2, "cuda": 4}
_DECODE_SHARE = 0.25
# Sides of tiles in pixels. 256 is diffusers' value for this VAE. Sizes in between overlap more and take longer.
_TILE_SIDES = (512, 256)
_CLIP_BYTES_PER_PIXEL = 3 * 2
_COLORS = 3
_RGB_FLOAT32 = 4 * _COLORS
# Sets of output buffers of an engine's session.
_BUFFER_SETS = 2
# Float32 tensors of the latents' size: sample, predictions and the solver's history.
_LATENT_TENSORS = 8
# On a CPU: PyTorch, diffusers and transformers when imported (0.39 GB on Linux), and what they and malloc keep after
# running (0.2 to 0.35 GB at any size, different in each run). On an H200: the CUDA context.
_CPU_IMPORTED_BYTES = 390_000_000
_CPU_LIBRARIES_BYTES = 660_000_000
_CUDA_CONTEXT_BYTES = 552_402_944
# With several GPUs, the first also has the coordinator's process and NCCL's buffers. An estimate, not measured.
_SHARING_BYTES = _CUDA_CONTEXT_BYTES + 1_000_000_000
# Buffers to exchange tokens for heads, as a multiple of a GPU's own tokens: three sent, three received, the result sent
# and received. Streams keep the memory of results.
_EXCHANGE_TENSORS = 8
# System memory of a process that uses CUDA: its libraries, and pages of the shard that is being read.
_CUDA_PROCESS_BYTES = 3_000_000_000
_SHARD_BYTES = 5_000_000_000
# Memory that PyTorch's allocator takes in addition on an H200 with free memory, at most: a share of the working set and
# half a gigabyte. It keeps blocks that do not fit the next use, and cuDNN tries workspaces.
_SLACK_SHARE = {"encode": 0.5, "denoise": 0.5, "decode": 0.75}
_SLACK_BYTES = 500_000_000
_FLOAT32 = 4
# Tensors of the size of an image's embeddings in a layer of CLIP, whose feed-forward is four times as wide.
_IMAGE_TENSORS = 16
# Tensors of the size of a text encoder's states while connectors read them.
_CONNECTOR_TENSORS = 5
# Tensors of the clip's length between block engines, besides the stream: queries, keys, values and attended values.
_BLOCK_TENSORS = 4
# Tensors of the clip's length that a step cache stores for each pass. First-block: the first block's output and
# residual, and the other blocks' residual. MagCache: the first block's input, and the residual of all blocks.
# TaylorSeer: also the difference of the last two residuals and, before that is computed, the new residual.
_CACHED_TENSORS = {NONE: 0, FIRST_BLOCK: 3, MAGCACHE: 2, TAYLORSEER: 4}
# Bytes per weight while one is dequantized: its value and the factor in float32.
_UNPACKING_BYTES = 8
# Additional working set of quantized arithmetic, bytes per token and value of the widest layer, fitted to jobs of the
# model of 1.3 billion parameters on an H200. FP8 converts activations to float32 and back; 8 bits accumulate in 32.
_QUANTIZED_WORKING = {"fp8": 11, "bnb-8bit": 4}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a clip computes, and with which weights.

    Attributes:
        device: "cpu" or "cuda:0".
        dtypes: of each component in PyTorch, and of what PyTorch computes between block engines.
        engine_bytes: sizes of the engines of components that run on one; engines hold their own weights.
        engine_seconds: of one call, for components whose engines were measured.
        tokens: of the transformer's sequence.
        latent_shape: (batch, channels, latent frames, latent height, latent width) of what is denoised at once.
        height, width: of a frame.
        split: how several GPUs share it; memory is that of the first GPU, which holds most.
        cached_tensors: see `cached_tensors`.
        text_bytes: of the text's cached keys and values.
        working_sets: working sets of one call of a transformer: two for paired passes, one more for a CUDA graph.
        engines: of each component that has some, those that compute parts of blocks included.
        sections: how many sections the clip is made in.
        sound_shape: (batch, channels, latents, bins) of the sound; `None` without.
    """

    spec: ModelSpec
    device: str
    dtypes: Mapping[str, str]
    engine_bytes: Mapping[str, int]
    engine_seconds: Mapping[str, float]
    tokens: int
    latent_shape: tuple[int, int, int, int, int]
    height: int
    width: int
    split: Split | None = None
    cached_tensors: tuple[int, int] = (0, 0)
    text_bytes: int = 0
    working_sets: int = 1
    engines: Mapping[str, tuple[EngineRef, ...]] = field(default_factory=dict)
    sections: int = 1
    sound_shape: tuple[int, int, int, int] | None = None

    @classmethod
    def of(cls, plan: ExecutionPlan, spec: ModelSpec) -> "Workload":
        """Return a plan's workload; `spec` is its model's."""
        return cls(
            spec=(spec if VAE_ENCODER in plan.components else spec.for_text()).in_stages(int(plan.stages)),
            device=plan.components["transformer"].device,
            dtypes={name: part.dtype for name, part in plan.components.items()},
            engines={name: part.engines for name, part in plan.components.items() if part.engines},
            engine_bytes={name: part.weights_bytes for name, part in plan.components.items() if part.on_engine},
            engine_seconds={},
            tokens=plan.tokens,
            latent_shape=plan.latent_shape,
            sections=plan.sections,
            height=plan.height,
            width=plan.width,
            split=plan.split,
            cached_tensors=cached_tensors(spec, plan.step_cache, plan.guidance_scale, plan.guidance_scale_2),
            text_bytes=plan.speed.text_bytes,
            working_sets=working_sets(plan.speed),
            sound_shape=plan.sound_shape,
        )

    @property
    def cuda(self) -> bool:
        """Whether the device has memory of its own."""
        return self.device.startswith("cuda")

    @property
    def decoded(self) -> int:
        """The latent frames that are decoded one after the other: those of the clip, or of a section's window."""
        section = self.spec.section
        whole = self.latent_shape[2] - self.spec.leading_latents
        return whole if section is None else section.decoded(self.sections)

    def in_blocks(self, component: str) -> bool:
        """Whether a component's engines compute parts of each block; PyTorch loads its weights."""
        return any(is_block_program(use.program) for use in self.engines.get(component, ()))

    def precision(self, component: str) -> str:
        """Return the dtype of a component's arithmetic."""
        uses = self.engines.get(component, ())
        return uses[-1].precision if uses and uses[-1].precision in DTYPE_BYTES else self.dtypes[component]

    @property
    def sound_latents(self) -> int:
        """The latents of the sound; 0 without."""
        return 0 if self.sound_shape is None else self.sound_shape[2]

    def sound_part(self, component: str) -> SoundPart:
        """Return what one of `SOUND_DECODERS` computes for each of them."""
        return _sound(self.spec).parts[component]

    @property
    def refinement(self) -> RefinementSpec:
        """How the clip is made in two stages."""
        assert self.spec.refinement is not None
        return self.spec.refinement

    def context_bytes(self, components: Iterable[str]) -> int:
        """Return the memory of the engines' execution contexts: they share one buffer, as large as the largest."""
        return max((use.context_bytes for name in components for use in self.engines.get(name, ())), default=0)

    def flops(self, component: str, tile: int | None = None) -> float:
        """Return the operations of one call of a component; see `call_flops`."""
        if component in SOUND_DECODERS:
            return call_flops(self.spec, component, (self.sound_latents, 1, 1))
        if component == LATENT_UPSAMPLER:
            return prod(self.latent_shape[2:]) * self.refinement.flops
        frames, height, width = self.latent_shape[2:]
        return call_flops(self.spec, component, (self.decoded if component == "vae" else frames, height, width), tile)


def call_flops(spec: ModelSpec, component: str, latent: LatentSize, tile: int | None = None) -> float:
    """Return the operations of one call of a component; of the whole clip for the VAE.

    Args:
        latent: (frames, height, width) of the clip in latent units; (latents, 1, 1) of the sound for its decoders.
        tile: side of the tiles that the VAE decodes frames in, in latents; overlaps are decoded twice.
    """
    if is_text_encoder(component) or component == CONNECTORS:
        return 2.0 * spec.parameters[component] * spec.max_text_tokens(component)
    if component == IMAGE_ENCODER:
        return 2.0 * spec.parameters[component] * _image_input(spec).tokens
    if is_transformer(component):
        return spec.transformer.forward_flops(spec.tokens_of(latent), spec.context_tokens)
    if component in SOUND_DECODERS:
        return latent[0] * _sound(spec).parts[component].flops
    if component == VAE_ENCODER:
        if spec.control_input is not None:
            return _control_flops(spec, latent) * times_decoded(*latent[1:], tile)
        whole = spec.input_encoder.encode_flops(*_encoded_clip(spec, latent), video=spec.video is not None)
        # Images that are not frames of one clip are encoded one after the other.
        calls = len(spec.images) if spec.keyframe_count else 1
        return calls * whole * times_decoded(*latent[1:], tile)
    frames, height, width = latent
    vae, scale = spec.vae, spec.vae.scale_factor_spatial
    whole = vae.decode_flops((frames - 1) * vae.scale_factor_temporal + 1, height * scale, width * scale)
    return whole * times_decoded(height, width, tile)


def _control_flops(spec: ModelSpec, latent: LatentSize) -> float:
    """Return the operations of encoding what steers a clip; see `control_latents` of the family.

    Without a mask one of two parts is gray; without a control video there is only that. Images before the clip are
    encoded one by one.
    """
    clip = _encoded_clip(spec, latent)
    video, gray = (spec.input_encoder.encode_flops(*clip, video=video) for video in (True, False))
    parts = 2 * video if spec.has_mask else gray if spec.control is None else gray + video
    return parts + spec.leading_latents * spec.input_encoder.encode_flops(1, *clip[1:])


def _image_input(spec: ModelSpec) -> ImageInput:
    assert spec.image_input is not None, "only models that start from images have these components"
    return spec.image_input


def _sound(spec: ModelSpec) -> SoundLatents:
    assert spec.sound_latents is not None, "only models that denoise sound have these components"
    return spec.sound_latents


def _encoded_clip(spec: ModelSpec, latent: LatentSize) -> tuple[int, int, int]:
    """Return the (frames, height, width) that the VAE's encoder takes for a clip of so many latents."""
    frames, height, width = latent
    vae = spec.vae
    every = bool(spec.followed_videos) or spec.control_input is not None or _image_input(spec).kind == "channels"
    count = (frames - spec.leading_latents - 1) * vae.scale_factor_temporal + 1 if every else 1
    return count, height * vae.scale_factor_spatial, width * vae.scale_factor_spatial


def weights_bytes(spec: ModelSpec, dtypes: Mapping[str, str], quantization: str = "none") -> dict[str, int]:
    """Return the bytes of each component's weights in its dtype, the transformers' blocks quantized.

    Weights that are quantized in files stay so, unless `quantization` replaces that.
    """
    sizes = {name: spec.parameters[name] * DTYPE_BYTES[dtypes[name]] for name in spec.component_names}
    if quantization == "none":
        for name, files in spec.transformer_files.items():
            sizes[name] -= files.packed_weights * DTYPE_BYTES[dtypes[name]] - files.packed_bytes
    if quantization != "none":
        for name in sizes:
            if is_transformer(name):
                linear = min(spec.transformer.block_parameters, spec.parameters[name])
                rest = (spec.parameters[name] - linear) * DTYPE_BYTES[dtypes[name]]
                sizes[name] = rest + int(linear * _QUANTIZED_BYTES[quantization])
    return sizes


def stage_of(component: str) -> str:
    """Return the stage in which a component runs."""
    if is_transformer(component) or component == LATENT_UPSAMPLER:
        return "denoise"
    return "decode" if component == "vae" or component in SOUND_DECODERS else "encode"


def denoise_bytes(spec: ModelSpec, tokens: int, dtype: str, quantization: str = "none") -> int:
    """Return the working set of one forward pass; layers of 4 bits are converted to the dtype one at a time.

    So are layers that are quantized in files, by way of float32.
    """
    inner, widest = spec.transformer.ffn_dim, 0
    if quantization == "bnb-4bit":
        widest = spec.transformer.width * inner * DTYPE_BYTES[dtype]
    elif quantization == "none" and spec.is_packed:
        widest = spec.transformer.width * inner * (DTYPE_BYTES[dtype] + _UNPACKING_BYTES)
    elif quantization != "none":
        widest = _QUANTIZED_WORKING[quantization] * tokens * inner
    first_frame = bool(spec.images) and spec.image_input is not None and spec.image_input.kind == "first_frame"
    time_per_token = spec.expand_timesteps or first_frame
    working = spec.transformer.forward_bytes(tokens, DTYPE_BYTES[dtype], time_per_token=time_per_token)
    return working + widest


def decode_chunk(
    spec: ModelSpec, latent_frames: int, height: int, width: int, dtype: str, device: str, free_bytes: int
) -> int:
    """Return how many latent frames the VAE decodes in one call, within a quarter of free memory; or all of them."""
    if "chunks" in spec.lacks:
        return latent_frames
    chunk = min(_MAX_DECODE_CHUNK[device.partition(":")[0]], max(latent_frames - 1, 1))
    size = (height, width, DTYPE_BYTES[dtype])
    while chunk > 1 and spec.vae.decode_bytes(chunk, *size, cpu=device == "cpu") > _DECODE_SHARE * free_bytes:
        chunk -= 1
    return chunk


def smallest_chunk(workload: Workload) -> int:
    """Return the fewest latent frames that the VAE can decode in one call."""
    return workload.decoded if "chunks" in workload.spec.lacks else 1


def tile_sides(workload: Workload) -> list[int]:
    """Return possible sides of tiles in latents, the largest first; none for an engine."""
    if "vae" in workload.engine_bytes:
        return []
    return tile_sides_of(workload.spec, workload.height, workload.width)


def tile_sides_of(spec: ModelSpec, height: int, width: int) -> list[int]:
    """Return possible sides of tiles of a frame in latents, the largest first."""
    return [side // spec.vae.scale_factor_spatial for side in _TILE_SIDES if side < max(height, width)]


def decode_bytes(workload: Workload, chunk: int, tile: int | None) -> int:
    """Return the working set of the VAE's decoder.

    A tile is decoded for the whole clip, with its caches, before the next one starts. The clip is assembled in system
    memory: on a CPU it is part of the working set, on a GPU of `ram_bytes`.

    Args:
        chunk: latent frames in one call.
        tile: side of a tile, in latents; `None` decodes frames whole.
    """
    vae, element = workload.spec.vae, DTYPE_BYTES[workload.precision("vae")]
    window = 0 if workload.cuda else window_bytes(workload)
    if "vae" in workload.engine_bytes:
        return _engine_decode_bytes(workload, element)
    if tile is None:
        return window + vae.decode_bytes(chunk, workload.height, workload.width, element, cpu=not workload.cuda)
    side = tile * vae.scale_factor_spatial
    working = vae.decode_bytes(
        chunk, min(workload.height, side), min(workload.width, side), element, cpu=not workload.cuda
    )
    return working if workload.cuda else working + window + clip_bytes(workload)


def _engine_decode_bytes(workload: Workload, element: int) -> int:
    """Return the working set of the VAE's engines, which decode one latent frame in each call, or a whole clip in one.

    A session writes outputs into two sets of buffers in turn, and reads the caches from where the call before wrote
    them. Outputs of `vae_first` are freed when `vae_next` has read them.
    """
    vae = workload.spec.vae
    size = (workload.height, workload.width, element)
    if any(use.program == CLIP_PROGRAM for use in workload.engines.get("vae", ())):
        # With the frames, which are float32.
        count = (workload.decoded - 1) * vae.scale_factor_temporal + 1
        clip = _RGB_FLOAT32 * count * workload.height * workload.width
        context = workload.context_bytes(["vae"])
        return _BUFFER_SETS * clip + (
            0 if context else vae.decode_bytes(workload.decoded, *size, cpu=not workload.cuda)
        )
    frames = 2 * _RGB_FLOAT32 * vae.scale_factor_temporal * workload.height * workload.width
    buffers = _BUFFER_SETS * vae.cache_bytes(*size)
    if workload.context_bytes(["vae"]):
        return buffers + frames
    # The context is unknown: about the tensors of PyTorch, which has one set of caches.
    return buffers + vae.decode_bytes(1, *size, cpu=not workload.cuda) - vae.cache_bytes(*size)


def _encode_bytes(workload: Workload, strategy: MemoryStrategy) -> int:
    """Return the working set of the VAE's encoder.

    A video is encoded in calls of as many latent frames as are decoded at once, and waits in system memory, 8 bits of
    RGB; so does a background, and a mask in 8 bits.
    """
    if VAE_ENCODER in workload.engine_bytes:
        return _engine_encode_bytes(workload)
    spec, element = workload.spec, DTYPE_BYTES[workload.precision(VAE_ENCODER)]
    frames, *sides = workload.latent_shape[2:]
    rows, columns = (min(side, strategy.decode_tile or side) for side in sides)
    count, height, width = _encoded_clip(spec, (frames, rows, columns))
    if not spec.followed_videos and not spec.has_mask:
        return spec.input_encoder.encode_bytes(count, height, width, element)
    frames_of_call = strategy.decode_chunk * spec.vae.scale_factor_temporal
    call = spec.input_encoder.encode_bytes(min(count, frames_of_call), height, width, element)
    caches = _BUFFER_SETS * spec.input_encoder.encoder_cache_bytes(height, width, element)
    channels = _COLORS * (1 + (spec.background is not None)) + spec.has_mask
    return call + caches + (0 if workload.cuda else channels * count * workload.height * workload.width)


def _engine_encode_bytes(workload: Workload) -> int:
    """Return the working set of the VAE encoder's engines; see `_engine_decode_bytes` and `encoder_step_bytes`."""
    spec, precision = workload.spec, workload.precision(VAE_ENCODER)
    size = workload.height, workload.width
    frames = _RGB_FLOAT32 * spec.vae.scale_factor_temporal * workload.height * workload.width
    caches = 0
    if _image_input(spec).kind == "channels":
        caches = _image_input(spec).vae.encoder_cache_bytes(*size, DTYPE_BYTES[precision])
    if workload.context_bytes([VAE_ENCODER]):
        return frames + _BUFFER_SETS * caches
    return frames + _BUFFER_SETS * caches + encoder_step_bytes(spec, *size, precision)


def encoder_step_bytes(spec: ModelSpec, height: int, width: int, precision: str) -> int:
    """Return the activations of encoding one latent frame with the VAE's engines, without caches."""
    frames = spec.vae.scale_factor_temporal
    return _image_input(spec).vae.encode_bytes(frames, height, width, DTYPE_BYTES[precision])


def clip_bytes(workload: Workload) -> int:
    """Return the bytes of the clip that tiles are assembled in: three colors in float16."""
    frames = (workload.decoded - 1) * workload.spec.vae.scale_factor_temporal + 1
    return _CLIP_BYTES_PER_PIXEL * frames * workload.height * workload.width


def window_bytes(workload: Workload) -> int:
    """Return the bytes of the frames of a section's window in system memory, as they are decoded and as they blend."""
    if workload.spec.section is None:
        return 0
    frames = (workload.decoded - 1) * workload.spec.vae.scale_factor_temporal + 1
    return 2 * _RGB_FLOAT32 * frames * workload.height * workload.width


def stages(workload: Workload, strategy: MemoryStrategy) -> tuple[StageMemory, ...]:
    """Return the memory of each component while it runs, in the order of use."""
    weights = _weights_on_device(workload, strategy)
    overhead = _LATENT_TENSORS * DTYPE_BYTES["float32"] * prod(workload.latent_shape)
    overhead += _CUDA_CONTEXT_BYTES if workload.cuda else _CPU_LIBRARIES_BYTES
    overhead += _SHARING_BYTES if workload.split is not None else 0
    names = workload.spec.component_names
    resident = names if strategy.offload == "none" and strategy.keep_loaded else ()
    return tuple(
        _stage(workload, strategy, name, weights, overhead + workload.context_bytes({name, *resident}))
        for name in names
    )


def ram_bytes(workload: Workload, strategy: MemoryStrategy) -> int:
    """Return the system memory of a job on a GPU: offloaded weights or the shard being read, and the clip of tiles.

    While weights are copied to pinned memory, a process also holds pages of their files, up to the largest shard. They
    are not counted: they are clean, so the system reclaims them when memory is short.
    """
    weights = weights_bytes(workload.spec, workload.dtypes, strategy.quantization)
    in_pytorch = {name: size for name, size in weights.items() if name not in workload.engine_bytes}
    processes = 1 if workload.split is None else 1 + len(workload.split.devices)
    clip = window_bytes(workload) + (0 if strategy.decode_tile is None else clip_bytes(workload))
    if strategy.offload != "none":
        alone = [size for name, size in in_pytorch.items() if name in strategy.freed]
        return _CUDA_PROCESS_BYTES + max(sum(in_pytorch.values()) - sum(alone), *alone, 0) + clip
    return processes * _CUDA_PROCESS_BYTES + max(min(max(in_pytorch.values(), default=0), _SHARD_BYTES), clip)


def _weights_on_device(workload: Workload, strategy: MemoryStrategy) -> dict[str, int]:
    return weights_bytes(workload.spec, workload.dtypes, strategy.quantization) | dict(workload.engine_bytes)


def _stage(
    workload: Workload, strategy: MemoryStrategy, name: str, weights: Mapping[str, int], overhead: int
) -> StageMemory:
    stage = stage_of(name)
    working = _working(workload, strategy, name, weights)
    return StageMemory(
        stage=stage,
        component=name,
        weights_bytes=_on_device(workload, strategy, name, weights),
        working_bytes=working,
        overhead_bytes=overhead,
        allocator_slack_bytes=int(_SLACK_SHARE[stage] * working) + _SLACK_BYTES if workload.cuda else 0,
    )


def _working(workload: Workload, strategy: MemoryStrategy, name: str, weights: Mapping[str, int]) -> int:
    spec, dtype = workload.spec, workload.precision(name)
    on_engine = name in workload.engine_bytes
    if on_engine and name in SOUND_DECODERS and workload.context_bytes([name]):
        return _BUFFER_SETS * _samples_bytes(workload)
    if on_engine and name not in {"vae", VAE_ENCODER} and workload.context_bytes([name]):
        # Inputs and outputs are latents and texts.
        return _BUFFER_SETS * spec.max_sequence_length * spec.transformer.text_dim * DTYPE_BYTES["float32"]
    if is_text_encoder(name):
        working = spec.encoders[name].forward_bytes(DTYPE_BYTES[dtype])
        if strategy.offload in {"group", "sequential"} and not on_engine and name == "text_encoder":
            embedding, layers = _streamed_bytes(workload, name)
            working = max(embedding, layers + working) - max(embedding, layers)
        return working
    if not is_transformer(name):
        return _part_bytes(workload, strategy, name, dtype)
    text_size = workload.text_bytes if strategy.offload in {"none", "model"} else 0
    guidance, sequence = (1, 1) if workload.split is None else (workload.split.guidance, workload.split.sequence)
    share = -(-workload.tokens // sequence)
    in_blocks = workload.in_blocks(name)
    # Between block engines the stream is float32.
    element = DTYPE_BYTES["float32" if in_blocks else dtype]
    tensor = share * spec.transformer.width * element
    # Passes on different GPUs are cached by each.
    stored, of_pass = workload.cached_tensors
    cached = -(-stored // guidance) * of_pass * tensor
    if in_blocks:
        passes = _blocks_bytes(workload, name, share)
    else:
        passes = denoise_bytes(spec, share, dtype, strategy.quantization)
    if sequence == 1:
        return workload.working_sets * passes + text_size + cached
    exchanged = _EXCHANGE_TENSORS * share * spec.transformer.width * DTYPE_BYTES[dtype]
    return passes + text_size + cached + exchanged


def _samples_bytes(workload: Workload) -> int:
    """Return the bytes of the samples of a clip's sound; a spectrogram has fewer."""
    spec, latents = workload.spec, workload.sound_latents
    assert spec.sound is not None
    return round(_sound(spec).seconds(latents) * spec.sound.rate) * spec.sound.channels * _FLOAT32


def _part_bytes(workload: Workload, strategy: MemoryStrategy, name: str, dtype: str) -> int:
    """Return the working set of a component that is neither a text encoder nor a transformer."""
    spec = workload.spec
    if name == CONNECTORS:
        encoder = spec.encoders["text_encoder"]
        # The text encoder's states, the norms that they are divided by, and the results.
        return _CONNECTOR_TENSORS * encoder.states * encoder.max_tokens * encoder.width * DTYPE_BYTES[dtype]
    if name in SOUND_DECODERS:
        return round(workload.sound_latents * workload.sound_part(name).values * DTYPE_BYTES[dtype])
    if name == LATENT_UPSAMPLER:
        return round(prod(workload.latent_shape[2:]) * workload.refinement.values * DTYPE_BYTES[dtype])
    if name == IMAGE_ENCODER:
        images = _image_input(spec)
        return _IMAGE_TENSORS * images.tokens * images.width * DTYPE_BYTES[dtype]
    if name == VAE_ENCODER:
        return _encode_bytes(workload, strategy)
    return decode_bytes(workload, strategy.decode_chunk, strategy.decode_tile)


def _blocks_bytes(workload: Workload, name: str, tokens: int) -> int:
    """Return the working set of one forward pass on block engines.

    For all tokens: the stream twice in float32, since an engine reads one and writes the other; queries, keys, values
    and attended values in the engines' precision; the tables of the rotary embedding. For the tokens of one call: the
    stream, the text's queries and their attended values.

    If the context is unknown: the feed-forward's activations of one call, before and after the nonlinearity, and the
    norm in float32.

    While the first block that reads a control video runs, there are also the tokens of that, in the engines' precision,
    and the stream before and after the block that its result is added to. Where blocks attend to a face, there is the
    norm of their queries in float32, twice, since PyTorch does not have a kernel for it everywhere.

    In LTX-2, where queries, keys and values between the streams have half the width, a third stream takes the place of
    what that leaves; the sound's tokens are few.

    Source: `EngineStep` of `families.wan.transformer` and of `families.ltx2.transformer`.
    """
    transformer = workload.spec.transformer
    uses = workload.engines[name]
    element, width = DTYPE_BYTES[workload.precision(name)], transformer.width
    size = tokens * (2 * _FLOAT32 * width + _BLOCK_TENSORS * element * width)
    size += _FLOAT32 * tokens * transformer.rotation_values
    if workload.spec.control_input is not None:
        size += tokens * (2 * _FLOAT32 + (element if workload.spec.control_input.blocks else 0)) * width
    call = min(tokens, max(use.tokens for use in uses) or tokens)
    size += call * (_FLOAT32 + 2 * element) * width
    if workload.spec.is_packed:  # the block's weights are dequantized for its engines
        size += transformer.largest_block_parameters * element + width * transformer.ffn_dim * _UNPACKING_BYTES
    if workload.context_bytes([name]):
        return size
    return size + call * (2 * element * transformer.ffn_dim + 2 * _FLOAT32 * width)


def cached_tensors(
    spec: ModelSpec, step_cache: str, guidance_scale: float, guidance_scale_2: float | None
) -> tuple[int, int]:
    """Return the forward passes of a step that a step cache stores, and the tensors, (tokens, width), for each."""
    passes = spec.guidance_passes if max(guidance_scale, guidance_scale_2 or 0) > 1 else 1
    return passes, _CACHED_TENSORS[kind_of(step_cache)]


def _on_device(workload: Workload, strategy: MemoryStrategy, name: str, weights: Mapping[str, int]) -> int:
    """Return the bytes of weights on the device while `name` runs."""
    spec = workload.spec
    if strategy.offload == "none" and strategy.keep_loaded:
        running = spec.component_names.index(name)
        freed = {part for part in strategy.freed if spec.component_names.index(part) < running}
        return sum(size for part, size in weights.items() if part not in freed)
    if strategy.offload in {"none", "model"} or name in workload.engine_bytes:
        return weights[name]
    if not (is_transformer(name) or name == "text_encoder"):
        return weights[name]
    if not is_transformer(name):
        return max(_streamed_bytes(workload, name))
    transformer = spec.transformer
    layers = spec.blocks
    blocks = min(transformer.block_parameters, spec.parameters[name]) / spec.parameters[name] * weights[name]
    if strategy.offload == "group":
        # The running block and the next one, which is prefetched; a control block runs within another block.
        count = 2 if spec.control_input is None else 3
        largest = transformer.largest_block_parameters / transformer.block_parameters * blocks
        return int(weights[name] - blocks + count * largest)
    return int(blocks / layers / 3)  # by layer: at most a third of a block


def _streamed_bytes(workload: Workload, name: str) -> tuple[int, int]:
    """Return the bytes of a text encoder's embedding, and of its two largest neighbouring layers.

    The text encoder moves layer by layer, and the next layer while one computes. The embedding is freed before the
    first block computes.
    """
    encoder, element = workload.spec.encoders[name], DTYPE_BYTES[workload.dtypes[name]]
    return encoder.vocab_size * encoder.width * element, 2 * encoder.ffn_dim * encoder.width * element


def working_sets(speed: Speed) -> int:
    """Return `Workload.working_sets`."""
    return (2 if speed.paired else 1) + speed.graphed


def baseline_bytes(device: str) -> int:
    """Return the memory in use when a job starts: the CUDA context, or the imported libraries."""
    return _CUDA_CONTEXT_BYTES if device.startswith("cuda") else _CPU_IMPORTED_BYTES


def corrected(stage: StageMemory, excess: int) -> StageMemory:
    """Return a stage corrected by its measured excess: positive is added to the working set, negative to overhead."""
    return stage.replace(
        working_bytes=stage.working_bytes + max(excess, 0),
        overhead_bytes=max(stage.overhead_bytes + min(excess, 0), 0),
        measured=True,
    )
