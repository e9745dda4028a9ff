"""Flags of the web app, which are given without a command: types and help texts."""

from typing import Annotated

import typer

Text = str | None

Host = Annotated[Text, typer.Option(help="Address to listen on. [default: 127.0.0.1]")]
Port = Annotated[Text, typer.Option(help="Port to listen on. [default: 7860]")]
Auth = Annotated[
    Text,
    typer.Option(
        metavar="USER:PASSWORD", help="Require a password; needed if --host is not 127.0.0.1, generated for --share."
    ),
]
Model = Annotated[Text, typer.Option(metavar="NAME|DIR", help="Model that is selected at start. [default: diorama]")]
NoBrowser = Annotated[bool, typer.Option("--no-browser", help="Do not open a browser.")]
Offline = Annotated[bool, typer.Option("--offline", help="Disable downloads.")]
EnableTensorRT = Annotated[
    bool,
    typer.Option(
        "--enable-tensorrt", help="Select TensorRT for all components at start, or for those of the flags below."
    ),
]
TextEncoders = Annotated[
    bool, typer.Option("--tensorrt-text-encoders", help="With --enable-tensorrt: the text encoder.")
]
Transformer = Annotated[bool, typer.Option("--tensorrt-transformer", help="With --enable-tensorrt: the transformers.")]
Share = Annotated[
    bool, typer.Option("--share", help="Create a link for visitors, with a password and the limits below.")
]
ShareFrames = Annotated[
    Text, typer.Option(metavar="N", help="Maximum number of frames of a visitor's video. [default: the model's]")
]
ShareSize = Annotated[
    Text,
    typer.Option(
        metavar="WIDTHxHEIGHT", help="Maximum size of a visitor's video, in either orientation. [default: the model's]"
    ),
]
ShareSteps = Annotated[
    Text, typer.Option(metavar="N", help="Maximum number of steps of a visitor's video. [default: the model's]")
]
ShareQueue = Annotated[
    Text, typer.Option(metavar="N", help="Maximum number of queued and running videos per visitor. [default: 2]")
]
ShareQueueAll = Annotated[
    Text, typer.Option(metavar="N", help="Maximum number of queued and running videos of all visitors. [default: 10]")
]
ShareRate = Annotated[
    Text, typer.Option(metavar="N", help="Maximum number of videos per visitor and hour. [default: 20]")
]
Version = Annotated[bool, typer.Option("--version", help="Print the version and exit.")]
