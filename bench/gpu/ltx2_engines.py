"""Build and measure LTX-2's engines at true width: both streams' block engines, VAE decoder and decoders of sound.

    python bench/gpu/ltx2_engines.py [--model ltx-2|ltx-2.3] [--components transformer,vae,audio_vae,vocoder]
    python bench/gpu/ltx2_engines.py --tiny --device cpu --builders onnxruntime_blocks,onnxruntime        a rehearsal

Each engine is built through the library, and verified: block engines in four blocks with random weights, others on
random inputs of a clip's size. Then passes of these blocks run on the block engines and in PyTorch, in each kind of
pass. With TensorRT 8.6 files are rewritten to opset 17, see `tests/gpu/opset17.py`. Prints a JSON object per result and
appends it to $OUT/ltx2_engines.jsonl. Engines and the model stay in $TANDEM_CHECKS (/tmp/tandem-checks).
"""

import argparse
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from diffusers import AutoencoderKLLTX2Audio, AutoencoderKLLTX2Video, LTX2VideoTransformer3DModel

from bench.gpu import build_child_opset17, results
from bench.gpu.jobs import HOME
from bench.gpu.ltx2 import FPS, SOUND, TEXT_TOKENS, save, spread
from bench.gpu.speed import Bench, NoTimeError, random_module
from runtime.core.cancel import Cancel
from runtime.core.plan import ComponentPlan, EngineRef, Speed, is_block_program
from runtime.core.units import shape_text
from runtime.engines import service as engine_service
from runtime.engines.build import BuildRequest, build_engine
from runtime.engines.builders import BUILDERS
from runtime.engines.key_parts import runnable_programs
from runtime.engines.service import EngineService, OpenEngines
from runtime.engines.store import EngineStore
from runtime.execution.block_engines import BlockEngines
from runtime.execution.components import ISOLATED, PROMPTED, SKIPPING
from runtime.execution.streams import Streams
from runtime.families.ltx2.components import Vocoder
from runtime.families.ltx2.transformer import PyTorchStreamDenoiser
from runtime.machine.probe import probe
from runtime.models.registry import published_models, read_spec
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_module
from runtime.pipeline.pytorch_timer import PyTorchTimerFactory
from runtime.planner.choice.engine_index import EngineRecord, ShapeProfile
from tests import tiny_models
from tests.gpu.errors import relative_error

BLOCKS = 4
COMPONENTS = "transformer,vae,audio_vae,vocoder"
ANY = ShapeProfile.fixed((1, 1, 1))
# Latent frames, height and width: 768×512, 121 frames; and latents of the sound, see `bench/gpu/ltx2.py`.
CLIP, TINY_CLIP = (16, 16, 24), (2, 2, 3)


