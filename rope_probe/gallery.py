"""The figure set: which command measures what, which figure it gives, and a page that shows them all.

A folder of figures holds ``data/`` (small result files, named ANALYSIS-MODEL[-PART].nc), every figure of every file
there as PNG and PDF, and ``README.md``.  Everything but ``data/`` is made again from ``data/`` alone.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .errors import ProbeError, UsageError

ENDINGS = (".png", ".pdf")
KEEP = "--keep 1,0.95,0.9,0.85,0.8,0.75,0.7,0.6,0.5,0.25,0"
_WRITTEN = ("-o", "--output", "--figure")  # options that do not change what is measured, with a value …
_SAID = ("--json", "--resume")  # … and without
_READS = {"{by_type}": "bands", "--bands": "bands", "{induction}": "heads"}


@dataclass(frozen=True)
class Recipe:
    """One command of the figure set.

    Attributes
    ----------
    analysis : str
        The command.
    options : str
        As typed; ``{data}`` is the folder of results, ``{slug}`` the model's name in it; ``{by_type}`` (each type of
        layer alone, where there are several) and ``{induction}`` are taken from the results of `bands` and `heads`.
    part : str
        Tells several recipes of one analysis apart, in the names of its files.
    figures : tuple of str
        Which of the analysis' figures to draw; empty: all that its result allows.
    """

    analysis: str
    options: str = ""
    part: str = ""
    figures: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.analysis, self.part)))

    @property
    def reads(self) -> str:
        """The recipe whose result must be there before."""
        return next((name for mark, name in _READS.items() if mark in self.options), "")

    def result(self, data: Path, slug: str) -> Path:
        ending = ".json" if self.analysis == "inspect" else ".nc"
        return data / ("-".join(filter(None, (self.analysis, slug, self.part))) + ending)


RECIPES = (
    Recipe("inspect"),
    Recipe("bands", "--segments 16"),
    Recipe("scan", "--bands {data}/bands-{slug}.nc"),
    Recipe("spectrum", "--segments 8 --inject all"),
    Recipe("similarity", "--segments 16"),
    Recipe("heads", "--segments 4"),
    Recipe("heads", "--segments 2 --map {induction}", part="map", figures=("map",)),
    Recipe("truncate", f"--segments 4 {KEEP} {{by_type}}"),
    Recipe("truncate", "--segments 4 --floor 0,0.5,0.75,1,1.25,1.5", part="floor"),
    Recipe("truncate", "--segments 2 --knockout unrotate,remove", part="knockout"),
    Recipe(
        "extend",
        "--segments 2 --base 1e4,1e5,1e6,match --scaling none,yarn --factor 2 --lengths 1024,2048,4096,8192 "
        "--passkey-lengths 512,1024,2048 --depths 0,0.5,1 --samples 2",
    ),
)

BOUND = ["bound", "--table", "--head-dim", "128"]  # arithmetic, of no model

#: (analysis, figure) -> what of the literature it stands beside
ANSWERS = {
    ("inspect", "inspect"): "critical dimension and wavelengths of the scaling laws of RoPE extrapolation (2310.05209)",
    ("bound", "bound"): "smallest base against length, table 2 of Base of RoPE Bounds Context Length (2405.14591)",
    ("bands", "profile"): "the band and its predicted position, Frequency bands in RoPE (Oka et al.)",
    ("bands", "layers"): "mean norms of q and k by layer and frequency, the maps of 2410.06205",
    (
        "bands",
        "heads",
    ): "high-norm pairs by head (2410.06205, 2502.01563), and the pairs that MHA2MLA ranks (2502.14837)",
    ("scan", "profile"): "the same profile, from weights alone",
    ("spectrum", "purity"): "spectrum damage, Fourier Position Embedding (2412.17739)",
    ("spectrum", "tones"): "the single-tone experiment asked of 2412.17739, with its controls",
    ("spectrum", "injected"): "the same for every resolvable pair",
    ("spectrum", "damage"): "damage by layer, the claim of 2412.17739 measured",
    ("spectrum", "profile"): "attention score against distance (2405.14591, 2104.09864)",
    ("similarity", "layers"): "Spearman correlation of similarity and attention, the evidence behind 2405.14591",
    ("similarity", "control"): "the objection to it: position and attention sinks, held fixed",
    ("similarity", "distance"): "the same correlation, distance by distance",
    ("similarity", "heads"): "the same correlation, head by head",
    ("heads", "roles"): "positional and semantic heads of 2410.06205; induction heads (2209.11895)",
    ("heads", "wavelength"): "do positional heads sit on fast pairs, as 2410.06205 says of Gemma?",
    ("heads", "distance"): "attention by distance with the pairs that make it (2410.06205)",
    ("heads", "map"): "one map of an induction head (2209.11895)",
    ("truncate", "keep"): "p-RoPE of 2410.06205 and the cuts of Oka et al., in a trained model",
    ("truncate", "floor"): "the floor clip of 2412.17739, in a model that was not trained for it",
    ("truncate", "knockout"): "causal importance of every pair, beside its usage",
    ("extend", "base"): "perplexity and retrieval against the base, the sweeps of 2405.14591",
    ("extend", "position"): "perplexity by position under base changes and YaRN (2309.00071)",
    ("extend", "retrieval"): "passkey retrieval by length and depth (2305.16300, 2404.06654)",
    ("trajectory", "trajectory"): "since when: the band over training",
}


# --- results ---------------------------------------------------------------------------------------------------------


def slug(model: str) -> str:
    """A model's name in file names: demo:smollm2 -> smollm2, meta-llama/Llama-2-7b-hf -> llama-2-7b-hf."""
    return re.sub(r"[^a-z0-9.]+", "-", Path(model.removeprefix("demo:")).name.removesuffix(".gguf").lower()).strip("-")


