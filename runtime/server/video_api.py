"""The HTTP API: OpenAI's video routes, models, progress as server-sent events, health and metrics.

    POST   /v1/videos                create a video: JSON, or a form with an image
    POST   /v1/videos/plan           what a video would take, from the same body
    POST   /v1/videos/batch          several videos: the same body with a grid
    GET    /v1/videos/batch/{id}     the videos of a batch
    GET    /v1/videos/batch/{id}/sheet   its contact sheet
    POST   /v1/videos/settings       another program's settings as fields of a video
    POST   /v1/prompts/enhance       a prompt in more detail, by the chat model that the owner has set
    GET    /v1/videos                the caller's videos, in pages
    GET    /v1/videos/{id}           one video
    GET    /v1/videos/{id}/content   its MP4, a still image, or while it is made a clip of what is finished
    GET    /v1/videos/{id}/events    its progress and previews, see `video_events`
    DELETE /v1/videos/{id}           stop it if it runs, and delete it
    GET    /v1/models                the models
    GET    /v1/cluster               the machines of a cluster, for its key or the owner of this machine
    GET    /v1/cluster/join          how a machine with the cluster's key joins
    GET    /v1/openapi.json          this API's schema
    GET    /v1/docs                  the same as a page for people; needs no key
    POST   /mcp                      the MCP server, see `runtime.server.mcp`; only with `serve --mcp`
    GET    /healthz                  whether the server answers and can write its job store; needs no key
    GET    /metrics                  see `metrics`

A request with a key sees the videos of that key. Without any key in the cache folder, requests to 127.0.0.1 see the
videos of the owner of this machine.
"""

import asyncio
import hashlib
import hmac
import json
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import FastAPI, Query
from fastapi import Path as PathParameter
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime import __version__
from runtime.core.batches import Changes, axes_of, grid_of
from runtime.core.errors import InvalidRequestError, LimitError, StoreError, TandemError
from runtime.core.facts import Fact, shortened
from runtime.core.images import PREFIX, InputFile, field_of
from runtime.core.plan import ExecutionPlan, plain_output
from runtime.core.request import GenerationRequest
from runtime.core.settings import LOOPBACK, Settings
from runtime.core.templates import as_written
from runtime.machine.probe import free_disk_bytes
from runtime.models.catalogue import add_usable, check_offered, offered
from runtime.models.images import keep_image
from runtime.models.other_programs import read_settings
from runtime.models.requested import check_inputs
from runtime.models.spec import ModelSpec
from runtime.models.videos import keep_picture, keep_video
from runtime.models.wildcards import with_prompt
from runtime.pipeline.files import POSTER, PREVIEW, clip_of
from runtime.queue.enhancing import Enhancements, EnhancerRequest, with_enhanced
from runtime.queue.job_queue import JobQueue
from runtime.queue.records import JobRecord
from runtime.queue.sheets import sheet_png
from runtime.queue.store import Submission
from runtime.queue.supervisor import STOPPING_SECONDS
from runtime.queue.views import Job
from runtime.server import api_errors, api_page, video_events, video_requests
from runtime.server.api_errors import ApiError, ErrorAnswer, refused
from runtime.server.api_keys import ApiKey, ApiKeys, KeyLimits
from runtime.server.conditional import ConditionalMiddleware
from runtime.server.connections import set_login
from runtime.server.image_queue import ImageQueue
from runtime.server.job_files import SentVideo, etag_of, find_output
from runtime.server.metrics import CONTENT_TYPE, Metrics
from runtime.server.security import CrossSiteMiddleware, SecurityHeadersMiddleware
from runtime.server.video_objects import (
    DeletedVideo,
    EnhancedPrompt,
    LeftOut,
    Model,
    ModelList,
    ModelVariant,
    PromptToEnhance,
    Video,
    VideoBatch,
    VideoList,
    VideoPlan,
    VideoSettings,
    VideoTags,
    plan_of,
    video_of,
)
from runtime.server.visitor_limits import HOUR_SECONDS, check_disk
from runtime.server.visitors import private_folders, without_paths
from runtime.server.watchers import Watchers
from runtime.video.preview import still

if TYPE_CHECKING:  # imports ray
    from runtime.server.cluster.head import ClusterHead
    from runtime.server.mcp.transports import HttpTransport  # imports mcp, which not every installation has

