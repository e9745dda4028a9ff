"""Modules filled from files: equal to those of the libraries, also beside other threads."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.core.plan import ComponentPlan
from runtime.models import weights
from runtime.models.registry import read_spec
from runtime.models.spec import ModelSpec
from runtime.models.stored_modules import empty_module, weights_of_folder
from runtime.models.weights import load_module
from tests.tiny_models import hunyuan_pipeline

Tiny = Callable[[str], ModelSpec]
DTYPES = ("float32", "float16", "bfloat16")


def tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}


def load(spec: ModelSpec, name: str, dtype: str = "float32") -> torch.nn.Module:
    part = ComponentPlan(backend="pytorch", device="cpu", dtype=dtype, weights_bytes=0, reasons=())
    return load_module(spec, name, part)


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    mine, theirs = tensors(one), tensors(other)
    equal = [mine[name].dtype == found.dtype and torch.equal(mine[name], found) for name, found in theirs.items()]
    return mine.keys() == theirs.keys() and all(equal)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["wan2.1-i2v", "wan2.2-ti2v-5b", "hunyuan_video"])
def test_all_components_equal_those_of_the_libraries(
    architecture: str, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if architecture == "hunyuan_video":
        hunyuan_pipeline(guidance_embeds=True).save_pretrained(tmp_path)
        spec = read_spec(tmp_path, "hunyuan")
    else:
        spec = tiny(architecture)
    cases = [(name, dtype) for name in spec.component_names for dtype in DTYPES]
    expected = [weights._from_library(spec, name, getattr(torch, dtype), {}) for name, dtype in cases]
    monkeypatch.setattr(weights, "_from_library", None)  # none needs it
    assert [case for case, module in zip(cases, expected, strict=True) if not same(load(spec, *case), module)] == []


def test_both_names_of_a_tied_weight_may_be_in_files(tiny: Tiny, tmp_path: Path) -> None:
    name = "encoder.embed_tokens.weight"
    for change in (0, 1):
        folder = tmp_path / str(change)
        found = _copied(tiny("wan2.1"), folder)
        path = folder / "text_encoder" / "model.safetensors"
        state = load_file(path)
        state[name] = state["shared.weight"] + change
        save_file(state, path)
        library = weights._from_library(found, "text_encoder", torch.float32, {})
        own: Any = load(found, "text_encoder")
        assert same(own, library)
        assert read_spec(folder, "copy").parameters == found.parameters
        assert (own.shared.weight is own.encoder.embed_tokens.weight) == (change == 0)
    # Either name alone counts.
    del state["shared.weight"]
    save_file(state, path)
    assert read_spec(folder, "copy").parameters == found.parameters


def _copied(spec: ModelSpec, folder: Path) -> ModelSpec:
    shutil.copytree(spec.directory, folder)
    return read_spec(folder, "copy")


def test_other_names_are_left_to_the_library(tiny: Tiny, tmp_path: Path) -> None:
    spec = _copied(tiny("wan2.1"), tmp_path / "model")
    path = tmp_path / "model" / "vae" / "diffusion_pytorch_model.safetensors"
    state = load_file(path)
    first = next(iter(state))
    save_file({("other" if name == first else name): tensor for name, tensor in state.items()}, path)
    assert weights_of_folder(path.parent, empty_module(spec, "vae")) is None


def test_a_module_without_memory_leaves_those_of_other_threads_alone(tiny: Tiny) -> None:
    made: list[bool] = []
    done = threading.Event()

    def make() -> None:
        while not done.is_set():
            made.append(torch.nn.Linear(2, 2).weight.is_meta)

    thread = threading.Thread(target=make)
    thread.start()
    try:
        empty = [empty_module(tiny("wan2.1"), "transformer") for _ in range(3)]
    finally:
        done.set()
        thread.join()
    assert all(parameter.is_meta for one in empty for parameter in one.parameters())
    assert made
    assert not any(made)
