"""What a model will see of a control video and of given frames, while the form is filled in: as a stream of pictures.

The frames are read on one thread for all pages. It ends reading when the page leaves, or asks for other frames.
"""

import asyncio
import hashlib
import json
import math
from collections.abc import AsyncIterator, Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from PIL import Image
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from runtime.core.cancel import Cancel, CancelledError
from runtime.core.errors import TandemError
from runtime.core.facts import Fact
from runtime.core.plan import ExecutionPlan
from runtime.core.request import BY_MODEL
from runtime.models.control_frames import control_frames, made_frames
from runtime.models.given_frames import with_given_frames
from runtime.models.made_frames import MadeFrames
from runtime.models.preprocessors import missing_model
from runtime.models.spec import ModelSpec
from runtime.server.gradio_requests import CONTROL, RefusedError, check_values, read_object
from runtime.ui import form
from runtime.ui.formatting import page_text, paragraph
from runtime.ui.image_places import picture
from runtime.ui.plan_preview import PlanPreview

# A longer clip is shown by every second, third, … frame.
MOST_FRAMES = 121
# Streams that wait or run; each page has one.
_MOST_STREAMS = 4
# The color of what a mask changes, and how much of it is seen.
_CHANGING, _OPACITY = (255, 92, 138), 0.5
_PRIVATE = {"Cache-Control": "private, no-store"}


def about(plan: ExecutionPlan, preview: PlanPreview) -> dict[str, Any] | None:
    """Return what the page shows at once of a plan's control frames; `None` if there are none.

    Args:
        preview: knows which models are installed, and what they made.

    Returns:
        `key`, which differs if the frames do; `frames`, how many there are, and `every`, the step between those that
        are shown; `fps`; `line`, which part of the video is used; and `missing`, why control frames of a kind cannot be
        made, by kind.
    """
    use = plan.control
    if use is None:
        return None
    start, end = plan.control_start, plan.control_start + plan.frames / plan.fps
    data = {"frames": plan.frames, "fps": plan.fps, "start": start, "end": end, "seconds": use.seconds}
    code = "ui.control_part" if use.seconds is not None and end < use.seconds else "ui.control_to_end"
    mask = None if plan.mask is None else plan.mask.digest
    place = _place(plan, preview)
    is_made = place is None or place.read() is not None
    line = page_text(Fact(code, data)).what
    if not is_made:
        line += f" {page_text(Fact('ui.control_made_later', {'kind': plan.preprocess})).what}"
    missing = {kind: missing_model(kind, preview.weights_dir) for kind in BY_MODEL}
    depends: list[Any] = [use.digest, mask, plan.preprocess, plan.outpaint, data]
    depends += [plan.width, plan.height, plan.image_fit, plan.image_position]
    depends += [is_made, None if plan.preprocessor is None else plan.preprocessor.digest]
    return {
        "key": hashlib.sha256(json.dumps(depends).encode()).hexdigest()[:16],
        "frames": plan.frames,
        "every": _every(plan),
        "fps": plan.fps,
        "line": line,
        "missing": {kind: page_text(error.fact).what for kind, error in missing.items() if error is not None},
    }


def seen(plan: ExecutionPlan, spec: ModelSpec, preview: PlanPreview) -> dict[str, Any] | None:
    """Return `about` of all frames that a model sees: with those that are given, also without a control video.

    Without one, there is no `missing`.
    """
    shown = about(plan, preview)
    if not _sees_given(plan, spec):
        return shown
    inputs = [plan.extend, plan.join, *plan.images.values()]
    first = int(plan.image is not None) if plan.extend is None else plan.extend_frames
    last = int(plan.last_image is not None) if plan.join is None else plan.extend_frames
    depends: list[Any] = [None if use is None else use.digest for use in inputs]
    depends += [shown and shown["key"], plan.frames, first, last, plan.width, plan.height]
    depends += [plan.image_fit, plan.image_position]
    line = page_text(Fact("ui.given_frames", {"frames": plan.frames, "first": first, "last": last})).what
    alone = {"frames": plan.frames, "every": _every(plan), "fps": plan.fps, "line": line}
    return (shown or alone) | {"key": hashlib.sha256(json.dumps(depends).encode()).hexdigest()[:16]}