HEALTH = "/healthz"
DOCS = "/v1/docs"
CLUSTER = "/v1/cluster"
MCP = "/mcp"
_PATHS = re.compile(r"/v1(?:/.*)?|/healthz/?|/metrics/?", re.DOTALL)
_ID = re.compile(r"[0-9a-f]{8}")
_IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_SCHEMAS = "#/components/schemas/"
# What a file of a request is called before it is read.
_UNREAD = f"{PREFIX}{'0' * 64}"
_MINUTE_SECONDS = 60
# Of one key, and of all.
_MOST_STREAMS, _MOST_STREAMS_ALL = 256, 512
# Time in which a running video stops, before a deletion is refused; a worker that does not stop is killed before.
_STOP_SECONDS = STOPPING_SECONDS + 40.0
_POLL_SECONDS = 0.1
_PAGE, _MOST_PAGE = 20, 100
_CACHED = {"Cache-Control": "private, max-age=3600"}

BatchId = Annotated[str, PathParameter(description="The batch's ID.", max_length=100)]
VideoId = Annotated[str, PathParameter(description="The video's ID.", max_length=100)]


def serves(path: str) -> bool:
    """Return whether a path belongs to this API."""
    return _PATHS.fullmatch(path) is not None


class VideoApi:
    """The routes of one app.

    Args:
        keys: of the cache folder.
        head: of the cluster; `None` without one.
    """

    def __init__(self, worker: JobQueue, settings: Settings, keys: ApiKeys, head: "ClusterHead | None" = None) -> None:
        self._worker = worker
        self._store = worker.store
        self._settings = settings
        self._keys = keys
        self._models = offered(settings.model, settings.weights_dir)
        self._folders = private_folders(settings)
        self._bodies = video_requests.BodyReader()
        self._images = ImageQueue()
        self._watchers = Watchers(_MOST_STREAMS, _MOST_STREAMS_ALL)
        self._feeds = video_events.VideoFeeds(worker, self._shown, self.redact)
        self._metrics = Metrics(worker)
        self._enhancements = Enhancements(worker, settings)
        self._head = head

    def app(self, mcp: "HttpTransport | None" = None) -> FastAPI:
        """Return the ASGI app with its middleware.

        Args:
            mcp: the MCP server at `MCP`; `None` without one.
        """
        names = LOOPBACK if self._settings.host in LOOPBACK else None
        handlers = api_errors.handlers(self.redact)
        early = {kind: handlers[kind] for kind in (HTTPException, TandemError)}
        handlers[RequestValidationError] = _invalid_query
        app = FastAPI(
            title="Tandem",
            version=__version__,
            openapi_url=None,
            docs_url=None,
            redoc_url=None,
            exception_handlers=handlers,  # type: ignore[arg-type]  # handlers of subclasses
            redirect_slashes=False,
            lifespan=None if mcp is None else mcp.lifespan,
            middleware=[
                Middleware(SecurityHeadersMiddleware),
                # Also of errors in the middleware; FastAPI logs others.
                Middleware(ExceptionMiddleware, handlers=early),
                Middleware(CrossSiteMiddleware, host_names=lambda: names, visitors=None),
                Middleware(
                    KeyMiddleware,
                    keys=self._keys,
                    open_without=_is_open(self._settings),
                    cluster_key=None if self._head is None else self._head.key,
                ),
                Middleware(ConditionalMiddleware, unsatisfiable=_beyond_the_end),
            ],
        )
        errors: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorAnswer}, "5XX": {"model": ErrorAnswer}}
        add = app.add_api_route
        add("/v1/videos", self.create, methods=["POST"], response_model=Video, responses=errors, openapi_extra=_body())
        add(
            "/v1/videos/plan",
            self.plan,
            methods=["POST"],
            response_model=VideoPlan,
            responses=errors,
            openapi_extra={"requestBody": _body()["requestBody"]},
        )
        batch = "/v1/videos/batch"
        add(
            batch,
            self.create_batch,
            methods=["POST"],
            response_model=VideoBatch,
            responses=errors,
            openapi_extra=_batch_body(),
        )
        add(f"{batch}/{{batch_id}}", self.batch, methods=["GET"], response_model=VideoBatch, responses=errors)
        png = {200: {"content": {"image/png": {}}}, **errors}
        add(f"{batch}/{{batch_id}}/sheet", self.sheet, methods=["GET"], responses=png, response_class=Response)
        add(
            "/v1/videos/settings",
            self.settings_of,
            methods=["POST"],
            response_model=VideoSettings,
            responses=errors,
            openapi_extra={
                "requestBody": {"content": {video_requests.JSON: {"schema": VideoTags.model_json_schema()}}}
            },
        )
        add(
            "/v1/prompts/enhance",
            self.enhance,
            methods=["POST"],
            response_model=EnhancedPrompt,
            responses=errors,
            openapi_extra={
                "requestBody": {
                    "required": True,
                    "content": {video_requests.JSON: {"schema": PromptToEnhance.model_json_schema()}},
                }
            },
        )
        add("/v1/videos", self.list, methods=["GET"], response_model=VideoList, responses=errors)
        add("/v1/videos/{video_id}", self.retrieve, methods=["GET"], response_model=Video, responses=errors)
        add("/v1/videos/{video_id}", self.delete, methods=["DELETE"], response_model=DeletedVideo, responses=errors)
        content = {200: {"content": {"video/mp4": {}, "image/webp": {}}}, 206: {"content": {"video/mp4": {}}}, **errors}
        add(
            "/v1/videos/{video_id}/content",
            self.content,
            methods=["GET"],
            responses=content,
            response_class=Response,
        )
        add("/v1/videos/{video_id}/content", self.content, methods=["HEAD"], include_in_schema=False)
        stream = {200: {"content": {"text/event-stream": {}}}, **errors}
        add("/v1/videos/{video_id}/events", self.events, methods=["GET"], responses=stream, response_class=Response)
        add("/v1/models", self.models, methods=["GET"], response_model=ModelList, responses=errors)
        add("/v1/models/{name}", self.model, methods=["GET"], response_model=Model, responses=errors)
        if self._head is not None:
            add(CLUSTER, self._head.view, methods=["GET"], include_in_schema=False)
            add(f"{CLUSTER}/join", self._head.joining, methods=["GET"], include_in_schema=False)
        if mcp is not None:
            app.router.routes.append(Route(MCP, mcp, methods=["POST"]))
        add("/v1/openapi.json", lambda: JSONResponse(_openapi(app)), methods=["GET"], include_in_schema=False)

        def docs(request: Request) -> HTMLResponse:
            address = f"{request.url.scheme}://{request.url.netloc}"
            return HTMLResponse(api_page.render(_openapi(app), address))

        add(DOCS, docs, methods=["GET"], include_in_schema=False)
        add(HEALTH, self.health, methods=["GET", "HEAD"], include_in_schema=False)
        add("/metrics", self.metrics, methods=["GET"], include_in_schema=False)
        return app

    def redact(self, text: str) -> str:
        """Return a message without the paths of this machine's folders."""
        return without_paths(text, self._folders)

    async def create(self, request: Request) -> Video:
        """Create a video. A request with the same Idempotency-Key and content returns the same video.

        With `enhance`, it creates nothing if the client leaves before the prompt is enhanced.
        """
        key = request.headers.get("idempotency-key")
        if key is not None and not _IDEMPOTENCY_KEY.fullmatch(key):
            raise refused(400, "server.api_idempotency_key", "Idempotency-Key")
        caller = _caller(request)
        values, files = await self._bodies.read(request, _owner(caller) or "")
        copies = await self._keep(request, values, files) if files else {}
        self._check_caller(caller)  # reading a body and its files takes time
        requested = await asyncio.to_thread(self._requested, values, copies)
        enhances = video_requests.switch_of(values, video_requests.ENHANCE)
        submission = None if key is None else Submission(key, _digest(requested, enhances=enhances))
        if enhances and not await asyncio.to_thread(self._is_submitted, caller, submission):
            requested = await self._enhanced(request, requested, caller)
        record = await asyncio.to_thread(self._create, requested, submission, caller)
        return self._video(record)

    async def plan(self, request: Request) -> VideoPlan:
        """Estimate the time and memory of a video without creating it; errors are those of its creation."""
        caller = _caller(request)
        values, files = await self._bodies.read(request, _owner(caller) or "")
        copies = await self._keep(request, values, files) if files else {}
        self._check_caller(caller)  # reading a body and its files takes time
        return await asyncio.to_thread(self._planned, values, copies, caller)

    async def create_batch(self, request: Request) -> VideoBatch:
        """Create a video for every combination of the values of a grid, all or none."""
        caller = _caller(request)
        values, files = await self._bodies.read(request, _owner(caller) or "")
        axes = axes_of(values.pop("grid", None))
        if video_requests.switch_of(values, video_requests.ENHANCE):
            raise InvalidRequestError(video_requests.ENHANCE, "enhancer.batch")
        copies = await self._keep(request, values, files) if files else {}
        self._check_caller(caller)  # reading a body and its files takes time
        records = await asyncio.to_thread(self._create_batch, values, copies, axes, caller)
        return self._batch(records)

    def batch(self, request: Request, batch_id: BatchId) -> Response:
        """Return a batch with its videos."""
        return _json(self._batch(self._batch_records(batch_id, request)))

    def sheet(self, request: Request, batch_id: BatchId) -> Response:
        """Send the contact sheet of a batch (PNG): a frame of each completed video, with what distinguishes it."""
        self._batch_records(batch_id, request)
        return Response(sheet_png(self._store, batch_id), media_type="image/png", headers=api_errors.PRIVATE)

    async def settings_of(self, request: Request) -> VideoSettings:
        """Return the settings in the metadata of another program's file as fields of a video; creates nothing."""
        tags, _ = await self._bodies.read(request, _owner(_caller(request)) or "")
        found = await asyncio.to_thread(read_settings, tags)
        if found is None:
            raise refused(400, "server.api_no_settings")
        found = found.checked()
        return VideoSettings(
            program=found.program,
            request=found.values,
            their_model=found.model,
            nearest_model=found.nearest_model,
            left_out=[LeftOut(name=name, value=value) for name, value in found.left_out],
        )

    async def enhance(self, request: Request) -> EnhancedPrompt:
        """Return a prompt in more detail for a model; creates nothing. It ends when the client leaves."""
        caller = _caller(request)
        values, _ = await self._bodies.read(request, _owner(caller) or "")
        wanted = await asyncio.to_thread(self._to_enhance, values)
        self._check_caller(caller)  # reading a body takes time
        prompt = await self._answer(request, wanted, caller)
        return EnhancedPrompt(prompt=as_written(prompt), original_prompt=wanted.prompt)

    async def _answer(self, request: Request, wanted: EnhancerRequest, caller: ApiKey | None) -> str:
        """Return an enhanced prompt. It ends when the client leaves."""
        per_hour = None if caller is None else caller.limits.per_hour
        enhancement = await asyncio.to_thread(self._enhancements.start, wanted, _owner(caller), per_hour)
        try:
            while (progress := enhancement.progress()).state == "running":
                if await request.is_disconnected():
                    raise refused(400, "server.request_incomplete")
                await asyncio.sleep(_POLL_SECONDS)
        except BaseException:
            enhancement.cancel()
            raise
        if progress.problem is None:
            return progress.prompt
        # Programs with a key do not learn where the owner's servers are.
        private = caller is not None and "address" in progress.problem.data
        raise ApiError(502, Fact("enhancer.unavailable") if private else progress.problem)

    def _to_enhance(self, values: Mapping[str, Any]) -> EnhancerRequest:
        unknown = next((name for name in values if name not in PromptToEnhance.model_fields), None)
        if unknown is not None:
            raise InvalidRequestError(
                unknown, "request.unknown_field", name=shortened(unknown), known=list(PromptToEnhance.model_fields)
            )
        from_image = video_requests.switch_of(values, "from_image")
        spec = check_offered(self._key_of(values.get("model", self._settings.model)), self._models)
        return EnhancerRequest.of(values.get("prompt", ""), spec, from_image=from_image)

    def list(
        self,
        request: Request,
        after: Annotated[str | None, Query(description="The last ID of the previous page.", max_length=100)] = None,
        limit: Annotated[int, Query(ge=1, le=_MOST_PAGE, description="Videos of a page.")] = _PAGE,
        order: Annotated[Literal["asc", "desc"], Query(description="Order by time of creation.")] = "desc",
    ) -> Response:
        """List the videos of the caller."""
        number = None if after is None else self._record(after, request).number
        owner = _owner(_caller(request))
        records = self._store.list(owner=owner, limit=limit + 1, after=number, oldest_first=order == "asc")
        data = [self._video(record) for record in records[:limit]]
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        more, retention = len(records) > limit, self._worker.retention
        return _json(VideoList(data=data, first_id=first, last_id=last, has_more=more, retention=retention))

    def retrieve(self, request: Request, video_id: VideoId) -> Response:
        """Return a video."""
        return _json(self._video(self._record(video_id, request)))

    async def delete(self, request: Request, video_id: VideoId) -> DeletedVideo:
        """Stop a video if it is queued or runs, and delete it."""
        record = await asyncio.to_thread(self._record, video_id, request)
        end = time.monotonic() + _STOP_SECONDS
        while True:
            try:
                await asyncio.to_thread(self._store.delete, record.id)
            except StoreError as error:
                if error.code != "queue.job_running_delete":
                    raise
                if time.monotonic() > end:
                    raise refused(409, "server.api_still_stopping", video=record.id) from error
                await asyncio.to_thread(self._worker.cancel, [record.id])
                await asyncio.sleep(_POLL_SECONDS)
            else:
                return DeletedVideo(id=record.id)

    def content(
        self,
        request: Request,
        video_id: VideoId,
        variant: Annotated[
            Literal["video", "plain", "thumbnail", "clip"],
            Query(
                description="The MP4, the MP4 before it was interpolated or upscaled, a still image (WebP), or the "
                "finished part of a running video (MP4)."
            ),
        ] = "video",
        count: Annotated[int, Query(ge=0, description="With clip: the number in the path of an event.")] = 0,
    ) -> Response:
        """Download a completed video. Supports requests for one range of bytes."""
        record = self._record(video_id, request)
        if variant == "clip":
            return self._clip(record, count)
        saved = record.saved
        if record.state != "done" or saved is None:
            raise refused(409, "server.api_not_ready", video=record.id)
        if variant == "thumbnail":
            return self._thumbnail(record)
        video = saved.video
        if variant == "plain" and saved.keeps_plain:
            video = plain_output(video)
        path = find_output(str(video), self._settings.outputs_dir)
        if path is None:
            raise refused(404, "server.api_no_file", video=record.id)
        headers = {"Cache-Control": "private"}
        return SentVideo(path, self._worker.sending, filename=f"{record.id}.mp4", headers=headers)

    async def events(self, request: Request, video_id: VideoId) -> StreamingResponse:
        """Stream the progress of a video as server-sent events until it has ended."""
        record = await asyncio.to_thread(self._record, video_id, request)
        job = await asyncio.to_thread(self._worker.job, record.id)
        if job is None:
            raise refused(404, "server.api_no_video", video=record.id)
        caller = _caller(request)

        async def watched() -> AsyncIterator[str]:
            with self._watchers.watching(_owner(caller) or "") as watch:
                async for event in self._feeds.stream(job, watch, lambda: self._check_caller(caller)):
                    yield event

        headers = {**api_errors.PRIVATE, "X-Accel-Buffering": "no"}
        return StreamingResponse(watched(), media_type="text/event-stream", headers=headers)

    def models(self) -> ModelList:
        """List the models."""
        add_usable(self._models, self._settings.weights_dir)
        return ModelList(data=[_model(spec) for spec in tuple(self._models.values())])

    def model(self, name: Annotated[str, PathParameter(description="The model's ID.", max_length=200)]) -> Model:
        """Return a model."""
        return _model(check_offered(self._key_of(name), self._models))

    def health(self) -> JSONResponse:
        """Answer whether the job store can be read and written."""
        self._store.database.check_writable()
        return JSONResponse({"status": "ok"}, headers=api_errors.PRIVATE)

    def metrics(self) -> Response:
        """Send the metrics."""
        return Response(self._metrics.text(), headers={**api_errors.PRIVATE, "Content-Type": CONTENT_TYPE})

    def _check_caller(self, caller: ApiKey | None) -> None:
        """Check that a request's key was not revoked meanwhile, or that none was added if it has none.

        Raises:
            ApiError: 401, if it was.
            SettingsError: if the keys cannot be read.
        """
        keys = self._keys.keys()
        if caller is None and keys is not None:
            raise refused(401, "server.api_key_missing")
        if caller is not None and caller not in (keys or ()):
            raise refused(401, "server.api_key_wrong")

    async def _keep(
        self, request: Request, values: Mapping[str, Any], files: Mapping[str, video_requests.File]
    ) -> dict[str, str]:
        """Keep a request's images and videos; return their copies by the same keys."""
        cache = self._settings.cache_dir

        def keep(check: Callable[[], None]) -> dict[str, str]:
            # First without reading its files, so that a request that is refused keeps none.
            requested = self._requested(values, dict.fromkeys(files, _UNREAD))
            check_inputs(self._models[requested.model], requested, self._settings.weights_dir)
            copies = {}
            for key, (data, name) in files.items():
                use: InputFile
                if key in video_requests.MASK_FIELDS:
                    use = keep_picture(data, name, cache, field=key, check=check)
                elif key in video_requests.VIDEO_FIELDS:
                    use = keep_video(data, name, cache, field=key, check=check)
                else:
                    use = keep_image(data, name, field_of(key), cache, check=check)
                copies[key] = use.reference
            return copies

        size = sum(len(data) for data, _ in files.values())
        try:
            return await self._images.run(request, _owner(_caller(request)) or "", size, keep)
        except ClientDisconnect as error:
            raise refused(400, "server.request_incomplete") from error

    def _requested(self, values: Mapping[str, Any], copies: Mapping[str, str]) -> GenerationRequest:
        model = self._key_of(values.get("model", self._settings.model))
        check_offered(model, self._models)
        check_disk(free_disk_bytes(self._settings.outputs_dir))
        return video_requests.request_of({**values, "model": model}, copies)

    def _is_submitted(self, caller: ApiKey | None, submission: Submission | None) -> bool:
        return submission is not None and self._store.submitted(_owner(caller), submission) is not None

    async def _enhanced(
        self, request: Request, requested: GenerationRequest, caller: ApiKey | None
    ) -> GenerationRequest:
        """Return the request for a video with an enhanced prompt; what would be refused is refused before."""

        def prepare() -> tuple[GenerationRequest, EnhancerRequest]:
            expanded = with_prompt(requested, self._settings.cache_dir)
            self._plan(expanded, caller)
            return expanded, EnhancerRequest.of_video(expanded, self._models[expanded.model])

        expanded, wanted = await asyncio.to_thread(prepare)
        prompt = await self._answer(request, wanted, caller)
        self._check_caller(caller)  # an answer takes time
        return with_enhanced(expanded, prompt)

    def _create(self, request: GenerationRequest, submission: Submission | None, caller: ApiKey | None) -> JobRecord:
        limits = None if caller is None else caller.limits

        def check(plan: ExecutionPlan) -> None:
            if limits is not None:
                check_plan(plan, limits)

        def admit(waiting: int, times: Sequence[float]) -> None:
            if limits is not None:
                check_queue(limits, waiting, times, time.time())

        return self._worker.submit_once(request, _owner(caller), check, admit, submission)

    def _create_batch(
        self,
        values: Mapping[str, Any],
        copies: Mapping[str, str],
        axes: Sequence[Sequence[Changes]],
        caller: ApiKey | None,
    ) -> Sequence[JobRecord]:
        def make(changes: Changes) -> GenerationRequest:
            return self._requested(video_requests.set_values({**values, **changes}), copies)

        requests = grid_of(self._requested(values, copies), axes, make=make)
        if caller is None:
            return self._worker.submit_all(requests)
        limits = caller.limits
        if len(requests) > limits.videos:  # before all are planned
            raise LimitError("server.api_queue_full", maximum=limits.videos)
        return self._worker.submit_all(
            requests,
            _owner(caller),
            check=lambda plan: check_plan(plan, limits),
            admit=lambda waiting, times: check_queue(limits, waiting, times, time.time()),
        )

    def _batch_records(self, batch_id: str, request: Request) -> Sequence[JobRecord]:
        """Return the videos of a batch of the caller.

        Raises:
            ApiError: 404, if it does not exist or is another caller's.
        """
        owner = _owner(_caller(request))
        records = (
            self._store.list(batches=[batch_id], owner=owner, oldest_first=True) if _ID.fullmatch(batch_id) else []
        )
        if not records:
            raise refused(404, "server.api_no_batch", "batch_id", batch=shortened(batch_id))
        return records

    def _batch(self, records: Sequence[JobRecord]) -> VideoBatch:
        return VideoBatch(id=records[0].batch, data=[self._video(record) for record in records])

    def _planned(self, values: Mapping[str, Any], copies: Mapping[str, str], caller: ApiKey | None) -> VideoPlan:
        plan = self._plan(self._requested(values, copies), caller)
        return plan_of(plan, self._name_of, self.redact)

    def _plan(self, request: GenerationRequest, caller: ApiKey | None) -> ExecutionPlan:
        plan = self._worker.plan(request)
        if caller is not None:
            check_plan(plan, caller.limits)
        return plan

    def _record(self, video_id: str, request: Request) -> JobRecord:
        """Return a video of the caller.

        Raises:
            ApiError: 404, if it does not exist or is another caller's.
        """
        record = None
        if _ID.fullmatch(video_id):
            try:
                record = self._store.get(video_id)
            except StoreError as error:
                if error.code != "queue.no_such_job":
                    raise
        is_callers = record is not None and record.kind == "video" and record.owner == _owner(_caller(request))
        if record is None or not is_callers or record.deleted is not None:
            raise refused(404, "server.api_no_video", "video_id", video=shortened(video_id))
        return record

    def _video(self, record: JobRecord) -> Video:
        return self._shown(record, self._worker.job(record.id) if record.state == "running" else None)

    def _shown(self, record: JobRecord, job: Job | None) -> Video:
        return video_of(record, job, self._name_of, self.redact, self._worker.retention)

    def _thumbnail(self, record: JobRecord) -> Response:
        folder = self._store.folder(record.id)
        for path in () if folder is None else (folder / POSTER, folder / PREVIEW):
            with suppress(OSError, ValueError):
                picture = still(path.read_bytes())
                return Response(picture, media_type="image/webp", headers={**_CACHED, "ETag": etag_of(picture)})
        raise refused(404, "server.api_no_file", video=record.id)

    def _clip(self, record: JobRecord, count: int) -> Response:
        path = None if record.state == "done" else clip_of(self._store.folder(record.id), count)
        if path is None:
            raise refused(404, "server.api_no_clip", "count", video=record.id)
        return FileResponse(
            path, media_type="video/mp4", filename=f"{record.id}-{count}.mp4", headers=api_errors.PRIVATE
        )

    def _key_of(self, name: object) -> object:
        """Return how requests name a model of this API, which shows models that were given by a path by their name."""
        if isinstance(name, str) and name not in self._models:
            add_usable(self._models, self._settings.weights_dir)
        return next((key for key, spec in tuple(self._models.items()) if spec.name == name), name)

    def _name_of(self, model: str) -> str:
        spec = self._models.get(model)
        match = next(
            (candidate for candidate in tuple(self._models.values()) if str(candidate.location) == model), spec
        )
        return Path(model).name if match is None else match.name


