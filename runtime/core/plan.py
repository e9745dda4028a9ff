"""What will run: the request with nothing left open, and every choice with its reason.

Made by `planner.resolve.resolve`, carried out by `pipeline.run.run_job`, written into the MP4.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from runtime.core.estimates import Seconds, StageMemory, Strategy
from runtime.core.loras import LoraUse
from runtime.core.request import AUTO, RETRY
from runtime.core.step_cache import NONE
from runtime.core.units import memory_size

PYTORCH = "pytorch"
BACKEND_TITLES: Mapping[str, str] = {
    PYTORCH: "PyTorch",
    "inductor": "Inductor",
    "onnxruntime": "ONNX Runtime",
    "tensorrt": "TensorRT",
}

# (latent frames, latent height, latent width)
LatentSize = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class EngineUse:
    """One engine of a component: a component has one, but the VAE, whose first step has its own.

    Attributes:
        id: its name in the engine library.
        program: what it computes: "text_encoder", "transformer", "vae_first" or "vae_next".
        builder: what makes it.
        precision: of its arithmetic.
        profile: the smallest, best and largest latent size it is built for.
        build: whether it is built before the job starts.
    """

    id: str
    program: str
    builder: str
    precision: str
    profile: tuple[LatentSize, LatentSize, LatentSize]
    build: bool = False


@dataclass(frozen=True, kw_only=True)
class ComponentPlan:
    """Where one part of the model runs, and why.

    Attributes:
        backend: "tensorrt", "inductor", "onnxruntime" or "pytorch".
        device: a torch device, such as "cpu" or "cuda:0".
        dtype: a torch dtype's name, such as "float32": PyTorch's, should it run or take over.
        weights_bytes: size of its weights in that dtype and quantization, or of its engines' files.
        reason: one sentence.
        engines: what it runs on, in the order of use; none in PyTorch.
        asked: the backend that was asked for, or "auto".
        quantization: of its weights in PyTorch: "none", "bnb-8bit", "bnb-4bit" or "fp8".
        chip: what will happen now, in a few words: "TensorRT: engine ready", "PyTorch: no engine yet".
    """

    backend: str
    device: str
    dtype: str
    weights_bytes: int
    reason: str
    engines: tuple[EngineUse, ...] = ()
    asked: str = "auto"
    quantization: str = "none"
    badge: str = ""

    @property
    def fell_back(self) -> bool:
        """Whether PyTorch runs it where another backend was asked for."""
        return self.asked not in {"auto", self.backend}

    def in_pytorch(self, reason: str) -> "ComponentPlan":
        """Return the same component in PyTorch."""
        return replace(self, backend=PYTORCH, engines=(), reason=reason, badge="PyTorch: took over from its engine")

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON types; `engine` is the id of the engine that does most of the work."""
        return {
            "backend": self.backend,
            "device": self.device,
            "dtype": self.engines[-1].precision if self.engines else self.dtype,
            "weights_bytes": self.weights_bytes,
            "quantization": self.quantization,
            "reason": self.reason,
            "chip": self.badge,
            "engine": self.engines[-1].id if self.engines else None,
            "engines": [use.id for use in self.engines],
        }


@dataclass(frozen=True, kw_only=True)
class Split:
    """How several GPUs share one job.

    Attributes:
        devices: torch devices, one for each process; the first one's runs alone what is not shared.
        guidance: 2 where the passes with the prompt and without it run on different GPUs, else 1.
        sequence: GPUs that share the tokens of one pass; there are `guidance` times as many devices.
        decode: whether each decodes a strip of every frame.
        reason: one sentence.
    """

    devices: tuple[str, ...]
    guidance: int
    sequence: int
    decode: bool
    # Two that differ in nothing else do the same.
    reason: str = field(compare=False)

    def shares(self, component: str) -> bool:
        """Return whether all of them run a component together."""
        return self.decode if component == "vae" else component != "text_encoder"


