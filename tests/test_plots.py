"""Figures of bands: what is drawn is what the result holds, and it can be read."""

import subprocess
import sys
from functools import cache

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import xarray as xr

from rope_probe import theory
from rope_probe.errors import ProbeError
from rope_probe.plots import FIGURES, bands_heads, bands_layers, bands_profile, save_figure, style
from rope_probe.plots.bands_layers import layer_means
from rope_probe.plots.bands_profile import bands_profile_caption, relative
from rope_probe.probes import summary

matplotlib.use("agg")
pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


@cache
def drawn(plot, case, panels=None):
    """Axes of a figure of its own, drawn once for all tests that only look at it."""
    axes = plot(RESULTS[case], panels=panels) if panels else plot(RESULTS[case])
    return list(np.ravel(np.array(axes, dtype=object)))


def layer(pairs=8, heads=4, kv_heads=2, base=1e4, length=512, window=0, rotates=True, zero=0, peak=5, kind="full"):
    """One made-up layer; its heads peak at `peak`."""
    return locals()


def result(*layers, model="someone/Tiny-1B", segments=2, length=64):
    """A `bands` result as the probe writes it, from made-up layers."""
    rng = np.random.default_rng(0)
    count, pairs = len(layers), max(one["pairs"] for one in layers)
    names, variables = {"q": "head", "k": "kv_head"}, {}
    inv_freq = np.full((count, pairs), np.nan)
    for row, one in enumerate(layers):
        inv_freq[row, : one["pairs"]] = theory.ladder(one["base"], one["pairs"])
        inv_freq[row, one["pairs"] - one["zero"] : one["pairs"]] = 0
    for side, size in (("q", "heads"), ("k", "kv_heads")):
        shape = (count, max(one[size] for one in layers), pairs)
        norm, top = np.full(shape, np.nan), np.full(shape, np.nan)
        for row, one in enumerate(layers):
            if one["rotates"]:
                own = rng.uniform(0.5, 1, (one[size], one["pairs"]))
                own[:, one["peak"]] = 3
                norm[row, : one[size], : one["pairs"]] = own
                top[row, : one[size], : one["pairs"]] = 0
                top[row, : one[size], one["peak"]] = segments * (length - 1)
        variables |= {f"{side}_norm": (("layer", names[side], "pair"), norm)}
        variables |= {f"{side}_top": (("layer", names[side], "pair"), top)}
    usage = np.full_like(variables["q_norm"][1], np.nan)
    for row, one in enumerate(layers):
        keys = np.repeat(variables["k_norm"][1][row, : one["kv_heads"]], one["heads"] // one["kv_heads"], axis=0)
        usage[row, : one["heads"]] = variables["q_norm"][1][row, : one["heads"]] * keys
    variables["usage"] = (("layer", "head", "pair"), usage)
    for name in ("dominant_segment", "dominant_q_segment", "dominant_usage_segment"):
        peaks = [float(one["peak"]) if one["rotates"] else np.nan for one in layers]
        variables[name] = (("segment", "layer"), np.tile(peaks, (segments, 1)))
    waves = np.where(np.isnan(inv_freq), np.nan, theory.wavelength(np.nan_to_num(inv_freq)))

    def along(key):
        return ("layer", [one[key] for one in layers])

    coords = {
        "layer": np.arange(count),
        "pair": np.arange(pairs),
        "layer_type": ("layer", [f"{one['kind']}_attention" for one in layers]),
        "rope_type": ("layer", ["proportional" if one["zero"] else "default" for one in layers]),
        "formation_base": along("base"),
        "formation_length": along("length"),
        "inv_freq": (("layer", "pair"), inv_freq),
        "wavelength": (("layer", "pair"), waves),
    } | {key: along(key) for key in ("pairs", "heads", "kv_heads", "base", "window", "rotates")}
    attrs = {"analysis": "bands", "model": model, "corpus": "made up", "segments": segments, "length": length}
    return xr.Dataset(variables, coords=coords, attrs=attrs | {"partial": 0, "provenance": "{}"})


PLAIN = result(*[layer(peak=peak) for peak in (4, 5, 5, 6)])
MIXED = result(  # two kinds that differ in pairs, heads and base; the slower one has pairs of zero frequency; one NoPE
    layer(kind="sliding", window=128, length=128),
    layer(kind="sliding", window=128, length=128),
    layer(pairs=16, heads=2, kv_heads=1, base=1e6, zero=10, length=512, peak=3),
    layer(rotates=False),
)
LONE = result(layer(heads=1, kv_heads=1))
RESULTS = {"plain": PLAIN, "mixed": MIXED, "lone": LONE, "again": MIXED.copy(deep=True)}
PLOTS = FIGURES["bands"]


def vertical(ax, dashes=None):
    """Positions of the full-height vertical lines."""
    lines = [line for line in ax.lines if len(line.get_xdata()) == 2 and line.get_xdata()[0] == line.get_xdata()[1]]
    return [line.get_xdata()[0] for line in lines if dashes is None or line._unscaled_dash_pattern[1] == dashes[1]]


def drawn_texts(figure, monkeypatch):
    """Every text that is drawn, with its box (ticks beyond the limits exist, but are not drawn)."""
    found, draw = [], matplotlib.text.Text.draw

    def record(self, renderer):
        found.append((self, self.get_window_extent(renderer)))
        return draw(self, renderer)

    monkeypatch.setattr(matplotlib.text.Text, "draw", record)
    figure.canvas.draw()
    return [(text, box) for text, box in found if text.get_visible() and text.get_text().strip()]


# --- profile ---------------------------------------------------------------------------------------------------------


def test_profile_draws_the_mean_of_relative_heads():
    axes = drawn(bands_profile, "plain")
    for ax, variable in zip(axes, ("q_norm", "k_norm", "usage"), strict=True):
        heads = PLAIN[variable].values.reshape(-1, 8)
        heads = heads / heads.mean(axis=1, keepdims=True)
        curve = next(line for line in ax.lines if line.get_label().startswith("full attention (4 layers"))
        np.testing.assert_allclose(curve.get_ydata(), heads.mean(axis=0))
        np.testing.assert_array_equal(curve.get_xdata(), np.arange(8))
        shade = ax.collections[0].get_paths()[0].vertices
        np.testing.assert_allclose(shade[:, 1].max(), np.percentile(heads, 75, axis=0).max())
    assert axes[0].get_ylim() == axes[1].get_ylim()


def test_profile_marks_prediction_floor_and_segment():
    ax = drawn(bands_profile, "plain")[1]
    rules = {rule: theory.predicted_pair(1e4, 512, 8, rule) for rule in theory.RULES}
    np.testing.assert_allclose(vertical(ax, style.VARIANCE), [rules["variance"]])
    np.testing.assert_allclose(vertical(ax, style.FLOOR), [rules["full_turn"]])
    np.testing.assert_allclose(vertical(ax, style.SEGMENT), [8 * np.log(64 / 2 / np.pi) / np.log(1e4)])
    span = ax.patches[0]
    np.testing.assert_allclose(
        [span.get_x(), span.get_x() + span.get_width()], [rules["full_turn"], rules["half_turn"]]
    )


def test_profile_shows_the_measured_band_of_the_table():
    for ax, measure in zip(drawn(bands_profile, "mixed"), ("i_band_q", "i_band", "i_band_usage"), strict=True):
        values = [group[measure] for group in summary(MIXED)["by_layer_type"].values()]
        assert [line.get_xdata()[0] for line in ax.lines if line.get_marker() == "v"] == values == [5, 3]
        assert [text.get_text() for text in ax.texts] == ["5.0", "3.0"]


def test_profile_has_a_curve_and_a_ruler_for_every_kind():
    ax = drawn(bands_profile, "mixed")[2]
    curves = {line.get_label(): line for line in ax.lines if not line.get_label().startswith("_")}
    assert list(curves) == [kind.label for kind in style.kinds(MIXED)]
    assert [len(curve.get_xdata()) for curve in curves.values()] == [8, 16]
    assert len({curve.get_color() for curve in curves.values()}) == 2
    assert len(ax.child_axes) == 2
    assert ax.get_xlim() == (-0.5, 15.5)


def test_a_kind_is_named_with_its_base_and_length():
    labels = [kind.label for kind in style.kinds(MIXED)]
    assert labels == [
        "sliding attention (2 layers, base 10000, L = window 128)",
        "full attention (1 layer, base 1e6, L = 512)",
    ]
    legends = " ".join(
        text.get_text() for legend in drawn(bands_profile, "mixed")[0].figure.legends for text in legend.texts
    )
    assert all(label in legends for label in labels)


def test_a_segment_as_long_as_the_window_has_no_line_of_its_own():
    assert vertical(bands_profile(result(layer(length=64)), panels=("k",)), style.SEGMENT) == []


def test_prediction_off_the_ladder_is_said_and_not_drawn():
    ds = result(layer(base=500, length=4096))
    ax = bands_profile(ds, panels=("k",))
    assert vertical(ax) == [style.kinds(ds)[0].reach]
    assert "off the ladder of 8 pairs" in bands_profile_caption(ds)
    assert ax.get_xlim() == (-0.5, 7.5)


def test_caption_names_another_base_of_formation():
    ds = PLAIN.assign_coords(formation_base=("layer", [2e6] * 4))
    assert "formed with base 2e6" in bands_profile_caption(ds)


def test_heads_of_zero_norm_are_left_out():
    ds = PLAIN.copy(deep=True)
    ds["q_norm"][0, 0] = 0.0
    assert len(relative(ds, style.kinds(ds)[0], "q")) == 15


def test_ruler_is_logarithmic_and_ends_in_infinity():
    rulers = drawn(bands_profile, "mixed")[1].child_axes
    ticks = {text.get_text(): x for text, x in zip(rulers[0].get_xticklabels(), rulers[0].get_xticks(), strict=True)}
    wave = MIXED["wavelength"].values[2]
    assert ticks.pop("∞") == (6 + 15) / 2
    assert ticks
    for label, x in ticks.items():
        tokens, below = float(label), int(x)
        share = np.log(tokens / wave[below]) / np.log(wave[below + 1] / wave[below])
        assert x == pytest.approx(below + share)


@pytest.mark.parametrize(("tokens", "pair"), [(2 * np.pi, 0), (1, np.nan), (1e9, np.nan)])
def test_pair_at(tokens, pair):
    wave = theory.wavelength([1.0, 0.1, 0.01, 0.0])
    np.testing.assert_equal(style.pair_at(wave, tokens), pair)
    assert style.pair_at(wave, 2 * np.pi * 10**1.5) == pytest.approx(1.5)


# --- heat maps -------------------------------------------------------------------------------------------------------


def mesh(ax):
    return next(item for item in ax.collections if isinstance(item, matplotlib.collections.QuadMesh))


def marks(ax):
    """Positions and row extents of the marks across rows."""
    found = [item for item in ax.collections if isinstance(item, matplotlib.collections.LineCollection)]
    return [segment for item in found for segment in np.array(item.get_segments())]


def test_layers_are_divided_by_their_own_maximum():
    for ax, variable in zip(drawn(bands_layers, "plain"), ("q_norm", "k_norm"), strict=True):
        mean = PLAIN[variable].values.mean(axis=1)
        np.testing.assert_allclose(mesh(ax).get_array(), mean / mean.max(axis=1, keepdims=True))
        assert mesh(ax).get_clim() == (0, 1)
        assert ax.yaxis_inverted()


def test_layers_without_rotation_are_hatched_and_missing_pairs_blank():
    ax = drawn(bands_layers, "mixed")[0]
    values = mesh(ax).get_array()
    assert values.mask[3].all() and values.mask[:2, 8:].all()
    assert not values.mask[:2, :8].any() and not values.mask[2].any()
    hatched = [patch for patch in ax.patches if patch.get_hatch()]
    assert [patch.get_y() for patch in hatched] == [2.5]
    labels = [text.get_text() for legend in ax.figure.legends for text in legend.texts]
    assert "layer without rotation" in labels and "no such pair" in labels
    assert "layer 3." in ax.figure.texts[0].get_text().replace("\n", " ")


def test_marks_of_a_layer_are_those_of_its_kind():
    half = [theory.predicted_pair(*args, "half_turn") for args in ((1e4, 128, 8), (1e6, 512, 16))]
    floor = theory.predicted_pair(1e4, 128, 8, "full_turn")  # that of full layers lies beyond their turning pairs
    expected = [(0, half[0]), (1, half[0]), (0, floor), (1, floor), (2, half[1])]
    found = [(segment[:, 1].mean(), segment[0, 0]) for segment in marks(drawn(bands_layers, "mixed")[1])]
    np.testing.assert_allclose(found, expected)


def test_layer_types_are_marked_at_the_side_only_where_they_differ():
    colors = [kind.color for kind in style.kinds(MIXED)]
    strip = [patch for patch in drawn(bands_layers, "mixed")[0].patches if patch.get_width() == 0.02]
    assert [matplotlib.colors.to_hex(patch.get_facecolor()) for patch in strip] == [colors[0], colors[0], colors[1]]
    assert not drawn(bands_layers, "plain")[0].patches


def test_heads_are_divided_by_their_own_maximum_and_keys_span_their_group():
    queries, keys = axes = bands_heads(PLAIN, layer=3)
    for ax, variable in zip(axes, ("q_norm", "k_norm"), strict=True):
        values = PLAIN[variable].values[3]
        np.testing.assert_allclose(mesh(ax).get_array(), values / values.max(axis=1, keepdims=True))
    assert queries.get_ylim() == keys.get_ylim() == (3.5, -0.5)
    dots = next(line for line in keys.lines if line.get_marker() == "o")
    np.testing.assert_array_equal(dots.get_xydata(), [[6, 0.5], [6, 2.5]])
    assert [label.get_text() for label in keys.get_yticklabels()] == ["0", "1"]


def test_heads_choose_the_most_typical_layer():
    assert drawn(bands_heads, "plain")[0].figure.texts[0].get_text().startswith("Layer 1 (full attention")
    assert mesh(bands_heads(MIXED, layer=2)[0]).get_array().shape == (2, 16)


@pytest.mark.parametrize(("number", "words"), [(9, "no layer 9"), (3, "layer 3 does not rotate")])
def test_heads_of_a_layer_that_is_not_there(number, words):
    with pytest.raises(ProbeError, match=words):
        bands_heads(MIXED, layer=number)


# --- all figures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLOTS)
@pytest.mark.parametrize(("case", "alone"), [("plain", False), ("mixed", False), ("lone", False), ("mixed", True)])
def test_nothing_is_clipped_overlapping_or_small(name, case, alone, monkeypatch):
    figure = drawn(PLOTS[name], case, ("k",) if alone else None)[0].figure
    assert figure.get_figwidth() == (3.3 if alone else 7)
    found = drawn_texts(figure, monkeypatch)
    for i, (text, box) in enumerate(found):
        assert text.get_fontsize() >= 7
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, text
        for other, second in found[i + 1 :]:
            assert not box.padded(-0.5).overlaps(second.padded(-0.5)), (text, other)


@pytest.mark.parametrize("name", PLOTS)
def test_caption_says_what_was_measured(name):
    words = drawn(PLOTS[name], "plain")[0].figure.texts[0].get_text().replace("\n", " ")
    for part in (
        "Tiny-1B",
        "made up",
        "2 segments of 64 tokens",
        "126 tokens",
        "first of each segment left out",
        "pair",
    ):
        assert part in words
    assert "interrupted" not in words


def test_caption_of_an_interrupted_run_and_of_a_demo():
    ds = PLAIN.assign_attrs(partial=1, model="demo:tiny", provenance='{"file": "Tiny-Demo"}')
    assert "interrupted" in style.source(ds)
    assert style.model_name(ds) == "Tiny-Demo"
    assert style.model_name(ds.assign_attrs(model="/models/tiny.gguf")) == "tiny"


@pytest.mark.parametrize("name", PLOTS)
def test_given_axes_are_drawn_into_and_returned(name):
    panels = ("q", "k")
    figure, axes = plt.subplots(1, 2)
    before = plt.rcParams.copy()
    made = PLOTS[name](PLAIN, ax=axes, panels=panels)
    assert list(made) == list(axes) and not figure.texts
    assert [ax.get_title(loc="left")[:4] for ax in made] == ["quer", "keys"]
    one = plt.figure().subplots()
    assert PLOTS[name](PLAIN, ax=one, panels=("k",)) is one
    assert plt.rcParams == before


@pytest.mark.parametrize("name", PLOTS)
def test_wrong_axes_and_panels_are_refused(name):
    with pytest.raises(ProbeError, match="was given 1 axes"):
        PLOTS[name](PLAIN, ax=plt.figure().subplots())
    with pytest.raises(ProbeError, match="no panel 'v'"):
        PLOTS[name](PLAIN, panels=("v",))


@pytest.mark.parametrize("name", PLOTS)
def test_a_plot_leaves_its_result_alone(name):
    drawn(PLOTS[name], "mixed")
    xr.testing.assert_identical(RESULTS["mixed"], RESULTS["again"])


# --- saving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", style.FORMATS)
def test_the_same_figure_has_the_same_bytes(tmp_path, ending):
    (ax,), (afresh,) = drawn(bands_layers, "mixed", ("k",)), drawn(bands_layers, "again", ("k",))
    first = save_figure(ax, tmp_path / f"a{ending}").read_bytes()
    again = save_figure(ax.figure, tmp_path / f"b{ending.upper()}").read_bytes()
    other = save_figure([afresh], str(tmp_path / f"c{ending}")).read_bytes()
    assert first == again == other
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [f"a{ending}", f"b{ending.upper()}", f"c{ending}"]
    )
    if ending == ".png":
        height, width, _ = plt.imread(tmp_path / "a.png").shape
        assert (width, height) == (660, int(ax.figure.get_figheight() * 200))


def test_other_endings_are_refused(tmp_path):
    ax = bands_profile(LONE, panels=("k",))
    for name in ("a.jpg", "a"):
        with pytest.raises(ProbeError, match=r"ends in \.pdf, \.png, \.svg"):
            save_figure(ax, tmp_path / name)
    with pytest.raises(ProbeError, match="cannot write"):
        save_figure(ax, tmp_path / "missing" / "a.pdf")
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    ax = bands_profile(LONE, panels=("k",))
    path = save_figure(ax, tmp_path / "a.png")
    old = path.read_bytes()
    monkeypatch.setattr(ax.figure, "savefig", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(ProbeError, match="No space left"):
        save_figure(ax, path)
    assert path.read_bytes() == old and list(tmp_path.iterdir()) == [path]


def test_importing_plots_imports_neither_torch_nor_matplotlib():
    code = "import sys, rope_probe.plots; sys.exit(bool({'torch', 'matplotlib', 'xarray'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_layer_means_are_over_the_heads_there_are():
    np.testing.assert_allclose(layer_means(MIXED, "q_norm")[2], MIXED["q_norm"].values[2, :2].mean(axis=0))