class Checks(Bench):
    """The model, the engine library and the report of a run."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments)
        self.builders: list[str] = arguments.builders.split(",")
        self.machine = probe()
        self.store = EngineStore(HOME / "engines", 10**11)
        self.service = EngineService(self.store, self.machine, HOME)
        self.clip = TINY_CLIP if arguments.tiny else CLIP
        self.spec = self._model()

    def say(self, **found: Any) -> None:
        """Print a result and append it to ltx2_engines.jsonl."""
        results.say("ltx2_engines.jsonl", **found)

    def _model(self) -> ModelSpec:
        """Return a model of true width with few blocks and random weights, made once; its text encoder is tiny."""
        name = self.arguments.model
        folder = HOME / f"{name}-{'tiny' if self.arguments.tiny else f'{BLOCKS}-blocks'}"
        complete = folder / "complete"
        if complete.exists():
            return read_spec(folder, folder.name)
        tiny_models.build(name, folder)
        (configs,) = (model.configs for model in published_models("ltx2") if model.name == name)
        parts = {
            "transformer": partial(LTX2VideoTransformer3DModel, **{**configs["transformer"], "num_layers": BLOCKS}),
            "vae": partial(AutoencoderKLLTX2Video, **configs["vae"]),
            "audio_vae": partial(AutoencoderKLLTX2Audio, **configs["audio_vae"]),
            "vocoder": partial(Vocoder.from_config, configs["vocoder"]),
        }
        for part, make in {} if self.arguments.tiny else parts.items():
            module = random_module(self.device, make, self.dtype, spread)
            for key, buffer in module.named_buffers():
                # Means are 0, deviations and scales 1.
                if buffer.is_floating_point():
                    torch.nn.init.constant_(buffer, float("mean" not in key))
            save(module, folder / part)
            del module
        if not self.arguments.tiny:
            # The connectors are not run: they only have to fit the tiny text encoder and this transformer.
            path = folder / "connectors" / "config.json"
            own = json.loads(path.read_text(encoding="utf-8"))
            kept = {name: own[name] for name in ("caption_channels", "text_proj_in_factor")}
            path.write_text(json.dumps({**own, **configs["connectors"], **kept}), encoding="utf-8")
        complete.touch()
        return read_spec(folder, folder.name)

    def engine(self, component: str, program: str) -> EngineRecord:
        """Return an engine of a program; it is built if it is missing."""
        blocks = is_block_program(program)
        builder = BUILDERS[next(name for name in self.builders if (BUILDERS[name].kind == "blocks") == blocks)]
        sound = component in {"audio_vae", "vocoder"}
        size = ANY if blocks else ShapeProfile.fixed((self.sound_latents, 1, 1) if sound else self.clip)
        key = builder.key(
            self.spec,
            component,
            program,
            (size,),
            precision=builder.default_precision(self.spec, program, self.machine, self.device),
            machine=self.machine,
            device=self.device,
            cache_dir=HOME,
        )
        timer = PyTorchTimerFactory(self.service)(self.spec, component, key, self.device)
        request = BuildRequest(spec=self.spec, component=component, key=key, device=self.device, timer=timer)
        started = time.perf_counter()
        record = self.store.get(key) or build_engine(
            request, self.store, lambda *_: None, Cancel(), build_child_opset17.run_job
        )
        self.say(
            part="engine",
            program=program,
            size=shape_text(key.profiles[0].opt),
            precision=key.precision,
            file_bytes=record.file_bytes,
            build_seconds=round(record.build_seconds, 1),
            with_verification=round(time.perf_counter() - started, 1),
            error=record.error,
            largest_error=record.largest_error,
            verified=record.verified,
            detail=str(record.detail),
            ms=1000 * record.seconds_per_call,
            pytorch_ms=1000 * record.pytorch_seconds_per_call,
            baselines_ms={name: 1000 * seconds for name, seconds in record.baselines.items()},
            context_mib=record.context_bytes >> 20,
        )
        return record

    @property
    def sound_latents(self) -> int:
        """Latents of the sound of the clip."""
        return TINY_CLIP[0] if self.arguments.tiny else SOUND[2]

    def passes(self, records: list[EngineRecord]) -> None:
        """Report the error and the duration of passes of the blocks on engines, and in PyTorch."""
        spec, latents = self.spec, self.spec.sound_latents
        assert latents is not None
        precision = records[0].key.precision
        uses = [
            EngineRef(
                id=record.id,
                program=record.key.program,
                builder=record.key.builder,
                precision=precision,
                profile=(ANY.min, ANY.opt, ANY.max),
            )
            for record in records
        ]
        streams = Streams(
            (1, spec.transformer.in_channels, *self.clip), (1, latents.channels, self.sound_latents, latents.bins), FPS
        )
        generator = torch.Generator().manual_seed(1)
        video, sound, text = (
            torch.randn(shape, generator=generator).to(self.device)
            for shape in (streams.video, streams.sound, (1, TEXT_TOKENS, spec.transformer.text_dim + latents.text_dim))
        )
        given = streams.join(video, sound), torch.tensor(500.0, device=self.device), text
        wanted = self._denoise("float32", None, uses, streams, given)
        with engine_service.open_engines(self.store, spec, "transformer", uses, self.device) as opened:
            for variant, engines in (("PyTorch", None), ("block engines", opened)):
                found = self._denoise(precision, engines, uses, streams, given, variant)
                for which, output in found.items():
                    error = relative_error(output, wanted[which])
                    self.say(part="error", variant=variant, which=which, error=error)

    def _denoise(
        self,
        dtype: str,
        engines: OpenEngines | None,
        uses: list[EngineRef],
        streams: Streams,
        given: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        variant: str = "",
    ) -> dict[str, torch.Tensor]:
        """Return the predictions of each kind of pass, and report their duration."""
        part = ComponentPlan(backend="pytorch", device=self.device, dtype=dtype, weights_bytes=0, reasons=())
        denoiser = PyTorchStreamDenoiser(load_module(self.spec, "transformer", part).to(self.device))
        # What fails raises, where a job would report it and go on.
        blocks = None if engines is None else BlockEngines(engines, self.spec, "transformer", uses, fail, fail)
        denoiser.compute(Speed(text_kept=engines is not None), fail, blocks)
        denoiser.see(streams, (1,))
        found = {}
        for which in (PROMPTED, SKIPPING, ISOLATED):
            run = partial(denoiser, *given, which=which)
            found[which] = run().float().clone()
            if variant:
                self.say(part="pass", variant=variant, which=which, **self.seconds(run))
        denoiser.forget()
        return found


def fail(*facts: object) -> None:
    """Raise an error of what was reported."""
    raise RuntimeError(" ".join(map(str, facts)))


def main() -> None:
    """Build and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="ltx-2.3", choices=tiny_models.LTX2_ARCHITECTURES)
    parser.add_argument("--components", default=COMPONENTS)
    parser.add_argument("--builders", default="tensorrt_blocks,onnx_tensorrt", help="of block engines, and of others")
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    arguments.size = "480p"  # of `Bench`; the clip has its own
    Path(os.environ.get("OUT", ".")).mkdir(parents=True, exist_ok=True)
    HOME.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        checks = Checks(arguments)
        try:
            for component in arguments.components.split(","):
                records = []
                for program in runnable_programs(checks.spec, component):
                    with checks.trying(part="engine", program=program):
                        records.append(checks.engine(component, program))
                if component == "transformer" and len(records) == len(checks.spec.block_programs):
                    with checks.trying(part="passes"):
                        checks.passes(records)
        except NoTimeError as error:
            checks.say(left_out=f"{error} and what follows")


if __name__ == "__main__":
    main()
