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
# # 5 · Cutting the rotation: which pairs does the model need?
#
# **Follows** Barbero et al., *Round and Round We Go!* (arXiv 2410.06205): p-RoPE, which rotates only the fastest share
# *p* of the pairs; Oka et al. (frequency bands), who cut trained models and see perplexity break where the cut reaches
# the band; FoPE (arXiv 2412.17739), which stops pairs below the floor; and the base sweeps of arXiv 2405.14591.
#
# **Reproduces**: the cut of a trained model and where its perplexity breaks; the importance of single pairs; what
# another base or scaling costs, with retrieval beside perplexity.
#
# **Cannot show**: p-RoPE as it is meant. The paper trains models with it, and with three quarters of the pairs they are
# slightly better than with all; here a model that learned with all pairs loses some. And a cut costs more the longer
# the text is: every ratio below belongs to its segment length.

# %% tags=["parameters"]
import matplotlib.pyplot as plt
import numpy as np
import torch

import rope_probe as rp

model, dtype, dataset = "demo:smollm2", None, None  # no data set: the text that comes with Python
segments, length = 2, 1024
keep = [1, 0.8, 0.75, 0.7, 0.6, 0.5, 0.25, 0]
knocked = [0, 1, 4, 8, 16, 20, 22, 23, 24, 25, 31]  # pairs that are knocked out one at a time

# %% [markdown]
# ## Read it first
#
# What does a model write when its rotation is cut? Interventions are context managers around any code that runs the
# model. With `keep=0.75` the slowest quarter of the pairs stands still; with 0 none turns, and the model does not know
# the order of the tokens except through its causal mask.

# %%
# %load_ext rope_probe
# %matplotlib inline
plt.rcParams["figure.dpi"] = 130
ckpt = rp.open(model, dtype=dtype)
prompt = "Water boils at a lower temperature in the mountains, because"
ids = torch.tensor([ckpt.tokenizer(prompt)["input_ids"]], device=ckpt.model.device)


def write():
    """Two dozen tokens, greedily."""
    found = ckpt.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=24,
        do_sample=False,
        pad_token_id=ckpt.tokenizer.eos_token_id,
    )
    return ckpt.tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True).replace("\n", " ")


print("intact:", write())
for share in (0.75, 0.5, 0.25, 0):
    with rp.interventions.truncate(ckpt, keep=share):
        print(f"keep {share}:", write())

# %% [markdown]
# With three quarters of the pairs, and with half, the continuation is the same word for word. With a quarter it begins
# alike and goes elsewhere, and without any rotation it ends in a loop. The text is short, though, some forty tokens,
# and within forty tokens the slow pairs hardly turn anyway. So measure on longer ones.
#
# ## The cut, measured
#
# `rp.truncate` reads the same segments under every cut. The ratio is that of the perplexities to the intact model, with
# the standard error of the paired differences. In the figure the x axis is the first pair that stands still; filled and
# empty triangles mark the band by keys and by usage. Read from the right: at which pair does the curve leave zero, and
# where does it rise steeply?

# %%
bands = rp.bands(ckpt, dataset=dataset, segments=segments, length=length)  # where the band is, to compare with
read = {"dataset": dataset, "segments": segments, "length": length, "bands": bands}
cut = rp.show(rp.truncate(ckpt, keep=keep, floor=[1], **read))

# %%
ax = rp.plot.truncate_keep(cut)

# %% [markdown]
# Down to 25 turning pairs nothing is lost. With 24 the loss is within its error (0.3 %), with 22 it is 2.6 %, with 16
# 36 %, and beyond that perplexity grows many times over. So the curve leaves zero where the cut reaches the band, as
# Oka et al. say, but most of the damage is done by faster pairs. Stopping all pairs below the floor (FoPE's clip, 20
# pairs turn) costs 2.9 % over 1,024 tokens, although they hold most of the mean score ([02 ·
# spectrum](02_spectrum.ipynb)): a pair that stands still has lost its rotation and not its content.
#
# ## From the other end
#
# If the slow pairs are nearly free, are the fast ones? `reverse=True` stops the fastest pairs and keeps the slow ones.

