"""The commands of the command line: their arguments, help and exit codes. Each runs code of another module.

Exit codes: 0 done; 2 user error; 1 internal error; 130 cancelled.
"""

import functools
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from runtime import __version__
from runtime.cli import terminal
from runtime.cli.exit_codes import (
    CANCELLED,
    DONE,
    OUTPUT_CLOSED,
    USER_ERROR,
    emit_json,
    report_error,
    report_internal_error,
)
from runtime.cli.flags import (
    Flags,
    JsonFlag,
    OfflineFlag,
    downloads_disabled,
    request_from_flags,
    takes_changes,
    takes_flags,
    takes_options,
    takes_request,
    takes_request_or_list,
    takes_web_options,
    with_flags,
)
from runtime.core import log, settings
from runtime.core.cancel import CancelledError
from runtime.core.environment import program
from runtime.core.errors import InvalidRequestError, MemoryShortError, SettingsError, TandemError
from runtime.core.facts import Fact, shortened
from runtime.core.files import make_private_files
from runtime.core.request import MAX_FRAMES, MAX_STEPS, GenerationRequest

logger = logging.getLogger(__name__)

_NOT_UTF8 = re.compile("[\udc80-\udcff]")

# What a command returns: its JSON output, its exit code, or both.
Outcome = dict[str, Any] | int | tuple[dict[str, Any], int]


class PromptOrCommand(TyperGroup):
    """A group that runs its command `run` unless the first argument names another command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert `run` before the arguments unless they start with a command's name."""
        return super().parse_args(ctx, args if args and args[0] in self.commands else ["run", *args])


app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
models_app = typer.Typer(help="List, download and verify models.")
engines_app = typer.Typer(help="List, verify, import and delete engines.")
jobs_app = typer.Typer(help="List, show, resume, export and delete jobs.")
bench_app = typer.Typer(help="Compare configurations: time, memory, similarity.", cls=PromptOrCommand)
serve_app = typer.Typer(help="Serve the HTTP API, without the web app.", cls=PromptOrCommand)
keys_app = typer.Typer(help="Add, list and revoke the keys of the HTTP API.")
serve_app.add_typer(keys_app, name="keys")
for _name, _group in (
    ("models", models_app),
    ("engines", engines_app),
    ("jobs", jobs_app),
    ("bench", bench_app),
    ("serve", serve_app),
):
    app.add_typer(_group, name=_name)

