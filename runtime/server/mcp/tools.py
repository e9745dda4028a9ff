"""The tools and resources of the MCP server. Each calls the HTTP API, so that keys, limits and refusals are the API's.

    make_video        queue a video, and wait for it if asked
    plan_video        what a video would take, without making it
    wait_for_video    wait until a video has ended, with notifications of its progress
    list_videos       the caller's videos
    get_video         one video, a still image of it, and where its file is
    delete_video      stop it if it is queued or runs, and delete it
    list_models       the models
    enhance_prompt    a prompt in more detail, by the chat model that the owner has set

The resource `tandem://videos/ID` is the MP4 of a completed video.
"""

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import mcp_types as types
from mcp.server import Server
from mcp.server.context import ServerRequestContext
from mcp.shared.exceptions import MCPError

from runtime import __version__
from runtime.core.errors import TandemError
from runtime.core.facts import cut, shortened
from runtime.core.untrusted_files import read_file
from runtime.server import video_requests
from runtime.server.api_errors import ErrorBody, body_of
from runtime.server.mcp import schemas
from runtime.server.mcp.api_client import ANSWER_SECONDS, ApiCallError, ApiClient, Upload, call_error
from runtime.server.video_objects import PromptToEnhance
from runtime.video.image_messages import MAX_FILE_BYTES

# Larger videos are not sent as resources, which are base64 in one message.
_MOST_RESOURCE_BYTES = 32 << 20
_MOST_STILL_BYTES = 1 << 20
_SCHEME = "tandem://videos/"
_VIDEOS = "v1/videos"
# A chat model that is loaded, on a processor.
_ENHANCE_SECONDS = 600.0
_ID = re.compile(r"[0-9A-Za-z_-]{1,100}")
# Each number of a progress token must be larger than the one before.
_LEAST_PROGRESS = 0.01
_INSTRUCTIONS = (
    "Tandem makes short videos from a sentence on this server. make_video queues a video and returns its id at once; "
    "wait_for_video waits until it is completed; get_video says where the file is. A video takes seconds to hours: "
    "plan_video estimates it first. Fields that are left out have the defaults of the model. Errors say which field is "
    "wrong and what to do."
)

Context: TypeAlias = ServerRequestContext[ApiClient, Any]
_Call = Callable[[Context, dict[str, Any]], Awaitable[types.CallToolResult]]


@dataclass(frozen=True)
class _Tool:
    """A tool: what it does, the schema of its arguments, and hints for clients."""

    description: str
    schema: dict[str, Any]
    call: _Call
    reads: bool = False
    destroys: bool = False


