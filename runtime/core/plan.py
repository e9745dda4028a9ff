"""What will run: the request with nothing left open, and every choice with its reason.

Made by `manager.planner.resolve`, carried out by `jobs.flow.run_job`, written into the MP4. Knows nothing about how it
came to be.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ComponentPlan:
    """Where one part of the model runs, and why.

    Attributes:
        backend: "pytorch".
        device: a torch device, such as "cpu" or "cuda:0".
        dtype: a torch dtype's name, such as "float32".
        weights_bytes: size of its weights in that dtype.
        reason: one sentence.
        engine: id of the engine it runs on, where the backend has engines.
    """

    backend: str
    device: str
    dtype: str
    weights_bytes: int
    reason: str
    engine: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return {
            "backend": self.backend,
            "device": self.device,
            "dtype": self.dtype,
            "weights_bytes": self.weights_bytes,
            "reason": self.reason,
            "engine": self.engine,
        }


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
        keep_loaded: whether parts stay in memory between stages and jobs.
        components: by name, in the order they run.
        step_flops, decode_flops: arithmetic of one denoising step (guidance included) and of the whole decode.
        memory_bytes: estimated peak of weights and activations.
        output: the MP4 to write.
        warnings: sentences to show beside the result.
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
    warnings: tuple[str, ...] = ()

    @property
    def seconds_of_video(self) -> float:
        """Length of the clip in seconds."""
        return self.frames / self.fps

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
            "keep_loaded": self.keep_loaded,
            "step_flops": self.step_flops,
            "decode_flops": self.decode_flops,
            "memory_bytes": self.memory_bytes,
        }
