"""spectrum against the bare forward pass, and against whole attention maps averaged along their diagonals.

    python benchmarks/spectrum.py [--rounds 3] [--segments 8] [--length 1024]

SmolLM2, float32.  Prints a Markdown table; time and peak memory as ratios to the bare forward pass.  The way with
whole maps gives the profile of heads alone, the spectra of ours hold every rotary pair.
"""

import argparse

import harness
import numpy as np
import torch

import rope_probe as rp


def bare(ckpt, tokens, batch):
    """(a) The base model's forward pass, as transformers runs it (sdpa)."""
    with torch.inference_mode():
        for start in range(0, len(tokens), batch):
            ckpt.decoder(input_ids=torch.as_tensor(tokens[start : start + batch]), use_cache=False)


def ours(ckpt, tokens, batch):
    """(b) rope_probe.spectrum."""
    return rp.spectrum(ckpt, tokens=tokens, batch=batch)["profile"].values


def whole_maps(ckpt, tokens, batch):
    """(c) output_attentions with eager attention; scores of whole maps, and the mean of each diagonal."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

    decoder, distances = ckpt.decoder, tokens.shape[1] // 2
    ckpt.model.set_attn_implementation("eager")
    kept, hooks = {}, []
    for index, layer in enumerate(decoder.layers):
        for name in ("q_proj", "k_proj"):

            def keep(_module, _args, out, index=index, name=name):
                kept[index, name] = out.unflatten(-1, (-1, 64)).transpose(1, 2)

            hooks.append(getattr(layer.self_attn, name).register_forward_hook(keep))
    profile = np.zeros((len(decoder.layers), 9, distances))
    with torch.inference_mode():
        for start in range(0, len(tokens), batch):
            ids = torch.as_tensor(tokens[start : start + batch])
            maps = decoder(input_ids=ids, use_cache=False, output_attentions=True).attentions
            assert len(maps) == len(decoder.layers)
            cos, sin = decoder.rotary_emb(kept[0, "q_proj"], torch.arange(ids.shape[1])[None])
            for index in range(len(decoder.layers)):
                q, k = apply_rotary_pos_emb(kept[index, "q_proj"], kept[index, "k_proj"], cos, sin)
                scores = q @ repeat_kv(k, 3).transpose(-1, -2) / 8
                for lag in range(distances):
                    diagonal = scores.diagonal(-lag, -2, -1)[..., 1:]  # the first key left out
                    profile[index, :, lag] += diagonal.mean(-1).sum(0).numpy()
    for hook in hooks:
        hook.remove()
    ckpt.model.set_attn_implementation("sdpa")
    return profile / len(tokens)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--segments", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--only", choices=["bare", "ours", "whole_maps"])
    args = parser.parse_args()
    tokens = np.random.default_rng(0).integers(0, 49152, (args.segments, args.length))
    ckpt = rp.open("demo:smollm2")
    ckpt.geometry(args.length)
    _ = rp.spectrum  # imported by every way, so that memory compares the runs and not the libraries
    ways = {"bare": bare, "ours": ours, "whole_maps": whole_maps}
    if args.only:
        harness.reset_peak()
        ways[args.only](ckpt, tokens, args.batch)
        print(harness.own_peak())
        return
    found = {}

    def run(name):
        found[name] = ways[name](ckpt, tokens, args.batch)

    seconds = harness.alternate({name: (lambda name=name: run(name)) for name in ways}, args.rounds)
    error = np.abs(found["ours"] - found["whole_maps"]).max() / np.abs(found["whole_maps"]).max()
    assert error < 1e-4, error
    sizes = ["--segments", str(args.segments), "--length", str(args.length)]
    memory = {name: harness.peak_memory(__file__, name, sizes) for name in ways}
    labels = ["bare forward (sdpa)", "rope-probe spectrum (every pair)", "whole maps, diagonal means (heads)"]
    rows = [
        [
            label,
            f"{np.median(seconds[name]):.1f} s",
            f"{harness.ratio(seconds[name], seconds['bare']):.2f}",
            f"{memory[name]:.2f} GB",
            f"{memory[name] / memory['bare']:.2f}",
        ]
        for label, name in zip(labels, ways, strict=True)
    ]
    print(f"SmolLM2-135M, float32, {args.segments} × {args.length} tokens, {torch.get_num_threads()} threads\n")
    print(harness.table(["", "time", "ratio", "peak memory", "ratio"], rows))
    print(f"\nwhole maps / ours: {harness.ratio(seconds['whole_maps'], seconds['ours']):.2f}", end="")
    print(f"; largest difference of their profiles: {error:.1e} of the peak")


if __name__ == "__main__":
    main()
