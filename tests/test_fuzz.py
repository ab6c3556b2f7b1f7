"""Thousands of broken files and strange options: exit code 0, 1 or 2, one sentence, no traceback, bounded time and memory."""

import contextlib
import io
import json
import resource
import shutil
import sys
import time
import warnings
import zlib
from collections import Counter

import h5py
import numpy as np
import pytest
from conftest import VOCABULARY
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

SMALL, LARGE = 25, 550  # cases of each of the four kinds
SECONDS, KILOBYTES = 20, 1_500_000  # processor time of a case, memory that all cases together may add

pytestmark = pytest.mark.usefixtures("one_thread", "no_network")


def invoke(*arguments) -> tuple[int, str, str]:
    """Run `rope-probe …` in this process: exit code, standard output, standard error."""
    from rope_probe import cli

    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["rope-probe", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            code = cli.main()
    except SystemExit as stop:
        code = stop.code
    finally:
        sys.argv = before
    return int(code or 0), out.getvalue(), err.getvalue()


def judge(*arguments) -> int:
    """Run a case and hold it against the contract; its exit code."""
    start = time.process_time()
    code, out, err = invoke(*arguments)
    assert time.process_time() - start < SECONDS, arguments
    assert code in (0, 1, 2), (arguments, code)
    assert "Traceback" not in out + err, (arguments, err)
    if code == 1 and not (arguments[0] == "check" and not err):  # a check that failed is a finding, on standard output
        said = [line for line in err.splitlines() if not line.startswith("warning: ")]
        assert len(said) == 1 and said[0].startswith("rope-probe: "), (arguments, err)
        assert not said[0].startswith("rope-probe: unexpected ") and len(said[0]) < 2000, (arguments, err)
    elif code == 2:
        assert err, arguments
    elif "--json" in arguments:
        json.loads(out)
    return code


def hunt(kind: str, cases: st.SearchStrategy, run, count: int) -> Counter:
    """Run `count` cases; how often each exit code was seen."""
    codes: Counter = Counter()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases)
    def each(case):
        codes[run(case)] += 1

    each()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < KILOBYTES, f"{kind}: {grown:,} kB more"
    print(
        f"{kind:14} {sum(codes.values()):5} cases   " + "   ".join(f"exit {c}: {n}" for c, n in sorted(codes.items()))
    )
    return codes


# -- values ------------------------------------------------------------------------------------------

NUMBERS = st.one_of(
    st.integers(-3, 200),
    st.sampled_from([0, -1, 10**5, 10**6, 10**9, 2**31, 2**63, 10**12, 10**30, 10**400]),
    st.floats(),
    st.sampled_from([1e-300, 1e300, 0.5, 1e4, 5e5]),
)
TEXTS = st.one_of(
    st.text(max_size=8), st.sampled_from(["yarn", "linear", "default", "x" * 3000, "../..", "\x00", "-1"])
)
PLAIN = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
VALUES = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=6
)


# -- configurations ----------------------------------------------------------------------------------

BASIS = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 1e4,
}
FAMILIES = [
    "llama",
    "gemma3_text",
    "qwen3",
    "phi3",
    "gptj",
    "gpt_neox",
    "mistral",
    "deepseek_v3",
    "gpt2",
    "bert",
    "nonsense",
]
ROPE_KEYS = ["rope_type", "type", "factor", "rope_theta", "original_max_position_embeddings", "low_freq_factor"]
ROPE_KEYS += [
    "high_freq_factor",
    "short_factor",
    "long_factor",
    "partial_rotary_factor",
    "attention_factor",
    "beta_fast",
]
TYPES = ["default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional", "su", "mrope"]
ROPES = st.dictionaries(
    st.sampled_from(ROPE_KEYS),
    st.one_of(st.sampled_from(TYPES), NUMBERS, st.lists(st.floats(0.5, 9), min_size=8, max_size=8), VALUES),
    max_size=5,
)
MORE_KEYS = [
    "layer_types",
    "sliding_window",
    "text_config",
    "auto_map",
    "architectures",
    "dtype",
    "quantization_config",
]
CHANGES = st.dictionaries(st.sampled_from([*BASIS, *MORE_KEYS]), VALUES, max_size=3)
CONFIGS = st.one_of(
    st.tuples(
        st.sampled_from(FAMILIES), CHANGES, st.none() | ROPES, st.sampled_from(["rope_scaling", "rope_parameters"])
    ),
    st.binary(max_size=60),
)


