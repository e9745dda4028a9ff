"""Every name of TensorRT that we use exists: in the release that is pinned, in today's lean runtime, in 8.6.

The names are read off our source: `trt.NAME…`, and attributes of variables that hold TensorRT's objects.
"""

import ast
import re
from pathlib import Path

import pytest

from tests.engines.contract import wheels

ENGINES = wheels.ROOT / "runtime" / "engines"
SESSION = (ENGINES / "sessions" / "tensorrt.py",)
COMMON = (ENGINES / "tensorrt_library.py",)
BUILDER = (ENGINES / "builders" / "onnx_tensorrt.py", ENGINES / "tensorrt_progress.py")
# What our variables hold; each function that handles one names it so.
VARIABLES = {
    "_context": "IExecutionContext",
    "_engine": "ICudaEngine",
    "builder": "Builder",
    "cache": "ITimingCache",
    "config": "IBuilderConfig",
    "context": "IExecutionContext",
    "engine": "ICudaEngine",
    "layer": "ILayer",
    "network": "INetworkDefinition",
    "parser": "OnnxParser",
    "runtime": "Runtime",
}
PINNED = re.search(
    r"^tensorrt==([\d.]+)", (wheels.ROOT / "requirements-gpu.txt").read_text(encoding="utf-8"), re.MULTILINE
)
assert PINNED is not None

# What one version has and another has not: each is behind a test for it, in `tensorrt_library`.
SINCE_10 = {
    "ExecutionContextAllocationStrategy.USER_MANAGED",
    "ICudaEngine.device_memory_size_v2",
    "IExecutionContext.set_device_memory",
    "IBuilderConfig.progress_monitor",
    "IProgressMonitor",
    "NetworkDefinitionCreationFlag.STRONGLY_TYPED",
}
UNTIL_10 = {
    "BuilderFlag.FP16",
    "BuilderFlag.PREFER_PRECISION_CONSTRAINTS",
    "ICudaEngine.create_execution_context_without_device_memory",
    "ICudaEngine.device_memory_size",
    "ILayer.precision",
    "ILayer.set_output_type",
    "NetworkDefinitionCreationFlag.EXPLICIT_BATCH",
}


def used(paths: tuple[Path, ...]) -> set[str]:
    """Return the names that files use, as "Class.member", or "Class" for `trt.Class` alone."""
    found = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Attribute):
                continue
            holder = node.value
            if isinstance(holder, ast.Attribute) and isinstance(holder.value, ast.Name):
                if holder.value.id == "trt":
                    found.add(f"{holder.attr}.{node.attr}")
                elif holder.value.id == "self" and holder.attr in VARIABLES:
                    found.add(f"{VARIABLES[holder.attr]}.{node.attr}")
            elif isinstance(holder, ast.Name):
                if holder.id == "trt":
                    found.add(node.attr)
                elif holder.id in VARIABLES:
                    found.add(f"{VARIABLES[holder.id]}.{node.attr}")
    return found


def missing(names: set[str], there: wheels.Names) -> set[str]:
    """Return those of `names` that a version has not."""
    functions = {"__version__", "float32"}
    return {
        name
        for name in names - functions
        for kind, _, member in [name.partition(".")]
        if kind not in there or (member and member not in there[kind])
    }
