"""The execution plan: the request with every "auto" resolved, and every decision with its reason.

    ExecutionPlan = ResolvedRequest + decisions

`planner.resolve.resolve` makes a plan and `pipeline.run.run_job` executes it. Plans are stored as JSON with jobs and
checkpoints, and `ExecutionPlan.to_json` is written into the MP4.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import field_validator

from runtime.core import facts
from runtime.core.errors import InvalidRequestError
from runtime.core.estimates import BackendSeconds, MemoryStrategy, Seconds, StageMemory, StrategyForecast
from runtime.core.facts import Fact, short
from runtime.core.frozen import FrozenModel
from runtime.core.images import (
    CROP,
    MIDDLE,
    NO_BORDERS,
    BoxMask,
    ClipPart,
    ImageUse,
    InputFile,
    VideoUse,
    by_field,
    field_of,
    input_key,
)
from runtime.core.keyframes import first_frame, latent_at
from runtime.core.loras import LoraUse
from runtime.core.messages.components import title_of
from runtime.core.preprocessors import PreprocessorUse
from runtime.core.request import (
    AUTO,
    CONTROL_FIELDS,
    CONTROL_SCALE,
    CONTROL_VIDEOS,
    FINISHERS,
    INTERPOLATOR,
    LOSSLESS,
    NO_NAG,
    OFF,
    SOUND_DECODERS,
    STRENGTH,
    UPSCALER,
    GenerationRequest,
)
from runtime.core.step_cache import each_step, is_scheduled, uses
from runtime.core.tiles import call_size

PYTORCH = "pytorch"
BACKEND_TITLES = facts.BACKEND_TITLES

# How a video leads back to its first frame: it ends on it, or is played backwards.
Looping = Literal["same frame", "backwards"]
# Of frames between others: the shipped network, or ffmpeg.
Interpolator = Literal["network", "minterpolate"]
INTERPOLATOR_TITLES: Mapping[str, str] = {"network": "Tandem's network", "minterpolate": "ffmpeg's minterpolate"}
# Codecs of new sound in MP4 files, by ffmpeg's names; FLAC is without loss.
SoundFormat = Literal["aac", "flac"]
# (latent frames, latent height, latent width)
LatentSize = tuple[int, int, int]
# The programs of block engines begin with this, those of the stream of a sound with the second.
_BLOCK, _SOUND_BLOCK = "block_", "block_sound_"


def is_block_program(program: str) -> bool:
    """Whether a program computes a part of each block of a transformer, with the block's weights as inputs."""
    return program.startswith(_BLOCK)


def is_sound_block(program: str) -> bool:
    """Whether it is a block program of the stream of a sound that is denoised with the frames."""
    return program.startswith(_SOUND_BLOCK)


class EngineRef(FrozenModel):
    """One engine of a component; the VAE has two, one for the first latent frame and one for the others.

    A transformer may have several that compute parts of each block, see `is_block_program`.

    Attributes:
        id: its name in the engine library.
        program: the exported computation: "text_encoder", "transformer", "vae_first", "vae_next" or one of
            `ModelSpec.block_programs`.
        builder: the name of its builder.
        precision: the dtype of its arithmetic.
        profile: the smallest, optimal and largest latent size that it supports.
        build: whether it is built before the job starts.
        tokens: the most tokens in one call of a block engine, else 0.
        context_bytes: GPU memory that it needs while it runs, besides weights, inputs and outputs; 0 if unknown.
    """

    id: str
    program: str
    builder: str
    precision: str
    profile: tuple[LatentSize, LatentSize, LatentSize]
    build: bool = False
    tokens: int = 0
    context_bytes: int = 0


