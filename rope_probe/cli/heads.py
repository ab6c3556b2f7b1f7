"""rope-probe heads: what each head attends to, and whose band it is."""

import re
from typing import Annotated, Any

import typer

from . import options as opt


def heads(
    model: opt.Model,
    text: opt.Text = None,
    dataset: opt.DatasetName = None,
    tokens: opt.Tokens = None,
    segments: opt.Segments = None,
    length: opt.Length = None,
    layers: opt.Layers = None,
    batch: opt.Batch = None,
    map_: Annotated[
        str | None,
        typer.Option("--map", metavar="LAYER.HEAD", help="Keep and draw the attention map of this head."),
    ] = None,
    positional: Annotated[
        float, typer.Option("--positional", help="Positional from this weight on one distance of 0–4 on.")
    ] = 0.5,
    induction: Annotated[float, typer.Option("--induction", help="Induction head from this score on.")] = 0.3,
    sink: Annotated[float, typer.Option("--sink", help="Sink head from this weight on the first position on.")] = 0.5,
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
    seed: Annotated[int, typer.Option("--seed", help="Of the random tokens of the induction score.", min=0)] = 0,
    output: opt.Output = None,
    resume: opt.Resume = False,
    figure: opt.Figure = None,
    json: opt.Json = False,
    trust_remote_code: opt.TrustRemoteCode = False,
) -> None:
    """What each head attends to and its role (positional, induction, sink, other), and the band of each kind of head.

    --figure h.pdf draws h.pdf (layers × heads by role), h-wavelength.pdf, h-distance.pdf, and with --map h-map.pdf.

    Example:  rope-probe heads demo:smollm2 --segments 4 --map 18.6 --figure heads.png
    """
    from . import common

    chosen = common.parse_layers(layers)
    place = _place(map_)
    formed = common.parse_numbers(formation, "--formation", ("base", "length"))
    drawing = common.figure_path(figure)
    path = common.output_path(output, "heads", model, drawing, resume)
    source: dict[str, Any] = {"text": text, "dataset": dataset, "tokens": tokens, "segments": segments}
    source |= {"length": length, "batch": batch}
    common.check_sources(**source)
    from ..probes.heads import check_thresholds
    from ..probes.heads import heads as measure

    thresholds: dict[str, Any] = {"positional": positional, "induction": induction, "sink": sink}
    check_thresholds(thresholds)
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
    common.carry_out(
        measure,
        ckpt,
        path,
        drawing,
        json,
        resume,
        **source,
        layers=chosen,
        attention_map=place,
        formation=formed,
        seed=seed,
        **thresholds,
    )


def _place(text: str | None) -> tuple[int, int] | None:
    """`18.6` -> (18, 6)."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,6})\.(\d{1,6})", text.strip())
    if not match:
        raise typer.BadParameter(f"{text!r} is not LAYER.HEAD: write it like 18.6.", param_hint="--map")
    return int(match[1]), int(match[2])
