"""q and k of every layer before the rotation, from forward hooks on the projections of the untouched model.

An independent path: it knows how each family cuts its projections, and nothing of rope_probe.
"""

import torch

CLIP = 4.0  # rarely reached: where both members of a pair are clipped, two pairs can tie for the largest norm
WATCHED = {
    "q_proj",
    "k_proj",
    "q_norm",
    "k_norm",
    "q_layernorm",
    "k_layernorm",
    "qkv_proj",
    "query_key_value",
    "q_b_proj",
    "kv_a_proj_with_mqa",
}


def outputs(model, ids):
    """What each watched module of each layer put out, by layer index and module name."""
    seen, handles = {}, []
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int):
            continue
        for name, child in module.named_children():
            if name in WATCHED:

                def keep(_module, _inputs, output, key=(index, name)):
                    seen.setdefault(key[0], {})[key[1]] = output.detach().clone()

                handles.append(child.register_forward_hook(keep))
    try:
        with torch.no_grad():
            model(ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def as_heads(x, heads):
    """[batch, head, token, channel] from a flat projection or from heads on either side of the tokens."""
    if x.ndim == 3:
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)
    return x if x.shape[1] == heads else x.transpose(1, 2)


def projected(family, model, ids):
    """q and k of every layer: pairs of tensors [batch, head, token, channel], k with its own heads."""
    seen = outputs(model, ids)
    cut = globals()[f"_{family.split}"]
    return {index: cut(seen, index, layer) for index, layer in enumerate(family.layers)}


def _separate(seen, index, layer):
    own = seen[index]
    if "k_proj" in own:
        keys = own
    else:  # Gemma 4 shares the keys of the last earlier layer of the same type, known here by its head width
        earlier = (seen[i] for i in reversed(range(index)) if "k_norm" in seen[i])
        keys = next(other for other in earlier if other["k_norm"].shape[-1] == layer.head_dim)
    q = next(own[name] for name in ("q_norm", "q_layernorm", "q_proj") if name in own)
    k = next(keys[name] for name in ("k_norm", "k_layernorm", "k_proj") if name in keys)
    return as_heads(q, layer.heads), as_heads(k, layer.kv_heads)


def _bare(seen, index, layer):
    """The projections alone, kept as a negative control where a norm follows them."""
    return tuple(
        as_heads(seen[index][name], heads) for name, heads in (("q_proj", layer.heads), ("k_proj", layer.kv_heads))
    )


def _clipped(seen, index, layer):
    return tuple(x.clamp(-CLIP, CLIP) for x in _separate(seen, index, layer))


def _llama4(seen, index, layer):
    pair = _separate(seen, index, layer)
    if not layer.rotates:
        return pair
    return tuple(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) for x in pair)


def _phi3(seen, index, layer):
    """Blocks [q | k | v] of unequal size."""
    fused, width = seen[index]["qkv_proj"], layer.heads * layer.head_dim
    k = fused[..., width : width + layer.kv_heads * layer.head_dim]
    return as_heads(fused[..., :width], layer.heads), as_heads(k, layer.kv_heads)


def _neox(seen, index, layer):
    """[q | k | v] per head."""
    heads = as_heads(seen[index]["query_key_value"], layer.heads)
    return heads[..., : layer.head_dim], heads[..., layer.head_dim : 2 * layer.head_dim]


def _thirds(seen, index, layer):
    """Three equal blocks: the wrong cut for a per-head fused projection, kept as a negative control."""
    q, k, _ = seen[index]["query_key_value"].chunk(3, dim=-1)
    return as_heads(q, layer.heads), as_heads(k, layer.heads)


def _persimmon(seen, index, layer):
    heads = seen[index]["query_key_value"].unflatten(-1, (layer.heads, 3, layer.head_dim)).transpose(1, 2)
    return heads[..., 0, :], heads[..., 1, :]


def _codegen(seen, index, layer):
    """Four slices (of the original's model parallelism), each [q | v | k]."""
    slices = seen[index]["qkv_proj"].unflatten(-1, (4, 3, -1))
    return as_heads(slices[..., 0, :].flatten(-2), layer.heads), as_heads(slices[..., 2, :].flatten(-2), layer.heads)


def _mla(seen, index, layer):
    """Queries with their rotary part last; the shared rotary key is the tail of the compressed projection."""
    own = seen[index]
    q = as_heads(own["q_b_proj"] if "q_b_proj" in own else own["q_proj"], layer.heads)
    return q, as_heads(own["kv_a_proj_with_mqa"][..., -layer.dim :], 1)


def _longcat(seen, index, layer):
    """As MLA, the queries scaled by sqrt(hidden size / query rank)."""
    q, k = _mla(seen, index, layer)
    return q * (64 / 16) ** 0.5, k


def pair_norms(x, layout, dim, last):
    """Norms [..., pair] of the rotary pairs of x [..., channel], in float64."""
    x = x.double()
    x = x[..., -dim:] if last else x[..., :dim]
    if layout == "half":
        return torch.hypot(x[..., : dim // 2], x[..., dim // 2 :])
    return torch.hypot(x[..., 0::2], x[..., 1::2])


def outside_norms(x, dim, last):
    """Norm of the channels that do not rotate."""
    x = x.double()
    return (x[..., : x.shape[-1] - dim] if last else x[..., dim:]).norm(dim=-1)
