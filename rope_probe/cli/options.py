"""Options that several commands share: the same name, meaning and help everywhere."""

from typing import Annotated

import typer

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="Hub id, local folder, .gguf file, demo:smollm2 or demo:gemma3.", show_default=False
    ),
]
Text = Annotated[str | None, typer.Option("--text", metavar="FILE", help="UTF-8 text to read.")]
DatasetName = Annotated[
    str | None,
    typer.Option("--dataset", metavar="NAME", help="wikitext-103, pg19, or a hub data set with a 'text' column."),
]
Tokens = Annotated[
    str | None,
    typer.Option("--tokens", metavar="FILE.npy", help=r"Integer token ids \[segments, length]; no tokenizer needed."),
]
Segments = Annotated[int | None, typer.Option("--segments", metavar="N", help="Segments to read (default 16).")]
Length = Annotated[int | None, typer.Option("--length", metavar="T", help="Tokens per segment (default 1024).")]
Batch = Annotated[int | None, typer.Option("--batch", metavar="N", help="Segments per forward pass.")]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Of what is drawn at random.")]
Layers = Annotated[str | None, typer.Option("--layers", metavar="0-3,10", help="Only these layers.")]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="float32, bfloat16 or float16 (default: the checkpoint's own).")
]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1, … (default: a GPU if there is one).")]
DeviceMap = Annotated[str | None, typer.Option("--device-map", help="'auto' splits the model over GPUs.")]
StreamLayers = Annotated[
    bool | None,
    typer.Option(
        "--stream-layers/--no-stream-layers",
        help="Leave weights on disk and read one layer after the other (default: where they would not fit).",
        show_default=False,
    ),
]
Revision = Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit on the hub.")]
Rope = Annotated[
    str | None,
    typer.Option(
        "--rope", metavar="type=yarn,factor=4", help="Run under other rope parameters, merged with the config's."
    ),
]
Output = Annotated[
    str | None,
    typer.Option(
        "-o", "--output", metavar="FILE.nc", help="Result file (default: ANALYSIS-MODEL.nc here, numbered if taken)."
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on from where an interrupted run with the same output file stopped.")
]
Figure = Annotated[str | None, typer.Option("--figure", metavar="FILE", help="Draw to FILE.pdf, .png or .svg.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, and nothing else there.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the checkpoint (off by default).")
]
