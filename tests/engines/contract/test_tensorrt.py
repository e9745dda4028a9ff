"""Every used name of TensorRT exists in the pinned release, in the lean runtime, and in 8.6.

The names are read off our source: `trt.NAME…`, and attributes of variables that hold TensorRT's objects.
"""

import ast
import importlib.util
from importlib import metadata
from pathlib import Path

import pytest

from tests.engines.contract import wheels

ENGINES = wheels.ROOT / "runtime" / "engines"
SESSION = (
    ENGINES / "sessions" / "tensorrt.py",
    ENGINES / "tensorrt_library.py",
    ENGINES / "imported" / "contract.py",
)
BUILDER = (ENGINES / "builders" / "tensorrt.py",)
# What our variables hold; each function that handles one names it so.
VARIABLES = {
    "_context": "IExecutionContext",
    "_engine": "ICudaEngine",
    "builder": "Builder",
    "cache": "ITimingCache",
    "config": "IBuilderConfig",
    "context": "IExecutionContext",
    "engine": "ICudaEngine",
    "inspector": "EngineInspector",
    "network": "INetworkDefinition",
    "parser": "OnnxParser",
    "runtime": "Runtime",
}
LEAN = ("10.16.1.11", "11.4.0.106")

# What one version has and another has not: each is used behind a test for it.
SINCE_10 = {
    "Builder.build_serialized_network_to_stream",
    "ExecutionContextAllocationStrategy",
    "ExecutionContextAllocationStrategy.USER_MANAGED",
    "IBuilderConfig.progress_monitor",
    "ICudaEngine.device_memory_size_v2",
    "IExecutionContext.set_device_memory",
    "IProgressMonitor",
    "IStreamWriter",
    "NetworkDefinitionCreationFlag.STRONGLY_TYPED",
}
UNTIL_10 = {
    "BuilderFlag.FP16",
    "ICudaEngine.create_execution_context_without_device_memory",
    "ICudaEngine.device_memory_size",
    "NetworkDefinitionCreationFlag.EXPLICIT_BATCH",
    "PreviewFeature.PROFILE_SHARING_0806",
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
                if holder.value.id == "trt" and not node.attr.startswith("__"):
                    found.add(f"{holder.attr}.{node.attr}")
                elif holder.value.id == "self" and holder.attr in VARIABLES:
                    found.add(f"{VARIABLES[holder.attr]}.{node.attr}")
            elif isinstance(holder, ast.Name):
                if holder.id == "trt" and not node.attr.startswith("__"):
                    found.add(node.attr)
                elif holder.id in VARIABLES:
                    found.add(f"{VARIABLES[holder.id]}.{node.attr}")
    return found


def missing(names: set[str], there: wheels.Names) -> set[str]:
    """Return those of `names` that a version has not."""
    found = set()
    for name in names:
        kind, _, member = name.partition(".")
        if kind not in there or (member and member not in there[kind]):
            found.add(name)
    return found


ALL = used((*SESSION, *BUILDER))


def test_used_names_are_found_in_the_source() -> None:
    assert {"Runtime", "IExecutionContext.execute_async_v3", "Builder.build_serialized_network"} <= ALL
    assert SINCE_10 | UNTIL_10 <= ALL
    assert len(ALL) > 60


def test_the_pinned_release_has_every_name() -> None:
    there = wheels.names_of(f"tensorrt-cu13-bindings=={wheels.pinned('tensorrt')}", "tensorrt_bindings")
    assert missing(ALL, there) == UNTIL_10


def test_10_has_every_name() -> None:
    there = wheels.names_of("tensorrt-cu13-bindings==10.16.1.11", "tensorrt_bindings")
    assert missing(ALL, there) == set()


def test_8_6_has_every_name() -> None:
    assert missing(ALL, wheels.recorded_8_6()) == SINCE_10


@pytest.mark.parametrize("version", [pytest.param(LEAN[0], marks=pytest.mark.slow), LEAN[1]])
def test_lean_runtime_has_every_name_that_a_session_uses(version: str) -> None:
    there = wheels.names_of(f"tensorrt-lean-cu13-bindings=={version}", "tensorrt_lean_bindings")
    assert missing(used(SESSION), there) <= UNTIL_10


def test_recorded_names_of_8_6_are_current() -> None:
    if importlib.util.find_spec("tensorrt") is None or metadata.version("tensorrt") != "8.6.0":
        pytest.skip("tensorrt==8.6.0 is not installed: it is large, and made for Python 3.10 at most")
    assert wheels.read_names("tensorrt") == wheels.recorded_8_6()
