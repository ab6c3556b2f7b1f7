# ---
# jupyter:
#   jupytext:
#     formats: py:percent,ipynb
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 6 · Choosing hooks for patching, with TransformerLens
#
# **Follows** no paper: it is a how-to. rope-probe says which heads have which role and which rotary pairs carry the norm;
# TransformerLens intervenes on activations by layer and head. Here the one chooses the hooks of the other.
#
# **Shows**: taking out the heads that rope-probe calls induction heads destroys copying, taking out as many others does
# not; and taking the pairs of the frequency band out of the scores costs more than taking out as many others beside it.
#
# **Cannot show**: what a circuit does. Zeroing a head is a blunt instrument, and a model of 135 million parameters has
# its own ways.

# %% tags=["parameters"]
import matplotlib.pyplot as plt
import numpy as np
import torch

import rope_probe as rp

model = "demo:smollm2"
segments, length = 2, 1024

# %% [markdown]
# ## One model, two tools
#
# A bridge wraps a transformers model. `rp.open(bridge)` reads the model inside it: weights are shared, and the bridge stays
# as it is. (From the hub, `TransformerBridge.boot_transformers("Qwen/Qwen3-0.6B")` is all that is needed; the demo is not
# on the hub, so its model is handed over.)

# %%
# %load_ext rope_probe
# %matplotlib inline
from transformer_lens.model_bridge import TransformerBridge

plt.rcParams["figure.dpi"] = 110
plain = rp.open(model)
bridge = TransformerBridge.boot_transformers(
    plain.model.config._name_or_path, hf_model=plain.model, tokenizer=plain.tokenizer, device="cpu", dtype=torch.float32
)
ckpt = rp.open(bridge)
print(ckpt.provenance)

# %% [markdown]
# ## Roles choose heads
#
# `rp.heads` names the role of every head. A hook of TransformerLens is named by layer, and gets the outputs of all heads of
# that layer, so a list of (layer, head) is all that has to change hands.

# %%
heads = rp.heads(ckpt, segments=segments, length=length)
role = heads["role"].values
chosen = np.argwhere(role == "induction")
print("induction heads:", ", ".join(f"{layer}.{head}" for layer, head in chosen))


def without(places):
    """Hooks that zero the output of these heads, given as (layer, head)."""

    def zero(z, hook, where):
        z = z.clone()
        z[:, :, where] = 0
        return z

    layers = sorted({int(layer) for layer, _ in places})
    of_layer = {layer: [int(head) for one, head in places if one == layer] for layer in layers}
    return [
        (f"blocks.{layer}.attn.hook_z", lambda z, hook, where=where: zero(z, hook, where))
        for layer, where in of_layer.items()
    ]


def lost(ids, hooks):
    """Nats per token of every prediction, shape (batch, token - 1)."""
    with torch.inference_mode():
        logits = bridge.run_with_hooks(ids, fwd_hooks=hooks)
    return -logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


# %% [markdown]
# Induction shows on random tokens that come twice: in the second half everything can be copied from the first. The other
# heads, for comparison, are drawn from those of no special role, as many and from the same layers.

# %%
rng = np.random.default_rng(0)
half = torch.as_tensor(rng.integers(100, ckpt.vocabulary, (4, 64)))
repeated = torch.cat([half, half], 1)
others = np.concatenate(
    [
        np.stack(
            [np.full(count, layer), rng.choice(np.flatnonzero(role[layer] != "induction"), count, replace=False)], 1
        )
        for layer, count in zip(*np.unique(chosen[:, 0], return_counts=True), strict=True)
    ]
)
curves = {
    "intact": lost(repeated, []),
    f"{len(others)} other heads out": lost(repeated, without(others)),
    f"{len(chosen)} induction heads out": lost(repeated, without(chosen)),
}
fig, ax = plt.subplots(figsize=(6, 3), layout="constrained")
for label, values in curves.items():
    ax.plot(range(1, 128), values.mean(0), label=label)
    print(f"{label:24s} {values[:, 64:].mean():.2f} nats per token in the second half")
ax.axvline(64, color="0.6", lw=0.8, ls=":")
ax.set(xlabel="token (the second copy starts at 64)", ylabel="nats per token")
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# In the second copy the intact model needs 2.8 nats per token. Without eight other heads of the same layers it needs 3.4:
# copying goes on. Without the eight induction heads it needs 12.9, hardly less than in the first copy, where nothing can
# be known: of all 270 heads these eight do the copying.
#
# ## Bands choose channels
#
# A pair *j* of a head is the channels *j* and *j + P* of `hook_rot_q` (half layout; `ckpt.layers[0].layout` says so).
# Zeroed there, the pair no longer adds to any score. The band is taken from the same result: the pairs around the peak of
# usage that stay above half of it. All other windows of as many pairs are the comparison.

# %%
found = rp.summary(rp.bands(ckpt, segments=segments, length=length))
(kind,) = found["by_layer_type"].values()  # one entry for each kind of layer; this model has one
first, last = kind["band"]
pairs, width = found["pairs"], last - first + 1
print(f"band: pairs {first} to {last} of {pairs}")


def without_pairs(which):
    """Hooks that take these pairs out of the scores of every layer."""
    channels = [channel for pair in which for channel in (pair, pair + pairs)]

    def zero(q, hook):
        q = q.clone()
        q[..., channels] = 0
        return q

    return [(f"blocks.{layer}.attn.hook_rot_q", zero) for layer in range(len(ckpt.layers))]


text = torch.as_tensor(ckpt.tokenizer(rp.bands.__doc__ * 3)["input_ids"])[None, :512]
intact = float(lost(text, []).mean())
starts = list(range(first % width, pairs - width + 1, width))  # windows side by side, the band one of them
cost = [float(lost(text, without_pairs(range(start, start + width))).mean()) - intact for start in starts]
fig, ax = plt.subplots(figsize=(6, 3), layout="constrained")
for start, added in zip(starts, cost, strict=True):
    ax.bar(start + (width - 1) / 2, added, 0.8 * width, color="C1" if start == first else "0.6")
ax.set(xlabel="rotary pairs taken out (fast → slow; orange: the band)", ylabel="nats per token, added")
plt.show()
order = sorted(range(len(starts)), key=lambda index: -cost[index])[:4]
costly = ", ".join(f"{starts[i]}–{starts[i] + width - 1} ({cost[i]:+.2f})" for i in order)
print(f"intact {intact:.2f} nats per token; most is added without pairs {costly}; least {min(cost):+.2f}")

# %% [markdown]
# The two pairs of the band cost 3.3 nats per token, more than twice as much as any other two of these windows; the
# slower half of the ladder costs more than the middle, where almost nothing is lost. Two pairs out of 32 for every head is
# a crude cut, and a window laid across the border of the band (22 and 23) would cost about as much. It says that what the
# norm shows is used.
#
# ## The same on Llama-2-7B
#
# Its weights (13.5 GB) are gated: ask for access on the model's page and log in with `hf auth login`. Then
# `bridge = TransformerBridge.boot_transformers("meta-llama/Llama-2-7b-hf", dtype=torch.bfloat16)` in place of the lines
# that hand over the demo, and everything else stays. We have not run it.
