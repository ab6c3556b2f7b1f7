"""similarity's options, refusals, interrupts, table and figures, on a tiny model."""

import json

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from conftest import VOCABULARY

import rope_probe as rp
from rope_probe.errors import ProbeError, UsageError
from rope_probe.plots import FIGURES, similarity_control, similarity_distance, similarity_heads, similarity_layers
from rope_probe.probes.similarity_summary import controlled, thirds


@pytest.fixture
def long_tokens(tmp_path):
    path = tmp_path / "long.npy"
    np.save(path, np.random.default_rng(0).integers(2, VOCABULARY, (4, 48)))
    return path


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"queries": 0}, "--queries is 0"),
        ({"queries": "most"}, "--queries is 'most'"),
        ({"sink": -1}, "--sink is -1"),
        ({"seed": -1}, "--seed is -1"),
        ({"sink": 30}, "give --length 63 or more"),
        ({"distances": [0, 2]}, "--distances has 0"),
        ({"distances": [47]}, "from 1 to 46"),
        ({"heads": [4]}, "there is no head 4"),
        ({"heads": []}, "no head"),
        ({"batch": 0}, "--batch is 0"),
    ],
)
def test_refusals(tiny, long_tokens, options, words):
    with pytest.raises(UsageError, match=words):
        rp.similarity(rp.open(tiny), tokens=long_tokens, **options)


def test_values_that_are_not_finite(tiny, long_tokens):
    ckpt = rp.open(tiny)
    with torch.no_grad():
        ckpt.decoder.layers[1].self_attn.k_proj.weight[0, 0] = torch.nan
    with pytest.raises(ProbeError, match="the keys of layer 1 are not finite"):
        rp.similarity(ckpt, tokens=long_tokens)


def test_interrupt_keeps_what_was_measured(tiny, long_tokens):
    ckpt = rp.open(tiny)
    whole = rp.similarity(ckpt, tokens=long_tokens, batch=1)

    def stop(done, total):
        if done == 2:
            raise KeyboardInterrupt

    ds = rp.similarity(ckpt, tokens=long_tokens, batch=1, progress=stop)
    assert ds.attrs["partial"] == 1 and ds.attrs["segments"] == 2
    np.testing.assert_array_equal(ds["rho_segment"], whole["rho_segment"][:2])
    np.testing.assert_allclose(ds["rho"], whole["rho_segment"][:2].mean("segment"), atol=1e-12)


def test_command_writes_shows_and_draws(run_cli, tiny, long_tokens):
    run = run_cli(
        "similarity",
        tiny,
        "--tokens",
        long_tokens,
        "--queries",
        "all",
        "-o",
        "r.nc",
        "--figure",
        "s.png",
        "--heads",
        "0-2",
    )
    assert run.code == 0 and "at distance" in run.out and "4 segments: the standard errors are rough" in run.out
    assert max(map(len, run.out.splitlines())) <= 80
    for name in ("s.png", "s-heads.png", "s-distance.png", "s-control.png"):
        assert name in run.out
    ds = rp.load("r.nc")
    assert ds["rho"].attrs["units"] == "1" and ds["head"].values.tolist() == [0, 1, 2]
    shown = run_cli("show", "r.nc")
    assert shown.out.splitlines()[:8] == run.out.splitlines()[:8]
    values = json.loads(run_cli("show", "r.nc", "--json").out)
    assert values["queries"] == "all" and len(values["by_layer"]) == 3


def test_command_refuses_before_opening(run_cli, no_opening, long_tokens):
    for option, value in (("--queries", "x"), ("--sink", "-1"), ("--seed", "-2")):
        run_cli("similarity", "demo:smollm2", "--tokens", long_tokens, option, value).refused(option, code=2)


def test_estimate_leaves_out_what_came_before_the_reading(tiny, long_tokens, capsys):
    """40 s of preparation, then 11 s a segment: 44 s in all, where the first call would have said more than 3 min."""
    from rope_probe.cli.common import Progress

    now, seen = [0.0], []
    with Progress() as progress:
        progress.clock = lambda: now[0]

        def tell(done, total):
            now[0] += 11 if done else 40
            seen.append((done, total))
            progress(done, total)

        rp.similarity(rp.open(tiny), tokens=long_tokens, batch=1, progress=tell)
    assert seen == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
    assert capsys.readouterr().err.startswith("about 44 s for 4 segments")


# --- figures ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """Three layers, the last with a window; one head of the first has no value."""
    from families import FAMILIES

    family = next(family for family in FAMILIES if family.name == "Gemma 3 text")
    from dataclasses import replace

    options = family.options | {"sliding_window": 40, "max_position_embeddings": 256}
    ckpt = rp.open(replace(family, options=options).build())
    ckpt.decoder.layers[0].self_attn.q_norm.weight.data.fill_(-1)  # q is scaled by 1 + weight: all scores are 0
    return rp.similarity(ckpt, tokens=np.random.default_rng(0).integers(3, 128, (3, 96)), queries=20)


def test_figures_show_the_numbers(result):
    assert np.isnan(result["rho"][0]).all() and np.isfinite(result["rho"][1:]).all()
    free, fixed = similarity_layers(result)
    for one, values in ((free, result["rho"].values), (fixed, controlled(result))):
        drawn = one.lines[0].get_ydata()
        np.testing.assert_allclose(drawn, [np.nan, *values[1:].mean(1)], atol=1e-12)
    maps = similarity_heads(result)
    np.testing.assert_allclose(maps[0].collections[0].get_array().filled(np.nan), result["rho"])
    one = similarity_control(result)
    points = np.concatenate([np.asarray(dots.get_offsets()) for dots in one.collections])
    kept = points[np.isfinite(points).all(1)]
    expected = np.stack([result["rho"].values[1:].ravel(), controlled(result)[1:].ravel()], 1)
    np.testing.assert_allclose(sorted(map(tuple, kept)), sorted(map(tuple, expected)))
    one = similarity_distance(result)
    late = result["rho_at_distance"].values[thirds(result)["late"]].mean((0, 1))
    drawn = [line for line in one.lines if len(line.get_ydata()) == result.sizes["distance"]]
    np.testing.assert_allclose(drawn[-1].get_ydata(), late, atol=1e-12)
    plt.close("all")


def test_figures_take_axes_and_several_results(result):
    figure, axes = plt.subplots(1, 3)
    similarity_layers([result, result], ax=axes[:2])
    assert similarity_distance(result, ax=axes[2]) is axes[2]
    assert not figure.legends and not figure.texts
    one = similarity_layers([result, result], panels=["free"], names=["here", "there"])
    words = [text.get_text() for legend in one.figure.legends for text in legend.get_texts()]
    assert {"here", "there", "layer with a window"} <= set(words)
    with pytest.raises(ProbeError, match="no panel 'both'"):
        similarity_heads(result, panels=["both"])
    with pytest.raises(ProbeError, match="2 panels"):
        similarity_layers(result, ax=axes)
    plt.close("all")


def test_captions_say_what_was_read(result):
    for plot in FIGURES["similarity"].values():
        axes = plot(result)
        words = np.ravel(axes)[0].figure.texts[0].get_text().replace("\n", " ")
        for part in ("3 segments of 96 tokens", "20 query rows of each", "keys from position 1 on", "token ids"):
            assert part in words
    plt.close("all")