JobId = Annotated[str, typer.Argument(metavar="ID", help="Job ID or a prefix of it.")]
JobIds = Annotated[list[str], typer.Argument(metavar="ID...", help="Job IDs or prefixes of them.")]
EngineIds = Annotated[
    list[str], typer.Argument(metavar="ID...", help="Engine IDs or prefixes of them, as shown by `engines list`.")
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
OptionalText = str | None
LosslessSound = Annotated[
    bool, typer.Option("--lossless-sound", help="Encode sound without loss, where the format can.")
]
# Of commands that make a video of a file.
VideoOut = Annotated[
    OptionalText, typer.Option(metavar="FILE.mp4", help="The video. [default: in outputs in the cache folder]")
]
VideoCrf = Annotated[
    int | None, typer.Option(metavar="N", help="H.264 constant rate factor. [default: 17; 10 for small videos]")
]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    make_private_files()
    terminal.name_output_errors()
    code = run(list(sys.argv[1:] if arguments is None else arguments))
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = OUTPUT_CLOSED
    except terminal.OutputUnwritableError as error:
        code = code if code != DONE else report_error(error.fact, as_json=False)
    else:
        sys.exit(code)
    # Python flushes again at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    try:
        return _run(arguments)
    except (terminal.OutputClosedError, SystemExit):  # typer exits when it cannot print the help
        return OUTPUT_CLOSED
    except terminal.OutputUnwritableError as error:
        return report_error(error.fact, as_json=False)


def _run(arguments: list[str]) -> int:
    wants_json = "--json" in arguments
    try:
        _check_encoding(arguments)
        code = app(arguments, prog_name=program(), standalone_mode=False)
        return code if isinstance(code, int) else DONE
    except (terminal.OutputClosedError, terminal.OutputUnwritableError):
        raise
    except TandemError as error:
        strategies = error.strategies if isinstance(error, MemoryShortError) else ()
        return report_error(error.fact, as_json=wants_json, strategies=strategies)
    except TyperException as error:
        return report_error(_usage_fact(error), as_json=wants_json)
    except (KeyboardInterrupt, typer.Abort, CancelledError):
        terminal.line("Cancelled.")
        return CANCELLED
    except Exception as error:  # the traceback is in the log
        logger.exception("A command failed")
        return report_internal_error(repr(error), as_json=wants_json)


def _check_encoding(arguments: list[str]) -> None:
    """Refuse arguments with bytes that are not UTF-8, for which Python has lone surrogates."""
    for argument in arguments:
        byte = _NOT_UTF8.search(argument)
        if byte is not None:
            text = re.sub(r"\\udc([89a-f][0-9a-f])", r"\\x\1", shortened(argument))
            raise SettingsError("cli.not_utf8", argument=text, byte=f"0x{ord(byte[0]) - 0xDC00:02X}")


def _usage_fact(error: TyperException) -> Fact:
    context: Any = getattr(error, "ctx", None)
    problem = error.format_message().strip()
    if not problem.endswith((".", "?")):
        problem += "."
    takes_prompt = context is not None and any(parameter.name == "prompt" for parameter in context.command.params)
    if context is not None and context.command.hidden:  # its group runs it
        context = context.parent
    command = program() if context is None else context.command_path
    if takes_prompt and problem.startswith("Got unexpected extra argument"):
        return Fact("cli.prompt_unquoted", {"problem": problem, "command": command})
    return Fact("cli.usage", {"problem": problem, "help": f"{command} --help"})


def _command(
    group: typer.Typer, name: str, *, hidden: bool = False
) -> Callable[[Callable[..., Outcome]], Callable[..., int]]:
    """Return a decorator that adds a command with the flags `--json` and `--offline` to a group.

    A command with a parameter `as_json` writes its JSON output itself.
    """

    def add(command: Callable[..., Outcome]) -> Callable[..., int]:
        writes_json = "as_json" in inspect.signature(command).parameters

        @functools.wraps(command)
        def wrapper(*, as_json: bool, offline: bool, **values: Any) -> int:
            if writes_json:
                values["as_json"] = as_json
            text = terminal.results_on_standard_error() if as_json else nullcontext()
            with text, downloads_disabled() if offline else nullcontext():
                outcome = command(**values)
            if isinstance(outcome, int):
                return outcome
            result, code = outcome if isinstance(outcome, tuple) else (outcome, DONE)
            if as_json:
                emit_json(result)
            return code

        with_options = with_flags(wrapper, {"as_json": JsonFlag, "offline": OfflineFlag})
        group.command(name, hidden=hidden)(with_options)
        return with_options

    return add


@app.callback(invoke_without_command=True)
@takes_web_options
def web(flags: Flags, context: typer.Context) -> None:
    """Generate a video from a sentence. Without a command, start the web app."""
    # typer calls this function before every command too.
    if "version" in flags and context.invoked_subcommand is None:
        terminal.result(__version__)
        return
    values = _settings_of(flags)
    loaded = settings.load(values, with_keys=context.invoked_subcommand == "serve")
    limit = next((name for name in values if name.startswith("share_")), None)
    if limit is not None and not loaded.share:
        raise SettingsError("cli.limit_without_share", flag=settings.flag_of(limit))
    log.start(loaded.log_file)
    if context.invoked_subcommand is not None:
        setting = next((name for name, value in values.items() if value is not None), None)
        setting = "cluster" if "cluster" in flags else setting
        if setting is not None:
            command_help = f"{context.command_path} {context.invoked_subcommand} --help"
            raise SettingsError("cli.web_flag_before_command", flag=settings.flag_of(setting), help=command_help)
        return
    from runtime.ui.app import launch

    launch(loaded, cluster="cluster" in flags)


def _settings_of(flags: Flags) -> dict[str, Any]:
    """Return the settings that the web app's flags set."""
    switches = ("no_browser", "version", "cluster", "enable_tensorrt", "tensorrt_text_encoders", "tensorrt_transformer")
    values = {name: value for name, value in flags.items() if name not in switches}
    if "no_browser" in flags:
        values["browser"] = False
    values["tensorrt"] = settings.tensorrt_from_flags(
        enable="enable_tensorrt" in flags,
        text_encoders="tensorrt_text_encoders" in flags,
        transformer="tensorrt_transformer" in flags,
    )
    return values


@_command(app, "generate")
@takes_request_or_list
def generate(
    flags: Flags,
    prompts: Annotated[
        OptionalText, typer.Option(metavar="FILE", help="One video for each line of a text file, instead of PROMPT.")
    ] = None,
    images_of: Annotated[
        OptionalText, typer.Option(metavar="FOLDER", help="One video for each image of a folder.")
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPTION=VALUES",
            help="One video for each value, as in steps=10,20 or seed=1..3, or each combination. Repeatable.",
        ),
    ] = None,
    enhance: Annotated[
        bool, typer.Option("--enhance", help="Let the chat model of TANDEM_ENHANCER write the prompt in more detail.")
    ] = False,
    out: Annotated[
        OptionalText,
        typer.Option(
            metavar="FILE.mp4", help="File of the video. An existing file is replaced once the new video is complete."
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before a video that takes hours.")] = False,
    as_json: JsonFlag = False,
) -> int:
    """Generate one video, or several, and print the paths."""
    from runtime.cli import batches
    from runtime.cli.generate import generate as run_generate
    from runtime.cli.generate import generate_all

    requests = batches.requests_of(flags, prompts, images_of, grid or [], out)
    if requests is None:
        return run_generate(request_from_flags(flags), out, confirmed=yes, as_json=as_json, enhances=enhance)
    return generate_all(requests, confirmed=yes, as_json=as_json, enhances=enhance)


@_command(app, "enhance")
def enhance_prompt(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What the video shows.")],
    model: Annotated[
        OptionalText,
        typer.Option(metavar="NAME|DIR", help="The model that the prompt is for. [default: TANDEM_MODEL]"),
    ] = None,
    from_image: Annotated[bool, typer.Option("--from-image", help="The video begins with an image.")] = False,
) -> Outcome:
    """Print a prompt in more detail, by the chat model of TANDEM_ENHANCER."""
    from runtime.cli.enhance import enhance

    return enhance(prompt, model, from_image=from_image)


@_command(app, "plan")
@takes_request
def plan(request: GenerationRequest) -> Outcome:
    """Show backends, reasons, memory and time without running anything."""
    from runtime.cli.plan_and_doctor import show_plan

    return show_plan(request)


@_command(app, "doctor")
def doctor() -> Outcome:
    """Show what this machine has, what is missing, and how to fix it."""
    from runtime.cli.plan_and_doctor import show_doctor

    result = show_doctor()
    return result, DONE if result["ok"] else USER_ERROR


@_command(app, "build")
@takes_options(
    "model", "width", "height", "frames", "backend", "quantization", "lora", "interpolate", "upscale", "upscaler"
)
def build(
    request: GenerationRequest,
    again: Annotated[bool, typer.Option("--again", help="Rebuild existing engines too.")] = False,
) -> Outcome:
    """Build and measure the engines for a model and a size."""
    from runtime.cli import engines

    result = engines.build(request, again=again)
    return result, USER_ERROR if result["failed"] else DONE


@_command(app, "decode")
def decode(
    latents: Annotated[str, typer.Argument(metavar="LATENTS", help="A .safetensors or .npy file.")],
    model: Annotated[
        OptionalText,
        typer.Option(metavar="NAME|DIR", help="The model whose decoder made or takes them. [default: TANDEM_MODEL]"),
    ] = None,
    out: Annotated[
        OptionalText, typer.Option(metavar="FILE.mp4", help="The video. [default: in outputs in the cache folder]")
    ] = None,
    fps: Annotated[int | None, typer.Option(metavar="N", help="Frames per second. [default: the model's]")] = None,
    channels: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="What each frame shows, from left to right: rgb, or numbers of channels, such as rgb,3.",
        ),
    ] = "rgb",
    crf: Annotated[
        int | None, typer.Option(metavar="N", help="H.264 constant rate factor. [default: 17; 10 for small videos]")
    ] = None,
    backend: Annotated[
        str, typer.Option(metavar="BACKEND", help="What runs a decoder of single frames; a missing engine is built.")
    ] = "auto",
) -> Outcome:
    """Decode a file of latents to a video."""
    from runtime.cli import decode as command

    return command.decode(latents, model, out, fps=fps, channels=channels, crf=crf, backend=backend)


