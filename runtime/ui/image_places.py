"""The places for images in Make: their HTML, and the answers to what their script asks for.

The script uploads images to the route of `server.image_uploads`. It asks for the rest here: for a frame of a video, an
image that ships with Tandem, a small picture of an image that the form names, and why a model takes none.
"""

import base64
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from PIL import Image

from runtime.core.errors import InvalidRequestError, TandemError
from runtime.core.events import VideoSaved
from runtime.core.facts import Fact
from runtime.core.images import PREFIX, ImageUse, InputFile, VideoUse, field_of
from runtime.core.request import CONTROL_FIELDS, CONTROL_OPTIONS, FIELDS, MAX_CONTROL_START
from runtime.core.request_fields import MaskFile, VideoFile
from runtime.core.settings import ROOT, Settings
from runtime.machine.probe import Machine
from runtime.models import extended
from runtime.models.catalogue import EMBEDDED
from runtime.models.images import all_models, find_image, open_image
from runtime.models.spec import ModelSpec
from runtime.models.videos import FIELD, find_picture, find_video, open_picture
from runtime.planner.requirements import fit
from runtime.queue.job_planning import continuation
from runtime.queue.views import Job
from runtime.server.job_files import find_output
from runtime.ui.formatting import page_text, paragraph, render
from runtime.ui.panels import unknown_action
from runtime.video.image_messages import MAX_FILE_BYTES, MEDIA_TYPES, SUFFIXES
from runtime.video.images import thumbnail
from runtime.video.mp4 import read_frame

EXAMPLES = ROOT / "examples"
# Of files, for file dialogs; browsers do not know MKV as a video.
_VIDEOS = "video/*,.mkv"
_SIDE = 512
# Of a frame that a mask is drawn on.
_LARGE_SIDE = 1024
_QUALITY = 85


def places_html(spec: ModelSpec, models: Mapping[str, ModelSpec], *, videos: bool = True) -> str:
    """Return the places that a model has, for images and videos.

    Args:
        models: what the page offers, by name.
        videos: whether the page takes videos.
    """
    inputs = spec.image_input
    places = []
    if inputs is not None:
        title = "First image" if inputs.last != "none" else FIELDS["image"].label
        places.append(("image", title if spec.starts_from_images else "Character", inputs.required))
        if spec.takes_keyframes:
            places.append(("keyframes", FIELDS["keyframes"].label, False))
        if inputs.last != "none":
            places.append(("last_image", FIELDS["last_image"].label, inputs.last == "required"))
        if videos and spec.starts_from_images:
            places.append((extended.FIELD, FIELDS[extended.FIELD].label, False))
            if spec.takes_given_frames:
                places.append(("join", FIELDS["join"].label, False))
    takes_video = videos and spec.video_input is not None
    if takes_video:
        places.append((FIELD, FIELDS[FIELD].label, False))
    if spec.control_input is not None:
        steering = [name for name in CONTROL_FIELDS if name in spec.control_input.fields]
        steering = [name for name in steering if videos or not isinstance(FIELDS[name], VideoFile)]
        places += [(name, FIELDS[name].label, name in spec.control_input.required) for name in steering]
    return render(
        "images.html",
        model=spec.name,
        places=places,
        able=[[model.name, model.title] for model in models.values() if model.starts_from_images],
        most=MAX_FILE_BYTES,
        accepted={field: _accepted(field) for field, _, _ in places},
        takes_video={name for name, declared in FIELDS.items() if isinstance(declared, VideoFile)},
        strength=FIELDS["strength"],
        keyframe_seconds=FIELDS["keyframe_seconds"] if spec.takes_keyframes else None,
        steering={
            name: FIELDS[name]
            for name in CONTROL_OPTIONS
            if spec.control_input is not None and name in spec.control_input.fields
        },
        extend_frames=FIELDS["extend_frames"] if spec.takes_given_frames else None,
        steering_videos=videos,
        # On control frames, which is what the page shows of them.
        draws=spec.control_input is not None and spec.control_input.masked == "control",
        guidance={name: guidance(spec, from_image=image) for name, image in (("text", False), ("image", True))},
        examples=examples() if inputs is not None and spec.directory.parent == EMBEDDED else [],
    )


