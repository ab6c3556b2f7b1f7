"""What `compare` sets side by side: the statistics of a result of each analysis, with what their errors come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import xarray as xr

from ..accumulate import mean_and_error
from . import bands_summary, extend_summary, heads_summary, similarity_summary, spectrum_summary, truncate_summary
from .compare_axes import Ladder

ALL = "all layers"
_SIDES = {"keys": ("i_band", ""), "queries": ("i_band_q", "_q"), "usage q·k": ("i_band_usage", "_usage")}
_WEIGHTS = {
    "self_weight": "the token itself",
    "previous_weight": "the previous token",
    "sink_weight": "the first position",
    "weight_last_8": "the last 8 tokens",
    "weight_last_64": "the last 64 tokens",
    "weight_last_512": "the last 512 tokens",
}


class Statistic(NamedTuple):
    """A number, and where its error comes from.

    Attributes
    ----------
    value : float
    segments : ndarray, shape (segment,), optional
        Values of the segments, whose spread gives the standard error.
    error : float
        Standard error where no values of segments are kept; NaN where there is none.
    pairs : int, optional
        Of an index: the pairs that it counts.  Indices on ladders of other sizes have no difference.
    """

    value: float
    segments: np.ndarray | None = None
    error: float = np.nan
    pairs: int | None = None

    @property
    def standard_error(self) -> float:
        return self.error if self.segments is None else float(mean_and_error(self.segments)[1])


class Band(NamedTuple):
    """Where a kind of layer has its band.

    Attributes
    ----------
    ladder : Ladder
    profile : ndarray, shape (pairs,)
        Usage of a pair over the mean of its head's pairs, mean over heads.
    i_band : Statistic
        By usage.
    """

    ladder: Ladder
    profile: np.ndarray
    i_band: Statistic


class Part(NamedTuple):
    """Some layers of a result, with their statistics.

    Attributes
    ----------
    kind : str
        Which layers; compared with the same kind of the first result, if it has it.
    statistics : dict of str -> Statistic
    title : str
        What to add to the name of the result, if anything.
    band : Band, optional
        Where the layers have pairs of the same frequencies, and their band is known.
    """

    kind: str
    statistics: dict[str, Statistic]
    title: str = ""
    band: Band | None = None


def _kinds(ds: xr.Dataset, by_type: dict) -> list[tuple[str, str, xr.Dataset, dict | None]]:
    """(kind, title, its layers, its entry in the summary): all layers first where there are several kinds."""
    rows = {
        name.replace("_", " "): (np.flatnonzero(np.isin(ds["layer"].values, group["layers"])), group)
        for name, group in by_type.items()
    }
    several = len(rows) != 1 or sum(len(layers) for layers, _ in rows.values()) < ds.sizes["layer"]
    found: list = [(ALL, "", ds, None)] if several else []
    for name, (layers, group) in rows.items():
        title = name.replace("attention", "layers") if several else ""
        found.append((name, title, ds.isel(layer=layers), group))
    return found


def _number(value) -> float:
    return np.nan if value is None else float(value)


def _mean(values) -> Statistic:
    """Mean over layers, heads or pairs of what is there; of its error nothing is known."""
    return Statistic(float(mean_and_error(np.ravel(values))[0]))


# --- bands, heads, trajectory ------------------------------------------------------------------------------------------


def _i_band(part: xr.Dataset, group: dict, side: str) -> Statistic:
    key, suffix = _SIDES[side]
    segments = bands_summary.segment_means(part, f"dominant{suffix}_segment")
    known = segments if np.isfinite(segments).any() else None
    return Statistic(_number(group[key]), known, pairs=int(part["pairs"].max()))


def scaled(one: Statistic, change: Callable) -> Statistic:
    """A statistic and each of its segments under the same change."""
    segments = None if one.segments is None else change(one.segments)
    return Statistic(float(change(one.value)), segments, one.error)


def ladder_of(part: xr.Dataset) -> Ladder:
    """The pairs of layers of one kind."""
    pairs = int(part["pairs"].values[0])
    return Ladder(part["wavelength"].values[0, :pairs], float(part["formation_length"].values[0]))


def mean_profile(part: xr.Dataset) -> np.ndarray:
    """Usage of every pair over the mean of its head's pairs, averaged over the heads of layers of one kind."""
    usage = part["usage"].values[..., : int(part["pairs"].values[0])].reshape(-1, int(part["pairs"].values[0]))
    mean = usage.mean(axis=1)
    alive = mean > 0  # neither padding nor a head of zero norm
    return (usage[alive] / mean[alive, None]).mean(axis=0) if alive.any() else np.full(usage.shape[1], np.nan)


def band_of(part: xr.Dataset, group: dict) -> Band:
    """The band of layers of one kind."""
    return Band(ladder_of(part), mean_profile(part), _i_band(part, group, "usage q·k"))