@_command(app, "upscale")
def upscale(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A video: MP4, MKV, WebM, GIF or another.")],
    scale: Annotated[
        int | None, typer.Option(metavar="2|3|4", help="How many times larger. [default: 4, or what the upscaler does]")
    ] = None,
    upscaler: Annotated[
        OptionalText,
        typer.Option(
            metavar="NAME|FILE", help="One of `models list`, or a .safetensors file. [default: realesr-animevideov3]"
        ),
    ] = None,
    out: VideoOut = None,
    crf: VideoCrf = None,
    backend: Annotated[
        str, typer.Option(metavar="BACKEND", help="What runs the upscaler; a missing engine is built.")
    ] = "auto",
) -> Outcome:
    """Enlarge a video, with its sound."""
    from runtime.cli import upscale as command

    return command.upscale(file, out, scale=scale, upscaler=upscaler, crf=crf, backend=backend)


@_command(app, "interpolate")
def interpolate(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A video: MP4, MKV, WebM, GIF or another.")],
    factor: Annotated[int, typer.Option(metavar="2|4", help="How many times as many frames.")] = 2,
    slow: Annotated[bool, typer.Option("--slow", help="Keep the frame rate: slow motion, without sound.")] = False,
    out: VideoOut = None,
    crf: VideoCrf = None,
) -> Outcome:
    """Make a video smoother, with its sound, or slower."""
    from runtime.cli import interpolate as command

    return command.interpolate(file, out, factor=factor, slow=slow, crf=crf)


