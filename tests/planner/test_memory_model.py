"""The memory model, compared with measurements of components and jobs at full size.

Most of it follows from the architecture, without fitted constants. The few constants are fitted to rows with
"fitted": true; the split is by rule, and all other rows are held out:

- the allocator's slack: the transformers of 1.3 and 5 billion parameters, and decoding 832×480;
- working sets of quantized arithmetic: the jobs of the model of 1.3 billion;
- memory of the libraries on a CPU: the embedded model's VAE.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import UMT5Config, UMT5EncoderModel

from runtime.core.estimates import MemoryStrategy, StageMemory
from runtime.core.plan import ComponentPlan, EngineRef
from runtime.execution.offload import placement
from runtime.families.wan.spec import _UNFOLDED
from runtime.models.catalogue import EMBEDDED, look_up
from runtime.models.registry import read_spec
from runtime.models.spec import ModelSpec
from runtime.planner import memory_model
from runtime.planner.execution_options import text_bytes
from runtime.planner.memory_model import Workload
from tests.published_specs import UMT5, spec

HERE = Path(__file__)
ROWS = [json.loads(line) for line in HERE.with_name("measured_h200.jsonl").read_text().splitlines()]
# Jobs of bench/gpu/jobs.py: bytes beyond the CUDA context at each stage's peak. A14B computed blocks as
# `families.wan.transformer` does, plus 0.7 GB that it then held during attention; the others as diffusers does.
JOBS = [json.loads(line) for line in HERE.with_name("measured_h200_jobs.jsonl").read_text().splitlines()]
# Decoding on 2 cores of an AMD EPYC with AVX-512, by PyTorch 2.13: bench/vae_cpu.py; of equal runs the one
# that took most.
ON_CPU = [json.loads(line) for line in HERE.with_name("measured_cpu.jsonl").read_text().splitlines()]
# What glibc's malloc keeps of blocks up to 32 MiB: it differs by so much between equal runs.
KEPT = 0.35e9
# Weights that wait page-locked are copied out of a file: each part was saved in files of at most so many bytes.
FILES = {"text_encoder": 50 * 10**9, "transformer": 10 * 10**9, "transformer_2": 10 * 10**9}
# Wan2.1's VAE is A14B's too.
OF_VAE = {"wan2.1": "wan2.1-1.3b", "wan2.2-ti2v-5b": "wan2.2-ti2v-5b", "umt5-xxl": "wan2.1-1.3b"}
BF16 = {"text_encoder": "bfloat16", "transformer": "bfloat16", "transformer_2": "bfloat16", "vae": "float32"}
GB = 10**9


def rows(part: str, *, fitted: bool | None = None) -> list[Any]:
    """Return the measurements of one part, named: those that constants are fitted to, the others, or all."""
    found = [row for row in ROWS if row["part"] == part and fitted in {None, row["fitted"]}]
    return [
        pytest.param(row, id=f"{row['model']}-{row.get('dtype')}-{row.get('size')}-{row.get('chunk')}") for row in found
    ]


def close(forecast: float, measured: float) -> bool:
    """Whether a forecast is within 15 %."""
    return abs(forecast - measured) <= 0.15 * measured


def workload(
    model: ModelSpec, size: tuple[int, int, int], dtypes: Mapping[str, str] = BF16, device: str = "cuda:0"
) -> Workload:
    """Return a clip's load."""
    width, height, frames = size
    return Workload(
        spec=model,
        device=device,
        dtypes=dtypes,
        engine_bytes={},
        engine_seconds={},
        tokens=model.tokens(frames, height, width),
        latent_shape=model.latent_shape(frames, height, width),
        height=height,
        width=width,
    )


@pytest.mark.parametrize("row", rows("transformer"))
def test_memory_of_a_transformer_is_near_the_measurement(row: dict[str, Any]) -> None:
    model = spec(row["model"])
    width, height, frames = row["size"]
    working = memory_model.denoise_bytes(model, model.tokens(frames, height, width), row["dtype"])
    weights = memory_model.weights_bytes(model, dict.fromkeys(model.component_names, row["dtype"]))["transformer"]
    assert close(working, row["working"])
    assert close(weights, row["weights"])


