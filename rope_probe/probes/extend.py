"""extend: what do another base and another scaling do to perplexity, and to retrieval?

Sources: Base of RoPE Bounds Context Length, arXiv 2405.14591 (base sweeps; perplexity can stay low where retrieval is
gone), FMRoPE (base = evaluated length), YaRN, arXiv 2309.00071, RULER, arXiv 2404.06654 (retrieval).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import xarray as xr

from .. import results, theory
from ..accumulate import mean_and_error
from ..checkpoints import Checkpoint
from ..errors import ProbeWarning
from ..rotary import Geometry
from ..texts import check_sources, segments_for
from .extend_grid import OWN, SEGMENTS, Grid, Setting, make_grid
from .extend_run import Answers, Part, plan, tasks_of, write_prompts
from .reading import measure


def extend(
    ckpt: Checkpoint,
    *,
    text=None,
    dataset: str | None = None,
    tokens=None,
    segments: int | None = None,
    lengths=None,
    batch: int | None = None,
    base=None,
    scaling=None,
    factor=None,
    passkey_lengths=None,
    depths=None,
    samples: int | None = None,
    keys=None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> xr.Dataset:
    """Likelihood by position, and retrieval of a hidden key, under other bases and scalings.

    Parameters
    ----------
    ckpt : Checkpoint
    text, dataset, tokens, segments, batch : optional
        What is read, as for `bands`, in segments of the largest of `lengths`; default 4 of them, or all in `tokens`.
    lengths : sequence of int, optional
        Tokens; default 512, 1024, 2048.  A shorter length reads the beginning of the same segments.
    base : sequence of float or str, optional
        RoPE bases; ``own``, the checkpoint's (the default where a scaling is given), and ``match``, the length that
        is read, a prompt's own length for a prompt.  Default, where neither is asked for: 1e4, 1e5, 1e6, match.
    scaling : sequence of str, optional
        ``own`` (the default), ``none``, ``linear``, ``dynamic``, ``yarn``, ``llama3``, ``longrope`` (where the
        configuration has its factors); each is tried with each base.
    factor : float or sequence of float, optional
        Of linear, dynamic, yarn and llama3; default 2.
    passkey_lengths : sequence of int, optional
        Tokens of the retrieval prompts, answer included; default `lengths`.
    depths : sequence of float, optional
        Where in the filler the key hides; default 0, 0.25, … 1.
    samples : int, optional
        Prompts for each length and depth, default 4; 0 leaves retrieval out.
    keys : sequence of int, optional
        Keys hidden in a prompt, one of which is asked for; default 1.
    seed : int
        Of keys and filler.
    progress : callable, optional
        Called with (tokens read, tokens in all).

    Returns
    -------
    Dataset
        ``nll[setting, length, segment]`` (nats per token), ``nll_position[setting, length, segment, bucket]``,
        ``ratio[setting, length]`` of perplexities to the model as it is, ``exact_match`` and ``key_logprob[setting,
        length, keys, depth, sample]``, ``bound[setting, length, layer]`` (L_bound).  ``intact[setting]`` says which
        setting is the model as it is; where none that was asked for is, it comes first.
        After an interrupt, or a failure later on (with a warning): what was whole by then (a length, or a length
        with a number of keys), NaN elsewhere, with attribute ``partial`` = 1.

    Raises
    ------
    UsageError
        Settings that are not possible for this model; nothing was run.
    ProbeError
        The model or the tokens cannot be read; the likelihood is not finite; the rotation cannot be changed.

    Notes
    -----
    One model serves all settings; nothing is loaded again.  Where the frequencies do not depend on the length, the
    shorter lengths are read off the longest one (attention is causal).  Where they do (``match``, dynamic NTK,
    LongRoPE) each length is read by itself, all of it with the frequencies of that length: no cache of keys that
    were rotated otherwise.  The same holds for the answers: they are scored in one pass over prompt and answer.
    """
    check_sources(batch=batch)
    grid = make_grid(base, scaling, factor, lengths, passkey_lengths, depths, samples, keys)
    with warnings.catch_warnings():  # reading more than the model was made for is the point
        warnings.filterwarnings("ignore", message="segments of .* are longer", category=ProbeWarning)
        size, count = max(grid.lengths), segments or (SEGMENTS if tokens is None else None)
        chosen = segments_for(ckpt, text=text, dataset=dataset, tokens=tokens, segments=count, length=size)
    prompts = write_prompts(ckpt, grid, seed)
    geometry = ckpt.geometry(max(grid.all_lengths))
    plans = [plan(ckpt, grid, setting) for setting in grid.settings]  # enters each once, so it is refused now or never
    intact = [row for row, parts in enumerate(plans) if len(parts) == 1 and parts[0].intact]
    if not intact:
        grid = replace(grid, settings=(Setting(OWN, OWN), *grid.settings))
        plans, intact = [plan(ckpt, grid, grid.settings[0]), *plans], [0]
    tasks = tasks_of(plans, prompts, intact[0])
    store = Answers(ckpt, grid, chosen.ids, prompts, tasks, batch, progress)
    options = {
        "lengths": list(grid.lengths),
        "passkey_lengths": list(grid.passkey_lengths),
        "samples": grid.samples,
        "seed": seed,
        "batch": batch,
    }
    asked = options | {"grid": [setting.name for setting in grid.settings], "text": chosen.sha256}
    asked |= {"depths": list(grid.depths), "keys": list(grid.keys)}
    done = measure(ckpt, "extend", np.arange(len(tasks))[:, None], store, 1, asked)
    ds = _dataset(geometry, grid, plans, store, prompts, intact[0])
    partial = done < len(tasks)
    ds.attrs = results.provenance(ckpt, geometry, chosen, "extend", options, partial=partial)
    return results.describe(ds.isel(setting=store.measured()))


def _dataset(
    geometry: Geometry, grid: Grid, plans: list[list[Part]], store: Answers, prompts, intact: int
) -> xr.Dataset:
    coords = results.layer_coordinates(list(geometry.layers)) | {
        "base_asked": ("setting", [str(setting.base) for setting in grid.settings]),
        "scaling": ("setting", [setting.scaling for setting in grid.settings]),
        "factor": ("setting", [np.nan if setting.factor is None else setting.factor for setting in grid.settings]),
        "intact": ("setting", (np.arange(len(grid.settings)) == intact).astype(np.int8)),
        "length": ("length", list(grid.all_lengths)),
        "position_first": ("bucket", grid.edges[:-1]),
        "position_last": ("bucket", grid.edges[1:] - 1),
        "keys": ("keys", list(grid.keys)),
        "depth": ("depth", list(grid.depths)),
    }
    mean, error = mean_and_error(store.nll - store.nll[intact], axis=2)
    base, bound = _rotations(geometry, grid, plans)
    asked = ("setting", "length", "keys", "depth", "sample")
    place = np.full(store.exact.shape[1:], np.nan)
    for (length, keys), rows in prompts.items():
        found = [[prompt.position for prompt in row] for row in rows]
        place[store.column(length), grid.keys.index(keys)] = found
    variables = {
        "nll": (("setting", "length", "segment"), store.nll),
        "nll_position": (("setting", "length", "segment", "bucket"), store.by_position),
        "ratio": (("setting", "length"), np.exp(mean)),
        "ratio_se": (("setting", "length"), np.exp(mean) * error),
        "exact_match": (asked, store.exact),
        "key_right": (asked, store.right),
        "key_logprob": (asked, store.logprob),
        "key_position": (asked[1:], place),
        "base_used": (("setting", "length", "layer"), base),
        "bound": (("setting", "length", "layer"), bound),
    }
    return xr.Dataset(variables, coords=coords)


def _rotations(geometry: Geometry, grid: Grid, plans: list[list[Part]]) -> tuple[np.ndarray, np.ndarray]:
    """Base and L_bound of every layer, shape (setting, length, layer); a bound that was not met is infinite."""
    base, bound = (np.full((len(plans), len(grid.all_lengths), len(geometry.layers)), np.nan) for _ in range(2))
    known: dict[tuple, float] = {}
    for row, parts in enumerate(plans):
        for part in parts:
            for length, there in part.geometries.items():
                layers = {layer.layer: layer for layer in there.layers}
                for column, measured in enumerate(geometry.layers):
                    if not measured.rotates:
                        continue
                    layer = layers[measured.layer]
                    same = layer.inv_freq.tobytes(), layer.unrotated_pairs
                    if same not in known:
                        found = theory.bound_length(layer.inv_freq, unrotated=measured.unrotated_pairs)
                        known[same] = np.inf if found is None else found
                    place = row, grid.all_lengths.index(length), column
                    base[place], bound[place] = layer.base, known[same]
    return base, bound