@_command(app, "export")
@takes_options("model", "width", "height", "frames")
def export(
    request: GenerationRequest,
    component: Annotated[
        str, typer.Option(metavar="NAME", help="One of the model's components, such as transformer_2 or vae_encoder.")
    ] = "transformer",
    out: Annotated[str, typer.Option(metavar="FOLDER", help="Folder for the ONNX files.")] = "onnx",
) -> Outcome:
    """Export one component as ONNX and compare it with PyTorch."""
    from runtime.cli import engines

    return engines.export(component, request, out)


@_command(models_app, "list")
def models_list() -> Outcome:
    """List installed and published models with their requirements."""
    from runtime.cli.models import show_models

    return show_models()


@_command(models_app, "show")
def models_show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name from `models list`, or a model's folder.")],
) -> Outcome:
    """Show what a model makes, and what it needs in general and on this machine."""
    from runtime.cli.models import show_model

    return show_model(name)


@_command(models_app, "download")
def models_download(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name from `models list`, or OWNER/REPOSITORY.")],
    revision: Annotated[
        OptionalText,
        typer.Option(metavar="REVISION", help="A branch, tag or commit. [default: the installed one, else main]"),
    ] = None,
    mirror: Annotated[
        OptionalText, typer.Option(metavar="URL", help="Address of another hub. [default: TANDEM_HUB]")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Agree to the license without being asked.")] = False,
    without_transformers: Annotated[
        bool,
        typer.Option(
            "--without-transformers",
            help="Leave out the weights of transformers: for transformers in single files.",
        ),
    ] = False,
    enhancer: Annotated[
        bool, typer.Option("--enhancer", help="OWNER/REPOSITORY is a chat model that enhances prompts.")
    ] = False,
    variant: Annotated[
        OptionalText,
        typer.Option(
            metavar="NAME",
            help="A variant with smaller transformers: fits (the one for this machine), original, or a name of "
            "`models show`. [default: original]",
        ),
    ] = None,
) -> Outcome:
    """Download a model, or its missing and damaged files; resumes an earlier download."""
    from runtime.cli.models import download

    return download(
        name,
        revision,
        mirror,
        agreed=yes,
        without_transformers=without_transformers,
        enhancer=enhancer,
        variant=variant,
    )


@_command(models_app, "verify")
def models_verify(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME...]", help="Downloaded models. [default: all]"),
    ] = None,
) -> Outcome:
    """Compare every file of downloaded models with its hash."""
    from runtime.cli.models import verify

    result = verify(names or [])
    return result, DONE if result["ok"] else USER_ERROR


