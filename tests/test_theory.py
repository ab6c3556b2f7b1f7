"""Closed forms of the frequencies, the predicted band and the floor.

Numbers without another source are published, or were computed independently in float64.
"""

import math
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rope_probe import theory

LLAMA31 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA32 = LLAMA31 | {"factor": 32.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 4096}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1 + 0.01 * pair for pair in range(48)],
    "long_factor": [1 + 1.3 * pair for pair in range(48)],
    "original_max_position_embeddings": 4096,
    "factor": 32.0,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.25}

bases = st.floats(1.5, 1e9)
lengths = st.integers(1, 10_000_000)
pair_counts = st.integers(1, 256)


# --- effective frequencies -------------------------------------------------------------------------------------------


def transformers_frequencies(rope, dim, length=None, longest=4096, double=False):
    """The same from transformers; `dim` is the head dimension, all of it rotates. `double`: computed in float64."""
    import torch
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=4 * dim,
        num_attention_heads=4,
        head_dim=dim,
        max_position_embeddings=longest,
        rope_parameters=dict(rope),
    )
    if rope.get("rope_type", "default") == "default":
        module = LlamaRotaryEmbedding(config)
        return module.inv_freq.double().numpy(), module.attention_scaling
    precision = {"float": torch.float64, "float32": torch.float64} if double else {"float32": torch.float32}
    with mock.patch.multiple(torch, **precision):  # the functions name their precision when they run
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, device=None, seq_len=length)
    assert inv_freq.dtype == (torch.float64 if double else torch.float32)
    return inv_freq.double().numpy(), scaling


CASES = {
    "default": ({"rope_type": "default", "rope_theta": 1e4}, 128, None, 4096),
    "default, large base": ({"rope_type": "default", "rope_theta": 8e6}, 64, None, 4096),
    "linear": ({"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}, 256, None, 131072),
    "dynamic, short": (DYNAMIC, 128, 100, 4096),
    "dynamic, unset": (DYNAMIC, 128, None, 4096),
    "dynamic, long": (DYNAMIC, 128, 8192, 4096),
    "yarn": (YARN, 128, None, 65536),
    "yarn, exact ramp": (YARN | {"truncate": False}, 64, None, 65536),
    "yarn, betas": (YARN | {"beta_fast": 64.0, "beta_slow": 2.0, "factor": 4.0}, 128, None, 16384),
    "yarn, mscale": (YARN | {"mscale": 1.0, "mscale_all_dim": 0.7, "factor": 40.0}, 64, None, 163840),
    "yarn, equal mscale": (YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}, 64, None, 65536),
    "yarn, attention factor": (YARN | {"attention_factor": 1.5}, 64, None, 65536),
    "yarn, factor from lengths": (YARN | {"factor": None}, 128, None, 32768),
    "yarn, short ladder": (YARN | {"original_max_position_embeddings": 64}, 16, None, 1024),
    "yarn, ramp past the dimension": (
        YARN | {"rope_theta": 50.0, "original_max_position_embeddings": 10**5},
        16,
        None,
        10**6,
    ),
    "yarn, ramp without width": (YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False}, 64, None, 65536),
    "longrope, unset": (LONGROPE, 96, None, 131072),
    "longrope, at the switch": (LONGROPE, 96, 4096, 131072),
    "longrope, past the switch": (LONGROPE, 96, 4097, 131072),
    "longrope, factor from lengths": (LONGROPE | {"factor": None}, 96, 8192, 65536),
    "longrope, attention factor": (LONGROPE | {"attention_factor": 1.1902}, 96, None, 131072),
    "llama3, 8": (LLAMA31, 128, None, 131072),
    "llama3, 32": (LLAMA32, 64, None, 131072),
    "proportional, quarter": (PROPORTIONAL | {"rope_theta": 1e6}, 512, None, 4096),
    "proportional, uneven": (PROPORTIONAL | {"partial_rotary_factor": 0.3}, 64, None, 4096),
    "proportional, factor": (PROPORTIONAL | {"factor": 4.0}, 64, None, 4096),
}