@dataclass(frozen=True, kw_only=True)
class Speed:
    """How the parts that run in PyTorch are computed, and why.

    Attributes:
        attention: the transformers', one of `request.ATTENTIONS` but "auto".
        attention_reason, compiled_reason: a sentence each.
        compiled: whether the transformers' blocks, and what lies between the VAE's convolutions, are compiled.
        text_kept: whether every block's keys and values of the text are kept from step to step.
        text_bytes: what those take.
        paired: whether both guidance passes are one call.
        graphed: whether a transformer's call is recorded as a CUDA graph and replayed.
        fused: whether queries, keys and values come from one matrix.
        channels_last: whether the VAE's values lie pixel by pixel.
    """

    attention: str = "native"
    attention_reason: str = ""
    compiled: bool = False
    compiled_reason: str = ""
    text_kept: bool = False
    text_bytes: int = 0
    paired: bool = False
    graphed: bool = False
    fused: bool = False
    channels_last: bool = False

    @property
    def told(self) -> str:
        """All of it in sentences."""
        said = [
            self.attention_reason,
            self.compiled_reason,
            f"The text's keys and values are computed once a clip ({memory_size(self.text_bytes)})."
            if self.text_kept
            else "",
            "Both guidance passes are one call, for one does not fill the GPU." if self.paired else "",
            "Calls are recorded and replayed, for starting kernels takes longer than running them."
            if self.graphed
            else "",
        ]
        return " ".join(filter(None, said))

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return asdict(self)


EAGER = Speed()


