"""`bench` and `bench compare` as the command line parses them."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from runtime.cli.exit_codes import emit_json
from runtime.cli.request_flags import takes_flags

JsonFlag = Annotated[bool, typer.Option("--json", help="End standard output with one JSON object on its last line.")]
ConfigFlag = Annotated[
    list[str] | None,
    typer.Option(
        metavar='"NAME: FLAGS"',
        help="A configuration, repeatable: flags as `generate` takes them, in place of those given for all. The first "
        "is what the others are compared with.",
    ),
]
RunsFlag = Annotated[str | None, typer.Option(metavar="N", help="How many runs of each count. [default: 3]")]
WarmupFlag = Annotated[str | None, typer.Option(metavar="N", help="How many go before them. [default: 1]")]
OutFlag = Annotated[
    str | None, typer.Option(metavar="FOLDER", help="Where the result goes. [default: a new one in the cache folder]")
]


class PromptOrCommand(TyperGroup):
    """A group whose first word may also be the argument of its command `run`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take `run` for what names no other command."""
        return super().parse_args(ctx, args if args and args[0] in self.commands else ["run", *args])


bench_app = typer.Typer(help="Configurations side by side.", cls=PromptOrCommand)


@bench_app.command("run", hidden=True)
@takes_flags
def bench(
    flags: Mapping[str, Any],
    prompt: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", help="What the clips show. [default: a boat at sea]")
    ] = None,
    config: ConfigFlag = None,
    runs: RunsFlag = None,
    warmup: WarmupFlag = None,
    out: OutFlag = None,
    keep_videos: Annotated[bool, typer.Option("--keep-videos", help="Keep a video of each in that folder.")] = False,
    as_json: JsonFlag = False,
) -> int:
    """Make the same clip in several configurations, in turn: seconds, memory, likeness.

    Without --config: PyTorch, every backend that can run here, and what the planner takes. `bench compare A.json
    B.json` compares two results.
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


@bench_app.command("compare")
def bench_compare(
    one: Annotated[str, typer.Argument(metavar="A.json", help="A result: what was before.")],
    other: Annotated[str, typer.Argument(metavar="B.json", help="Another: what is now.")],
    as_json: JsonFlag = False,
) -> None:
    """Say how many times as long each configuration takes in a second result, and what cannot be compared."""
    from runtime.cli.bench import compare

    result = compare(one, other)
    if as_json:
        emit_json(result)
