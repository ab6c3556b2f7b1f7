"""similarity against scipy on eager attention maps and on the hidden states that the model itself hands out."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
import transformers
from families import FAMILIES, randomised
from similarity_maps import assert_ordered_alike, cosines, fixed, free, maps, spearman

import rope_probe as rp
from rope_probe.attention import scores, scores_at, visible, visible_at
from rope_probe.probes import ranks
from rope_probe.probes import similarity as probe
from rope_probe.probes.similarity_summary import controlled, summary
from rope_probe.tap import Call

NAMED = {family.name: family for family in FAMILIES}


# --- SmolLM2 ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(smollm2):
    from rope_probe.texts import segments_for

    return segments_for(smollm2, segments=2, length=128).ids


@pytest.fixture(scope="module")
def expected(smollm2, text):
    return maps(smollm2.model, text)


@pytest.fixture(scope="module")
def measured(smollm2, text):
    return rp.similarity(smollm2, tokens=text, queries="all")


def test_every_head_equals_scipy_on_eager_maps(measured, expected):
    hidden, _, weights = expected
    assert measured["rho"].shape == (30, 9)
    for layer in range(30):
        rho = free(hidden[layer], weights[layer])
        np.testing.assert_allclose(measured["rho_segment"][:, layer], rho, rtol=0, atol=1e-4)
        np.testing.assert_allclose(measured["rho"][layer], rho.mean(0), rtol=0, atol=1e-4)
        error = rho.std(0, ddof=1) / np.sqrt(2)
        np.testing.assert_allclose(measured["rho_se"][layer], error, rtol=0, atol=1e-4)
    assert (measured["query_rows"] == 128 - 33).all()


def test_fixed_distance_equals_scipy(measured, expected):
    hidden, scored, _ = expected
    assert measured["distance"].values.tolist() == [1, 2, 4, 8, 16, 32, 64]
    for layer in range(30):
        for n, distance in enumerate(measured["distance"].values):
            rho = fixed(hidden[layer], scored[layer], distance)
            assert_ordered_alike(measured["rho_at_distance"][layer, :, n].values, rho.mean(0), 127 - distance)
            mean = measured["rho_at_distance_segment"][:, layer, n]
            np.testing.assert_allclose(mean, rho.mean(1), rtol=0, atol=12 / (127 - distance) ** 2 / 9)


def test_repeated_tokens_tie_in_the_first_layer(expected):
    """Otherwise the agreement above would not have been tested with ties."""
    row = cosines(expected[0][0])[0, -1, 1:-1]
    assert len(np.unique(row)) < 0.8 * len(row)


def test_sampled_rows_are_those_of_the_maps(smollm2, text, expected):
    ds = rp.similarity(smollm2, tokens=text, queries=10, layers=[0, 7], distances=[], seed=3)
    assert ds.sizes["distance"] == 0 and (ds["query_rows"] == 10).all()
    for segment in range(2):
        rows = probe.sample_rows(segment, 128, 1, 10, 3)
        assert len(set(rows)) == 10 and rows.min() >= 33
        for n, layer in enumerate((0, 7)):
            rho = free(expected[0][layer], expected[2][layer], rows=rows)[segment]
            np.testing.assert_allclose(ds["rho_segment"][segment, n], rho, rtol=0, atol=1e-4)


def test_rows_depend_on_seed_and_segment_alone(smollm2, text):
    options = {"queries": 12, "layers": [2], "distances": [4]}
    both = rp.similarity(smollm2, tokens=text, batch=2, **options)
    again = rp.similarity(smollm2, tokens=text, batch=1, **options)
    first = rp.similarity(smollm2, tokens=text[:1], **options)
    other = rp.similarity(smollm2, tokens=text, seed=1, **options)
    for name in ("rho_segment", "rho_at_distance_segment"):
        np.testing.assert_allclose(both[name], again[name], rtol=0, atol=1e-5)
        np.testing.assert_allclose(both[name][:1], first[name], rtol=0, atol=1e-5)
    assert np.abs(both["rho_segment"] - other["rho_segment"]).max() > 1e-3
    assert (probe.sample_rows(0, 128, 1, 12, 0) != probe.sample_rows(1, 128, 1, 12, 0)).any()
    np.testing.assert_array_equal(probe.sample_rows(0, 128, 1, 200, 0), np.arange(33, 128))


def test_sink_heads_and_layers(smollm2, text, expected):
    hidden, scored, weights = expected
    for sink in (0, 5):
        ds = rp.similarity(smollm2, tokens=text, queries="all", sink=sink, heads=[7, 2], layers=[4], distances=[3])
        assert ds["head"].values.tolist() == [2, 7] and ds["layer"].values.tolist() == [4]
        rho = free(hidden[4], weights[4], sink=sink)[:, [2, 7]]
        np.testing.assert_allclose(ds["rho_segment"][:, 0], rho, rtol=0, atol=1e-4)
        near = fixed(hidden[4], scored[4], 3, sink=sink).mean(0)[[2, 7]]
        assert_ordered_alike(ds["rho_at_distance"][0, :, 0].values, near, 125 - sink)


def test_work_is_shared_and_bounded(smollm2, text, monkeypatch):
    """Similarities are ranked once for all heads of a layer; scores exist for the sampled rows alone."""
    ranked, scored = [], []
    double, logits = ranks._double_ranks, probe.logits

    def watch_ranks(x, seen):
        ranked.append(x.numel())
        return double(x, seen)

    def watch_scores(call, q, k):
        out = logits(call, q, k)
        scored.append(tuple(out.shape))
        return out

    monkeypatch.setattr(ranks, "_double_ranks", watch_ranks)
    monkeypatch.setattr(probe, "logits", watch_scores)
    rp.similarity(smollm2, tokens=text, queries=20, layers=[0, 1], distances=[])
    assert all(heads == 9 for heads, _, _ in scored)
    assert sum(rows for _, rows, _ in scored) == 20 * 2 * 2
    assert sum(ranked) * 9 == sum(np.prod(shape) for shape in scored)
    assert max(rows for _, rows, _ in scored) <= probe._ROWS


def test_every_row_is_drawn_equally_often():
    counts = np.zeros(65, dtype=int)
    for segment in range(2000):
        counts[probe.sample_rows(segment, 65, 1, 8, 0)] += 1
    assert counts[:33].sum() == 0 and counts.sum() == 2000 * 8
    expected, spread = 2000 * 8 / 32, np.sqrt(2000 * 8 / 32 * 24 / 32)
    assert np.abs(counts[33:] - expected).max() < 4.5 * spread


def agreement(smollm2, tokens, layers, queries):
    """Share of heads whose sampled rho is within two standard errors of that of all rows."""
    every = rp.similarity(smollm2, tokens=tokens, layers=layers, queries="all", distances=[])
    some = rp.similarity(smollm2, tokens=tokens, layers=layers, queries=queries, distances=[])
    gap = np.abs(some["rho"] - every["rho"])
    assert gap.mean() > 1e-4
    return float((gap <= 2 * some["rho_se"]).mean())


def test_sampling_is_unbiased(smollm2):
    from rope_probe.texts import segments_for

    tokens = segments_for(smollm2, segments=8, length=160).ids
    assert agreement(smollm2, tokens, range(4), 32) >= 0.9


@pytest.mark.slow
def test_default_sample_is_unbiased(smollm2):
    from rope_probe.texts import segments_for

    assert agreement(smollm2, segments_for(smollm2, segments=8, length=512).ids, None, 64) >= 0.9


@pytest.mark.slow
def test_all_heads_of_two_segments_of_512(smollm2):
    """The first demonstration: --queries all --sink 1 on [2, 512] ids, distances 1, 2, 4, 16, 64, 256."""
    from rope_probe.texts import segments_for

    tokens = segments_for(smollm2, segments=2, length=512).ids
    distances = [1, 2, 4, 16, 64, 256]
    ds = rp.similarity(smollm2, tokens=tokens, queries="all", sink=1, distances=distances)
    near = np.zeros((30, 9, len(distances)))
    for start in range(2):
        hidden, scored, weights = maps(smollm2.model, tokens[start : start + 1])
        for layer in range(30):
            rho = free(hidden[layer], weights[layer])[0]
            np.testing.assert_allclose(ds["rho_segment"][start, layer], rho, rtol=0, atol=1e-4)
            near[layer] += np.stack([fixed(hidden[layer], scored[layer], d)[0] for d in distances], -1) / 2
    np.testing.assert_allclose(ds["rho_at_distance"], near, rtol=0, atol=1e-4)
    assert (ds["rho"].mean("head")[1:] > 0).all()


def test_summary(measured):
    values = summary(measured)
    rho, near = measured["rho"].values, measured["rho_at_distance"].values
    assert values["rho"] == pytest.approx(rho.mean())
    segments = measured["rho_segment"].mean(("layer", "head")).values
    assert values["rho_se"] == pytest.approx(segments.std(ddof=1) / np.sqrt(2))
    assert values["rho_fixed"] == pytest.approx(near.mean()) == pytest.approx(controlled(measured).mean())
    assert values["positive"] == pytest.approx((rho > 0).mean()) and values["heads"] == 270
    assert [row["rho"] for row in values["by_layer"]] == pytest.approx(rho.mean(1))
    assert [row["rho"] for row in values["by_distance"]] == pytest.approx(near.mean((0, 1)))
    assert values["without_value"] == 0 and list(values["by_layer_type"]) == ["full attention"]


@pytest.mark.slow
def test_gemma3_with_its_windows():
    """The third demonstration: windows of 512 in 1024 tokens, every head, every row."""
    from rope_probe.texts import segments_for

    ckpt = rp.open("demo:gemma3")
    tokens = segments_for(ckpt, segments=1, length=1024).ids
    ds = rp.similarity(ckpt, tokens=tokens, queries="all")
    hidden, scored, weights = maps(ckpt.model, tokens)
    for layer, window in enumerate(ds["window"].values):
        rho = free(hidden[layer], weights[layer], window=window)
        np.testing.assert_allclose(ds["rho_segment"][:, layer], rho, rtol=0, atol=1e-4)
        for n, distance in enumerate(ds["distance"].values):
            near = fixed(hidden[layer], scored[layer], distance, window=window)[0]
            assert_ordered_alike(ds["rho_at_distance"][layer, :, n].values, near, 1023 - distance)
    assert sorted(set(ds["window"].values)) == [0, 512]
    assert np.isnan(ds["rho_at_distance"].sel(distance=512)[ds["window"] == 512]).all()


# --- other architectures ---------------------------------------------------------------------------------------------

WINDOW = 40
CASES = {
    "Mistral": {"sliding_window": WINDOW},
    "Gemma 2": {"sliding_window": WINDOW},
    "Gemma 3 text": {"sliding_window": WINDOW},
    "gpt-oss": {"sliding_window": WINDOW},
    "SmolLM3": {},
    "Cohere 2": {"sliding_window": WINDOW},
    "Llama 4 text": {"attention_chunk_size": WINDOW},
    "DeepSeek-V3": {},
    "Gemma 4 text": {"sliding_window": WINDOW},
    "GPT-J": {},
}


@cache
def family(name):
    wide = {} if name in ("DeepSeek-V3", "gpt-oss") else {"max_position_embeddings": 256}
    return rp.open(replace(NAMED[name], options=NAMED[name].options | CASES[name] | wide).build())


def limits(ckpt, layer):
    """(window, chunk) of a layer, from the configuration."""
    config = ckpt.decoder.config
    everywhere = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    types = getattr(config, "layer_types", None)
    kind = types[layer] if types else everywhere
    return WINDOW if kind == "sliding_attention" else 0, WINDOW if kind == "chunked_attention" else 0


@pytest.mark.parametrize("name", CASES)
def test_families_equal_scipy(name):
    ckpt = family(name)
    ids = np.random.default_rng(0).integers(3, 128, (2, 96))
    ids[:, 50:70] = ids[:, 20:40]  # the same words again
    ds = rp.similarity(ckpt, tokens=ids, queries="all", distances=[1, 8, 39, 40, 48])
    hidden, scored, weights = maps(ckpt.model, ids)
    assert ds.sizes["layer"] == len(hidden)
    for layer, (window, chunk) in enumerate(limits(ckpt, n) for n in range(len(hidden))):
        np.testing.assert_allclose(
            ds["rho_segment"][:, layer], free(hidden[layer], weights[layer], 1, window, chunk), rtol=0, atol=1e-4
        )
        if name == "gpt-oss":  # its eager attention shifts each row before the softmax: rows cannot be compared there
            assert np.isfinite(ds["rho_at_distance"][layer]).all() == (not window)
            continue
        for n, distance in enumerate(ds["distance"].values):
            rho = fixed(hidden[layer], scored[layer], distance, 1, window, chunk).mean(0)
            assert_ordered_alike(ds["rho_at_distance"][layer, :, n].values, rho, 95 - distance)
            if not chunk:
                assert np.isnan(rho).all() == bool(window and distance >= WINDOW)


def test_kinds_that_the_cases_are_there_for():
    assert family("Gemma 2").decoder.config.attn_logit_softcapping == 5.0
    assert not rp.similarity(family("SmolLM3"), tokens=np.full((1, 40), 7), queries=4)["rotates"][3]
    assert limits(family("Llama 4 text"), 0) == (0, WINDOW) and limits(family("Llama 4 text"), 3) == (0, 0)


def test_low_precision_is_ranked_in_float32_from_its_own_q_and_k():
    config = family("Gemma 2").model.config
    ckpt = rp.open(randomised(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)))
    assert ckpt.dtype == "bfloat16"
    ids = np.random.default_rng(1).integers(3, 128, (1, 96))
    ds = rp.similarity(ckpt, tokens=ids, queries="all")
    with rp.capture(ckpt, keep=("q", "k")) as seen:
        seen.run(ids)
    with torch.no_grad():
        hidden = ckpt.decoder(torch.as_tensor(ids), output_hidden_states=True, use_cache=False).hidden_states
    for layer in range(2):
        q, k = seen.q[layer][0].astype(np.float64), np.repeat(seen.k[layer][0], 2, axis=0).astype(np.float64)
        score = 5 * np.tanh(q @ k.swapaxes(-1, -2) * 64**-0.5 / 5)
        window, _ = limits(ckpt, layer)
        rho = free(hidden[layer].double().numpy(), score.astype(np.float32)[None], 1, window)
        np.testing.assert_allclose(ds["rho_segment"][:, layer], rho, rtol=0, atol=1e-4)


def test_windows_narrower_than_32_keys_have_no_free_rho():
    narrow = rp.open(replace(NAMED["Mistral"], options={"sliding_window": 20}).build())
    ds = rp.similarity(narrow, tokens=np.random.default_rng(0).integers(3, 128, (2, 60)))
    assert np.isnan(ds["rho"]).all() and (ds["query_rows"] == 0).all()
    assert np.isfinite(ds["rho_at_distance"].sel(distance=[1, 16])).all()
    values = summary(ds)
    assert values["rho"] is None and values["rho_fixed"] is not None


# --- small pieces ----------------------------------------------------------------------------------------------------


def call(length=60, heads=4, kv_heads=2, **changes):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, heads, length, 8, generator=generator)
    k, v = (torch.randn(1, kv_heads, length, 8, generator=generator) for _ in range(2))
    hidden = torch.randn(1, length, 24, generator=generator)
    values = {"mask": None, "scaling": 0.3, "softcap": None, "sinks": None, "window": None}
    return Call(layer=0, q=q, k=k, v=v, hidden=hidden, **values | changes)


def rho_of(one, rows, sink=1):
    total, count, full = probe.free_rho(one, probe.cosines(one.hidden), 0, np.asarray(rows), sink)
    return (total / count).numpy(), count.numpy(), int(full)


def test_saturated_soft_cap_ties():
    """A cap far below the scores makes most of them equal: ranks must share, and did before the cap not."""
    one = call(softcap=0.02, scaling=3.0)
    rows = np.arange(33, 60)
    raw = torch.einsum("hqd,hkd->hqk", one.q[0], one.k[0].repeat_interleave(2, 0)) * 3.0
    capped = (torch.tanh(raw / 0.02) * 0.02).numpy()[None]
    assert len(np.unique(capped[0, 0, 59, :59])) < 15
    expected = free(one.hidden.double().numpy(), capped, rows=rows)[0]
    np.testing.assert_allclose(rho_of(one, rows)[0], expected, rtol=0, atol=1e-5)
    assert np.abs(rho_of(call(scaling=3.0), rows)[0] - expected).max() > 1e-3


def test_states_that_differ_by_rounding_tie():
    """The same word again is as similar, in whatever order a library adds up."""
    one = call()
    words = torch.randint(0, 12, (60,), generator=torch.Generator().manual_seed(1))
    same = replace(one, hidden=one.hidden.double()[:, words])
    noise = torch.randn(same.hidden.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    rounded = replace(one, hidden=same.hidden * (1 + 1e-14 * noise))
    rows = np.arange(33, 60)
    np.testing.assert_array_equal(rho_of(rounded, rows)[0], rho_of(same, rows)[0])
    near, expected = (probe.fixed_rho(x, probe.cosines(x.hidden), [5, 9], 1) for x in (rounded, same))
    assert torch.equal(near, expected)


def test_constant_side_is_left_out():
    one = call()
    one.q[:, 2, :50] = 0  # a query of zeros scores every key alike
    rho, count, full = rho_of(one, np.arange(33, 60))
    assert count.tolist() == [27, 27, 10, 27] and full == 27 and np.isfinite(rho).all()
    expected = rho_of(one, np.arange(50, 60))[0][2]
    assert rho[2] == pytest.approx(expected, abs=1e-12)
    one.q[:, 2] = 0
    rho, count, _ = rho_of(one, np.arange(33, 60))
    assert np.isnan(rho[2]) and count[2] == 0 and np.isfinite(rho[[0, 1, 3]]).all()
    near = probe.fixed_rho(one, probe.cosines(one.hidden), [4], 1)[0, :, 0]
    assert torch.isnan(near[2]) and torch.isfinite(near[[0, 1, 3]]).all()
    same = replace(one, hidden=torch.ones(1, 60, 24))
    assert np.isnan(rho_of(same, np.arange(33, 60))[0]).all()


def test_rows_with_too_few_keys_are_left_out():
    rho, count, full = rho_of(call(), np.arange(20, 60))
    assert full == 27 and count.tolist() == [27] * 4
    np.testing.assert_allclose(rho, rho_of(call(), np.arange(33, 60))[0], atol=1e-12)


def test_mask_of_each_head_and_segment_is_followed():
    mask = torch.tril(torch.ones(60, 60, dtype=torch.bool)).repeat(1, 4, 1, 1)
    mask[:, 1, :, 10:20] = False
    one = call(mask=mask)
    rho = rho_of(one, np.arange(45, 60))[0]
    plain = rho_of(call(), np.arange(45, 60))[0]
    np.testing.assert_allclose(rho[[0, 2, 3]], plain[[0, 2, 3]], atol=1e-12)
    keep = np.r_[1:10, 20:60]
    score = scores(one, torch.arange(60), mask=False)[0, 1].numpy()
    similar = cosines(one.hidden.double().numpy())[0]
    rows = [spearman(similar[m, keep[keep < m]], score[m, keep[keep < m]]) for m in range(45, 60)]
    assert rho[1] == pytest.approx(np.mean(rows), abs=1e-6)


def test_scores_at_a_distance_are_the_diagonals():
    for one in (call(softcap=2.0), call(window=12), call(mask=torch.tril(torch.ones(1, 1, 60, 60)).bool().triu(-11))):
        rows = torch.arange(60)
        whole, seen = scores(one, rows, mask=False), visible(one, rows)
        for distance in (1, 11, 12, 30):
            torch.testing.assert_close(scores_at(one, distance), whole.diagonal(-distance, 2, 3))
            assert torch.equal(visible_at(one, distance), seen.diagonal(-distance, 2, 3))
