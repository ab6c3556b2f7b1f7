"""rope-probe report: every analysis that fits into a time, on one page."""

from typing import Annotated, Any

import typer

from . import options as opt


def report(
    model: opt.Model,
    output: Annotated[
        str | None,
        typer.Option(
            "-o", "--output", metavar="FILE.html", help="The page (default: report-MODEL.html here, numbered if taken)."
        ),
    ] = None,
    budget: Annotated[
        str, typer.Option("--budget", metavar="90s|10m|1h", help="Time to measure in, once the model is open.")
    ] = "10m",
    text: opt.Text = None,
    dataset: opt.DatasetName = None,
    tokens: opt.Tokens = None,
    segments: Annotated[
        int | None,
        typer.Option("--segments", metavar="N", help="Segments to read at most, for each analysis (default 16)."),
    ] = None,
    length: opt.Length = None,
    batch: opt.Batch = None,
    rope: opt.Rope = None,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
    device_map: opt.DeviceMap = None,
    stream_layers: opt.StreamLayers = None,
    revision: opt.Revision = None,
    seed: Annotated[int, typer.Option("--seed", help="Of what is drawn at random.", min=0)] = 0,
    json: opt.Json = False,
    trust_remote_code: opt.TrustRemoteCode = False,
) -> None:
    """Every analysis that fits into a time, on one page of HTML that needs nothing else: numbers, figures, data.

    How long each takes is estimated first, and what fits is printed; Ctrl-C writes the page with what was measured.

    Example:  rope-probe report demo:smollm2 --budget 5m -o report.html
    """
    import re
    import sys
    from itertools import count
    from pathlib import Path

    from ..errors import ProbeError
    from . import common

    stem = f"report-{re.sub(r'[^A-Za-z0-9._-]+', '-', Path(model).name)}"
    names = (f"{stem}{'' if number == 1 else f'-{number}'}.html" for number in count(1))
    path = Path(output or next(name for name in names if not Path(name).exists()))
    source: dict[str, Any] = {"text": text, "dataset": dataset, "tokens": tokens, "segments": segments}
    source |= {"length": length, "batch": batch}
    common.check_sources(**source)
    from ..reporting.plan import seconds
    from ..reporting.run import page_path
    from ..reporting.run import report as measure

    allowed = seconds(budget)
    page_path(path)
    ckpt = common.open_model(
        model,
        revision=revision,
        dtype=dtype,
        device=device,
        device_map=device_map,
        stream_layers=stream_layers,
        rope=rope,
        trust_remote_code=trust_remote_code,
    )
    with Steps() as steps:
        made = measure(
            ckpt,
            path,
            budget=allowed,
            **source,
            seed=seed,
            command=common.COMMAND,
            tell=lambda line: print(line, file=sys.stderr),
            progress=steps,
        )
    if json:
        common.print_json(made.as_dict())
    else:
        from .tables.report import render

        render(made)
    if made.partial:
        raise ProbeError(f"stopped before the end; {made.path} holds what was measured.")
    if made.failed:
        reasons = "; ".join(f"{name}: {why}" for name, why in made.failed.items())
        raise ProbeError(f"{made.path} is written, without {reasons}")


class Steps:
    """A progress bar for each analysis, one after the other."""

    def __init__(self) -> None:
        self.name = ""
        self.bar: Any = None

    def __enter__(self) -> "Steps":
        return self

    def __call__(self, name: str, done: int, total: int) -> None:
        from .common import Progress

        if name != self.name:
            self.__exit__()
            self.name, self.bar = name, Progress(noun=f"segments, {name}")
            self.bar.announced = True  # how long all of it takes was said before
        self.bar(done, total)

    def __exit__(self, *exc) -> None:
        if self.bar is not None:
            self.bar.__exit__(*exc)
