"""rope-probe trajectory: when in training the band forms, and whether it moves."""

from typing import Annotated

import typer

from ..errors import ProbeError
from . import options as opt


def trajectory(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL…", help="A hub id with --revisions, or several folders.", show_default=False),
    ],
    revisions: Annotated[
        str | None, typer.Option("--revisions", metavar="A,B,…", help="Branches, tags or commits, in this order.")
    ] = None,
    text: opt.Text = None,
    dataset: opt.DatasetName = None,
    tokens: opt.Tokens = None,
    segments: opt.Segments = None,
    length: opt.Length = None,
    layers: opt.Layers = None,
    batch: opt.Batch = None,
    formation: Annotated[
        str | None,
        typer.Option("--formation", metavar="base=1e4,length=4096", help="Base and length the band was formed with."),
    ] = None,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
    device_map: opt.DeviceMap = None,
    output: opt.Output = None,
    figure: opt.Figure = None,
    json: opt.Json = False,
    trust_remote_code: opt.TrustRemoteCode = False,
) -> None:
    """The band at every checkpoint of a training run, on the same tokens; one checkpoint in memory at a time.

    With -o FILE.nc a run can be taken up again: checkpoints that the file holds are not measured twice.

    Example:  rope-probe trajectory EleutherAI/pythia-70m --revisions step1000,step8000,step143000 -o t.nc
    """
    from . import common

    chosen = common.parse_layers(layers)
    named = [part.strip() for part in revisions.split(",") if part.strip()] if revisions else None
    formed = common.parse_numbers(formation, "--formation", ("base", "length"))
    drawing = common.figure_path(figure)
    path = common.output_path(output, "trajectory", models[0], drawing)
    common.check_sources(text=text, dataset=dataset, tokens=tokens, segments=segments, length=length, batch=batch)
    from ..probes.trajectory import places
    from ..probes.trajectory import trajectory as measure
    from .show import present

    places(models, named)
    with common.Progress(noun="checkpoints") as progress:
        ds = measure(
            models,
            revisions=named,
            text=text,
            dataset=dataset,
            tokens=tokens,
            segments=segments,
            length=length,
            batch=batch,
            layers=chosen,
            formation=formed,
            file=path,
            progress=progress,
            dtype=dtype,
            device=device,
            device_map=device_map,
            trust_remote_code=trust_remote_code,
        )
    if not common.speaks():
        return
    common.store(ds, path)
    present(ds, path, drawing, json)
    if ds.attrs["partial"]:
        held = ds.sizes["checkpoint"]
        raise ProbeError(f"stopped after {held} checkpoints; {path} holds them: the same command goes on from there.")