def spell(case) -> bytes:
    """config.json of a case."""
    if isinstance(case, bytes):
        return case
    family, changes, rope, key = case
    config = BASIS | {"model_type": family} | changes | ({} if rope is None else {key: rope})
    return json.dumps(config).encode("utf-8", "surrogatepass")


@pytest.fixture
def configs(tiny):
    def run(case) -> int:
        (tiny / "config.json").write_bytes(spell(case))
        if zlib.crc32(repr(case).encode("utf-8", "replace")) % 4:
            return judge("inspect", tiny / "config.json", "--json")
        return judge("bands", tiny, "--tokens", tiny / "ids.npy", "-o", tiny / "a.nc", "--json")

    np.save(tiny / "ids.npy", np.full((1, 8), 5))
    return CONFIGS, run


# -- token files -------------------------------------------------------------------------------------

DESCRIPTIONS = ["<i8", ">i4", "<u8", "|u1", "<f8", "|O", "|b1", "<U4", "<c16", "|V8", "<M8[s]", "nonsense", "", "<i99"]
SHAPES = st.one_of(
    st.lists(st.sampled_from([0, 1, 2, 8, -1, 10**6, 10**12, 2**63, 10**30]), max_size=4).map(lambda x: str(tuple(x))),
    st.sampled_from(["", "3", "None", "((1,),)", "'a'", "(1.5, 2)", "(True, 2)", "__import__('os')", "(" * 500]),
)
HEADERS = st.tuples(st.sampled_from(DESCRIPTIONS), SHAPES, st.binary(max_size=128))
ARRAYS = st.tuples(
    st.sampled_from(["i1", "u2", "i4", "u8", "f4", "?", "O", "S3"]), st.lists(st.integers(0, 9), max_size=3), NUMBERS
)
TOKENS = st.one_of(HEADERS, ARRAYS, st.binary(max_size=200))


@pytest.fixture
def token_files(tiny):
    path = tiny / "ids.npy"

    def write(case) -> None:
        if isinstance(case, bytes):
            path.write_bytes(case)
        elif isinstance(case[1], str):
            text = f"{{'descr': {case[0]!r}, 'fortran_order': False, 'shape': {case[1]}, }}".encode()
            head = text.ljust(118) + b"\n"
            path.write_bytes(b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + case[2])
        else:
            kind, shape, value = case
            array = np.zeros(shape, kind)
            with contextlib.suppress(ValueError, OverflowError, TypeError):
                array.fill(value)
            np.save(path, array, allow_pickle=True)

    def run(case) -> int:
        write(case)
        return judge("bands", tiny, "--tokens", path, "--layers", "0", "-o", tiny / "a.nc", "--json")

    return TOKENS, run


# -- result files ------------------------------------------------------------------------------------

SPOTS = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=6)
DAMAGE = st.one_of(
    st.tuples(st.just("bytes"), SPOTS),
    st.tuples(st.just("cut"), st.floats(0, 1)),
    st.tuples(st.just("attribute"), st.integers(0, 99), PLAIN),
    st.tuples(st.just("drop"), st.integers(0, 99)),
    st.tuples(st.just("value"), st.integers(0, 99), NUMBERS),
    st.tuples(st.just("kind"), st.integers(0, 99), st.sampled_from(["S4", "i1", "f2", "c16", "text"])),
    st.tuples(st.just("shape"), st.integers(0, 99), st.lists(st.integers(0, 5), max_size=4)),
    st.tuples(st.just("analysis"), st.sampled_from(["spectrum", "similarity", "heads", "truncate", "trajectory", "x"])),
)


def damage(path, case) -> None:
    """Do to a result file what the case says."""
    what, *how = case
    content = bytearray(path.read_bytes())
    if what == "bytes":
        for place, value in how[0]:
            content[int(place * len(content))] = value
        path.write_bytes(content)
    elif what == "cut":
        path.write_bytes(content[: int(how[0] * len(content))])
    else:
        with h5py.File(path, "a") as file, contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError):
            _edit(file, what, how)


