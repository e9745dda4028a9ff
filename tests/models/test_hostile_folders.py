"""Model folders that are damaged on purpose: each is refused with a fact, at once, and stops nothing else."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save

from runtime.cli.main import run
from runtime.core.errors import ModelError
from runtime.core.facts import Fact
from runtime.models.catalogue import add_usable, find
from runtime.models.registry import check_folder, read_spec
from runtime.models.spec import ModelSpec
from runtime.models.tensor_files import read_header
from runtime.models.weights import load_scheduler, load_tokenizer
from tests.hostile_files import DEEP

Tiny = Callable[[str], ModelSpec]
INDEX, TRANSFORMER, VAE = "model_index.json", "transformer/config.json", "vae/config.json"
TEXT_ENCODER, SCHEDULER = "text_encoder/config.json", "scheduler/scheduler_config.json"
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
SHARDS = "transformer/diffusion_pytorch_model.safetensors.index.json"


# A test that hangs fails: opening a FIFO waits for ever.
pytestmark = pytest.mark.timeout(120, func_only=True)


@pytest.fixture
def folder(tiny: Tiny, tmp_path: Path) -> Path:
    """Return a copy of a tiny model with two experts, in a weights folder."""
    return Path(shutil.copytree(tiny("wan2.2-a14b").directory, tmp_path / "weights" / "bad"))


def change(path: Path, values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def replace_by_fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


@contextlib.contextmanager
def restored(folder: Path) -> Iterator[None]:
    """Restore the configurations of a folder at the end."""
    before = {path: path.read_bytes() for path in folder.rglob("*.json")}
    try:
        yield
    finally:
        for path, content in before.items():
            path.write_bytes(content)


def refused(folder: Path) -> ModelError:
    with pytest.raises(ModelError) as error:
        read_spec(folder, "bad")
    assert "\n" not in error.value.what
    assert len(error.value.what) < 500
    assert error.value.remedy
    return error.value


WRONG_VALUES: list[tuple[str, dict[str, Any], str]] = [
    (TRANSFORMER, {"num_layers": float("inf")}, "model.number_too_large"),
    (TRANSFORMER, {"num_layers": float("nan")}, "model.number_too_large"),
    (TRANSFORMER, {"num_layers": 10**9}, "model.number_too_large"),
    (TRANSFORMER, {"num_layers": 999_999}, "model.config_invalid"),
    (TRANSFORMER, {"num_layers": 0}, "model.config_invalid"),
    (TRANSFORMER, {"num_layers": True}, "model.config_invalid"),
    (TRANSFORMER, {"num_layers": None}, "model.config_invalid"),
    (TRANSFORMER, {"rope_max_seq_len": 1_000_000}, "model.config_invalid"),
    (TRANSFORMER, {"patch_size": [1, 0, 2]}, "model.config_invalid"),
    (TRANSFORMER, {"patch_size": 5}, "model.config_invalid"),
    (TRANSFORMER, {"freq_dim": [10**12]}, "model.number_too_large"),
    (VAE, {"dim_mult": []}, "model.config_invalid"),
    (VAE, {"dim_mult": [1] * 1_000}, "model.config_invalid"),
    (VAE, {"dim_mult": [1] * 1_000_000}, "model.file_too_many"),
    (VAE, {"dim_mult": [[]] * 1_000_000}, "model.file_too_many"),
    (VAE, {"dim_mult": "1222"}, "model.config_invalid"),
    (VAE, {"temperal_downsample": []}, "model.config_invalid"),
    (VAE, {"scale_factor_spatial": 0}, "model.config_invalid"),
    (VAE, {"num_res_blocks": 10**9}, "model.number_too_large"),
    (VAE, {"num_res_blocks": 100_000}, "model.config_invalid"),
    (VAE, {"base_dim": -4}, "model.config_invalid"),
    (TEXT_ENCODER, {"num_layers": 100_000}, "model.config_invalid"),
    (TEXT_ENCODER, {"num_labels": 900_000}, "model.config_invalid"),
    (TEXT_ENCODER, {"num_labels": 10**9}, "model.number_too_large"),
    (SCHEDULER, {"num_train_timesteps": 10**12}, "model.number_too_large"),
    (SCHEDULER, {"num_train_timesteps": 900_000}, "model.config_invalid"),
    (SCHEDULER, {"num_train_timesteps": [1000]}, "model.config_invalid"),
    (SCHEDULER, {"flow_shift": float("-inf")}, "model.number_too_large"),
    (SCHEDULER, {"flow_shift": {}}, "model.config_invalid"),
    (INDEX, {"boundary_ratio": 10**400}, "model.number_too_large"),
    (INDEX, {"boundary_ratio": 2.0}, "model.config_invalid"),
    (INDEX, {"boundary_ratio": "x" * 10_000}, "model.config_invalid"),
    (INDEX, {"_class_name": ["WanPipeline"]}, "model.family_unknown"),
    (INDEX, {"_class_name": "a\nb" * 1_000}, "model.family_unknown"),
]


@pytest.mark.timeout(300, func_only=True)  # many cases
def test_wrong_values_are_refused_before_anything_is_built(folder: Path, subtests: pytest.Subtests) -> None:
    for file, values, code in WRONG_VALUES:
        with subtests.test(file=file, values=str(values)[:80]), restored(folder):
            change(folder / file, values)
            if file == TRANSFORMER:
                change(folder / "transformer_2/config.json", values)
            assert refused(folder).code == code
            # The same for a download, before its weights are fetched.
            with pytest.raises(ModelError) as error:
                check_folder(folder, "bad")
            assert error.value.code == code


DAMAGES: dict[str, tuple[bytes, str]] = {
    "deep objects": (DEEP, "model.file_not_json"),
    "deep lists": (b"[" * 10_000, "model.file_not_json"),
    "large": (b"{}" + b" " * (5 << 20), "model.file_unreadable"),
    "twice": (b'{"a": 1, "a": 2}', "model.file_not_json"),
    "surrogate": (b'{"a": "\\ud800"}', "model.file_not_json"),
    "long number": (b'{"a": 1' + b"0" * 5_000 + b"}", "model.file_not_json"),
    "a list": (b"[]", "model.file_not_json"),
    "not UTF-8": (b"\xff\xfe{}", "model.file_not_json"),
}


@pytest.mark.timeout(300, func_only=True)  # many cases
def test_damaged_configurations_are_refused(folder: Path, subtests: pytest.Subtests) -> None:
    for file in (INDEX, TRANSFORMER, VAE, TEXT_ENCODER, SCHEDULER, "tokenizer/tokenizer_config.json"):
        for damage, (content, code) in DAMAGES.items():
            with subtests.test(file=file, damage=damage), restored(folder):
                (folder / file).write_bytes(content)
                assert refused(folder).code == code


@pytest.mark.parametrize(
    "file",
    [INDEX, TRANSFORMER, SCHEDULER, WEIGHTS, SHARDS, "tandem.json", "tokenizer/tokenizer.json", "vae/pipe/any"],
)
def test_a_fifo_is_refused_at_once(file: str, folder: Path) -> None:
    (folder / file).parent.mkdir(exist_ok=True)
    replace_by_fifo(folder / file)
    assert refused(folder).code == "model.file_unreadable"


def test_a_device_is_refused_at_once(folder: Path) -> None:
    (folder / "tandem.json").symlink_to("/dev/zero")
    assert refused(folder).code == "model.file_unreadable"


@pytest.mark.parametrize(
    ("sidecar", "code"),
    [
        ({"title": "a\nb"}, "model.config_invalid"),
        ({"title": ["a"]}, "model.config_invalid"),
        ({"license": "x" * 10_000}, "model.config_invalid"),
        ({}, "model.config_invalid"),
        ({"defaults": 5}, "model.config_invalid"),
        ({"width": 0}, "model.config_invalid"),
        ({"steps": 10**9}, "model.number_too_large"),
        ({"steps": 100_000}, "model.config_invalid"),
        ({"guidance_scale": float("nan")}, "model.number_too_large"),
        ({"fps": 16.5}, "model.config_invalid"),
        ({"sizes": []}, "model.config_invalid"),
        ({"sizes": [[64, 32, 5]]}, "model.config_invalid"),
        ({"frame_counts": [0]}, "model.config_invalid"),
        ({"latent_rgb_factors": [[1, 2]], "latent_rgb_bias": [0, 0, 0]}, "model.config_invalid"),
        ({"latent_rgb_factors": [[1, 2, 3]] * 15, "latent_rgb_bias": [0, 0, 0]}, "model.config_invalid"),
    ],
)
def test_wrong_defaults_are_refused(sidecar: dict[str, Any], code: str, folder: Path) -> None:
    defaults = {"width": 64, "height": 32, "frames": 9, "fps": 8, "steps": 4, "guidance_scale": 2.0}
    named = {name: sidecar.pop(name) for name in list(sidecar) if name in defaults}
    whole = {"sizes": [[64, 32]], "frame_counts": [9], "defaults": defaults | named, **sidecar}
    (folder / "tandem.json").write_text(json.dumps(whole if sidecar or named else {}))
    assert refused(folder).code == code


@pytest.mark.parametrize("names", [None, [], {"a": None}, {"a": ["b"]}, {"a": {}}])
def test_an_index_that_names_no_files_is_refused(names: Any, folder: Path) -> None:
    (folder / SHARDS).write_text(json.dumps({"weight_map": names}))
    assert refused(folder).code in {"model.index_invalid", "model.weights_missing"}


def test_a_tokenizer_with_code_of_its_own_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = read_spec(folder, "bad")
    change(folder / "tokenizer/tokenizer_config.json", {"auto_map": {"AutoTokenizer": [None, "code.Tokenizer"]}})
    (folder / "tokenizer/code.py").write_text("raise SystemExit('ran')")
    assert refused(folder).code == "model.tokenizer_runs_code"
    # If the file changed since: transformers would ask on the terminal.
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    with contextlib.suppress(ModelError):
        load_tokenizer(spec)


@pytest.mark.parametrize("values", [{"beta_schedule": "none"}, {"solver_type": 7}, {"num_train_timesteps": "x"}])
def test_a_scheduler_that_diffusers_does_not_accept_is_refused(values: dict[str, Any], folder: Path) -> None:
    spec = read_spec(folder, "bad")
    change(folder / SCHEDULER, values | {"use_flow_sigmas": False})
    with pytest.raises(ModelError) as error:
        load_scheduler(spec)
    assert error.value.code == "model.part_unloadable"


def test_deep_and_large_folders_are_read_to_the_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = folder
    try:
        for _ in range(1_200):  # deeper than Python's limit of recursion, within the longest path
            place = place / "d"
            place.mkdir()
        assert read_spec(folder, "bad").name == "bad"
        (place / "weights.pt").touch()
        assert refused(folder).code == "model.pickled"
        monkeypatch.setattr("runtime.models.folder._MAX_ENTRIES", 100)
        assert refused(folder).code == "model.too_many_files"
    finally:  # too deep for pytest to remove
        (place / "weights.pt").unlink(missing_ok=True)
        while place != folder:
            place.rmdir()
            place = place.parent


def hostile(weights: Path) -> None:
    """Add folders to a weights folder, each of which stopped the list of models once."""
    good = weights / "bad"
    for name, (file, values) in {
        "infinite": (TRANSFORMER, {"num_layers": float("inf")}),
        "boundary": (INDEX, {"boundary_ratio": 10**400}),
        "levels": (VAE, {"dim_mult": []}),
    }.items():
        shutil.copytree(good, weights / name)
        change(weights / name / file, values)
    for name, file, content in (
        ("deep", INDEX, DEEP),
        ("shards", SHARDS, b'{"weight_map": null}'),
        ("shape", WEIGHTS, _safetensors(b'{"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,0]}}', b"")),
    ):
        shutil.copytree(good, weights / name)
        (weights / name / file).write_bytes(content)
    shutil.copytree(good, weights / "fifo")
    replace_by_fifo(weights / "fifo" / INDEX)
    shutil.copytree(good, weights / os.fsdecode(b"not UTF-8 \xff"))


@pytest.mark.slow
def test_bad_folders_are_listed_with_their_reasons_and_stop_nothing(
    folder: Path, cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache_dir.mkdir()
    folder.parent.rename(cache_dir / "weights")
    hostile(cache_dir / "weights")
    assert run(["models", "list", "--json"]) == 0
    out, err = capsys.readouterr()
    listed = {model["name"]: model["problem"] for model in json.loads(out.splitlines()[-1])["models"]}
    bad = {"infinite", "boundary", "levels", "deep", "shards", "shape", "fifo"}
    assert {name for name, problem in listed.items() if problem} == bad | {name for name in listed if "UTF-8" in name}
    assert "Traceback" not in err
    assert "not UTF-8 \\udcff: The name" in err
    assert listed["bad"] is None
    # What the web app offers: neither more nor less.
    assert set(add_usable({}, cache_dir / "weights")) == {"diorama", "bad"}
    assert find("bad", cache_dir / "weights").experts == 2


# The format of safetensors.

PLAIN = {"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.int8)}


def _safetensors(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def entry(first: int, last: int, shape: object = None, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [last - first] if shape is None else shape, "data_offsets": [first, last]}


def test_files_of_the_library_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(save(PLAIN, metadata={"format": "pt"}))
    header = read_header(path)
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in header.tensors.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("I8", (4,)),
    }
    assert header.metadata == {"format": "pt"}
    assert path.read_bytes()[header.start :] == bytes(28)
    for tensors in ({}, {"empty": torch.zeros(0, 5), "scalar": torch.tensor(1.0)}):
        path.write_bytes(save(tensors))
        assert read_header(path).tensors.keys() == tensors.keys()


@pytest.mark.parametrize(
    ("header", "size", "cause"),
    [
        ({"a": entry(0, 4), "b": entry(8, 12)}, 12, "safetensors.hole"),
        ({"a": entry(4, 8)}, 8, "safetensors.hole"),
        ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "safetensors.overlap"),
        ({"a": entry(0, 8), "b": entry(0, 8)}, 8, "safetensors.overlap"),
        ({"a": entry(0, 8, [2])}, 8, "safetensors.tensor_size"),
        ({"a": entry(8, 0, [8])}, 8, "safetensors.tensor_size"),
        ({"a": entry(0, 8, [2], "F32"), "b": entry(8, 16, [2], "F64")}, 16, "safetensors.tensor_size"),
        ({"a": entry(0, 8, [2**62, 2**62])}, 8, "safetensors.tensor_size"),
        ({"a": entry(0, 8, dtype="X8")}, 8, "safetensors.dtype_unknown"),
        ({"a": entry(0, 8, [-8])}, 8, "safetensors.tensor_invalid"),
        ({"a": entry(0, 8, [8.0])}, 8, "safetensors.tensor_invalid"),
        ({"a": entry(0, 8, [10**30])}, 8, "safetensors.tensor_invalid"),
        ({"a": entry(0, 8, [True])}, 8, "safetensors.tensor_invalid"),
        ({"a": entry(0, 8, [1] * 100)}, 8, "safetensors.tensor_invalid"),
        ({"a": {**entry(0, 8), "data_offsets": [0]}}, 8, "safetensors.tensor_invalid"),
        ({"a": None}, 0, "safetensors.tensor_invalid"),
        ({"__metadata__": {"a": 1}}, 0, "safetensors.metadata_invalid"),
        ({"__metadata__": []}, 0, "safetensors.metadata_invalid"),
        ([], 0, "safetensors.header_not_json"),
        (b'{"a":{},"a":{}}', 0, "safetensors.duplicate"),
        (DEEP, 0, "safetensors.header_not_json"),
        (b'{"a":{"dtype":"U8","shape":[1e999],"data_offsets":[0,0]}}', 0, "safetensors.header_not_json"),
        ({"a": entry(0, 8, [-1] * 1_000_000)}, 8, "safetensors.header_too_many"),
        ({str(number): {} for number in range(300_000)}, 0, "safetensors.header_too_many"),
    ],
)
def test_files_that_break_a_rule_of_the_format_are_refused(
    header: object, size: int, cause: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(_safetensors(text, bytes(size)))
    with pytest.raises(ModelError) as error:
        read_header(path)
    assert (error.value.code, error.value.data["cause"].code) == ("model.tensors_invalid", cause)
    assert "\n" not in error.value.what


def test_a_header_beyond_the_limit_of_the_format_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with path.open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(101_000_000)
    with pytest.raises(ModelError) as error:
        read_header(path)
    assert error.value.code == "model.tensors_invalid"
    assert error.value.data["cause"].code == "safetensors.header_too_long"


@pytest.mark.parametrize(
    "header", [{str(number): {} for number in range(20_000)}, {"0": entry(0, 8, [-1] * 20_000), "1": entry(0, 8, [-1])}]
)
def test_only_the_first_invalid_tensor_is_described(header: object, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(_safetensors(json.dumps(header).encode(), b""))
    with pytest.raises(ModelError) as error:
        read_header(path)
    assert error.value.data["cause"] == Fact("safetensors.tensor_invalid", {"tensor": "0"})
    # A description of every value would take a gigabyte for the longest header.
    cause = error.value.__cause__
    assert isinstance(cause, ValidationError) and cause.error_count() < 5


@pytest.mark.parametrize("content", [b"", b"1234567", bytes(8), bytes(100), b"\xff" * 100, _safetensors(b"{}", b"x")])
def test_truncated_files_and_files_with_more_data_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError) as error:
        read_header(path)
    assert error.value.code == "model.file_damaged"