# %%
reverse = rp.truncate(ckpt, keep=[0.95, 0.5], reverse=True, **read)
for setting in rp.summary(reverse)["settings"]:
    low, high = setting["turning"]
    print(f"slowest {low} pairs turn: perplexity × {setting['ratio']:.2f} ± {setting['ratio_se'] or np.nan:.2f}")

# %% [markdown]
# The two fastest pairs of 32 cost more than the sixteen slowest: perplexity doubles. Without the faster half it is 16
# times that of the intact model, nearly as bad as without any rotation.
#
# ## Pair by pair
#
# A cut takes many pairs at once. `knockout` takes one: its rotation (`unrotate`: it stands still, its content stays) or
# its content (`remove`: its channels of query and key are zero). Compare the two lower panels with the usage above
# them: does importance sit where the norm is?

# %%
single = rp.truncate(ckpt, knockout=["unrotate", "remove"], pairs=knocked, **read | {"length": length // 2})
axes = rp.plot.truncate_knockout(single)

# %%
for found in rp.summary(single)["knockout"]:
    worst = ", ".join(
        f"{pair} (+{added:.3f})" for pair, added in zip(found["order"][:4], found["added"][:4], strict=True)
    )
    print(
        f"{found['kind']:9s} most harm: pairs {worst} nats per token; rank correlation with usage {found['usage_rank_correlation']:+.2f}"
    )

# %% [markdown]
# The two kinds of importance are opposite. *Rotation* is missed in the fastest pair (+0.42 nats per token, more than
# five times any other pair that was tried) and next to nowhere in the band; its rank correlation with usage is
# negative. *Content* is missed most where usage peaks, at pair 23 (+2.2, with a wide error bar), and also at the
# slowest pair and pair 24; its rank correlation with usage is positive. So the band is mostly content, kept where it
# hardly turns. But the fastest pair, which has little norm, comes fourth: usage is not all there is. Eleven pairs and
# two segments of 512 tokens are a picture, no law; [docs/truncate.md](../docs/truncate.md) has all 32.
#
# ## Another base, another scaling
#
# Instead of stopping pairs one can turn all of them slower or faster. `rp.extend` runs the same weights under other
# bases and scalings, and measures two things: perplexity, and whether a five-digit key hidden in filler text is found.
# The second is there since perplexity can look fine while distant tokens are no longer read. Beside each setting stands
# its L_bound (see [04 · base and bound](04_base_and_bound.ipynb)).

# %%
other = rp.show(
    rp.extend(
        ckpt,
        dataset=dataset,
        segments=segments,
        base=[1e4, "own", 1e6],
        scaling=["none", "yarn"],
        lengths=[length // 4, length],
        passkey_lengths=[length],
        depths=[0, 0.5],
        samples=1,
    )
)

# %%
axes = rp.plot.extend_base(other)

# %% [markdown]
# Perplexity is a mean over positions. By position (logarithmic axis; grey is the model as it is):

# %%
axes = rp.plot.extend_position(other)

# %% [markdown]
# A base ten times smaller or larger costs 15 % and 19 % over 1,024 tokens; YaRN with factor 2 at the model's own base
# costs 2 %. Where the bound of base 10,000 lies (724 tokens, triangle) nothing happens to its curve: beyond it the loss
# is about that of base 1e6, whose bound is far away. Retrieval is where base 10,000 fails, in one of two prompts, while
# YaRN on the same base finds both keys with a bound of 964, below the 1,024 tokens of the prompt as well. That is one
# prompt: a hint that perplexity alone does not tell everything, and a reason to run more `samples`, not a result.
#
# ## The same on Llama-2-7B
#
# Its weights (13.5 GB) are gated: ask for access on the model's page and log in with `hf auth login`. Install the extra
# `datasets`, change the lines of the first code cell to
#
# ```python
# model, dtype, dataset = "meta-llama/Llama-2-7b-hf", "bfloat16", "wikitext-103"
# segments, length = 8, 4096
# knocked = [0, 1, 2, 4, 8, 16, 24, 32, 40, 44, 48, 50, 51, 52, 53, 54, 55, 58, 63]
# ```
#
# and run everything again. Published for it (Oka et al.): its band is at 0.84 of the pairs, and with keep 0.75
# perplexity rises more than fortyfold. We have not run it.
