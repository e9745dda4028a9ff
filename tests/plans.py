"""Machines, plans and an execution context for tests with tiny models."""

from pathlib import Path

from runtime.core.cancel import Cancel
from runtime.core.facts import Fact
from runtime.core.plan import ComponentPlan, ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.machine.probe import Gpu, Machine
from runtime.models.spec import ModelSpec
from runtime.planner.resolve import PlanningContext, resolve

GIB = 1 << 30


# What requirements.txt installs, and what requirements-gpu.txt adds.
PACKAGES = (("onnx", "1.23.2"), ("onnxscript", "0.7.2"), ("onnxruntime", "1.24.1"))
GPU_PACKAGES = (*PACKAGES, ("tensorrt", "11.0.0.114"), ("torch-tensorrt", "2.13.0"), ("tensorrt-rtx", "1.7.1.116"))


def machine(
    *,
    ram_free_gib: float = 20,
    gpu: Gpu | None = None,
    torch_cuda: str | None = None,
    packages: tuple[tuple[str, str], ...] = PACKAGES,
) -> Machine:
    """Return a machine with two cores, 24 GiB of memory and 32 of swap, by default without a GPU."""
    return Machine(
        system="Linux x86_64",
        cpu="Test CPU",
        cores=2,
        ram_bytes=24 * GIB,
        ram_free_bytes=int(ram_free_gib * GIB),
        gpus=(gpu,) if gpu else (),
        gpu_problem=None,
        torch_version="2.13.0",
        torch_cuda=torch_cuda,
        packages=packages,
        swap_bytes=32 * GIB,
        swap_free_bytes=32 * GIB,
        compiler="g++",
    )


def gpu(*, capability: tuple[int, int] = (9, 0), free_gib: float = 80) -> Gpu:
    """Return a GPU."""
    return Gpu("Test GPU", capability, int(free_gib * GIB), int(free_gib * GIB), "580.0")


def tiny_plan(spec: ModelSpec, output: Path, **values: object) -> ExecutionPlan:
    """Plan a tiny clip on the CPU."""
    fields: dict[str, object] = {"prompt": "a red boat", "width": 64, "height": 32, "frames": 9, "steps": 4}
    fields |= {"seed": 3, "fps": 8} | values
    return resolve(GenerationRequest.from_mapping(fields), spec, PlanningContext(machine(), output))


def with_strategy(plan: ExecutionPlan, **changes: object) -> ExecutionPlan:
    """Return the plan with another memory strategy."""
    return plan.replace(strategy=plan.strategy.replace(**changes))


def why(part: ComponentPlan) -> str:
    """Return the reasons for a component's backend, as the command line renders them."""
    return " ".join(map(str, part.reasons))


def no_engines(folder: Path) -> EngineService:
    """Return an engine service with an empty store."""
    return EngineService(EngineStore(folder / "engines", 10**9), machine(), folder)


class Alone:
    """A job's context for components that run without a job (`residency.JobHooks`); records fallbacks."""

    def __init__(self, plan: ExecutionPlan) -> None:
        self.plan = plan
        self.cancel = Cancel()
        self.fallen: list[tuple[str, Fact]] = []
        self.warnings: list[Fact] = []

    def loading(self, name: str) -> None:
        """Show nothing."""

    def warn(self, fact: Fact) -> None:
        """Record the fact."""
        self.warnings.append(fact)

    def on_degraded(self, name: str, field: str, reason: Fact) -> None:
        """Record the reason."""
        self.fallen.append((f"{name}.{field}", reason))

    def fell_back(self, name: str, reason: Fact) -> None:
        """Record the reason, and plan the component in PyTorch."""
        self.plan = self.plan.with_component(name, self.plan.components[name].in_pytorch(reason))
        self.fallen.append((name, reason))
