"""heads against the bare forward pass, and against the same statistics from transformers' eager maps.

    python benchmarks/heads.py [--rounds 3] [--segments 4] [--length 1024]

SmolLM2, float32.  Prints a Markdown table; time and peak memory as ratios to the bare forward pass.
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
    """(b) rope_probe.heads: weights, bands, induction."""
    rp.heads(ckpt, tokens=tokens, batch=batch)


def eager(ckpt, tokens, batch):
    """(c) Whole maps from `output_attentions`, and a few of the same statistics from them, no bands."""
    ckpt.decoder.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            for start in range(0, len(tokens), batch):
                block = torch.as_tensor(tokens[start : start + batch])
                maps = ckpt.decoder(input_ids=block, use_cache=False, output_attentions=True).attentions
                length = block.shape[1]
                back = (torch.arange(length)[:, None] - torch.arange(length)).float()
                for weights in maps:
                    rows = weights[:, :, 1:]
                    torch.special.entr(rows).sum(-1).mean((0, 2))
                    (rows * back[1:]).sum(-1).mean((0, 2))
                    rows.diagonal(1, -2, -1).mean((0, 2)), rows.diagonal(0, -2, -1).mean((0, 2))
                    rows[..., 0].mean((0, 2))
                    for last in (8, 64, 512):
                        (rows * (back[1:] < last)).sum(-1).mean((0, 2))
    finally:
        ckpt.decoder.set_attn_implementation("sdpa")


WAYS = {"bare": bare, "ours": ours, "eager": eager}
LABELS = {"bare": "bare forward (sdpa)", "ours": "rope-probe heads", "eager": "eager maps, weights only"}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--segments", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--only", choices=list(WAYS))
    args = parser.parse_args()
    tokens = np.random.default_rng(0).integers(0, 49152, (args.segments, args.length))
    ckpt = rp.open("demo:smollm2")
    ckpt.geometry(args.length), ckpt.geometry(256), ckpt.tokenizer
    _ = rp.heads  # imported by every way, so that memory compares the runs and not the libraries
    if args.only:
        harness.reset_peak()
        WAYS[args.only](ckpt, tokens, args.batch)
        print(harness.own_peak())
        return
    seconds = harness.alternate(
        {name: lambda run=run: run(ckpt, tokens, args.batch) for name, run in WAYS.items()}, args.rounds
    )
    sizes = ["--segments", str(args.segments), "--length", str(args.length)]
    memory = {name: harness.peak_memory(__file__, name, sizes) for name in WAYS}
    rows = [
        [
            LABELS[name],
            f"{np.median(seconds[name]):.1f} s",
            f"{harness.ratio(seconds[name], seconds['bare']):.2f}",
            f"{memory[name]:.2f} GB",
            f"{memory[name] / memory['bare']:.2f}",
        ]
        for name in WAYS
    ]
    print(f"SmolLM2-135M, float32, {args.segments} × {args.length} tokens, {torch.get_num_threads()} threads\n")
    print(harness.table(["", "time", "ratio", "peak memory", "ratio"], rows))


if __name__ == "__main__":
    main()