class McpTools:
    """The tools of one MCP server.

    Args:
        url: the address of the HTTP API, with a slash at the end.
        key: sent with the calls over stdio; a call over HTTP sends the key of its own request.
        find_file: returns the file of a completed video by its ID, for a client on this machine, which may also name
            images and videos by path. `None` for clients that may be elsewhere.
        restore: makes the API answer again, called when it does not; raises a `TandemError` if it cannot.
    """

    def __init__(
        self,
        url: str,
        key: str | None = None,
        find_file: Callable[[str], Path | None] | None = None,
        restore: Callable[[], None] | None = None,
    ) -> None:
        self._url = url
        self._key = key
        self._find_file = find_file
        self._restore = restore
        paths = find_file is not None
        schema = schemas.arguments_schema
        self._tools = {
            "make_video": _Tool(
                "Make a video from a sentence. Returns its id.", schemas.make_schema(paths=paths), self._make
            ),
            "plan_video": _Tool(
                "Estimate the time and memory of a video, or learn why it cannot be made.",
                schemas.request_schema(paths=paths),
                self._plan,
                reads=True,
            ),
            "wait_for_video": _Tool(
                "Wait until a video is completed or has failed.",
                schema(schemas.WaitArguments),
                self._wait,
                reads=True,
            ),
            "list_videos": _Tool(
                "List the videos, newest first.", schema(schemas.ListArguments), self._list, reads=True
            ),
            "get_video": _Tool(
                "Show a video, a still image of it, and where its file is.",
                schema(schemas.GetArguments),
                self._get,
                reads=True,
            ),
            "delete_video": _Tool(
                "Stop a video if it is queued or running, and delete it.",
                schema(schemas.DeleteArguments),
                self._delete,
                destroys=True,
            ),
            "list_models": _Tool(
                "List the models and their sizes.", schema(schemas.Arguments), self._models, reads=True
            ),
            "enhance_prompt": _Tool(
                "Write a prompt in more detail for a model, by the chat model of this server. Give make_video both "
                "prompts that it returns.",
                schema(PromptToEnhance),
                self._enhance,
                reads=True,
            ),
        }

    def server(self) -> Server[ApiClient]:
        """Return a server for one transport."""

        @asynccontextmanager
        async def lifespan(_: Server[ApiClient]) -> AsyncIterator[ApiClient]:
            async with ApiClient(self._url) as client:
                yield client

        return Server(
            "tandem",
            version=__version__,
            title="Tandem",
            instructions=_INSTRUCTIONS,
            lifespan=lifespan,
            on_list_tools=self._list_tools,
            on_call_tool=self._call_tool,
            on_list_resources=self._list_resources,
            on_list_resource_templates=self._list_templates,
            on_read_resource=self._read_resource,
        )

    async def _list_tools(
        self, _context: Context, _parameters: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        tools = [
            types.Tool(
                name=name,
                description=tool.description,
                input_schema=tool.schema,
                annotations=types.ToolAnnotations(read_only_hint=tool.reads, destructive_hint=tool.destroys),
            )
            for name, tool in self._tools.items()
        ]
        return types.ListToolsResult(tools=tools)

    async def _call_tool(self, context: Context, parameters: types.CallToolRequestParams) -> types.CallToolResult:
        tool = self._tools.get(parameters.name)
        try:
            if tool is None:
                name = shortened(parameters.name)
                raise call_error("server.mcp_tool", "name", name=name, known=list(self._tools))
            return await self._called(tool, context, parameters.arguments or {})
        except ApiCallError as error:
            failure = error.error
            return types.CallToolResult(
                content=[types.TextContent(text=failure.message)],
                structured_content={"error": failure.model_dump(exclude_none=True)},
                is_error=True,
            )

    async def _called(self, tool: _Tool, context: Context, arguments: dict[str, Any]) -> types.CallToolResult:
        """Call a tool. If the API cannot be reached, so that nothing was sent, restore it and call the tool again."""
        try:
            return await tool.call(context, arguments)
        except ApiCallError as error:
            if error.error.code != "server.mcp_unreachable" or self._restore is None:
                raise
        try:
            await asyncio.to_thread(self._restore)
        except TandemError as error:
            raise ApiCallError(0, body_of(error.fact, 400, None, str)) from error
        return await tool.call(context, arguments)

    async def _make(self, context: Context, arguments: dict[str, Any]) -> types.CallToolResult:
        name = schemas.WAIT_FIELD
        own = schemas.read_arguments(schemas.MakeArguments, {key: arguments[key] for key in arguments if key == name})
        request = {key: value for key, value in arguments.items() if key != name}
        seconds = _ENHANCE_SECONDS if request.get(video_requests.ENHANCE) else ANSWER_SECONDS
        video = await self._post(context, _VIDEOS, request, seconds)
        if own.wait_seconds:
            video = await self._followed(context, video["id"], own.wait_seconds)
        return _result(video)

    async def _plan(self, context: Context, arguments: dict[str, Any]) -> types.CallToolResult:
        return _result(await self._post(context, f"{_VIDEOS}/plan", arguments))

    async def _wait(self, context: Context, arguments: dict[str, Any]) -> types.CallToolResult:
        wait = schemas.read_arguments(schemas.WaitArguments, arguments)
        return _result(await self._followed(context, wait.id, wait.seconds))

    async def _list(self, context: Context, arguments: dict[str, Any]) -> types.CallToolResult:
        page = schemas.read_arguments(schemas.ListArguments, arguments)
        return _result(await _api(context).get(_VIDEOS, self._headers(context), **page.model_dump()))

    async def _get(self, context: Context, arguments: dict[str, Any]) -> types.CallToolResult:
        get = schemas.read_arguments(schemas.GetArguments, arguments)
        path, headers = _path(get.id), self._headers(context)
        video = await _api(context).get(path, headers)
        if video["status"] != "completed":
            return _result(video)
        file = None if self._find_file is None else await asyncio.to_thread(self._find_file, get.id)
        if file is not None:
            video["path"] = str(file)
        base = self._url if context.request is None else str(context.request.base_url)
        video["url"] = f"{base}{path}/content"
        link = types.ResourceLink(name=f"{get.id}.mp4", uri=f"{_SCHEME}{get.id}", mime_type="video/mp4")
        more: list[types.ContentBlock] = [link]
        if get.still:
            still = await self._still(context, path)
            more += [] if still is None else [types.ImageContent(data=_base64(still), mime_type="image/webp")]
        return _result(video, more)

    async def _still(self, context: Context, path: str) -> bytes | None:
        """Return a still image (WebP) of a video; `None` if it has none any more."""
        try:
            return await _api(context).content(
                f"{path}/content?variant=thumbnail", self._headers(context), _MOST_STILL_BYTES
            )
        except ApiCallError as error:
            if error.error.code != "server.api_no_file":
                raise
            return None

    async def _delete(self, context: Context, arguments: dict[str, Any]) -> types.CallToolResult:
        delete = schemas.read_arguments(schemas.DeleteArguments, arguments)
        return _result(await _api(context).delete(_path(delete.id), self._headers(context)))

    async def _models(self, context: Context, arguments: dict[str, Any]) -> types.CallToolResult:
        schemas.read_arguments(schemas.Arguments, arguments)
        return _result(await _api(context).get("v1/models", self._headers(context)))

    async def _enhance(self, context: Context, arguments: dict[str, Any]) -> types.CallToolResult:
        path, headers = "v1/prompts/enhance", self._headers(context)
        return _result(await _api(context).post(path, headers, arguments, (), _ENHANCE_SECONDS))

    async def _post(
        self, context: Context, path: str, request: Mapping[str, Any], seconds: float = ANSWER_SECONDS
    ) -> dict[str, Any]:
        """Send a request for a video, and the files that it names by path; the answer comes within some seconds."""
        values, uploads = dict(request), list[Upload]()
        for name in video_requests.FILE_FIELDS:
            if (given := values.pop(name, None)) is None:
                continue
            files, sent = await self._files(name, given if isinstance(given, list) else [given])
            uploads += files
            if sent:
                values[name] = sent if isinstance(given, list) else sent[0]
        return await _api(context).post(path, self._headers(context), values, uploads, seconds)

    async def _files(self, name: str, entries: Sequence[Any]) -> tuple[list[Upload], list[Any]]:
        """Return the files of a field that are named by path, and the other entries as the API takes them."""
        uploads, sent = list[Upload](), []
        key = "video_url" if name in video_requests.VIDEO_FIELDS else "image_url"
        for entry in entries:
            if not isinstance(entry, str):
                sent.append(entry)
            elif entry.lower().startswith("data:"):
                sent.append({key: entry})
            elif self._find_file is None:
                raise call_error("server.mcp_no_paths", name, field=name)
            else:
                uploads.append((name, await asyncio.to_thread(_read, name, entry)))
        if uploads and sent:  # a form would change their order
            raise call_error("server.mcp_mixed_files", name, field=name)
        return uploads, sent

    async def _followed(self, context: Context, video_id: str, seconds: float) -> dict[str, Any]:
        """Return a video when it has ended, or after some seconds; report its progress until then."""
        headers = self._headers(context)
        last, text = -1.0, ""
        with anyio.move_on_after(seconds):
            async with aclosing(_api(context).events(f"{_path(video_id)}/events", headers)) as events:
                async for name, data in events:
                    if name == "error":
                        raise ApiCallError(0, ErrorBody.model_validate(data["error"]))
                    if name == "video.progress" and (now := _progress_text(data)) != text:
                        last, text = max(data["progress"], round(last + _LEAST_PROGRESS, 2)), now
                        await context.session.report_progress(last, 100, text)
        return await _api(context).get(_path(video_id), headers)

    async def _list_resources(
        self, context: Context, parameters: types.PaginatedRequestParams | None
    ) -> types.ListResourcesResult:
        after = None if parameters is None else parameters.cursor
        try:
            page = await _api(context).get(_VIDEOS, self._headers(context), after=after)
        except ApiCallError as error:
            raise _protocol_error(error) from error
        resources = [
            types.Resource(
                name=f"{video['id']}.mp4",
                uri=f"{_SCHEME}{video['id']}",
                description=cut(video["prompt"], 200),
                mime_type="video/mp4",
            )
            for video in page["data"]
            if video["status"] == "completed"
        ]
        return types.ListResourcesResult(resources=resources, next_cursor=page["last_id"] if page["has_more"] else None)

    async def _list_templates(
        self, _context: Context, _parameters: types.PaginatedRequestParams | None
    ) -> types.ListResourceTemplatesResult:
        template = types.ResourceTemplate(
            name="video", uri_template=f"{_SCHEME}{{id}}", description="A completed video.", mime_type="video/mp4"
        )
        return types.ListResourceTemplatesResult(resource_templates=[template])

    async def _read_resource(
        self, context: Context, parameters: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult:
        video_id = parameters.uri.removeprefix(_SCHEME)
        try:
            if video_id == parameters.uri:
                raise call_error("server.mcp_resource", "uri", uri=shortened(parameters.uri))
            path = f"{_path(video_id)}/content"
            data = await _api(context).content(path, self._headers(context), _MOST_RESOURCE_BYTES)
            if data is None:
                raise call_error("server.mcp_too_large", "uri", video=video_id, maximum=_MOST_RESOURCE_BYTES)
        except ApiCallError as error:
            raise _protocol_error(error) from error
        content = types.BlobResourceContents(uri=parameters.uri, mime_type="video/mp4", blob=_base64(data))
        return types.ReadResourceResult(contents=[content])

    def _headers(self, context: Context) -> dict[str, str]:
        """Return the headers of a call to the API: the caller's key, which the API checks."""
        if context.request is not None:
            sent = context.request.headers.get("authorization")
        else:
            sent = None if self._key is None else f"Bearer {self._key}"
        return {} if sent is None else {"Authorization": sent}


def _api(context: Context) -> ApiClient:
    client: ApiClient = context.lifespan_context
    return client


def _path(video_id: str) -> str:
    """Return the path of a video.

    Raises:
        ApiCallError: for a text that would name another route.
    """
    if not _ID.fullmatch(video_id):
        raise call_error("server.api_no_video", "video_id", video=shortened(video_id))
    return f"{_VIDEOS}/{video_id}"


def _read(field: str, path: str) -> tuple[str, bytes]:
    """Return the name and content of a file that a client on this machine names."""
    try:
        file = Path(path).expanduser()
        if not file.is_absolute():
            raise call_error("server.mcp_relative_path", field, path=shortened(path))
        return file.name, read_file(file, MAX_FILE_BYTES)
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise call_error("server.mcp_file", field, path=shortened(path), problem=cut(reason, 100)) from error


def _progress_text(data: Mapping[str, Any]) -> str:
    """Return a line on how far a video is, such as "Denoising, step 3 of 8"."""
    parts = [str(data["stage"])]
    if data["ahead"]:
        parts.append(f"{data['ahead']} ahead")
    if data["frame"]:
        parts.append(f"frame {data['frame']} of {data['frames']}")
    elif data["step"]:
        parts.append(f"step {data['step']} of {data['steps']}")
    return ", ".join(parts)


def _result(value: Mapping[str, Any], more: Sequence[types.ContentBlock] = ()) -> types.CallToolResult:
    """Return a result as text and as structured content, without nulls in the text."""
    text = json.dumps({key: entry for key, entry in value.items() if entry is not None}, ensure_ascii=False)
    return types.CallToolResult(content=[types.TextContent(text=text), *more], structured_content=dict(value))


def _protocol_error(error: ApiCallError) -> MCPError:
    """Return an error of a request that is not a call to a tool."""
    return MCPError(types.INVALID_PARAMS, error.error.message, error.error.model_dump(exclude_none=True))


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
