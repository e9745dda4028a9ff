"""Plans what PyTorch would run instead of an engine, for measuring both."""

from dataclasses import dataclass, replace
from pathlib import Path

from runtime.core.errors import InvalidRequestError, MachineError
from runtime.core.plan import PYTORCH
from runtime.core.request import ALL, GenerationRequest
from runtime.engines.key_parts import tokens_of
from runtime.engines.service import EngineService
from runtime.execution.pytorch_baseline import PyTorchBaseline
from runtime.machine.probe import gpu_index
from runtime.models.quantization import FP8
from runtime.models.spec import ModelSpec
from runtime.models.vae_groups import GROUP_PROGRAMS
from runtime.pipeline.history_file import HistoryFile
from runtime.planner import constraints
from runtime.planner.engine_index import STEPS, EngineKey, serves_any_clip
from runtime.planner.resolve import PlanningContext, resolve


@dataclass(frozen=True)
class Baselines:
    """Plans PyTorch for engines of a library; see `engines.build.Baselines`."""

    engines: EngineService

    def __call__(self, spec: ModelSpec, component: str, key: EngineKey, device: str) -> PyTorchBaseline | None:
        """Return what measures PyTorch at an engine's size; `None` if PyTorch cannot make such a clip here.

        A frame decoder runs in PyTorch as its program does, which is measured anyway.
        """
        if spec.only_decodes:
            return None
        spec, machine = replace(spec, loras=(), image=None, last_image=None).for_images(), self.engines.machine
        values = {"prompt": "none", "model": spec.name, "backends": {ALL: PYTORCH}, "gpus": 1, "seed": 0}
        if key.precision == FP8:
            # These engines replace weights that PyTorch would have in FP8.
            values["quantization"] = FP8
        cache = self.engines.cache_dir
        history = () if cache is None else HistoryFile(cache, machine).read()
        index = 0 if device == "cpu" else gpu_index(device)
        try:
            request = GenerationRequest.from_mapping(values | _size(spec, key))
            plan = resolve(request, spec, PlanningContext(machine, Path("none.mp4"), history=history, gpu=index))
        except (InvalidRequestError, MachineError):
            return None
        on_cpu = plan.components[component].device == "cpu"
        settings = constraints.ComponentSettings(
            component="transformer",
            backend=PYTORCH,
            offload=plan.strategy.offload,
            quantization=plan.strategy.quantization,
        )
        able = constraints.compile_conflict(settings, machine) is None
        # On a CPU blocks are compiled only on request, which takes as long as a build.
        compiles = able and not on_cpu
        return PyTorchBaseline(spec=spec, component=component, plan=plan, compiles=compiles, tokens=tokens_of(key))


def _size(spec: ModelSpec, key: EngineKey) -> dict[str, int]:
    """Return the request's size for an engine; the model's own where the engine serves any."""
    if serves_any_clip(key.program):
        return {}
    frames, height, width = key.profiles[0].opt
    size = {"width": width * spec.vae.scale_factor_spatial, "height": height * spec.vae.scale_factor_spatial}
    if key.program in {*STEPS, *GROUP_PROGRAMS}:
        return size
    return size | {"frames": (frames - 1) * spec.vae.scale_factor_temporal + 1}
