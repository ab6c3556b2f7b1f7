"""Checkpoints larger than memory: weights stay on disk, one decoder layer after the other is read, used and freed.

`accelerate` knows where every weight lies once transformers has placed a layer on "disk"; its own hooks would read the
weights again for every batch.  Here a layer is read once for all segments: the model is run once on all of them, and
each layer leads its micro-batches through itself before it lets go (layer-major order).
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from safetensors import SafetensorError

from .errors import ProbeError, first_words
from .modules import decoder_layers, text_decoder
from .tap import Done

# micro-batches: called with the first and the last segment (exclusive) of each, before and after it passes a layer
Bounds = tuple[int, int]


def _nothing(*_) -> None:
    """Around and after a layer, where no reading in layer-major order goes on."""


def placement(config, device: str) -> dict[str, str]:
    """Where each module goes: decoder layers, head and whatever is not the text model to disk, the rest to the device.

    Parameters
    ----------
    config : PreTrainedConfig
    device : str
        Where the model computes.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = {id(module): name for name, module in model.named_modules()}
    decoder = text_decoder(model)
    layers = [names[id(layer)] for layer in decoder_layers(decoder).values()]
    if not layers:
        raise ProbeError(f"{type(decoder).__name__} has no list of decoder layers that could be streamed.")
    root = names[id(decoder)]
    found = dict.fromkeys(layers, "disk")
    for name, module in model.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if own and not any(name == layer or name.startswith(f"{layer}.") for layer in layers):
            inside = not root or name == root or name.startswith(f"{root}.")
            found[name] = device if inside else "disk"
    return found


