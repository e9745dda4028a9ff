"""The pinned torch-tensorrt has every used keyword, and a converter for every operation."""

import ast
import json
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from runtime.engines.builders.torch_tensorrt import TorchTensorRT, arguments, input_arguments
from runtime.models.spec import ModelSpec
from runtime.planner.choice.engine_index import UNREADABLE_KEY, EngineKey, ShapeProfile
from tests.engines.contract import wheels
from tests.plans import gpu, machine
from tests.tiny_models import SHALLOW_FLF2V

CONVERT = "convert_exported_program_to_serialized_trt_engine"


@pytest.fixture(scope="module")
def wheel() -> Path:
    return wheels.unpacked(f"torch-tensorrt=={wheels.pinned('torch-tensorrt')}")


@pytest.fixture
def key() -> EngineKey:
    """A key with the builder's own options."""
    options = TorchTensorRT().options(machine(gpu=gpu()), "cuda:0")
    profile = ShapeProfile((1, 8, 8), (2, 14, 24), (4, 30, 40))
    return EngineKey(**{**vars(UNREADABLE_KEY), "options": options, "profiles": (profile,)})


def parse(wheel: Path, module: str) -> ast.Module:
    """Return a module of torch-tensorrt."""
    return ast.parse((wheel / "torch_tensorrt" / module).read_text(encoding="utf-8"))


def function(tree: ast.Module, name: str) -> ast.FunctionDef:
    """Return the function of that name."""
    return next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)


def test_wheel_requires_the_pinned_torch_and_tensorrt(wheel: Path) -> None:
    metadata = next(wheel.glob("*.dist-info/METADATA")).read_text(encoding="utf-8")
    needs = {
        need.name: need.specifier for need in map(Requirement, re.findall(r"^Requires-Dist: (.+)$", metadata, re.M))
    }
    installed = re.search(r'^TORCH = "(.+)"$', (wheels.ROOT / "tools/setup_env.py").read_text("utf-8"), re.MULTILINE)
    assert installed is not None
    assert installed.group(1) in needs["torch"]
    assert wheels.pinned("tensorrt") in needs["tensorrt"]


def test_every_keyword_exists(wheel: Path, key: EngineKey) -> None:
    signature = function(parse(wheel, "dynamo/_compiler.py"), CONVERT).args
    known = {argument.arg for argument in (*signature.args, *signature.kwonlyargs)}
    assert signature.kwarg is not None, "it refuses unknown keywords by itself now"
    ours = arguments(key, torch.device("cuda", 0), Path("timing"))
    assert {"exported_program", "arg_inputs", "kwarg_inputs", *ours} <= known


def test_every_keyword_of_an_input_is_read(wheel: Path) -> None:
    names = {
        node.value
        for node in ast.walk(function(parse(wheel, "_Input.py"), "__init__"))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    sizes = ({"z": (1, 2)}, {"z": (1, 3)}, {"z": (1, 4)})
    assert set(input_arguments(sizes, "z", torch.float32)) <= names
    assert set(input_arguments((sizes[0],) * 3, "z", torch.float32)) <= names


def test_names_of_outputs(wheel: Path) -> None:
    interpreter = parse(wheel, "dynamo/conversion/_TRTInterpreter.py")
    assert "name = f'output{i}'" in ast.unparse(function(interpreter, "output"))
    assert "name=target" in ast.unparse(function(interpreter, "placeholder"))


@pytest.mark.slow
def test_every_operation_has_a_converter(wheel: Path, tiny: Callable[[str], ModelSpec]) -> None:
    if version("torch").split(".")[:2] != wheels.pinned("torch-tensorrt").split(".")[:2]:
        pytest.skip("the pinned torch-tensorrt is of another torch")
    bindings = wheels.unpacked(f"tensorrt-cu13-bindings=={wheels.pinned('tensorrt')}")
    libraries = wheels.stand_ins(int(wheels.pinned("tensorrt").partition(".")[0]))
    packages = [wheel, bindings, wheels.unpacked("dllist==2.0.0")]
    spec = tiny(SHALLOW_FLF2V)
    model = spec.directory
    lines = wheels.run("tests.engines.contract.conversion", model, packages=packages, libraries=libraries)
    found = json.loads(lines[-1])
    assert set(found) == {name for programs in spec.programs.values() for name in programs}
    for program in found.values():
        assert program["unconvertible"] == []
        # `tensors.json` has these names.
        assert program["inputs"] == program["user_inputs"]