def _places(part: xr.Dataset, group: dict) -> dict[str, Statistic]:
    """i_band on the three axes."""
    found = {f"i_band, {side}": _i_band(part, group, side) for side in _SIDES}
    pairs = group["pairs"]
    changes: dict[str, Callable] = {"i_band / pairs": lambda index: index / pairs}
    if "predicted" in group:  # layers of one kind
        length = ladder_of(part).length
        waves = np.vectorize(lambda index: _number(bands_summary.wavelength_at(part, index)), otypes=[float])
        changes |= {"wavelength of i_band": waves, "wavelength of i_band / L": lambda index: waves(index) / length}
    for name, change in changes.items():
        for side in ("keys", "usage q·k"):
            found[f"{name}, {side.removesuffix(' q·k')}"] = scaled(found[f"i_band, {side}"], change)
    return found


def bands(ds: xr.Dataset) -> list[Part]:
    """i_band of each kind of layer, on the three axes; of an estimate (`scan`) as of a measurement."""
    for suffix in ("", "_q", "_usage"):
        if f"dominant{suffix}_segment" not in ds:
            ds = ds.assign(
                {f"dominant{suffix}_segment": (("segment", "layer"), np.full((1, ds.sizes["layer"]), np.nan))}
            )
    whole = bands_summary.summary(ds)
    rotating = ds.isel(layer=np.flatnonzero(ds["rotates"].values))
    return [
        Part(kind, _places(part, group or whole), title, band_of(part, group) if group else None)
        for kind, title, part, group in _kinds(rotating, whole["by_layer_type"])
    ]


def heads(ds: xr.Dataset) -> list[Part]:
    """Share of the heads of each role, what they attend to, and the band of all heads and of the semantic ones."""
    whole = bands_summary.summary(ds)
    parts = []
    for kind, title, part, group in _kinds(ds, whole["by_layer_type"]):
        rotating = part.isel(layer=np.flatnonzero(part["rotates"].values))
        everyone, semantic = (heads_summary.members(part, name) for name in ("all", "semantic"))
        found = {}
        for role in heads_summary.ROLES:
            found[f"share of heads, {role}"] = Statistic(
                float(heads_summary.members(part, role).sum() / everyone.sum())
            )
        for name, words in _WEIGHTS.items():
            found[f"weight on {words}"] = _mean(part[name].values[everyone])
        found["induction score"] = _mean(part["induction"].values[everyone])
        found["entropy, nats"] = _mean(part["entropy"].values[everyone])
        found["mean distance, tokens"] = _mean(part["mean_distance"].values[everyone])
        for side, variable in (("keys", "k_top"), ("usage q·k", "usage")):
            found[f"i_band, {side}"] = _i_band(rotating, group or whole, side)
            own = heads_summary.dominant_pair(part, variable)[semantic]
            found[f"i_band, {side.removesuffix(' q·k')}, semantic heads"] = _mean(own)._replace(
                pairs=int(part["pairs"].max())
            )
        parts.append(Part(kind, found, title, band_of(rotating, group) if group else None))
    return parts


def trajectory(ds: xr.Dataset) -> list[Part]:
    """i_band at the first and the last checkpoint, and how far it moved between them."""
    ends = {"first": ds.isel(checkpoint=0), "last": ds.isel(checkpoint=-1)}
    seen = {name: bands(one) for name, one in ends.items()}
    parts = []
    for first, last in zip(seen["first"], seen["last"], strict=True):
        found = {}
        for side, short in (("keys", "keys"), ("usage q·k", "usage")):
            before, after = (one.statistics[f"i_band, {side}"] for one in (first, last))
            found[f"i_band, {short}, first checkpoint"] = before
            found[f"i_band, {short}, last checkpoint"] = after
            moved = Statistic(after.value - before.value, pairs=after.pairs)
            if before.segments is not None and after.segments is not None:
                moved = moved._replace(segments=after.segments - before.segments)
            found[f"i_band, {short}, last − first"] = moved
            for name in ("i_band / pairs", "wavelength of i_band / L"):
                if f"{name}, {short}" in last.statistics:
                    found[f"{name}, {short}, last checkpoint"] = last.statistics[f"{name}, {short}"]
        parts.append(Part(last.kind, found, last.title, last.band))
    return parts


# --- spectrum ----------------------------------------------------------------------------------------------------------


