"""Images of requests: found, checked, copied under their digest, and refused with one line and a remedy."""

import errno
import hashlib
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from runtime.core import files
from runtime.core.errors import InvalidRequestError, OutputError
from runtime.core.images import ImageUse, parse_reference, referenced
from runtime.core.request import GenerationRequest
from runtime.models import images
from runtime.models.catalogue import find
from runtime.models.images import find_image, images_dir, open_image, with_images
from runtime.models.spec import ModelSpec
from tests.full_disk import fill
from tests.image_files import encoded, kept, picture, saved, taking_images

Tiny = Callable[[str], ModelSpec]
UNKNOWN_DIGEST = "0123456789abcdef" * 4


def request(**values: Any) -> GenerationRequest:
    return GenerationRequest.from_mapping({"prompt": "a boat", **values})


@pytest.fixture
def text(tmp_path: Path) -> ModelSpec:
    return replace(find("diorama", tmp_path), image_input=None)


def able(
    spec: ModelSpec, *, required: bool = False, last: Literal["none", "optional", "required", "keyframe"] = "optional"
) -> ModelSpec:
    return taking_images(spec, required=required, last=last)


def found(spec: ModelSpec, cache: Path, **values: Any) -> ModelSpec:
    return with_images(spec, request(**values), cache / "weights", cache)


def test_an_image_is_checked_and_copied(text: ModelSpec, tmp_path: Path) -> None:
    file = saved(tmp_path / "boat.png")
    spec = found(able(text), tmp_path, image=str(file), last_image=str(saved(tmp_path / "end.png", 32, 100)))
    assert spec.image is not None and spec.last_image is not None
    assert (spec.image.name, spec.image.width, spec.image.height) == ("boat.png", 64, 48)
    assert (spec.last_image.name, spec.last_image.width, spec.last_image.height) == ("end.png", 32, 100)
    assert spec.image.digest == hashlib.sha256(file.read_bytes()).hexdigest()
    assert kept(spec.image, tmp_path) and spec.image.path.read_bytes() == file.read_bytes()
    assert [path.name for path in images_dir(tmp_path).iterdir() if path.suffix] == []
    assert list(open_image(spec.image).get_flattened_data()) == list(picture().get_flattened_data())


def test_a_keyframe_needs_no_first_image_and_follows_from_no_loop(text: ModelSpec, tmp_path: Path) -> None:
    file = str(saved(tmp_path / "boat.png"))
    alone = found(able(text, last="keyframe"), tmp_path, last_image=file)
    assert alone.keyframe_count == 1 and [use.name for use in alone.images] == ["boat.png"] and alone.image is None
    loops = [found(able(text, last=last), tmp_path, image=file, loop="on") for last in ("optional", "keyframe")]
    assert [(spec.last_image is None, spec.keyframe_count) for spec in loops] == [(False, 0), (True, 0)]
    times = {"keyframes": [file, file], "keyframe_seconds": [0.5, 1]}
    between = found(able(text, last="keyframe"), tmp_path, image=file, last_image=file, **times)
    assert (len(between.keyframes), len(between.images), between.keyframe_count) == (2, 4, 3)


def test_the_copy_is_used_after_the_file_has_changed_or_is_gone(text: ModelSpec, tmp_path: Path) -> None:
    file = saved(tmp_path / "boat.png")
    first = found(able(text), tmp_path, image=str(file)).image
    assert first is not None
    saved(file, 100, 20)
    assert found(able(text), tmp_path, image=first.reference).image == first
    file.unlink()
    assert found(able(text), tmp_path, image=first.reference).image == first
    nameless = found(able(text), tmp_path, image=f"sha256:{first.digest}").image
    assert nameless is not None and nameless.digest == first.digest


