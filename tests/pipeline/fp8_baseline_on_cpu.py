"""Measures what PyTorch would run instead of an FP8 engine, on the CPU, where torchao can but refuses.

Prints, for each part of a block, the operations that multiply matrices, and the seconds of a call, as JSON.

    python -m tests.pipeline.fp8_baseline_on_cpu FOLDER
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.models.catalogue import find
from runtime.pipeline.pytorch_timer import PyTorchTimerFactory
from tests.models.quantize_on_cpu import allow_cpu
from tests.pipeline.test_baselines import ADA, fp8_key


class Products(TorchDispatchMode):
    """Collects the operations that multiply matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.endswith("mm"):
            self.names.add(name)
        return func(*args, **(kwargs or {}))


def main(folder: Path) -> None:
    """Plan for a GPU with FP8, and measure the plan on the CPU."""
    allow_cpu("fp8")
    spec = find("diorama", folder)
    service = EngineService(EngineStore(folder / "engines", 1 << 40), ADA, folder)
    for program in spec.block_programs:
        baseline = PyTorchTimerFactory(service)(spec, "transformer", fp8_key(spec, program, service), "cuda:0")
        assert baseline is not None
        parts = baseline.plan.components
        moved = {**parts, "transformer": parts["transformer"].replace(device="cpu")}
        baseline = replace(baseline, plan=baseline.plan.replace(components=moved), compiles=False, tokens=64)
        with Products() as products:
            seconds = baseline(program, (1, 1, 1))
        sys.stdout.write(json.dumps({"products": sorted(products.names), "seconds": seconds}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
