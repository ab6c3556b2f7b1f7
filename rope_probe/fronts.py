"""What turns a layer's input into its q and k, with weights read when they are needed: the rest of a model stays unread.

The model is built from its configuration on the meta device, where it has structure and no numbers.  Running it
with every layer but one passed over, up to the attention of that layer, needs the weights of few modules; each of
them is read just before it runs and given back afterwards.  What is computed is the model's own code: biases,
q/k norms, fused projections and layouts of any family are those of its classes.
"""

from __future__ import annotations

import contextlib
import copy
import math

import numpy as np
import torch

from .errors import ProbeError, first_words
from .modules import attention_modules, decoder_layers
from .quiet import quiet
from .rotary import Geometry, decoder_without_weights, read_geometry
from .tap import Call, Tap
from .tensors import Tensors


def _pass(hidden_states, *_args, **_kwargs):
    """A layer that is passed over."""
    return hidden_states


def _is_value(name: str) -> bool:
    """Is this the projection of the values?  They carry no rotation: zeros stand in for them."""
    return name.rpartition(".")[2] == "v_proj"


def _no_values(module):
    def forward(x):
        return x.new_zeros(*x.shape[:-1], module.out_features)

    return forward


def _in_float32(config):
    """The configuration of the text model, computing in float32 whatever the weights are stored in."""
    text = copy.deepcopy(config.get_text_config(decoder=True))
    text.dtype = torch.float32
    return text


def _fill_buffers(decoder) -> None:
    """Compute the buffers that are not stored (frequencies, scales of embeddings), as transformers does on loading."""
    for module in decoder.modules():
        found = [(name, b) for name, b in module.named_buffers(recurse=False) if b is not None and b.is_meta]
        if not found:
            continue
        for name, buffer in found:
            empty = math.nan if buffer.dtype.is_floating_point else 0
            module._buffers[name] = torch.full(buffer.shape, empty, dtype=buffer.dtype, device="cpu")
        decoder._init_weights(module)
        for name, _ in found:
            buffer = module._buffers[name]
            if not buffer.dtype.is_floating_point:
                continue
            if name not in module._non_persistent_buffers_set:  # stored with the weights: a default would be wrong
                buffer.fill_(math.nan)
            elif buffer.isnan().any():
                raise ProbeError(
                    f"the buffer {name} of {type(module).__name__} is known only to a model that is loaded, so it "
                    "cannot be scanned: run `rope-probe bands`."
                )