def test_a_path_is_relative_to_the_current_folder(
    text: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "boat.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("boat.png", "./boat.png", "~/boat.png"):
        use = find_image(name, "image", tmp_path / "cache", keep=False)
        assert (use.name, use.path) == ("boat.png", Path.cwd() / name.removeprefix("~/"))
        assert use.path.is_absolute()


def test_nothing_is_copied_for_a_plan(text: ModelSpec, tmp_path: Path) -> None:
    file = saved(tmp_path / "boat.png")
    spec = with_images(able(text), request(image=str(file)), tmp_path, tmp_path, keep=False)
    assert spec.image is not None and spec.image.path == file
    assert not images_dir(tmp_path).exists()
    # A request that is stored without a copy names the file.
    assert spec.image.reference == str(file)


@pytest.mark.parametrize(
    ("values", "spec", "field", "code"),
    [
        ({"image": "boat.png"}, None, "image", "image.no_model"),
        ({"last_image": "boat.png"}, None, "last_image", "image.no_model"),
        ({}, {"required": True}, "image", "image.required"),
        ({"last_image": "boat.png"}, {}, "image", "image.only_last"),
        ({"last_image": "boat.png"}, {"required": True}, "image", "image.only_last"),
        ({"image": "boat.png", "last_image": "boat.png"}, {"last": "none"}, "last_image", "image.model_without_last"),
        ({"image": "boat.png"}, {"last": "required"}, "last_image", "image.last_required"),
        ({"keyframes": ["boat.png"], "keyframe_seconds": 1}, {}, "keyframes", "image.model_without_keyframes"),
        ({"keyframes": ["boat.png"], "keyframe_seconds": 1}, None, "keyframes", "image.model_without_keyframes"),
        ({"keyframes": ["boat.png"]}, {"last": "keyframe"}, "keyframe_seconds", "image.keyframe_times"),
        ({"keyframe_seconds": [1, 2]}, {"last": "keyframe"}, "keyframe_seconds", "image.keyframe_times"),
        ({"keyframes": ["none"], "keyframe_seconds": 1}, {"last": "keyframe"}, "keyframes", "image.unreadable"),
        ({"image": "missing.png"}, {}, "image", "image.unreadable"),
        ({"image": "boat.png", "last_image": "folder"}, {}, "last_image", "image.not_a_file"),
        ({"image": "text.png"}, {}, "image", "image.format_unknown"),
        ({"image": f"sha256:{UNKNOWN_DIGEST}"}, {}, "image", "image.copy_missing"),
        ({"image": f"sha256:{UNKNOWN_DIGEST}/boat.png"}, {}, "image", "image.copy_missing"),
    ],
)
def test_refusals(
    values: dict[str, str],
    spec: dict[str, Any] | None,
    field: str,
    code: str,
    text: ModelSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(images, "image_models", lambda _: [])
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "boat.png")
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.png").write_text("a boat")
    with pytest.raises(InvalidRequestError) as refused:
        found(text if spec is None else able(text, **spec), tmp_path / "cache", **values)
    assert (refused.value.field, refused.value.code) == (field, code)
    assert refused.value.what and refused.value.remedy and "\n" not in refused.value.what + refused.value.remedy
    assert field == "last_image" or not images_dir(tmp_path / "cache").exists()


def test_models_that_can_are_named(text: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [able(replace(text, name="one")), text, able(replace(text, name="two"))]
    monkeypatch.setattr(images, "add_usable", lambda *_: {})
    monkeypatch.setattr(images, "not_downloaded", lambda _: specs)
    with pytest.raises(InvalidRequestError) as refused:
        found(text, tmp_path, image="boat.png")
    assert refused.value.code == "image.model_without" and refused.value.data["models"] == ["one", "two"]
    assert text.title in refused.value.what and "one" in refused.value.remedy


def test_engines_are_built_without_an_image(text: ModelSpec, tmp_path: Path) -> None:
    spec = with_images(able(text, required=True), request(), tmp_path, tmp_path, needs_image=False)
    assert spec.image is None


def test_fit_and_position_without_an_image_are_ignored(text: ModelSpec, tmp_path: Path) -> None:
    assert found(text, tmp_path, image_fit="fit", image_position=0) == text


def test_a_damaged_copy_is_written_again_or_missing(text: ModelSpec, tmp_path: Path) -> None:
    file = saved(tmp_path / "boat.png")
    use = found(able(text), tmp_path, image=str(file)).image
    assert use is not None
    for damaged in (b"", use.path.read_bytes()[:-1], encoded(picture(20, 20))):
        use.path.write_bytes(damaged)
        with pytest.raises(InvalidRequestError) as refused:
            found(able(text), tmp_path, image=use.reference)
        assert refused.value.code == "image.copy_missing"
        with pytest.raises(InvalidRequestError) as changed:
            open_image(use)
        assert changed.value.code == "image.changed"
        assert found(able(text), tmp_path, image=str(file)).image == use
        assert use.path.read_bytes() == file.read_bytes()
    use.path.unlink()
    with pytest.raises(InvalidRequestError) as gone:
        open_image(use)
    assert gone.value.code == "image.gone"


def test_a_copy_that_is_used_again_is_new(text: ModelSpec, tmp_path: Path) -> None:
    file = saved(tmp_path / "boat.png")
    use = found(able(text), tmp_path, image=str(file)).image
    assert use is not None
    for again in (str(file), use.reference):
        os.utime(use.path, (0, 0))
        found(able(text), tmp_path, image=again)
        assert use.path.stat().st_mtime > 1e9


def copies(cache: Path, file: Path) -> str:
    return find_image(str(file), "image", cache).reference


def test_processes_copy_one_image_at_once(tmp_path: Path) -> None:
    file = tmp_path / "boat.png"
    file.write_bytes(encoded(picture(900, 900)))
    with multiprocessing.get_context("fork").Pool(4) as pool:
        names = set(pool.starmap(copies, [(tmp_path, file)] * 16))
    (name,) = names
    reference = parse_reference(name)
    assert reference is not None and [path.name for path in images_dir(tmp_path).iterdir()] == [reference.digest]


def test_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    file = tmp_path / "boat.png"
    file.write_bytes(encoded(picture(900, 900)) + bytes(100_000))
    images_dir(small_disk).mkdir()
    filler = fill(small_disk)
    with pytest.raises(OutputError) as refused:
        find_image(str(file), "image", small_disk)
    assert refused.value.code == "image.disk_full" and refused.value.remedy
    assert list(images_dir(small_disk).iterdir()) == []
    filler.unlink()
    assert kept(find_image(str(file), "image", small_disk), small_disk)


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = saved(tmp_path / "boat.png")
    (tmp_path / "cache").write_text("a file in the folder's place")
    assert find_image(str(file), "image", tmp_path / "cache").path == file

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(images, "replace_file", read_only)
    use = find_image(str(file), "image", tmp_path / "other")
    assert (use.path, use.reference) == (file, str(file))
    assert files.replace_file is not read_only


def test_names_of_copies() -> None:
    use = ImageUse(name="my boat.png", path=Path("cache") / UNKNOWN_DIGEST, digest=UNKNOWN_DIGEST, width=1, height=1)
    assert use.reference == f"sha256:{UNKNOWN_DIGEST}/my boat.png"
    assert parse_reference(use.reference) == (UNKNOWN_DIGEST, "my boat.png")
    assert parse_reference(f"sha256:{UNKNOWN_DIGEST}") == (UNKNOWN_DIGEST, UNKNOWN_DIGEST[:8])
    assert parse_reference("boat.png") is None and parse_reference("/sha256:x") is None
    other = UNKNOWN_DIGEST[::-1]
    assert referenced(f'{{"image": "{use.reference}", "last_image": "sha256:{other}"}}') == {UNKNOWN_DIGEST, other}
    assert "path" not in use.summary() and use.summary()["name"] == "my boat.png"


def test_a_name_with_another_systems_separator_can_be_read_back(tmp_path: Path) -> None:
    use = find_image(str(saved(tmp_path / "a\\b.png")), "image", tmp_path)
    assert find_image(use.reference, "image", tmp_path) == use
