"""Parses the command line and ends every command with text for people, JSON for programs and an exit code.

Exit codes: 0 done; 2 user error; 1 internal error; 130 cancelled.
"""

import logging
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.exceptions import TyperException

from runtime import __version__
from runtime.cli import terminal, web_flags
from runtime.cli.bench_commands import bench_app
from runtime.cli.common_flags import JsonFlag, take_offline
from runtime.cli.exit_codes import (
    CANCELLED,
    DONE,
    INTERNAL_ERROR,
    USER_ERROR,
    emit_json,
    report_error,
    report_internal_error,
)
from runtime.cli.models_app import models_app
from runtime.cli.request_flags import takes_options, takes_request
from runtime.core import log, settings
from runtime.core.cancel import CancelledError
from runtime.core.errors import MemoryShortError, SettingsError, TandemError
from runtime.core.facts import Fact
from runtime.core.request import GenerationRequest

logger = logging.getLogger(__name__)

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(models_app, name="models")
engines_app = typer.Typer(help="The engine library.", no_args_is_help=True)
app.add_typer(engines_app, name="engines")
jobs_app = typer.Typer(help="Finished, running and interrupted jobs.", no_args_is_help=True)
app.add_typer(jobs_app, name="jobs")
app.add_typer(bench_app, name="bench")

JobIds = Annotated[list[str], typer.Argument(metavar="ID...", help="Jobs, by id or its first letters.")]
EngineIds = Annotated[list[str], typer.Argument(metavar="ID...", help="Engines, as `engines list` shows them.")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    wants_json = "--json" in arguments
    try:
        code = app(arguments, prog_name="app.py", standalone_mode=False)
        return code if isinstance(code, int) else DONE
    except TandemError as error:
        strategies = error.strategies if isinstance(error, MemoryShortError) else ()
        return report_error(error.fact, as_json=wants_json, strategies=strategies)
    except TyperException as error:
        problem = error.format_message().strip().rstrip(".")
        fact = Fact("cli.usage", {"problem": problem, "help": _help_of(_command(arguments))})
        return report_error(fact, as_json=wants_json)
    except (KeyboardInterrupt, typer.Abort, CancelledError):
        terminal.line("Cancelled.")
        return CANCELLED
    except BrokenPipeError:
        # The reader of standard output is gone.
        sys.stderr.close()
        return INTERNAL_ERROR
    except Exception as error:  # the traceback is in the log
        logger.exception("A command failed")
        return report_internal_error(repr(error), as_json=wants_json)


def _command(arguments: list[str]) -> str:
    """Return the command among the arguments; empty if there is none."""
    known = {"generate", "plan", "build", "engines", "export", "models", "jobs", "bench", "doctor"}
    return next((word for word in arguments if word in known), "")


def _help_of(command: str) -> str:
    starter = "install.bat" if sys.platform == "win32" else "./install.sh"
    return f"{' '.join(filter(None, (starter, command, '--help')))}"


@app.callback(invoke_without_command=True)
def web(
    context: typer.Context,
    host: web_flags.Host = None,
    port: web_flags.Port = None,
    auth: web_flags.Auth = None,
    model: web_flags.Model = None,
    no_browser: web_flags.NoBrowser = False,
    offline: web_flags.Offline = False,
    enable_tensorrt: web_flags.EnableTensorRT = False,
    tensorrt_text_encoders: web_flags.TextEncoders = False,
    tensorrt_transformer: web_flags.Transformer = False,
    share: web_flags.Share = False,
    share_frames: web_flags.ShareFrames = None,
    share_size: web_flags.ShareSize = None,
    share_steps: web_flags.ShareSteps = None,
    share_queue: web_flags.ShareQueue = None,
    share_queue_all: web_flags.ShareQueueAll = None,
    share_rate: web_flags.ShareRate = None,
    version: web_flags.Version = False,
) -> None:
    """Generate a video from a sentence. Without a command, start the web app."""
    tensorrt = settings.tensorrt_from_flags(
        enable=enable_tensorrt, text_encoders=tensorrt_text_encoders, transformer=tensorrt_transformer
    )
    flags = {
        "host": host,
        "port": port,
        "auth": auth,
        "model": model,
        "browser": False if no_browser else None,
        "offline": True if offline else None,
        "tensorrt": tensorrt,
        "share": True if share else None,
        "share_frames": share_frames,
        "share_size": share_size,
        "share_steps": share_steps,
        "share_queue": share_queue,
        "share_queue_all": share_queue_all,
        "share_rate": share_rate,
    }
    loaded = settings.load(flags)
    limit = next((name for name, value in flags.items() if name.startswith("share_") and value is not None), None)
    if limit and not loaded.share:
        raise SettingsError("cli.limit_without_share", flag=settings.flag_of(limit))
    log.start(loaded.log_file)
    if context.invoked_subcommand is not None:
        given = next((name for name, value in flags.items() if value is not None), None)
        if given:
            command_help = _help_of(context.invoked_subcommand)
            raise SettingsError("cli.web_flag_before_command", flag=settings.flag_of(given), help=command_help)
        return
    if version:
        sys.stdout.write(f"{__version__}\n")
        return
    from runtime.ui.app import launch

    launch(loaded)


@app.command()
@takes_request
def generate(
    request: GenerationRequest,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.mp4", help="The video's file; an existing one is replaced when the new one is complete."
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> int:
    """Generate one video."""
    from runtime.cli.generate import generate as run_generate

    return run_generate(request, out, as_json=as_json)


@app.command()
@takes_request
def plan(request: GenerationRequest, as_json: JsonFlag = False) -> None:
    """Show backends, reasons, memory and time without running anything."""
    from runtime.cli.plan_and_doctor import show_plan

    result = show_plan(request)
    if as_json:
        emit_json(result)


@app.command()
@takes_options("model", "width", "height", "frames", "backend", "lora")
def build(
    request: GenerationRequest,
    again: Annotated[bool, typer.Option("--again", help="Rebuild existing engines too.")] = False,
    as_json: JsonFlag = False,
) -> int:
    """Build and measure the engines for a model and a size."""
    from runtime.cli import engines

    result = engines.build(request, again=again)
    if as_json:
        emit_json(result)
    return USER_ERROR if result["failed"] else DONE


@app.command()
@takes_options("model", "width", "height", "frames")
def export(
    request: GenerationRequest,
    component: Annotated[
        str, typer.Option(metavar="NAME", help="text_encoder, transformer, transformer_2 or vae.")
    ] = "transformer",
    out: Annotated[str, typer.Option(metavar="FOLDER", help="The folder for the ONNX files.")] = "onnx",
    as_json: JsonFlag = False,
) -> None:
    """Export one component as ONNX and compare it with PyTorch."""
    from runtime.cli import engines

    result = engines.export(component, request, out)
    if as_json:
        emit_json(result)


@engines_app.command("list")
def engines_list(as_json: JsonFlag = False) -> None:
    """List the engines, most recently used first."""
    from runtime.cli import engines

    result = engines.listing()
    if as_json:
        emit_json(result)


@engines_app.command("verify")
def engines_verify(
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ID...]", help="Engines, as `engines list` shows them. [default: all]"),
    ] = None,
    as_json: JsonFlag = False,
) -> int:
    """Compare engines with PyTorch again."""
    from runtime.cli import engines

    result = engines.verify(ids or [])
    if as_json:
        emit_json(result)
    return DONE if result["ok"] else USER_ERROR