@pytest.mark.parametrize("row", rows("vae"))
def test_memory_of_a_decoder_is_near_the_measurement(row: dict[str, Any]) -> None:
    model = spec(OF_VAE[row["model"]])
    width, height, _ = row["size"]
    working = model.vae.decode_bytes(row["chunk"], height, width, memory_model.DTYPE_BYTES[row["dtype"]])
    weights = memory_model.weights_bytes(model, dict.fromkeys(model.component_names, row["dtype"]))["vae"]
    assert close(working, row["working"])
    assert close(weights, row["weights"])


@pytest.mark.parametrize("row", rows("text_encoder"))
def test_memory_of_a_text_encoder_is_near_the_measurement(row: dict[str, Any]) -> None:
    model = spec(OF_VAE[row["model"]])
    assert close(model.encoders["text_encoder"].forward_bytes(memory_model.DTYPE_BYTES[row["dtype"]]), row["working"])
    # Made without loading, it holds its embedding twice; loaded, `shared` and the encoder's are one.
    embedding = 256_384 * 4096 * memory_model.DTYPE_BYTES[row["dtype"]]
    assert close(memory_model.weights_bytes(model, BF16)["text_encoder"] + embedding, row["weights"])


@pytest.mark.parametrize("row", [*rows("transformer"), *rows("vae"), *rows("text_encoder")])
def test_a_fitting_plan_includes_the_allocator_s_slack(row: dict[str, Any]) -> None:
    model = spec(OF_VAE.get(row["model"], row["model"]) if row["part"] != "transformer" else row["model"])
    dtypes = dict.fromkeys(model.component_names, row["dtype"])
    size = tuple(row.get("size", (832, 480, 81)))
    held = workload(model, size, dtypes)
    (stage,) = [
        stage
        for stage in memory_model.stages(held, MemoryStrategy(decode_chunk=row.get("chunk", 1)))
        if stage.component == row["part"]
    ]
    needs = row["weights"] + stage.working_bytes + stage.allocator_slack_bytes
    assert row["reserved"] <= needs <= 1.5 * row["reserved"]


def file_pages(weights: Mapping[str, int], offload: str) -> int:
    """Return the largest number of file pages that a process holds in addition to pinned weights.

    Components are copied one after another, file by file. The pages of a file are counted until all of it is copied;
    the system can reclaim them at any time. Weights that are not pinned are in such pages.
    """
    if offload not in {"group", "sequential"}:
        return 0
    copied, most = 0, 0
    for name, limit in FILES.items():
        copied += weights.get(name, 0)
        most = max(most, copied + min(weights.get(name, 0), limit))
    return max(most - sum(weights.values()), 0)


@pytest.mark.parametrize("row", JOBS, ids=lambda row: f"{row['model']}-{row['offload']}-{row['quantization']}")
def test_memory_of_a_job_is_near_the_measurement(row: dict[str, Any]) -> None:
    model = spec(row["model"])
    dtypes = {**BF16, "vae": row["vae"]}
    kept = text_bytes(model, "bfloat16", texts=2) if row["text_kept"] else 0
    held = replace(workload(model, tuple(row["size"]), dtypes), text_bytes=kept)
    strategy = MemoryStrategy(offload=row["offload"], quantization=row["quantization"], keep_loaded=row["keep_loaded"])
    weights = memory_model.weights_bytes(model, dtypes, row["quantization"])
    later = {"encode": weights.keys() - {"text_encoder"}, "denoise": {"vae"}, "decode": set()}
    found: dict[str, int] = {}
    free = 149 * GB
    chunk = memory_model.decode_chunk(model, held.latent_shape[2], held.height, held.width, row["vae"], "cuda:0", free)
    for stage in memory_model.stages(held, strategy.replace(decode_chunk=chunk)):
        found[stage.stage] = max(stage.peak_bytes, found.get(stage.stage, 0))
    for name, peak in found.items():
        # What stays loaded was not yet there in the stages before its own: each job was its process's first.
        absent = sum(weights[part] for part in later[name]) if row["keep_loaded"] else 0
        assert close(peak - absent - memory_model.baseline_bytes("cuda:0"), row[name]), name
    if row["offload"] != "none":
        # The process held 3 GB before, which the forecast counts and the measurement does not.
        taken = memory_model.ram_bytes(held, strategy) + file_pages(weights, row["offload"])
        assert 0.85 * row["ram"] <= taken <= 1.15 * row["ram"] + 3 * GB


