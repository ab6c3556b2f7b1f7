"""The bound of models and heads: its rows, figures and command."""

import json
import types
from dataclasses import dataclass, field

import numpy as np
import pytest
import typer
import xarray as xr
from test_bound import SMALLEST, SMALLEST_1000
from typer.testing import CliRunner

from rope_probe import results, theory
from rope_probe.cli.bound import bound as command
from rope_probe.errors import ProbeError, UsageError
from rope_probe.probes import bound as core

# --- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kilo", "tokens"),
    [("32k", 1024, 32768), ("32k", 1000, 32000), ("1M", 1024, 1048576), ("1M", 1000, 10**6), (" 4_096", 1024, 4096)]
    + [(4096, 1024, 4096), ("1.5K", 1000, 1500), ("2e6", 1024, 2_000_000)],
)
def test_lengths_are_read(text, kilo, tokens):
    assert core.parse_length(text, kilo) == tokens


@pytest.mark.parametrize("text", ["", "k", "3x", "-4", "0", "0.5", "1.3k", "nan", "inf", "32kk"])
def test_other_lengths_are_refused(text):
    with pytest.raises(ValueError, match="is no length"):
        core.parse_length(text)


@dataclass
class Layer:
    """Stand-in for the layer geometry."""

    layer: int
    layer_type: str = "full_attention"
    rotates: bool = True
    base: float = 1e4
    rope_type: str = "default"
    window: int = 0
    unrotated_pairs: int = 0
    inv_freq: np.ndarray = field(default_factory=lambda: theory.ladder(1e4, 64))


def mixed_layers():
    zeros = np.concatenate([theory.ladder(1e6, 64)[:48], np.zeros(16)])
    return [
        Layer(0, "sliding_attention", window=512),
        Layer(1, "sliding_attention", window=512),
        Layer(2, base=1e6, rope_type="proportional", inv_freq=zeros),
        Layer(3, "sliding_attention", window=512),
        Layer(4, rotates=False, rope_type="none", inv_freq=np.empty(0)),
    ]


def test_kinds_of_layers():
    sliding, full, still = core.kind_rows(mixed_layers(), 4096)
    assert sliding.layers == [0, 1, 3] and full.layers == [2] and still.layers == [4]
    assert (sliding.context, sliding.bound, sliding.holds) == (512, 1706, True)
    assert sliding.smallest_base == theory.smallest_base(512, 64)
    assert full.context == 4096 and full.zero_pairs == 16 and full.published is None
    assert full.smallest_base == theory.smallest_base(4096, 64, zero_pairs=16)
    assert not still.rotates and still.bound is None and still.smallest_base is None


def test_a_base_too_small_for_its_context():
    (kind,) = core.kind_rows([Layer(0)], 4096)
    assert (kind.bound, kind.holds, kind.smallest_base, kind.published) == (1706, False, 2.9e4, 2.7e4)
    (kind,) = core.kind_rows([Layer(0, unrotated_pairs=64)], 4096)
    assert kind.holds and kind.published is None
    (kind,) = core.kind_rows([Layer(0)], None)
    assert kind.bound == 1706 and kind.context is None and kind.holds is None


def test_bounds_of_heads():
    inv_freq = np.full((3, 64), np.nan)
    inv_freq[0], inv_freq[1, :16], inv_freq[2] = theory.ladder(1e4, 64), theory.ladder(1e4, 16), 1.0
    usage = np.full((3, 3, 64), np.nan)
    usage[0] = 7.0  # even usage of any size is the plain bound
    usage[0, 1, :] = np.eye(64)[40] * 0.3
    usage[0, 2, :] = 0.0
    usage[1, :2, :16] = 2.0  # fewer pairs, and no third head
    usage[2] = 1.0
    bounds = core.head_bounds(usage, inv_freq, np.array([True, True, False]), 50_000)
    plain = theory.bound_length(theory.ladder(1e4, 16))
    tone = int(np.pi / 2 / inv_freq[0, 40])
    np.testing.assert_array_equal(bounds, [[1706, tone, np.nan], [plain, plain, np.nan], [np.nan] * 3])
    assert core.head_bounds(usage, inv_freq, np.array([True, True, False]), 100)[0, 0] == np.inf
    assert core.head_weights(usage[1, 0], inv_freq[1]).tolist() == [1.0] * 16  # they sum to the number of pairs


