"""inspect: real configurations against values computed independently, overrides, notes, refusals."""

import json
from pathlib import Path

import numpy as np
import pytest

from rope_probe.configs import override_rope, parse_rope, raw_config, read_config
from rope_probe.errors import ProbeError, UsageError
from rope_probe.probes.inspect import describe

CASES = json.loads((Path(__file__).parent / "data" / "configs.json").read_text())
# what transformers 5.24 refuses, and what the sentence must say
REFUSED = {
    "THUDM__glm-4-9b-chat": "model type that transformers does not know",
    "internlm__internlm2-chat-7b": "model type that transformers does not know",
    "meta-llama__Llama-4-Scout-17B-16E": "attn_temperature_tuning.*expected bool",
    "microsoft__Phi-3-vision-128k-instruct__text_su": "rope type 'su'.*longrope",
}


def written(tmp_path, config, name="config"):
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(config))
    return str(path)


def check_ladder(layer, expected, rtol=1e-6):
    assert layer["attention_scaling"] == pytest.approx(expected["attention_scaling"], abs=1e-6)
    assert layer["zero_pairs"] == expected["zero_frequency_pairs"]
    assert layer["wavelength_min"] == pytest.approx(expected["shortest_wavelength"], rel=rtol)
    assert layer["wavelength_max"] == pytest.approx(expected["longest_wavelength"], rel=rtol)
    inv_freq = np.array(layer["inv_freq"])
    for length, count in expected["pairs_longer_than"].items():
        assert int(((inv_freq > 0) & (inv_freq < 2 * np.pi / float(length))).sum()) == count


@pytest.mark.parametrize("name", CASES)
def test_real_configurations(tmp_path, name):
    config, expected = CASES[name]["config"], CASES[name]["expected"]
    path = written(tmp_path, config)
    if name in REFUSED:
        with pytest.raises(ProbeError, match=REFUSED[name]):
            read_config(path)
        return
    found = describe(read_config(path), path)
    assert found["model_type"] == expected["model_type"]
    assert len(found["layers"]) == expected["layers"]
    assert (found["heads"], found["kv_heads"]) == (expected["q_heads"], expected["kv_heads"])
    assert found["claimed_length"] == expected["config_length"]
    nope = [row["layer"] for row in found["layers"] if not row["rotates"]]
    assert nope == expected.get("nope_layers", [])
    for row in found["layers"]:
        assert row["layout"] == expected["layout"]
        if not row["rotates"]:
            continue
        if expected["rotary_dim"] is not None:
            assert row["rotary_dim"] == expected["rotary_dim"] and row["head_dim"] == expected["head_dim"]
            assert row["pairs"] == expected["pairs"]
        effective = expected["effective"]
        for key in ("all", "short", row["layer_type"]):
            if key in effective:
                check_ladder(row, effective[key])
    if "long" in expected["effective"]:
        row = describe(read_config(path, length=config["max_position_embeddings"]), path)["layers"][0]
        check_ladder(row, expected["effective"]["long"])


def test_gemma4_layer_types_have_their_own_heads(tmp_path):
    found = describe(read_config(written(tmp_path, CASES["google__gemma-4-26B-A4B"]["config"])), "g")
    rows = {row["layer_type"]: row for row in found["layers"]}
    assert (rows["full_attention"]["head_dim"], rows["sliding_attention"]["head_dim"]) == (512, 256)
    full = rows["full_attention"]  # the whole head is the ladder; the slowest pairs stand still
    assert (full["rotary_dim"], full["pairs"], full["zero_pairs"]) == (512, 256, 192)
    assert full["undertrained"] == 0


@pytest.mark.parametrize(
    ("name", "length", "count"),
    [
        ("meta-llama__Llama-2-7b-hf", 4096, 46),
        ("meta-llama__Meta-Llama-3-8B", 8192, 35),
        ("google__gemma-7b", 8192, 100),
        ("huggyllama__llama-7b", 2048, 41),
        ("Qwen__Qwen2.5-0.5B", 32768, 20),
    ],
)
def test_critical_dimension_and_floor_are_one_set(tmp_path, name, length, count):
    """Published critical dimensions: 92, 70, 200, 82, 40."""
    found = describe(read_config(written(tmp_path, CASES[name]["config"])), name)
    (kind,) = found["kinds"]
    assert kind["length"] == length
    assert kind["critical_dimension"] == 2 * count == 2 * (kind["pairs"] - kind["undertrained"])


def test_llama31_divisors(tmp_path):
    row = describe(read_config(written(tmp_path, CASES["meta-llama__Llama-3.1-8B"]["config"])), "l")["layers"][0]
    divisors = 500000.0 ** (-np.arange(64) / 64) / np.array(row["inv_freq"])
    np.testing.assert_allclose(divisors[:29], 1, rtol=1e-5)
    np.testing.assert_allclose(divisors[29:35], [1.2075, 1.5534, 2.0263, 2.6945, 3.6843, 5.2573], rtol=1e-4)
    np.testing.assert_allclose(divisors[35:], 8, rtol=1e-5)


def test_bounds_of_real_models(tmp_path):
    for name, bound in (("meta-llama__Llama-3.1-8B", 85132), ("meta-llama__Llama-3.2-1B-Instruct", 110698)):
        (kind,) = describe(read_config(written(tmp_path, CASES[name]["config"])), name)["kinds"]
        assert kind["bound"] == bound and not kind["carries"]


LLAMA2 = CASES["meta-llama__Llama-2-7b-hf"]["config"]


