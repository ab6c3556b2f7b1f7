"""truncate against the bare forward pass with a chunked head, and against the memory of the bare base model.

    python benchmarks/truncate.py [--rounds 3] [--model demo:smollm2] [--segments 4] [--length 1024] [--memory-only]

Prints a Markdown table: what one setting costs (the entering of the intervention and its verification included), and
peak memory.  The bar for memory is Gemma 3, with its vocabulary of 262,144, at 4096 tokens:

    python benchmarks/truncate.py --model demo:gemma3 --segments 1 --length 4096 --batch 1 --memory-only
"""

import argparse

import harness
import numpy as np
import torch

import rope_probe as rp
from rope_probe.likelihood import segment_nll

CUTS = (0.9, 0.75, 0.5, 0.25)


def body(ckpt, tokens, batch):
    """(a) The base model alone: no logits."""
    with torch.inference_mode():
        for start in range(0, len(tokens), batch):
            ckpt.decoder(input_ids=torch.as_tensor(tokens[start : start + batch]), use_cache=False)


def bare(ckpt, tokens, batch):
    """(b) The forward pass with the head in chunks, nothing changed."""
    for start in range(0, len(tokens), batch):
        segment_nll(ckpt.model, torch.as_tensor(tokens[start : start + batch]))


def ours(ckpt, tokens, batch, settings, bands):
    """(c) rope_probe.truncate: the intact run and these settings."""
    rp.truncate(ckpt, tokens=tokens, batch=batch, keep=CUTS[:settings], bands=bands)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="demo:smollm2")
    parser.add_argument("--segments", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--memory-only", action="store_true")
    parser.add_argument("--only", choices=["body", "bare", "ours"])
    args = parser.parse_args()
    ckpt = rp.open(args.model)
    tokens = np.random.default_rng(0).integers(0, ckpt.vocabulary, (args.segments, args.length))
    bands = rp.bands(ckpt, tokens=tokens[:1, :64])
    ckpt.geometry(args.length)
    ways = {
        "body": lambda: body(ckpt, tokens, args.batch),
        "bare": lambda: bare(ckpt, tokens, args.batch),
        "ours": lambda: ours(ckpt, tokens, args.batch, 1, bands),
    }
    if args.only:
        harness.reset_peak()
        ways[args.only]()
        print(harness.own_peak())
        return
    names = ["model", "segments", "length", "batch"]
    sizes = [part for name in names for part in (f"--{name}", str(getattr(args, name)))]
    memory = {name: harness.peak_memory(__file__, name, sizes) for name in ways}
    print(f"{args.model}, {ckpt.dtype}, {args.segments} × {args.length} tokens, {torch.get_num_threads()} threads\n")
    labels = {"body": "base model, no logits", "bare": "chunked head", "ours": "rope-probe truncate"}
    rows = [[labels[name], f"{memory[name]:.2f} GB", f"{memory[name] / memory['body']:.2f}"] for name in ways]
    print(harness.table(["", "peak memory", "ratio"], rows))
    if args.memory_only:
        return
    several = {
        "bare": ways["bare"],
        "intact and 1": ways["ours"],
        f"intact and {len(CUTS)}": lambda: ours(ckpt, tokens, args.batch, len(CUTS), bands),
    }
    seconds = harness.alternate(several, args.rounds)
    one, all_ = list(several)[1:]
    bare_time = np.array(seconds["bare"])
    rows = [
        ["bare forward with chunked head", f"{np.median(bare_time):.1f} s", ""],
        [f"truncate, {one}", f"{np.median(seconds[one]):.1f} s", f"{harness.ratio(seconds[one], 2 * bare_time):.3f}"],
        [
            f"truncate, {all_}",
            f"{np.median(seconds[all_]):.1f} s",
            f"{harness.ratio(seconds[all_], (1 + len(CUTS)) * bare_time):.3f}",
        ],
    ]
    print()
    print(harness.table(["", "time", "per run, over the bare forward"], rows))


if __name__ == "__main__":
    main()
