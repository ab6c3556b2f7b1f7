"""rope-probe check: every self-check on one's own checkpoint."""

from typing import Annotated

import typer

from . import options as opt


def check(
    model: opt.Model,
    text: opt.Text = None,
    dataset: opt.DatasetName = None,
    tokens: opt.Tokens = None,
    length: Annotated[
        int | None,
        typer.Option("--length", metavar="T", help="Tokens per segment, of which two are read (default 512)."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Leave out the changes that must not help (a forward pass per layer).")
    ] = False,
    rope: opt.Rope = None,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
    device_map: opt.DeviceMap = None,
    revision: opt.Revision = None,
    json: opt.Json = False,
    trust_remote_code: opt.TrustRemoteCode = False,
) -> None:
    """Is this checkpoint what it says it is, and is it seen right? Every self-check on a few tokens, for bug reports.

    Exit code 0: no check failed; 1: one did.

    Example:  rope-probe check demo:smollm2
    """
    from . import common

    common.check_sources(text=text, dataset=dataset, tokens=tokens, length=length)
    from ..probes.check import check as measure
    from .tables.check import render

    with common.Progress(noun="changes") as progress:
        report = measure(
            model,
            text=text,
            dataset=dataset,
            tokens=tokens,
            length=length,
            quick=quick,
            progress=progress,
            opening=common.open_model,
            rope=rope,
            revision=revision,
            dtype=dtype,
            device=device,
            device_map=device_map,
            trust_remote_code=trust_remote_code,
        )
    if json:
        common.print_json(report.as_dict())
    else:
        render(report)
    if not report.passed:
        raise typer.Exit(1)
