"""Checkpoints made on the spot, and the command line run inside the test."""

import re
import shutil
import sys
import warnings
from dataclasses import dataclass

import numpy as np
import pytest
import torch

VOCABULARY = 97
WORDS = ["<unk>", "<s>"] + [f"w{i}" for i in range(2, VOCABULARY)]


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M, from the user's cache."""
    import rope_probe as rp

    return rp.open("demo:smollm2")


def tiny_config(**changes):
    from transformers import LlamaConfig

    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**values | changes)


def tiny_model(**changes):
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config(**changes)).eval()


def word_tokenizer(adds_bos: bool = False):
    """One token per word w2 … w96; everything else is unknown."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = WhitespaceSplit()
    if adds_bos:
        core.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", unk_token="<unk>")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A Llama of three layers with a tokenizer of words, saved; not to be changed (see `tiny`)."""
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    tiny_model().save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def tiny(tiny_folder, tmp_path):
    """A copy of the tiny checkpoint that the test may damage."""
    return shutil.copytree(tiny_folder, tmp_path / "tiny")


@pytest.fixture
def tokens(tmp_path):
    """A token file of 4 segments of 16 ids."""
    path = tmp_path / "tokens.npy"
    np.save(path, np.random.default_rng(0).integers(2, VOCABULARY, (4, 16)))
    return path


def edit_weights(folder, change):
    """Apply `change` to the tensors of a saved checkpoint."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


# options that make a run of each analysis go through all of its parts
COMMANDS = {
    "bands": ("--control",),
    "spectrum": ("--weights", "--inject", "2"),
    "similarity": ("--queries", "8"),
    "heads": ("--map", "1.2"),
    "extend": ("--base", "own,1e4", "--lengths", "16,48", "--samples", "0"),
    "truncate": ("--keep", "0.75,0.5,0", "--knockout", "unrotate", "--pairs", "1,2"),
}


def command_of(analysis, folder, tokens, output) -> list[str]:
    """Words of a command that reads one segment after the other."""
    source = ("--tokens", tokens, "--batch", "1", "-o", output)
    return [str(part) for part in (analysis, folder, *source, *COMMANDS[analysis])]


@dataclass(frozen=True)
class Run:
    """What a command left behind."""

    code: int
    out: str
    err: str

    def refused(self, *parts: str, code: int = 1) -> str:
        """One sentence on standard error and nothing on standard output; every part is in the sentence."""
        assert self.code == code, self
        assert self.out == ""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("rope-probe: ") and lines[0].endswith((".", "?"))
        assert "Traceback" not in self.err and "unexpected" not in self.err
        for part in parts:
            assert str(part) in self.err
        return lines[0]

    def misused(self, *parts: str) -> None:
        """What the option parser itself refuses: exit code 2, and the parts somewhere in its box."""
        assert (self.code, self.out) == (2, "")
        assert "Traceback" not in self.err
        words = " ".join(re.sub(r"[│╭╮╰╯─]", " ", self.err).split())
        for part in parts:
            assert part in words


@pytest.fixture
def run_cli(monkeypatch, capsys, tmp_path):
    """Run `rope-probe …` in this process, in an empty folder: run_cli("bands", folder, "--json") -> Run."""
    from rope_probe import cli

    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.delenv("ROPE_PROBE_DEBUG", raising=False)
    monkeypatch.setenv("TERMINAL_WIDTH", "200")

    def run(*arguments) -> Run:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["rope-probe", *map(str, arguments)])
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            try:
                code = cli.main()
            except SystemExit as stop:
                code = stop.code
        seen = capsys.readouterr()
        return Run(int(code or 0), seen.out, seen.err)

    return run


@pytest.fixture
def probe(run_cli, tiny_folder, tokens):
    """`rope-probe bands` of the tiny checkpoint on its token file, with other options."""

    def run(*options, model=tiny_folder, source=("--tokens", tokens)) -> Run:
        return run_cli("bands", model, *source, *options)

    return run


@pytest.fixture
def no_network(monkeypatch):
    """No name resolves, whatever machine the test runs on."""
    import socket

    def refuse(*args, **kwargs):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def no_opening(monkeypatch):
    """Fails a test that opens a model before it refuses its arguments."""
    from rope_probe import checkpoints

    def opened(*args, **kwargs):
        raise AssertionError("a model was opened")

    monkeypatch.setattr(checkpoints, "open_checkpoint", opened)


@pytest.fixture
def one_thread():
    """Tiny models are slower on several threads, by far on a machine that is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# results that `compare` is tested on, by analysis
COMPARED = {
    "bands": {},
    "spectrum": {},
    "similarity": {},
    "heads": {},
    "extend": {"base": ["own", 500.0], "lengths": [32, 64], "samples": 0},
    "truncate": {"keep": [1, 0.75, 0.5, 0], "knockout": ["remove"]},
}


def compared_ids(seed=0, segments=4, length=64, top=97):
    return np.random.default_rng(seed).integers(2, top, (segments, length))


def lines_of(ax):
    """label -> line, of the curves that have one."""
    found = {line.get_label(): line for line in ax.lines if not line.get_label().startswith("_")}
    return found | {bars.get_label(): bars.lines[0] for bars in ax.containers if hasattr(bars, "lines")}


@pytest.fixture(scope="session")
def compared_models(tmp_path_factory):
    """Two Llamas of other weights, and a Gemma 3 with two kinds of layers."""
    from families import NAMED
    from transformers import LlamaForCausalLM

    folder = tmp_path_factory.mktemp("compared_models")
    for seed, name in enumerate(("one", "two")):
        torch.manual_seed(seed)
        LlamaForCausalLM(tiny_config()).save_pretrained(folder / name)
    NAMED["Gemma 3 text"].build().save_pretrained(folder / "gemma")
    word_tokenizer().save_pretrained(folder / "gemma")
    return folder


@pytest.fixture(scope="session")
def compared(compared_models):
    """analysis -> results of the three models on the same ids."""
    import rope_probe as rp

    found = {}
    for analysis, options in COMPARED.items():
        run = getattr(rp, analysis)
        found[analysis] = [
            run(rp.open(compared_models / name), tokens=compared_ids(), **options) for name in ("one", "two", "gemma")
        ]
    found["trajectory"] = [
        rp.trajectory([compared_models / a, compared_models / b], tokens=compared_ids())
        for a, b in (("one", "two"), ("two", "one"))
    ]
    return found
