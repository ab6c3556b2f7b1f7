"""rope-probe bands: where a checkpoint's frequency band sits."""

from typing import Annotated, Any

import typer

from . import options as opt


def bands(
    model: opt.Model,
    text: opt.Text = None,
    dataset: opt.DatasetName = None,
    tokens: opt.Tokens = None,
    segments: opt.Segments = None,
    length: opt.Length = None,
    layers: opt.Layers = None,
    batch: opt.Batch = None,
    control: Annotated[
        bool, typer.Option("--control", help="Also measure the values, which carry no rotation.")
    ] = False,
    formation: Annotated[
        str | None,
        typer.Option("--formation", metavar="base=1e4,length=4096", help="Base and length the band was formed with."),
    ] = None,
    rope: opt.Rope = None,
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
    """Query and key norms by rotary pair: where the frequency band sits, how sharp it is, and where theory puts it.

    --figure band.pdf draws three figures: band.pdf (profile over pairs), band-layers.pdf and band-heads.pdf.

    Example:  rope-probe bands demo:smollm2 --segments 8 --figure band.png
    """
    from . import common

    chosen = common.parse_layers(layers)
    formed = common.parse_numbers(formation, "--formation", ("base", "length"))
    drawing = common.figure_path(figure)
    path = common.output_path(output, "bands", model, drawing, resume)
    source: dict[str, Any] = {"text": text, "dataset": dataset, "tokens": tokens, "segments": segments}
    source |= {"length": length, "batch": batch}
    common.check_sources(**source)
    ckpt = common.open_model(
        model,
        revision=revision,
        dtype=dtype,
        device=device,
        device_map=device_map,
        stream_layers=stream_layers,
        layers=chosen,
        rope=rope,
        trust_remote_code=trust_remote_code,
    )
    from ..probes.bands import bands as measure

    common.carry_out(
        measure,
        ckpt,
        path,
        drawing,
        json,
        resume,
        **source,
        layers=chosen,
        control=control,
        formation=formed,
    )