def _sees_given(plan: ExecutionPlan, spec: ModelSpec) -> bool:
    """Return whether a plan has frames that its model sees as control frames."""
    return spec.takes_given_frames and (plan.extend is not None or bool(plan.images))


def routes(preview: PlanPreview, models: Mapping[str, ModelSpec]) -> list[BaseRoute]:
    """Return the route of the owner's page. The middleware has checked the login and the size.

    Args:
        models: what the page offers, by name.
    """
    return [Route(CONTROL, _Previews(preview, dict(models)).frames, methods=["POST"])]


class _Previews:
    """The endpoint."""

    def __init__(self, preview: PlanPreview, models: dict[str, ModelSpec]) -> None:
        self._preview, self._models = preview, models
        self._thread = ThreadPoolExecutor(1, "control-frames")
        self._streams = 0

    async def frames(self, request: Request) -> Response:
        """Stream the control frames that Generate would use with the form as it is: a line of JSON for each."""
        values = read_object(await request.body())
        check_values(values)
        if not isinstance(values.get("form"), list):
            raise RefusedError("server.panel_call_incomplete")
        if self._streams >= _MOST_STREAMS:
            raise RefusedError("server.uploads_busy", 429)
        return StreamingResponse(self._lines(values["form"]), media_type="application/x-ndjson", headers=_PRIVATE)

    async def _lines(self, values: list[Any]) -> AsyncIterator[bytes]:
        self._streams += 1
        cancel = Cancel()
        lines = self._pictures(values, cancel.check)
        try:
            while (line := await asyncio.wrap_future(self._thread.submit(next, lines, None))) is not None:
                yield json.dumps(line).encode() + b"\n"
        except TandemError as error:
            yield json.dumps({"error": paragraph(error.fact)}).encode() + b"\n"
        except CancelledError:
            return
        finally:
            self._streams -= 1
            cancel.request()
            self._thread.submit(lines.close)  # after the frame that is made meanwhile

    def _pictures(self, values: list[Any], check: Callable[[], None]) -> Generator[dict[str, Any], None, None]:
        """Yield the key of the frames, see `about`, then a picture of each."""
        spec = form.read_model(values, self._models)
        planned = self._preview.preview(form.read_settings(values, self._models), spec)
        if planned.error is not None:
            raise planned.error
        plan = planned.plan
        shown = None if plan is None else seen(plan, spec, self._preview)
        if plan is None or shown is None:
            return
        yield {"key": shown["key"]}
        every, place = _every(plan), _place(plan, self._preview)
        made = None if place is None else place.read()
        frames = None if plan.control is None else control_frames(plan, check, every, made)
        if frames is None or _sees_given(plan, spec):
            frames = with_given_frames(plan, frames, check, every)
        for number, (frame, changes) in enumerate(frames):
            yield {"frame": number * every, "picture": picture(frame if changes is None else marked(frame, changes))}


def _place(plan: ExecutionPlan, preview: PlanPreview) -> MadeFrames | None:
    """Return where the frames are that a model makes of the control video; `None` if none does, or without a cache."""
    return None if preview.cache_dir is None else made_frames(plan, preview.cache_dir)


def _every(plan: ExecutionPlan) -> int:
    return math.ceil(plan.frames / MOST_FRAMES)


def marked(frame: Image.Image, changes: Image.Image) -> Image.Image:
    """Return a frame with a color over what changes: 255 in `changes`, else 0."""
    color = Image.new("RGB", frame.size, _CHANGING)
    return Image.composite(Image.blend(frame, color, _OPACITY), frame, changes)