def test_quantiles_with_heads_that_have_no_bound():
    found = core.quantiles(np.array([[3.0, np.inf, np.nan], [1.0, 2.0, np.inf]]))
    assert found["min"] == 1 and found["median"] == 3 and found["max"] == np.inf


def test_curve_is_the_envelope():
    inv_freq = theory.ladder(1e4, 64)
    curve = core.curve("x", inv_freq, 5000, context=4096)
    values = theory.cosine_sum(inv_freq, np.arange(5001)) / 64
    assert curve.first_negative == 1707 and curve.m[0] == 1 and curve.m[-1] <= 5000
    assert curve.low.min() == pytest.approx(values[1:].min()) and curve.high.max() == pytest.approx(values[1:].max())
    assert (curve.low <= curve.high).all()
    np.testing.assert_allclose(curve.low[:3], values[1:4])


# --- figures ---------------------------------------------------------------------------------------------------------


def test_figure_of_curves():
    import matplotlib.pyplot as plt

    from rope_probe.plots.bound import bound

    made = [core.curve(f"{base:g}", theory.ladder(base, 64), 20_000, context=4096) for base in (1e4, 5e5, 1e6)]
    ax = bound(made)
    assert ax.get_xscale() == "log"
    marks = [line.get_xdata()[0] for line in ax.lines if line.get_marker() == "o"]
    assert marks == [1707, 18438]
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert legend[0] == "10000: first negative at m = 1,707" and legend[2] == "1e+06: not negative to 20,000"
    figure = ax.figure
    figure.canvas.draw()
    whole = figure.bbox
    for artist in (ax.get_legend(), ax.xaxis.label, ax.yaxis.label, *figure.texts):
        box = artist.get_window_extent()
        assert box.x0 >= whole.x0 and box.x1 <= whole.x1 and box.y0 >= whole.y0 and box.y1 <= whole.y1
    assert "20,000" in figure.texts[0].get_text().replace("\n", " ")
    plt.close(figure)
    figure, own = plt.subplots()
    assert bound(made[:1], ax=own) is own and not figure.texts
    plt.close(figure)


def test_figure_of_smallest_bases():
    import matplotlib.pyplot as plt

    from rope_probe.plots.bound import smallest_bases

    rows = [row for kilo in (1024, 1000) for row in core.length_rows([kilo, 4 * kilo, 16 * kilo], 64, kilo=kilo)]
    ax = smallest_bases(rows)
    drawn = {line.get_label(): dict(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in ax.lines}
    assert drawn["exact, 1k = 1024"] == {1024: 4.3e3, 4096: 2.9e4, 16384: 3.5e5}
    assert drawn["exact, 1k = 1000"] == {1000: 4.3e3, 4000: 2.7e4, 16000: 3.2e5}
    assert drawn["published, holds (1k = 1024)"] == {1024: 4.3e3}
    assert drawn["published, fails before its length (1k = 1024)"] == {4096: 2.7e4, 16384: 3.1e5}
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["1k", "4k", "16k"]
    plt.close(ax.figure)


# --- command ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def run():
    app = typer.Typer()
    app.command()(command)

    def call(*arguments):
        return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "120"})

    return call


def test_command_smallest_base(run):
    result = run("--length", "32k", "--head-dim", 128)
    assert result.exit_code == 0 and "6.3e5" in result.output and "27685" in result.output
    found = json.loads(run("--length", "4k", "--kilo", 1000, "--head-dim", 128, "--json").stdout)
    assert (found["length"], found["smallest_base"], found["published_base"]) == (4000, 2.7e4, 2.7e4)
    assert found["published_first_negative"] is None and found["kilo"] == 1000 and found["head_dim"] == 128


def test_command_length_of_a_base(run):
    found = json.loads(run("--base", "1e4", "--head-dim", 128, "--json").stdout)
    assert (found["bound"], found["first_negative"]) == (1706, 1707)
    assert "1706" in run("--base", "1e4", "--head-dim", 128).output
    found = json.loads(run("--base", "1e4", "--head-dim", 128, "--rotary-dim", 32, "--json").stdout)
    assert found["bound"] == theory.bound_length(theory.ladder(1e4, 16), unrotated=48)
    found = json.loads(run("--base", "1e4", "--head-dim", 128, "--length", "4k", "--json").stdout)
    assert found["holds"] is False and found["smallest_base"] == 2.9e4
    assert json.loads(run("--base", "1e4", "--head-dim", 128, "--limit", 1000, "--json").stdout)["bound"] is None


