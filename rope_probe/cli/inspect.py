"""rope-probe inspect: what a checkpoint rotates, from its config alone."""

from typing import Annotated

import typer

from ..errors import ProbeError, first_words
from . import options as opt


def inspect(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL…", help="Hub id, folder, bare config.json, .gguf or demo.", show_default=False),
    ],
    length: Annotated[
        int | None, typer.Option("--length", metavar="T", help="Frequencies in force at T tokens.", min=1)
    ] = None,
    rope: Annotated[
        str | None,
        typer.Option("--rope", metavar="type=yarn,factor=4", help="What an override would do, merged with the config."),
    ] = None,
    revision: opt.Revision = None,
    figure: opt.Figure = None,
    json: opt.Json = False,
    trust_remote_code: opt.TrustRemoteCode = False,
) -> None:
    """What a checkpoint rotates, layer by layer: frequencies, floor, predicted band, bound. No weights are read.

    Example:  rope-probe inspect demo:gemma3 --figure wavelengths.png
    """
    from . import common

    drawing = common.figure_path(figure)
    from ..configs import parse_rope, read_config
    from ..probes.inspect import describe

    override = parse_rope(rope) if rope else None
    geometries = {
        model: read_config(model, revision=revision, trust_remote_code=trust_remote_code, length=length, rope=override)
        for model in models
    }
    described = []
    for model, geometry in geometries.items():
        try:
            described.append(describe(geometry, model, length))
        except (ArithmeticError, ValueError, TypeError) as error:
            words = first_words(error, 120)
            raise ProbeError(f"{model}: the numbers in its config make no sense ({words}): check it.") from error
    drawn = []
    if drawing:
        from ..plots import inspect as plot
        from ..plots import save_figure

        drawn = [str(save_figure(plot(described), drawing))]
    if json:
        values = described[0] if len(described) == 1 else {"models": described}
        common.print_json(values | {"figures": drawn})
        return
    from .tables.inspect import render

    for entry in described:
        render(entry)
    for path in drawn:
        print(f"figure   {path}")