def check_names(only: list[str] | None) -> None:
    """Refuse what is no recipe's name."""
    known = [recipe.name for recipe in RECIPES]
    for name in only or ():
        if name not in known:
            raise UsageError(f"--only names {name!r}: choose from {', '.join(known)}.")


def _chosen(only: list[str] | None) -> list[Recipe]:
    """The recipes of these names, and those whose results they read; all where none is named."""
    if only is None:
        return list(RECIPES)
    names = {*only, *(recipe.reads for recipe in RECIPES if recipe.name in only)}
    return [recipe for recipe in RECIPES if recipe.name in names]


def command(recipe: Recipe, model: str, data: Path, more: Sequence[str] = ()) -> list[str] | None:
    """The words after ``rope-probe`` that make a recipe's result; None where it has nothing to say of this model."""
    name = slug(model)
    values = {"data": data.as_posix(), "slug": name}
    if "{by_type}" in recipe.options:
        types = _layer_types(data / f"bands-{name}.nc")
        values["by_type"] = f"--layer-type {','.join(types)}" if len(types) > 1 else ""
    if "{induction}" in recipe.options:
        head = _induction_head(data / f"heads-{name}.nc")
        if head is None:
            return None
        values["induction"] = head
    words = [recipe.analysis, model, *shlex.split(recipe.options.format(**values)), *more]
    if recipe.analysis == "inspect":  # it has no result file
        return words
    return [*words, "-o", recipe.result(data, name).as_posix()]


def _layer_types(path: Path) -> list[str]:
    """Types of the layers that rotate, in the order of the layers."""
    from .results import load

    ds = load(path)
    return list(dict.fromkeys(str(kind) for kind in ds["layer_type"].values[ds["rotates"].values.astype(bool)]))


def _induction_head(path: Path) -> str | None:
    """LAYER.HEAD of the largest induction score."""
    import numpy as np

    from .results import load

    ds = load(path)
    score = ds["induction"].transpose("layer", "head").values
    if not np.isfinite(score).any():
        return None
    layer, head = np.unravel_index(np.nanargmax(score), score.shape)
    return f"{int(ds['layer'].values[layer])}.{int(head)}"


def measured(words: list[str]) -> list[str]:
    """What of a command decides on its numbers: where it writes, and the paths of results it reads, left out."""
    kept, rest = [], iter(words)
    for word in rest:
        if word in _WRITTEN or word == "--bands":
            next(rest, None)
        elif word not in _SAID:
            kept.append(word)
    return kept