def test_command_table(run):
    found = json.loads(run("--table", "--head-dim", 128, "--json").stdout)
    assert [row["base"] for row in found["tables"]["1024"]] == SMALLEST[128]
    assert [row["base"] for row in found["tables"]["1000"]] == SMALLEST_1000
    assert found["tables"]["1024"][4]["published_fails_at"] == 12223
    text = run("--table", "--head-dim", 64, "--kilo", 1024).output
    assert "3.9e9" in text and "published" not in text and "1k = 1000" not in text


@pytest.fixture
def stand_in(monkeypatch):
    """A model of three kinds of layers in place of the reader of configs."""

    def put(layers, claimed=4096):
        geometry = types.SimpleNamespace(
            layers=layers, model_type="stand_in", heads=4, kv_heads=4, claimed_length=claimed
        )
        asked = []

        def read_config(model, *, revision=None, trust_remote_code=False, length=None):
            asked.append((model, revision, trust_remote_code, length))
            return geometry

        monkeypatch.setattr("rope_probe.configs.read_config", read_config)
        return asked

    return put


def test_command_model(run, stand_in):
    asked = stand_in(mixed_layers())
    found = json.loads(run("some/model", "--revision", "abc", "--json").stdout)
    assert asked == [("some/model", "abc", False, None)]
    sliding, full, still = found["kinds"]
    assert found["claimed_length"] == 4096 and found["model_type"] == "stand_in"
    assert (sliding["bound"], sliding["first_negative"]) == (1706, 1707)
    assert sliding["holds"] is True and sliding["context"] == 512
    assert sliding["layers"] == [0, 1, 3] and full["zero_pairs"] == 16 and still["rotates"] is False
    text = run("some/model").output
    assert "sliding_attention, 3 layers: L_bound 1706, reaches the window 512" in text
    assert "no rotation, so nothing to bound" in text


def test_command_model_by_its_own_config(run, tmp_path):
    config = {"model_type": "llama", "hidden_size": 512, "num_attention_heads": 4, "num_hidden_layers": 3}
    config |= {"head_dim": 128, "max_position_embeddings": 4096, "vocab_size": 97, "rope_theta": 1e4}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    found = json.loads(run(path, "--json").stdout)
    (kind,) = found["kinds"]
    assert kind["layers"] == [0, 1, 2] and (kind["bound"], kind["first_negative"]) == (1706, 1707)
    assert (kind["holds"], kind["smallest_base"], kind["published"]) == (False, 2.9e4, 2.7e4)
    path.write_text(json.dumps(config | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}))
    found = json.loads(run(path, "--length", "8k", "--json").stdout)
    inv_freq, _ = theory.inverse_frequencies(
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, 128, length=8192, max_position_embeddings=4096
    )
    assert found["kinds"][0]["bound"] == theory.bound_length(inv_freq) > 1706


def test_command_model_that_falls_short(run, stand_in):
    stand_in([Layer(0), Layer(1)])
    text = " ".join(run("some/model").output.split())
    assert "2 layers: L_bound 1706, falls short of the context 4096" in text
    assert "smallest plain base for it: 2.9e4 (published: 2.7e4)." in text
    found = json.loads(run("some/model", "--length", "1k", "--json").stdout)
    assert found["length"] == 1024 and found["kinds"][0]["holds"] and found["kinds"][0]["smallest_base"] == 4.3e3


def test_command_reads_frequencies_at_the_length_that_counts(run, stand_in):
    asked = stand_in([Layer(0, rope_type="longrope")], claimed=131072)
    assert run("some/model", "--json").exit_code == 0
    assert [length for *_, length in asked] == [None, 131072]


def test_command_model_without_rotation(run, stand_in):
    stand_in([Layer(0, rotates=False, inv_freq=np.empty(0))])
    result = run("some/model")
    assert isinstance(result.exception, ProbeError) and "nothing to bound" in str(result.exception)


@pytest.fixture
def bands():
    """A result of two layers, the second without rotation: a head of even usage and two of a single tone."""
    usage = np.ones((2, 3, 64))
    usage[0, 1] = np.eye(64)[40]
    usage[0, 2] = np.eye(64)[63]
    return xr.Dataset(
        {"usage": (("layer", "head", "pair"), usage)},
        coords={
            "layer": [4, 7],
            "inv_freq": (("layer", "pair"), np.stack([theory.ladder(1e4, 64)] * 2)),
            "rotates": ("layer", [True, False]),
        },
        attrs={"analysis": "bands", "schema": results.SCHEMA, "model": "some/model"},
    )


