"""Flags of the commands `models list`, `models download` and `models verify`."""

from typing import Annotated

import typer

from runtime.cli.common_flags import JsonFlag
from runtime.cli.exit_codes import DONE, USER_ERROR, emit_json

models_app = typer.Typer(help="List, download and verify models.", no_args_is_help=True)


@models_app.command("list")
def models_list(as_json: JsonFlag = False) -> None:
    """List installed and published models with their requirements."""
    from runtime.cli.models import show_models

    result = show_models()
    if as_json:
        emit_json(result)


@models_app.command("download")
def models_download(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name from `models list`, or OWNER/REPOSITORY.")],
    revision: Annotated[
        str | None,
        typer.Option(metavar="REVISION", help="A branch, tag or commit. [default: the installed one, else main]"),
    ] = None,
    mirror: Annotated[
        str | None, typer.Option(metavar="URL", help="Address of another hub. [default: TANDEM_HUB]")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Agree to the license without being asked.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Download a model, or its missing and damaged files; resumes an earlier download."""
    from runtime.cli.model_downloads import download

    result = download(name, revision, mirror, agreed=yes)
    if as_json:
        emit_json(result)


@models_app.command("verify")
def models_verify(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME...]", help="Downloaded models. [default: all]"),
    ] = None,
    as_json: JsonFlag = False,
) -> int:
    """Compare every file of downloaded models with its hash."""
    from runtime.cli.model_downloads import verify

    result = verify(names or [])
    if as_json:
        emit_json(result)
    return DONE if result["ok"] else USER_ERROR