@pytest.mark.parametrize(
    ("offload", "tile", "denoise", "decode"),
    [("group", 32, 3.7, 4.3), ("group", None, 3.7, 23.5), ("sequential", None, 2.1, 23.5)],
)
def test_memory_of_a_framepack_section_is_near_the_measurement(
    offload: Any, tile: int | None, denoise: float, decode: float
) -> None:
    """The measured gigabytes are those of bench/h100.md: 832×480 on an H100, beyond the CUDA context."""
    model = look_up("framepack-i2v", Path("none"))
    held = workload(model, (832, 480, 73), dict.fromkeys(model.component_names, "bfloat16"))
    strategy = MemoryStrategy(offload=offload, decode_chunk=1, decode_tile=tile)
    found = {
        stage.stage: stage.peak_bytes - memory_model.baseline_bytes("cuda:0")
        for stage in memory_model.stages(held, strategy)
    }
    assert close(found["denoise"], denoise * GB)
    assert close(found["decode"], decode * GB)


@pytest.mark.parametrize(
    ("quantization", "gigabytes"), [("none", 28.6), ("fp8", 14.5), ("bnb-8bit", 14.5), ("bnb-4bit", 8.4)]
)
def test_quantized_weights(quantization: str, gigabytes: float) -> None:
    weights = memory_model.weights_bytes(spec("wan2.2-a14b"), BF16, quantization)
    assert weights["transformer"] / GB == pytest.approx(gigabytes, abs=0.1)
    assert weights["transformer_2"] == weights["transformer"]
    assert weights["text_encoder"] / GB == pytest.approx(11.4, abs=0.1)


@pytest.mark.parametrize(
    ("strategy", "encode", "denoise", "decode"),
    [
        (MemoryStrategy(keep_loaded=True), 69.0, 69.0, 69.0),
        (MemoryStrategy(keep_loaded=True, freed=("text_encoder",)), 69.0, 57.6, 57.6),
        (MemoryStrategy(), 11.4, 28.6, 0.5),
        (MemoryStrategy(offload="model"), 11.4, 28.6, 0.5),
        (MemoryStrategy(offload="group"), 2.1, 1.9, 0.5),
        (MemoryStrategy(offload="sequential"), 2.1, 0.2, 0.5),
        (MemoryStrategy(quantization="bnb-4bit"), 11.4, 8.4, 0.5),
    ],
)
def test_weights_on_the_device_by_strategy(
    strategy: MemoryStrategy, encode: float, denoise: float, decode: float
) -> None:
    text, high, low, vae = memory_model.stages(workload(spec("wan2.2-a14b"), (832, 480, 81)), strategy)
    assert text.weights_bytes / GB == pytest.approx(encode, abs=0.1)
    assert high.weights_bytes / GB == pytest.approx(denoise, abs=0.1)
    assert low.weights_bytes == high.weights_bytes
    assert vae.weights_bytes / GB == pytest.approx(decode, abs=0.1)


@pytest.mark.parametrize(("offload", "gigabytes"), [("none", 8.0), ("model", 72.0), ("group", 72.0)])
def test_system_memory_holds_offloaded_weights(offload: str, gigabytes: float) -> None:
    held = workload(spec("wan2.2-a14b"), (832, 480, 81))
    assert memory_model.ram_bytes(held, MemoryStrategy(offload=offload)) / GB == pytest.approx(gigabytes, abs=0.2)