@pytest.mark.parametrize("name", CASES)
def test_frequencies_are_those_of_transformers(name):
    rope, dim, length, longest = CASES[name]
    expected, scaling = transformers_frequencies(rope, dim, length, longest)
    inv_freq, attention_scaling = theory.inverse_frequencies(rope, dim, length=length, max_position_embeddings=longest)
    assert inv_freq.dtype == np.float64 and inv_freq.shape == (dim // 2,)
    np.testing.assert_allclose(inv_freq, expected, rtol=5e-7)
    assert attention_scaling == pytest.approx(scaling, abs=1e-12)


def test_every_scaled_type_of_transformers_is_compared():
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    compared = {rope["rope_type"] for rope, *_ in CASES.values()}
    assert compared >= set(ROPE_INIT_FUNCTIONS) and "default" in compared


@settings(max_examples=60, deadline=None)
@given(
    base=st.floats(100, 1e8),
    dim=st.integers(2, 64).map(lambda pairs: 2 * pairs),
    factor=st.floats(1, 64),
    original=st.integers(512, 32768),
    truncate=st.booleans(),
    kind=st.sampled_from(["yarn", "llama3", "dynamic"]),
)
def test_frequencies_are_those_of_transformers_at_random(base, dim, factor, original, truncate, kind):
    rope = {"rope_type": kind, "rope_theta": base, "factor": factor, "original_max_position_embeddings": original}
    if kind == "yarn":
        rope["truncate"] = truncate
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "dynamic":
        del rope["original_max_position_embeddings"]
    length = 3 * original
    expected, scaling = transformers_frequencies(rope, dim, length, original, double=True)
    inv_freq, attention_scaling = theory.inverse_frequencies(rope, dim, length=length, max_position_embeddings=original)
    np.testing.assert_allclose(inv_freq, expected, rtol=1e-12)
    assert attention_scaling == pytest.approx(scaling, abs=1e-12)


def test_llama31_divisors():
    inv_freq, scaling = theory.inverse_frequencies(LLAMA31, 128)
    divisors = theory.ladder(5e5, 64) / inv_freq
    assert (divisors[:29] == 1).all() and (divisors[35:] == 8).all() and scaling == 1
    np.testing.assert_allclose(divisors[29:35], [1.2075, 1.5534, 2.0263, 2.6945, 3.6843, 5.2573], atol=5e-5)


def test_llama32_divisors():
    inv_freq, _ = theory.inverse_frequencies(LLAMA32, 64)
    divisors = theory.ladder(5e5, 32) / inv_freq
    assert (divisors[:15] == 1).all() and (divisors[18:] == 32).all()
    np.testing.assert_allclose(divisors[15:18], [1.6513, 3.2923, 9.6667], atol=5e-5)


def test_yarn_on_llama2():
    inv_freq, scaling = theory.inverse_frequencies(YARN, 128)
    divisors = theory.ladder(1e4, 64) / inv_freq
    np.testing.assert_allclose(divisors[:21], 1, rtol=1e-14)
    np.testing.assert_allclose(divisors[46:], 16, rtol=1e-14)
    assert (np.diff(divisors[20:47]) > 1e-3).all()
    assert scaling == pytest.approx(1.27726, abs=5e-6)


def test_dynamic_base():
    inv_freq, scaling = theory.inverse_frequencies(DYNAMIC, 128, length=8192, max_position_embeddings=4096)
    assert inv_freq[1] ** -64 == pytest.approx(30527.74, abs=5e-3) and scaling == 1


def test_longrope_formula():
    ladder = theory.ladder(1e4, 48)
    for length, table in ((None, "short_factor"), (4096, "short_factor"), (4097, "long_factor")):
        inv_freq, scaling = theory.inverse_frequencies(LONGROPE, 96, length=length)
        np.testing.assert_allclose(inv_freq, ladder / np.array(LONGROPE[table]), rtol=1e-14)
        assert scaling == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)), abs=1e-12)


def test_llama3_step_without_width():
    rope = LLAMA31 | {"factor": 16.0, "high_freq_factor": 1.0}
    inv_freq, _ = theory.inverse_frequencies(rope, 128)
    divisors = theory.ladder(5e5, 64) / inv_freq
    assert set(divisors.round(12)) == {1.0, 16.0} and (divisors == 16).sum() == 29


def test_keeping_a_share_of_the_pairs():
    inv_freq, _ = theory.inverse_frequencies(PROPORTIONAL | {"partial_rotary_factor": 0.75}, 128)
    np.testing.assert_array_equal(inv_freq[:48], theory.ladder(1e4, 64)[:48])
    assert (inv_freq[48:] == 0).all()


