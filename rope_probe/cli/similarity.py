"""rope-probe similarity: do similar tokens get more attention?"""

from typing import Annotated, Any

import typer

from . import options as opt


def similarity(
    model: opt.Model,
    text: opt.Text = None,
    dataset: opt.DatasetName = None,
    tokens: opt.Tokens = None,
    segments: opt.Segments = None,
    length: opt.Length = None,
    layers: opt.Layers = None,
    batch: opt.Batch = None,
    heads: Annotated[str | None, typer.Option("--heads", metavar="0-3,7", help="Only these query heads.")] = None,
    queries: Annotated[
        str, typer.Option("--queries", metavar="N|all", help="Query rows per segment, sampled, or all of them.")
    ] = "64",
    sink: Annotated[
        int, typer.Option("--sink", metavar="N", help="Leave the first N positions out as keys (attention sinks).")
    ] = 1,
    distances: Annotated[
        str | None,
        typer.Option("--distances", metavar="1,2,16", help="Fixed distances (default 1, 2, 4, … half the length)."),
    ] = None,
    seed: opt.Seed = 0,
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
    """Spearman correlation of hidden-state similarity and attention, by layer, head and distance.

    --figure s.pdf draws s.pdf (by layer), s-heads.pdf, s-distance.pdf and s-control.pdf (free against fixed distance).

    Example:  rope-probe similarity demo:smollm2 --segments 8 --figure similarity.png
    """
    from . import common

    rows = int(queries) if queries.isdecimal() else queries
    chosen = common.parse_layers(layers)
    chosen_heads = common.parse_layers(heads, "--heads", "heads")
    fixed = common.parse_layers(distances, "--distances", "distances")
    drawing = common.figure_path(figure)
    path = common.output_path(output, "similarity", model, drawing, resume)
    source: dict[str, Any] = {"text": text, "dataset": dataset, "tokens": tokens, "segments": segments}
    source |= {"length": length, "batch": batch}
    common.check_sources(**source)
    from ..probes.similarity import check_options
    from ..probes.similarity import similarity as measure

    check_options(rows, sink, seed)
    ckpt = common.open_model(
        model,
        revision=revision,
        dtype=dtype,
        device=device,
        device_map=device_map,
        stream_layers=stream_layers,
        layers=chosen,
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
        layers=chosen,
        heads=chosen_heads,
        queries=rows,
        sink=sink,
        distances=fixed,
        seed=seed,
    )
