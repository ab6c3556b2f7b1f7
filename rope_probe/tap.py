"""The one tap: see q, k and v of every layer as they enter attention, and change nothing.

A function registered with transformers' attention interface receives the rotated q with all heads
and k, v with their kv heads un-repeated.  It shows them to an observer and calls the attention the
model would have used.  Its mask function is registered with it: without one, transformers hands the
attention no mask and some models silently stop being causal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from .errors import ProbeError
from .modules import attention_modules, decoder_layers, forget_lengths, remember_frequencies


@dataclass
class Call:
    """What one attention layer was given.

    Attributes
    ----------
    layer : int
    q : Tensor, shape (batch, head, token, channel)
        After the rotation.
    k, v : Tensor, shape (batch, kv_head, token, channel)
    mask : Tensor or None
        The mask in the form of the model's own attention; None means plain causal.
    scaling : float
        Softmax scale.
    softcap : float or None
    sinks : Tensor or None, shape (head,)
        Sink logits.
    window : int or None
    hidden : Tensor or None, shape (batch, token, hidden)
        Residual stream entering the layer, before its norm; only where the tap was asked for it.
    """

    layer: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    scaling: float
    softcap: float | None
    sinks: torch.Tensor | None
    window: int | None
    hidden: torch.Tensor | None = None


class Done(Exception):
    """Raised inside the forward pass once the last layer that is needed has been seen; `Tap.run` takes it."""


# attention module -> the taps that watch it, innermost last
_WATCHED: dict[int, list[Tap]] = {}


def model_attention(original: str, module) -> Callable:
    """The attention function the model would have called."""
    if original != "eager":
        return AttentionInterface()[original]
    for cls in type(module).__mro__:
        own = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if own is not None:
            return own
    raise ProbeError(f"{type(module).__name__} has no eager attention function of its own; open it with sdpa.")


def _register(original: str) -> str:
    name = f"rope_probe_{original}"
    if name not in AttentionInterface().valid_keys():

        def attend(module, query, key, value, attention_mask, **kwargs):
            for tap in list(_WATCHED.get(id(module), ())):
                query, key = tap.see(module, query, key, value, attention_mask, kwargs)
            return model_attention(original, module)(module, query, key, value, attention_mask, **kwargs)

        AttentionInterface.register(name, attend)
        AttentionMaskInterface.register(name, AttentionMaskInterface()[original])
    return name


class Tap:
    """Context manager: while it is open, `observer` sees every attention call of `decoder`.

    Parameters
    ----------
    decoder : PreTrainedModel
        The text decoder.
    observer : callable
        Called with one :class:`Call` per layer, before the layer attends.  An intervention returns the
        (q, k) that attention shall use instead; everything else returns None.
    layers : collection of int, optional
        Only these layers are shown; default all.
    stop : bool
        End the forward pass after the last of `layers` was seen; `run` swallows the signal.
    hidden : bool
        Also show the hidden states entering each layer.
    """

    def __init__(
        self,
        decoder,
        observer: Callable[[Call], tuple[torch.Tensor, torch.Tensor] | None],
        layers=None,
        stop: bool = False,
        hidden: bool = False,
    ):
        self.decoder = decoder
        self.observer = observer
        self.modules = {id(module): index for index, module in attention_modules(decoder).items()}
        self.layers = None if layers is None else frozenset(layers)
        # An offloaded model frees a layer's weights after its forward; cutting that short would keep them.
        self._stop = stop and not any(hasattr(module, "_hf_hook") for module in decoder.modules())
        self.seen: set[int] = set()
        self._hidden: dict[int, torch.Tensor] | None = {} if hidden else None
        self._hooks: list = []

    def __enter__(self) -> Tap:
        configs = {id(c): c for m in self.decoder.modules() if (c := getattr(m, "config", None)) is not None}
        self._restore = [(c, getattr(c, "_attn_implementation_internal", None)) for c in configs.values()]
        watched = {name: _register(name) for _, name in self._restore if name and not name.startswith("rope_probe_")}
        self._put_back = remember_frequencies(self.decoder)
        for config, original in self._restore:
            config._attn_implementation_internal = watched.get(original, original)
        for key in self.modules:
            _WATCHED.setdefault(key, []).append(self)
        if self._hidden is not None:
            for index, layer in decoder_layers(self.decoder).items():
                self._hooks.append(layer.register_forward_pre_hook(self._keep_hidden(index), with_kwargs=True))
        return self

    def _keep_hidden(self, index: int) -> Callable:
        def keep(_module, args, kwargs) -> None:
            self.enters(index, args[0] if args else kwargs["hidden_states"])

        return keep

    def enters(self, index: int, hidden: torch.Tensor) -> None:
        """Take note of the hidden states that enter a layer, where the observer wants to see them."""
        if self._hidden is not None:
            self._hidden[index] = hidden

    def __exit__(self, *exc) -> None:
        for config, original in self._restore:
            config._attn_implementation_internal = original
        self._put_back()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for key in self.modules:
            _WATCHED[key].remove(self)
            if not _WATCHED[key]:
                del _WATCHED[key]

    def see(self, module, q, k, v, mask, kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        """Show one attention call to the observer; the q and k to attend with."""
        layer = self.modules[id(module)]
        self.seen.add(layer)
        hidden = self._hidden.pop(layer, None) if self._hidden is not None else None
        if self.layers is not None and layer not in self.layers:
            return q, k
        scaling = kwargs.get("scaling")
        changed = self.observer(
            Call(
                layer=layer,
                q=q,
                k=k,
                v=v,
                mask=mask,
                scaling=float(q.shape[-1] ** -0.5 if scaling is None else scaling),
                softcap=kwargs.get("softcap"),
                sinks=kwargs.get("s_aux"),
                window=kwargs.get("sliding_window"),
                hidden=hidden,
            )
        )
        if self._stop and layer == max(self.layers if self.layers is not None else self.modules.values()):
            raise Done
        return (q, k) if changed is None else changed

    def run(self, tokens: torch.Tensor, **kwargs) -> None:
        """One forward pass of the decoder (no cache, no logits) under the open tap, whatever ran before it."""
        forget_lengths(self.decoder)
        with torch.inference_mode():
            try:
                self.decoder(input_ids=tokens, use_cache=False, **kwargs)
            except Done:
                pass
        if not self.seen:
            raise ProbeError(
                f"{type(self.decoder).__name__} does not attend through transformers' attention interface "
                "(its attention was never seen), so nothing can be measured: use a model class that does."
            )


def input_device(decoder) -> torch.device:
    """Device the token ids go to (an offloaded embedding lives on the meta device between calls)."""
    embedding = decoder.get_input_embeddings()
    placed = getattr(getattr(embedding, "_hf_hook", None), "execution_device", None)
    return embedding.weight.device if placed is None else torch.device(placed)