def up_to_date(path: Path, words: list[str]) -> bool:
    """Is the result there, whole, and of this command?"""
    from .results import load

    if not path.exists():
        return False
    if path.suffix == ".json":
        return True
    ds = load(path)
    made_by = shlex.split(str(ds.attrs.get("command", "")))[1:]  # without the name of the program
    return not int(ds.attrs.get("partial", 0)) and measured(made_by) == measured(words)


def run(models: list[str], folder: Path, only: list[str] | None = None, more: Callable = lambda analysis: ()):
    """Measure what is not there yet, each analysis in a process of its own.

    Parameters
    ----------
    models : list of str
    folder : Path
    only : list of str, optional
        Names of recipes.
    more : callable
        analysis -> further words of its command.

    Returns
    -------
    list of str
        The commands that were run.

    Raises
    ------
    ProbeError
        A command failed; what others measured is kept, and its own sentence is on standard error.
    """
    data = folder / "data"
    done = []
    if models:
        data.mkdir(parents=True, exist_ok=True)
    for model in models:
        for recipe in _chosen(only):
            path = recipe.result(data, slug(model))
            words = command(recipe, model, data, more(recipe.analysis))
            if words is None or up_to_date(path, words):
                continue
            done.append(_measure(words, path))
    if models and only is None and not (data / "bound.json").exists():
        done.append(_measure(BOUND, data / "bound.json"))
    return done


def _measure(words: list[str], path: Path) -> str:
    """Run one command; one that has no result file prints its result."""
    from .results import replace_file

    prints = path.suffix == ".json"
    shown = shlex.join(["rope-probe", *words])
    print(shown, file=sys.stderr, flush=True)
    if prints:
        words = [*words, "--json"]
    elif path.with_name(f"{path.name}.resume").exists():
        words = [*words, "--resume"]
    finished = subprocess.run([sys.executable, "-m", "rope_probe", *words], stdout=subprocess.PIPE, check=False)
    if finished.returncode:
        raise ProbeError(
            f"`{shown}` ended with exit code {finished.returncode}: see its message above; the same "
            "`rope-probe figures` goes on from there."
        )
    if prints:
        replace_file(path, finished.stdout)
    return shown


# --- figures ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """A figure of the set.

    Attributes
    ----------
    stem : str
        File name without ending.
    analysis, figure : str
        As in :data:`rope_probe.plots.FIGURES`; ``figure`` is "compare" where several results are drawn over each other.
    title : str
    command : str
        What made its data.
    draw : callable
        () -> axes
    """

    stem: str
    analysis: str
    figure: str
    title: str
    command: str
    draw: Callable


def figures(folder: Path, only: list[str] | None = None) -> Iterator[Figure]:
    """Every figure that the results in ``folder/data`` allow, in the order of the page."""
    from .plots import FIGURES
    from .results import load

    data = folder / "data"
    if only is None or "inspect" in only:
        yield from _without_results(data)
    loaded = {path: load(path) for path in sorted(data.glob("*.nc"))}
    loaded = dict(sorted(loaded.items(), key=lambda item: int(item[1].attrs["claimed_length"])))
    for analysis in FIGURES:
        of_it = {path: ds for path, ds in loaded.items() if ds.attrs["analysis"] == analysis}
        whole = {}
        for path, ds in of_it.items():
            name, recipe = _place(path, analysis)
            if only is not None and recipe.name not in only:
                continue
            yield from _of_one(path, ds, name, recipe)
            if not recipe.part:
                whole[path] = ds
        if len(whole) > 1:
            yield _of_several(analysis, whole)


def _place(path: Path, analysis: str) -> tuple[str, Recipe]:
    """Name of the model in a result's file name, and the recipe; a recipe of its own where the name has no part."""
    name = path.stem.removeprefix(f"{analysis}-")
    for recipe in RECIPES:
        if recipe.analysis == analysis and recipe.part and name.endswith(f"-{recipe.part}"):
            return name.removesuffix(f"-{recipe.part}"), recipe
    return name, Recipe(analysis)