def test_a_tile_takes_its_share_of_a_frame_and_the_clip_is_in_ram() -> None:
    held = workload(spec("wan2.1-1.3b"), (832, 480, 81))
    whole, half, quarter = (memory_model.decode_bytes(held, 1, tile) for tile in (None, 64, 32))
    assert half / whole == pytest.approx(512 / 832, rel=1e-3)
    assert quarter / whole == pytest.approx(256**2 / (832 * 480), rel=1e-3)
    clip = 81 * 480 * 832 * 3 * 2
    assert memory_model.decode_bytes(replace(held, device="cpu"), 1, 32) == quarter + clip
    for offload, more in (("group", clip), ("none", 0)):
        strategy = MemoryStrategy(offload=offload)
        assert (
            memory_model.ram_bytes(held, strategy.replace(decode_tile=32))
            == memory_model.ram_bytes(held, strategy) + more
        )


@pytest.mark.parametrize(("tile", "measured"), [(None, 21.17), (64, 6.25), (48, 3.65), (32, 1.80)])
def test_memory_of_a_tile_is_near_the_measurement(tile: int | None, measured: float) -> None:
    held = workload(spec("wan2.1-1.3b"), (1280, 720, 9))
    assert close(
        memory_model.decode_bytes(held, 1, tile) + memory_model.weights_bytes(held.spec, BF16)["vae"], measured * GB
    )


def decoding_on_a_cpu(row: dict[str, Any]) -> Workload:
    """Return the load of a row of `ON_CPU`."""
    model = read_spec(EMBEDDED / "diorama", "diorama").for_text()
    if row["vae"] == "narrow":
        model = replace(model, vae=replace(model.vae, decoder_base_dim=4, dim_mult=(1, 2, 2, 2)))
    return workload(model, tuple(row["size"]), dict.fromkeys(BF16, "float32"), "cpu")


@pytest.mark.parametrize("row", ON_CPU, ids=lambda row: f"{row['vae']}-{row['size']}-{row['chunk']}-{row['tile']}")
def test_memory_of_decoding_on_a_cpu_is_near_the_measurement(row: dict[str, Any]) -> None:
    held = decoding_on_a_cpu(row)
    working = memory_model.decode_bytes(held, row["chunk"], row["tile"])
    assert 0.85 * row["working"] - KEPT <= working <= 1.15 * row["working"]
    if row["working"] > GB:
        assert close(working, row["working"])
    # The peak includes what the process held before.
    strategy = MemoryStrategy(decode_tile=row["tile"], decode_chunk=row["chunk"])
    (stage,) = [stage for stage in memory_model.stages(held, strategy) if stage.component == "vae"]
    peak = row["before"] + row["working"]
    assert 0.85 * peak <= stage.peak_bytes <= 1.15 * peak + KEPT


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="reads the peak memory of a process from Linux")
def test_small_convolutions_on_a_cpu_are_unfolded_where_pytorch_does_it() -> None:
    for channels, frames, rows in ((32, 3, 213), (32, 3, 214), (4, 6, 853), (4, 6, 854), (64, 4, 80), (64, 4, 81)):
        x, kernel = torch.empty(1, channels, frames, rows, 4), torch.empty(4, channels, 3, 3, 3)
        chosen = torch._C._select_conv_backend(x, kernel, None, [1] * 3, [0, 1, 1], [1] * 3, False, [0] * 3, 1, None)
        assert ("Mkldnn" in str(chosen)) == (channels * frames * rows > _UNFOLDED)


def test_convolutions_on_a_gpu_are_not_unfolded() -> None:
    narrow = decoding_on_a_cpu({"vae": "narrow", "size": (768, 512, 5)})
    on_gpu = memory_model.decode_bytes(replace(narrow, device="cuda:0"), 1, None)
    assert memory_model.decode_bytes(narrow, 1, None) > 2 * on_gpu


