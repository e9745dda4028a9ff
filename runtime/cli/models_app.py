"""The commands about models: `models list`, `models download` and `models verify`."""

from typing import Annotated

import typer

from runtime.cli.common_flags import JsonFlag
from runtime.cli.exit_codes import DONE, USER_ERROR, emit_json

models_app = typer.Typer(help="The catalogue of models.", no_args_is_help=True)


@models_app.command("list")
def models_list(as_json: JsonFlag = False) -> None:
    """List the models at hand and the known ones that are not, with what each needs."""
    from runtime.cli.models import show_models

    result = show_models()
    if as_json:
        emit_json(result)


@models_app.command("download")
def models_download(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name from `models list`, or OWNER/REPOSITORY.")],
    revision: Annotated[
        str | None, typer.Option(metavar="REVISION", help="A branch, tag or commit. [default: what is here, else main]")
    ] = None,
    mirror: Annotated[
        str | None, typer.Option(metavar="URL", help="Another hub's address. [default: TANDEM_HUB]")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask: the licence is agreed to.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Fetch a model, or what is missing or wrong of it; goes on where an earlier download stopped."""
    from runtime.cli.model_downloads import download

    result = download(name, revision, mirror, agreed=yes)
    if as_json:
        emit_json(result)


@models_app.command("verify")
def models_verify(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME...]", help="Models that were downloaded. [default: all of them]"),
    ] = None,
    as_json: JsonFlag = False,
) -> int:
    """Read downloaded models through, and compare every file with its hash."""
    from runtime.cli.model_downloads import verify

    result = verify(names or [])
    if as_json:
        emit_json(result)
    return DONE if result["ok"] else USER_ERROR