@_command(engines_app, "list")
def engines_list() -> Outcome:
    """List the engines, most recently used first."""
    from runtime.cli import engines

    return engines.listing()


@_command(engines_app, "verify")
def engines_verify(
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ID...]", help="Engine IDs or prefixes of them. [default: all]"),
    ] = None,
) -> Outcome:
    """Compare engines with PyTorch again."""
    from runtime.cli import engines

    result = engines.verify(ids or [])
    return result, DONE if result["ok"] else USER_ERROR


@_command(engines_app, "delete")
def engines_delete(ids: EngineIds) -> Outcome:
    """Delete engines."""
    from runtime.cli import engines

    return engines.delete(ids)


@_command(engines_app, "prune")
def engines_prune(
    max_size: Annotated[
        OptionalText,
        typer.Option(metavar="SIZE", help="Size to keep, such as 500MB or 20GB. [default: TANDEM_ENGINE_CACHE_GB]"),
    ] = None,
) -> Outcome:
    """Delete the least recently used engines until the rest fit a size; pinned engines are kept."""
    from runtime.cli import engines

    return engines.prune(max_size)


@_command(engines_app, "import")
def engines_import(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A .trt, .plan, .engine or .onnx file that was built elsewhere.")
    ],
    component: Annotated[
        OptionalText,
        typer.Option(
            metavar="NAME",
            help="transformer, transformer_2, vae or text_encoder. [default: found by the file's weights]",
        ),
    ] = None,
    model: Annotated[
        OptionalText, typer.Option(metavar="NAME|DIR", help="The model that it was built from. [default: TANDEM_MODEL]")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Trust the file without being asked.")] = False,
) -> Outcome:
    """Import an engine that was built elsewhere, after comparing it with PyTorch."""
    from runtime.cli import engines

    return engines.import_file(file, component, model, trusted=yes)


@_command(engines_app, "pin")
def engines_pin(ids: EngineIds) -> Outcome:
    """Exclude engines from automatic deletion."""
    from runtime.cli import engines

    return engines.pin(ids, pinned=True)


@_command(engines_app, "unpin")
def engines_unpin(ids: EngineIds) -> Outcome:
    """Allow automatic deletion of engines."""
    from runtime.cli import engines

    return engines.pin(ids, pinned=False)


