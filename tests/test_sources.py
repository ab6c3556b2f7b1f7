"""Hub ids: every answer of the hub, and of the network on the way to it, is one sentence; a cached copy still opens."""

import shutil
import time

import huggingface_hub
import pytest
from huggingface_hub import errors

import rope_probe as rp
from rope_probe.checkpoints import load_config

NAME = "someone/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def refusal(name=NAME, **options) -> str:
    with pytest.raises(rp.ProbeError) as caught:
        rp.open(name, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(autouse=True)
def hub_cache(tmp_path, monkeypatch):
    """An empty hub cache of the test's own."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def cached(hub_cache, tiny_folder):
    """The tiny checkpoint in the hub cache, as the hub library leaves it."""
    home = hub_cache / "models--someone--tiny"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text(COMMIT)
    return shutil.copytree(tiny_folder, home / "snapshots" / COMMIT)


def simulated(kind):
    """An error of the hub library, made without an HTTP response."""
    words = {"__init__": lambda self: None, "__str__": lambda self: "403 Client Error. (Request ID: Root=1)\nurl: …"}
    return type(kind.__name__, (kind,), words)()


@pytest.fixture
def answer(monkeypatch):
    """Let the hub answer the first question with an error."""

    def set_answer(kind):
        def ask(*args, **kwargs):
            raise simulated(kind)

        monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", ask)

    return set_answer


def test_no_network_is_said_at_once(no_network):
    start = time.perf_counter()
    sentence = refusal("nobody/nothing")
    assert time.perf_counter() - start < 8, "the hub library would try for half a minute"
    assert sentence == (
        "nobody/nothing is not in the local cache and the hub cannot be reached "
        "([Errno -2] Name or service not known): check the id and the network, or give a folder."
    )


def test_the_config_alone_is_not_waited_for_either(no_network):
    start = time.perf_counter()
    with pytest.raises(rp.ProbeError, match="the hub cannot be reached"):
        load_config("nobody/nothing")
    assert time.perf_counter() - start < 8


def test_offline_mode_is_named(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert refusal() == f"{NAME} is not in the local cache and HF_HUB_OFFLINE is set: unset it, or give a folder."


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (
            errors.GatedRepoError,
            f"{NAME} is gated: accept its terms at https://huggingface.co/{NAME}, "
            "then log in with `hf auth login` (or set HF_TOKEN).",
        ),
        (
            errors.RepositoryNotFoundError,
            f"{NAME} is not on the hub (or is private): check the spelling, or log in with `hf auth login`.",
        ),
        (errors.RevisionNotFoundError, f"{NAME} has no such revision on the hub: check --revision."),
        (
            errors.RemoteEntryNotFoundError,
            f"{NAME} has no config.json on the hub, so it is no transformers checkpoint: check the id.",
        ),
        (
            errors.HfHubHTTPError,
            f"the hub does not hand out {NAME} (403 Client Error. (Request ID: Root=1) url: …): "
            "try again later, or give a folder.",
        ),
    ],
)
def test_answers_of_the_hub(answer, kind, sentence):
    answer(kind)
    assert refusal() == sentence


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (errors.GatedRepoError, "is gated: accept its terms"),
        (errors.RepositoryNotFoundError, "is not on the hub"),
        (errors.RevisionNotFoundError, "has no such revision"),
    ],
)
def test_the_same_answers_from_within_transformers(monkeypatch, kind, words):
    """Weights may be gated where the config is not; transformers wraps what the hub said."""

    def load(*args, **kwargs):
        raise OSError("You are trying to access something.\nMake sure you can.") from simulated(kind)

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda *args, **kwargs: None)
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", load)
    assert words in refusal()


def test_a_cached_checkpoint_opens_without_network(cached, no_network):
    start = time.perf_counter()
    ckpt = rp.open(NAME)
    assert time.perf_counter() - start < 8
    assert (ckpt.name, ckpt.provenance) == (NAME, {"source": "hub", "revision": COMMIT})
    assert ckpt.tokenizer("w5")["input_ids"] == [5]
    assert rp.bands(ckpt, tokens=[[2, 3, 4]]).attrs["model"] == NAME


def test_a_cached_checkpoint_opens_in_offline_mode_and_by_commit(cached, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert rp.open(NAME, revision=COMMIT).provenance["revision"] == COMMIT
    assert "HF_HUB_OFFLINE is set" in refusal(revision="other")


def test_a_cached_checkpoint_opens_when_its_gate_has_closed(cached, answer):
    answer(errors.GatedRepoError)
    assert rp.open(NAME).name == NAME


def test_half_a_download_is_named(cached, no_network):
    (cached / "model.safetensors").unlink()
    start = time.perf_counter()
    assert refusal() == (
        f"{cached} has no model.safetensors: incomplete download, open it again with the hub within reach."
    )
    assert time.perf_counter() - start < 8


def test_an_id_that_cannot_be_one(no_network):
    assert refusal("a b") == (
        "'a b' is neither a path here nor a possible hub id: give a folder, a .gguf file or owner/name."
    )
