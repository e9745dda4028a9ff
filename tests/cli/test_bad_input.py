"""Invalid input on the command line: exit code 2, one line with the problem, one with the remedy, no traceback."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.cli.flags import PRESETS
from runtime.cli.main import run
from runtime.families.wan.lora_names import LIGHTX2V_SHIFT, distilled_steps
from runtime.models.spec import ModelSpec
from tests import lora_files

GOOD = ["--model", "diorama"]


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Run the command and return its two lines, with the JSON checked against them.

    Only a plan that is refused for memory says more before them: the ways there are.
    """
    assert run([*arguments, "--json"]) == 2
    out, err = capsys.readouterr()
    *before, what, to_do = err.strip().splitlines()
    result = json.loads(out.strip().splitlines()[-1])
    assert not before or (arguments[0] == "plan" and before[0].startswith("Memory is short.")), err
    assert bool(before) <= ("ladder" in result)
    assert what.startswith("Error: ")
    assert to_do.startswith("To do: ")
    assert len(to_do) > len("To do: ...")
    assert "Traceback" not in err
    assert result["error"]["defect"] is False
    return what, to_do


@pytest.mark.parametrize(
    ("flags", "says", "to_do"),
    [
        (["--width", "190"], "width is 190", "176 or 192"),
        (["--width", "0"], "width is 0", "from 1"),
        (["--width", "-16"], "width is -16", "from 1"),
        (["--width", "1000000000"], "width is 1000000000", "to 8192"),
        (["--width", "wide"], "'wide', not a whole number", "from 1"),
        (["--height", "100"], "height is 100", "96 or 112"),
        (["--height", "8"], "height is 8", "16"),
        (["--frames", "32"], "frames is 32", "29 or 33"),
        (["--frames", "0"], "frames is 0", "from 1"),
        (["--fps", "0"], "fps is 0", "from 1"),
        (["--fps", "nan"], "fps is nan", "from 1"),
        (["--steps", "0"], "steps is 0", "from 1"),
        (["--steps", "99999999999"], "steps is 99999999999", "1000"),
        (["--guidance", "inf"], "--guidance is inf", "from 0"),
        (["--guidance", "nan,3"], "--guidance is nan", "from 0"),
        (["--guidance", "-1"], "--guidance is -1", "from 0"),
        (["--guidance", "4,3,2"], "4,3,2", "4,3"),
        (["--guidance", "strong"], "strong", "from 0"),
        (["--guidance", ""], "''", "from 0"),
        (["--seed", "-1"], "seed is -1", "from 0"),
        (["--shift", "0"], "shift is 0", "from 0.1 to 100"),
        (["--shift", "nan"], "shift is nan, not a number", "from 0.1"),
        (["--shift", "101"], "shift is 101", "to 100"),
        (["--shift", "far"], "'far', not a number", "or auto"),
        (["--shift", ""], "'', not a number", "or auto"),
        (["--seed", str(2**70)], "seed is 1180591620717411303424", "from 0"),
        (["--vae-precision", "float8"], "--vae-precision is 'float8'", "float32, bfloat16, float16"),
        (["--vae-precision", ""], "--vae-precision is ''", "float32, bfloat16, float16"),
        (["--model", "no-such"], "no-such", "diorama"),
        (["--model", ""], "model", "models list"),
        (["--model", "/no/such/folder"], "/no/such/folder", "folder"),
        (["--negative-prompt", "a\x07b"], "U+0007", "Remove"),
        (["--offload", "disk"], "offload is 'disk'", "sequential"),
        (["--step-cache", "teacache"], "--step-cache is 'teacache'", "first-block"),
        (["--step-cache", "taylorseer:1.5"], "strength of --step-cache is '1.5'", "whole number from 2 to 8"),
        (["--step-cache", "first-block:2"], "strength of --step-cache is '2'", "up to 1"),
        (["--step-cache", "first-block", "--backend", "transformer=inductor"], "step cache excludes", "--step-cache"),
        (["--quantization", "int3"], "quantization is 'int3'", "bnb-4bit"),
        (["--quantization", "fp8"], "no NVIDIA GPU", "--quantization none"),
        (["--gpus", "0"], "gpus is 0", "from 1"),
        (["--gpus", "many"], "'many', not a whole number", "from 1"),
        (["--gpus", "nan"], "gpus is nan", "from 1"),
        (["--gpus", "99999999999999999999"], "gpus is 99999999999999999999", "to 16"),
        (["--gpus", "2"], "2 GPUs were requested; none can be used: no NVIDIA GPU was found", "--gpus 1"),
        (["--no-such-flag"], "--no-such-flag", "--help"),
        (["--backend", "vae"], "'vae'", "COMPONENT=BACKEND"),
        (["--backend", "vae=cuda"], "Unknown backend 'cuda'", "inductor"),
        (["--backend", "eyes=auto"], "Unknown component 'eyes'", "text_encoder"),
        (["--backend", "="], "Unknown component ''", "vae"),
        (["--backend", "vae=auto", "--backend", "vae=pytorch"], "'vae' twice", "one backend"),
        (["--build", "maybe"], "build is 'maybe'", "never"),
        (["--build", ""], "build is ''", "never"),
        (["--width", "2048", "--height", "8192", "--frames", "4001"], "at most 253", "Use 253"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "plan"])
def test_flags(
    command: str,
    flags: list[str],
    says: str,
    to_do: str,
    cache_dir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    what, remedy = refused([command, "a red boat", *flags], capsys)
    assert says in what
    assert to_do in remedy


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "empty"),
        (" \t\n ", "empty"),
        ("boat " * 20_000, "100,000 characters"),
        ("a red\x00boat", "U+0000"),
        ("a red\x1b[31mboat", "U+001B"),
        ("a red \udcff boat", "U+DCFF"),
    ],
)
def test_prompts(prompt: str, says: str, cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    what, _ = refused(["generate", prompt], capsys)
    assert says in what


def test_no_prompt(cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    what, _ = refused(["generate"], capsys)
    assert "PROMPT" in what


def test_unknown_command(cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    what, _ = refused(["genrate", "a red boat"], capsys)
    assert "genrate" in what


@pytest.mark.parametrize(
    ("out", "says"),
    [
        ("{tmp}/none/x.mp4", "none does not exist"),
        ("{tmp}/x.avi", ".mp4"),
        ("{tmp}/folder.mp4", "folder.mp4 is not a regular file"),
        ("", "empty"),
        ("{tmp}/a\nb.mp4", "unreadable"),
        ("/proc/x.mp4", "cannot be written"),
        ("/dev/full", ".mp4"),
        ("{tmp}/" + "x" * 300 + ".mp4", "cannot be written"),
    ],
)
def test_out(out: str, says: str, cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "folder.mp4").mkdir()
    what, _ = refused(["generate", "a red boat", "--out", out.format(tmp=tmp_path)], capsys)
    assert says in what


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


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_empty, "model_index.json"),
        (_cut, "truncated"),
        (_cut_header, "truncated"),
        (_foreign, "StableDiffusionPipeline"),
        (_pickle, "pytorch_model.bin"),
        (_no_weights, "vae"),
        (_bad_json, "config.json"),
        (_bad_config, "incomplete"),
        (_no_scheduler, "scheduler"),
        (_swapped_weights, "transformer"),
        (_bad_tokenizer, "tokenizer"),
    ],
)
def test_model_folders(
    damage: Callable[[Path], None],
    says: str,
    tiny: Callable[[str], ModelSpec],
    cache_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny("wan2.2-a14b").directory, folder)
    damage(folder)
    out = tmp_path / "x.mp4"
    size = ["--width", "64", "--height", "32", "--frames", "5", "--steps", "2"]
    assert run(["generate", "a red boat", "--model", str(folder), "--out", str(out), *size, "--json"]) == 2
    stdout, err = capsys.readouterr()
    what, remedy = err.strip().splitlines()[-2:]
    assert what.startswith("Error: ")
    assert says in what
    assert remedy.startswith("To do: ")
    assert "Traceback" not in err
    assert json.loads(stdout)["error"]["what"] in what
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("TANDEM_PORT", "99999999", "TANDEM_PORT"),
        ("TANDEM_PORT", "nan", "TANDEM_PORT"),
        ("TANDEM_AUTH", "nobody", "USER:PASSWORD"),
        ("TANDEM_HOST", "0.0.0.0", "password"),
        ("TANDEM_BROWSER", "perhaps", "TANDEM_BROWSER"),
        ("TANDEM_CACHE_DIR", "/proc/none", "cache folder"),
        ("TANDEM_MODEL", "no-such", "no-such"),
        ("IMAGEIO_FFMPEG_EXE", "/no/such/ffmpeg", "ffmpeg"),
    ],
)
def test_environment(
    name: str,
    value: str,
    says: str,
    cache_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(name, value)
    assert run(["generate", "a red boat", "--steps", "1", "--frames", "1"]) == 2
    what, remedy = capsys.readouterr().err.strip().splitlines()[-2:]
    assert says in what
    assert remedy.startswith("To do: ")


@pytest.mark.parametrize("text", ["{", "[]", '{"prot": 1}', '{"port": "x"}', '{"host": 7}', "\xff"])
def test_settings_file(text: str, cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache_dir.mkdir()
    (cache_dir / "settings.json").write_bytes(text.encode("latin-1"))
    what, _ = refused(["doctor"], capsys)
    assert "settings.json" in what


def test_web_flags_before_a_command(cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    what, _ = refused(["--port", "7000", "doctor"], capsys)
    assert "--port" in what


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions")
def test_unreadable_model(
    tiny: Callable[[str], ModelSpec], cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny("wan2.1").directory, folder)
    (folder / "vae" / "config.json").unlink()
    (folder / "vae" / "config.json").mkdir()
    what, _ = refused(["plan", "a red boat", "--model", str(folder)], capsys)
    assert "vae/config.json" in what


@pytest.mark.parametrize(
    ("arguments", "says", "to_do"),
    [
        (["--tensorrt-transformer"], "TensorRT is not enabled", "--enable-tensorrt"),
        (["--tensorrt-text-encoders", "--tensorrt-transformer"], "--tensorrt-text-encoders was given", "or remove it"),
        (["--enable-tensorrt", "plan", "a red boat"], "--enable-tensorrt before a command", "plan --help"),
        (["--enable-tensorrt=yes"], "--enable-tensorrt", "--help"),
        (["--cluster", "generate", "a red boat"], "--cluster before a command", "generate --help"),
        (["--cluster", "serve"], "--cluster before a command", "serve --help"),
    ],
)
def test_launch_flags(
    arguments: list[str], says: str, to_do: str, cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    what, remedy = capsys.readouterr().err.strip().splitlines()
    assert says in what
    assert to_do in remedy


@pytest.mark.parametrize(
    ("flags", "says", "to_do"),
    [
        (["--quantization", "bnb-4bit", "--backend", "all=onnxruntime"], "4-bit weights", ""),
        (["--quantization", "int4"], "quantization is 'int4'", "bnb-4bit"),
        (["--offload", "disk"], "offload is 'disk'", "sequential"),
    ],
)
def test_invalid_settings(
    flags: list[str], says: str, to_do: str, cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    what, remedy = refused(["plan", "a red boat", *flags], capsys)
    assert says in what
    assert to_do in remedy


@pytest.mark.parametrize(
    ("flags", "says", "to_do"),
    [
        (["--lora", "no-such"], "There is no LoRA no-such", "weights/loras"),
        (["--lora", "/no/such.safetensors"], "There is no LoRA file /no/such", "path"),
        (["--lora", ""], "empty or unreadable", "name"),
        (["--lora", "a\x07b"], "empty or unreadable", "name"),
        (["--lora", "x:nan"], "weight of the LoRA 'x' is nan", "up to 4"),
        (["--lora", "x:-0.5"], "weight of the LoRA 'x' is -0.5", "above 0"),
        (["--lora", "x:1e30"], "weight of the LoRA 'x' is 1e+30", "up to 4"),
        (["--lora", "x", "--lora", "x:0.5"], "'x' is given twice", "once"),
        ([flag for name in "abcdefghi" for flag in ("--lora", name)], "9 LoRAs are too many", "at most 8"),
        (["--lora", "high=mixed"], "is for another size of model", "made for"),
        (["--lora", "cut"], "damaged or truncated", "again"),
        (["--preset", "lightning-4"], "none is given", "--lora"),
        (["--preset", "fast", "--lora", "x"], "--preset is 'fast'", "lightning-4"),
    ],
)
def test_loras(
    flags: list[str],
    says: str,
    to_do: str,
    tiny: Callable[[str], ModelSpec],
    cache_dir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = cache_dir / "weights" / "loras"
    path = lora_files.save(folder / "mixed.safetensors", lora_files.wan(lora_files.factors(tiny("wan2.1").transformer)))
    (folder / "cut.safetensors").write_bytes(path.read_bytes()[:-100])
    what, remedy = refused(["plan", "a red boat", *flags], capsys)
    assert says in what
    assert to_do in remedy


def test_a_step_distillation_lora_states_its_requirements(
    tiny: Callable[[str], ModelSpec], cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tiny("wan2.2-a14b")
    tensors = lora_files.wan(lora_files.factors(spec.transformer))
    for name in ("x-4steps_high_noise", "style_low_noise"):
        lora_files.save(cache_dir / "weights" / "loras" / f"{name}.safetensors", tensors)
    plan = ["plan", "a red boat", "--model", str(spec.directory), "--width", "64", "--height", "32", "--frames", "5"]
    both = ["--lora", "x-4steps_high_noise", "--lora", "style_low_noise:0.5"]

    def planned(*flags: str) -> tuple[dict[str, object], str]:
        assert run([*plan, *flags, "--json"]) == 0
        out, _ = capsys.readouterr()
        result = json.loads(out.strip().splitlines()[-1])
        scales = {name: result["request"][name] for name in ("steps", "guidance_scale", "guidance_scale_2")}
        return scales, " ".join(result["warnings"])

    def shift_of(*flags: str) -> float | None:
        assert run([*plan, "--lora", "style_low_noise", "--preset", "lightning-4", *flags, "--json"]) == 0
        out, printed = capsys.readouterr()
        result = json.loads(out.strip().splitlines()[-1])
        assert result["plan"]["expert_steps"] == {"transformer": 2, "transformer_2": 2}
        assert "Steps of each expert: High-noise transformer 2, Low-noise transformer 2" in printed
        shift: float | None = result["plan"]["shift"]
        assert (f"Shift {shift or 0:g}, as requested; the model's own scheduler has 3." in printed) == (
            shift is not None
        )
        return shift

    quick = {"steps": 4, "guidance_scale": 1.0, "guidance_scale_2": 1.0}
    scales, printed = planned(*both)
    assert scales == quick and "distilled for 4 steps without guidance; this video uses these values" in printed
    scales, printed = planned(*both, "--steps", "20", "--guidance", "4,3")
    assert scales == {"steps": 20, "guidance_scale": 4.0, "guidance_scale_2": 3.0}
    assert "this video uses 20 steps with guidance 4. Use --steps 4 --guidance 1." in printed
    scales, printed = planned("--lora", "style_low_noise", "--preset", "lightning-4")
    assert scales == quick and not printed.count("distilled")
    assert [shift_of(*flags) for flags in ((), ("--shift", "6"), ("--shift", "auto"))] == [5.0, 6.0, None]
    assert planned("--lora", "style_low_noise", "--preset", "lightning-4", "--steps", "6")[0] == quick | {"steps": 6}
    assert planned("--lora", "style_low_noise")[0]["steps"] == 40


def test_the_lightning_preset_has_the_shift_of_its_loras() -> None:
    assert PRESETS["lightning-4"]["shift"] == LIGHTX2V_SHIFT
    assert PRESETS["lightning-4"]["steps"] == distilled_steps(Path("lightning.safetensors"))