@pytest.mark.parametrize("offload", ["none", "model", "group", "sequential"])
@pytest.mark.parametrize("model", ["wan2.1-1.3b", "wan2.2-a14b", "wan2.2-ti2v-5b"])
def test_weights_on_the_device_agree_with_the_placement_of_offloading(model: str, offload: str) -> None:
    made = spec(model)
    held = workload(made, (832, 480, 81))
    sizes = memory_model.weights_bytes(made, BF16)
    for stage in memory_model.stages(held, MemoryStrategy(offload=offload)):
        name = stage.component
        part = ComponentPlan(backend="pytorch", device="cuda:0", dtype=BF16[name], weights_bytes=0, reasons=())
        share = stage.weights_bytes / sizes[name]
        where = placement(name, part, offload)
        assert (share == 1) == (where in {"device", "whole"})
        assert (share <= 0.2) == (where in {"blocks", "leaves"})


def test_the_largest_layer_is_the_text_encoder_s_embedding() -> None:
    with torch.device("meta"):
        encoder = UMT5EncoderModel(UMT5Config(**UMT5)).encoder
    sizes = [sum(p.numel() for p in module.parameters(recurse=False)) for module in encoder.modules()]
    made = spec("wan2.1-1.3b")
    text, *_ = memory_model.stages(workload(made, (832, 480, 81)), MemoryStrategy(offload="group"))
    # The next layer comes while one computes.
    first, second = sorted(sizes)[-1], sorted(sizes)[-2]
    assert 2 * (first + second) == pytest.approx(text.weights_bytes, rel=0.05)


def test_engines_hold_their_weights_with_every_offload() -> None:
    held = replace(workload(spec("wan2.2-a14b"), (832, 480, 81)), engine_bytes={"transformer": 30 * GB})
    _, high, low, _ = memory_model.stages(held, MemoryStrategy(offload="group"))
    assert high.weights_bytes == 30 * GB
    assert low.weights_bytes < 2 * GB
    whole = workload(spec("wan2.2-a14b"), (832, 480, 81))
    strategy = MemoryStrategy(offload="group")
    assert memory_model.ram_bytes(held, strategy) < memory_model.ram_bytes(whole, strategy)


def decode_stage(*uses: EngineRef) -> StageMemory:
    """Return the decode stage of A14B at 720p with the VAE in bfloat16 in PyTorch, or on engines."""
    held = replace(
        workload(spec("wan2.2-a14b"), (1280, 720, 81), {**BF16, "vae": "bfloat16"}),
        engines={"vae": uses} if uses else {},
        engine_bytes={"vae": 1_000_000_000} if uses else {},
    )
    return memory_model.stages(held, MemoryStrategy(decode_chunk=1))[-1]


def vae_engine(program: str, **changes: Any) -> EngineRef:
    """Return an engine of the VAE in float32."""
    size = (1, 90, 160)
    return EngineRef(id=program, program=program, builder="b", precision="float32", profile=(size,) * 3, **changes)


def test_the_vaes_engines_have_their_own_dtype_caches_twice_and_one_context() -> None:
    caches = spec("wan2.2-a14b").vae.cache_bytes(720, 1280, 4)
    assert caches == pytest.approx(8.7e9, rel=0.01)
    context = 5_000_000_000
    contexts = {"vae_first": 3_000_000_000, "vae_next": context}
    known = decode_stage(*(vae_engine(name, context_bytes=size) for name, size in contexts.items()))
    unknown = decode_stage(vae_engine("vae_first"), vae_engine("vae_next"))
    in_pytorch = decode_stage()
    besides = in_pytorch.overhead_bytes + known.weights_bytes
    assert known.peak_bytes - besides == pytest.approx(2 * caches + context, rel=0.02)
    # PyTorch's bfloat16 was forecast for engines in float32 before.
    assert unknown.working_bytes > 2 * in_pytorch.working_bytes
    assert unknown.working_bytes > 2 * caches