class Fronts:
    """The first steps of every layer, up to q and k.

    Parameters
    ----------
    config : PreTrainedConfig
    tensors : Tensors

    Attributes
    ----------
    geometry : Geometry
        What the layers rotate, from the configuration.
    width : int
        Size of the hidden states.
    shared : list of int
        Layers that read the keys of an earlier one (Gemma 4) and so have no front of their own.

    Raises
    ------
    ProbeError
        The model cannot be built, or its weights are not those of this configuration.
    """

    def __init__(self, config, tensors: Tensors):
        self.tensors = tensors
        with quiet():
            self.decoder = decoder_without_weights(_in_float32(config)).eval()
            self.geometry: Geometry = read_geometry(self.decoder)
            with torch.no_grad():
                _fill_buffers(self.decoder)
        self.width = int(self.decoder.config.hidden_size)
        self.attention = attention_modules(self.decoder)
        self.layers = decoder_layers(self.decoder)
        if any(self.layers.get(index) in (None, module) for index, module in self.attention.items()):
            raise ProbeError(
                f"the layers of {type(self.decoder).__name__} attend more than once each, and only the first of these "
                "reads the layer's input, so they cannot be scanned: run `rope-probe bands`."
            )
        self.shared = [i for i, module in self.attention.items() if getattr(module, "is_kv_shared_layer", False)]
        self._names = {id(module): name for name, module in self.decoder.named_modules()}
        self._prefix = self._find_prefix()
        self._read: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = []
        self._prepare()

    # -- weights

    def _find_prefix(self) -> str:
        """What the checkpoint puts before the decoder's own names; of several candidates (towers for images or sound)
        that under which most of the decoder's parameters are found."""
        first = next(iter(self.attention.values()))
        path = self._names[id(first)]
        known = [
            f"{path}.{name}"
            for name, _ in first.named_parameters()
            if name.endswith("weight") and "norm" not in name and not _is_value(name.removesuffix(".weight"))
        ]
        entries = self.tensors.entries
        found = [key.removesuffix(known[0]) for key in entries if f".{key}".endswith(f".{known[0]}")]
        found = [prefix for prefix in found if all(f"{prefix}{name}" in entries for name in known)]
        if found:
            shapes = {name: tuple(parameter.shape) for name, parameter in self.decoder.named_parameters()}

            def fitting(prefix: str) -> int:
                keys = ((f"{prefix}{name}", shape) for name, shape in shapes.items())
                return sum(key in entries and entries[key].shape == shape for key, shape in keys)

            return max(found, key=fitting)
        raise ProbeError(
            f"the weights of {self.tensors.name} hold no {known[0]} ({_sample(self.tensors.entries)}): they are quantized, "
            "adapters, or named in another way, and cannot be scanned; run `rope-probe bands`."
        )

    def _key(self, module, parameter: str) -> str:
        name = f"{self._prefix}{self._names[id(module)]}.{parameter}"
        if name not in self.tensors.entries:
            raise ProbeError(
                f"the weights of {self.tensors.name} hold no {name}: fetch the checkpoint again, or export it whole."
            )
        shape, expected = self.tensors.entries[name].shape, tuple(getattr(module, parameter).shape)
        if shape != expected:
            raise ProbeError(
                f"{name} of {self.tensors.name} has shape {list(shape)}, and its config.json asks for {list(expected)}: "
                "the weights and the config do not belong together."
            )
        return name

    def _prepare(self) -> None:
        """Every module reads its weights when it is about to run; layers are passed over, values left out."""
        for name, module in self.decoder.named_modules():
            if isinstance(module, torch.nn.Embedding):
                module.padding_idx = None  # of gradients alone, and rows are numbered anew
                nothing = torch.zeros(1).expand(module.weight.shape)  # some models send the ids where the weights are
                module.weight = torch.nn.Parameter(nothing, requires_grad=False)
                module.register_forward_pre_hook(self._read_rows)
            elif _is_value(name) and isinstance(module, torch.nn.Linear):
                vars(module)["forward"] = _no_values(module)
            elif any(True for _ in module.parameters(recurse=False)) and not any(True for _ in module.children()):
                module.register_forward_pre_hook(self._read_all)
        places = {self._names[id(layer)].rpartition(".")[0] for layer in self.layers.values()}
        for place in places:  # layers without attention stand beside those that have it
            for layer in self.decoder.get_submodule(place).children():
                layer.forward = _pass

    def _put(self, module, name: str, values: torch.Tensor) -> None:
        self._read.append((module, name, module._parameters[name]))
        module._parameters[name] = torch.nn.Parameter(values, requires_grad=False)

    def _read_all(self, module, _args) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                self._put(module, name, self.tensors.tensor(self._key(module, name)))

    def _read_rows(self, module, args):
        """Only the rows that are looked up, which are then numbered anew."""
        ids, places = np.unique(args[0].numpy(), return_inverse=True)
        original = next((p for m, _, p in self._read if m is module), module.weight)
        module._parameters["weight"] = original  # the shape is checked against that of the configuration
        values = self.tensors.rows(self._key(module, "weight"), ids)
        self._put(module, "weight", values)
        return (torch.as_tensor(places.reshape(args[0].shape)), *args[1:])

    def _give_back(self) -> None:
        for module, name, parameter in self._read:
            module._parameters[name] = parameter
        self._read.clear()

    # -- running

    @contextlib.contextmanager
    def layer(self, index: int):
        """Context in which the front of one layer can run; its weights are read once, and given back at the end.

        Yields
        ------
        callable
            ``front(ids=…)`` runs token ids [N] through the embedding, ``front(hidden=…)`` hidden states [N, width] that
            enter the layer.  Each is a sequence of one token.  Returns the :class:`Call` that attention would get,
            with q of shape [N, head, 1, channel], and the projections that the layer's input goes through.
        """
        layer = self.layers[index]
        del layer.forward
        try:
            yield lambda ids=None, hidden=None: self._run(index, ids, hidden)
        finally:
            layer.forward = _pass
            self._give_back()

    def _run(self, index: int, ids, hidden) -> tuple[Call, list[torch.nn.Linear]]:
        if hidden is not None:  # the embedding of some token, replaced where the layer begins
            ids = torch.zeros(len(hidden), dtype=torch.long)
        calls: list[Call] = []
        seen: list[tuple[torch.nn.Linear, torch.Tensor]] = []
        hooks = [
            module.register_forward_hook(lambda module, args, _out: seen.append((module, args[0])))
            for name, module in self.attention[index].named_modules()
            if isinstance(module, torch.nn.Linear) and not _is_value(name)
        ]
        if hidden is not None:
            hooks.append(self.layers[index].register_forward_pre_hook(_entering(hidden[:, None]), with_kwargs=True))
        try:
            with Tap(self.decoder, calls.append, layers=[index], stop=True) as tap:
                tap.run(torch.as_tensor(ids).reshape(-1, 1))
        except ProbeError:
            raise
        except Exception as error:
            raise ProbeError(
                f"layer {index} of {type(self.decoder).__name__} needs more than its own weights to form q and k "
                f"({first_words(error, 120)}), so it cannot be scanned: run `rope-probe bands`."
            ) from error
        finally:
            for hook in hooks:
                hook.remove()
        # projections of the layer's own input; those that follow (MLA) read the output of these
        return calls[0], [module for module, x in seen if x.data_ptr() == seen[0][1].data_ptr()]


def _entering(hidden: torch.Tensor):
    def replace(_module, args, kwargs):
        if args:
            return (hidden, *args[1:]), kwargs
        return args, kwargs | {"hidden_states": hidden}

    return replace


def _sample(names) -> str:
    return "it has " + ", ".join(list(names)[:2]) + ", …"