def test_override_yarn_sixteen(tmp_path):
    path = written(tmp_path, LLAMA2)
    row = describe(read_config(path, rope=parse_rope("type=yarn,factor=16")), path)["layers"][0]
    assert row["base"] == 1e4 and row["rope_type"] == "yarn"
    assert row["attention_scaling"] == pytest.approx(1.27726, abs=1e-5)
    divisors = 1e4 ** (-np.arange(64) / 64) / np.array(row["inv_freq"])
    np.testing.assert_allclose(divisors[:21], 1, rtol=1e-5)
    assert (np.diff(divisors[20:47]) > 0).all()
    np.testing.assert_allclose(divisors[46:], 16, rtol=1e-5)


def test_override_dynamic_depends_on_the_length(tmp_path):
    path = written(tmp_path, LLAMA2)
    rope = parse_rope("type=dynamic,factor=2")
    plain = describe(read_config(path, rope=rope), path)["layers"][0]
    grown = describe(read_config(path, rope=rope, length=8192), path)["layers"][0]
    np.testing.assert_allclose(plain["inv_freq"], 1e4 ** (-np.arange(64) / 64), rtol=1e-5)
    np.testing.assert_allclose(grown["inv_freq"], 30527.74 ** (-np.arange(64) / 64), rtol=1e-5)


def test_override_merges_with_the_config(tmp_path):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(written(tmp_path, CASES["meta-llama__Llama-3.1-8B"]["config"]))
    changed = override_rope(config, {"rope_theta": 1e6}).rope_parameters
    assert changed == {**config.rope_parameters, "rope_theta": 1e6}
    other = override_rope(config, {"rope_type": "linear", "factor": 2.0}).rope_parameters
    assert other["rope_theta"] == 5e5 and "low_freq_factor" not in other and other["factor"] == 2.0
    gemma = AutoConfig.from_pretrained(written(tmp_path, CASES["google__gemma-3-1b-it"]["config"], "g"))
    both = override_rope(gemma, {"rope_type": "linear", "factor": 4.0}).rope_parameters
    assert {kind: entry["rope_theta"] for kind, entry in both.items()} == {
        "sliding_attention": 1e4,
        "full_attention": 1e6,
    }
    assert all(entry["factor"] == 4.0 for entry in both.values())


@pytest.mark.parametrize("text", ["base", "base=", "base=big", "=3", "factor=true", "type=yarn,factor"])
def test_override_must_be_numbers(text):
    with pytest.raises(UsageError, match="--rope"):
        parse_rope(text)


SMALL = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "vocab_size": 97,
}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"head_dim": 5}, "even|pairs"),
        ({"head_dim": 3}, "channels rotate in pairs|even"),
        ({"model_type": "stablelm", "hidden_size": 80, "partial_rotary_factor": 0.25}, "5 of 20.*even"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2}}, "rope type 'spiral'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor"),
        ({"model_type": "gpt2", "n_head": 4, "n_embd": 64}, "no rotary position embedding"),
        ({"model_type": "bloom"}, "ALiBi|no rotary position embedding"),
        ({"model_type": "falcon", "alibi": True}, "ALiBi"),
        ({"model_type": "mamba"}, "no rotary position embedding|no attention"),
        ({"model_type": "nonsense"}, "does not know"),
        ({"model_type": None}, "model_type"),
    ],
)
def test_what_cannot_be_right_is_a_sentence(tmp_path, change, sentence):
    with pytest.raises(ProbeError, match=sentence) as caught:
        read_config(written(tmp_path, SMALL | change))
    assert "\n" not in str(caught.value)


def test_a_missing_base_is_named(tmp_path):
    notes = describe(read_config(written(tmp_path, SMALL)), "x")["notes"]
    assert any("names no base; 10000 is the default of its llama class" in note for note in notes)
    notes = describe(read_config(written(tmp_path, SMALL | {"rope_theta": 10000.0})), "x")["notes"]
    assert not any("base" in note for note in notes)


def test_notes_say_what_is_unusual(tmp_path):
    def said(name):
        return " ".join(describe(read_config(written(tmp_path, CASES[name]["config"])), name)["notes"])

    assert "layers 3, 7, 11, 15, 19, 23, 27, 31, 35 do not rotate" in said("HuggingFaceTB__SmolLM3-3B")
    assert "claims 131,072 tokens; its frequencies were formed at 8,192" in said("meta-llama__Llama-3.1-8B")
    assert "trained at 262,144 tokens" in said("Qwen__Qwen2.5-7B-Instruct-1M")
    assert "model_max_length is 131,072" in said("CohereForAI__c4ai-command-r-v01")
    assert "LongRoPE: up to 4,096" in said("microsoft__Phi-3-mini-128k-instruct")
    assert "first 96 of 128 channels" in said("microsoft__Phi-4-mini-instruct")
    assert "MLA: the last 64 of 192" in said("deepseek-ai__DeepSeek-V3")
    assert "put into halves" in said("deepseek-ai__DeepSeek-V3")
    assert "linear in the pair index" in said("openai__gpt-oss-20b")
    assert "low_freq_factor = high_freq_factor" in said("meta-llama__Llama-4-Scout-17B-16E-Instruct")
    assert said("meta-llama__Meta-Llama-3-8B") == ""


def test_a_bare_config_needs_no_weights(tmp_path):
    source, raw = raw_config(written(tmp_path, SMALL))
    assert source.local and raw["model_type"] == "llama"


def test_figure_names_only_the_lines_it_draws(tmp_path):
    from rope_probe.plots import inspect as plot

    def legend(name):
        found = describe(read_config(written(tmp_path, CASES[name]["config"], name)), name)
        ax = plot([found])
        return [text.get_text() for legend in ax.figure.legends for text in legend.get_texts()]

    assert "context seen" in legend("meta-llama__Llama-3.1-8B")  # formed at 8k, claims 128k
    assert "context seen" not in legend("google__gemma-3-270m")  # the window and the context are the trained lengths
