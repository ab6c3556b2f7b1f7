"""rope-probe extend: what another base or scaling does to perplexity and to retrieval."""

from typing import Annotated, Any

import typer

from . import common
from . import options as opt


def extend(
    model: opt.Model,
    text: opt.Text = None,
    dataset: opt.DatasetName = None,
    tokens: opt.Tokens = None,
    segments: Annotated[
        int | None, typer.Option("--segments", metavar="N", help="Segments to read, of the longest length (default 4).")
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option("--lengths", metavar="1024,8192", help="Tokens of text (default: 512,1024,2048)."),
    ] = None,
    batch: opt.Batch = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="1e5,match",
            help="Bases; own: the checkpoint's, match: the length read (default: 1e4,1e5,1e6,match).",
        ),
    ] = None,
    scaling: Annotated[
        str | None,
        typer.Option(
            "--scaling",
            metavar="none,yarn",
            help="With each base: own (default), none, linear, dynamic, yarn, llama3, longrope.",
        ),
    ] = None,
    factor: Annotated[
        str | None,
        typer.Option("--factor", metavar="2,4", help="Of linear, dynamic, yarn and llama3 (default: 2)."),
    ] = None,
    passkey_lengths: Annotated[
        str | None,
        typer.Option("--passkey-lengths", metavar="512,2048", help="Tokens of the prompts (default: --lengths)."),
    ] = None,
    depths: Annotated[
        str | None,
        typer.Option("--depths", metavar="0,0.5,1", help="Where the key hides, 0 = start (default: 0,0.25,…,1)."),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option("--samples", metavar="N", help="Prompts per length and depth (default 4); 0: no retrieval."),
    ] = None,
    keys: Annotated[
        str | None,
        typer.Option("--keys", metavar="1,4", help="Keys hidden in a prompt, one of them asked for (default: 1)."),
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
    """Perplexity by position, and retrieval of a hidden key, under other bases and scalings.

    Every base is tried with every scaling at every length, on one loaded model.
    --figure e.pdf draws e.pdf (perplexity and retrieval against the base),
    e-position.pdf and e-retrieval.pdf.

    Example:  rope-probe extend demo:smollm2 --base 1e4,match --scaling none,yarn --lengths 512,1024
    """
    wanted: dict[str, Any] = {
        "lengths": _whole(lengths, "--lengths"),
        "base": _bases(base),
        "scaling": common.parse_words(scaling),
        "factor": common.parse_floats(factor, "--factor"),
        "passkey_lengths": _whole(passkey_lengths, "--passkey-lengths"),
        "depths": common.parse_floats(depths, "--depths"),
        "samples": samples,
        "keys": _whole(keys, "--keys"),
    }
    drawing = common.figure_path(figure)
    path = common.output_path(output, "extend", model, drawing, resume)
    source: dict[str, Any] = {"text": text, "dataset": dataset, "tokens": tokens, "segments": segments}
    source |= {"batch": batch}
    common.check_sources(**source)
    from ..probes.extend import extend as measure
    from ..probes.extend_grid import make_grid

    make_grid(**wanted)
    ckpt = common.open_model(
        model,
        revision=revision,
        dtype=dtype,
        device=device,
        device_map=device_map,
        stream_layers=stream_layers,
        trust_remote_code=trust_remote_code,
    )
    common.carry_out(
        measure,
        ckpt,
        path,
        drawing,
        json,
        resume,
        common.Progress(1, noun="tokens"),
        **source,
        **wanted,
        seed=seed,
    )


def _bases(text: str | None) -> list | None:
    """`1e4,match` -> [10000.0, 'match']."""
    words = common.parse_words(text)
    return None if words is None else [word if word in ("own", "match") else _base(word) for word in words]


def _base(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise typer.BadParameter(f"{word!r} is not a number, own or match.", param_hint="--base") from None


def _whole(text: str | None, option: str) -> list[int] | None:
    """`1024,8192` -> [1024, 8192]."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a list of whole numbers: write it like 1024,8192.", param_hint=option
        ) from None
