"""Jobs with images: the copy outlives the file, and checkpoints and MP4s name the image by its digest."""

import base64
import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from runtime.core.errors import InvalidRequestError
from runtime.core.events import VideoSaved
from runtime.core.images import ImageUse
from runtime.core.plan import ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.models import requested
from runtime.models.catalogue import EMBEDDED
from runtime.models.images import images_dir
from runtime.models.registry import read_spec
from runtime.models.requested import model_for
from runtime.models.spec import ModelSpec
from runtime.pipeline.checkpoint import identity
from runtime.pipeline.files import stamps
from runtime.planner.resolve import PlanningContext, resolve
from runtime.queue.job_planning import JobReplanner
from runtime.queue.store import JobStore
from runtime.video.images import THUMBNAIL_BYTES
from runtime.video.mp4 import read_metadata
from tests.image_files import saved
from tests.pipeline.test_resume import run
from tests.plans import machine, no_engines, tiny_plan

Tiny = Callable[[str], ModelSpec]
SMALL: Mapping[str, Any] = {"prompt": "a red boat", "width": 64, "height": 32, "frames": 5, "steps": 2, "seed": 3}


@pytest.fixture
def spec(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> ModelSpec:
    """A tiny I2V-A14B, which requests find by any name."""
    made = tiny("wan2.2-i2v-a14b")
    monkeypatch.setattr(requested, "find", lambda *_: made)
    return made


def planned(cache: Path, **values: Any) -> tuple[ExecutionPlan, ModelSpec]:
    request = GenerationRequest.from_mapping({**SMALL, **values})
    spec = model_for(request, cache / "weights", cache)
    return resolve(request, spec, PlanningContext(machine(), cache / "x.mp4")), spec


def test_the_mp4_names_the_image_and_shows_it(spec: ModelSpec, tmp_path: Path) -> None:
    file = saved(tmp_path / "boat.png")
    plan, spec = planned(tmp_path, image=str(file), last_image=str(saved(tmp_path / "end.png", 40, 40)))
    file.unlink()
    events = run(plan, spec, None)
    assert isinstance(events[-1], VideoSaved), events[-1]
    facts = read_metadata(tmp_path / "x.mp4")
    assert facts["images"].keys() == {"image", "last_image"}
    assert facts["plan"]["images"]["image"].items() <= facts["images"]["image"].items()
    thumbnail = facts["images"]["image"].pop("thumbnail")
    assert spec.image is not None
    assert facts["images"]["image"] == {"name": "boat.png", "digest": spec.image.digest, "width": 64, "height": 48}
    kind, _, data = thumbnail.partition(",")
    assert kind == "data:image/webp;base64" and len(base64.b64decode(data)) <= THUMBNAIL_BYTES
    assert Image.open(io.BytesIO(base64.b64decode(data))).size == (64, 48)
    assert str(tmp_path) not in str(facts)
    # The settings can be used again as long as the copy is there.
    again, _ = planned(tmp_path, **facts["request"])
    assert again.images == plan.images and again.request_json() == plan.request_json()
    spec.image.path.unlink()
    with pytest.raises(InvalidRequestError) as refused:
        planned(tmp_path, **facts["request"])
    assert (refused.value.field, refused.value.code) == ("image", "image.copy_missing")
    assert "boat.png" in refused.value.what


def test_a_video_without_an_image_names_none(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.2-ti2v-5b")
    plan = tiny_plan(spec, tmp_path / "x.mp4")
    assert isinstance(run(plan, spec, None)[-1], VideoSaved)
    facts = read_metadata(tmp_path / "x.mp4")
    assert "images" not in facts and facts["plan"]["images"] == {}
    assert GenerationRequest.from_mapping(facts["request"]).image is None


def test_a_video_is_saved_if_the_copy_is_gone_at_its_end(spec: ModelSpec, tmp_path: Path) -> None:
    from runtime.pipeline.video_output import _thumbnail

    plan, _ = planned(tmp_path, image=str(saved(tmp_path / "boat.png")))
    assert plan.image is not None and _thumbnail(plan.image)
    plan.image.path.unlink()
    assert _thumbnail(plan.image) == {}


@pytest.mark.parametrize("begun", [False, True])
def test_a_job_resumes_after_the_file_is_gone_or_has_changed(begun: bool, spec: ModelSpec, tmp_path: Path) -> None:
    file = saved(tmp_path / "boat.png")
    plan, _ = planned(tmp_path, image=str(file))
    store = JobStore(None)
    request = GenerationRequest.from_mapping({**SMALL, "image": str(file)})
    record = store.add(request, plan, instance="here").replace(begun=begun)
    assert plan.image is not None and record.request["image"] == f"sha256:{plan.image.digest}/boat.png"
    saved(file, 100, 50)
    planner = JobReplanner(tmp_path / "weights", no_engines(tmp_path), None)
    file.unlink()
    found, again = planner.plan(record, machine())
    assert found.image == again.image == plan.image
    assert again.request_json() == plan.request_json()


def test_a_begun_job_keeps_its_plan_in_a_cache_that_was_moved(spec: ModelSpec, tmp_path: Path) -> None:
    cache, moved = tmp_path / "cache", tmp_path / "moved"
    cache.mkdir()
    plan, _ = planned(cache, image=str(saved(tmp_path / "boat.png")))
    request = GenerationRequest.from_mapping({**SMALL, "image": str(tmp_path / "boat.png")})
    record = JobStore(None).add(request, plan.replace(free_bytes=12_345), instance="here").replace(begun=True)
    cache.rename(moved)
    _, again = JobReplanner(moved / "weights", no_engines(moved), None).plan(record, machine())
    assert again.free_bytes == 12_345
    assert again.image is not None and again.image.path.parent == images_dir(moved)


def test_a_clip_is_identified_by_what_its_images_show(spec: ModelSpec, tmp_path: Path) -> None:
    def use(digest: str, name: str = "boat.png") -> ImageUse:
        return ImageUse(name=name, path=tmp_path / name / digest, digest=digest, width=64, height=32)

    plan, _ = planned(tmp_path, image=str(saved(tmp_path / "boat.png")))
    first = plan.replace(image=use("a" * 64))
    same = (plan.replace(image=use("a" * 64, "other.jpg")),)
    other = (
        plan.replace(image=None),
        plan.replace(image=use("b" * 64)),
        first.replace(last_image=use("a" * 64)),
        first.replace(last_image=use("b" * 64)),
        first.replace(image_fit="fit"),
        first.replace(image_position=0.0),
        plan.replace(image=None, last_image=use("a" * 64)),
        first.replace(keyframes=(use("a" * 64),), keyframe_seconds=(1.0,)),
        first.replace(keyframes=(use("b" * 64),), keyframe_seconds=(1.0,)),
        first.replace(keyframes=(use("b" * 64),), keyframe_seconds=(2.0,)),
    )
    names = [identity({}, one) for one in (first, *same, *other)]
    assert names[0] == names[1] and len(set(names)) == 1 + len(other)


def test_how_images_fit_is_no_part_of_a_clip_without_images() -> None:
    plan = tiny_plan(read_spec(EMBEDDED / "diorama", "diorama"), Path("x.mp4"))
    assert identity({}, plan) == identity({}, plan.replace(image_fit="fit", image_position=0.0))


def test_the_vaes_encoder_belongs_to_a_checkpoint_of_an_image_only(tiny: Tiny) -> None:
    spec = tiny("wan2.1")
    programs = {**spec.programs, "vae_encoder": ("vae_encoder",)}
    able = replace(spec, programs=programs)
    assert stamps(able) == stamps(spec)
    use = ImageUse(name="boat.png", path=Path("boat.png"), digest="a" * 64, width=64, height=32)
    of_image = stamps(replace(able, image=use))
    assert of_image.keys() - stamps(spec).keys() == {"vae_encoder"}
    assert [name for name, *_ in of_image["vae_encoder"]] == ["config.json", "diffusion_pytorch_model.safetensors"]
