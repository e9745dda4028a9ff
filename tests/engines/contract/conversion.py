"""Lowers every program as torch-tensorrt does, and looks up each operation's converter. Needs no GPU.

    python -m tests.engines.contract.conversion MODEL_FOLDER      run by the test, with the wheels on PYTHONPATH

Prints a JSON object: for each program the plan's input names and the operations without a converter.
"""

import importlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from runtime.engines.programs import load_program
from runtime.models.registry import read_spec
from runtime.planner.choice.engine_index import ShapeProfile

# One size of each is dynamic, which gives the same operations as three in half the time.
PROFILES = {
    "text_encoder": ShapeProfile.fixed((1, 1, 1)),
    "image_encoder": ShapeProfile.fixed((1, 1, 1)),
    "vae_encoder_first": ShapeProfile((1, 4, 4), (1, 4, 6), (1, 4, 8)),
    "vae_encoder_next": ShapeProfile((1, 4, 4), (1, 4, 6), (1, 4, 8)),
    "transformer": ShapeProfile((3, 4, 4), (3, 4, 6), (3, 4, 8)),
    "vae_first": ShapeProfile((1, 4, 4), (1, 4, 6), (1, 4, 8)),
    "vae_next": ShapeProfile((2, 4, 4), (2, 4, 6), (2, 4, 8)),
}


def import_torch_tensorrt() -> None:
    """Import it on a machine without a GPU: what it asks CUDA as it is imported gets an answer."""
    sys.setdlopenflags(os.RTLD_LAZY | os.RTLD_GLOBAL)
    sys.modules["tensorrt"] = importlib.import_module("tensorrt_bindings")
    cuda: Any = torch.cuda
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.current_device = lambda: 0
    if not hasattr(torch._C, "_CudaDeviceProperties"):
        setattr(torch._C, "_CudaDeviceProperties", SimpleNamespace)  # noqa: B010 - torch's stubs do not have it
    importlib.import_module("torch_tensorrt")


def lowered(exported: torch.export.ExportedProgram) -> torch.fx.GraphModule:
    """Return a program's graph as `convert_exported_program_to_serialized_trt_engine` hands it to its converters."""
    from torch_tensorrt.dynamo._settings import CompilationSettings
    from torch_tensorrt.dynamo.conversion._ConverterRegistry import DYNAMO_CONVERTERS
    from torch_tensorrt.dynamo.lowering import get_decompositions, post_lowering, pre_export_lowering

    settings = CompilationSettings(assume_dynamic_shape_support=True, attn_bias_is_causal=False)
    DYNAMO_CONVERTERS.set_compilation_settings(settings)
    exported = pre_export_lowering(exported, settings).run_decompositions(get_decompositions(False, False, False))
    module: torch.fx.GraphModule = post_lowering(exported.module(), settings)
    return module


def unconvertible(module: torch.fx.GraphModule) -> list[str]:
    """Return the operations of a graph that have no converter."""
    from torch_tensorrt.dynamo.conversion._ConverterRegistry import DYNAMO_CONVERTERS

    calls = [node for node in module.graph.nodes if node.op.startswith("call_")]
    assert len(calls) > 10
    return sorted({str(node.target) for node in calls if DYNAMO_CONVERTERS.get(node) is None})


def main(directory: Path) -> None:
    """Print what `unconvertible` finds in each program."""
    import_torch_tensorrt()
    spec = read_spec(directory, directory.name)
    found = {}
    for component, names in spec.programs.items():
        for name in names if component != "transformer_2" else ():
            program = load_program(spec, component, name, device="cpu", dtype="float16")
            exported = program.export(PROFILES[name])
            user_inputs = list(exported.graph_signature.user_inputs)
            module = lowered(exported)
            inputs = [node.target for node in module.graph.nodes if node.op == "placeholder"]
            assert len(inputs) == len(program.input_names)
            found[name] = {"inputs": inputs, "user_inputs": user_inputs, "unconvertible": unconvertible(module)}
    sys.stdout.write(f"\n{json.dumps(found)}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
