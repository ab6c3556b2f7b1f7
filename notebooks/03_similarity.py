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
# # 3 · Similarity: do similar tokens get more attention?
#
# **Follows** *Base of RoPE Bounds Context Length* (arXiv 2405.14591), whose bound rests on the assumption that a head
# gives similar tokens more attention than random ones, and the discussion of that paper: reviewers asked whether
# attention sinks fake such a correlation, and the authors answered by comparing keys at the same relative position
# (Spearman, 200 segments of 1,024 tokens of PG19).
#
# **Reproduces**: the rank correlation of similarity and attention for every head of a small model; its sign; what sinks
# and distance have to do with it.
#
# **Cannot show**: a published number, since none is public. For Llama-1-7B, Llama-2-7B and Llama-3-8B only the sign
# (positive) and the order (strongest in Llama-3) are known.

# %% tags=["parameters"]
import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy.stats import spearmanr

import rope_probe as rp

model, dtype, dataset = "demo:smollm2", None, None  # no data set: the text that comes with Python
segments, length = 6, 1024

# %% [markdown]
# ## One query
#
# What is compared? For one query token, every key before it has two numbers: the cosine of its hidden state with the
# query's (as both enter the layer), and the score that the head gives it. The question is whether they rank keys alike.
# Below are three heads of a layer in the middle and a single query, the last token of a short text. Keys are colored by
# their distance; the first token is marked with a cross.

# %%
# %load_ext rope_probe
# %matplotlib inline
plt.rcParams["figure.dpi"] = 130
ckpt = rp.open(model, dtype=dtype)
text = (
    "The baker opened the shop before the first bus left. He lit the oven, weighed the flour and set the dough aside. "
    "At seven the teacher came for bread, as on every day, and the baker wrapped two loaves for her. She paid, and she "
    "asked about his daughter, who wanted to become a teacher too. Later the bus brought people from the villages; they "
    "bought bread and cake, talked about the weather, and went back before the rain. In the evening the baker cleaned "
    "the oven, counted the money and closed the shop. The next morning the baker"
)
ids = torch.tensor([ckpt.tokenizer(text)["input_ids"]])
middle = len(ckpt.layers) // 2
with rp.capture(ckpt, layers=[middle], keep=("scores", "weights")) as c, torch.no_grad():
    hidden = ckpt.model(ids.to(ckpt.model.device), output_hidden_states=True).hidden_states[middle][0].float().cpu()
states = torch.nn.functional.normalize(hidden, dim=-1)
similar = (states @ states[-1]).numpy()

fig, axes = plt.subplots(1, 3, figsize=(9, 2.9), sharex=True, layout="constrained")
for head, ax in enumerate(axes):
    score = c.scores[middle][0, head, -1]
    distance = len(score) - 1 - np.arange(len(score))
    dots = ax.scatter(similar[1:-1], score[1:-1], c=distance[1:-1], s=9, cmap="viridis_r")
    ax.plot(similar[0], score[0], "x", color="C3", ms=7)
    rho = spearmanr(similar[1:-1], score[1:-1]).statistic
    ax.set_title(
        f"head {middle}.{head}: rho {rho:+.2f}, weight on the first {c.weights[middle][0, head, -1, 0]:.2f}", fontsize=8
    )
    ax.set_xlabel("cosine with the query's hidden state")
axes[0].set_ylabel("score before softmax")
fig.colorbar(dots, ax=axes, label="distance (tokens)")
plt.show()

# %% [markdown]
# In all three heads more similar keys score higher, if weakly (rho +0.10 to +0.35). Two other things are plainer. The
# first token is among the least similar of all, has about the highest score, and takes 20 % to 60 % of the weight. And
# the nearest tokens, in yellow, score high whatever their similarity. These are the two objections below.
#
# ## All heads
#
# `rp.similarity` takes 64 query rows of each segment, ranks all keys before each by both numbers, and averages
# Spearman's *rho* over rows and segments. The first position is left out as a key (`sink=1`). In the table look at the
# column *> 0*, the share of heads with a positive rho, and at the first layer.

# %%
ds = rp.show(rp.similarity(ckpt, dataset=dataset, segments=segments, length=length))