def _accepted(field: str) -> str:
    """Return the media types and suffixes of the files of a place."""
    videos = [_VIDEOS] if isinstance(FIELDS[field], VideoFile) else []
    images = [*MEDIA_TYPES, *SUFFIXES] if not videos or isinstance(FIELDS[field], MaskFile) else []
    return ",".join((*videos, *images))


def guidance(spec: ModelSpec, *, from_image: bool) -> dict[str, float]:
    """Return the values of the form's controls of guidance."""
    first, second = spec.defaults.guidance(from_image=from_image)
    return {"guidance_scale": first, "guidance_scale_2": first if second is None else second}


@cache
def examples() -> list[tuple[str, str]]:
    """Return the names of the images that ship with Tandem, each with a small picture."""
    return [(path.stem, _address(thumbnail(_own(path.read_bytes())))) for path in sorted(EXAMPLES.glob("*.png"))]


class ImageAnswers:
    """The answers of one page.

    Args:
        keep: checks and keeps an image: its file's content and name, and the visitor's name or "" for the owner.
        models: what the page offers, by name.
        machine: returns this machine.
        pictures: whether the page is sent pictures of all images that it names: a visitor may name another's.
    """

    def __init__(
        self,
        settings: Settings,
        keep: Callable[[bytes, str, str], ImageUse],
        models: Mapping[str, ModelSpec],
        machine: Callable[[], Machine],
        *,
        pictures: bool,
    ) -> None:
        self._settings = settings
        self._keep = keep
        self._models = models
        self._machine = machine
        self._pictures = pictures

    def answer(self, question: Mapping[str, Any], job: Job | None, visitor: str) -> dict[str, Any]:
        """Return what the script asks for.

        Args:
            job: whose video is meant, if it is the sender's.

        Raises:
            TandemError: if there is no answer.
        """
        match question:
            case {"what": "frame", "seconds": int() | float() | None as seconds} if job is not None:
                return self._frame(job, seconds, visitor)
            case {"what": "extend"} if job is not None and self._pictures:
                return self._continuation(job)
            case {"what": "example", "name": str(name)}:
                return self._example(name, visitor)
            # A page cannot open files of its choice.
            case {"what": "picture", "image": str(image)} if self._pictures and image.startswith(PREFIX):
                use = find_image(image, "image", self._settings.cache_dir, keep=False)
                return {"picture": picture(open_image(use)), "width": use.width, "height": use.height}
            case {"what": "picture", "video": str(video)} if self._pictures and video.startswith(PREFIX):
                clip = find_picture(video, self._settings.cache_dir, 1, 1, field=FIELD, keep=False)
                seconds = clip.seconds if isinstance(clip, VideoUse) else None
                size = {"width": clip.width, "height": clip.height, "seconds": seconds}
                return {"picture": picture(open_picture(clip)), **size}
            case {"what": "moment", "video": str(video), "seconds": int() | float() as seconds} if (
                self._pictures and video.startswith(PREFIX) and 0 <= seconds <= MAX_CONTROL_START
            ):
                clip = find_video(video, self._settings.cache_dir, 1, 1, keep=False)
                return {"picture": picture(open_picture(clip, seconds), _LARGE_SIDE)}
            case {"what": "picture", "extend": str(video)} if self._pictures and video.startswith(PREFIX):
                return self._extended(video)
            case {"what": "refusal", "model": str(model), "kind": "image" | "video" as kind}:
                return self._refusal(model, kind)
        raise unknown_action()

    def _continuation(self, job: Job) -> dict[str, Any]:
        """Return the settings that make a job's video longer, with a picture of its last frame."""
        saved = job.progress.end
        if not isinstance(saved, VideoSaved) or find_output(str(saved.video), self._settings.outputs_dir) is None:
            raise InvalidRequestError(extended.FIELD, "ui.video_missing")
        video = saved.plain or saved.video
        answer = self._extended(str(video))
        settings = continuation(job.plan.request, video, {"extend": answer["extend"]})
        return answer | {"settings": settings.to_json()}

    def _extended(self, video: str) -> dict[str, Any]:
        use, last = extended.continued(video, self._settings.cache_dir)
        size = {"width": use.width, "height": use.height, "seconds": use.frames / use.fps}
        return {"extend": use.reference, "picture": picture(open_image(last)), **size}

    def _refusal(self, model: str, kind: str) -> dict[str, Any]:
        """Return why a model takes no image or no video, and the first model that takes one and runs here.

        Args:
            kind: "image" or "video".
        """
        able = [spec for spec in all_models(self._settings.weights_dir) if _place_of(spec, kind)]
        refused = "image" if kind == "image" else "source"
        code = f"{refused}.model_without" if able else f"{refused}.no_model"
        answer: dict[str, Any] = {
            "error": paragraph(Fact(code, {"model": model, "models": [spec.title for spec in able]}))
        }
        machine = self._machine()
        # Those on the page in its order, then, if it has the panel Models, those to download.
        downloads = [spec for spec in able if self._pictures and spec.name not in self._models]
        for spec in (*self._models.values(), *downloads):
            place = _place_of(spec, kind)
            if place and fit(spec, machine).runs:
                installed = spec.name in self._models
                offer = {"name": spec.name, "title": spec.title, "installed": installed, "place": place}
                return answer | {"offer": offer}
        return answer

    def _frame(self, job: Job, seconds: float | None, visitor: str) -> dict[str, Any]:
        saved = job.progress.end
        video = None
        if isinstance(saved, VideoSaved):
            video = find_output(str(saved.video), self._settings.outputs_dir)
        if video is None or not isinstance(saved, VideoSaved):
            raise InvalidRequestError("image", "ui.video_missing")
        last, fps = saved.frames - 1, saved.fps
        # A player that is paused can be at the very end of the frame before.
        frame = last if seconds is None else min(max(int(seconds * fps + 0.01), 0), last)
        data = read_frame(video, frame)
        reply = self._kept(data, f"{video.stem[:80]}-frame-{frame + 1}.png", visitor)
        return reply | {"model": saved.request["model"]}

    def _example(self, name: str, visitor: str) -> dict[str, Any]:
        if name not in dict(examples()):
            raise unknown_action()
        path = EXAMPLES / f"{name}.png"
        return self._kept(path.read_bytes(), path.name, visitor)

    def _kept(self, data: bytes, name: str, visitor: str) -> dict[str, Any]:
        use = self._keep(data, name, visitor)
        return {"image": use.reference, "width": use.width, "height": use.height, "picture": picture(_own(data))}


