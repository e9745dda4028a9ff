"""Adapters that peft, diffusers and LyCORIS make change each family's weights as these libraries change them."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.core.errors import ModelError
from runtime.core.loras import BOTH, Lora
from runtime.core.plan import ComponentPlan
from runtime.families.hunyuan_video.lora_names import BLOCKS, OUTSIDE, SWAPPED
from runtime.models.loras import with_loras
from runtime.models.registry import read_spec
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_module
from tests.engines.contract import wheels
from tests.families import framepack_models
from tests.transformer_files import wan_names

PACKAGES = ("peft==0.21.2", "lycoris-lora==4.1.3", "einops==0.8.2", "toml==0.10.2")
CHANGED = "changed.safetensors"
Tiny = Callable[[str], ModelSpec]
Tensors = dict[str, torch.Tensor]


def weights(spec: ModelSpec, component: str) -> Tensors:
    plan = ComponentPlan(backend="pytorch", device="cpu", dtype="float32", weights_bytes=0, reasons=())
    return load_module(spec, component, plan).state_dict()


def hunyuan_names(weights: Mapping[str, torch.Tensor]) -> Tensors:
    """Return weights under the names of HunyuanVideo's own code, with layers that are one there."""
    tables = [(f"{kind.original}.{n}.", f"{kind.diffusers}.{n}.", kind.names) for kind in BLOCKS for n in range(2)]
    named: Tensors = {}
    layers: set[tuple[str, ...]] = set()
    for original, diffusers, table in [*tables, ("", "", OUTSIDE)]:
        for layer, modules in table.items():
            parts = tuple(f"{diffusers}{part}" for part in ((modules,) if isinstance(modules, str) else modules))
            for end in ("weight", "bias"):
                if all(f"{part}.{end}" in weights for part in parts) and (end, *parts) not in layers:
                    layers.add((end, *parts))  # some layers have several spellings
                    tensor = torch.cat([weights[f"{part}.{end}"] for part in parts])
                    swapped = torch.cat(tensor.chunk(2)[::-1]) if layer in SWAPPED else tensor
                    named[f"{original}{layer}.{end}"] = swapped
    return named


# Models with diffusers' names and with those of their own code, by which musubi-tuner and LyCORIS name them.
MODELS: Mapping[str, tuple[str, str, Callable[[Mapping[str, torch.Tensor]], Tensors]]] = {
    "wan2.1": ("wan2.1", "transformer", dict),
    "wan2.1-i2v": ("wan2.1-i2v", "transformer", dict),
    "wan2.2-a14b": ("wan2.2-a14b", "transformer_2", dict),
    "hunyuan-video": ("hunyuan-video", "transformer", dict),
    "framepack": ("framepack", "transformer", dict),
    "own wan2.1-i2v": ("wan2.1-i2v", "transformer", wan_names),
    "own hunyuan-video": ("hunyuan-video", "transformer", hunyuan_names),
    "own framepack": ("framepack", "transformer", hunyuan_names),
}


@pytest.mark.slow
def test_adapters_change_the_weights_as_their_libraries_do(
    tiny: Tiny, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    packages = [wheels.unpacked(package) for package in PACKAGES]
    framepack_models.pipeline().save_pretrained(tmp_path / "framepack_model")
    specs = {name: tiny(name) for name, _, _ in MODELS.values() if name != "framepack"}
    specs["framepack"] = read_spec(tmp_path / "framepack_model", "framepack")
    for model, (name, component, named) in MODELS.items():
        plain = {name: tensor.contiguous() for name, tensor in named(weights(specs[name], component)).items()}
        save_file(plain, tmp_path / f"{model}.safetensors")
    wheels.run("tests.models.adapters_of_libraries", tmp_path, *MODELS, packages=packages, libraries=tmp_path)
    for model, (name, component, named) in MODELS.items():
        spec, plain = specs[name], load_file(tmp_path / f"{model}.safetensors")
        for kind in sorted((tmp_path / model).iterdir()):
            with subtests.test(model=model, kind=kind.name):
                (file,) = (path for path in kind.glob("*.safetensors") if path.name != CHANGED)
                lora = Lora(str(file), expert="low" if component == "transformer_2" else BOTH)
                if named is hunyuan_names and "by inputs" in kind.name:
                    with pytest.raises(ModelError) as refused:
                        with_loras(spec, [lora], tmp_path)
                    assert refused.value.code == "lora.kind_unsupported"
                    continue
                changed = named(weights(with_loras(spec, [lora], tmp_path), component))
                wanted = load_file(kind / CHANGED)
                assert any(not torch.equal(wanted[name], plain[name]) for name in wanted)
                for layer, tensor in plain.items():
                    torch.testing.assert_close(
                        changed[layer], wanted.get(layer, tensor), rtol=1e-5, atol=1e-5, msg=layer
                    )
