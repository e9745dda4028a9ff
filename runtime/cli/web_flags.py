"""The flags of the web app, which come before any command: their types and their help."""

from typing import Annotated

import typer

Text = str | None

Host = Annotated[Text, typer.Option(help="Address to listen on. [default: 127.0.0.1]")]
Port = Annotated[Text, typer.Option(help="Port to listen on. [default: 7860]")]
Auth = Annotated[
    Text,
    typer.Option(metavar="USER:PASSWORD", help="Ask for a password; needed beyond 127.0.0.1, made up for --share."),
]
Model = Annotated[Text, typer.Option(metavar="NAME|DIR", help="The model to start with. [default: diorama]")]
NoBrowser = Annotated[bool, typer.Option("--no-browser", help="Do not open a browser.")]
Offline = Annotated[bool, typer.Option("--offline", help="Fetch nothing from the internet.")]
EnableTensorRT = Annotated[
    bool, typer.Option("--enable-tensorrt", help="Start with every part on TensorRT, or with those named below.")
]
TextEncoders = Annotated[
    bool, typer.Option("--tensorrt-text-encoders", help="The text encoder; with --enable-tensorrt.")
]
Transformer = Annotated[bool, typer.Option("--tensorrt-transformer", help="The transformers; with --enable-tensorrt.")]
Share = Annotated[
    bool, typer.Option("--share", help="Make a link for visitors, with a password and within the limits below.")
]
ShareFrames = Annotated[
    Text, typer.Option(metavar="N", help="The most frames of a visitor's video. [default: the model's]")
]
ShareSize = Annotated[
    Text, typer.Option(metavar="WIDTHxHEIGHT", help="Its largest size, turned either way. [default: the model's]")
]
ShareSteps = Annotated[Text, typer.Option(metavar="N", help="Its most steps. [default: the model's]")]
ShareQueue = Annotated[
    Text, typer.Option(metavar="N", help="Videos that one visitor may have waiting or running. [default: 2]")
]
ShareQueueAll = Annotated[Text, typer.Option(metavar="N", help="The same for all visitors together. [default: 10]")]
ShareRate = Annotated[
    Text, typer.Option(metavar="N", help="Videos that one visitor may ask for in an hour. [default: 20]")
]
Version = Annotated[bool, typer.Option("--version", help="Print the version and stop.")]