@_command(jobs_app, "list")
def jobs_list(
    state: Annotated[
        list[str] | None,
        typer.Option(help="Only jobs that are queued, running, done, failed, cancelled or interrupted. Repeatable."),
    ] = None,
    search: Annotated[str, typer.Option(metavar="TEXT", help="Only jobs whose prompt contains these words.")] = "",
    limit: Annotated[int, typer.Option(metavar="N", min=0, help="Maximum number of jobs; 0 for all.")] = 100,
    after: Annotated[
        OptionalText, typer.Option(metavar="ID", help="Only jobs that follow this one in the list.")
    ] = None,
) -> Outcome:
    """List the jobs, newest first."""
    from runtime.cli import jobs

    return jobs.listing(state or [], search, limit, after)


@_command(jobs_app, "show")
def jobs_show(
    job: JobId,
    with_prompt: Annotated[bool, typer.Option("--with-prompt", help="Include prompts and paths.")] = False,
) -> Outcome:
    """Show job diagnostics for support, without prompts and paths."""
    from runtime.cli import jobs

    return jobs.details(job, with_prompt=with_prompt)


@_command(jobs_app, "resume")
def jobs_resume(
    job: JobId,
    out: Annotated[
        OptionalText, typer.Option(metavar="FILE.mp4", help="Another file of the video. [default: the job's]")
    ] = None,
    whole: Annotated[bool, typer.Option("--all", help="All videos of its batch that are not made yet.")] = False,
    as_json: JsonFlag = False,
) -> int:
    """Resume an interrupted, cancelled or failed job, or continue a video that ended after a section."""
    from runtime.cli.generate import resume, resume_batch

    if not whole:
        return resume(job, out, as_json=as_json)
    if out is not None:
        raise InvalidRequestError("out", "cli.out_of_several")
    return resume_batch(job, as_json=as_json)


@_command(jobs_app, "sheet")
def jobs_sheet(job: JobId) -> Outcome:
    """Write the contact sheet of a job's batch, and a page with its videos, to the folder for videos."""
    from runtime.cli import jobs

    return jobs.sheet(job)


@_command(jobs_app, "extend")
@takes_changes(
    "negative_prompt", "frames", "seconds", "steps", "guidance", "seed", "last_image", "keyframe", "lora", "backend",
    "interpolate", "upscale", "upscaler", "crf", "sound", "no_sound",
)  # fmt: skip
def jobs_extend(
    changes: Flags,
    job: JobId,
    out: Annotated[
        OptionalText,
        typer.Option(metavar="FILE.mp4", help="The longer video. [default: in outputs in the cache folder]"),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before a video that takes hours.")] = False,
    as_json: JsonFlag = False,
) -> int:
    """Make a finished video longer; options that are not given are as before, except for the seed."""
    from runtime.cli.generate import extend

    return extend(job, changes, out, confirmed=yes, as_json=as_json)


@_command(jobs_app, "finish")
def jobs_finish(job: JobId) -> Outcome:
    """End a video that is made in sections after the current one; `jobs resume` continues it."""
    from runtime.cli import jobs

    return jobs.finish(job)


@_command(jobs_app, "delete")
def jobs_delete(ids: JobIds, yes: Yes = False) -> Outcome:
    """Delete jobs and their videos; they can be restored for 7 days."""
    from runtime.cli import jobs

    return jobs.delete(ids, confirmed=yes)


@_command(jobs_app, "undelete")
def jobs_undelete(ids: JobIds) -> Outcome:
    """Restore deleted jobs."""
    from runtime.cli import jobs

    return jobs.undelete(ids)


@_command(jobs_app, "export")
def jobs_export(
    clip: Annotated[str, typer.Argument(metavar="ID|FILE", help="Job ID or a prefix of it, or a video file.")],
    kind: Annotated[
        OptionalText,
        typer.Option("--format", metavar="NAME", help="A format of docs/export.md. [default: that of --out]"),
    ] = None,
    out: Annotated[
        OptionalText,
        typer.Option(
            metavar="FILE", help="The file; for png a new folder or a .zip. [default: in outputs in the cache folder]"
        ),
    ] = None,
    start: Annotated[float | None, typer.Option(metavar="SECONDS", help="Where the part starts. [default: 0]")] = None,
    end: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Where the part ends. [default: the end]")
    ] = None,
    width: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Smaller frames, in pixels. [default: 480 for gif, 720 for webp, else as it is]"
        ),
    ] = None,
    lossless_sound: LosslessSound = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Show size and time of the format, or of all, without writing a file.")
    ] = False,
) -> Outcome:
    """Export a finished video: another format, or a part of it."""
    from runtime.cli import clip_export

    return clip_export.export_clip(
        clip, out, kind=kind, start=start, end=end, width=width, lossless_sound=lossless_sound, only_plan=plan
    )


