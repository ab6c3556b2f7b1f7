"""Opening a checkpoint: what works, and what is refused in one sentence before it gives wrong numbers."""

import json
import shutil

import pytest
import torch
from conftest import edit_weights, tiny_model

import rope_probe as rp
from rope_probe.checkpoints import load_config
from rope_probe.errors import ProbeError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def refusal(*arguments, **options) -> str:
    with pytest.raises(rp.ProbeError) as caught:
        rp.open(*arguments, **options)
    return str(caught.value)


def same_weights(ckpt, folder):
    from safetensors.torch import load_file

    stored = load_file(folder / SINGLE)
    return all(torch.equal(ckpt.model.state_dict()[name], tensor) for name, tensor in stored.items())


# --- folders ---------------------------------------------------------------------------------------------------------


def test_a_folder_opens_with_its_own_weights_and_tokenizer(tiny_folder):
    ckpt = rp.open(tiny_folder)
    assert same_weights(ckpt, tiny_folder)
    assert (ckpt.name, ckpt.provenance) == (str(tiny_folder), {"source": "folder"})
    assert (ckpt.dtype, ckpt.device, ckpt.vocabulary, ckpt.claimed_length) == ("float32", "cpu", 97, 64)
    assert ckpt.tokenizer("w5 w7")["input_ids"] == [5, 7]
    assert [layer.rotates for layer in ckpt.layers] == [True] * 3


def test_dtype_is_the_files_own_or_the_one_asked_for(tiny):
    edit_weights(tiny, lambda tensors: tensors.update({k: v.bfloat16() for k, v in tensors.items()}))
    config = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    assert rp.open(tiny).dtype == "bfloat16"
    opened = rp.open(tiny, dtype="float32")
    assert opened.dtype == "float32" and opened.layers[0].inv_freq.dtype == "float64"


def test_a_folder_without_config(tmp_path):
    (tmp_path / SINGLE).write_bytes(b"")
    assert refusal(tmp_path) == f"{tmp_path} has no config.json: give the folder of a transformers checkpoint."


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ('{"model_type": "lla', ["config.json is not JSON", "Unterminated string", "fetch it again"]),
        ("[]", ["config.json names no model_type"]),
        ("null", ["config.json names no model_type"]),
        ('{"hidden_size": 64}', ["config.json names no model_type"]),
        ('{"model_type": "zorg"}', ["a model type that transformers does not know", "zorg"]),
        ('{"model_type": "llama", "hidden_size": "wide"}', ["cannot open", "hidden_size", "expected int", "'wide'"]),
        ('{"model_type": "llama", "num_attention_heads": 0}', ["cannot open", "ZeroDivisionError"]),
        ('{"model_type": "gpt2"}', ["has no rotary position embedding", "'gpt2'"]),
    ],
)
def test_a_config_that_cannot_be_used(tiny, content, parts):
    (tiny / "config.json").write_text(content)
    sentence = refusal(tiny)
    for part in parts:
        assert part in sentence
    assert "\n" not in sentence and sentence.endswith(".")


def test_the_config_alone_needs_no_weights(tiny):
    (tiny / SINGLE).unlink()
    assert load_config(str(tiny)).model_type == "llama"


def test_names_that_are_nothing():
    assert "neither a checkpoint folder nor a .gguf file" in refusal("./not-here")
    assert "neither a checkpoint folder nor a .gguf file" in refusal(__file__)
    assert "neither a path here nor a possible hub id" in refusal("two words")
    assert "has no meaning" in refusal("demo:smollm2", revision="main")


# --- weight files ----------------------------------------------------------------------------------------------------


@pytest.fixture
def sharded(tiny):
    """The tiny checkpoint in several files, and the name of one in the middle."""
    (tiny / SINGLE).unlink()
    tiny_model().save_pretrained(tiny, max_shard_size="60KB")
    names = sorted(path.name for path in tiny.glob("*.safetensors"))
    assert len(names) > 2
    return tiny, names[1]


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def cut_header(path):
    path.write_bytes(path.read_bytes()[:40])


def empty(path):
    path.write_bytes(b"")


def pointer(path):
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 123456\n")


def web_page(path):
    path.write_text("<!DOCTYPE html><html>please log in</html>")


def garbled(path):
    content = path.read_bytes()
    path.write_bytes(content[:8] + b"{{" + content[10:])


