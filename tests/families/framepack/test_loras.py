"""LoRAs on a tiny FramePack: files for HunyuanVideo and for FramePack, and a job in sections with one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from runtime.core.errors import ModelError
from runtime.core.events import Paused, Resumed, SectionDone, StepDone, VideoSaved, Warned
from runtime.core.facts import Fact
from runtime.core.loras import Lora
from runtime.core.plan import ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.execution.residency import Residency
from runtime.families.framepack.lora_names import weight_shape
from runtime.models.images import with_images
from runtime.models.loras import checked, listed, with_loras
from runtime.models.registry import published_models, read_spec
from runtime.models.spec import ModelSpec
from runtime.pipeline.checkpoint import CheckpointFolder
from runtime.planner.resolve import PlanningContext, resolve
from runtime.video.mp4 import read_metadata
from tests.families.framepack_models import pipeline
from tests.families.hunyuan_lora_files import (
    RANK,
    Factors,
    Tensors,
    block_factors,
    check_equal,
    comfy,
    converted,
    fused,
    fused_by_peft,
    layer_factors,
    peft,
    sums,
    transformer,
    underscored,
)
from tests.image_files import picture
from tests.lora_files import save
from tests.pipeline.runs import events_of
from tests.pipeline.test_run import frames_of
from tests.plans import machine

KNOWN = published_models("framepack")


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    folder = tmp_path_factory.mktemp("models") / "FramePackI2V"
    pipeline().save_pretrained(folder)
    return read_spec(folder, "framepack")


@pytest.fixture(scope="module")
def plain(spec: ModelSpec) -> Tensors:
    return transformer(spec).state_dict()


@pytest.fixture(scope="module")
def layers(spec: ModelSpec) -> Factors:
    """Return factors of all layers, by diffusers' names."""
    return layer_factors(transformer(spec))


STYLES: dict[str, Callable[[Factors], Tensors]] = {
    "diffusers": peft,
    "diffusers without a prefix": lambda found: peft(found, ""),
    "musubi-tuner": underscored,
    "OneTrainer": lambda found: underscored(found, "lora_transformer_", torch.tensor(RANK)),
}


@pytest.mark.parametrize("style", STYLES)
def test_loras_made_for_framepack_change_all_layers(
    style: str, spec: ModelSpec, plain: Tensors, layers: Factors, tmp_path: Path
) -> None:
    got = fused(spec, save(tmp_path / "a.safetensors", STYLES[style](layers)), 0.5)
    check_equal(got, sums(plain, peft(layers), 0.5))
    changed = {name for name in plain if not torch.equal(got[name], plain[name])}
    assert changed == {f"{name}.weight" for name in layers}
    assert {"clean_x_embedder.proj_4x.weight", "image_projection.up.weight"} <= changed


@pytest.mark.parametrize("named", [peft, comfy, underscored])
def test_loras_made_for_hunyuanvideo_change_the_same_blocks(
    named: Callable[[Factors], Tensors], spec: ModelSpec, plain: Tensors, tmp_path: Path
) -> None:
    blocks = block_factors(spec.transformer)
    wanted = sums(plain, converted(peft(blocks), spec.transformer.width), 0.5)
    check_equal(fused(spec, save(tmp_path / "a.safetensors", named(blocks)), 0.5), wanted)
    assert sum(not torch.equal(wanted[name], plain[name]) for name in plain) == 2 * 7 + 6


@pytest.mark.slow
def test_the_weights_equal_those_of_diffusers_loader(spec: ModelSpec, layers: Factors, tmp_path: Path) -> None:
    blocks = block_factors(spec.transformer)
    by_layers, by_blocks = fused_by_peft(
        spec, (peft(layers), converted(peft(blocks), spec.transformer.width)), tmp_path, 0.5
    )
    got = fused(spec, save(tmp_path / "a.safetensors", peft(layers)), 0.5)
    for name, tensor in by_layers.items():
        # peft multiplies the factors of convolutions in another order.
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=1e-6 if tensor.dim() > 2 else 0)
    check_equal(fused(spec, save(tmp_path / "b.safetensors", underscored(blocks)), 0.5), by_blocks)


def test_every_shape_in_the_table_equals_the_transformers(spec: ModelSpec, plain: Tensors) -> None:
    for name, tensor in plain.items():
        if name.endswith(".weight"):
            assert weight_shape(spec, name.removesuffix(".weight")) == tuple(tensor.shape), name