@_command(jobs_app, "join")
def jobs_join(
    clips: Annotated[
        list[str], typer.Argument(metavar="ID|FILE...", help="Job IDs or prefixes of them, or video files, in order.")
    ],
    kind: Annotated[
        OptionalText,
        typer.Option("--format", metavar="NAME", help="A format of docs/export.md. [default: that of --out]"),
    ] = None,
    out: Annotated[
        OptionalText, typer.Option(metavar="FILE", help="The file. [default: in outputs in the cache folder]")
    ] = None,
    lossless_sound: LosslessSound = False,
) -> Outcome:
    """Join videos of one size and frame rate into one."""
    from runtime.cli import clip_export

    return clip_export.join_clips(clips, out, kind=kind, lossless_sound=lossless_sound)


@_command(bench_app, "run", hidden=True)
@takes_flags
def bench(
    flags: Flags,
    prompt: Annotated[
        OptionalText, typer.Argument(metavar="[PROMPT]", help="Prompt of the clips. [default: a boat at sea]")
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            metavar='"NAME: FLAGS"',
            help="A configuration: options of `generate`, which override those given for all configurations. "
            "Repeatable; the first is the reference for the others.",
        ),
    ] = None,
    runs: Annotated[
        OptionalText, typer.Option(metavar="N", help="Measured runs of each configuration. [default: 3]")
    ] = None,
    warmup: Annotated[
        OptionalText, typer.Option(metavar="N", help="Warm-up runs of each configuration. [default: 1]")
    ] = None,
    out: Annotated[
        OptionalText,
        typer.Option(metavar="FOLDER", help="Folder for the results. [default: a new one in the cache folder]"),
    ] = None,
    keep_videos: Annotated[
        bool, typer.Option("--keep-videos", help="Keep one video of each configuration in that folder.")
    ] = False,
    as_json: JsonFlag = False,
) -> int:
    """Make the same clip in several configurations and compare time, memory and similarity.

    Without --config: PyTorch, every backend that can run all components here, and the planner's choice.
    `bench compare A.json B.json` compares two results.
    """
    from runtime.cli.bench import measure

    return measure(
        flags,
        prompt,
        config or [],
        runs=runs,
        warmup=warmup,
        out=out,
        keep_videos=keep_videos,
        as_json=as_json,
    )


@_command(bench_app, "compare")
def bench_compare(
    first: Annotated[str, typer.Argument(metavar="A.json", help="The earlier result.")],
    second: Annotated[str, typer.Argument(metavar="B.json", help="The later result.")],
) -> Outcome:
    """Compare two results: the ratio of durations for each configuration, and what cannot be compared."""
    from runtime.cli.bench import compare

    return compare(first, second)