DAMAGE = [
    (lambda path: path.unlink(), "is missing"),
    (cut, "is cut short ("),
    (cut_header, "is cut short (40 bytes)"),
    (empty, "is cut short (0 bytes)"),
    (pointer, "is a Git LFS pointer, not weights"),
    (web_page, "is not a safetensors file (it begins with b'<!DOCTYPE"),
    (garbled, "has a damaged header"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGE)
def test_a_damaged_shard_is_named(sharded, damage, words):
    folder, name = sharded
    rp.open(folder)
    damage(folder / name)
    sentence = refusal(folder)
    assert sentence.startswith(f"{folder / name} {words}")
    assert sentence.endswith("incomplete download, fetch this file again.")


@pytest.mark.parametrize(("damage", "words"), DAMAGE[1:])
def test_a_damaged_single_file_is_named(tiny, damage, words):
    damage(tiny / SINGLE)
    assert refusal(tiny).startswith(f"{tiny / SINGLE} {words}")


def test_shards_without_their_index(sharded):
    folder, _ = sharded
    (folder / INDEX).unlink()
    assert refusal(folder) == f"{folder} has weight shards but no {INDEX}: incomplete download, fetch that file too."


@pytest.mark.parametrize("index", ["[]", "{", '{"weight_map": ["a"]}', '{"weight_map": {"a": 3}}', "{}"])
def test_an_index_that_is_none(sharded, index):
    folder, _ = sharded
    (folder / INDEX).write_text(index)
    assert refusal(folder) == f"{folder / INDEX} is not an index of weight files: fetch it again."


@pytest.mark.parametrize("where", ["../{name}", "{folder}/../{name}"])
def test_an_index_that_leaves_its_folder(sharded, where):
    folder, name = sharded
    shutil.copy(folder / name, folder.parent / name)
    index = json.loads((folder / INDEX).read_text())
    key = next(key for key, file in index["weight_map"].items() if file == name)
    index["weight_map"][key] = where.format(name=name, folder=folder)
    (folder / INDEX).write_text(json.dumps(index))
    assert "names files outside its own folder: do not use this checkpoint" in refusal(folder)


def test_pickled_weights_are_never_loaded(tiny):
    class Canary:
        def __reduce__(self):
            return (open, (str(tiny / "canary"), "w"))

    torch.save({"x": Canary()}, tiny / "pytorch_model.bin")
    (tiny / SINGLE).unlink()
    sentence = refusal(tiny)
    assert sentence.startswith(f"{tiny} has no {SINGLE} (only pytorch_model.bin)")
    assert "pickled weights are never loaded" in sentence
    assert not (tiny / "canary").exists()


def test_no_weights_at_all(tiny):
    (tiny / SINGLE).unlink()
    assert refusal(tiny) == f"{tiny} has no {SINGLE}: incomplete download, fetch this file again."


def test_a_tensor_that_is_missing_is_never_made_up(tiny):
    lost = "model.layers.1.self_attn.q_proj.weight"
    edit_weights(tiny, lambda tensors: tensors.pop(lost))
    sentence = refusal(tiny)
    assert f"the weights of {tiny} lack {lost}, which would be random numbers" in sentence


def test_many_missing_tensors_are_counted(tiny):
    def drop_layer(tensors):
        for name in [name for name in tensors if ".layers.2." in name]:
            del tensors[name]

    edit_weights(tiny, drop_layer)
    assert "model.layers.2.input_layernorm.weight" in refusal(tiny) and " and 6 more, " in refusal(tiny)


def test_tied_weights_are_not_missing(tmp_path):
    tiny_model(tie_word_embeddings=True).save_pretrained(tmp_path)
    ckpt = rp.open(tmp_path)
    assert ckpt.model.lm_head.weight is ckpt.model.model.embed_tokens.weight


def test_weights_of_another_size_than_the_config(tiny):
    name = "model.layers.0.self_attn.k_proj.weight"
    edit_weights(tiny, lambda tensors: tensors.update({name: torch.zeros(8, 64)}))
    sentence = refusal(tiny)
    assert f"{name} of {tiny} has shape [8, 64], and its config.json asks for [32, 64]" in sentence


# --- tokenizer, dtype, device ----------------------------------------------------------------------------------------


def test_a_checkpoint_without_tokenizer_opens_and_says_so_when_text_is_read(tiny):
    for path in tiny.glob("tokenizer*"):
        path.unlink()
    ckpt = rp.open(tiny)
    with pytest.raises(rp.ProbeError, match=r"has no tokenizer that can be read \(.+\): pass token ids with --tokens"):
        rp.bands(ckpt, length=8)
    assert rp.bands(ckpt, tokens=[[1, 2, 3]]).attrs["segments"] == 1


def test_a_damaged_tokenizer_says_why(tiny):
    (tiny / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(rp.ProbeError, match=r"has no tokenizer that can be read \(Expecting .*\)"):
        _ = rp.open(tiny).tokenizer


@pytest.mark.parametrize("dtype", ["nonsense", "int8", "fp16", ""])
def test_an_unknown_dtype(tiny_folder, dtype):
    sentence = f"--dtype is {dtype!r}: choose one of float32, bfloat16, float16, float64."
    assert refusal(tiny_folder, dtype=dtype) == sentence


@pytest.mark.parametrize("device", ["nonsense", "cuda:99", "meta", "cpu!"])
def test_a_device_that_is_not_there(tiny_folder, device):
    assert f"--device {device!r} is not available here" in refusal(tiny_folder, device=device)


def test_a_device_map_that_is_none(tiny_folder):
    sentence = refusal(tiny_folder, device_map="nonsense")
    assert sentence.startswith(f"cannot place {tiny_folder} on devices (")
    assert sentence.endswith("): check --device-map, or leave it out.")


def test_running_out_of_memory_says_what_to_do(tiny_folder, monkeypatch):
    def full(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", full)
    assert refusal(tiny_folder).startswith(f"{tiny_folder} does not fit in memory: use --dtype bfloat16")


# --- code that comes with a checkpoint -------------------------------------------------------------------------------


@pytest.fixture
def remote(tiny, monkeypatch):
    """The tiny checkpoint as a family of its own, whose code leaves a canary behind when it runs."""
    canary = tiny / "canary"
    code = f"open({str(canary)!r}, 'w').close()\n"
    (tiny / "configuration_own.py").write_text(
        code + "from transformers import LlamaConfig\nclass OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
    )
    (tiny / "modeling_own.py").write_text(
        code + "from transformers import LlamaForCausalLM\nfrom .configuration_own import OwnConfig\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tiny / "modules"))
    monkeypatch.syspath_prepend(str(tiny / "modules"))
    set_family(tiny, "own")
    return tiny, canary


def set_family(folder, model_type):
    classes = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": model_type, "auto_map": classes}))


def test_code_of_the_checkpoint_runs_only_when_asked(remote):
    folder, canary = remote
    assert refusal(folder) == (
        f"{folder} needs code from its own repository: pass --trust-remote-code if you trust it."
    )
    assert not canary.exists()
    assert type(rp.open(folder, trust_remote_code=True).model).__name__ == "OwnForCausalLM"
    assert canary.exists()


def test_a_family_that_is_known_needs_no_code(remote):
    folder, canary = remote
    set_family(folder, "llama")
    assert type(rp.open(folder).model).__module__ == "transformers.models.llama.modeling_llama"
    assert not canary.exists()


# --- model objects ---------------------------------------------------------------------------------------------------


def test_a_model_object():
    model = tiny_model()
    ckpt = rp.open(model)
    assert ckpt.model is model and ckpt.tokenizer is None
    assert rp.bands(ckpt, tokens=[[3, 4, 5, 6]])["k_norm"].shape == (3, 2, 8)


def test_objects_that_are_no_models():
    assert refusal(3) == "int is not a transformers model: pass one, or a hub id, folder or file."
    assert "this one is open already" in refusal(tiny_model(), dtype="float32")


def test_frequencies_in_low_precision_are_refused():
    sentence = refusal(tiny_model().to(torch.bfloat16))
    assert "inv_freq of layer 0 is bfloat16, which cannot tell positions above 256 apart" in sentence


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_frequencies_that_cannot_be_right_are_refused(value):
    model = tiny_model()
    model.model.rotary_emb.inv_freq[3] = value
    assert "inv_freq of layer 0 is " in refusal(model) and "was not initialised" in refusal(model)


def test_a_tokenizer_without_a_vocabulary_is_none(tmp_path):
    """transformers makes one of special tokens alone where the files are missing: every word would be unknown."""
    from families import NAMED

    NAMED["Gemma 3 text"].build().save_pretrained(tmp_path / "model")
    with pytest.raises(ProbeError, match="vocabulary is empty.*pass token ids with --tokens"):
        rp.bands(rp.open(tmp_path / "model"), length=32)