class ApiMiddleware:
    """Sends the requests to the API's paths to its app, and others on.

    Args:
        api: see `VideoApi.app`.
    """

    def __init__(self, app: ASGIApp, api: ASGIApp) -> None:
        self._app = app
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        is_api = scope["type"] == "http" and serves(scope["path"])
        await (self._api if is_api else self._app)(scope, receive, send)


class KeyMiddleware:
    """Finds the key of a request, as `caller` in its state, and refuses requests without one where one is needed.

    Args:
        open_without: whether requests need no key as long as none was added.
        cluster_key: the only key for the routes of a cluster; `None` without one.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_without: bool, cluster_key: str | None = None) -> None:
        self._app = app
        self._keys = keys
        self._open = open_without
        self._cluster_key = cluster_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # The page of the schema is the same for all, and browsers cannot send a key.
        if scope["path"].rstrip("/") in {HEALTH, DOCS}:
            await self._app(scope, receive, send)
            return
        caller = self._find(scope)  # it asks for a file's time, and reads the file if that has changed
        set_login(scope, True)
        state = {**scope.get("state", {}), "caller": caller}
        await self._app({**scope, "state": state}, receive, send)

    def _find(self, scope: Scope) -> ApiKey | None:
        headers = [value for name, value in scope["headers"] if name == b"authorization"]
        path = scope["path"].rstrip("/")
        cluster = path.startswith(CLUSTER)
        joins = cluster and path != CLUSTER
        if self._keys.keys() is None and self._open and not joins:
            return None
        challenge = {"WWW-Authenticate": "Bearer"}
        scheme, _, secret = headers[0].decode("latin-1").partition(" ") if len(headers) == 1 else ("", "", "")
        if scheme.lower() != "bearer" or not secret.strip():
            error = refused(401, "server.api_key_missing")
        elif cluster:
            expected = self._cluster_key or ""
            if expected and hmac.compare_digest(secret.strip().encode(), expected.encode()):
                return None
            error = refused(401, "server.api_key_wrong")
        else:
            key = self._keys.find(secret.strip())
            if key is not None:
                return key
            error = refused(401, "server.api_key_wrong")
        error.headers = challenge
        raise error


def check_plan(plan: ExecutionPlan, limits: KeyLimits) -> None:
    """Check that a video is within the limits of its key.

    Raises:
        InvalidRequestError: if it is not; names the field.
    """
    for name, value, most in (("frames", plan.frames, limits.frames), ("steps", plan.steps, limits.steps)):
        if most is not None and value > most:
            raise InvalidRequestError(name, "server.api_maximum", value=value, maximum=most)
    if limits.frames is not None and plan.video_frames > limits.frames:
        data = {"value": plan.video_frames, "maximum": limits.frames}
        raise InvalidRequestError("interpolate", "server.api_maximum_interpolated", **data)
    width, height = plan.video_size
    if limits.pixels is not None and width * height > limits.pixels:
        field = "size" if plan.upscaling is None else "upscale"
        raise InvalidRequestError(field, "server.api_maximum_size", width=width, height=height, maximum=limits.pixels)


def check_queue(limits: KeyLimits, waiting: int, times: Sequence[float], now: float) -> None:
    """Check that a key may queue another video now.

    Args:
        waiting: number of its queued and running videos.
        times: of its videos of the last hour, in seconds, ascending, on the clock of `now`.

    Raises:
        LimitError: if a limit is reached.
    """
    if waiting >= limits.videos:
        raise LimitError("server.api_queue_full", maximum=limits.videos)
    if len(times) >= limits.per_hour:
        minutes = max(1, math.ceil((times[-limits.per_hour] + HOUR_SECONDS - now) / _MINUTE_SECONDS))
        raise LimitError("server.api_rate", maximum=limits.per_hour, minutes=minutes)


def _json(answer: BaseModel) -> Response:
    """Return a response that FastAPI does not validate again."""
    return Response(answer.model_dump_json(), media_type="application/json")


def _digest(request: GenerationRequest, *, enhances: bool) -> str:
    """Return what two requests for the same video have in common.

    Args:
        enhances: whether the prompt is enhanced before the video is created.
    """
    values = request.to_json() | ({video_requests.ENHANCE: True} if enhances else {})
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _is_open(settings: Settings) -> bool:
    """Return whether requests need no key as long as none was added."""
    return settings.host in LOOPBACK and settings.auth is None


def _caller(request: Request) -> ApiKey | None:
    caller = request.state.caller
    assert caller is None or isinstance(caller, ApiKey)
    return caller


def _owner(caller: ApiKey | None) -> str | None:
    return None if caller is None else caller.owner


def _model(spec: ModelSpec) -> Model:
    default_size = (spec.defaults.width, spec.defaults.height)
    sizes = [f"{width}x{height}" for width, height in dict.fromkeys((default_size, *spec.sizes))]
    variant = spec.variant
    return Model(
        id=spec.name,
        owned_by="tandem",
        title=spec.title,
        sizes=sizes,
        steps=spec.defaults.steps,
        variant=None
        if variant is None
        else ModelVariant(
            model=variant.model,
            name=variant.name,
            format=variant.format,
            loras=[lora.file for lora in variant.loras],
        ),
    )


def _beyond_the_end() -> Response:
    status = HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
    fact = Fact("server.api_range")
    return api_errors.answer(status, api_errors.body_of(fact, status, "Range", str))


def _invalid_query(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    data = {"name": name, "value": shortened(first.get("input")), "problem": str(first["msg"]).rstrip(".")}
    failure = refused(400, "server.api_query", name, **data)
    return api_errors.answer(400, api_errors.body_of(failure.fact, 400, name, str))


def _body() -> dict[str, Any]:
    """Return the schema of the body of `POST /v1/videos`."""
    content = {
        video_requests.JSON: {"schema": {"$ref": f"{_SCHEMAS}CreateVideo"}},
        video_requests.FORM: {"schema": {"$ref": f"{_SCHEMAS}CreateVideoForm"}},
    }
    header = {
        "name": "Idempotency-Key",
        "in": "header",
        "description": "A text that is unique for this video, so that a repeated request creates no second one.",
        "schema": {"type": "string", "maxLength": 255},
    }
    return {"requestBody": {"required": True, "content": content}, "parameters": [header]}


def _batch_body() -> dict[str, Any]:
    """Return the schema of the body of `POST /v1/videos/batch`."""
    grid = {
        "type": "object",
        "description": "The values of up to three fields; each combination becomes a video.",
        "additionalProperties": {"type": "array", "minItems": 1},
        "examples": [{"steps": [10, 20], "seed": [1, 2, 3]}],
    }
    also = {"type": "object", "properties": {"grid": grid}, "required": ["grid"]}
    schema = {"allOf": [{"$ref": f"{_SCHEMAS}CreateVideo"}, also]}
    return {"requestBody": {"required": True, "content": {video_requests.JSON: {"schema": schema}}}}


def _openapi(app: FastAPI) -> dict[str, Any]:
    """Return the schema of the API; that of requests follows from the declarations of their fields."""
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    template = f"{_SCHEMAS}{{model}}"
    schemas = schema["components"]["schemas"]
    for definition in (video_requests.json_schema(template), video_requests.form_schema(template)):
        schemas |= definition.pop("$defs", {})
        schemas[definition["title"]] = definition
    schemas |= {
        video_events.VideoProgress.__name__: video_events.VideoProgress.model_json_schema(ref_template=template)
    }
    schemas[video_events.VideoProgress.__name__].pop("$defs", None)
    schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    schema["security"] = [{"key": []}]
    return schema