@engines_app.command("delete")
def engines_delete(ids: EngineIds, as_json: JsonFlag = False) -> None:
    """Delete engines."""
    from runtime.cli import engines

    result = engines.delete(ids)
    if as_json:
        emit_json(result)


@engines_app.command("prune")
def engines_prune(
    max_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="The size to keep, as in 500MB or 20GB. [default: TANDEM_ENGINE_CACHE_GB]"),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Delete the least recently used engines until the rest fit a size; pinned engines are kept."""
    from runtime.cli import engines

    result = engines.prune(max_size)
    if as_json:
        emit_json(result)


@engines_app.command("import")
def engines_import(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A .trt, .plan, .engine or .onnx file that was built elsewhere.")
    ],
    component: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="transformer, transformer_2, vae or text_encoder. [default: by its weights]",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME|DIR", help="The model that it was built from. [default: TANDEM_MODEL]")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask: the file is trusted.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Import an engine that was built elsewhere, after comparing it with PyTorch."""
    from runtime.cli.engine_import import import_file

    result = import_file(file, component, model, trusted=yes)
    if as_json:
        emit_json(result)


@engines_app.command("pin")
def engines_pin(ids: EngineIds, as_json: JsonFlag = False) -> None:
    """Exclude engines from automatic deletion."""
    from runtime.cli import engines

    result = engines.pin(ids, pinned=True)
    if as_json:
        emit_json(result)


@engines_app.command("unpin")
def engines_unpin(ids: EngineIds, as_json: JsonFlag = False) -> None:
    """Allow automatic deletion of engines."""
    from runtime.cli import engines

    result = engines.pin(ids, pinned=False)
    if as_json:
        emit_json(result)


@jobs_app.command("list")
def jobs_list(
    state: Annotated[
        list[str] | None,
        typer.Option(help="Only jobs that are queued, running, done, failed, cancelled or interrupted. Repeatable."),
    ] = None,
    search: Annotated[str, typer.Option(metavar="TEXT", help="Only jobs whose prompt contains these words.")] = "",
    as_json: JsonFlag = False,
) -> None:
    """List the jobs, newest first."""
    from runtime.cli import jobs

    result = jobs.listing(state or [], search)
    if as_json:
        emit_json(result)


@jobs_app.command("show")
def jobs_show(
    job: Annotated[str, typer.Argument(metavar="ID", help="A job, by id or its first letters.")],
    with_prompt: Annotated[bool, typer.Option("--with-prompt", help="Include prompts and paths.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show job diagnostics for support, without prompts and paths."""
    from runtime.cli import jobs

    result = jobs.details(job, with_prompt=with_prompt)
    if as_json:
        emit_json(result)


@jobs_app.command("resume")
def jobs_resume(
    job: Annotated[str, typer.Argument(metavar="ID", help="A job, by id or its first letters.")],
    as_json: JsonFlag = False,
) -> int:
    """Resume an interrupted, cancelled or failed job."""
    from runtime.cli.generate import resume

    return resume(job, as_json=as_json)


@jobs_app.command("delete")
def jobs_delete(
    ids: JobIds,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Delete jobs and their videos; they can be restored for 7 days."""
    from runtime.cli import jobs

    result = jobs.delete(ids, sure=yes)
    if as_json:
        emit_json(result)


@jobs_app.command("undelete")
def jobs_undelete(ids: JobIds, as_json: JsonFlag = False) -> None:
    """Restore deleted jobs."""
    from runtime.cli import jobs

    result = jobs.undelete(ids)
    if as_json:
        emit_json(result)


@app.command()
def doctor(as_json: JsonFlag = False) -> int:
    """Show what this machine has, what is missing, and how to fix it."""
    from runtime.cli.plan_and_doctor import show_doctor

    result = show_doctor()
    if as_json:
        emit_json(result)
    return DONE if result["ok"] else USER_ERROR


for _group in (app, models_app, engines_app, jobs_app, bench_app):
    take_offline(_group)
