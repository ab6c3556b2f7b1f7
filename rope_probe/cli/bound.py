"""``rope-probe bound``: how far a base carries, and which base carries a length."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import ProbeError
from ..limits import HEAD_WIDTH, as_data
from . import options as opt


@dataclass
class _Report:
    """What one form of the command found: the JSON object, the printed form, the figure."""

    payload: dict
    parts: list  # rich tables and sentences
    draw: Callable  # () -> axes


def bound(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Hub id, folder or config.json: its own frequencies.", show_default=False),
    ] = None,
    length: Annotated[
        str | None,
        typer.Option("--length", metavar="32k", help="Length to carry; with MODEL, instead of the claimed one."),
    ] = None,
    base: Annotated[float | None, typer.Option("--base", help="RoPE base (theta), without scaling.")] = None,
    head_dim: Annotated[int | None, typer.Option("--head-dim", help="Channels of a head.")] = None,
    rotary_dim: Annotated[int | None, typer.Option("--rotary-dim", help="Channels that rotate (default: all).")] = None,
    table: Annotated[
        bool, typer.Option("--table", help="Smallest bases for 1k … 1M, beside the published ones.")
    ] = False,
    weights: Annotated[
        str | None, typer.Option("--weights", metavar="BANDS.nc", help="Bound of each head, weighted by its usage.")
    ] = None,
    kilo: Annotated[
        int | None, typer.Option("--kilo", help="1k is 1000 or 1024 (default 1024; --table shows both).")
    ] = None,
    limit: Annotated[str, typer.Option("--limit", metavar="M", help="How far B(m) is followed, tokens.")] = "2000000",
    revision: opt.Revision = None,
    figure: opt.Figure = None,
    json: opt.Json = False,
    trust_remote_code: opt.TrustRemoteCode = False,
) -> None:
    """How far does a RoPE base carry, and which base carries a length?

    B(m) = sum over rotary pairs of cos(m · inv_freq). Where it is negative, a
    similar token m tokens away is expected to score lower than a random one.
    L_bound is the largest L with B(m) ≥ 0 for every integer m in [0, L]; the
    smallest base for a length is the first of the grid a.b × 10^x that reaches
    it (arXiv 2405.14591).

    Give --length and --head-dim for the smallest base, --base and --head-dim
    for L_bound, a MODEL for each kind of its layers, --table and --head-dim for
    the whole table, or --weights for the heads of a bands file.

    Example:  rope-probe bound --length 32k --head-dim 128
    """
    from . import common

    forms = {
        "MODEL": model is not None,
        "--table": table,
        "--weights": weights is not None,
        "--length or --base": base is not None or (length is not None and model is None),
    }
    if sum(forms.values()) != 1:
        seen = " and ".join(name for name, value in forms.items() if value) or "none of them"
        raise typer.BadParameter(f"give one of {', '.join(forms)} (given: {seen}).")
    if kilo not in (None, 1000, 1024):
        raise typer.BadParameter(f"{kilo} is no reading of 1k: choose 1000 or 1024.", param_hint="--kilo")
    drawing = common.figure_path(figure)
    reach = _tokens(limit, kilo, "--limit")
    tokens = _tokens(length, kilo, "--length") if length is not None else None
    if (model or weights) and (head_dim, rotary_dim) != (None, None):
        raise typer.BadParameter("MODEL and --weights bring their dimensions: leave out --head-dim and --rotary-dim.")

    if model is not None:
        report = _model(model, tokens, reach, revision, trust_remote_code)
    elif weights:
        with as_data(weights):
            report = _weights(Path(weights), reach)
    elif table:
        report = _table(*_pairs(head_dim, rotary_dim), kilo)
    else:
        report = _plain(tokens, base, *_pairs(head_dim, rotary_dim), kilo or 1024, reach)
    if drawing:
        from ..plots import save_figure

        report.payload["figures"] = [str(save_figure(report.draw(), drawing))]
    if json:
        common.print_json(report.payload)
    else:
        _print(report)


def _tokens(text: str, kilo: int | None, option: str) -> int:
    from ..probes.bound import parse_length

    try:
        return parse_length(text, kilo or 1024)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def _pairs(head_dim: int | None, rotary_dim: int | None) -> tuple[int, int]:
    """Rotary pairs, and pairs of the head outside the rotary part."""
    if head_dim is None:
        raise typer.BadParameter("the channels of a head are needed, as in --head-dim 128.", param_hint="--head-dim")
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    if head_dim > HEAD_WIDTH:
        raise typer.BadParameter(
            f"{head_dim} channels: no more than {HEAD_WIDTH:,} are computed.", param_hint="--head-dim"
        )
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2 or head_dim % 2:
        raise typer.BadParameter(
            f"head dimension {head_dim} with rotary dimension {rotary_dim}: both must be even and positive, and the "
            "rotary part no larger than the head."
        )
    return rotary_dim // 2, (head_dim - rotary_dim) // 2


def _plain(tokens: int | None, base: float | None, pairs: int, unrotated: int, kilo: int, limit: int) -> _Report:
    """A base, a length, or both, without a model."""
    from .. import theory
    from ..probes import bound as core

    if base is not None and not 1 < base < float("inf"):
        raise typer.BadParameter(f"{base} is no RoPE base: give a number above 1.", param_hint="--base")
    payload = {"analysis": "bound", "head_dim": 2 * (pairs + unrotated), "rotary_dim": 2 * pairs}
    parts, curves = [], []
    head = f"head dimension {2 * (pairs + unrotated)}" + (f", {2 * pairs} of it rotating" if unrotated else "")
    if base is not None:
        limit = max(limit, tokens or 0)
        first = theory.first_negative(theory.ladder(base, pairs), limit, unrotated)
        reached = None if first is None else first - 1
        payload |= {"base": base, "limit": limit, "first_negative": first, "bound": reached}
        carries = f"L_bound {reached} (B first negative at m = {first})" if first else f"no negative B up to {limit}"
        parts.append(f"base {_power(base)}, {head}: {carries}")
        if tokens:
            payload["holds"] = first is None or first > tokens
        curves.append(base)
    if tokens:
        (row,) = core.length_rows([tokens], pairs, kilo=kilo, unrotated=unrotated)
        payload |= {"length": tokens, "kilo": kilo, "grid": core.GRID, "smallest_base": row.base}
        payload |= {"published_base": row.published, "published_first_negative": row.published_fails_at}
        parts.append(
            f"length {tokens} (1k = {kilo}), {head}: smallest base {_power(row.base)} on the grid {core.GRID}"
            f"{_published_words(row)}"
        )
        curves += [value for value in (row.base, row.published) if value]

    def draw():
        from ..plots.bound import bound as plot

        ladders = {value: theory.ladder(value, pairs) for value in dict.fromkeys(curves) if value > 1}
        firsts = [theory.first_negative(ladder, limit, unrotated) for ladder in ladders.values()]
        reach = _reach([*firsts, tokens], limit)
        return plot(
            core.curve(f"base {_power(value)}", ladder, reach, unrotated=unrotated, context=tokens)
            for value, ladder in ladders.items()
        )

    return _Report(payload, parts, draw)


def _table(pairs: int, unrotated: int, kilo: int | None) -> _Report:
    from ..probes import bound as core

    tables = {each: core.table(pairs, kilo=each, unrotated=unrotated) for each in ((kilo,) if kilo else (1024, 1000))}
    payload = {
        "analysis": "bound",
        "head_dim": 2 * (pairs + unrotated),
        "rotary_dim": 2 * pairs,
        "grid": core.GRID,
        "tables": {str(each): [asdict(row) for row in rows] for each, rows in tables.items()},
    }
    head = f"head dimension {payload['head_dim']}" + (f", {2 * pairs} rotating" if unrotated else "")
    parts = []
    for each, rows in tables.items():
        columns = ["length", "smallest base"]
        cells: list[list] = [[f"{row.length:,}", _power(row.base)] for row in rows]
        if any(row.published for row in rows):
            columns += ["published", "published: first m with B(m) < 0"]
            for row, cell in zip(rows, cells, strict=True):
                cell += [_power(row.published), "holds" if row.published_fails_at is None else row.published_fails_at]
        parts.append(_rich_table(f"{head}, 1k = {each}, grid {core.GRID}", columns, cells))

    def draw():
        from ..plots.bound import smallest_bases

        return smallest_bases([row for rows in tables.values() for row in rows], label=head)

    return _Report(payload, parts, draw)


def _model(model: str, tokens: int | None, limit: int, revision: str | None, trust_remote_code: bool) -> _Report:
    from ..configs import read_config
    from ..probes import bound as core

    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    geometry = read_config(model, **options)
    context = tokens or geometry.claimed_length or None
    if context and any(layer.rope_type in ("longrope", "dynamic") for layer in geometry.layers):
        geometry = read_config(model, **options, length=context)  # these types change their frequencies with length
    kinds = core.kind_rows(geometry.layers, context, limit)
    if not any(kind.rotates for kind in kinds):
        raise ProbeError(f"no layer of {model} rotates: there is nothing to bound.")
    rows = []
    for kind in kinds:
        row = asdict(kind) | {"first_negative": None if kind.bound is None else kind.bound + 1}
        del row["inv_freq"]
        rows.append(row)
    payload: dict[str, Any] = {
        "analysis": "bound",
        "model": model,
        "model_type": geometry.model_type,
        "grid": core.GRID,
    }
    payload |= {"claimed_length": geometry.claimed_length or None, "length": context, "kinds": rows}
    columns = ["layers", "type", "base", "scaling", "context", "L_bound", "needs", "paper"]
    cells = []
    for kind in kinds:
        cell = [len(kind.layers), kind.layer_type.removesuffix("_attention"), _power(kind.base)]
        cell += [kind.rope_type or "none", kind.context or "unknown"]
        cell += [_bound_words(kind), _base_words(kind), _power(kind.published)] if kind.rotates else ["-", "-", "-"]
        cells.append(cell)
    title = f"{model} ({geometry.model_type}), context {context or 'unknown'}"
    parts = [_rich_table(title, columns, cells), *(_kind_words(kind) for kind in kinds)]

    def draw():
        from ..plots.bound import bound as plot

        rotating = [kind for kind in kinds if kind.rotates]
        firsts = [kind.bound and kind.bound + 1 for kind in rotating]
        reach = _reach([*firsts, *(kind.context for kind in rotating)], limit)
        return plot(
            core.curve(
                f"{Path(model).name.removesuffix('.json')[:40]} {kind.layer_type.replace('_', ' ')} (base {_power(kind.base)})",
                kind.inv_freq,
                reach,
                unrotated=kind.unrotated_pairs,
                context=kind.context,
            )
            for kind in rotating
        )

    return _Report(payload, parts, draw)


def _kind_words(kind) -> str:
    name = f"{kind.layer_type}, {len(kind.layers)} layers"
    if not kind.rotates:
        return f"{name}: no rotation, so nothing to bound."
    reach = f"L_bound {_bound_words(kind)}"
    if not kind.context:
        return f"{name}: {reach}; the config names no length to compare with."
    what = f"window {kind.context}" if kind.window == kind.context else f"context {kind.context}"
    verdict = f"reaches the {what}" if kind.holds else f"falls short of the {what}"
    published = f" (published: {_power(kind.published)})" if kind.published else ""
    return f"{name}: {reach}, {verdict}; smallest plain base for it: {_base_words(kind)}{published}."


def _bound_words(kind) -> str:
    return f"> {kind.limit}" if kind.bound is None else str(kind.bound)


def _base_words(kind) -> str:
    # 1.0, the first of the grid, turns all pairs alike: so many others stand still that no base makes B negative
    return "any" if kind.smallest_base == 1 else _power(kind.smallest_base)


def _weights(path: Path, limit: int) -> _Report:
    import numpy as np

    from .. import theory
    from ..probes import bound as core
    from ..results import load

    bands = load(path)
    missing = [name for name in ("usage", "inv_freq", "rotates") if name not in bands.variables]
    if missing:
        raise ProbeError(f"{path} holds no {', '.join(missing)}: give a file written by rope-probe bands.")
    usage = bands["usage"].transpose("layer", "head", "pair").values
    inv_freq = bands["inv_freq"].transpose("layer", "pair").values
    bounds = core.head_bounds(usage, inv_freq, bands["rotates"].values.astype(bool), limit)
    layers = bands["layer"].values if "layer" in bands.coords else np.arange(len(bounds))
    found = np.argwhere(~np.isnan(bounds))
    if not len(found):
        raise ProbeError(f"{path} holds no head with usage in a rotating layer: there is nothing to bound.")
    found = found[np.argsort(bounds[tuple(found.T)], kind="stable")]
    name = str(bands.attrs.get("model", path))

    def number(value: float) -> int | None:
        return int(value) if np.isfinite(value) else None

    heads = [{"layer": int(layers[i]), "head": int(j), "bound": number(bounds[i, j])} for i, j in found]
    quantiles = {key: number(value) for key, value in core.quantiles(bounds).items()}
    payload = {"analysis": "bound", "weights": str(path), "model": name, "limit": limit, "quantiles": quantiles}
    ladders = {tuple(inv_freq[i][np.isfinite(inv_freq[i])]): None for i, _ in found}  # one of each, in order
    unweighted = [theory.bound_length(ladder, limit) for ladder in ladders]
    payload |= {"unweighted": unweighted, "heads_without_bound": int(np.isinf(bounds).sum()), "heads": heads}

    def shown(value: int | None):
        return f"> {limit}" if value is None else value

    title = f"usage-weighted L_bound over {len(heads)} heads of {name} (tokens)"
    ends = [("least far", heads[:5]), ("furthest", heads[::-1][:5])]
    cells = [[words, head["layer"], head["head"], shown(head["bound"])] for words, some in ends for head in some]
    parts = [
        _rich_table(title, list(quantiles), [[shown(value) for value in quantiles.values()]]),
        _rich_table("heads that carry", ["", "layer", "head", "L_bound"], cells),
        f"{payload['heads_without_bound']} of {len(heads)} heads have no negative B_w(m) up to {limit}; unweighted, these "
        f"frequencies have L_bound {', '.join(str(shown(value)) for value in unweighted)}.",
    ]

    def draw():
        from ..plots.bound import bound as plot

        chosen = {"least far": found[0], "median": found[(len(found) - 1) // 2], "furthest": found[-1]}
        reach = _reach([number(bounds[i, j]) for i, j in chosen.values()], limit)
        curves = []
        for words, (i, j) in chosen.items():
            head = core.head_weights(usage[i, j], inv_freq[i])
            assert head is not None  # it has a bound
            label = f"layer {layers[i]} head {j}, {words}"
            curves.append(core.curve(label, inv_freq[i, : len(head)], reach, weights=head))
        return plot(curves)

    return _Report(payload, parts, draw)


def _reach(lengths: list[int | None], limit: int) -> int:
    """How far to draw: well past everything there is to see."""
    return min(limit, 3 * max((length for length in lengths if length), default=limit))


def _power(value: float | None) -> str:
    """500000 as 5e5."""
    if value is None:
        return "-"
    mantissa, exponent = f"{value:.10e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _published_words(row) -> str:
    if row.published is None:
        return ""
    verdict = "holds" if row.published_fails_at is None else f"turns negative at m = {row.published_fails_at}"
    return f"; published {_power(row.published)}, which {verdict}"


def _rich_table(title: str, columns: list[str], cells: list[list]):
    from rich import box
    from rich.table import Table

    result = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in columns:
        result.add_column(column, justify="right", overflow="fold")
    for row in cells:
        result.add_row(*(str(cell) for cell in row))
    return result


def _print(report: _Report) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    for part in report.parts:
        console.print(part)
    for path in report.payload.get("figures", ()):
        print(f"figure   {path}")