def _without_results(data: Path) -> Iterator[Figure]:
    """Figures of what has no result file: geometry of the models, and the table of the bound."""
    from .plots import inspect, smallest_bases
    from .probes.bound import LengthRow

    described = [json.loads(path.read_text("utf-8")) for path in sorted(data.glob("inspect-*.json"))]
    described.sort(key=lambda entry: entry["claimed_length"])
    if described:
        line = shlex.join(["rope-probe", "inspect", *(entry["model"] for entry in described)])
        yield Figure("inspect", "inspect", "inspect", "wavelengths of the pairs", line, partial(inspect, described))
    if (data / "bound.json").exists():
        found = json.loads((data / "bound.json").read_text("utf-8"))
        rows = [LengthRow(**row) for table in found["tables"].values() for row in table]
        draw = partial(smallest_bases, rows, label=f"head dimension {found['head_dim']}")
        line = shlex.join(["rope-probe", *BOUND])
        yield Figure("bound", "bound", "bound", "smallest base for a length", line, draw)


def _of_one(path: Path, ds, name: str, recipe: Recipe) -> Iterator[Figure]:
    """The figures of one result: the first has the bare name, as where a command draws them."""
    from .plots import FIGURES
    from .words import model_name

    stem = "-".join(filter(None, (name, recipe.analysis, recipe.part)))
    line = str(ds.attrs.get("command", "")) or f"rope-probe show {path.as_posix()}"
    first = True
    for figure, plot in FIGURES[recipe.analysis].items():
        if recipe.figures and figure not in recipe.figures or not getattr(plot, "applies", lambda ds: True)(ds):
            continue
        here = stem if first else f"{stem}-{figure}"
        yield Figure(here, recipe.analysis, figure, f"{model_name(ds)}, {figure}", line, partial(plot, ds))
        first = False


def _of_several(analysis: str, results: dict) -> Figure:
    from .plots import compare
    from .probes.compare import model_names

    names = model_names(list(results.values()))
    if len(set(names)) < len(names):
        names = [path.stem.removeprefix(f"{analysis}-") for path in results]
    line = shlex.join(["rope-probe", "compare", *(path.as_posix() for path in results)])
    draw = partial(compare, list(results.values()), names=names)
    return Figure(f"compare-{analysis}", analysis, "compare", " and ".join(names), line, draw)


def draw(folder: Path, only: list[str] | None = None) -> list[Path]:
    """Draw every figure as PNG and PDF; where nothing was left out, the page that shows them too."""
    from .plots import save_figure

    written, shown = [], []
    for figure in figures(folder, only):
        axes = figure.draw()
        written += [save_figure(axes, folder / (figure.stem + ending)) for ending in ENDINGS]
        shown.append((figure, _caption(axes)))
        if "matplotlib.pyplot" in sys.modules:
            sys.modules["matplotlib.pyplot"].close("all")
    if not written:
        raise ProbeError(
            f"there is no result in {folder / 'data'}: measure a model with `rope-probe figures --run MODEL`."
        )
    if only is None:
        written.append(_page(folder, shown))
    return written


def _caption(axes) -> str:
    """The caption that is written under a figure."""
    import numpy as np

    figure = np.ravel(np.array(axes, dtype=object))[0].figure.figure
    return max((text.get_text().replace("\n", " ") for text in figure.texts), key=len, default="")


def _page(folder: Path, shown: list[tuple[Figure, str]]) -> Path:
    """The gallery: each figure with its caption, the command of its data, and what it stands beside."""
    from .results import replace_file

    lines = [
        "# Figures",
        "",
        "Made by `rope-probe figures` from the results in `data/`; every figure is here as PNG and as PDF. With",
        "`rope-probe figures OTHER --run MODEL` the same set is measured on another checkpoint.",
    ]
    analysis = ""
    for figure, caption in shown:
        if figure.analysis != analysis:
            analysis = figure.analysis
            lines += ["", f"## {analysis}"]
        lines += ["", f"### {figure.title}", "", f"![{analysis}: {figure.title}]({figure.stem}.png)", ""]
        lines += [caption, ""] if caption else []
        lines += [f"`{figure.command}` · [PDF]({figure.stem}.pdf)"]
        stands = ANSWERS.get((analysis, figure.figure))
        lines += ["", f"Beside: {stands}."] if stands else []
    path = folder / "README.md"
    replace_file(path, ("\n".join(lines) + "\n").encode())
    return path