class Stream:
    """Lends the decoder layers of a model their weights while they run.

    Parameters
    ----------
    model : PreTrainedModel
        Opened with `placement` as its device map.
    device : str
    folder : TemporaryDirectory
        Where transformers has put the weights that it had to convert; kept as long as this object.
    """

    def __init__(self, model, device: str, folder: tempfile.TemporaryDirectory):
        self.device, self._folder = torch.device(device), folder
        self.decoder = text_decoder(model)
        self._weights = _offloaded(model)
        names = {id(module): name for name, module in model.named_modules()}
        self._units = {index: (names[id(layer)], layer) for index, layer in decoder_layers(self.decoder).items()}
        self._order = list(self._units)
        self._ahead: dict[int, Future] = {}
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="rope-probe-reader")
        self._stand_in: dict[tuple, torch.Tensor] | None = None
        self._batches: list[Bounds] = []
        self._around: Callable = _nothing
        self._after: Callable = _nothing
        self._last: int | None = None
        self._done: tuple[int, torch.Tensor] | None = None
        self._shared: dict[tuple[int, int], tuple] = {}
        for index, (_, layer) in self._units.items():
            layer.forward = self._lent(index, layer, layer.forward)
        streamed = {id(module) for _, layer in self._units.values() for module in layer.modules()}
        for name, module in model.named_modules():  # the head, and what never runs here
            if id(module) not in streamed and any(p.is_meta for p in module.parameters(recurse=False)):
                module.forward = self._borrowed(name, module, module.forward)

    # -- weights

    def _read(self, prefix: str, module) -> list[tuple[torch.nn.Module, str, torch.Tensor]]:
        """Weights of a module on the device, each with its owner and name."""
        found = []
        for name, parameter in module.named_parameters():
            owner, _, short = name.rpartition(".")
            try:
                stored = self._weights[f"{prefix}.{name}"]
            except (OSError, SafetensorError) as error:
                raise ProbeError(
                    f"{prefix}.{name} can no longer be read ({first_words(error, 100)}): were its files removed?"
                ) from error
            value = torch.empty(stored.shape, dtype=parameter.dtype, device=self.device).copy_(stored)
            found.append((module.get_submodule(owner), short, value))
        return found

    def _random(self, module, made: dict[tuple, torch.Tensor]) -> list[tuple[torch.nn.Module, str, torch.Tensor]]:
        """Numbers of the right shapes, the same for all layers: they show how a layer rotates as well as its own."""
        found = []
        for name, parameter in module.named_parameters():
            owner, _, short = name.rpartition(".")
            key = (name, tuple(parameter.shape), parameter.dtype)
            if key not in made:
                noise = torch.Generator(self.device).manual_seed(len(made))
                value = torch.empty(parameter.shape, dtype=parameter.dtype, device=self.device)
                made[key] = value.normal_(0, 0.02, generator=noise)
            found.append((module.get_submodule(owner), short, made[key]))
        return found

    def _take(self, index: int):
        """Weights of a layer, read ahead or now; the next layer is read meanwhile."""
        prefix, layer = self._units[index]
        if self._stand_in is not None:
            return self._random(layer, self._stand_in)
        waiting = self._ahead.pop(index, None)
        taken = waiting.result() if waiting else self._read(prefix, layer)
        place = self._order.index(index) + 1
        if place < len(self._order) and (self._last is None or self._order[place] <= self._last):
            following = self._order[place]
            self._ahead.setdefault(following, self._reader.submit(self._read, *self._units[following]))
        return taken

    def _lent(self, index: int, layer, forward):
        def run(*args, **kwargs):
            if self._done and index <= self._done[0]:  # an earlier run has been through this layer
                return self._done[1] if index == self._done[0] else (args[0] if args else kwargs["hidden_states"])
            with _in_place(self._take(index)):
                if not self._batches:
                    return forward(*args, **kwargs)
                return self._through(index, forward, args, kwargs)

        return run

    def _borrowed(self, prefix: str, module, forward):
        def run(*args, **kwargs):
            with _in_place(self._read(prefix, module)):
                return forward(*args, **kwargs)

        return run

    # -- one reading, layer by layer

    def _through(self, index: int, forward, args: tuple, kwargs: dict) -> torch.Tensor:
        """Lead every micro-batch through one layer."""
        count = self._batches[-1][1]
        whole: torch.Tensor = torch.empty(0)
        for start, stop in self._batches:
            part_args = tuple(self._part(value, start, stop, count) for value in args)
            part_kwargs = {name: self._part(value, start, stop, count) for name, value in kwargs.items()}
            with self._around(index, (start, stop), part_args[0] if part_args else part_kwargs["hidden_states"]):
                out = forward(*part_args, **part_kwargs)
            if not isinstance(out, torch.Tensor):
                raise ProbeError(
                    f"{type(self._units[index][1]).__name__} returns more than hidden states, so its layers cannot be "
                    "streamed: leave out --stream-layers."
                )
            if not start:
                whole = out.new_empty((count, *out.shape[1:]))
            whole[start:stop] = out
        self._after(index, whole)
        if index == self._last:
            raise Done
        return whole

    def _part(self, value, start: int, stop: int, count: int):
        """The part of what a layer is given that belongs to some of the segments.

        A dict that all layers are given is theirs to write to (keys that later layers share): each batch has its own.
        """
        if isinstance(value, torch.Tensor):
            return value[start:stop] if value.dim() > 1 and len(value) == count > 1 else value
        if isinstance(value, (tuple, list)):
            return type(value)(self._part(item, start, stop, count) for item in value)
        if isinstance(value, MutableMapping):
            kind: Any = type(value)
            if (id(value), start) not in self._shared:
                own = kind({key: self._part(item, start, stop, count) for key, item in value.items()})
                self._shared[id(value), start] = (value, own)  # the original too, so that its id stays taken
            return self._shared[id(value), start][1]
        return value

    def layers(self, last: int) -> list[int]:
        """The layers that run, up to and with `last`."""
        return [index for index in self._order if index <= last]

    @contextlib.contextmanager
    def layer_major(self, batches: list[Bounds], last: int, around, after, done=None) -> Iterator[None]:
        """Inside, a forward pass on all segments leads them through each layer batch by batch.

        Parameters
        ----------
        batches : list of (int, int)
            First and last (exclusive) segment of each.
        last : int
            The layer after which the pass ends.
        around : callable
            Called with the layer, the batch and its hidden states; a context in which the batch passes the layer.
        after : callable
            Called with the layer and the hidden states of all segments that leave it.
        done : (int, Tensor), optional
            A layer that the segments have passed before, and the hidden states that left it: the pass starts there.
        """
        self._batches, self._last, self._around, self._after, self._done = batches, last, around, after, done
        try:
            yield
        finally:
            self._batches, self._last, self._done = [], None, None
            self._around = self._after = _nothing
            self._shared.clear()
            self.forget()

    @contextlib.contextmanager
    def stand_ins(self) -> Iterator[None]:
        """Inside, layers run on random numbers, and nothing is read."""
        self._stand_in = {}
        try:
            yield
        finally:
            self._stand_in = None

    def forget(self) -> None:
        """Let go of what was read ahead."""
        for waiting in self._ahead.values():
            waiting.cancel()
        self._ahead.clear()


@contextlib.contextmanager
def _in_place(weights) -> Iterator[None]:
    """Put weights into their modules, and take them out again."""
    before = [owner._parameters[name] for owner, name, _ in weights]
    for owner, name, value in weights:
        owner._parameters[name] = torch.nn.Parameter(value, requires_grad=False)
    try:
        yield
    finally:
        for (owner, name, _), empty in zip(weights, before, strict=True):
            owner._parameters[name] = empty
        weights.clear()


def _offloaded(model):
    """What reads the weights that transformers left on disk; accelerate's hooks are taken off."""
    from accelerate.hooks import remove_hook_from_module

    found = None
    for module in model.modules():
        hooks = getattr(module, "_hf_hook", None)
        for hook in getattr(hooks, "hooks", (hooks,)):
            kept = getattr(hook, "weights_map", None)
            if kept is not None:
                found = getattr(kept, "dataset", kept)
    if found is None:
        raise ProbeError("no weight of this model lies on disk, so there is nothing to stream.")
    remove_hook_from_module(model, recurse=True)
    if hasattr(model, "hf_device_map"):
        del model.hf_device_map
    return found