def test_command_weights(run, bands, tmp_path):
    path = results.save(bands, tmp_path / "bands.nc")
    tones = [int(np.pi / 2 / theory.ladder(1e4, 64)[pair]) for pair in (40, 63)]
    found = json.loads(run("--weights", path, "--json").stdout)
    bounds = {(head["layer"], head["head"]): head["bound"] for head in found["heads"]}
    assert bounds == {(4, 0): 1706, (4, 1): tones[0], (4, 2): tones[1]}
    assert [head["bound"] for head in found["heads"]] == sorted(bounds.values())
    assert found["quantiles"]["median"] == 1706 and found["heads_without_bound"] == 0
    assert found["unweighted"] == [1706]
    found = json.loads(run("--weights", path, "--limit", 5000, "--json").stdout)
    assert found["heads"][-1]["bound"] is None and found["quantiles"]["max"] is None
    assert found["heads_without_bound"] == 1
    result = run("--weights", path, "--figure", tmp_path / "heads.svg")
    assert result.exit_code == 0 and "furthest" in result.output and "heads.svg" in result.output
    assert (tmp_path / "heads.svg").stat().st_size > 1000


def test_command_weights_of_another_file(run, bands, tmp_path):
    path = results.save(bands.drop_vars("usage"), tmp_path / "bands.nc")
    result = run("--weights", path)
    assert isinstance(result.exception, ProbeError) and "holds no usage" in str(result.exception)
    result = run("--weights", tmp_path / "missing.nc")
    assert isinstance(result.exception, ProbeError) and "there is no result file" in str(result.exception)
    bands["usage"][:] = 0.0
    result = run("--weights", results.save(bands, tmp_path / "still.nc"))
    assert isinstance(result.exception, ProbeError) and "no head with usage" in str(result.exception)


@pytest.mark.parametrize("arguments", [("--base", "1e4"), ("--length", "4k"), ("--table", "--kilo", 1024)])
def test_command_figures(run, tmp_path, arguments):
    path = tmp_path / "figure.pdf"
    result = run(*arguments, "--head-dim", 64, "--figure", path, "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["figures"] == [str(path)]
    assert path.read_bytes().startswith(b"%PDF")


def test_command_model_figure(run, stand_in, tmp_path):
    stand_in(mixed_layers())
    assert run("some/model", "--figure", tmp_path / "model.png").exit_code == 0
    assert (tmp_path / "model.png").exists()


def test_command_checks_the_figure_before_it_works(run, tmp_path):
    result = run("--table", "--head-dim", 128, "--figure", tmp_path / "no" / "table.png")
    assert isinstance(result.exception, ProbeError) and "does not exist" in str(result.exception)
    result = run("--table", "--head-dim", 128, "--figure", "table.gif")
    assert isinstance(result.exception, UsageError) and "table.gif" in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "given: none of them"),
        (("--head-dim", "128"), "given: none of them"),
        (("some/model", "--table"), "given: MODEL and --table"),
        (("some/model", "--base", "1e4"), "given: MODEL and --length or --base"),
        (("some/model", "--head-dim", "64"), "leave out --head-dim"),
        (("--table",), "--head-dim 128"),
        (("--length", "32q", "--head-dim", "128"), "'32q' is no length"),
        (("--length", "32k", "--head-dim", "5"), "head dimension 5"),
        (("--length", "32k", "--head-dim", "64", "--rotary-dim", "128"), "no larger than the head"),
        (("--base", "1", "--head-dim", "64"), "no RoPE base"),
        (("--base", "0", "--head-dim", "64"), "no RoPE base"),
        (("--table", "--head-dim", "128", "--kilo", "512"), "512 is no reading of 1k"),
    ],
)
def test_command_wrong_arguments(run, arguments, words):
    result = run(*arguments)
    assert result.exit_code == 2 and result.stdout == ""
    text = " ".join(result.output.replace("│", " ").split())
    assert words in text


def test_command_help_ends_in_an_example(run):
    text = run("--help").output
    assert "Example:  rope-probe bound --length 32k --head-dim 128" in text