class ComponentPlan(FrozenModel):
    """Where one component runs, and why.

    Attributes:
        backend: "tensorrt", "inductor", "onnxruntime" or "pytorch".
        device: a torch device, such as "cpu" or "cuda:0".
        dtype: a torch dtype's name, such as "float32", for PyTorch; also used if PyTorch takes over from an engine.
            With block engines it is their precision.
        weights_bytes: size of its weights in that dtype and quantization, or of its engines' files and weights.
        reasons: why it runs there, and other decisions about it.
        engines: its engines in the order of use; empty in PyTorch.
        quantization: how its weights are quantized in PyTorch: "none", "bnb-8bit", "bnb-4bit" or "fp8".
        badge: the status shown after the backend's title, such as "engine ready" or "no engine yet".
        later: engines that are built when no video waits; later videos use them.
        seconds: forecast of all its calls in this clip; `None` if it was stored by an earlier version.
        compared: the same in PyTorch and on all engines that exist and were measured, fastest first, as the choice
            compares them; empty if no engine was.
        failed_engines: block engines that failed in this job. PyTorch computes their parts of each block in the same
            chunks and with the same precision between them, so that memory, and the video of a resumed job, stay the
            same.
    """

    backend: str
    device: str
    dtype: str
    weights_bytes: int
    reasons: tuple[Fact, ...]
    engines: tuple[EngineRef, ...] = ()
    quantization: str = "none"
    badge: Fact | None = None
    later: tuple[EngineRef, ...] = ()
    failed_engines: tuple[EngineRef, ...] = ()
    seconds: Seconds | None = None
    compared: tuple[BackendSeconds, ...] = ()

    @property
    def on_engine(self) -> bool:
        """Whether engines replace the component: its weights are not loaded in PyTorch."""
        return bool(self.engines) and not self.in_blocks

    @property
    def in_blocks(self) -> bool:
        """Whether engines compute parts of each block, with the weights of the module that PyTorch loads."""
        return any(is_block_program(use.program) for use in self.engines)

    def on(self, backend: str) -> Seconds | None:
        """Return the seconds of this clip on a backend, on its fastest engines; `None` if they are not known."""
        if backend == self.backend:
            return self.seconds
        return next((entry.seconds for entry in self.compared if entry.backend == backend), None)

    def in_pytorch(self, reason: Fact) -> "ComponentPlan":
        """Return the plan of the same component in PyTorch, after its engine failed for `reason`."""
        failed = self.engines if self.in_blocks else self.failed_engines
        return self.replace(
            backend=PYTORCH,
            engines=(),
            reasons=(reason,),
            badge=Fact("planner.took_over"),
            failed_engines=failed,
            seconds=self.on(PYTORCH),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON types.

        `reasons` are the facts, `reason` is their text in the words of the command line. `engine` is the id of the
        last engine, which does most of the work.
        """
        return {
            "backend": self.backend,
            "device": self.device,
            "dtype": self.engines[-1].precision if self.engines else self.dtype,
            "weights_bytes": self.weights_bytes,
            "quantization": self.quantization,
            "reason": " ".join(map(str, self.reasons)),
            "reasons": [fact.model_dump(mode="json") for fact in self.reasons],
            "chip": "" if self.badge is None else f"{BACKEND_TITLES[self.backend]}: {short(self.badge)}",
            "engine": self.engines[-1].id if self.engines else None,
            "engines": [use.id for use in self.engines],
        }


class Split(FrozenModel):
    """How several GPUs share one job.

    Attributes:
        devices: torch devices, one for each process; only the first runs components that are not shared.
        guidance: how many passes of a step run at the same time, each on other GPUs.
        sequence: number of GPUs that share the tokens of one pass; `guidance` × `sequence` is the number of devices.
        decode: whether each GPU decodes a strip of every frame.
    """

    devices: tuple[str, ...]
    guidance: int
    sequence: int
    decode: bool

    @property
    def reason(self) -> Fact:
        """How the GPUs share the transformers."""
        if self.guidance == 1:
            return Fact("planner.tokens_shared", {"sequence": self.sequence})
        if self.sequence == 1:
            return Fact("planner.passes_shared", {"passes": self.guidance})
        return Fact("planner.passes_and_tokens_shared", {"passes": self.guidance, "sequence": self.sequence})

    def shares(self, component: str) -> bool:
        """Return whether all GPUs run a component together."""
        return self.decode if component == "vae" else component.startswith("transformer")


class Speed(FrozenModel):
    """Execution options of the components that run in PyTorch, with reasons.

    Attributes:
        attention: the attention kernel of the transformers, one of `request.ATTENTIONS` except "auto" and "sol".
        sparse_tau: the threshold of sparse attention, which takes the kernel's place except where attention stays exact
            (`core.sparse_attention`); `None` for none.
        attention_reason, compiled_reason: why; `None` in `EAGER`.
        nag: the scale of normalized attention guidance, where a call takes a prompt and a negative one; 1 for none.
        compiled: whether the transformers' blocks are compiled.
        compiled_later: whether they are compiled for later clips when no video waits.
        text_kept: whether every block's keys and values of the text are cached across steps.
        text_bytes: size of that cache.
        paired: whether both guidance passes run in one call, as a batch of two.
        graphed: whether a transformer's call is recorded as a CUDA graph and replayed.
        fused: whether each block's query, key and value projections are one matrix product.
        channels_last: whether the VAE's activations are in channels-last layout.
        vae_kernels: whether Triton kernels compute the VAE's operations between convolutions, and some of these. They
            are compiled at the first use.
        int8_kernels: whether kernels multiply the transformers' layers that files store in INT8 or W4A8, and round
            their input to 8 bits; otherwise they are dequantized at each call.
        int8_reason: why; `None` for models without such layers.
    """

    attention: str = "native"
    sparse_tau: float | None = None
    nag: float = NO_NAG
    attention_reason: Fact | None = None
    compiled: bool = False
    compiled_later: bool = False
    compiled_reason: Fact | None = None
    text_kept: bool = False
    text_bytes: int = 0
    paired: bool = False
    graphed: bool = False
    fused: bool = False
    channels_last: bool = False
    vae_kernels: bool = False
    int8_kernels: bool = False
    int8_reason: Fact | None = None

    def compiles(self, component: str) -> bool:
        """Whether code of a component in PyTorch is compiled: a transformer's blocks, or kernels of the VAE."""
        return self.vae_kernels if component in {"vae", "vae_encoder"} else self.compiled

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON types, with the reasons as text."""
        names = ("attention_reason", "compiled_reason", "int8_reason")
        reasons: dict[str, Fact | None] = {name: getattr(self, name) for name in names}
        return self.model_dump(mode="json") | {name: str(fact or "") for name, fact in reasons.items()}

    @property
    def reasons(self) -> tuple[Fact, ...]:
        """The options in use, as facts."""
        facts = (
            self.attention_reason,
            self.compiled_reason,
            Fact("planner.text_kept", {"bytes": self.text_bytes}) if self.text_kept else None,
            Fact("planner.paired") if self.paired else None,
            Fact("planner.graphed") if self.graphed else None,
            Fact("planner.vae_kernels") if self.vae_kernels else None,
            self.int8_reason,
        )
        return tuple(fact for fact in facts if fact is not None)


EAGER = Speed()
_NO_TIME = Seconds(0, 0, 0)

# Players enlarge small videos, which makes compression artifacts visible. Higher quality costs few bytes there.
_CRF, _SMALL_CRF = 17, 10
_SMALL_PIXELS = 320 * 240


def default_crf(width: int, height: int) -> int:
    """Return the H.264 constant rate factor for a frame of this size in pixels."""
    return _SMALL_CRF if width * height <= _SMALL_PIXELS else _CRF


class Upscaling(FrozenModel):
    """How the frames of a video are enlarged after they are decoded.

    Attributes:
        width, height: of the result, in pixels.
        tile: side of the tiles that a frame is cut into, in its pixels; `None` for whole frames.
        batch: frames, or tiles, of one call.
    """

    width: int
    height: int
    tile: int | None
    batch: int


class Refinement(FrozenModel):
    """How a video is made in two stages: at half its width and height, and then refined at its own size.

    Attributes:
        width, height: of the first stage, in pixels.
        latent_shape, tokens: of the first stage; see `ExecutionPlan`.
        levels: noise levels before each step of the second stage, which has no guidance.
        cost: operations of a forward pass in the first stage, as a share of those in the second.
    """

    width: int
    height: int
    latent_shape: tuple[int, int, int, int, int]
    tokens: int
    levels: tuple[float, ...]
    cost: float


def skipped_steps(steps: int, strength: float) -> int:
    """Return how many of a schedule's first steps do not run with a strength, as in diffusers' pipelines."""
    return steps - min(int(steps * strength), steps)


def looped(frames: int, looping: Looping | None) -> int:
    """Return how many frames a video of so many has as a loop; see `ExecutionPlan.looping`."""
    return {None: frames, "same frame": frames - 1, "backwards": max(2 * frames - 2, 1)}[looping]


def plain_output(output: Path) -> Path:
    """Return where a video is kept as it was decoded, if it was interpolated or upscaled: NAME.plain.mp4."""
    return output.with_name(f"{output.stem}.plain{output.suffix}")


class ResolvedRequest(FrozenModel):
    """Content and sampling of a video: fields of `GenerationRequest` without "auto" values.

    Attributes:
        model: the model's name in the catalogue.
        guidance_scale: guidance scale of the (high-noise) transformer.
        guidance_scale_2: guidance scale of the low-noise transformer; `None` if the model has only one.
        nag: how much the negative prompt counts in steps without guidance, see `execution.attention_guidance`; 1 for
            not at all.
        shift: the timestep shift of the scheduler; `None` for the model's own.
        step_cache: the kind of step cache with its strength, or "none".
        guidance_cache: by which share of its norm the prediction with the prompt may differ from the one without, so
            that the latter is left out in the next step; "off" for never.
        loras: LoRAs of the transformers; their files exist and are valid.
        crf: H.264 constant rate factor, 0 to 51.
        loop: whether the video leads back to its first frame, "on" or "off".
        interpolate: how many times as many frames the video has as are decoded; "off" for as many.
        upscale: how many times larger the frames become; "off" for not at all.
        upscaler: the name of what enlarges them; "auto" if nothing does.
        image, last_image: what the video starts from and ends with.
        keyframes, keyframe_seconds: what the video is guided towards between them, and when, in seconds.
        image_fit, image_position: how they and a video's frames become frames of this size, see `video.images.fitted`.
        extend: the video that this one continues; `image` is its last frame then.
        extend_frames: how many of its last frames the new part begins with.
        join: the video that follows the new part, which ends with as many of its first frames.
        video: what the video is made from, beside the prompt.
        strength: how much of it changes, above 0 and up to 1.
        stages: "2" if it is made at half the size first, else "1".
        control, mask: what steers the video, and where it changes.
        outpaint: what is added around the control video, see `core.images.Borders`.
        face, background: the expressions of a character, and the video that it is put into.
        control_start: at which second of all these videos their first frames are.
        references: images of what the video shows.
        control_scale: how much the video follows them, for each block that reads them or one for all.
        preprocess: what is made of the control video, of `request.PREPROCESSING`.
        preprocessor: the model that makes it; `None` if none does.
    """

    prompt: str
    negative_prompt: str
    model: str
    width: int
    height: int
    frames: int
    fps: int
    steps: int
    guidance_scale: float
    guidance_scale_2: float | None
    seed: int
    shift: float | None
    step_cache: str
    loras: tuple[LoraUse, ...]
    crf: int
    guidance_cache: str = OFF
    nag: float = NO_NAG
    loop: str = OFF
    interpolate: str = OFF
    upscale: str = OFF
    upscaler: str = AUTO
    image: ImageUse | None = None
    last_image: ImageUse | None = None
    keyframes: tuple[ImageUse, ...] = ()
    keyframe_seconds: tuple[float, ...] = ()
    image_fit: str = CROP
    image_position: float = MIDDLE
    extend: VideoUse | None = None
    extend_frames: int = 1
    join: VideoUse | None = None
    video: VideoUse | None = None
    strength: float = STRENGTH
    stages: str = "1"
    control: VideoUse | None = None
    face: VideoUse | None = None
    background: VideoUse | None = None
    mask: VideoUse | ImageUse | BoxMask | None = None
    outpaint: tuple[float, ...] = NO_BORDERS
    control_start: float = 0.0
    references: tuple[ImageUse, ...] = ()
    control_scale: tuple[float, ...] = CONTROL_SCALE
    preprocess: str = OFF
    preprocessor: PreprocessorUse | None = None

    @property
    def images(self) -> Mapping[str, ImageUse]:
        """The images by the field of the request, in the order of their latents; see `inputs` for keyframes."""
        keyframes = {input_key("keyframes", number): use for number, use in enumerate(self.keyframes)}
        by_field = {"image": self.image, **keyframes, "last_image": self.last_image}
        return {field: use for field, use in by_field.items() if use is not None}

    @property
    def inputs(self) -> Mapping[str, InputFile]:
        """The images and videos by the field of the request; an extended video without its last frame.

        Those of a field with several have numbers, see `images.field_of`.
        """
        videos = {name: getattr(self, name) for name in ("extend", "join", "video", *CONTROL_VIDEOS)}
        images = {field: use for field, use in self.images.items() if self.extend is None or field != "image"}
        references = {input_key("references", number): use for number, use in enumerate(self.references)}
        return {**images, **{name: use for name, use in videos.items() if isinstance(use, InputFile)}, **references}

    @property
    def input_references(self) -> dict[str, str | list[str]]:
        """How a request names the images and videos, by its field."""
        return by_field({key: use.reference for key, use in self.inputs.items()})

    @property
    def skipped_steps(self) -> int:
        """The first steps that do not run: those of more noise than a video is given."""
        return 0 if self.video is None else skipped_steps(self.steps, self.strength)

    @property
    def denoising_steps(self) -> int:
        """The steps that run, of each section."""
        return self.steps - self.skipped_steps

    @property
    def seconds_of_video(self) -> float:
        """Length of the clip in seconds."""
        return self.frames / self.fps


class ExecutionPlan(ResolvedRequest):
    """The plan of one video.

    Attributes:
        request: as it was asked for, to make a new plan after a fallback or out-of-memory.
        model_directory: the model's folder, or the file of its transformer.
        model_version: as in `ModelSpec`.
        output: the MP4 to write.
        latent_shape: (batch, channels, latent frames, latent height, latent width) of what is denoised at once: the
            clip, or a section.
        leading_latents: as in `ModelSpec`, how many of the latent frames come before those of the clip.
        tokens: sequence length of the transformer.
        sections: how many sections the video is made in, one after the other; 1 if it is made whole.
        prompts: how many different prompts the sections have.
        components: by name, in the order they run.
        strategy: how the clip fits into memory.
        split: how several GPUs share the job; `None` on one GPU.
        speed: execution options of PyTorch.
        expert_steps: steps of each transformer that run, by component; empty if unknown.
        shift_reason: the reason for `shift`; `None` for the model's own.
        step_flops, decode_flops: operations of one denoising step (guidance included) and of the whole decode, of all
            sections.
        free_bytes: free memory of the device.
        memory: the memory of each stage, in order.
        seconds: the time forecast for "encode", "denoise" and "decode", and for "interpolate" and "upscale" if the plan
            has them, their "total", and "load", which is extra; "compile" is the part of "load" that compiling takes.
            "later" is the total of later clips, if engines are built or code is compiled for them when no video waits.
        strategies: forecasts of all strategies on this device, fastest first.
        warnings: warnings about the result.
        embedded_guidance: guidance scale that is an input of the transformer; `guidance_scale` is 1 then. `None` if the
            model has no such input.
        guidance_reason: the reason for guidance scales that the model has for videos from images; `None` for others.
        builds_later: whether the job builds no engines: those in `ComponentPlan.later` are built when no video waits.
        mag_ratios: magnitude ratios by transformer, see `ModelSpec.mag_ratios`; empty unless the step cache uses them.
        upscaling: how frames are enlarged; `None` if they are not. `width` and `height` are the sides before that.
        interpolator: what computes the frames of `interpolate`.
        sound: whether the model makes sound with the frames.
        sound_shape: (batch, channels, latents, bins) of the sound that is denoised with the frames; `None` without.
        guidance_passes: forward passes of a step with guidance.
        refinement: how it is made in two stages; `steps` are those of the first one. `None` if it is made in one.
    """

    request: GenerationRequest
    model_directory: Path
    output: Path
    latent_shape: tuple[int, int, int, int, int]
    tokens: int
    components: Mapping[str, ComponentPlan]
    strategy: MemoryStrategy
    split: Split | None
    speed: Speed
    expert_steps: Mapping[str, int]
    shift_reason: Fact | None
    step_flops: float
    decode_flops: float
    free_bytes: int
    memory: tuple[StageMemory, ...]
    seconds: Mapping[str, Seconds]
    strategies: tuple[StrategyForecast, ...]
    warnings: tuple[Fact, ...]
    builds_later: bool = False
    embedded_guidance: float | None = None
    sections: int = 1
    leading_latents: int = 0
    prompts: int = 1
    guidance_reason: Fact | None = None
    model_version: int = 1
    mag_ratios: Mapping[str, tuple[float, ...]] = {}
    upscaling: Upscaling | None = None
    interpolator: Interpolator = "minterpolate"
    sound: bool = False
    sound_shape: tuple[int, int, int, int] | None = None
    guidance_passes: int = 2
    refinement: Refinement | None = None

    @field_validator("request", mode="wrap")
    @classmethod
    def _valid_request(cls, value: Any, validate: Callable[[Any], GenerationRequest]) -> GenerationRequest:
        try:
            return validate(value)
        except InvalidRequestError as error:
            raise ValueError(error.what) from error

    @property
    def gpus(self) -> int:
        """Number of devices that run the job; 1 for a CPU."""
        return 1 if self.split is None else len(self.split.devices)

    @property
    def video_size(self) -> tuple[int, int]:
        """(width, height) of the video in `output`, in pixels."""
        return (self.width, self.height) if self.upscaling is None else (self.upscaling.width, self.upscaling.height)

    @property
    def interpolation(self) -> int:
        """How many frames the video has for each decoded one."""
        return 1 if self.interpolate == OFF else int(self.interpolate)

    @property
    def parts(self) -> tuple[ClipPart, ...]:
        """The parts of the video as it was decoded, in order: the last one is made by this job, or the one before."""
        if self.extend is None:
            return (ClipPart(prompt=self.prompt, frames=self.frames),)
        # The first frames are the last ones of the video that is extended.
        made = ClipPart(prompt=self.prompt, frames=self.frames - self.extend_frames)
        if self.join is None:
            return (*self.extend.parts, made)
        return (*self.extend.parts, made.replace(frames=made.frames - self.extend_frames), *self.join.parts)

    @property
    def video_frames(self) -> int:
        """Frames of the video in `output`."""
        return self.plain_frames * self.interpolation

    @property
    def plain_frames(self) -> int:
        """Frames of the video before it is interpolated: of all its parts, and as a loop."""
        return looped(sum(part.frames for part in self.parts), self.looping)

    @property
    def looping(self) -> Looping | None:
        """How the video leads back to its first frame; `None` if it does not."""
        if self.loop == OFF:
            return None
        ends = self.image is not None and self.last_image is not None and self.image.digest == self.last_image.digest
        # A clip with sound comes close to its last image and does not end on exactly it, see `models.spec.ImageInput`.
        return "same frame" if ends and self.extend is None and self.sound_shape is None else "backwards"

    @property
    def video_fps(self) -> int:
        """Frames per second of the video in `output`."""
        return self.fps * self.interpolation

    @property
    def keeps_plain(self) -> bool:
        """Whether the decoded frames are saved too, because the video has others."""
        return self.interpolate != OFF or self.upscaling is not None

    @property
    def sound_format(self) -> SoundFormat | None:
        """How sound is saved: of the model, or of the video that it continues; `None` if there can be none."""
        if not self.sound and (self.extend is None or self.request.sound == OFF):
            return None
        return "flac" if self.request.sound == LOSSLESS else "aac"

    @property
    def plain_crf(self) -> int:
        """The constant rate factor of frames that are not upscaled."""
        return default_crf(self.width, self.height) if self.request.crf == AUTO else self.crf

    @property
    def keyframe_places(self) -> Mapping[str, int]:
        """Numbers of frames, from 0, by the images that the video is guided towards there; empty without keyframes.

        The last image of a clip with sound is one, at the first frame of the last latent frame.
        """
        if self.sound_shape is None or not {*self.images} - {"image"}:
            return {}
        latents = self.latent_shape[2]
        stride = (self.frames - 1) // (latents - 1)
        places = [latent_at(seconds, self.fps, stride, latents) for seconds in self.keyframe_seconds]
        by_key = {input_key("keyframes", number): place for number, place in enumerate(places)}
        by_key |= {} if self.last_image is None else {"last_image": latents - 1}
        return {key: first_frame(latent, stride) for key, latent in by_key.items()}

    @property
    def total_steps(self) -> int:
        """Denoising steps of the whole video; `denoising_steps` is the number for each section, or the first stage."""
        return self.denoising_steps * self.sections + (0 if self.refinement is None else len(self.refinement.levels))

    @cached_property
    def by_stage(self) -> tuple["ExecutionPlan", ...]:
        """The plans of the stages that denoise, one after the other, each with the size, steps and guidance of it."""
        refinement = self.refinement
        if refinement is None:
            return (self,)
        size = {name: getattr(refinement, name) for name in ("width", "height", "latent_shape", "tokens")}
        steps = len(refinement.levels)
        return self.replace(refinement=None, **size), self.replace(refinement=None, steps=steps, guidance_scale=1.0)

    @cached_property
    def computed(self) -> tuple[bool, ...]:
        """Which steps of the video are computed; the others reuse what a step cache holds, and take almost no time.

        With first-block caching, and where the steps of each transformer are unknown, all count as computed.
        """
        if not is_scheduled(self.step_cache) or not self.expert_steps:
            return (True,) * self.total_steps
        step_uses = uses(self.step_cache, each_step(self.expert_steps), self.mag_ratios)
        return tuple(use.computed for use in step_uses) * self.sections

    @cached_property
    def step_costs(self) -> tuple[float, ...]:
        """How long each step of the video takes, in steps of the second stage; of a video made in one, see `computed`.

        Steps of one stage with different numbers of passes count alike.
        """
        if self.refinement is None:
            return tuple(map(float, self.computed))
        passes = self.guidance_passes if self.guidance_scale > 1 else 1
        first = (self.refinement.cost * passes,) * self.denoising_steps
        return (*first, *(1.0 for _ in self.refinement.levels))

    @property
    def latent_size(self) -> LatentSize:
        """(latent frames, latent height, latent width)."""
        _, _, frames, height, width = self.latent_shape
        return frames, height, width

    @property
    def model_components(self) -> list[str]:
        """Names of the model's components: all but interpolator and upscaler, which are loaded for each job."""
        return [name for name in self.components if name not in FINISHERS]

    def engine_size(self, component: str) -> LatentSize:
        """Return the size that engines of a component are for: the clip's in latents, or calls with single frames.

        The latents of reference images, and of a character, are not decoded.

        That of decoders of sound is (latents of the sound, 1, 1).
        """
        if component in SOUND_DECODERS and self.sound_shape is not None:
            return self.sound_shape[2], 1, 1
        if component == INTERPOLATOR:
            return 1, self.height, self.width
        if component == "vae":
            return self.latent_size[0] - self.leading_latents, *self.latent_size[1:]
        if component != UPSCALER or self.upscaling is None:
            return self.latent_size
        return self.upscaling.batch, *call_size(self.height, self.width, self.upscaling.tile)

    @property
    def memory_bytes(self) -> int:
        """The forecast peak memory over all stages."""
        return max(stage.peak_bytes for stage in self.memory)

    @property
    def forecast(self) -> StrategyForecast:
        """The forecast of the plan's own strategy."""
        return next(forecast for forecast in self.strategies if forecast.strategy == self.strategy)

    @property
    def second_seconds(self) -> Seconds:
        """The time forecast for a second clip with these settings in the same process, which keeps what it compiled.

        It runs on the engines and the code that are made after the first, if there are any. Components that do not stay
        loaded are loaded again.
        """
        weights = {name: part.weights_bytes for name, part in self.components.items()}
        kept = self.strategy.offload != "none"
        again = sum(size for name, size in weights.items() if not (kept or self.strategy.keeps(name)))
        load, compiling = (self.seconds.get(name, _NO_TIME) for name in ("load", "compile"))
        total = self.seconds.get("later") or self.seconds.get("total", _NO_TIME)
        reading = (load.likely - compiling.likely) * again / (sum(weights.values()) or 1)
        return replace(total, likely=total.likely + reading, low=total.low + reading, high=total.high + reading)

    @property
    def builds(self) -> bool:
        """Whether engines are built for later clips when no video waits."""
        return any(part.later for part in self.components.values())

    def fell_back(self, component: str) -> bool:
        """Return whether a component runs on a backend other than the requested one."""
        return self.request.backend(component) not in {AUTO, self.components[component].backend}

    def sharing_engines(self, component: str) -> list[str]:
        """Return a component and the later ones that run on the same engines; block engines serve all transformers."""
        names = [*self.components]
        ids = [use.id for use in self.components[component].engines]
        later = names[names.index(component) + 1 :] if ids else []
        return [component, *(name for name in later if [use.id for use in self.components[name].engines] == ids)]

    def title(self, component: str) -> str:
        """Return the title of a component."""
        return title_of(component, self.components)

    def with_component(self, name: str, part: ComponentPlan) -> "ExecutionPlan":
        """Return the plan with the plan of one component replaced."""
        return self.replace(components={**self.components, name: part})

    def request_json(self) -> dict[str, Any]:
        """Return the request with the values that were used; `GenerationRequest.from_mapping` reads it back.

        Preferences, such as backends and attention, are those of the request.
        """
        fields = (name for name in ResolvedRequest.model_fields if name != "preprocessor")
        resolved = {name: getattr(self, name) for name in fields}
        used = self.request.to_json() | resolved
        used |= {"offload": self.strategy.offload, "quantization": self.strategy.quantization, "gpus": self.gpus}
        used["loras"] = [vars(use.requested()) for use in self.loras]
        used |= {"references": [], "control_scale": list(self.control_scale), "outpaint": list(self.outpaint)}
        used |= {"keyframes": [], "keyframe_seconds": list(self.keyframe_seconds), **self.input_references}
        used |= {"mask": self.mask.reference} if isinstance(self.mask, BoxMask) else {}
        used |= {"extend_frames": AUTO} if self.extend is None else {"image": None}  # it follows
        used["seconds"] = AUTO  # the frames are known
        if self.embedded_guidance is not None:
            used["guidance_scale"] = self.embedded_guidance
        if self.guidance_scale_2 is None:
            del used["guidance_scale_2"]
        return used

    def to_json(self) -> dict[str, Any]:
        """Return the decisions as JSON types, in the words of the command line."""
        return {
            "components": {name: part.to_json() for name, part in self.components.items()},
            "latent_shape": list(self.latent_shape),
            "tokens": self.tokens,
            "refinement": None if self.refinement is None else self.refinement.model_dump(mode="json"),
            "sections": self.sections,
            "decode_chunk": self.strategy.decode_chunk,
            "decode_tile": self.strategy.decode_tile,
            "keep_loaded": self.strategy.keep_loaded,
            "offload": self.strategy.offload,
            "quantization": self.strategy.quantization,
            "step_flops": self.step_flops,
            "decode_flops": self.decode_flops,
            "memory_bytes": self.memory_bytes,
            "memory": {
                "peak_bytes": self.memory_bytes,
                "free_bytes": self.free_bytes,
                "stages": [stage.to_json() for stage in self.memory],
            },
            "forecast": {
                **{name: seconds.to_json() for name, seconds in self.seconds.items()},
                **({"second": self.second_seconds.to_json()} if self.seconds else {}),
            },
            "ladder": [forecast.to_json(taken=forecast.strategy == self.strategy) for forecast in self.strategies],
            "split": None
            if self.split is None
            else {**self.split.model_dump(mode="json"), "reason": str(self.split.reason)},
            "loras": [use.summary() for use in self.loras],
            "images": {field: use.summary() for field, use in self.images.items()},
            "keyframes": dict(self.keyframe_places),
            "video": None if self.video is None else self.video.summary(),
            "control": {key: use.summary() for key, use in self.inputs.items() if field_of(key) in CONTROL_FIELDS},
            **({} if self.preprocessor is None else {"preprocessor": self.preprocessor.summary()}),
            "parts": [part.model_dump() for part in self.parts],
            "looping": self.looping,
            "sound": self.sound,
            "skipped_steps": self.skipped_steps,
            "step_cache": self.step_cache,
            "guidance_cache": self.guidance_cache,
            "nag": self.nag,
            "speed": self.speed.to_json(),
            "shift": self.shift,
            "shift_reason": str(self.shift_reason or ""),
            "guidance_reason": str(self.guidance_reason or ""),
            "model_version": self.model_version,
            "expert_steps": dict(self.expert_steps),
            "interpolation": None
            if self.interpolate == OFF
            else {
                "factor": self.interpolation,
                "frames": self.video_frames,
                "fps": self.video_fps,
                "by": self.interpolator,
            },
            "upscaling": None if self.upscaling is None else self.upscaling.model_dump(),
        }