def _edit(file, what: str, how: list) -> None:
    if what in ("attribute", "analysis"):
        names = sorted(file.attrs)
        name = "analysis" if what == "analysis" else names[how[0] % len(names)]
        value = how[-1]
        if value is None:
            del file.attrs[name]
        else:
            file.attrs[name] = value
        return
    name = sorted(file)[how[0] % len(file)]
    if what == "value":
        file[name][...] = how[1]
        return
    old, shape = file[name], file[name].shape
    kind = {"text": h5py.string_dtype()}.get(how[1], how[1]) if what == "kind" else old.dtype
    shape = tuple(how[1]) if what == "shape" else shape
    del file[name]
    if what != "drop":
        file.create_dataset(name, shape, kind)


@pytest.fixture
def result_files(tiny, tmp_path):
    ids, whole, path = tmp_path / "ids.npy", tmp_path / "whole.nc", tmp_path / "a.nc"
    np.save(ids, np.random.default_rng(0).integers(2, VOCABULARY, (3, 16)))
    assert judge("bands", tiny, "--tokens", ids, "-o", whole) == 0

    def run(case) -> int:
        shutil.copy(whole, path)
        damage(path, case)
        commands = (("show", path, "--json"), ("show", path), ("compare", whole, path), ("bound", "--weights", path))
        return judge(*commands[zlib.crc32(repr(case).encode("utf-8", "replace")) % len(commands)])

    return DAMAGE, run


# -- options -----------------------------------------------------------------------------------------

OPTIONS = {
    "bands": [
        "--layers",
        "--formation",
        "--rope",
        "--dtype",
        "--device",
        "--segments",
        "--length",
        "--batch",
        "--figure",
    ],
    "spectrum": ["--inject", "--ablate", "--depth", "--distances", "--layers", "--length"],
    "similarity": ["--queries", "--sink", "--seed", "--layers", "--batch"],
    "heads": ["--map", "--positional", "--induction", "--sink", "--formation", "--layers"],
    "truncate": ["--keep", "--floor", "--knockout", "--pairs", "--layer-type", "--layers"],
    "inspect": ["--length", "--rope", "--figure"],
    "bound": ["--length", "--base", "--head-dim", "--rotary-dim", "--kilo", "--limit"],
    "check": ["--length", "--rope", "--dtype", "--device"],
}
WORDS = ["0-3", "1,2", "all", "0.5", "1e4", "nan", "inf", "-1", "", " ", "99999999999999999999", "base=1e4", "base=0"]
WORDS += [
    "type=yarn,factor=4",
    "type=linear,factor=nan",
    "type=longrope",
    "length=1e99",
    "unrotate",
    "remove",
    "mlp",
    "norm",
]
WORDS += [
    "bfloat16",
    "meta",
    "cuda:7",
    "32k",
    "1M",
    "1e999",
    "0.1",
    "full_attention",
    "../a.png",
    "a.gif",
    "0",
    "1",
    "2",
    "8",
]
ARGUMENTS = st.sampled_from(sorted(OPTIONS)).flatmap(
    lambda command: st.tuples(
        st.just(command),
        st.lists(
            st.tuples(
                st.sampled_from(OPTIONS[command]),
                st.one_of(st.sampled_from(WORDS), TEXTS, NUMBERS.map(lambda x: str(x)[:60])),
            ),
            max_size=3,
        ),
    )
)


@pytest.fixture
def options(tiny, tmp_path, monkeypatch):
    ids = tmp_path / "ids.npy"
    np.save(ids, np.random.default_rng(0).integers(2, VOCABULARY, (2, 40)))
    monkeypatch.chdir(tmp_path)

    def run(case) -> int:
        command, given_options = case
        words = [word for option in given_options for word in option]
        if command == "bound":
            return judge("bound", *words, "--json")
        if command == "inspect":
            return judge("inspect", tiny, *words, "--json")
        if command == "check":
            words.append("--quick")
        else:
            words += ["-o", tmp_path / "a.nc"]
        return judge(command, tiny, "--tokens", ids, *words, "--json")

    return ARGUMENTS, run


KINDS = ["configs", "token_files", "result_files", "options"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_of_each_kind(kind, request):
    hunt(kind, *request.getfixturevalue(kind), SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_very_many_of_each_kind(kind, request, capsys):
    """Print with `pytest -s`: how many cases, and the exit codes seen."""
    with capsys.disabled():
        print()
        codes = hunt(kind, *request.getfixturevalue(kind), LARGE)
    assert sum(codes.values()) >= 0.9 * LARGE