def spectrum(ds: xr.Dataset) -> list[Part]:
    """Damage and purity of each kind of layer; an error over layers of one text is at most the mean of theirs."""
    named = {name: {"layers": ds["layer"].values[rows]} for name, rows in spectrum_summary.by_kind(ds).items()}
    parts = []
    rotating = ds.isel(layer=np.flatnonzero(ds["rotates"].values))
    for kind, title, part, _ in _kinds(rotating, named):
        purity = spectrum_summary.relative_purity(part)
        known = purity[np.isfinite(purity)]
        middle = np.median(known) if len(known) else np.nan
        below = np.mean(known < spectrum_summary.PURE) if len(known) else np.nan
        damage, error = _mean(part["damage"].values), _mean(part["damage_se"].values)
        found = {
            "damage, mean over layers": Statistic(damage.value, error=error.value),
            "damage with endless text": _mean(part["damage_limit"].values),
            "damage of pure tones": _mean(part["damage_tone"].values),
            "purity over a pure tone's, median": Statistic(float(middle)),
            f"share below {spectrum_summary.PURE}": Statistic(float(below)),
            "power below the floor": _mean(part["power_below_floor"].values),
        }
        parts.append(Part(kind, found, title))
    return parts


# --- similarity --------------------------------------------------------------------------------------------------------


def similarity(ds: xr.Dataset) -> list[Part]:
    """rho, free and at fixed distance, of each kind of layer, and by depth."""
    named = {name: {"layers": ds["layer"].values[rows]} for name, rows in similarity_summary.kinds(ds).items()}
    parts = []
    for kind, title, part, _ in _kinds(ds, named):
        values = similarity_summary.summary(part)
        found = {
            "rho": Statistic(_number(values["rho"]), similarity_summary.free_segments(part)),
            "rho at fixed distance": Statistic(
                _number(values["rho_fixed"]), similarity_summary.controlled_segments(part)
            ),
        }
        if not title:  # depth is that of the whole model
            for name, rows in similarity_summary.thirds(part).items():
                segments = similarity_summary.free_segments(part.isel(layer=rows))
                found[f"rho, {name} layers"] = Statistic(float(mean_and_error(segments)[0]), segments)
        parts.append(Part(kind, found, title))
    return parts


# --- truncate ----------------------------------------------------------------------------------------------------------


def truncate(ds: xr.Dataset) -> list[Part]:
    """What each group of layers that was cut costs: ratios of perplexities, or how knockouts order the pairs."""
    values = truncate_summary.summary(ds)
    intact = ds["nll_intact"].values
    base = {"intact, nats/token": Statistic(float(intact.mean()), intact)}
    groups: dict[str, dict[str, Statistic]] = {one["where"]: {} for one in values["settings"]}
    if len(groups) == 1 or ALL in groups:
        groups[ALL if ALL in groups else next(iter(groups))].update(base)
    end = ", from the fast end" if values["reverse"] else ""
    for row, one in enumerate(values["settings"]):
        if one["kind"] in ("keep", "floor"):
            added = ds["nll"].values[row] - intact
            # what each segment makes of the ratio, to first order: their mean is the ratio, their spread its error
            segments = one["ratio"] * (1 + added - added.mean())
            name = f"ratio, {one['kind']} {one['value']:g}{end}"
            groups[one["where"]][name] = Statistic(one["ratio"], segments)
    for one in values["keep"]:
        found = groups[one["where"]]
        found[f"critical keep{end}"] = Statistic(_number(one["critical"]))
        if len(one["share_usage"]) == 1:
            (share,) = one["share_usage"].values()
            found["i_band / pairs, usage"] = Statistic(_number(share))
    for one in values["knockout"]:
        found = groups[one["where"]]
        found[f"{one['kind']}: rank correlation with usage"] = Statistic(_number(one["usage_rank_correlation"]))
        found[f"{one['kind']}: share of the harm in the band"] = Statistic(_number(one["band_share"]))
        found[f"{one['kind']}: costliest pair, nats"] = Statistic(one["added"][0], error=_number(one["added_se"][0]))
    if not any("intact, nats/token" in found for found in groups.values()):
        groups = {ALL: base} | groups
    return [Part(where, found, "" if where == ALL else where) for where, found in groups.items()]


# --- extend ------------------------------------------------------------------------------------------------------------


def extend(ds: xr.Dataset) -> list[Part]:
    """Likelihood, and how often the hidden keys were found, under every setting at every length."""
    found = {}
    for row, setting in enumerate(extend_summary.summary(ds)["settings"]):
        for column, one in enumerate(setting["lengths"]):
            where = f"{setting['name']}, {one['length']:,}"
            if one["nll"] is not None:
                found[f"nats/token: {where}"] = Statistic(one["nll"], ds["nll"].values[row, column])
            for entry in one["retrieval"]:
                keys = "key" if entry["keys"] == 1 else f"one of {entry['keys']} keys"
                error = _number(entry["exact_match_se"])  # prompts are of each tokenizer, not paired
                found[f"{keys} found: {where}"] = Statistic(entry["exact_match"], error=error)
    return [Part(ALL, found)]
