"""Common parts of the GPU checks: engines by key, sessions, timing, memory, similarity of frames."""

import argparse
import json
import os
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from bench.gpu import build_child_opset17
from bench.gpu.timing import call_seconds
from runtime.core.cancel import Cancel
from runtime.core.errors import EngineError
from runtime.core.facts import Fact
from runtime.core.plan import LatentSize
from runtime.engines.build import BuildRequest, build_engine
from runtime.engines.builders import BUILDERS
from runtime.engines.programs import load_program
from runtime.engines.sessions import Session, open_session
from runtime.engines.store import EngineStore
from runtime.machine.probe import Machine
from runtime.models.catalogue import find
from runtime.models.spec import ModelSpec
from runtime.models.vae_groups import GROUP_PROGRAMS, IMAGE_PROGRAM
from runtime.planner.choice.engine_index import EngineKey, EngineRecord, ShapeProfile
from tests.gpu import wide_models

HOME = Path(os.environ.get("TANDEM_CHECKS", "/tmp/tandem-checks"))
COMPONENTS = (
    ("text_encoder", "text_encoder"),
    ("transformer", "transformer"),
    ("transformer_2", "transformer"),
    ("vae", "vae_first"),
    ("vae", "vae_next"),
    ("image_encoder", "image_encoder"),
    ("vae_encoder", "vae_encoder_first"),
    ("vae_encoder", "vae_encoder_next"),
    ("vae_encoder", IMAGE_PROGRAM),
    ("text_encoder_2", "text_encoder_2"),
    # Of a clip of 129 frames: all groups but the last, and the last.
    ("vae", "vae_group_5"),
    ("vae", "vae_group_3"),
    # FramePack's sections also end with one of four.
    ("vae", "vae_group_4"),
)
CLIP: LatentSize = (9, 14, 24)
CHUNK = 4
# 480p: 5 latent frames of 60×104, 7,800 tokens; TensorRT 8.6 stores the full attention matrix.
LARGE: LatentSize = (5, 60, 104)


@dataclass(frozen=True)
class Checks:
    """Model, engine store and report of a run of checks."""

    arguments: argparse.Namespace
    machine: Machine
    store: EngineStore

    @property
    def device(self) -> str:
        """The device of all checks."""
        return str(self.arguments.device)

    def model(self) -> ModelSpec:
        """Return the requested model; models with random weights are created first."""
        name = self.arguments.model
        if name in wide_models.NAMES:
            wide_models.build(name, HOME / name, self.arguments.blocks)
            return find(str(HOME / name), Path("none"))
        return find(name, Path("none"))

    def say(self, what: str, **found: Any) -> None:
        """Print a result and append it to checks.jsonl."""
        line = json.dumps({"part": self.arguments.part, "what": what, **found}, default=str, ensure_ascii=False)
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
        out = Path(os.environ.get("OUT", HOME))
        out.mkdir(parents=True, exist_ok=True)
        with (out / "checks.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    @contextmanager
    def going_on(self, what: str) -> Iterator[None]:
        """Report a failure and continue with the next part."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.say(what, failed=f"{type(error).__name__}: {error}", log=getattr(error, "log", None))

    def key(
        self, spec: ModelSpec, component: str, program: str, profiles: tuple[ShapeProfile, ...], precision: str
    ) -> EngineKey:
        """Return the key of an engine in the requested precision and optimization level."""
        builder = BUILDERS[self.arguments.builder]
        if precision == "default":
            precision = builder.default_precision(spec, program, self.machine, self.device)
        key = builder.key(
            spec, component, program, profiles, precision=precision, machine=self.machine, device=self.device
        )
        options = dict(key.options)
        if "optimization_level" in options:
            options["optimization_level"] = str(self.arguments.level)
        return replace(key, options=tuple(options.items()))

    def engine(self, spec: ModelSpec, component: str, key: EngineKey, cancel: Cancel | None = None) -> EngineRecord:
        """Build an engine if the store lacks it, and return its record, verified or not."""
        request = BuildRequest(spec=spec, component=component, key=key, device=self.device)
        log = Path(os.environ.get("OUT", HOME)) / f"build-{component}-{key.program}-{key.precision}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as file:

            def progress(fact: Fact, share: float | None) -> None:
                file.write(f"{'' if share is None else f'{share:.0%} '}{fact}\n")
                file.flush()

            try:
                return build_engine(request, self.store, progress, cancel or Cancel(), build_child_opset17.run_job)
            except EngineError:
                record = self.store.get(key)
                if record is None:
                    raise
                return record

    def open(self, record: EngineRecord, **options: str) -> Session:
        """Open a session; `options` replace those of the key, without a rebuild."""
        key = replace(record.key, options=tuple((dict(record.key.options) | options).items()))
        folder = self.store.path(record.id)

        def weights() -> Mapping[str, torch.Tensor]:
            program = load_program(self.model(), record.component, key.program, device=self.device, dtype=key.precision)
            return program.module.state_dict()

        return open_session(folder, replace(record, key=key), device=self.device, weights=weights)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()

    def milliseconds(self, call: Callable[[], object], repeats: int = 30) -> float:
        """Return the median time of a call, by CUDA events if available."""
        for _ in range(5):
            call()
        times = [1000 * call_seconds(call, cuda=self.device.startswith("cuda")) for _ in range(repeats)]
        return round(statistics.median(times), 4)

    def used_bytes(self) -> tuple[int, int]:
        """Return the GPU memory in use by all processes, and this process's resident memory."""
        gpu = 0
        if self.device.startswith("cuda"):
            free, total = torch.cuda.mem_get_info(self.device)
            gpu = total - free
        return gpu, psutil.Process().memory_info().rss


def psnr(frames: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the peak signal-to-noise ratio of 8-bit frames, in dB."""
    error = (frames.double() - reference.double()).square().mean()
    return float(10 * torch.log10(255**2 / error)) if error else float("inf")


def ssim(frames: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the mean structural similarity of 8-bit frames (n, height, width, 3), in windows of 7×7."""
    x, y = (part.permute(0, 3, 1, 2).double() for part in (frames, reference))

    def mean(part: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.avg_pool2d(part, 7, stride=1)

    mx, my = mean(x), mean(y)
    vx, vy, vxy = mean(x * x) - mx * mx, mean(y * y) - my * my, mean(x * y) - mx * my
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    return float((((2 * mx * my + c1) * (2 * vxy + c2)) / ((mx * mx + my * my + c1) * (vx + vy + c2))).mean())


def programs_of(spec: ModelSpec) -> list[tuple[str, str]]:
    """Return those of `COMPONENTS` that a model has."""
    return [(component, program) for component, program in COMPONENTS if program in spec.programs.get(component, ())]


def profile_of(program: str, latent: LatentSize, chunk: int = CHUNK) -> ShapeProfile:
    """Return the profile of one size; the VAE takes `chunk` latent frames a call."""
    frames, height, width = latent
    one = (1, height, width)
    sizes = {"text_encoder": (1, 1, 1), "text_encoder_2": (1, 1, 1), "image_encoder": (1, 1, 1)}
    sizes |= {"transformer": latent, "vae_first": one}
    sizes |= {"vae_encoder_first": one, "vae_encoder_next": one, IMAGE_PROGRAM: one}
    sizes |= {name: (count, height, width) for name, count in GROUP_PROGRAMS.items()}
    return ShapeProfile.fixed(sizes.get(program, (min(chunk, frames), height, width)))
