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
# # 2 · Spectrum damage: is attention still a sum of tones?
#
# **Follows** FoPE, *Fourier Position Embedding* (arXiv 2412.17739): RoPE read as a Fourier series, and the three ways
# in which a network damages it. The paper shows its spectra in figures and describes their computation in words; the
# procedure here is ours.
#
# **Reproduces**: the floor frequency and the pairs below it; the single-tone experiment on the first two layers, with
# the controls that its reading needs; a damage for each layer, in numbers.
#
# **Cannot show**: what FoPE is for. It *trains* with the slow pairs set to zero and extends better; on a finished model
# one can only measure. And within a few hundred distances a slow pair has no spectrum that could be told from a
# constant.

# %% tags=["parameters"]
import matplotlib.pyplot as plt
import numpy as np

import rope_probe as rp

model, dtype, dataset = "demo:smollm2", None, None  # no data set: the text that comes with Python
segments, length = 8, 1024

# %% [markdown]
# ## One pair, one tone
#
# If query and key of a pair were always the same two vectors, the share of this pair in the score would be A · cos(ω ·
# distance + φ): a pure tone of the pair's own frequency ω. A head would be a sum of P tones, and its spectrum P lines.
# Three things spoil it, shown below for two tones without any model:
#
# * **leakage**: linear layers mix pairs, so the content that one pair reads already oscillates with another's
#   frequency;
# * **distortion**: a non-linear function of two tones holds their sums, differences and multiples too;
# * **truncation**: a tone that does not finish a turn within the distances has no line, only a smear near zero.
#
# Look for power away from the two dashed frequencies.

# %%
# %load_ext rope_probe
# %matplotlib inline
plt.rcParams["figure.dpi"] = 130
distances = length // 2
m = np.arange(distances)
fast, slow = 2 * np.pi * np.array([1 / 8, 1 / 32])
two = np.cos(fast * m) + np.cos(slow * m)
examples = {
    "two pure tones": two,
    "leakage: the fast one modulated": np.cos(fast * m) * (1 + 0.5 * np.cos(slow * m)),
    "distortion: negative values cut off": np.maximum(two, 0),
    "truncation: half a turn in all": np.cos(np.pi * m / distances),
}
fig, axes = plt.subplots(1, 4, figsize=(9, 2.4), sharey=True, layout="constrained")
for ax, (title, signal) in zip(axes, examples.items(), strict=True):
    power = np.abs(np.fft.rfft((signal - signal.mean()) * np.hanning(distances))) ** 2
    ax.semilogy(2 * np.pi * np.arange(len(power)) / distances, power / power.sum(), lw=0.9)
    for omega in (fast, slow):
        ax.axvline(omega, color="0.6", ls="--", lw=0.8, zorder=0)
    ax.set(xlabel="frequency (rad / token)", ylim=(1e-6, 2), xlim=(0, 2))
    ax.set_title(title, fontsize=8)
axes[0].set_ylabel("share of power")
plt.show()

# %% [markdown]
# Leakage puts lines beside the fast tone, at the sum and the difference of the two frequencies. Distortion adds
# multiples and many more sums. The tone that is cut short piles up at zero.
#
# ## The pairs of a real head
#
# `rp.spectrum` measures the mean score of every head by distance, and what each pair contributes to it, averaged over
# all positions and segments. Here are four pairs of one head in the middle of the model, from fast to slow, beside the
# tone of their own frequency that fits best. Look at how well the orange line follows the blue one, and at how the last
# one differs in kind.

# %%
ckpt = rp.open(model, dtype=dtype)
ds = rp.spectrum(ckpt, dataset=dataset, segments=segments, length=length, inject="all", keep_pairs=True)
layer, head = len(ckpt.layers) // 2, 0
here = ds.sel(layer=layer, head=head)