def test_older_spelling_of_the_type():
    old = {"type": "linear", "rope_theta": 1e4, "factor": 2.0}
    np.testing.assert_array_equal(theory.inverse_frequencies(old, 8)[0], theory.ladder(1e4, 4) / 2)


@pytest.mark.parametrize(
    ("rope", "dim", "words"),
    [
        ({"rope_type": "default"}, 128, "rope_theta"),
        ({"rope_type": "default", "rope_theta": None}, 128, "rope_theta"),
        ({"rope_theta": 0.0}, 128, "rope_theta is 0.0"),
        ({"rope_theta": 1.0}, 128, "above 1"),
        ({"rope_theta": float("nan")}, 128, "rope_theta is nan"),
        ({"rope_type": "su", "rope_theta": 1e4}, 128, "'su': known are default, linear"),
        ({"rope_theta": 1e4}, 5, "rotary dimension is 5"),
        ({"rope_theta": 1e4}, 0, "rotary dimension is 0"),
        ({"rope_type": "linear", "rope_theta": 1e4}, 8, "needs 'factor'"),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": -2.0}, 8, "factor is -2.0"),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}, 8, "original_max_position_embeddings"),
        ({k: v for k, v in LLAMA31.items() if k != "low_freq_factor"}, 128, "needs 'low_freq_factor'"),
        (LONGROPE, 128, r"short_factor has shape \(48,\)"),
        ({k: v for k, v in LONGROPE.items() if k != "short_factor"}, 96, "needs 'short_factor'"),
        (PROPORTIONAL | {"partial_rotary_factor": 1.5}, 8, "partial_rotary_factor is 1.5"),
    ],
)
def test_what_is_missing_is_said(rope, dim, words):
    with pytest.raises(ValueError, match=words):
        theory.inverse_frequencies(rope, dim)


def test_dynamic_needs_its_length():
    with pytest.raises(ValueError, match="max_position_embeddings"):
        theory.inverse_frequencies(DYNAMIC, 128, length=8192)
    with pytest.raises(ValueError, match="rotary dimension of 2"):
        theory.inverse_frequencies(DYNAMIC, 2, length=8192, max_position_embeddings=4096)


# --- predicted band --------------------------------------------------------------------------------------------------


def test_rule_constants():
    assert theory.RULES["variance"] == pytest.approx(3.657210, abs=1e-6)
    assert theory.RULES["eigenvalue"] == pytest.approx(4.493409, abs=1e-6)
    assert theory.RULES["half_turn"] == math.pi and theory.RULES["full_turn"] == 2 * math.pi
    assert theory.uniform_variance(theory.RULES["variance"]) == pytest.approx(0.540470, abs=5e-7)


def test_variance_rule_is_where_the_variance_is_largest():
    x = np.linspace(0.01, 40, 4_000_000)
    assert x[theory.uniform_variance(x).argmax()] == pytest.approx(theory.RULES["variance"], abs=1e-5)
    theta = (np.arange(200_000) + 0.5) / 200_000 * theory.RULES["variance"]  # midpoints: the integral of the definition
    assert np.cos(theta).var() == pytest.approx(theory.uniform_variance(theory.RULES["variance"]), abs=1e-9)


def test_eigenvalue_rule_is_where_the_largest_eigenvalue_is_largest():
    def largest(x):
        theta = (np.arange(20_000) + 0.5) / 20_000 * x
        return np.linalg.eigvalsh(np.cov(np.cos(theta), np.sin(theta), bias=True))[-1]

    rule = theory.RULES["eigenvalue"]
    assert math.tan(rule) == pytest.approx(rule, abs=1e-9)
    assert largest(rule) == pytest.approx(0.608617, abs=5e-7)
    assert all(largest(rule) > largest(x) for x in np.linspace(3, 9, 61))


@pytest.mark.parametrize(
    ("base", "length", "pairs", "expected"),
    [
        (1e4, 8192, 128, 107.21),
        (1e4, 4096, 64, 48.79),
        (5e5, 8192, 64, 37.62),
        (1e6, 40960, 64, 43.19),
        (1e6, 8192, 64, 35.74),
    ],
    ids=["Gemma-7B", "Llama-2", "Llama-3", "Qwen3", "Phi-3-small"],
)
def test_predicted_pair(base, length, pairs, expected):
    assert theory.predicted_pair(base, length, pairs) == pytest.approx(expected, abs=5e-3)


