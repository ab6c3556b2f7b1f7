"""Text, data set or token file -> segments of token ids."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .errors import ProbeError, ProbeWarning, UsageError, first_words
from .limits import check_array
from .sources import ask_hub

# name -> (hub id, configuration, split, text column); parquet data sets only, scripts no longer load
DATASETS = {
    "wikitext-103": ("Salesforce/wikitext", "wikitext-103-raw-v1", "test", "text"),
    "pg19": ("emozilla/pg19-test", None, "test", "text"),
}


@dataclass(frozen=True)
class Segments:
    """Token ids to read.

    Attributes
    ----------
    ids : ndarray of int64, shape (segments, length)
    corpus : str
        Where they come from, for captions.
    """

    ids: np.ndarray
    corpus: str

    @property
    def sha256(self) -> str:
        """Hash of the ids as little-endian int64, row by row."""
        return hashlib.sha256(np.ascontiguousarray(self.ids, dtype="<i8").tobytes()).hexdigest()


def built_in() -> str:
    """English prose that every Python has: the language reference's help topics (about 115k tokens)."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[key] for key in sorted(topics))


@contextlib.contextmanager
def _cache_alone_if_unreachable(datasets, hub: str):
    """Where the hub cannot be reached, load from the cache at once instead of after half a minute of retries."""
    import huggingface_hub

    error = None if Path(hub).exists() else ask_hub(hub, "README.md", repo_type="dataset")
    settings = [huggingface_hub.constants, datasets.config]
    before = [module.HF_HUB_OFFLINE for module in settings]
    answered = error is None or isinstance(error, huggingface_hub.errors.HfHubHTTPError)
    try:
        for module, value in zip(settings, before, strict=True):
            module.HF_HUB_OFFLINE = value or not answered
        yield
    finally:
        for module, value in zip(settings, before, strict=True):
            module.HF_HUB_OFFLINE = value


def _dataset(name: str) -> str:
    try:
        import datasets
    except ImportError:
        raise ProbeError("--dataset needs the datasets library: pip install 'rope-probe[datasets]'.") from None
    hub, configuration, split, column = DATASETS.get(name, (name, None, "test", "text"))
    try:
        with _cache_alone_if_unreachable(datasets, hub):
            table = datasets.load_dataset(hub, configuration, split=split)
    except Exception as error:
        raise ProbeError(
            f"cannot load data set {name!r} ({hub}, split {split}; {first_words(error)}): "
            "check the name and the network, or read a file with --text."
        ) from error
    if column not in table.column_names:
        raise ProbeError(
            f"data set {name!r} has no column {column!r} (only {', '.join(table.column_names)}): choose one that has."
        )
    return "\n".join(table[column])


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ProbeError(
            f"{path} is not UTF-8 text (byte {error.start}): convert it, or pass ids with --tokens."
        ) from None
    except OSError as error:
        raise ProbeError(f"cannot read the text {path} ({error.strerror}): check the path.") from None


def _adds_bos(tokenizer) -> bool:
    if tokenizer.bos_token_id is None:
        return False
    return list(tokenizer("a")["input_ids"][:1]) == [tokenizer.bos_token_id]


def from_text(text: str, tokenizer, segments: int, length: int, corpus: str) -> Segments:
    """Contiguous, non-overlapping segments of one token stream.

    Where the tokenizer adds a BOS by itself, each segment starts with it and it counts within `length`.
    """
    if not text.strip():
        raise ProbeError(f"{corpus} is empty: give some text.")
    bos = [tokenizer.bos_token_id] if _adds_bos(tokenizer) else []
    stream = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if bos and stream[:1] == bos:  # the text itself begins with BOS: never two of them
        stream = stream[1:]
    size = length - len(bos)
    if size < 1:
        raise UsageError(f"--length {length} leaves no room for text after the BOS token: use 2 or more.")
    available = len(stream) // size
    if available < 1:
        raise ProbeError(
            f"{corpus} has {len(stream)} tokens, fewer than one segment of {length}: give more text or a shorter --length."
        )
    count = min(segments, available)
    ids = np.asarray(stream[: count * size], dtype=np.int64).reshape(count, size)
    if bos:
        ids = np.concatenate([np.full((count, 1), bos[0], dtype=np.int64), ids], axis=1)
    return Segments(ids, corpus)


