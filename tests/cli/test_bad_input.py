"""Invalid input on the command line. The rules themselves are tested where they are: in core, planner and models."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime.cli.flags import PRESETS
from runtime.cli.main import run
from runtime.families.wan.lora_names import DISTILLED, LIGHTX2V_SHIFT
from runtime.models.spec import ModelSpec
from tests import lora_files
from tests.cli.refusals import check_refusals, refused
from tests.facts import fact

NO_GPU = {"code": "machine.no_gpu", "data": {}}


def test_flags_are_refused_by_the_rules_of_requests_and_plans(
    cache_dir: Path, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    """One flag of each kind, with what the command line itself does to its text."""
    cases: list[tuple[list[str], str, dict[str, Any]]] = [
        (["--width", "190"], "planner.not_a_multiple", {"field": "width", "value": 190, "able": [176, 192]}),
        (["--width", "-16"], "request.out_of_range", {"field": "width", "value": "-16", "low": 1}),
        (["--width", "wide"], "request.not_whole", {"field": "width", "value": "'wide'"}),
        (["--fps", "nan"], "request.not_whole", {"field": "fps", "value": "nan"}),
        (["--steps", "99999999999"], "request.out_of_range", {"field": "steps", "high": 1000}),
        (["--guidance", "nan,3"], "request.not_a_number", {"field": "guidance_scale", "value": "nan"}),
        (["--guidance", "3,nan"], "request.not_a_number", {"field": "guidance_scale_2", "value": "nan"}),
        (["--no-sound", "--sound", "lossless"], "cli.on_and_off", {"field": "sound"}),
        (["--sound", "loud"], "request.not_a_choice", {"field": "sound", "choices": ["on", "lossless", "off"]}),
        (["--guidance", "4,3,2"], "cli.guidance_invalid", {"value": "'4,3,2'"}),
        (["--guidance", ""], "request.not_a_number", {"field": "guidance_scale", "value": "''"}),
        (["--shift", ""], "request.not_a_number", {"field": "shift", "value": "''"}),
        (["--model", "no-such"], "model.unknown", {"name": "no-such"}),
        (["--model", ""], "request.model_name", {"field": "model"}),
        (["--model", "/no/such/folder"], "model.folder_missing", {"folder": "/no/such/folder"}),
        (["--negative-prompt", "a\x07b"], "request.control_character", {"field": "negative_prompt"}),
        (["--step-cache", "teacache"], "step_cache.unknown", {"field": "step_cache"}),
        (
            ["--step-cache", "first-block", "--backend", "transformer=inductor"],
            "planner.step_cache_on_engine",
            {"field": "step_cache", "backend": "inductor"},
        ),
        (["--quantization", "fp8"], "planner.quantization_needs_gpu", {"quantization": "fp8", "cause": NO_GPU}),
        (["--gpus", "2"], "planner.no_usable_gpus", {"wanted": 2, "cause": NO_GPU}),
        (["--gpus", "nan"], "request.not_whole", {"field": "gpus", "value": "nan"}),
        (["--interpolate", "4", "--fps", "80"], "interpolate.too_fast", {"nearest": ["interpolate", "2"]}),
        (["--upscale", "5"], "request.not_a_choice", {"field": "upscale", "value": "'5'"}),
        (["--upscale", "2", "--upscaler", "./x.safetensors"], "request.upscaler_name", {"field": "upscaler"}),
        (["--no-such-flag"], "cli.usage", {}),
        (["--backend", "vae"], "request.not_a_backend", {"field": "backends", "value": "'vae'"}),
        (["--backend", "="], "request.unknown_component", {"component": "''"}),
        (["--backend", "vae=auto", "--backend", "vae=pytorch"], "request.backend_repeated", {"component": "'vae'"}),
        (["--image-position", "top"], "request.not_a_number", {"field": "image_position", "value": "'top'"}),
        (["--lora", "x:nan"], "lora.weight_not_a_number", {"file": "'x'", "weight": "nan"}),
        (["--lora", "x", "--lora", "x:0.5"], "lora.repeated", {"file": "'x'"}),
        (["--preset", "lightning-4"], "cli.preset_without_lora", {"field": "preset"}),
        (["--preset", "fast", "--lora", "x"], "request.not_a_choice", {"field": "preset", "value": "'fast'"}),
        (
            ["--width", "2048", "--height", "8192", "--frames", "4001"],
            "planner.too_large",
            {"value": 4001, "most": 253},
        ),
        (
            ["--quantization", "bnb-4bit", "--backend", "all=onnxruntime"],
            "planner.quantization_needs_gpu",
            {"quantization": "bnb-4bit", "cause": NO_GPU},
        ),
    ]
    check_refusals(cases, capsys, subtests, ["plan", "a red boat"])
    # `generate` reads the same flags.
    check_refusals(cases[:2], capsys, subtests, ["generate", "a red boat"])


def test_messages_name_the_flag(cache_dir: Path, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests) -> None:
    for flags, what, to_do in (
        (["--guidance", "inf"], "--guidance is inf", "Give a number from 0"),
        (["--vae-precision", "float8"], "--vae-precision is 'float8'", "float32, bfloat16, float16"),
        (["--step-cache", "taylorseer:1.5"], "strength of --step-cache is '1.5'", "whole number from 2 to 8"),
        (["--step-cache", "first-block", "--backend", "transformer=inductor"], "step cache excludes", "--step-cache"),
        (["--quantization", "fp8"], "no NVIDIA GPU", "--quantization none"),
        (["--gpus", "2"], "2 GPUs were requested; none can be used: no NVIDIA GPU was found", "--gpus 1"),
        (["--shift", "far"], "'far', not a number", "or auto"),
        (["--no-such-flag"], "--no-such-flag", "--help"),
    ):
        with subtests.test(msg=" ".join(flags)):
            found = refused(["plan", "a red boat", *flags], capsys)
            assert what in found.what and to_do in found.to_do


def test_a_prompt_is_needed_and_refused_by_the_rules_of_requests(
    cache_dir: Path, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    cases: list[tuple[list[str], str, dict[str, Any]]] = [
        (["generate", ""], "request.prompt_empty", {"field": "prompt"}),
        (["generate", "a red \udcff boat"], "cli.not_utf8", {"argument": "'a red \\xff boat'", "byte": "0xFF"}),
        (["generate", "a red boat", "--negative-prompt", "\udce9"], "cli.not_utf8", {"byte": "0xE9"}),
        (["jobs", "list", "--search", "caf\udce9"], "cli.not_utf8", {"argument": "'caf\\xe9'"}),
        (["jobs", "show", "\udce9"], "cli.not_utf8", {"byte": "0xE9"}),
        (["bench", "compare", "a.json", "\udce9.json"], "cli.not_utf8", {"byte": "0xE9"}),
        (["generate"], "cli.usage", {"help": "./install.sh generate --help"}),
    ]
    check_refusals(cases, capsys, subtests)
    assert "PROMPT" in refused(["generate"], capsys).what
    assert "genrate" in refused(["genrate", "a red boat"], capsys).what


def test_an_output_that_cannot_be_written_is_refused_before_the_job_exists(
    cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    (tmp_path / "folder.mp4").mkdir()
    cases: list[tuple[list[str], str, dict[str, Any]]] = [
        (["--out", f"{tmp_path}/none/x.mp4"], "video.folder_missing", {"folder": f"{tmp_path}/none"}),
        (["--out", f"{tmp_path}/x.avi"], "video.not_mp4", {"file": f"{tmp_path}/x.avi"}),
        (["--out", f"{tmp_path}/folder.mp4"], "video.not_a_file", {"file": f"{tmp_path}/folder.mp4"}),
        (["--out", ""], "cli.out_unreadable", {}),
        (["--out", f"{tmp_path}/a\nb.mp4"], "cli.out_unreadable", {}),
        (["--out", "~no-such-user/x.mp4"], "cli.out_unreadable", {}),
        (["--out", "/proc/x.mp4"], "video.not_writable", {"file": "/proc/x.mp4"}),
        (["--out", "/dev/full"], "video.not_mp4", {"file": "/dev/full"}),
        (["--out", f"{tmp_path}/{'x' * 300}.mp4"], "video.not_writable", {}),
    ]
    check_refusals(cases, capsys, subtests, ["generate", "a red boat"])
    assert not (cache_dir / "jobs.sqlite").exists()


def _empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def _cut(folder: Path) -> None:
    weights = folder / "transformer_2" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def _cut_header(folder: Path) -> None:
    weights = folder / "vae" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5])


def _foreign(folder: Path) -> None:
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": "StableDiffusionPipeline"}))


def _pickle(folder: Path) -> None:
    (folder / "text_encoder" / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def _no_weights(folder: Path) -> None:
    (folder / "vae" / "diffusion_pytorch_model.safetensors").unlink()


def _bad_json(folder: Path) -> None:
    (folder / "transformer" / "config.json").write_text("{")


def _bad_config(folder: Path) -> None:
    (folder / "transformer" / "config.json").write_text('{"patch_size": 3}')


def _no_scheduler(folder: Path) -> None:
    (folder / "scheduler" / "scheduler_config.json").unlink()


def _swapped_weights(folder: Path) -> None:
    shutil.copy(
        folder / "vae" / "diffusion_pytorch_model.safetensors",
        folder / "transformer" / "diffusion_pytorch_model.safetensors",
    )


def _bad_tokenizer(folder: Path) -> None:
    (folder / "tokenizer" / "tokenizer.json").write_text('{"version": "9"}')


def test_damaged_model_folders_are_refused(
    tiny: Callable[[str], ModelSpec],
    cache_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    subtests: pytest.Subtests,
) -> None:
    cases: dict[Callable[[Path], None], tuple[str, dict[str, Any]]] = {
        _empty: ("model.file_missing", {"file": "model/model_index.json"}),
        _cut: ("model.file_damaged", {"file": "transformer_2/diffusion_pytorch_model.safetensors"}),
        _cut_header: ("model.file_damaged", {"file": "vae/diffusion_pytorch_model.safetensors", "size": 5}),
        _foreign: ("model.family_unknown", {"pipeline": "StableDiffusionPipeline"}),
        _pickle: ("model.pickled", {"file": "text_encoder/pytorch_model.bin"}),
        _no_weights: ("model.weights_missing", {"component": "vae"}),
        _bad_json: ("model.file_not_json", {"file": "transformer/config.json"}),
        _bad_config: ("model.config_invalid", {"model": "model"}),
        _no_scheduler: ("model.file_missing", {"file": "scheduler/scheduler_config.json"}),
        _swapped_weights: ("model.component_incomplete", {"component": "transformer", "missing": 69}),
        _bad_tokenizer: ("model.part_unloadable", {"model": "model"}),
    }
    folder, out = tmp_path / "model", tmp_path / "x.mp4"
    size = ["--width", "64", "--height", "32", "--frames", "5", "--steps", "2"]
    for damage, (code, data) in cases.items():
        with subtests.test(msg=damage.__name__):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(tiny("wan2.2-a14b").directory, folder)
            damage(folder)
            arguments = ["generate", "a red boat", "--model", str(folder), "--out", str(out), *size]
            found = refused(arguments, capsys)
            assert (found.code, {name: found.data[name] for name in data}) == (code, data)
            assert not out.exists()


def test_settings_of_the_environment_are_refused_by_their_variable(
    cache_dir: Path, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    for name, value, code in (
        ("TANDEM_PORT", "99999999", "settings.not_a_count"),
        ("TANDEM_PORT", "nan", "settings.not_a_count"),
        ("TANDEM_AUTH", "nobody", "settings.auth_invalid"),
        ("TANDEM_HOST", "0.0.0.0", "settings.host_without_password"),
        ("TANDEM_BROWSER", "perhaps", "settings.not_a_switch"),
        ("TANDEM_CACHE_DIR", "/proc/none", "settings.no_cache_folder"),
        ("TANDEM_MODEL", "no-such", "model.unknown"),
        ("IMAGEIO_FFMPEG_EXE", "/no/such/ffmpeg", "video.no_ffmpeg"),
    ):
        with subtests.test(msg=name), pytest.MonkeyPatch.context() as patch:
            patch.setenv(name, value)
            found = refused(["generate", "a red boat", "--steps", "1", "--frames", "1"], capsys)
            assert found.code == code
            assert found.data.get("source", name) == name


def test_an_invalid_settings_file_is_refused(
    cache_dir: Path, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    cache_dir.mkdir()
    for text, code in (
        ("{", "file_invalid"),
        ("[]", "unknown"),
        ('{"prot": 1}', "unknown"),
        ('{"port": "x"}', "not_a_count"),
        ('{"host": 7}', "empty"),
        ("\xff", "file_invalid"),
    ):
        with subtests.test(msg=text):
            (cache_dir / "settings.json").write_bytes(text.encode("latin-1"))
            found = refused(["doctor"], capsys)
            assert found.code == f"settings.{code}"
            assert str(cache_dir / "settings.json") in (found.data.get("source"), found.data.get("file"))


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions")
def test_unreadable_model(
    tiny: Callable[[str], ModelSpec], cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny("wan2.1").directory, folder)
    (folder / "vae" / "config.json").unlink()
    (folder / "vae" / "config.json").mkdir()
    found = refused(["plan", "a red boat", "--model", str(folder)], capsys)
    assert (found.code, found.data["file"]) == ("model.file_unreadable", "vae/config.json")


def test_flags_of_the_web_app_are_refused(
    cache_dir: Path, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    """Without a command there is no `--json`."""
    for arguments, says, to_do in (
        (["--tensorrt-transformer"], "TensorRT is not enabled", "--enable-tensorrt"),
        (["--tensorrt-text-encoders", "--tensorrt-transformer"], "--tensorrt-text-encoders was given", "or remove it"),
        (["--enable-tensorrt", "plan", "a red boat"], "--enable-tensorrt before a command", "plan --help"),
        (["--enable-tensorrt=yes"], "--enable-tensorrt", "--help"),
        (["--cluster", "generate", "a red boat"], "--cluster before a command", "generate --help"),
        (["--cluster", "serve"], "--cluster before a command", "serve --help"),
        (["--port", "7000", "doctor"], "--port before a command", "doctor --help"),
    ):
        with subtests.test(msg=" ".join(arguments)):
            assert run(arguments) == 2
            what, remedy = capsys.readouterr().err.strip().splitlines()
            assert says in what
            assert to_do in remedy


def test_loras_are_refused_by_their_rules(
    tiny: Callable[[str], ModelSpec],
    cache_dir: Path,
    capsys: pytest.CaptureFixture[str],
    subtests: pytest.Subtests,
) -> None:
    folder = cache_dir / "weights" / "loras"
    path = lora_files.save(folder / "mixed.safetensors", lora_files.wan(lora_files.factors(tiny("wan2.1").transformer)))
    (folder / "cut.safetensors").write_bytes(path.read_bytes()[:-100])
    damaged = {"code": "model.file_damaged", "data": {"file": "loras/cut.safetensors", "size": 21324}}
    cases: list[tuple[list[str], str, dict[str, Any]]] = [
        (["--lora", "no-such"], "lora.unknown", {"lora": "no-such", "folder": str(folder)}),
        (["--lora", "/no/such.safetensors"], "lora.unknown", {"lora": "/no/such.safetensors"}),
        (["--lora", "high=mixed"], "lora.other_size", {"lora": "mixed", "shape": "24×24", "expected": "192×192"}),
        (["--lora", "cut"], "lora.damaged", {"lora": "cut.safetensors", "cause": damaged}),
    ]
    check_refusals(cases, capsys, subtests, ["plan", "a red boat"])


def test_a_step_distillation_lora_states_its_requirements(
    tiny: Callable[[str], ModelSpec], cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tiny("wan2.2-a14b")
    tensors = lora_files.wan(lora_files.factors(spec.transformer))
    for name in ("x-4steps_high_noise", "style_low_noise"):
        lora_files.save(cache_dir / "weights" / "loras" / f"{name}.safetensors", tensors)
    plan = ["plan", "a red boat", "--model", str(spec.directory), "--width", "64", "--height", "32", "--frames", "5"]
    both = ["--lora", "x-4steps_high_noise", "--lora", "style_low_noise:0.5"]

    def planned(*flags: str) -> tuple[dict[str, object], list[str]]:
        assert run([*plan, *flags, "--json"]) == 0
        out, _ = capsys.readouterr()
        result = json.loads(out.strip().splitlines()[-1])
        scales = {name: result["request"][name] for name in ("steps", "guidance_scale", "guidance_scale_2")}
        return scales, [warning for warning in result["warnings"] if "x-4steps" in warning]

    def shift_of(*flags: str) -> float | None:
        assert run([*plan, "--lora", "style_low_noise", "--preset", "lightning-4", *flags, "--json"]) == 0
        out, printed = capsys.readouterr()
        result = json.loads(out.strip().splitlines()[-1])
        assert result["plan"]["expert_steps"] == {"transformer": 2, "transformer_2": 2}
        assert "High-noise transformer 2, Low-noise transformer 2" in printed
        shift: float | None = result["plan"]["shift"]
        reason = fact("planner.shift_asked", shift=shift or 0, others=[fact("planner.shift_of_scheduler", shift=3)])
        assert (str(reason) in printed) == (shift is not None)
        return shift

    quick = {"steps": 4, "guidance_scale": 1.0, "guidance_scale_2": 1.0}
    lora = {"name": "x-4steps_high_noise", "wanted": 4}
    assert planned(*both) == (quick, [str(fact("planner.distilled_used", **lora))])
    scales, warnings = planned(*both, "--steps", "20", "--guidance", "4,3")
    assert scales == {"steps": 20, "guidance_scale": 4.0, "guidance_scale_2": 3.0}
    assert warnings == [str(fact("planner.distilled_other_guidance", **lora, steps=20, guidance=4))]
    assert planned("--lora", "style_low_noise", "--preset", "lightning-4") == (quick, [])
    assert [shift_of(*flags) for flags in ((), ("--shift", "6"), ("--shift", "auto"))] == [5.0, 6.0, None]
    assert planned("--lora", "style_low_noise", "--preset", "lightning-4", "--steps", "6")[0] == quick | {"steps": 6}
    assert planned("--lora", "style_low_noise")[0]["steps"] == 40


def test_the_lightning_preset_has_the_shift_of_its_loras() -> None:
    assert PRESETS["lightning-4"]["shift"] == LIGHTX2V_SHIFT
    assert PRESETS["lightning-4"]["steps"] == DISTILLED.steps(Path("lightning.safetensors"))
