"""Text, data set or token file -> segments of token ids."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .errors import ProbeError

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


def _dataset(name: str) -> str:
    try:
        import datasets
    except ImportError:
        raise ProbeError("--dataset needs the datasets library: pip install 'rope-probe[datasets]'.") from None
    hub, configuration, split, column = DATASETS.get(name, (name, None, "test", "text"))
    try:
        table = datasets.load_dataset(hub, configuration, split=split)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ProbeError(f"cannot load data set {name!r} ({hub}, split {split}): {reason}") from error
    if column not in table.column_names:
        raise ProbeError(f"data set {name!r} has no column {column!r}; it has {', '.join(table.column_names)}.")
    return "\n".join(table[column])


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ProbeError(
            f"{path} is not UTF-8 text (byte {error.start}): convert it, or pass ids with --tokens."
        ) from None
    except OSError as error:
        raise ProbeError(f"cannot read {path}: {error.strerror}.") from None


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
    stream = tokenizer(text, add_special_tokens=False)["input_ids"]
    if bos and stream[:1] == bos:  # the text itself begins with BOS: never two of them
        stream = stream[1:]
    size = length - len(bos)
    if size < 1:
        raise ProbeError(f"--length {length} leaves no room for text after the BOS token: use 2 or more.")
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


def from_tokens(tokens, vocabulary: int, segments: int | None, length: int | None) -> Segments:
    """Segments from an integer array [segments, length] or the .npy file that holds one."""
    corpus = "token ids"
    if isinstance(tokens, (str, Path)):
        corpus = Path(tokens).name
        try:
            tokens = np.load(tokens, allow_pickle=False, mmap_mode="r")
        except FileNotFoundError:
            raise ProbeError(f"no token file at {tokens}.") from None
        except (ValueError, OSError, EOFError) as error:
            raise ProbeError(f"{tokens} is not a .npy array of integers ({str(error).splitlines()[0]}).") from None
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
    ids = np.asarray(tokens[:segments, :length], dtype=np.int64)
    if length is not None and ids.shape[1] < length:
        raise ProbeError(f"the tokens have {ids.shape[1]} per segment, fewer than --length {length}.")
    if ids.min() < 0 or ids.max() >= vocabulary:
        bad = int(ids.max() if ids.max() >= vocabulary else ids.min())
        raise ProbeError(
            f"token id {bad} is outside the model's vocabulary of {vocabulary}: was another tokenizer used?"
        )
    return Segments(ids, corpus)


def segments_for(
    ckpt, *, text=None, dataset=None, tokens=None, segments: int | None = None, length: int | None = None
) -> Segments:
    """The segments a probe reads: `tokens`, else `dataset`, else `text` (a file), else the built-in text.

    Defaults: 16 segments of 1024 tokens, shorter where the model's own limit is.
    """
    given = [name for name, value in (("text", text), ("dataset", dataset), ("tokens", tokens)) if value is not None]
    if len(given) > 1:
        raise ProbeError(f"--{given[0]} and --{given[1]} were both given: choose one source.")
    for name, value in (("segments", segments), ("length", length)):
        if value is not None and value < 1:
            raise ProbeError(f"--{name} is {value}: give a positive number.")
    if tokens is not None:
        return from_tokens(tokens, ckpt.vocabulary, segments, length)
    if ckpt.tokenizer is None:
        raise ProbeError(f"{ckpt.name} has no tokenizer: pass token ids with --tokens FILE.npy.")
    if dataset is not None:
        source, corpus = _dataset(dataset), dataset
    elif text is not None:
        source, corpus = _read_text(text), Path(text).name
    else:
        source, corpus = built_in(), "Python language reference"
    limit = ckpt.claimed_length or 1024
    return from_text(source, ckpt.tokenizer, segments or 16, length or min(1024, limit), corpus)
