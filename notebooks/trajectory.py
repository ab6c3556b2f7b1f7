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
# # Does a frequency band form, and where theory puts it?
#
# Four tiny byte-level Llamas (three layers, two heads of 32 rotary pairs, about 0.4 M parameters), trained on the built-in
# text with two bases and two lengths, 2048 tokens a step:
#
# ```sh
# for base in 1e3 1e5; do for length in 64 256; do
#     python notebooks/train_tiny.py runs/b$base-l$length --base $base --length $length --steps 800 --minutes 4.5
#     rope-probe trajectory $(ls -d runs/b$base-l$length/step* | sort -V) --tokens runs/b$base-l$length/tokens.npy \
#         -o figures/data/trajectory-tiny-b$base-l$length.nc
# done; done
# ```
#
# (compared here up to step 400, which every run reached within its time.) The text of the measurement is the last twelfth,
# which was not trained on.

# %%
import rope_probe as rp

# %matplotlib inline

runs = {
    (base, length): rp.load(f"../figures/data/trajectory-tiny-b{base}-l{length}.nc")
    for base in ("1e3", "1e5")
    for length in (64, 256)
}

print("base   length  predicted         i_band of usage at step")
print("               full..half turn   0     25    50    100   200   400")
for (base, length), ds in runs.items():
    values = rp.summary(ds)
    rules = values["by_layer_type"]["full_attention"]["predicted"]
    rows = "  ".join(f"{row['i_band_usage']:4.1f}" for row in values["checkpoints"])
    print(f"{base}   {length:6d}  {rules['full_turn']:5.1f} to {rules['half_turn']:4.1f}     {rows}")

# %% [markdown]
# No band has formed where the rules put it. What happens instead, in all four runs:
#
# * At step 25, with hardly anything learned, the usage leaves the untrained mean (15 to 17, the middle of the ladder) for
#   faster pairs.
# * By step 100 to 200 the norm sits on the very fastest pairs (i_band of usage 0 to 4). Our guess:
#   a byte model learns spelling first, and for that it needs the positions of the last few bytes.
# * From then on the models of length 256 move back towards slower pairs, the one of base 1e3 farther than the one of base
#   1e5, which is the order of the predictions (19.7 and 11.8). Six heads and 400 steps do not allow more than that.
#
# The profile over pairs says one thing more: norms fall off at about the pair that makes half a turn within the length.
# Slower pairs lose their norm early and do not get it back.

# %%
axes = rp.plot.trajectory(runs["1e5", 64])

# %%
axes = rp.plot.trajectory(runs["1e3", 256])

# %% [markdown]
# The published bands are those of models many orders of magnitude larger and longer in training. This run says when the
# band is *not* there yet: the fast, positional pairs come first. It neither confirms nor refutes where a band settles.