def test_differences_of_its_own_layers_are_added(spec: ModelSpec, plain: Tensors, tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(1)
    names = [name for name in plain if name.startswith(("clean_x_embedder", "image_projection"))]
    assert len(names) == 10
    suffixes = {"weight": "diff", "bias": "diff_b"}
    wanted = {name: torch.randn(plain[name].shape, generator=random) for name in names}
    tensors = {}
    for name, tensor in wanted.items():
        module, _, kind = name.rpartition(".")
        tensors[f"diffusion_model.{module}.{suffixes[kind]}"] = tensor
    got = fused(spec, save(tmp_path / "a.safetensors", tensors))
    check_equal(got, {name: plain[name] + wanted.get(name, torch.zeros(())) for name in plain})


@pytest.mark.parametrize(
    ("tensors", "code"),
    [
        ({"lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_down.weight": torch.ones(RANK, 8)}, "unknown_tensor"),
        ({"blocks.0.self_attn.q.lora_A.weight": torch.ones(RANK, 20)}, "unknown_tensor"),
        ({"clean_x_embedder.proj_8x.diff": torch.ones(20)}, "unknown_tensor"),
        ({"lora_unet_transformer_blocks_1_attn_to_q.lora_down.weight": torch.ones(RANK, 20)}, "larger_model"),
        ({"clean_x_embedder.proj_2x.diff": torch.ones(20, 4, 1, 2, 2)}, "other_size"),
        ({"image_projection.up.diff": torch.ones(60, 31)}, "other_size"),
        ({"image_projection.up.diff": torch.full((60, 32), float("nan"))}, "not_finite"),
        (
            {
                "clean_x_embedder.proj.lora_A.weight": torch.ones(RANK, 4, 1, 2, 2),
                "clean_x_embedder.proj.lora_B.weight": torch.ones(20, RANK, 1, 2, 2),
            },
            "not_matrices",
        ),
    ],
)
def test_a_bad_file_is_refused(tensors: Tensors, code: str, spec: ModelSpec, tmp_path: Path) -> None:
    path = save(tmp_path / "a.safetensors", tensors)
    with pytest.raises(ModelError) as refused:
        with_loras(spec, [Lora(str(path))], tmp_path)
    assert refused.value.code == f"lora.{code}"
    assert refused.value.remedy and "\n" not in refused.value.what


def test_names_of_hunyuanvideos_distilled_loras_do_not_change_the_steps(spec: ModelSpec, tmp_path: Path) -> None:
    path = save(tmp_path / "FastVideo_6_steps.safetensors", peft(block_factors(spec.transformer)))
    assert with_loras(spec, [Lora(str(path))], tmp_path).defaults == spec.defaults


def test_the_list_states_which_files_fit(spec: ModelSpec, layers: Factors, tmp_path: Path) -> None:
    published = KNOWN[0].spec(tmp_path)
    save(tmp_path / "loras" / "true size.safetensors", underscored(block_factors(published.transformer, rank=1)))
    save(tmp_path / "loras" / "tiny.safetensors", peft(layers))
    codes = [
        [one.problem and one.problem.code for one in (checked(file, model) for file in listed(tmp_path))]
        for model in (published, spec)
    ]
    assert codes == [["lora.other_size", None], [None, "lora.other_size"]]


class Place:
    """A model, a folder with a LoRA called "style", and jobs of two sections."""

    def __init__(self, spec: ModelSpec, folder: Path) -> None:
        self.spec, self.weights, self.video = spec, folder / "weights", folder / "x.mp4"
        self.image = folder / "image.png"
        picture(48, 32).save(self.image)
        self.style(0)

    def style(self, seed: int) -> None:
        """Write the LoRA."""
        factors = block_factors(self.spec.transformer, seed=seed)
        save(self.weights / "loras" / "style.safetensors", underscored(factors))

    def plan(self, *loras: str) -> tuple[ExecutionPlan, ModelSpec]:
        """Plan a video."""
        fields = {"prompt": "a red boat sails left", "width": 48, "height": 32, "seed": 3, "frames": 73, "steps": 2}
        request = GenerationRequest.from_mapping(fields | {"fps": 12, "image": str(self.image), "loras": loras})
        spec = with_images(with_loras(self.spec, request.loras, self.weights), request, self.weights, self.weights)
        return resolve(request, spec, PlanningContext(machine(), self.video)), spec


@pytest.mark.slow
def test_a_video_in_sections_has_a_lora_and_resumes_with_the_same_one(spec: ModelSpec, tmp_path: Path) -> None:
    place = Place(spec, tmp_path)
    plan, with_style = place.plan("style:0.8")
    with Residency() as residency:
        assert isinstance(events_of(plan, with_style, residency)[-1], VideoSaved)
        wanted = frames_of(place.video)
        assert [use["name"] for use in read_metadata(place.video)["plan"]["loras"]] == ["style"]
        without, bare = place.plan()
        assert isinstance(events_of(without, bare, residency)[-1], VideoSaved)
        assert frames_of(place.video) != wanted
        job = tmp_path / "job"
        place.video.unlink()
        stopped = events_of(
            plan,
            with_style,
            residency,
            pause_at=lambda event: isinstance(event, SectionDone),
            checkpoints=CheckpointFolder(job),
        )
        assert isinstance(stopped[-1], Paused)
        events = events_of(plan, with_style, residency, checkpoints=CheckpointFolder(job))
        assert any(isinstance(event, Resumed) for event in events)
        assert frames_of(place.video) == wanted
        # With another file of the same name, sections that are done are made again.
        events_of(
            plan,
            with_style,
            residency,
            pause_at=lambda event: isinstance(event, StepDone) and event.step == 3,
            checkpoints=CheckpointFolder(tmp_path / "second"),
        )
        place.style(9)
        other, changed = place.plan("style:0.8")
        events = events_of(other, changed, residency, checkpoints=CheckpointFolder(tmp_path / "second"))
    assert Warned(fact=Fact("pipeline.checkpoint_unusable", {"cause": Fact("checkpoint.other_clip")})) in events
    assert isinstance(events[-1], VideoSaved) and not any(isinstance(event, Resumed) for event in events)
    assert frames_of(place.video) != wanted