# %%
axes = rp.plot.similarity_heads(ds)

# %% [markdown]
# rho is positive in 98 % of the heads and on average in every layer, +0.21 over all. Layer 0 is the exception: it gets
# bare token embeddings, and two thirds of its heads are slightly negative. From layer 25 on all heads are well above
# zero; the highest single value, +0.52, is that of head 2.4.
#
# ## First objection: the sink
#
# Many heads rest on the first token when they have nothing to attend to. Its score is high for reasons that have
# nothing to do with similarity, and its hidden state is unlike most others. Does that one key decide the correlation?
# Rank correlations make it easy to test: put the first position back in as a key (`sink=0`), or take more positions out
# (`sink=8`), and see what moves.

# %%
found = {1: ds}
for sink in (0, 8):
    found[sink] = rp.similarity(ckpt, dataset=dataset, segments=segments, length=length, sink=sink)
weight = c.weights[middle][0, :, 64:, 0].mean(-1)  # queries from position 64 on
print(f"mean weight on the first token, heads of layer {middle}: {weight.min():.2f} to {weight.max():.2f}")
for sink in sorted(found):
    values = rp.summary(found[sink])
    difference = abs(found[sink].rho - ds.rho)
    print(
        f"keys from position {sink}: rho {values['rho']:+.3f} ± {values['rho_se']:.3f}, positive in {values['positive']:.0%} "
        f"of heads, largest change of a head {float(difference.max()):.3f}"
    )

# %% [markdown]
# Hardly anything moves: +0.207 with the first position as a key, +0.213 without, +0.211 without the first eight, and no
# head changes by more than 0.05. In one layer alone up to 58 % of the weight rests on that key; but by rank it is one
# key of hundreds. The sink does not make the correlation, and it does not hide it either.
#
# ## Second objection: distance
#
# Near tokens may be more alike, and near tokens get more attention because they are near. Then similarity and score
# would agree without one causing the other. The authors' answer: hold the distance fixed. For a distance Δ, rank over
# query positions *m* the similarity of tokens *m* and *m* − Δ, and the score between them. No key is nearer than
# another here, and no sink is involved. The curves below are that correlation against Δ; dashed lines are the free one
# of the same layers. If distance were behind it all, the curves would lie at zero.

# %%
axes = rp.plot.similarity_distance(ds)

# %%
axes = rp.plot.similarity_control(ds)

# %% [markdown]
# No curve comes near zero: the means lie between +0.11 and +0.37 at every distance up to 512. From 4 to 8 tokens on
# they fall slowly, and from 2 to 32 tokens back they lie above the free value of the same layers. In the second figure
# two thirds of the heads are above the diagonal: with distance held fixed the correlation is mostly larger, not
# smaller. So in this model neither the sink nor distance is what makes similar tokens score higher. Whether similarity
# is the *cause*, a correlation cannot tell.
#
# ## A second model
#
# Gemma 3 270M, from this repository (`rp.similarity(rp.open("demo:gemma3"))` measures it anew). Its layers see a window
# of 512 tokens, except for every sixth. Look for layers below zero.

# %%
gemma = rp.load("../figures/data/similarity-gemma3.nc")
axes = rp.plot.similarity_layers([ds, gemma])
for one in (ds, gemma):
    layers = rp.summary(one)["by_layer"]
    print(one.attrs["model"], "layers with a negative mean:", [row["layer"] for row in layers if row["rho"] < 0])

# %% [markdown]
# Gemma 3 is less uniform. Its layers 2 and 5 are slightly negative, layers 14 to 16 reach higher than the same ones of
# SmolLM2, and the course over depth is another one. What both have in common is the sign in nearly all layers, which is
# also all that the authors say of the Llama models.
#
# ## The same on Llama-2-7B
#
# Its weights (13.5 GB) are gated: ask for access on the model's page and log in with `hf auth login`. Install the extra
# `datasets`, change the first code cell to
#
# ```python
# model, dtype, dataset = "meta-llama/Llama-2-7b-hf", "bfloat16", "pg19"
# segments, length = 200, 1024
# ```
#
# and run everything again. This is the text and the number of segments that the authors name. Scores are computed in
# float32 whatever the model runs in. We have not run it.
