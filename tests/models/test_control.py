"""What steers a video: found and copied for models with a control branch, refused by name for others."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import ExifTags, Image

from runtime.core.errors import InvalidRequestError
from runtime.core.images import ImageUse, InputFile, VideoUse, referenced
from runtime.core.request import GenerationRequest
from runtime.models.catalogue import find, look_up
from runtime.models.images import images_dir
from runtime.models.requested import with_inputs
from runtime.models.spec import ModelSpec
from runtime.planner.resolve import PlanningContext, resolve
from tests.hostile_files import HOSTILE
from tests.image_files import bomb, encoded, picture, saved
from tests.plans import machine
from tests.video.test_reader import H264, make

Tiny = Callable[[str], ModelSpec]


def request(**values: Any) -> GenerationRequest:
    return GenerationRequest.from_mapping({"prompt": "a boat", **values})


def test_files_are_copied_under_their_digests(tiny: Tiny, tmp_path: Path) -> None:
    clip = make(tmp_path / "a.mp4", *H264, inputs=("-f", "lavfi", "-i", "testsrc=size=64x32:rate=30:duration=1"))
    image = saved(tmp_path / "b.png", 50, 40)
    asked = request(control=str(clip), mask=str(clip), references=[str(image)] * 2, fps=8)
    spec = with_inputs(tiny("wan2.1-vace"), asked, tmp_path, tmp_path)
    assert spec.control is not None and spec.control == spec.mask
    assert (spec.control.fps, abs(spec.control.frames - 8) <= 1, spec.control.name) == (8, True, "a.mp4")
    assert [(use.name, use.width, use.height) for use in spec.references] == [("b.png", 50, 40)] * 2
    assert [use.digest for use in spec.inputs] == [spec.control.digest] * 2 + [spec.references[0].digest] * 2
    assert {path.name for path in images_dir(tmp_path).iterdir()} >= {use.digest for use in spec.inputs}
    named = request(control=spec.control.reference, references=[use.reference for use in spec.references], fps=8)
    clip.unlink()
    image.unlink()
    assert with_inputs(tiny("wan2.1-vace"), named, tmp_path, tmp_path).control == spec.control
    assert referenced(str(named.to_json())) == {spec.control.digest, spec.references[0].digest}


def test_a_part_of_a_control_video_is_counted_from_its_start(tiny: Tiny, tmp_path: Path) -> None:
    clip = make(tmp_path / "a.mp4", *H264, inputs=("-f", "lavfi", "-i", "testsrc=size=64x32:rate=16:duration=2"))
    asked = request(control=str(clip), mask=str(clip), fps=8, frames=17, control_start=1.25)
    spec = with_inputs(tiny("wan2.1-vace"), asked, tmp_path, tmp_path)
    assert spec.control is not None and (spec.control.frames, spec.control.seconds) == (6, 2.0)
    assert spec.mask == spec.control
    with pytest.raises(InvalidRequestError) as refused:
        with_inputs(tiny("wan2.1-vace"), asked.replace(control_start=2.5), tmp_path, tmp_path)
    assert (refused.value.field, refused.value.code) == ("control_start", "control.starts_after_end")
    assert (refused.value.data["file"], refused.value.data["start"]) == ("a.mp4", 2.5)


def test_a_mask_is_a_video_or_an_image(tiny: Tiny, tmp_path: Path) -> None:
    clip = make(tmp_path / "a.mp4", *H264, inputs=("-f", "lavfi", "-i", "testsrc=size=64x32:rate=8:duration=1"))
    spec, control = tiny("wan2.1-vace"), str(clip)

    def mask_of(file: str) -> InputFile:
        found = with_inputs(spec, request(control=control, mask=file, fps=8), tmp_path, tmp_path).mask
        assert isinstance(found, InputFile)
        return found

    animated = make(tmp_path / "a.gif", inputs=("-f", "lavfi", "-i", "testsrc=size=64x32:rate=8:duration=1"))
    # The content counts, not the name.
    misnamed = saved(tmp_path / "b.mp4", 50, 40)
    cmyk = tmp_path / "c.jpg"
    cmyk.write_bytes(encoded(picture().convert("CMYK"), "JPEG"))
    turned, exif = tmp_path / "d.jpg", Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    turned.write_bytes(encoded(picture(80, 40), "JPEG", exif=exif))
    kinds = {path.name: mask_of(str(path)) for path in (clip, animated, misnamed, cmyk, turned)}
    assert [type(use) for use in kinds.values()] == [VideoUse, VideoUse, ImageUse, ImageUse, ImageUse]
    assert (kinds["d.jpg"].width, kinds["d.jpg"].height) == (40, 80)
    for use in kinds.values():
        assert use.path == images_dir(tmp_path) / use.digest and mask_of(use.reference) == use
    for content, code in (
        (b"\0\0\0\x18ftypheic" + bytes(100), "image.format_heic"),
        (encoded(picture(640, 480))[:1500], "image.damaged"),
        (encoded(picture(900, 20)), "image.too_long"),
        (bomb(10_000), "image.too_large"),
        (b"", "source.empty"),
        (b"a boat", "source.no_video"),
    ):
        (tmp_path / "x.png").write_bytes(content)
        with pytest.raises(InvalidRequestError) as refused:
            mask_of(str(tmp_path / "x.png"))
        assert (refused.value.field, refused.value.code) == ("mask", code)


def test_models_without_a_control_branch_refuse_before_a_file_is_read(tiny: Tiny, tmp_path: Path) -> None:
    for field, value in (
        ("control", "none.mp4"),
        ("mask", "none.mp4"),
        ("references", ["none.png"]),
        ("control_scale", 0.5),
        ("preprocess", "gray"),
        ("outpaint", 10),
        ("control_start", 1.5),
    ):
        for spec in (find("diorama", tmp_path), tiny("wan2.1"), look_up("ltx-2", tmp_path)):
            with pytest.raises(InvalidRequestError) as refused:
                with_inputs(spec, request(**{field: value}), tmp_path, tmp_path)
            assert (refused.value.field, refused.value.code) == (field, "control.model_without")
            assert {"wan2.1-vace-1.3b", "wan2.1-vace-14b"} <= set(refused.value.data["models"])


def test_files_that_cannot_be_used_are_refused_in_one_line(
    tiny: Tiny, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    clip = make(tmp_path / "a.mp4", *H264, inputs=("-f", "lavfi", "-i", "testsrc=size=64x32:rate=8:duration=1"))
    codes = dict.fromkeys(("fifo", "device", "folder"), "source.not_a_file") | {
        "deep": "source.no_video",
        "large": "source.file_too_large",
    }
    for name, put in HOSTILE.items():
        put(tmp_path / name)
    (tmp_path / "cut").write_bytes(clip.read_bytes()[:900])
    make(tmp_path / "sound.m4a", "-vn", inputs=("-f", "lavfi", "-i", "sine=duration=1"))
    make(tmp_path / "huge.mkv", "-vf", "scale=8000:6000", "-c:v", "mjpeg", "-frames:v", "1", inputs=("-i", str(clip)))
    make(tmp_path / "none.mkv", "-c:v", "ffv1", "-frames:v", "0", inputs=("-i", str(clip)))
    codes |= {"cut": "source.no_video", "sound.m4a": "source.only_sound", "huge.mkv": "source.too_large"}
    codes |= {"none.mkv": "source.no_video", "missing": "source.unreadable"}
    cache = tmp_path / "cache"
    for name, code in codes.items():
        for field in ("control", "mask", "join"):
            with subtests.test(f"{field} {name}"):
                first = {"mask": {"control": str(clip)}, "join": {"extend": str(clip)}}.get(field, {})
                with pytest.raises(InvalidRequestError) as refused:
                    with_inputs(tiny("wan2.1-vace"), request(**first, **{field: str(tmp_path / name)}), tmp_path, cache)
                assert (refused.value.field, refused.value.code) == (field, code)
                assert refused.value.remedy and "\n" not in refused.value.what + refused.value.remedy


def test_only_steered_models_start_from_several_frames(tiny: Tiny, tmp_path: Path) -> None:
    clip = make(tmp_path / "a.mp4", *H264, inputs=("-f", "lavfi", "-i", "testsrc=size=64x32:rate=8:duration=1"))
    for values, field in (({"extend_frames": 5}, "extend_frames"), ({"join": "none.mp4", "extend_frames": 5}, "join")):
        with pytest.raises(InvalidRequestError) as refused:
            with_inputs(find("diorama", tmp_path), request(extend="none.mp4", **values), tmp_path, tmp_path)
        assert (refused.value.field, refused.value.code) == (field, "source.one_frame")
        assert "wan2.1-vace-14b" in refused.value.data["models"]
    assert with_inputs(find("diorama", tmp_path), request(extend=str(clip)), tmp_path, tmp_path).extend_frames == 1
    steered = tiny("wan2.1-vace")
    with pytest.raises(InvalidRequestError) as refused:
        with_inputs(steered, request(extend=str(clip), extend_frames=9), tmp_path, tmp_path)
    assert (refused.value.field, refused.value.code) == ("extend_frames", "source.extend_frames")
    assert refused.value.data["frames"] == 8
    extended = with_inputs(steered, request(extend=str(clip), join=str(clip)), tmp_path, tmp_path)
    assert (extended.extend_frames, extended.given_frames) == (8, (8, 8))
    for frames, able in ((13, 17), (17, None)):
        asked = request(extend=str(clip), join=str(clip), frames=frames)
        context = PlanningContext(machine(), tmp_path / "x.mp4")
        if able is None:
            assert resolve(asked, extended, context).frames == frames
            continue
        with pytest.raises(InvalidRequestError) as refused:
            resolve(asked, extended, context)
        assert (refused.value.code, refused.value.data["able"]) == ("planner.no_new_frames", able)


@pytest.mark.parametrize(
    ("values", "field", "code"),
    [
        ({"mask": "none.mp4"}, "mask", "control.mask_alone"),
        ({"preprocess": "edges"}, "preprocess", "control.preprocess_alone"),
        ({"control_start": 0.5}, "control_start", "control.start_alone"),
        ({"control_scale": [1, 2, 3]}, "control_scale", "control.scales"),
        ({"control": "none.mp4"}, "control", "source.unreadable"),
        ({"references": ["none.png"]}, "references", "image.unreadable"),
        ({"control": f"sha256:{'0' * 64}/a.mp4"}, "control", "source.copy_missing"),
        ({"image": "none.png"}, "image", "image.unreadable"),
        ({"last_image": "none.png"}, "last_image", "image.unreadable"),
        ({"outpaint": 10}, "outpaint", "control.outpaint_alone"),
        ({"control": "none.mp4", "outpaint": 10, "preprocess": "edges"}, "preprocess", "control.preprocess_kept"),
        ({"mask": "box:0,0,50,50"}, "mask", "control.mask_alone"),
        ({"join": "none.mp4"}, "join", "source.join_alone"),
        ({"extend_frames": 5}, "extend_frames", "source.join_alone"),
        ({"extend": "none.mp4", "join": "none.mp4", "last_image": "none.png"}, "join", "source.two_ends"),
        ({"control": "none.mp4", "video": "none.mp4"}, "video", "source.model_without"),
        ({"video": "none.mp4"}, "video", "source.model_without"),
        ({"extend": "none.mp4"}, "extend", "source.unreadable"),
    ],
)
def test_what_does_not_fit_is_refused(
    values: dict[str, Any], field: str, code: str, tiny: Tiny, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        with_inputs(tiny("wan2.1-vace"), request(**values), tmp_path, tmp_path)
    assert (refused.value.field, refused.value.code) == (field, code)
    assert "\n" not in refused.value.what and refused.value.remedy


def test_the_text_of_a_control_is_read_as_a_list_is() -> None:
    for several in ("1, 0.5", [1, 0.5], (1.0, 0.5)):
        assert request(control_scale=several).control_scale == (1.0, 0.5)
    for single in ("0.5", 0.5, [0.5]):
        assert request(control_scale=single).control_scale == (0.5,)
