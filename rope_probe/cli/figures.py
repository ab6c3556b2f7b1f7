"""rope-probe figures: the whole figure set, from result files or from checkpoints."""

from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Annotated

import typer

from . import options as opt


def figures(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Holds data/, the figures and their page.")] = Path(
        "figures"
    ),
    run: Annotated[
        list[str] | None,
        typer.Option("--run", metavar="MODEL", help="Measure this checkpoint first (again for each further one)."),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            "--only", metavar="bands,heads,…", help="These analyses alone (parts: heads-map, truncate-floor, …)."
        ),
    ] = None,
    text: opt.Text = None,
    dataset: opt.DatasetName = None,
    tokens: opt.Tokens = None,
    segments: Annotated[
        int | None, typer.Option("--segments", metavar="N", help="Segments to read, for every analysis.")
    ] = None,
    length: opt.Length = None,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
    revision: opt.Revision = None,
    json: opt.Json = False,
    trust_remote_code: opt.TrustRemoteCode = False,
) -> None:
    """Every figure of the set, as PNG and PDF, and a page that shows them with captions and commands.

    Figures are drawn from the results in FOLDER/data. With --run, what is not
    there yet is measured first, each analysis by a command that is shown; a
    result that is there, whole and of the same command, is not measured again.

    Example:  rope-probe figures my-figures --run demo:smollm2 --only bands,heads
    """
    from .. import gallery
    from ..errors import ProbeError, UsageError
    from ..limits import as_data
    from ..processes import size
    from . import common

    chosen = common.parse_words(only)
    gallery.check_names(chosen)
    if not run and not (folder / "data").is_dir():
        raise ProbeError(f"there is no folder {folder / 'data'} with results: measure a model with --run MODEL.")
    if run and size() > 1:
        raise UsageError("--run measures in processes of its own, one after the other: start it without torchrun.")
    options = {"text": text, "dataset": dataset, "tokens": tokens, "segments": segments, "length": length}
    options |= {"dtype": dtype, "device": device, "revision": revision}
    given = {name: str(value) for name, value in options.items() if value is not None}
    if given and not run:
        raise typer.BadParameter(f"--{next(iter(given))} is for what is measured: add --run MODEL.")
    common.check_sources(**{name: value for name, value in given.items() if name in ("text", "dataset", "tokens")})

    def more(analysis: str) -> list[str]:
        """Those of the options that the command has."""
        known = signature(getattr(import_module(f"rope_probe.cli.{analysis}"), analysis)).parameters
        words = [word for name, value in given.items() if name in known for word in (f"--{name}", value)]
        return [*words, *(["--trust-remote-code"] if trust_remote_code else [])]

    with as_data(folder / "data"):
        measured = gallery.run(run or [], folder, chosen, more)
        written = gallery.draw(folder, chosen)
    if json:
        common.print_json({"measured": measured, "figures": [str(path) for path in written]})
        return
    drawn = sum(path.suffix in gallery.ENDINGS for path in written)
    print(f"{len(measured)} analyses measured, {drawn} files drawn in {folder}")
    if written[-1].suffix == ".md":
        print(f"page     {written[-1]}")
