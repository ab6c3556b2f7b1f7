"""rope-probe scan: where the frequency band sits, from weights alone."""

from typing import Annotated

import typer

from ..errors import ProbeError
from . import options as opt


def scan(
    model: opt.Model,
    bands: Annotated[
        str | None,
        typer.Option("--bands", metavar="FILE.nc", help="Result of bands of this checkpoint, to compare with."),
    ] = None,
    text: opt.Text = None,
    dataset: opt.DatasetName = None,
    tokens: opt.Tokens = None,
    segments: opt.Segments = None,
    length: opt.Length = None,
    layers: opt.Layers = None,
    draws: Annotated[
        int, typer.Option("--draws", metavar="N", help="Inputs drawn for each layer after the first.")
    ] = 512,
    seed: opt.Seed = 0,
    formation: Annotated[
        str | None,
        typer.Option("--formation", metavar="base=1e4,length=4096", help="Base and length the band was formed with."),
    ] = None,
    revision: opt.Revision = None,
    output: opt.Output = None,
    figure: opt.Figure = None,
    json: opt.Json = False,
    trust_remote_code: opt.TrustRemoteCode = False,
) -> None:
    """An estimate of bands without running the model: only the weights of norm, q and k are read, from the hub in part.

    Layer 0 is exact for the text. For other layers the output says how far the estimate is to be trusted.

    Example:  rope-probe scan demo:smollm2 --figure scan.png
    """
    from . import common

    chosen = common.parse_layers(layers)
    formed = common.parse_numbers(formation, "--formation", ("base", "length"))
    drawing = common.figure_path(figure)
    path = common.output_path(output, "scan", model, drawing)
    from ..probes.scan import scan as estimate
    from .show import present

    with common.Progress(noun="layers") as progress:
        ds = estimate(
            model,
            bands=bands,
            text=text,
            dataset=dataset,
            tokens=tokens,
            segments=segments,
            length=length,
            layers=chosen,
            draws=draws,
            seed=seed,
            formation=formed,
            revision=revision,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    common.store(ds, path)
    present(ds, path, drawing, json)
    if ds.attrs["partial"]:
        raise ProbeError(f"stopped after {ds.sizes['layer']} layers; {path} holds what was estimated.")
