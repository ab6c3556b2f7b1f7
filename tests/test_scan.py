"""scan, against the projections of the whole model and against bands."""

import json
from functools import cache

import numpy as np
import pytest
import torch
from conftest import edit_weights, tiny_model
from families import FAMILIES, NAMED, token_ids
from families import tiny as tiny_family
from projections import pair_norms, projected

import rope_probe as rp
from rope_probe.checkpoints import open_checkpoint
from rope_probe.errors import UsageError
from rope_probe.modules import decoder_layers
from rope_probe.probes.scan_summary import KNOWN, agreement, beside, summary

pytestmark = pytest.mark.usefixtures("one_thread")

DRAWS, SEED = 24, 5
# what is different about how q and k come about: biases, q/k norms of all kinds, fused and interleaved projections,
# partial rotary, clipping, other norms, a wrapped text model, low-rank projections, shared keys
QUICK = [
    "Llama 3.1",
    "Llama with dynamic NTK",
    "Llama 4 text",
    "SmolLM3",
    "Gemma",
    "Gemma 3 multimodal",
    "Gemma 4 text",
    "Gemma 4 text, shared keys",
    "Qwen2",
    "Qwen3",
    "Phi with qk norm",
    "Phi-3 4k",
    "Phi-4-mini",
    "OLMo",
    "OLMo 2",
    "Pythia",
    "GPT-J",
    "StableLM with qk norm",
    "GLM-4 9B",
    "Cohere with qk norm",
    "gpt-oss",
    "DeepSeek-V2",
    "DeepSeek-V3",
    "CodeGen",
    "Persimmon",
    "Nemotron",
]
REFUSED = "LongCat-Flash"
NAMES = [
    pytest.param(family.name, marks=() if family.name in QUICK else pytest.mark.slow)
    for family in FAMILIES
    if family.name != REFUSED
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folder of a tiny model of a family, and the model."""

    @cache
    def save(name):
        folder, model = tmp_path_factory.mktemp("families"), NAMED[name].build()
        model.save_pretrained(folder)
        return str(folder), model

    return save


READS = ("q_proj", "k_proj", "qkv_proj", "query_key_value", "q_a_proj", "kv_a_proj_with_mqa")


def inputs_of(layer, index):
    """The inputs a scan draws for a layer, from its weights: x = Σ Wᵀ W ξ, to root mean square 1."""
    weights = [m.weight.double() for name, m in layer.named_modules() if name.rpartition(".")[2] in READS]
    noise = torch.randn(DRAWS, weights[0].shape[1], generator=torch.Generator().manual_seed(SEED + index)).double()
    x = noise @ sum(w.T @ w for w in weights)
    return (x / x.pow(2).mean(1, keepdim=True).sqrt()).float()


def norms_for(family, model, index, x):
    """Pair norms of q and k of a layer of the whole model, when x [draw, hidden] enters it as single tokens."""

    def enter(_module, args, kwargs):
        return ((x[:, None], *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": x[:, None]})

    hook = decoder_layers(open_checkpoint(model).decoder)[index].register_forward_pre_hook(enter, with_kwargs=True)
    try:
        sides = projected(family, model, torch.full((DRAWS, 1), 3))[index]
    finally:
        hook.remove()
    layer = family.layers[index]
    return [pair_norms(side, family.layout, layer.dim, family.last)[:, :, 0] for side in sides]


@pytest.mark.filterwarnings("ignore:segments of .* are longer")
@pytest.mark.parametrize("name", NAMES)
def test_every_family(name, saved):
    """Layer 0 is that of bands; later layers are what the model's projections make of the inputs drawn for them."""
    family, ids = NAMED[name], token_ids(13)
    folder, model = saved(name)
    ds = rp.scan(folder, tokens=ids, draws=DRAWS, seed=SEED)
    shared = json.loads(ds.attrs["shared_keys"])
    assert shared == ([3, 4] if "shared keys" in name else [])
    assert ds["layer"].values.tolist() == [i for i in range(len(family.layers)) if i not in shared]
    measured = rp.bands(open_checkpoint(model), tokens=ids, layers=[0])
    for variable in ("q_norm", "k_norm", "usage", "q_top", "k_top"):
        ours, theirs = ds[variable].sel(layer=0).values, measured[variable][0].values
        np.testing.assert_allclose(ours[: theirs.shape[0], : theirs.shape[1]], theirs, rtol=1e-5, err_msg=variable)
        assert np.isfinite(ours).sum() == theirs.size
    for index in ds["layer"].values[1:]:
        layer = family.layers[index]
        if not layer.rotates:
            assert np.isnan(ds["k_norm"].sel(layer=index)).all()
            continue
        block = decoder_layers(open_checkpoint(model).decoder)[int(index)]
        q, k = norms_for(family, model, int(index), inputs_of(block, int(index)))
        for variable, norms in (("q_norm", q), ("k_norm", k)):
            expected = norms.mean(0).numpy()
            ours = ds[variable].sel(layer=index).values[: expected.shape[0], : expected.shape[1]]
            np.testing.assert_allclose(ours, expected, rtol=2e-4, err_msg=f"{variable} of layer {index}")
        group = len(q[0]) // len(k[0])
        product = q.mean(0).numpy() * k.mean(0).repeat_interleave(group, 0).numpy()
        usage = ds["usage"].sel(layer=index).values[: product.shape[0], : product.shape[1]]
        np.testing.assert_allclose(usage, product, rtol=4e-4)
        assert (np.nansum(ds["k_top"].sel(layer=index), axis=-1)[: len(k[0])] == DRAWS).all()
    assert ds["exact"].values.tolist() == [layer == 0 for layer in ds["layer"].values]


def test_row_norms_are_what_white_inputs_give(saved, monkeypatch):
    """With x = ξ the mean square of a pair is the squared norm of its rows of W · diag(norm weight)."""
    folder, model = saved("Llama 3.1")
    monkeypatch.setattr(
        "rope_probe.probes.scan.draw",
        lambda modules, width, count, seed: torch.randn(count, width, generator=torch.Generator().manual_seed(seed)),
    )
    ds = rp.scan(folder, tokens=token_ids(13), draws=20000)
    block = model.model.layers[1]
    rows = (block.self_attn.k_proj.weight * block.input_layernorm.weight).double().detach()
    first, second = rows.reshape(2, 2, 8, -1).unbind(1)
    cov = torch.stack([first.square().sum(-1), second.square().sum(-1), (first * second).sum(-1)], -1)
    # mean norm of a normal vector in the plane, by numerical integration over its direction
    angle = torch.linspace(0, 2 * np.pi, 2001, dtype=torch.float64)[:-1]
    a, b, c = (cov[..., i, None] for i in range(3))
    expected = (a * angle.cos() ** 2 + b * angle.sin() ** 2 + 2 * c * angle.sin() * angle.cos()).sqrt()
    # E|Lz| for z of random direction and Rayleigh length sqrt(pi / 2)
    expected = expected.mean(-1) * np.sqrt(np.pi / 2)
    np.testing.assert_allclose(ds["k_norm"].sel(layer=1), expected, rtol=0.03)


def test_nothing_else_is_read(tiny, tokens):
    """Norm, q and k of the layers asked for and the embeddings of the tokens; the rest may be rubbish."""

    def spoil(tensors):
        for name in tensors:
            if any(part in name for part in ("v_proj", "o_proj", "mlp", "lm_head", "post_attention", "layers.1.")):
                tensors[name] = torch.full_like(tensors[name], torch.nan)

    whole = rp.scan(str(tiny), tokens=tokens, draws=8, layers=[0, 2])
    edit_weights(tiny, spoil)
    ds = rp.scan(str(tiny), tokens=tokens, draws=8, layers=[0, 2])
    for name in whole.data_vars:
        np.testing.assert_array_equal(ds[name], whole[name])
    ids = np.unique(np.load(tokens)[:, 1:])
    layer = 64 + 64 * 64 + 32 * 64  # norm, q, k
    rows = ids[-1] - ids[0] + 1  # neighbours are read together, with what is between them
    assert ds.attrs["weight_bytes_read"] == 4 * (2 * layer + 64 * (rows + 2))  # and a row to begin each pass of layer 2


def test_a_tower_of_the_same_names_is_not_the_model(tiny, tokens):
    def add_tower(tensors):
        for name, values in list(tensors.items()):
            if "self_attn" in name:  # sorted before the model's own, and shorter
                tensors[name.replace("model.", "a.")] = values * 2

    whole = rp.scan(str(tiny), tokens=tokens, draws=8)
    edit_weights(tiny, add_tower)
    np.testing.assert_array_equal(rp.scan(str(tiny), tokens=tokens, draws=8)["k_norm"], whole["k_norm"])


def test_layers_without_attention_are_passed_over(tmp_path):
    """Of a hybrid model the attention layers are scanned, and nothing of the others is read."""
    tiny_family("Lfm2", num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"]).save_pretrained(tmp_path)
    ds = rp.scan(str(tmp_path), tokens=token_ids(13), draws=8)
    assert ds["layer"].values.tolist() == [1] and not ds["exact"].any()
    assert np.isfinite(ds["k_norm"]).all()
    norm, q, k, head_norms, row = 64, 64 * 64, 32 * 64, 2 * 16, 64
    assert ds.attrs["weight_bytes_read"] == 4 * (norm + q + k + head_norms + 2 * row)  # and a row to begin each pass


def test_layer_0_of_smollm2(smollm2):
    ids = np.random.default_rng(0).integers(0, 49152, (2, 64))
    ds = rp.scan("demo:smollm2", tokens=ids, layers=[0])
    measured = rp.bands(smollm2, tokens=ids, layers=[0])
    for name in ("q_norm", "k_norm", "usage"):
        np.testing.assert_allclose(ds[name], measured[name], rtol=1e-4)
    np.testing.assert_array_equal(ds["k_top"], measured["k_top"])


@pytest.mark.slow
@pytest.mark.parametrize("demo", ["smollm2", "gemma3"])
def test_known_agreement_is_that_of_the_demos(demo):
    ds = rp.scan(f"demo:{demo}", bands=f"figures/data/bands-{demo}.nc")
    found = agreement(ds)
    known = KNOWN[rp.load(f"figures/data/bands-{demo}.nc").attrs["provenance"].split('"file": "')[1].split('"')[0]]
    for side, values in known.items():  # two heads may tie
        assert values["top"] == pytest.approx(found[side]["top"], abs=0.005 + 2 / found[side]["heads"])
        assert values["rank"] == pytest.approx(found[side]["rank"], abs=0.01)


@pytest.fixture(scope="module")
def scanned(tmp_path_factory):
    """A scan of three layers and the bands of the same model, and the folder."""
    folder = tmp_path_factory.mktemp("scanned")
    model = tiny_model()
    model.save_pretrained(folder / "model")
    ids = np.random.default_rng(1).integers(2, 97, (4, 16))
    np.save(folder / "ids.npy", ids)
    measured = rp.bands(open_checkpoint(model), tokens=ids)
    rp.save(measured, folder / "bands.nc")
    return folder, rp.scan(str(folder / "model"), tokens=ids), measured


def test_agreement_by_hand(scanned):
    _, ds, measured = scanned
    assert agreement(ds) is None
    found = agreement(beside(ds, measured))
    ours, theirs = (d["k_top"].values[1:].argmax(-1).ravel() for d in (ds, measured))
    assert found["keys"]["top"] == (ours == theirs).mean()
    assert found["keys"]["near"] == (abs(ours - theirs) <= 1).mean()
    assert (found["keys"]["mean"], found["keys"]["mean_measured"]) == (ours.mean(), theirs.mean())
    order = [np.argsort(np.argsort(d["usage"].values[1:].reshape(-1, 8), -1), -1) for d in (ds, measured)]
    ranks = [np.corrcoef(a, b)[0, 1] for a, b in zip(*order, strict=True)]
    assert found["usage"]["rank"] == pytest.approx(np.mean(ranks), abs=1e-9)
    assert (found["queries"]["heads"], found["keys"]["heads"]) == (8, 4)


def test_agreement_with_itself_is_full(scanned):
    _, ds, _ = scanned
    itself = ds.assign_attrs(analysis="bands")
    for values in agreement(beside(ds, itself)).values():
        assert values["top"] == values["near"] == 1 and values["rank"] == pytest.approx(1)


def test_bands_of_fewer_layers(scanned):
    _, ds, measured = scanned
    found = agreement(beside(ds, measured.sel(layer=[0, 2])))
    assert found["keys"]["heads"] == 2
    with pytest.raises(rp.ProbeError, match="no estimated layer"):
        beside(ds, measured.sel(layer=[0]))


def test_summary_is_that_of_bands(scanned):
    _, ds, _ = scanned
    values = summary(ds)
    top = ds["k_top"].values.argmax(-1)
    assert values["i_band"] == top.mean() and values["i_band_se"] is None
    assert values["i_band_usage"] == ds["usage"].values.argmax(-1).mean()
    assert values["exact"] == [0] and values["draws"] == 512 and values["known"] is KNOWN
    assert rp.summary(ds) == values


def test_same_seed_same_numbers(scanned):
    folder, ds, _ = scanned
    again = rp.scan(str(folder / "model"), tokens=folder / "ids.npy")
    other = rp.scan(str(folder / "model"), tokens=folder / "ids.npy", seed=1)
    np.testing.assert_array_equal(again["k_norm"], ds["k_norm"])
    np.testing.assert_array_equal(other["k_norm"][0], ds["k_norm"][0])
    assert not np.array_equal(other["k_norm"][1], ds["k_norm"][1])
    np.testing.assert_allclose(other["k_norm"][1:], ds["k_norm"][1:], rtol=0.2)


def test_command(run_cli, scanned):
    folder, ds, _ = scanned
    tokens = ("--tokens", folder / "ids.npy")
    run = run_cli("scan", folder / "model", *tokens, "--bands", folder / "bands.nc", "-o", "s.nc")
    assert run.code == 0, run.err
    assert "the model was not run" in run.out and "are estimates" in run.out
    assert "agreement with bands" in run.out and "this scan" in run.out
    for name in KNOWN:
        assert name in run.out
    assert run_cli("show", "s.nc").out.split("\nresult")[0] == run.out.split("\nresult")[0]
    run = run_cli("scan", folder / "model", *tokens, "--json", "-o", "t.nc")
    values = json.loads(run.out)
    assert values["analysis"] == "scan" and values["agreement"] is None and values["output"] == "t.nc"
    assert values["i_band"] == pytest.approx(summary(ds)["i_band"])


def test_figure(scanned):
    import matplotlib.pyplot as plt

    _, ds, measured = scanned
    alone = rp.plot.scan(ds)
    layers = rp.plot.bands_layers(ds)
    assert "estimated from its weights" in np.ravel(layers)[0].figure.texts[0].get_text()
    both = rp.plot.scan(beside(ds, measured))
    for without, with_it, name in zip(alone, both, ("q_norm", "k_norm", "usage"), strict=True):
        assert len(with_it.lines) == len(without.lines) + 1
        profile = measured[name].values.reshape(-1, 8)
        expected = (profile / profile.mean(1, keepdims=True)).mean(0)
        np.testing.assert_allclose(with_it.lines[-1].get_ydata(), expected)
        assert with_it.get_ylim()[1] > expected.max()
    words = both[0].figure.texts[0].get_text()
    assert "bands measured" in words and "embeddings" in words
    assert "bands measured" not in alone[0].figure.texts[0].get_text()
    plt.close("all")


def quantized(tensors):
    for name in list(tensors):
        if "q_proj" in name:
            tensors[name.replace("weight", "qweight")] = tensors.pop(name).int()


def eight_bits(tensors):
    for name in list(tensors):
        if "k_proj" in name:
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)


def no_norm(tensors):
    tensors.pop("model.layers.0.input_layernorm.weight")


def wrong_shape(tensors):
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(16, 64)


def infinite(tensors):
    tensors["model.layers.2.self_attn.k_proj.weight"][3, 3] = torch.inf


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (quantized, ("q_proj.weight", "quantized", "rope-probe bands")),
        (eight_bits, ("F8_E4M3", "quantized")),
        (no_norm, ("model.layers.0.input_layernorm.weight", "fetch")),
        (wrong_shape, ("[16, 64]", "[32, 64]")),
    ],
)
def test_weights_that_cannot_be_scanned(run_cli, tiny, tokens, change, words):
    edit_weights(tiny, change)
    run_cli("scan", tiny, "--tokens", tokens).refused(*words)


