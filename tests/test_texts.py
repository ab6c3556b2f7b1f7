"""Text, data sets and token files become segments of ids, or one sentence."""

import hashlib
import sys
import time
import types
import warnings
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from conftest import VOCABULARY, word_tokenizer

from rope_probe import texts
from rope_probe.errors import ProbeError, ProbeWarning, UsageError


@dataclass
class Stub:
    """The parts of a checkpoint that texts look at."""

    tokenizer: object = field(default_factory=word_tokenizer)
    vocabulary: int = VOCABULARY
    claimed_length: int = 64
    name: str = "stub"


def words(count):
    return " ".join(f"w{2 + i % 90}" for i in range(count))


def refusal(function, *arguments, kind=ProbeError, **options) -> str:
    with pytest.raises(kind) as caught:
        function(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(autouse=True)
def _no_surprises():
    """A warning that a test does not expect fails it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", ProbeWarning)
        yield


# --- text ------------------------------------------------------------------------------------------------------------


def test_segments_are_contiguous_and_do_not_overlap():
    got = texts.from_text(words(25), word_tokenizer(), 3, 8, "words")
    np.testing.assert_array_equal(got.ids.ravel(), 2 + np.arange(24))
    assert (got.ids.shape, got.ids.dtype, got.corpus) == ((3, 8), np.int64, "words")


def test_a_bos_that_the_tokenizer_adds_starts_every_segment_once():
    tokenizer = word_tokenizer(adds_bos=True)
    for text in (words(25), "<s> " + words(25)):
        got = texts.from_text(text, tokenizer, 3, 8, "words")
        np.testing.assert_array_equal(got.ids[:, 0], 1)
        np.testing.assert_array_equal(got.ids[:, 1:].ravel(), 2 + np.arange(21))


def test_the_hash_is_that_of_the_ids_alone():
    ids = np.arange(6).reshape(2, 3)
    expected = hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest()
    for stored in (ids, ids.astype(np.int32), np.asfortranarray(ids)):
        assert texts.from_tokens(stored, 10, None, None).sha256 == expected
    assert texts.from_tokens(ids + 1, 10, None, None).sha256 != expected


@pytest.mark.parametrize("text", ["", "   \n\t\n"])
def test_empty_text(tmp_path, text):
    path = tmp_path / "empty.txt"
    path.write_text(text)
    assert refusal(texts.segments_for, Stub(), text=path) == "empty.txt is empty: give some text."


def test_text_shorter_than_a_segment(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text(words(7))
    assert refusal(texts.segments_for, Stub(), text=path, length=8) == (
        "short.txt has 7 tokens, fewer than one segment of 8: give more text or a shorter --length."
    )
    assert texts.segments_for(Stub(), text=path, length=7).ids.shape == (1, 7)


def test_a_bos_counts_within_the_length(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text(words(7))
    stub = Stub(tokenizer=word_tokenizer(adds_bos=True))
    assert texts.segments_for(stub, text=path, length=8).ids.shape == (1, 8)
    sentence = refusal(texts.segments_for, stub, text=path, length=1, kind=UsageError)
    assert sentence == "--length 1 leaves no room for text after the BOS token: use 2 or more."


def test_text_that_is_not_utf8(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes("déjà vu".encode("latin-1"))
    sentence = f"{path} is not UTF-8 text (byte 1): convert it, or pass ids with --tokens."
    assert refusal(texts.segments_for, Stub(), text=path) == sentence


@pytest.mark.parametrize("name", ["missing.txt", "."])
def test_text_that_cannot_be_read(tmp_path, name):
    sentence = refusal(texts.segments_for, Stub(), text=tmp_path / name)
    reason = "Is a directory" if name == "." else "No such file or directory"
    assert sentence == f"cannot read the text {tmp_path / name} ({reason}): check the path."


def test_the_built_in_text_is_long_and_the_default():
    assert len(texts.built_in()) > 300_000
    got = texts.segments_for(Stub())
    assert got.ids.shape == (16, 64) and got.corpus == "Python language reference"
    assert texts.segments_for(Stub(claimed_length=4096)).ids.shape == (16, 1024)
    assert texts.segments_for(Stub(claimed_length=0)).ids.shape == (16, 1024)


def test_text_without_a_tokenizer():
    sentence = "stub has no tokenizer: pass token ids with --tokens FILE.npy."
    assert refusal(texts.segments_for, Stub(tokenizer=None)) == sentence


def test_the_tokenizer_does_not_complain_about_long_text(capfd):
    tokenizer = word_tokenizer()
    tokenizer.model_max_length = 16
    texts.from_text(words(100), tokenizer, 2, 8, "words")
    assert capfd.readouterr().err == ""


# --- data sets -------------------------------------------------------------------------------------------------------


class Table(dict):
    column_names = property(lambda self: list(self))


def fake_datasets(monkeypatch, load):
    library = types.SimpleNamespace(load_dataset=load, config=types.SimpleNamespace(HF_HUB_OFFLINE=False))
    monkeypatch.setitem(sys.modules, "datasets", library)
    monkeypatch.setattr(texts, "ask_hub", lambda *arguments, **options: None)


def test_a_data_set_is_read_by_name(monkeypatch):
    asked = []

    def load(*arguments, **options):
        asked.append((arguments, options))
        return Table(text=[words(30), "", words(10)])

    fake_datasets(monkeypatch, load)
    got = texts.segments_for(Stub(), dataset="wikitext-103", segments=5, length=8)
    assert got.ids.shape == (5, 8) and got.corpus == "wikitext-103"
    assert asked == [(("Salesforce/wikitext", "wikitext-103-raw-v1"), {"split": "test"})]


def test_a_data_set_that_cannot_be_loaded(monkeypatch):
    def load(*arguments, **options):
        raise ConnectionError("Couldn't reach the hub\nsecond line")

    fake_datasets(monkeypatch, load)
    assert refusal(texts.segments_for, Stub(), dataset="someone/books") == (
        "cannot load data set 'someone/books' (someone/books, split test; Couldn't reach the hub second line): "
        "check the name and the network, or read a file with --text."
    )


def test_no_network_is_said_at_once(no_network, tmp_path, monkeypatch, capfd):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    start = time.perf_counter()
    sentence = refusal(texts.segments_for, Stub(), dataset="pg19")
    assert time.perf_counter() - start < 8, "the datasets library would try for half a minute"
    assert sentence.startswith("cannot load data set 'pg19' (emozilla/pg19-test, split test; ")
    assert sentence.endswith("): check the name and the network, or read a file with --text.")
    assert capfd.readouterr().err == ""
    assert not datasets.config.HF_HUB_OFFLINE


def test_a_data_set_without_text(monkeypatch):
    fake_datasets(monkeypatch, lambda *arguments, **options: Table(label=[1], image=[2]))
    sentence = refusal(texts.segments_for, Stub(), dataset="someone/pictures")
    assert sentence == "data set 'someone/pictures' has no column 'text' (only label, image): choose one that has."


def test_the_datasets_library_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    sentence = "--dataset needs the datasets library: pip install 'rope-probe[datasets]'."
    assert refusal(texts.segments_for, Stub(), dataset="pg19") == sentence


# --- token ids -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint16])
def test_a_token_file(tmp_path, kind):
    ids = np.arange(24).reshape(3, 8).astype(kind)
    np.save(tmp_path / "ids.npy", ids)
    got = texts.segments_for(Stub(), tokens=tmp_path / "ids.npy", segments=2, length=5)
    np.testing.assert_array_equal(got.ids, ids[:2, :5])
    assert got.corpus == "ids.npy" and got.ids.dtype == np.int64


def test_arrays_lists_and_tensors_are_the_same():
    ids = [[1, 2, 3], [4, 5, 6]]
    for given in (ids, np.array(ids), torch.tensor(ids)):
        np.testing.assert_array_equal(texts.from_tokens(given, 10, None, None).ids, ids)


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros(8, int), "shape [8] and type int64"),
        (np.zeros((2, 3, 4), int), "shape [2, 3, 4] and type int64"),
        (np.zeros((0, 8), int), "shape [0, 8] and type int64"),
        (np.zeros((4, 0), int), "shape [4, 0] and type int64"),
        (np.zeros((2, 8)), "shape [2, 8] and type float64"),
        (np.zeros((2, 8), bool), "shape [2, 8] and type bool"),
        (np.full((2, 8), "w5"), "shape [2, 8] and type <U2"),
        (np.array(7), "shape [] and type int64"),
    ],
)
def test_arrays_that_are_no_segments(tmp_path, array, words):
    np.save(tmp_path / "ids.npy", array)
    for given in (array, tmp_path / "ids.npy"):
        sentence = refusal(texts.segments_for, Stub(), tokens=given)
        assert sentence == f"the tokens have {words}: give integers of shape [segments, length]."


def test_ragged_lists():
    assert "not a rectangular array" in refusal(texts.segments_for, Stub(), tokens=[[1, 2, 3], [4, 5]])


class Canary:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


@pytest.mark.parametrize("how", ["object array", "pickle"])
def test_a_token_file_is_never_unpickled(tmp_path, how):
    path, canary = tmp_path / "ids.npy", tmp_path / "canary"
    if how == "pickle":
        import pickle

        path.write_bytes(pickle.dumps(Canary(canary)))
    else:
        np.save(path, np.array([[Canary(canary)]], dtype=object), allow_pickle=True)
    canary.unlink(missing_ok=True)
    sentence = refusal(texts.segments_for, Stub(), tokens=path)
    assert sentence.startswith(f"{path} is not a .npy array of integers (")
    assert sentence.endswith("write it with numpy.save.")
    assert not canary.exists()


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"1 2 3\n4 5 6\n"])
def test_a_token_file_that_is_no_array(tmp_path, content):
    path = tmp_path / "ids.npy"
    path.write_bytes(content)
    assert refusal(texts.segments_for, Stub(), tokens=path).startswith(f"{path} is not a .npy array of integers (")


def test_a_token_file_cut_short(tmp_path):
    path = tmp_path / "ids.npy"
    np.save(path, np.zeros((4, 100), int))
    path.write_bytes(path.read_bytes()[:-8])
    assert refusal(texts.segments_for, Stub(), tokens=path).startswith(f"{path} is not a .npy array of integers (")


def test_a_token_file_of_several_arrays(tmp_path):
    np.savez(tmp_path / "ids.npz", a=np.zeros((2, 3), int))
    assert "holds several arrays (.npz)" in refusal(texts.segments_for, Stub(), tokens=tmp_path / "ids.npz")


def test_a_token_file_that_is_not_there(tmp_path):
    sentence = f"there is no token file {tmp_path / 'ids.npy'}: check the path."
    assert refusal(texts.segments_for, Stub(), tokens=tmp_path / "ids.npy") == sentence


@pytest.mark.parametrize("bad", [VOCABULARY, 10**6, -1, -100])
def test_ids_outside_the_vocabulary(bad):
    sentence = refusal(texts.segments_for, Stub(), tokens=[[3, 4], [5, bad]])
    assert sentence == f"token id {bad} is outside the model's vocabulary of 97: was another tokenizer used?"
    assert texts.segments_for(Stub(), tokens=[[0, VOCABULARY - 1]]).ids.shape == (1, 2)


def test_a_length_beyond_the_token_file():
    assert refusal(texts.segments_for, Stub(), tokens=[[1, 2, 3]], length=4) == (
        "the tokens have 3 per segment, fewer than --length 4: give longer segments or a shorter --length."
    )


# --- arguments and warnings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", [texts.check_sources, lambda **given: texts.segments_for(Stub(), **given)])
def test_arguments_are_checked_without_a_model(tmp_path, check):
    assert refusal(check, text="a", tokens="b", kind=UsageError) == (
        "--text and --tokens were both given: choose one source."
    )
    assert "--text and --dataset were both given" in refusal(check, text="a", dataset="b", kind=UsageError)
    assert refusal(check, segments=0, kind=UsageError) == "--segments is 0: give a positive number."
    assert refusal(check, length=-3, kind=UsageError) == "--length is -3: give a positive number."
    assert "cannot read the text" in refusal(check, text=tmp_path / "missing")
    assert "there is no token file" in refusal(check, tokens=tmp_path / "missing")


def test_fewer_segments_than_asked_for_are_announced(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(words(30))
    with pytest.warns(ProbeWarning, match=r"^text.txt holds 3 of the 5 segments of 8 tokens asked for\.$"):
        assert texts.segments_for(Stub(), text=path, segments=5, length=8).ids.shape == (3, 8)
    with pytest.warns(ProbeWarning, match="token ids holds 1 of the 2 segments of 3 tokens asked for"):
        texts.segments_for(Stub(), tokens=[[1, 2, 3]], segments=2)
    assert texts.segments_for(Stub(), text=path, length=8).ids.shape == (3, 8)  # sixteen are a wish, not an order


def test_segments_beyond_the_trained_length_are_announced():
    sentence = (
        "segments of 65 tokens are longer than the 64 the model was made for: positions from 64 on were never trained."
    )
    with pytest.warns(ProbeWarning) as caught:
        texts.segments_for(Stub(), tokens=np.ones((2, 65), int))
    assert [str(warning.message) for warning in caught] == [sentence]
    with pytest.warns(ProbeWarning, match="positions from 64 on were never trained"):
        texts.segments_for(Stub(), length=100)
    texts.segments_for(Stub(), length=64)
    texts.segments_for(Stub(claimed_length=0), length=100)