def token_array(tokens) -> np.ndarray:
    """An integer array [segments, length] from an array, nested lists, a tensor or a .npy file (not read yet)."""
    if isinstance(tokens, (str, Path)):
        path = tokens
        try:
            tokens = np.load(path, allow_pickle=False, mmap_mode="r")
        except FileNotFoundError:
            raise ProbeError(f"there is no token file {path}: check the path.") from None
        except Exception as error:  # a header is a Python expression, and fails in as many ways
            raise ProbeError(
                f"{path} is not a .npy array of integers ({first_words(error)}): write it with numpy.save."
            ) from None
        if not isinstance(tokens, np.ndarray):
            raise ProbeError(f"{path} holds several arrays (.npz): write the one of token ids with numpy.save.")
    if hasattr(tokens, "detach"):
        tokens = tokens.detach().cpu().numpy()
    if not isinstance(tokens, np.ndarray):
        try:
            tokens = np.asarray(tokens)
        except ValueError:
            raise ProbeError(
                "the tokens are not a rectangular array: give integers of shape [segments, length]."
            ) from None
    if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer) or 0 in tokens.shape:
        raise ProbeError(
            f"the tokens have shape {list(tokens.shape)} and type {tokens.dtype}: give integers of shape [segments, length]."
        )
    return tokens


def from_tokens(tokens, vocabulary: int, segments: int | None, length: int | None) -> Segments:
    """Segments from an integer array [segments, length] or the .npy file that holds one."""
    corpus = Path(tokens).name if isinstance(tokens, (str, Path)) else "token ids"
    chosen = token_array(tokens)[:segments, :length]
    check_array(chosen.shape, corpus)
    ids = np.asarray(chosen, dtype=np.int64)
    if length is not None and ids.shape[1] < length:
        raise ProbeError(
            f"the tokens have {ids.shape[1]} per segment, fewer than --length {length}: "
            "give longer segments or a shorter --length."
        )
    if ids.min() < 0 or ids.max() >= vocabulary:
        bad = int(ids.max() if ids.max() >= vocabulary else ids.min())
        raise ProbeError(
            f"token id {bad} is outside the model's vocabulary of {vocabulary}: was another tokenizer used?"
        )
    return Segments(ids, corpus)


def check_sources(*, text=None, dataset=None, tokens=None, segments=None, length=None, batch=None) -> None:
    """Refuse what cannot be read, before a model is opened for it.

    Raises
    ------
    UsageError
        Two sources, or numbers that are not positive.
    ProbeError
        The text or the token file is not there, or is not one.
    """
    given = [name for name, value in (("text", text), ("dataset", dataset), ("tokens", tokens)) if value is not None]
    if len(given) > 1:
        raise UsageError(f"--{given[0]} and --{given[1]} were both given: choose one source.")
    for name, value in (("segments", segments), ("length", length), ("batch", batch)):
        if value is not None and value < 1:
            raise UsageError(f"--{name} is {value}: give a positive number.")
    if text is not None:
        _read_text(text)
    if tokens is not None:
        token_array(tokens)


def segments_for(
    ckpt, *, text=None, dataset=None, tokens=None, segments: int | None = None, length: int | None = None
) -> Segments:
    """The segments a probe reads: `tokens`, else `dataset`, else `text` (a file), else the built-in text.

    Defaults: 16 segments of 1024 tokens, shorter where the model's own limit is.

    Warns
    -----
    ProbeWarning
        There is less to read than was asked for, or more in a segment than the model was trained for.
    """
    check_sources(text=text, dataset=dataset, tokens=tokens, segments=segments, length=length)
    limit = ckpt.claimed_length
    if tokens is not None:
        chosen = from_tokens(tokens, ckpt.vocabulary, segments, length)
    else:
        if ckpt.tokenizer is None:
            raise ProbeError(f"{ckpt.name} has no tokenizer: pass token ids with --tokens FILE.npy.")
        if dataset is not None:
            source, corpus = _dataset(dataset), dataset
        elif text is not None:
            source, corpus = _read_text(text), Path(text).name
        else:
            source, corpus = built_in(), "Python language reference"
        size = length or min(1024, limit or 1024)
        chosen = from_text(source, ckpt.tokenizer, segments or 16, size, corpus)
    count, size = chosen.ids.shape
    if segments is not None and count < segments:
        warnings.warn(
            f"{chosen.corpus} holds {count} of the {segments} segments of {size} tokens asked for.",
            ProbeWarning,
            stacklevel=2,
        )
    if limit and size > limit:
        warnings.warn(
            f"segments of {size} tokens are longer than the {limit} the model was made for: "
            f"positions from {limit} on were never trained.",
            ProbeWarning,
            stacklevel=2,
        )
    return chosen