@pytest.mark.parametrize(
    ("base", "length", "pairs", "expected"),
    [
        (1e4, 2048, 32, 22.51),
        (1e4, 4096, 64, 49.84),
        (1e4, 512, 128, 70.8),
        (1e4, 32768, 128, 128.6),
        (1e6, 32768, 128, 85.7),
    ],
)
def test_half_turn_rule(base, length, pairs, expected):
    decimals = len(str(expected).split(".")[1])
    assert round(theory.predicted_pair(base, length, pairs, "half_turn"), decimals) == expected


@given(base=bases, length=lengths, pairs=pair_counts, rule=st.sampled_from(sorted(theory.RULES)))
def test_predicted_pair_sweeps_the_phase_of_its_rule(base, length, pairs, rule):
    pair = theory.predicted_pair(base, length, pairs, rule)
    assert base ** (-pair / pairs) * length == pytest.approx(theory.RULES[rule], rel=1e-9)


def test_prediction_refuses_what_has_no_ladder():
    with pytest.raises(ValueError, match="unknown rule 'j'"):
        theory.predicted_pair(1e4, 4096, 64, "j")
    with pytest.raises(ValueError, match="base 1.0"):
        theory.predicted_pair(1.0, 4096, 64)


# --- floor: three names of one set -----------------------------------------------------------------------------------


@given(base=bases, length=lengths, pairs=pair_counts)
def test_three_names_of_one_set(base, length, pairs):
    inv_freq = theory.inverse_frequencies({"rope_theta": base}, 2 * pairs)[0]
    floor = theory.below_floor(inv_freq, length)
    # 2π/length is transcendental, so no pair lies on the floor exactly; rounding can only matter this near to it
    near = np.isclose(theory.turns(inv_freq, length), 1, rtol=1e-12)
    np.testing.assert_array_equal(floor[~near], (inv_freq < 2 * math.pi / length)[~near])
    np.testing.assert_array_equal(floor, theory.turns(inv_freq, length) < 1)
    np.testing.assert_array_equal(floor[~near], (theory.wavelength(inv_freq) > length)[~near])
    assert theory.undertrained(inv_freq, length) == floor.sum()
    if not near.any():
        critical = theory.critical_dimension(base, length, pairs)
        assert critical % 2 == 0
        np.testing.assert_array_equal(floor, np.arange(pairs) >= critical / 2)


@given(base=bases, length=lengths, keep=st.integers(0, 64))
def test_pairs_that_stand_still_are_not_below_the_floor(base, length, keep):
    rope = PROPORTIONAL | {"rope_theta": base, "partial_rotary_factor": keep / 64}
    inv_freq = theory.inverse_frequencies(rope, 128)[0]
    assert not theory.below_floor(inv_freq, length)[inv_freq == 0].any()
    assert theory.undertrained(inv_freq, length) == theory.undertrained(inv_freq[:keep], length)


@pytest.mark.parametrize(
    ("base", "length", "pairs", "expected"),
    [
        (1e4, 2048, 64, 82),
        (1e4, 4096, 64, 92),
        (5e5, 8192, 64, 70),
        (1e4, 8192, 128, 200),
        (1e4, 4096, 48, 68),
        (1e4, 2048, 32, 42),
        (1e5, 8192, 32, 40),
        (1e6, 32768, 32, 40),
    ],
    ids=["Llama-1", "Llama-2", "Llama-3", "Gemma-7B", "Phi-3-mini-4k", "SmolLM", "SmolLM2", "Qwen2.5-0.5B"],
)
def test_critical_dimension(base, length, pairs, expected):
    assert theory.critical_dimension(base, length, pairs) == expected


def test_critical_dimension_stays_within_the_head():
    assert theory.critical_dimension(1e4, 10**9, 64) == 128
    assert theory.critical_dimension(1e4, 3, 64) == 0


def test_llama2_pairs_below_the_floor():
    floor = theory.below_floor(theory.ladder(1e4, 64), 4096)
    assert np.flatnonzero(floor).tolist() == list(range(46, 64))


def test_wavelength_of_a_pair_that_stands_still():
    with np.errstate(all="raise"):
        found = theory.wavelength([1.0, 0.0, 1e-3])
    np.testing.assert_array_equal(found, [2 * math.pi, math.inf, 2 * math.pi / 1e-3])
    assert theory.wavelength(0.0) == math.inf
