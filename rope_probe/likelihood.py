"""Negative log likelihood of segments, without ever holding the logits of a whole segment.

The decoder runs once; the model's own head (bias, scale, soft-cap: each family has its own) is then given the
hidden states a chunk of tokens at a time, so that a vocabulary of 262,144 at 4096 tokens costs no memory to speak of.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from .errors import ProbeError
from .modules import forget_lengths, remember_frequencies, text_decoder
from .tap import input_device

_LOGITS = 1 << 24  # logits held at a time, 64 MB in float32


def _body(model):
    """What the head is put on: the part of a causal LM that holds its text decoder."""
    decoder = text_decoder(model)
    body = next((child for child in model.children() if any(m is decoder for m in child.modules())), None)
    if body is None:
        raise ProbeError(
            f"{type(model).__name__} has no head, so it gives no likelihood: open a causal language model."
        )
    return body


@contextlib.contextmanager
def _head(model, output) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """The model's own way from hidden states to logits: its forward, with the body's output put in place.

    Parameters
    ----------
    output : ModelOutput
        What the body of the model returned; its last hidden state is replaced.
    """
    body = _body(model)
    own = vars(body).get("forward")  # accelerate puts one here
    ids = torch.zeros(1, 1, dtype=torch.long, device=input_device(body))

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        output.last_hidden_state = hidden
        return model(input_ids=ids, use_cache=False).logits

    body.forward = lambda *args, **kwargs: output
    try:
        yield logits
    finally:
        del body.forward
        if own is not None:
            body.forward = own


def _read(model, ids: torch.Tensor):
    """What the body of a causal LM puts out for some segments, as if it had read nothing before."""
    body = _body(model)
    forget_lengths(body)
    return body(input_ids=ids, use_cache=False)


def token_nll(model, ids: torch.Tensor, chunk: int | None = None) -> torch.Tensor:
    """Negative log likelihood of every token after the first, given those before it.

    Parameters
    ----------
    model : PreTrainedModel
        The causal LM with its head.
    ids : Tensor of int, shape (batch, token)
    chunk : int, optional
        Tokens per segment whose logits are held at a time.

    Returns
    -------
    Tensor of float32, shape (batch, token - 1)
        In nats; softmax in float32.
    """
    with torch.inference_mode():
        output = _read(model, ids)
        hidden = output.last_hidden_state[:, :-1]
        if chunk is None:
            chunk = max(1, _LOGITS // (len(ids) * _body(model).get_input_embeddings().weight.shape[0]))
        out = torch.empty(hidden.shape[:2])
        with _head(model, output) as logits:
            for start in range(0, hidden.shape[1], chunk):
                values = logits(hidden[:, start : start + chunk]).float()
                wanted = ids[:, start + 1 : start + 1 + chunk, None].to(values.device)
                out[:, start : start + chunk] = _lost(values, wanted).cpu()
    return out


def _lost(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Negative log softmax at the wanted ids; the logits are overwritten.

    `log_softmax` adds up a large vocabulary one by one and is off by 1e-5 then; `sum` adds in a cascade.
    """
    logits.sub_(logits.amax(-1, keepdim=True))
    at = logits.gather(-1, wanted)[..., 0]
    return logits.exp_().sum(-1).log() - at


def answer_scores(model, ids: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Likelihood of the last tokens of each sequence, and whether greedy decoding would write them.

    One forward pass over the whole sequence: as long as a greedy decoder has written the answer, what it reads is
    the answer, so it writes all of it exactly if each token of it is the most likely one after those before.

    Parameters
    ----------
    model : PreTrainedModel
        The causal LM with its head.
    ids : Tensor of int, shape (batch, token)
    count : int
        Tokens at the end that are scored.

    Returns
    -------
    (nll, likeliest) : Tensor of float32 and Tensor of bool, shape (batch, count)
        Negative log likelihood in nats, softmax in float32; whether the token is the most likely one.
    """
    with torch.inference_mode():
        output = _read(model, ids)
        hidden = output.last_hidden_state[:, -count - 1 : -1]
        with _head(model, output) as logits:
            values = logits(hidden).float()
        wanted = ids[:, -count:, None].to(values.device)
        likeliest = values.argmax(-1) == wanted[..., 0]
        return _lost(values, wanted).cpu(), likeliest.cpu()


def segment_nll(model, ids: torch.Tensor) -> torch.Tensor:
    """Mean negative log likelihood per token of each segment, summed in float64, shape (batch,).

    Raises
    ------
    ProbeError
        It is not finite.
    """
    mean = token_nll(model, ids).double().mean(-1)
    if not torch.isfinite(mean).all():
        raise ProbeError("the likelihood is not finite: use --dtype float32 or bfloat16, or check the weights.")
    return mean


@contextlib.contextmanager
def unchanged(model) -> Iterator[None]:
    """Put back what the rotary modules remember of the texts that are read inside (dynamic NTK, LongRoPE)."""
    put_back = remember_frequencies(_body(model))
    try:
        yield
    finally:
        put_back()
