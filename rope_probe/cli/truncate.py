"""rope-probe truncate: which pairs' rotation does a checkpoint need?"""

from typing import Annotated, Any

import typer

from . import options as opt


def truncate(
    model: opt.Model,
    text: opt.Text = None,
    dataset: opt.DatasetName = None,
    tokens: opt.Tokens = None,
    segments: opt.Segments = None,
    length: opt.Length = None,
    batch: opt.Batch = None,
    keep: Annotated[
        str | None,
        typer.Option(
            "--keep", metavar="1,0.8,0.5", help="Shares of the pairs that go on turning (default: 1, 0.95, … 0)."
        ),
    ] = None,
    floor: Annotated[
        str | None,
        typer.Option("--floor", metavar="0.5,1,1.5", help="Stop pairs slower than so many times 2π / trained length."),
    ] = None,
    knockout: Annotated[
        str | None,
        typer.Option(
            "--knockout",
            metavar="unrotate,remove",
            help="Each pair alone loses its rotation, or its content.",
        ),
    ] = None,
    pairs: Annotated[
        str | None, typer.Option("--pairs", metavar="0-31", help="Which pairs to knock out (default: all).")
    ] = None,
    reverse: Annotated[bool, typer.Option("--reverse", help="--keep and --floor cut from the fast end.")] = False,
    layers: Annotated[str | None, typer.Option("--layers", metavar="0-3,10", help="Cut only in these layers.")] = None,
    layer_type: Annotated[
        str | None,
        typer.Option(
            "--layer-type",
            metavar="TYPE,…",
            help="Cut only in layers of this type (sliding_attention, full_attention, …); several: one at a time.",
        ),
    ] = None,
    bands: Annotated[
        str | None,
        typer.Option("--bands", metavar="FILE.nc", help="A bands result to compare with (default: measured here)."),
    ] = None,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
    device_map: opt.DeviceMap = None,
    stream_layers: opt.StreamLayers = None,
    revision: opt.Revision = None,
    output: opt.Output = None,
    resume: opt.Resume = False,
    figure: opt.Figure = None,
    json: opt.Json = False,
    trust_remote_code: opt.TrustRemoteCode = False,
) -> None:
    """Perplexity while some rotary pairs do not rotate: which of them does the model need?

    --figure t.pdf draws perplexity against the pairs kept; with --floor and --knockout
    also t-floor.pdf and t-knockout.pdf (the first of what was asked for is t.pdf).

    Example:  rope-probe truncate demo:smollm2 --segments 4 --keep 1,0.8,0.5,0
    """
    from . import common

    cut_layers = common.parse_layers(layers)
    wanted: dict[str, Any] = {
        "keep": common.parse_floats(keep, "--keep"),
        "floor": common.parse_floats(floor, "--floor"),
        "knockout": common.parse_words(knockout),
        "pairs": common.parse_layers(pairs, "--pairs", "pairs"),
    }
    drawing = common.figure_path(figure)
    path = common.output_path(output, "truncate", model, drawing, resume)
    source: dict[str, Any] = {"text": text, "dataset": dataset, "tokens": tokens, "segments": segments}
    source |= {"length": length, "batch": batch}
    common.check_sources(**source)
    from ..probes.truncate import check_options
    from ..probes.truncate import truncate as measure
    from ..results import load

    check_options(**wanted)
    compared = None if bands is None else load(bands)
    ckpt = common.open_model(
        model,
        revision=revision,
        dtype=dtype,
        device=device,
        device_map=device_map,
        stream_layers=stream_layers,
        trust_remote_code=trust_remote_code,
    )
    common.carry_out(
        measure,
        ckpt,
        path,
        drawing,
        json,
        resume,
        **source,
        **wanted,
        reverse=reverse,
        layers=cut_layers,
        layer_type=common.parse_words(layer_type),
        bands=compared,
    )
