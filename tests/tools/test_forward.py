"""`tools.forward` on tiny components: against float32 and diffusers, with loaded and random weights."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.bench.configurations import Configuration
from runtime.cli.main import run
from runtime.core.cancel import Cancel
from runtime.core.plan import ComponentPlan
from runtime.core.request import GenerationRequest
from runtime.machine.probe import probe
from runtime.models.registry import published_models
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_module
from tests.bench.made import result, spread
from tests.plans import tiny_plan
from tests.tiny_models import ARCHITECTURES
from tools.forward.__main__ import main
from tools.forward.calls import exact_frames, exact_velocity, in_floats
from tools.forward.measure import HEADINGS, PARTS, Forward, ForwardSetup, _Case, notes, rows
from tools.forward.random_weights import random_module, random_spec

KNOWN = published_models("wan")
Tiny = Callable[[str], ModelSpec]
CLIP = {"prompt": "a red boat", "width": 64, "height": 32, "frames": 5, "steps": 4, "seed": 3}


def configuration(spec: ModelSpec, name: str, **values: Any) -> Configuration:
    """Return a configuration in PyTorch."""
    asked = {**CLIP, "model": str(spec.directory), "backends": {"all": "pytorch"}, **values}
    return Configuration(name=name, flags="", request=GenerationRequest.from_mapping(asked))


def measured(configurations: Sequence[Configuration], **changes: Any) -> dict[str, Any]:
    """Measure, and return a result that JSON can hold."""
    setup = ForwardSetup(machine=probe(), engines=None, weights_dir=Path("none"), runs=2, **changes)
    forward = Forward(setup, configurations, lambda _: None)
    forward.measure(Cancel())
    values: dict[str, Any] = json.loads(json.dumps(forward.to_json(), allow_nan=False))
    return values


def part(dtype: str = "bfloat16", **changes: Any) -> ComponentPlan:
    """Plan a part on the CPU."""
    return ComponentPlan(backend="pytorch", device="cpu", dtype=dtype, weights_bytes=0, reasons=(), **changes)


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "random"), [("wan2.2-a14b", False), ("wan2.2-ti2v-5b", True)])
def test_each_component_is_compared_with_diffusers_and_the_lower_bound(
    architecture: str, random: bool, tiny: Tiny
) -> None:
    spec = tiny(architecture)
    both = [configuration(spec, "small", frames=1), configuration(spec, "long", frames=5)]
    result = measured(both, random=random, parts=PARTS, tera_operations=2.0)
    rows = {one["name"]: one for one in result["configurations"]}
    names = [name for name in PARTS if name in spec.component_names]
    expected = [f"{who}, {name}" for who in ("small", "long") for name in names]
    expected += [f"diffusers 64x32, {frames} frames, {name}" for frames in (1, 5) for name in names]
    assert sorted(rows) == sorted(expected)
    for one in rows.values():
        assert one["state"] == "measured" and one["why"] == ""
        assert one["stages"]["pass"]["low"] > 0 and one["stages"]["pass"]["count"] == 2
        assert one["first_seconds"] > 0
        assert one["floor_seconds"] == one["operations"] / 2e12 > 0
        assert one["error"] is not None and one["error"] < 1e-5
    assert rows["long, vae"]["operations"] > rows["small, vae"]["operations"]
    assert (result["kind"], result["random"]) == ("forward", random)


@pytest.mark.slow
@pytest.mark.parametrize("random", [False, True])
def test_rounding_is_measured_against_the_same_weights(random: bool, tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.1")
    one = configuration(spec, "a")
    if random:
        spec = random_spec(spec, tmp_path / "made")
    plan = tiny_plan(spec, tmp_path / "x.mp4")
    for name, dtype in (("transformer", "bfloat16"), ("vae", "float32")):  # as on a GPU
        plan = plan.with_component(name, plan.components[name].replace(dtype=dtype))
    setup = ForwardSetup(machine=probe(), engines=None, weights_dir=tmp_path, random=random, runs=1)
    forward = Forward(setup, [one], lambda _: None)
    for name in ("transformer", "vae"):
        forward._measure_part([_Case(one, spec, plan)], name, Cancel())
    found = {one.name: (one.runs_on, one.error or 0.0) for one in forward.passes}
    eager, planned = "diffusers 64x32, 9 frames, ", "a, "
    assert found[f"{eager}vae"][0] == found[f"{eager}transformer"][0] == "diffusers alone, bfloat16"
    assert found[f"{planned}transformer"][0] == "PyTorch, bfloat16"
    assert 1e-4 < found[f"{eager}transformer"][1] < 5e-2 and 1e-4 < found[f"{planned}transformer"][1] < 5e-2
    assert 1e-4 < found[f"{eager}vae"][1] < 5e-2
    assert found[f"{planned}vae"][0] == "PyTorch, float32" and found[f"{planned}vae"][1] < 1e-5


def test_errors_and_the_baseline_can_be_left_out(tiny: Tiny) -> None:
    result = measured([configuration(tiny("wan2.1"), "a")], exact=False, baseline=False, parts=("transformer",))
    (one,) = result["configurations"]
    assert one["name"] == "a, transformer" and one["error"] is None and one["floor_seconds"] is None


def test_a_part_that_cannot_be_loaded_leaves_the_others(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.1")
    shutil.copytree(spec.directory, tmp_path / "model")
    config = tmp_path / "model" / "vae" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dropout": "none"}))
    broken = Configuration(
        name="a",
        flags="",
        request=GenerationRequest.from_mapping({**CLIP, "model": str(tmp_path / "model")}),
    )
    rows = {one["name"]: one for one in measured([broken])["configurations"]}
    assert rows["a, transformer"]["state"] == "measured"
    assert rows["a, vae"]["state"] == "failed" and "VAE" in rows["a, vae"]["why"]
    assert rows["a, vae"]["stages"] == {}


def test_a_cancelled_measurement_keeps_its_results(tiny: Tiny) -> None:
    setup = ForwardSetup(machine=probe(), engines=None, weights_dir=Path("none"), runs=1)
    cancel = Cancel()

    def report(line: str) -> None:
        if line.startswith("a, transformer"):
            cancel.request()

    saved: list[int] = []
    forward = Forward(setup, [configuration(tiny("wan2.1"), "a")], report, lambda now: saved.append(len(now.passes)))
    forward.measure(cancel)
    assert forward.cancelled
    assert [one.name for one in forward.passes if one.seconds is not None][1:] == ["a, transformer"]
    assert saved[-1] == len(forward.passes)


def test_engines_are_refused_with_random_weights(tiny: Tiny) -> None:
    asked = configuration(tiny("wan2.1"), "a", backends={"vae": "inductor"})
    with pytest.raises(ValueError, match="Inductor engines are built from files"):
        measured([asked], random=True)


def test_exact_velocity_equals_the_whole_module_in_float32(tiny: Tiny) -> None:
    spec = tiny("wan2.1")
    rounded: Any = load_module(spec, "transformer", part())
    whole: Any = load_module(spec, "transformer", part()).float()
    torch.manual_seed(0)
    given = torch.randn(1, 16, 3, 4, 8), torch.tensor([500.0]), torch.randn(1, 8, 32)
    before = {name: value.clone() for name, value in rounded.state_dict().items()}
    found = exact_velocity(rounded, *given)
    with torch.no_grad():
        expected = whole(given[0], given[1], given[2], return_dict=False)[0]
        own = rounded(given[0].bfloat16(), given[1], given[2].bfloat16(), return_dict=False)[0]
    assert torch.allclose(found, expected, atol=1e-5)
    assert 1e-4 < (own.float() - found).norm() / found.norm() < 5e-2
    assert len(rounded.blocks) == 2
    assert all(torch.equal(value, before[name]) for name, value in rounded.state_dict().items())


def test_exact_frames_are_those_of_the_vae(tiny: Tiny) -> None:
    spec = tiny("wan2.2-ti2v-5b")
    vae: Any = load_module(spec, "vae", part("float32"))
    latents = torch.randn(1, 48, 2, 2, 2, generator=torch.Generator().manual_seed(0))
    found = exact_frames(vae, latents)
    with torch.no_grad():
        video = vae.decode(latents * 1.5 + 0.1, return_dict=False)[0]
    assert found.shape == (5, 32, 32, 3)
    assert torch.allclose(found, video[0].permute(1, 2, 3, 0), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_random_components_differ_from_loaded_ones_in_values_only(
    architecture: str, tiny: Tiny, tmp_path: Path
) -> None:
    spec = tiny(architecture).for_text()
    made = random_spec(tiny(architecture), tmp_path / "made")
    assert made.directory != spec.directory and made.component_names == spec.component_names
    for name in spec.component_names[1:]:
        for dtype in ("bfloat16", "float32"):
            loaded = load_module(spec, name, part(dtype))
            drawn = random_module(made, name, part(dtype))
            kinds = {key: (value.shape, value.dtype) for key, value in loaded.named_parameters()}
            assert {key: (value.shape, value.dtype) for key, value in drawn.named_parameters()} == kinds
            buffers = dict(loaded.named_buffers())
            assert {key: value.dtype for key, value in drawn.named_buffers()} == {
                key: value.dtype for key, value in buffers.items()
            }
            assert all(torch.equal(value, buffers[key]) for key, value in drawn.named_buffers())
            # The same each time, and one precision is the other's, rounded.
            again = random_module(made, name, part("float32")).state_dict()
            assert all(torch.equal(value, again[key].to(value.dtype)) for key, value in drawn.state_dict().items())
            assert not drawn.training and not any(value.requires_grad for value in drawn.parameters())


def test_random_weights_keep_the_variance_of_activations(tiny: Tiny, tmp_path: Path) -> None:
    made: Any = random_module(random_spec(tiny("wan2.1"), tmp_path / "made"), "transformer", part("float32"))
    torch.manual_seed(0)
    with torch.no_grad():
        output = made(torch.randn(1, 16, 3, 4, 8), torch.tensor([500.0]), torch.randn(1, 8, 32), return_dict=False)[0]
    assert torch.isfinite(output).all() and 0.1 < output.std() < 10


@pytest.mark.parametrize("known", KNOWN[:3], ids=lambda known: known.name)  # the fourth is one expert of the first
def test_published_architectures_can_be_made(known: Any, tmp_path: Path) -> None:
    from diffusers import AutoencoderKLWan, WanTransformer3DModel

    spec = known.spec(Path("none"))
    made = random_spec(spec, tmp_path / "made")
    for name, kind in (("transformer", WanTransformer3DModel), ("vae", AutoencoderKLWan)):
        config = json.loads((made.directory / name / "config.json").read_text())
        with torch.device("meta"):
            module = kind.from_config(config)
        assert sum(value.numel() for value in module.parameters()) == spec.parameters[name]
        if name == "vae":
            assert len(module.config.latents_mean) == spec.vae.z_dim


def test_weights_that_are_quantized_from_files_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    made = random_spec(tiny("wan2.1"), tmp_path / "made")
    with pytest.raises(ValueError, match="while files are read"):
        random_module(made, "transformer", part(quantization="bnb-4bit"))


def test_an_unknown_architecture_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    gone = replace(tiny("wan2.1"), directory=tmp_path / "gone")
    with pytest.raises(ValueError, match="no configuration"):
        random_spec(gone, tmp_path / "made")


def test_frames_are_copied_from_reused_buffers() -> None:
    given = torch.full((1, 2, 2, 3), 0.5)
    kept, of_bytes = in_floats(given), in_floats(torch.full((1, 2, 2, 3), 255, dtype=torch.uint8))
    given.zero_()
    assert kept.eq(0.5).all()
    assert of_bytes.eq(1.0).all()


def test_rows_have_the_ratio_to_the_lower_bound() -> None:
    one = {
        "name": "480p, transformer",
        "runs_on": "PyTorch, bfloat16",
        "stages": {"pass": spread(3.0)},
        "first_seconds": 9.0,
        "floor_seconds": 2.0,
        "error": 1e-2,
        "weights_bytes": 1 << 30,
        "working_bytes": None,
        "why": "",
    }
    other = one | {"stages": {}, "why": "Out of memory.", "name": "b"}
    both = result(one, other) | {"kind": "forward", "random": True, "tera_operations": 790.0}
    (row,) = rows(both)
    assert len(row) == len(HEADINGS)
    assert row[2:7] == ("3.00 (2.85–3.15)", "9.00", "2.00", "1.50", "1.0e-02")
    lines = notes(both)
    assert lines[0] == "b: Out of memory."
    assert "random weights" in lines[1] and "790 TFLOP/s" in lines[2]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--part", "eyes"], "'eyes'"),
        (["--rate", "fast"], "'fast'"),
        (["--rate", "0"], "a positive number"),
        (["--rate", "nan"], "a positive number"),
        (["--rate", "inf"], "a positive number"),
        (["--runs", "0"], "at least 1"),
        (["--random", "--backend", "vae=inductor"], "built from files"),
        (["--model", "wan2.1-t2v-1.3b"], "are not downloaded"),
        (["--config", "a"], "without a name"),
        (["--width", "65"], "width is 65"),
        (["a prompt"], "unexpected extra argument"),
    ],
)
def test_bad_flags_end_with_one_line(
    flags: list[str], problem: str, capsys: pytest.CaptureFixture[str], cache_dir: Path
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags)
    err = capsys.readouterr().err
    assert ended.value.code == 2
    assert problem in err.strip().splitlines()[-1] and "Traceback" not in err


SMALL = ["--width", "64", "--height", "32", "--frames", "5"]


def test_passes_are_printed_and_written(
    tiny: Tiny, cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--model", str(tiny("wan2.1").directory), "--random", "--part", "transformer", "--part", "transformer"]
    assert main([*model, *SMALL, "--out", str(tmp_path), "--rate", "1"]) == 0
    out = capsys.readouterr().out
    written = json.loads((tmp_path / "forward.json").read_text())
    assert [one["configuration"] for one in written["configurations"]] == ["diffusers", "as planned"]
    for text in ("Times the bound", "random weights", f"Saved {tmp_path / 'forward.json'}"):
        assert text in out
    assert run(["bench", "compare", *2 * [str(tmp_path / "forward.json")]]) == 0


def test_without_a_folder_the_result_is_in_the_cache(tiny: Tiny, cache_dir: Path) -> None:
    model = ["--model", str(tiny("wan2.1").directory), *SMALL, "--part", "transformer", "--runs", "1"]
    assert main([*model, "--no-exact", "--no-baseline"]) == 0
    (folder,) = (cache_dir / "bench").iterdir()
    assert [path.name for path in folder.iterdir()] == ["forward.json"]


def test_a_model_without_the_component_measures_nothing(tiny: Tiny, cache_dir: Path, tmp_path: Path) -> None:
    model = ["--model", str(tiny("wan2.1").directory), *SMALL, "--out", str(tmp_path)]
    assert main([*model, "--part", "transformer_2"]) == 2