def test_layers_before_a_damaged_one_are_kept(run_cli, tiny, tokens):
    edit_weights(tiny, infinite)
    run = run_cli("scan", tiny, "--tokens", tokens, "-o", "s.nc")
    assert run.code == 1 and "until then" in run.out
    assert "layer 2 are not finite" in run.err and "s.nc holds what was estimated" in run.err
    kept = rp.load("s.nc")
    assert kept.attrs["partial"] == 1 and kept["layer"].values.tolist() == [0, 1]
    whole = rp.scan(str(tiny), tokens=tokens, layers=[0, 1])
    np.testing.assert_array_equal(kept["usage"], whole["usage"])


def test_interrupt_keeps_the_layers_until_then(tiny, tokens):
    def interrupt(done, total):
        if done == 2:
            raise KeyboardInterrupt

    ds = rp.scan(str(tiny), tokens=tokens, progress=interrupt)
    assert ds.attrs["partial"] == 1 and ds["layer"].values.tolist() == [0, 1]


def test_refusals(run_cli, tiny, tokens, scanned, saved):
    folder, *_ = scanned
    run_cli("scan", tiny, "--tokens", tokens, "--draws", 1).refused("--draws is 1", code=2)
    run_cli("scan", tiny, "--tokens", tokens, "--layers", "7").refused("no layer 7")
    run_cli("scan", saved(REFUSED)[0], "--tokens", folder / "ids.npy").refused("more than once each")
    np.save("one.npy", np.full((3, 1), 5))
    run_cli("scan", tiny, "--tokens", "one.npy").refused("segments of 1 token", code=2)
    other = saved("Qwen3")[0]
    run = run_cli("scan", other, "--tokens", folder / "ids.npy", "--bands", folder / "bands.nc")
    run.refused("another shape")
    with pytest.raises(UsageError, match="a hub id, a folder"):
        rp.scan(open_checkpoint(tiny_model()))
    run_cli("scan", tiny, "--tokens", tokens, "-o", "s.nc")
    run_cli("scan", tiny, "--tokens", tokens, "--bands", "s.nc").refused("a result of scan")
