"""check: passes on a sound checkpoint, and says of a broken one what is wrong with it."""

import json

import numpy as np
import pytest
import torch
from conftest import VOCABULARY, edit_weights, tiny_config
from families import NAMED
from test_gguf_cache import to_gguf_rows

import rope_probe as rp
from rope_probe.probes.check import Subject
from rope_probe.probes.check_attention import Watch
from rope_probe.probes.check_likelihood import count_nll, likelihood

pytestmark = pytest.mark.usefixtures("one_thread")

STRUCTURE = ("opens", "weights", "tap", "rotation", "frequencies", "causality", "attention", "norms")


def copies(rng, count, length=48):
    """Text whose every token is the one three before it: it takes attention and positions to predict."""
    return np.tile(rng.integers(2, VOCABULARY, (count, 3)), (1, length // 3))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A tiny checkpoint that has learned such text, with the text as a token file: (folder, token file)."""
    from transformers import LlamaForCausalLM

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, rng = LlamaForCausalLM(tiny_config(tie_word_embeddings=True)), np.random.default_rng(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for _ in range(250):
        ids = torch.tensor(copies(rng, 16, 24))
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.set_num_threads(threads)
    folder = tmp_path_factory.mktemp("trained")
    model.eval().save_pretrained(folder)
    np.save(folder / "text.npy", copies(np.random.default_rng(1), 8))
    return folder, folder / "text.npy"


@pytest.fixture
def opened(trained):
    return rp.open(trained[0])


def findings(report):
    return {finding.name: finding for finding in report.findings}


def test_a_sound_checkpoint_passes(trained, opened):
    report = rp.check(opened, tokens=trained[1])
    found = findings(report)
    assert report.passed and all(finding.passed for finding in report.findings), report
    assert tuple(found) == (*STRUCTURE, "likelihood", "as trained")
    assert found["tap"].number == 0 and found["likelihood"].number < 2
    # by hand: no token tells the next, and each is one of 95
    assert "chance 4.57" in found["likelihood"].words
    assert report.geometry == [
        "layers 0–2: full_attention, 4 heads, 2 kv heads of 16, base 10000, default, 8 pairs, layout half"
    ]
    assert report.where["tokens"] == "2 × 48 tokens of text.npy"


def test_the_command_prints_findings_geometry_and_versions(run_cli, trained):
    done = run_cli("check", trained[0], "--tokens", trained[1])
    assert (done.code, done.err) == (0, "")
    assert "all 10 checks passed" in done.out and "fail" not in done.out
    assert f"torch {torch.__version__}" in done.out
    values = json.loads(run_cli("check", trained[0], "--tokens", trained[1], "--quick", "--json").out)
    assert values["passed"] and len(values["findings"]) == 9
    assert values["versions"]["torch"] == torch.__version__


def test_untrained_weights_fail_by_their_likelihood_alone(tiny_folder, tokens):
    report = rp.check(rp.open(tiny_folder), tokens=tokens)
    found = findings(report)
    assert [name for name in found if not found[name].passed] == ["likelihood"]
    assert "nearly uniform" in found["likelihood"].words and "untrained" in found["likelihood"].words


def test_without_a_text_its_checks_are_not_asked(trained):
    report = rp.check(trained[0])
    found = findings(report)
    assert report.passed and report.where["tokens"] == "1 × 64 tokens of random token ids"
    assert found["likelihood"].passed is None and "--tokens" in found["likelihood"].words
    assert all(found[name].passed for name in STRUCTURE)


def test_all_checks_run_where_one_cannot(trained, opened, monkeypatch):
    def fail(*args):
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("rope_probe.probes.check_structure.rotation_error", fail)
    found = findings(rp.check(opened, tokens=trained[1], quick=True))
    assert found["rotation"].passed is False
    assert found["rotation"].words == "could not be asked: ZeroDivisionError, by zero (please report this model)."
    assert all(finding.passed for name, finding in found.items() if name != "rotation")


# -- broken checkpoints ------------------------------------------------------------------------------


def broken(report, *names):
    """Findings of a report in which these checks fail and no other."""
    found = findings(report)
    assert [name for name in found if found[name].passed is False] == list(names), report
    return found


@pytest.mark.parametrize("sides", [("k_proj",), ("q_proj",), ("q_proj", "k_proj")])
def test_rows_in_the_order_of_a_gguf_are_named(trained, opened, sides):
    with torch.no_grad():
        for layer in opened.model.model.layers:
            for side in sides:
                module = getattr(layer.self_attn, side)
                module.weight.copy_(to_gguf_rows(module.weight.clone(), len(module.weight) // 16))
    found = findings(rp.check(opened, tokens=trained[1]))
    assert found["as trained"].passed is False
    assert all(found[name].passed for name in STRUCTURE)
    assert f"the rows of {' and '.join(sides)} are permuted" in found["as trained"].words


def test_exchanged_layers_are_named(trained, opened):
    layers = opened.model.model.layers
    first, last = ({k: v.clone() for k, v in layers[i].state_dict().items()} for i in (0, 2))
    layers[0].load_state_dict(last)
    layers[2].load_state_dict(first)
    found = findings(rp.check(opened, tokens=trained[1]))
    assert all(found[name].passed for name in STRUCTURE)
    assert "layers 0 and 2 are in each other's place" in found["as trained"].words


def test_frequencies_of_another_base_are_named(trained, opened):
    opened.model.model.rotary_emb.inv_freq.copy_(1e6 ** (-torch.arange(8) / 8))
    found = findings(rp.check(opened, tokens=trained[1]))
    assert found["frequencies"].passed is False
    assert found["frequencies"].words == (
        "inv_freq of layer 0 is not that of the config (base 10000, default): its fastest pairs are those of base 1e+06."
    )


def test_a_config_with_another_base_is_told_by_its_text(trained, tmp_path):
    found = findings(rp.check(trained[0], tokens=trained[1], rope={"rope_theta": 50.0}))
    assert found["frequencies"].passed and found["as trained"].passed is False
    assert (
        "with base 1" in found["as trained"].words
        and "it runs with base 50, and was trained with another" in found["as trained"].words
    )


def test_stored_frequencies_of_another_base_are_named(tiny, tokens):
    def add(tensors):
        tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = (5e5 ** (-torch.arange(8) / 8)).float()

    edit_weights(tiny, add)
    found = findings(rp.check(tiny, tokens=tokens, quick=True))
    assert found["frequencies"].words == (
        "model.layers.1.self_attn.rotary_emb.inv_freq in the weight files is that of base 5e+05, and the config says "
        "base 10000: one of them is wrong."
    )


def test_a_tied_head_that_is_not_tied(trained, opened):
    torch.manual_seed(1)
    opened.model.lm_head.weight = torch.nn.Parameter(torch.randn(VOCABULARY, 64))
    found = findings(rp.check(opened, tokens=trained[1]))
    assert found["weights"].passed is False and "the config says they are tied" in found["weights"].words
    assert found["as trained"].words.endswith("its head should be tied to the embedding, and is not.")


def test_a_head_that_the_files_lack_is_named(tiny):
    edit_weights(tiny, lambda tensors: tensors.pop("lm_head.weight"))
    (finding,) = rp.check(tiny).findings
    assert (finding.name, finding.passed) == ("opens", False)
    assert "lack lm_head.weight, which would be random numbers" in finding.words


def test_a_truncated_shard_is_named(run_cli, tiny):
    path = tiny / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    done = run_cli("check", tiny, "--json")
    values = json.loads(done.out)
    assert (done.code, done.err, values["passed"]) == (1, "", False)
    assert f"{path} is cut short" in values["findings"][0]["words"]
    done = run_cli("check", tiny)
    assert done.code == 1 and "opens  fail" in done.out and "1 of 1 checks failed: opens" in done.out


def test_a_wrong_option_is_no_finding(run_cli, tiny):
    run_cli("check", tiny, "--dtype", "int3").refused("--dtype is 'int3'", code=2)
    run_cli("check", tiny, "--length", "0").refused("--length is 0", code=2)


@pytest.mark.parametrize(("value", "words"), [(0.0, "all zero"), (np.nan, "not finite")])
def test_tensors_that_hold_nothing(tiny, tokens, value, words):
    edit_weights(tiny, lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"].fill_(value))
    found = findings(rp.check(tiny, tokens=tokens, quick=True))
    assert found["weights"].words == (
        f"model.layers.1.mlp.up_proj.weight: {words}{', as in a file that was never filled' if not value else ''}; "
        "fetch the checkpoint again."
    )


def test_keys_that_are_zero_name_their_layer(tiny, tokens):
    edit_weights(tiny, lambda tensors: tensors["model.layers.2.self_attn.k_proj.weight"].zero_())
    found = findings(rp.check(tiny, tokens=tokens, quick=True))
    assert "keys of layer 2" not in found["weights"].words and found["weights"].passed is False
    assert found["norms"].passed is False and "keys of layer 2" in found["norms"].words


# -- attention ---------------------------------------------------------------------------------------


SHOWN = ["Gemma 3 text", "Gemma 4 text, shared keys", "Mistral", "gpt-oss", "Llama 4 text", "Gemma 2", "GPT-J"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SHOWN else pytest.mark.slow) for name in NAMED]
)
def test_the_structure_of_families_is_seen_as_it_is(name):
    """Windows, chunks, sink logits, soft-caps, shared rotary keys, NoPE: none is a false alarm."""
    report = rp.check(rp.open(NAMED[name].build()), length=24, quick=True)
    found = findings(report)
    assert report.passed, report
    assert all(found[check].passed for check in STRUCTURE)


def test_the_reach_of_a_window_is_that_of_the_weights_themselves():
    """Against the eager attention maps of the same model."""
    ckpt = rp.open(NAMED["Mistral"].build())
    ids = torch.arange(2, 26)[None]
    with Watch(ckpt.decoder) as watch:
        ckpt.decoder(input_ids=ids, use_cache=False)
    for layer in ckpt.geometry(24).layers:
        weights = rp.attention_map(ckpt, layer.layer, 0, ids)
        seen = watch.found[layer.layer]
        assert seen.reach == np.flatnonzero(weights[:, 0] > 0).max() == layer.window - 1
        assert seen.low == pytest.approx(1, abs=1e-5) and seen.high == pytest.approx(1, abs=1e-5)


def test_a_window_that_the_attention_ignores(trained, opened):
    opened.model.config.sliding_window = 16  # read as declared, but the Llama class makes no mask of it
    found = findings(rp.check(opened, tokens=trained[1], quick=True))
    assert found["attention"].passed is False
    assert "tokens that layer 0 sees" in found["attention"].words and "should see 16" in found["attention"].words


def test_a_model_that_sees_ahead(trained, opened):
    for layer in opened.model.model.layers:
        forward = layer.self_attn.forward

        def ahead(*args, forward=forward, **kwargs):
            size = args[0].shape[1] if args else kwargs["hidden_states"].shape[1]
            return forward(*args, **kwargs | {"attention_mask": torch.zeros(1, 1, size, size)})

        layer.self_attn.forward = ahead
    found = findings(rp.check(opened, tokens=trained[1], quick=True))
    assert found["causality"].passed is False and "see ahead" in found["causality"].words
    assert found["attention"].passed is False and "later tokens" in found["attention"].words


# -- likelihood --------------------------------------------------------------------------------------


def test_word_counts_by_hand():
    """Three of four other tokens are 1: 0.95 · 2/3 + 0.05/8 for a 1, and chance alone for the token seen once."""
    stream = np.array([1, 1, 1, 2])
    expected = -np.log([0.95 * 2 / 3 + 0.05 / 8, 0.05 / 8])
    assert count_nll(stream, np.array([1]), 8) == pytest.approx(expected[0])
    assert count_nll(stream, np.array([1, 2]), 8) == pytest.approx(expected.mean())


def test_smollm2_is_plausible_and_with_permuted_keys_it_is_not(smollm2):
    """Finite numbers, right shapes, right rotation: only the text tells."""
    source = {"text": None, "dataset": None, "tokens": None}
    passed, nll, words = likelihood(Subject(smollm2, source, 256))
    assert passed and 2 < nll < 4 and "chance 10.80" in words
    projections = [layer.self_attn.k_proj for layer in smollm2.model.model.layers]
    sound = [module.weight.data for module in projections]
    try:
        for module in projections:
            module.weight.data = to_gguf_rows(module.weight.data, 3)
        passed, scrambled, words = likelihood(Subject(smollm2, source, 256))
    finally:
        for module, weight in zip(projections, sound, strict=True):
            module.weight.data = weight
    assert not passed and scrambled > nll + 3 and "do not belong together" in words


@pytest.mark.slow
@pytest.mark.parametrize("name", ["demo:smollm2", "demo:gemma3"])
def test_the_demos_pass(name):
    report = rp.check(name)
    assert all(finding.passed for finding in report.findings), report