resolvable = np.flatnonzero(here.resolvable)
chosen = [0, int(resolvable[len(resolvable) // 2]), int(resolvable[-1]), int(2 * ds.sizes["pair"] / 3)]
fig, axes = plt.subplots(1, len(chosen), figsize=(9, 2.5), layout="constrained")
for ax, pair in zip(axes, chosen, strict=True):
    y, omega = here.pair_profile[pair].values, float(here.inv_freq[pair])
    tones = np.stack([np.cos(omega * m), np.sin(omega * m), np.ones(distances)], axis=1)
    fit = tones @ np.linalg.lstsq(tones, y)[0]
    ax.plot(m, y, lw=1)
    ax.plot(m, fit, lw=0.9, ls="--")
    ax.set_xlim(0, min(distances, 6 * 2 * np.pi / omega))
    ax.set_xlabel("distance (tokens)")
    ax.set_title(
        f"pair {pair}: {2 * np.pi / omega:,.0f} tokens per turn\nR² of the tone {float(here.tone_r2[pair]):.3f}",
        fontsize=8,
    )
axes[0].set_ylabel("part of the mean score")
fig.suptitle(f"head {layer}.{head}", fontsize=9)
plt.show()

# %% [markdown]
# Pairs 0, 5 and 10 follow their tones (R² of 0.988 or more). Pair 5 leaves its tone in the first few tokens only, where
# it scores higher. The sizes differ: pair 10 moves the score by about 1 up and down, pair 0 by 0.07. Pair 21 makes a
# 23rd of a turn within the 512 distances; what is there is a slope with noise on it, and no tone could be told from a
# straight line.
#
# ## How pure are the tones?
#
# *Purity* is the share of a pair's power within 2.5 bins of its own frequency, counted for pairs that turn at least
# twice within the distances. *Damage* of a layer is one minus its mean, weighted by usage. Two controls stand beside it
# in the table: what the same estimator says of *pure tones*, and the value expected *with endless text*, since a mean
# over few positions is noisy and noise looks like damage.

# %%
ds = rp.show(ds)

# %% [markdown]
# Look in the left panel (median head) for cells that are not bright, in the middle one (the worst head of each layer)
# for the layers where single heads lose their tones, and in the right one for the pair from which on the mean score is
# no longer a tone at all.

# %%
axes = rp.plot.spectrum_purity(ds)

# %% [markdown]
# By layer, with the two controls. Look at whether the open circles (endless text) lie above the dashes (pure tones),
# and on the right at how much of the scores sits in pairs that are too slow to have a purity here.

# %%
axes = rp.plot.spectrum_damage(ds)

# %% [markdown]
# For the eleven pairs that turn twice, the median head is as pure as a tone can be in every layer. Single heads are
# not: the dark cells of the middle panel (the lowest is 0.29, in head 19.7 at pair 6) are scattered over layers and
# pairs, 3.4 % of all. The right panel falls off around pair 20, the floor, in layers 8 to 10 already from pair 16 on;
# just beyond the floor some pairs still follow their tone.
#
# Damage is 0.1 % to 0.7 % by layer, 0.4 % on average. With endless text 0.2 % would be left, and the estimator finds
# 0.3 % in pure tones. So what looks like damage in this model is, for these pairs, noise of a finite text. In pairs
# below the floor sits most of what heads score by distance, and about their tones this experiment says nothing.
#
# The mean score by distance of three heads, from the cleanest to the most damaged:

# %%
axes = rp.plot.spectrum_profile(ds)

# %% [markdown]
# A clean head need not look periodic: its score is a sum of tones of different size, most of it in tones too slow to
# return within 512 tokens. The middle one sets the nearest tokens apart from all others. Even the most damaged head has
# 2.8 % only.
#
# ## The published experiment: inject one tone
#
# FoPE lets the first layer attend through a single pair and looks at the spectra of the first and second layer. If the
# second is broad, the paper reads this as damage. Below, blue is the model as it is and orange the model with one tone
# injected into layer 0. Look at layer 0 first: one line, as it should be. Then compare orange and blue in layer 1,
# solid with solid and dashed with dashed. In the dashed curves the rotation of layer 1 itself is taken back.

# %%
axes = rp.plot.spectrum_injected(ds)

# %% [markdown]
# The same for every pair, one row each. In the first panel the power should lie on a diagonal. In the third, color is
# the ratio with over without injection; a red diagonal on a pale ground would be an injected tone that the residual
# stream carried into the next layer.

# %%
axes = rp.plot.spectrum_tones(ds)
second = int(ds.inject_layer[1])
rows = [row for row in rp.summary(ds)["inject"] if row["layer"] == second and row["resolvable"]]
for name in ("leakage", "leakage_none", "carried", "carried_elsewhere"):
    print(f"layer {second}, {name:17s} mean over {len(rows)} pairs: {np.mean([row[name] for row in rows]):.3f}")

# %% [markdown]
# Layer 0 is as it should be: all power is near the injected tone, as much as for a pure tone (leakage 0.001). In layer
# 1 the solid curves lie on each other. Both have a line for every fast pair, because layer 1 rotates its own queries
# and keys: leakage is 0.95 with the injection and 0.96 without, over the eleven pairs 0.85 and 0.86. That spectrum
# alone shows no damage. With the rotation of layer 1 taken back, power near the tone is 1.4 times that without
# injection, on average over pairs, and 1.02 times elsewhere; but there is no diagonal in the third panel. Its stripes
# are upright: the same frequencies gain whichever pair is injected, and by the table the tone stands out from its
# neighbours for one pair of eleven.
#
# ## Below the floor
#
# Pairs of frequency under 2π/L never finish a turn in training: FoPE calls them undertrained and sets them to zero. How
# much of what heads score lies there?

# %%
length_trained = ckpt.layers[0].length
below = rp.theory.below_floor(ckpt.layers[0].inv_freq, length_trained)
share = ds.power_below_floor
print(
    f"floor 2π/{length_trained:,}: pairs {np.flatnonzero(below)[0]} to {np.flatnonzero(below)[-1]}, {below.mean():.0%}"
)
print(
    f"share of the squared mean scores: {float(share.mean()):.0%} ({float(share.min()):.0%} to {float(share.max()):.0%})"
)

# %% [markdown]
# Three eighths of the pairs hold 85 % of the squared mean scores, in no layer less than half. What happens to
# perplexity when they are stopped is measured in [05 · cutting the rotation](05_cutting_the_rotation.ipynb).
#
# ## The same on Llama-2-7B
#
# Its weights (13.5 GB) are gated: ask for access on the model's page and log in with `hf auth login`. Install the extra
# `datasets`, change the first code cell to
#
# ```python
# model, dtype, dataset = "meta-llama/Llama-2-7b-hf", "bfloat16", "wikitext-103"
# segments, length = 16, 4096
# ```
#
# and run everything again; with 2,048 distances more pairs turn twice. FoPE names the pairs of Llama-2-7B below the
# floor; by the formula they are 46 to 63 of 64. We have not run it.