@_command(serve_app, "run", hidden=True)
def serve(
    host: Annotated[
        OptionalText,
        typer.Option(
            metavar="ADDRESS", help="Address to listen on; others than 127.0.0.1 need a key. [default: 127.0.0.1]"
        ),
    ] = None,
    port: Annotated[OptionalText, typer.Option(metavar="N", help="Port to listen on. [default: 7860]")] = None,
    model: Annotated[
        OptionalText, typer.Option(metavar="NAME|DIR", help="Model of requests that name none. [default: diorama]")
    ] = None,
    keep_days: Annotated[
        OptionalText,
        typer.Option(metavar="N", help="Delete videos for good so many days after they ended. [default: never]"),
    ] = None,
    keep_videos: Annotated[
        OptionalText,
        typer.Option(metavar="N", help="Keep the newest N ended videos of each key. [default: all]"),
    ] = None,
    keep_bytes: Annotated[
        OptionalText,
        typer.Option(metavar="N", help="Keep the newest ended videos of each key up to N bytes. [default: all]"),
    ] = None,
    cluster: Annotated[bool, typer.Option("--cluster", help="Let other machines join and make the videos.")] = False,
    mcp: Annotated[bool, typer.Option("--mcp", help="Serve AI assistants at /mcp, too.")] = False,
) -> Outcome:
    """Serve the HTTP API, without the web app: queue, workers and /v1/videos."""
    from runtime.cli.serve import run as run_server

    retention = {"keep_days": keep_days, "keep_videos": keep_videos, "keep_bytes": keep_bytes}
    return run_server({"host": host, "port": port, "model": model, **retention}, cluster=cluster, mcp=mcp)


@_command(app, "mcp")
def mcp_program(
    port: Annotated[
        OptionalText, typer.Option(metavar="N", help="Port of the Tandem to use, or to start. [default: 7860]")
    ] = None,
    model: Annotated[
        OptionalText, typer.Option(metavar="NAME|DIR", help="Model of requests that name none. [default: diorama]")
    ] = None,
) -> Outcome:
    """Serve an AI assistant that starts this program, over standard input and output (MCP)."""
    from runtime.cli.serve import run_mcp

    return run_mcp({"port": port, "model": model})


@_command(app, "worker")
def worker(
    join: Annotated[str, typer.Option("--join", metavar="ADDRESS", help="The head, as in 192.168.1.5:7860.")],
    gpus: Annotated[
        int,
        typer.Option(
            "--gpus-per-worker", metavar="N", min=1, help="GPUs that one job may use; others run jobs of their own."
        ),
    ] = 1,
) -> Outcome:
    """Make videos for the head of a cluster, which runs `serve --cluster`, until Ctrl-C."""
    from runtime.cli.worker import run as run_worker

    return run_worker(join, gpus)


KeyName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the key.")]
Count = int | None


@_command(keys_app, "add")
def serve_keys_add(
    name: KeyName,
    videos: Annotated[
        int,
        typer.Option(metavar="N", min=1, max=10_000, help="Maximum number of queued and running videos. [default: 10]"),
    ] = 10,
    per_hour: Annotated[
        int, typer.Option(metavar="N", min=1, max=100_000, help="Maximum number of videos per hour. [default: 100]")
    ] = 100,
    frames: Annotated[
        Count,
        typer.Option(
            metavar="N", min=1, max=MAX_FRAMES, help="Maximum number of frames of a video. [default: no limit]"
        ),
    ] = None,
    steps: Annotated[
        Count,
        typer.Option(metavar="N", min=1, max=MAX_STEPS, help="Maximum number of steps of a video. [default: no limit]"),
    ] = None,
    size: Annotated[
        OptionalText,
        typer.Option(metavar="WIDTHxHEIGHT", help="Maximum number of pixels of a frame. [default: no limit]"),
    ] = None,
) -> Outcome:
    """Add an API key and print it. It is shown once; only its hash is stored."""
    from runtime.cli.serve import add_key

    counts = {"videos": videos, "per_hour": per_hour, "frames": frames, "steps": steps}
    return add_key(name, {name: count for name, count in counts.items() if count is not None}, size)


@_command(keys_app, "list")
def serve_keys_list() -> Outcome:
    """List the API keys and their limits."""
    from runtime.cli.serve import list_keys

    return list_keys()


@_command(keys_app, "revoke")
def serve_keys_revoke(name: KeyName) -> Outcome:
    """Revoke an API key at once, also in running servers."""
    from runtime.cli.serve import revoke_key

    return revoke_key(name)
