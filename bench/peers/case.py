"""What is measured, how, and how it is reported: the part of the processes of all peers that imports none of them."""

import dataclasses
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# Arguments of diffusers' `WanTransformer3DModel`.
A14B: dict[str, Any] = {
    "num_attention_heads": 40,
    "attention_head_dim": 128,
    "ffn_dim": 13824,
    "num_layers": 40,
    "text_dim": 4096,
    "freq_dim": 256,
}
TINY: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 128,
    "ffn_dim": 512,
    "num_layers": 2,
    "text_dim": 4096,
    "freq_dim": 256,
}
TEXT_TOKENS = 512
# One measurement takes so many calls, and begins none after so many seconds if it has two.
CALLS, CALL_SECONDS = 5, 8.0


@dataclass(frozen=True)
class Case:
    """What one process measures.

    Attributes:
        sizes: width and height of each.
        steps: of loops.
        ends: time at which no measurement begins any more, as `time.time` returns it.
        checkout: folder of LightX2V.
    """

    sizes: list[tuple[int, int]]
    frames: int
    steps: int
    tiny: bool
    device: str
    ends: float
    checkout: str

    @classmethod
    def given(cls) -> "Case":
        """Return the case that the command line of a peer states."""
        return cls(**json.loads(sys.argv[1]))

    def to_json(self) -> str:
        """Return the text that `given` reads."""
        return json.dumps(dataclasses.asdict(self))

    @property
    def config(self) -> dict[str, Any]:
        """Arguments of diffusers' `WanTransformer3DModel`."""
        return TINY if self.tiny else A14B

    def latents(self, size: tuple[int, int]) -> tuple[int, int, int, int]:
        """Return the shape of a clip's latents: (channels, frames, height, width)."""
        return 16, (self.frames - 1) // 4 + 1, size[1] // 8, size[0] // 8

    def inputs(self, size: tuple[int, int]) -> tuple[Any, Any, Any]:
        """Return latents, (1, channels, frames, height, width), a timestep, (1), and text, (1, tokens, channels)."""
        import torch

        generator = torch.Generator(self.device).manual_seed(1)
        text = (1, TEXT_TOKENS, self.config["text_dim"])
        latents, text_values = (
            torch.randn(shape, generator=generator, device=self.device, dtype=torch.bfloat16)
            for shape in ((1, *self.latents(size)), text)
        )
        return latents, torch.tensor([500.0], device=self.device), text_values

    @contextmanager
    def trying(self, variant: str, **what: Any) -> Iterator[None]:
        """Report an error, or that no time is left, and continue after it."""
        try:
            if time.time() > self.ends:
                say(variant=variant, **what, error="not measured: no time was left")
            else:
                yield
        except Exception as error:
            traceback.print_exc()
            first = str(error).strip().partition("\n")[0]
            say(variant=variant, **what, error=f"{type(error).__name__}: {first[:200]}")
        finally:
            gc.collect()


def say(**found: Any) -> None:
    """Print a measurement as one line of JSON."""
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def name_of(size: tuple[int, int]) -> str:
    """Return the name of a size."""
    return f"{size[0]}x{size[1]}"


def timed(run: Callable[[], object], device: str) -> dict[str, Any]:
    """Return the median seconds of a call on a device, their spread, and how many calls were measured."""
    begun, times = time.perf_counter(), list[float]()
    while len(times) < 2 or (len(times) < CALLS and time.perf_counter() - begun < CALL_SECONDS):
        times.append(_once(run, device))
    spread = [round(min(times), 4), round(max(times), 4)]
    return {"seconds": round(statistics.median(times), 4), "spread": spread, "calls": len(times)}


def loop_seconds(
    step: Callable[[Any, int], Any], latents: Any, case: Case, restart: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Return the mean seconds of a step in a loop of all steps, after another one of two steps.

    Args:
        step: predicts a velocity of latents and a step's number.
        restart: called before each loop.
    """

    def loop(count: int) -> None:
        restart()
        moved = latents
        for number in range(count):
            moved = moved - step(moved, number).to(moved.dtype) / case.steps

    loop(2)
    return {"seconds": round(_once(lambda: loop(case.steps), case.device) / case.steps, 4), "calls": case.steps}


def _once(run: Callable[[], object], device: str) -> float:
    import torch

    if device == "cpu":
        begun = time.perf_counter()
        run()
        return time.perf_counter() - begun
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    first.record()
    run()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) / 1000


def random_transformer(case: Case) -> Any:
    """Return diffusers' transformer with random weights on the device, in the dtypes of `from_pretrained` in bfloat16.

    Norms are near one, so that attention is neither flat nor sharp.
    """
    import torch
    from diffusers import WanTransformer3DModel

    with torch.device("meta"):
        module: Any = WanTransformer3DModel(**case.config)
    module = module.to(torch.bfloat16).to_empty(device=case.device).eval().requires_grad_(False)
    precise = set(module._keep_in_fp32_modules)
    generator = torch.Generator(case.device).manual_seed(0)
    for name, parameter in module.named_parameters():
        parts = name.split(".")
        dtype = torch.float32 if precise & set(parts) else torch.bfloat16
        values = torch.empty_like(parameter, dtype=dtype).normal_(0, 0.02, generator=generator)
        parameter.data = values.add_(1.0) if parts[-1] == "weight" and "norm" in parts[-2] else values
    # Buffers have no values yet.
    module.rope = type(module.rope)(case.config["attention_head_dim"], (1, 2, 2), 1024).to(case.device)
    return module


@contextmanager
def few_blocks(module: Any, count: int = 2) -> Iterator[None]:
    """Leave a transformer its first blocks while entered, to compile and to load kernels: all have the same code."""
    blocks = module.blocks
    module.blocks = blocks[:count]
    try:
        yield
    finally:
        module.blocks = blocks