def _place_of(spec: ModelSpec, kind: str) -> str:
    """Return the place of a model where an image or a video goes that was dropped for another one; "" if none does.

    Of a video, it is not one that the model needs with others.
    """
    if kind == "image":
        return "image" if spec.starts_from_images else ""
    if spec.video_input is not None:
        return FIELD
    return "control" if spec.control_input is not None and not spec.control_input.required else ""


def _own(data: bytes) -> Image.Image:
    """Decode a PNG of Tandem's own."""
    with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
        return image.convert("RGB")


def error_answer(error: TandemError, redact: Callable[[str], str]) -> dict[str, Any]:
    """Return the answer for what failed, as one line."""
    return {"error": redact(" ".join(page_text(error.fact)).strip())}


def picture(image: Image.Image, side: int = _SIDE) -> str:
    """Return an RGB image as a data address, at most `side` pixels wide and high."""
    small = image.copy()
    small.thumbnail((side, side), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    small.save(file, "WEBP", quality=_QUALITY)
    return _address(file.getvalue())


@dataclass(frozen=True)
class UsedImage:
    """An image or a video that a job uses: the field's label, the file's name, and a thumbnail, if its copy exists."""

    label: str
    name: str
    picture: str


def used_images(inputs: Mapping[str, InputFile], *, pictures: bool = True) -> list[UsedImage]:
    """Return the images and the video of a job.

    Args:
        inputs: see `ResolvedRequest.inputs`.
        pictures: whether they are shown.
    """
    return [
        UsedImage(FIELDS[field_of(key)].label, use.name, _small_picture(use, use.path.exists()) if pictures else "")
        for key, use in inputs.items()
    ]


@lru_cache(maxsize=128)
def _small_picture(use: InputFile, exists: bool) -> str:
    try:
        return _address(thumbnail(open_picture(use))) if exists else ""
    except TandemError:
        return ""


def _address(webp: bytes) -> str:
    return f"data:image/webp;base64,{base64.b64encode(webp).decode()}"