@dataclass(frozen=True, kw_only=True)
class ExecutionPlan:
    """One video, decided.

    Attributes:
        prompt, negative_prompt, width, height, frames, fps, steps, seed: as in `GenerationRequest`, nothing open.
        guidance_scale: of the (high-noise) transformer.
        guidance_scale_2: of the low-noise transformer; `None` where the model has only one.
        model: the catalogue's name for it.
        model_directory: its folder.
        latent_shape: (batch, channels, latent frames, latent height, latent width).
        tokens: length of the transformer's sequence.
        decode_chunk: latent frames that the VAE decodes in one call.
        decode_tile: side of the tiles that the VAE decodes a frame in, in latents; `None` decodes it whole.
        keep_loaded: whether parts stay on the device between stages and jobs, all but those `freed` after their stage.
            Those that `offload` has wait in RAM stay there in any case.
        components: by name, in the order they run.
        step_flops, decode_flops: arithmetic of one denoising step (guidance included) and of the whole decode.
        memory_bytes: the forecast's peak over the stages; `free_bytes` of the device were free for it.
        memory: what each component takes while it runs, in order.
        seconds: the forecast for "encode", "denoise", "decode", their "total", and "load", which comes on top.
        ladder: the ways to hold the weights, fastest first.
        output: the MP4 to write.
        backends: which backend was asked for, by component or "all"; what is not there is "auto".
        build: whether engines are built: "missing", "never", "always", or "auto".
        offload: where weights wait while they are not used: "none" (the device), "model", "group" or "sequential".
        quantization: of the transformers' weights: "none", "bnb-8bit", "bnb-4bit" or "fp8".
        on_out_of_memory: what follows when memory runs out: "retry", "any" or "ask".
        warnings: sentences to show beside the result.
        split: how several GPUs share the job; `None` where one does it.
        loras: what is added to the transformers' weights.
        step_cache: what is computed once for several denoising steps, with its strength, or "none".
        attention, compile: as asked for.
        speed: what came of them.
        shift: how far noise levels are moved towards noise; `None` where the model's own scheduler says it.
        shift_reason: a sentence, where it is not the model's own.
        expert_steps: how many of the steps each transformer takes, by component; empty where that is not known.
        vae_precision: as asked for; the VAE's dtype is what came of it.
    """

    prompt: str
    negative_prompt: str
    width: int
    height: int
    frames: int
    fps: int
    steps: int
    guidance_scale: float
    guidance_scale_2: float | None
    seed: int
    model: str
    model_directory: Path
    latent_shape: tuple[int, int, int, int, int]
    tokens: int
    decode_chunk: int
    keep_loaded: bool
    components: Mapping[str, ComponentPlan]
    step_flops: float
    decode_flops: float
    memory_bytes: int
    output: Path
    backends: Mapping[str, str]
    build: str
    offload: str
    quantization: str
    decode_tile: int | None = None
    free_bytes: int = 0
    freed: tuple[str, ...] = ()
    memory: tuple[StageMemory, ...] = ()
    seconds: Mapping[str, Seconds] = field(default_factory=dict)
    strategies: tuple[Strategy, ...] = ()
    on_out_of_memory: str = RETRY
    warnings: tuple[str, ...] = ()
    split: Split | None = None
    loras: tuple[LoraUse, ...] = ()
    step_cache: str = NONE
    attention: str = AUTO
    compile: str = AUTO
    speed: Speed = EAGER
    shift: float | None = None
    shift_reason: str = ""
    expert_steps: Mapping[str, int] = field(default_factory=dict)
    vae_precision: str = AUTO

    @property
    def gpus(self) -> int:
        """How many GPUs, or a CPU, work on it."""
        return 1 if self.split is None else len(self.split.devices)

    @property
    def seconds_of_video(self) -> float:
        """Length of the clip in seconds."""
        return self.frames / self.fps

    @property
    def latent_size(self) -> LatentSize:
        """(latent frames, latent height, latent width)."""
        _, _, frames, height, width = self.latent_shape
        return frames, height, width

    def stays(self, component: str) -> bool:
        """Whether a component stays in memory after its stage."""
        return self.keep_loaded and component not in self.freed

    def title(self, component: str) -> str:
        """Return a component's name as people read it."""
        if component == "transformer" and "transformer_2" not in self.components:
            return "Transformer"
        return {
            "text_encoder": "Text encoder",
            "transformer": "High-noise transformer",
            "transformer_2": "Low-noise transformer",
            "vae": "VAE decoder",
        }[component]

    def with_component(self, name: str, part: ComponentPlan) -> "ExecutionPlan":
        """Return the plan with one component decided anew."""
        return replace(self, components={**self.components, name: part})

    def request_json(self) -> dict[str, Any]:
        """Return the request with every value as used; `GenerationRequest.from_mapping` reads it back."""
        used: dict[str, Any] = {
            "prompt": self.prompt,
            "negative_prompt": self.negative_prompt,
            "model": self.model,
            "width": self.width,
            "height": self.height,
            "frames": self.frames,
            "fps": self.fps,
            "steps": self.steps,
            "guidance_scale": self.guidance_scale,
            "seed": self.seed,
            "backends": dict(self.backends),
            "build": self.build,
            "offload": self.offload,
            "quantization": self.quantization,
            "on_out_of_memory": self.on_out_of_memory,
            "gpus": self.gpus,
            "loras": [vars(use.asked()) for use in self.loras],
            "step_cache": self.step_cache,
            "attention": self.attention,
            "compile": self.compile,
            "shift": self.shift,
            "vae_precision": self.vae_precision,
        }
        if self.guidance_scale_2 is not None:
            used["guidance_scale_2"] = self.guidance_scale_2
        return used

    def to_json(self) -> dict[str, Any]:
        """Return what was decided, as JSON types."""
        return {
            "components": {name: part.to_json() for name, part in self.components.items()},
            "latent_shape": list(self.latent_shape),
            "tokens": self.tokens,
            "decode_chunk": self.decode_chunk,
            "decode_tile": self.decode_tile,
            "keep_loaded": self.keep_loaded,
            "offload": self.offload,
            "step_flops": self.step_flops,
            "decode_flops": self.decode_flops,
            "memory_bytes": self.memory_bytes,
            "quantization": self.quantization,
            "memory": {
                "peak_bytes": self.memory_bytes,
                "free_bytes": self.free_bytes,
                "stages": [stage.to_json() for stage in self.memory],
            },
            "forecast": {name: seconds.to_json() for name, seconds in self.seconds.items()},
            "ladder": [strategy.to_json() for strategy in self.strategies],
            "split": None if self.split is None else {**vars(self.split), "devices": list(self.split.devices)},
            "loras": [use.told() for use in self.loras],
            "step_cache": self.step_cache,
            "speed": self.speed.to_json(),
            "shift": self.shift,
            "shift_reason": self.shift_reason,
            "expert_steps": dict(self.expert_steps),
        }
