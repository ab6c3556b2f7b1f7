"""rope-probe spectrum: is each rotary pair still the one tone that RoPE made it?"""

from typing import Annotated, Any

import typer

from . import options as opt


def spectrum(
    model: opt.Model,
    text: opt.Text = None,
    dataset: opt.DatasetName = None,
    tokens: opt.Tokens = None,
    segments: opt.Segments = None,
    length: opt.Length = None,
    layers: opt.Layers = None,
    batch: opt.Batch = None,
    distances: Annotated[
        int | None, typer.Option("--distances", metavar="N", help="Distances 0 … N − 1 (default: half the length).")
    ] = None,
    window: Annotated[str, typer.Option("--window", help="Taper: hann, hamming, blackman or none.")] = "hann",
    inject: Annotated[
        str | None,
        typer.Option("--inject", metavar="4,8-10|all", help="Attend through one pair alone in the first layer."),
    ] = None,
    depth: Annotated[
        int, typer.Option("--depth", metavar="N", help="Layers in which the injected tone is looked for.", min=1)
    ] = 2,
    ablate: Annotated[
        str | None,
        typer.Option(
            "--ablate", metavar="mlp,attention,norm", help="Inject again with these parts, one at a time, taken out."
        ),
    ] = None,
    weights: Annotated[bool, typer.Option("--weights", help="Also the attention weight by distance.")] = False,
    keep_pairs: Annotated[
        bool, typer.Option("--keep-pairs", help="Keep the profile of every pair in the file (large).")
    ] = False,
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
    """Mean score by distance as a sum of tones: which rotary pairs are still pure, and which layers damage them.

    --figure s.pdf draws s.pdf (purity, layers × pairs), s-damage.pdf and s-profile.pdf; with --inject also
    s-injected.pdf and s-tones.pdf.

    Example:  rope-probe spectrum demo:smollm2 --segments 4 --inject 4 --figure s.png
    """
    from . import common

    chosen = common.parse_layers(layers)
    pairs = "all" if inject == "all" else common.parse_layers(inject, "--inject", "pairs")
    parts = [part.strip() for part in ablate.split(",")] if ablate else []
    drawing = common.figure_path(figure)
    path = common.output_path(output, "spectrum", model, drawing, resume)
    source: dict[str, Any] = {"text": text, "dataset": dataset, "tokens": tokens, "segments": segments}
    source |= {"length": length, "batch": batch}
    common.check_sources(**source)
    from ..probes.spectrum import check_options
    from ..probes.spectrum import spectrum as measure

    check_options(window, pairs, depth, parts)
    ckpt = common.open_model(
        model,
        revision=revision,
        dtype=dtype,
        device=device,
        device_map=device_map,
        stream_layers=stream_layers,
        layers=None if pairs else chosen,  # the single-tone experiment chooses its own
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
        distances=distances,
        window=window,
        weights=weights,
        inject=pairs,
        depth=depth,
        ablate=parts,
        keep_pairs=keep_pairs,
    )
