"""similarity against the bare forward pass, and against the naive way: eager maps kept, scipy for every row and head.

    python benchmarks/similarity.py [--rounds 3] [--segments 4] [--length 1024]

SmolLM2, float32.  Prints a Markdown table: time, and peak memory beyond that of the loaded model, as ratios.  All rows
done naively would take ten minutes a round, so that way is scaled from 64 rows: the maps once, and scipy for each row.
"""

import argparse

import harness
import numpy as np
import torch
from scipy import stats

import rope_probe as rp
from rope_probe.probes.similarity import FEWEST_KEYS, QUERIES, sample_rows
from rope_probe.texts import segments_for


def bare(ckpt, tokens, batch):
    """The base model's forward pass, as transformers runs it (sdpa)."""
    with torch.inference_mode():
        for start in range(0, len(tokens), batch):
            ckpt.decoder(input_ids=torch.as_tensor(tokens[start : start + batch]), use_cache=False)


def default(ckpt, tokens, batch):
    """rope_probe.similarity, 64 rows per segment, ten distances."""
    rp.similarity(ckpt, tokens=tokens, batch=batch)


def every(ckpt, tokens, batch):
    """rope_probe.similarity, all rows."""
    rp.similarity(ckpt, tokens=tokens, batch=batch, queries="all")


def maps(ckpt, tokens, batch):
    """What the naive way needs from the model: eager attention, every map and hidden state kept."""
    naive(ckpt, tokens, batch, queries=0)


def naive(ckpt, tokens, batch, queries=QUERIES):
    """scipy.stats.spearmanr for every sampled row of every head; no fixed distances."""
    own = ckpt.model.config._attn_implementation
    ckpt.model.set_attn_implementation("eager")
    try:
        for start in range(0, len(tokens), batch):
            block = torch.as_tensor(tokens[start : start + batch])
            with torch.inference_mode():
                out = ckpt.decoder(block, use_cache=False, output_attentions=True, output_hidden_states=True)
            for layer, weights in enumerate(out.attentions):
                for item in range(len(block) if queries else 0):
                    states = torch.nn.functional.normalize(out.hidden_states[layer][item], dim=-1)
                    similar = (states @ states.T).numpy()
                    for row in sample_rows(start + item, tokens.shape[1], 1, queries, 0):
                        for head in weights[item].numpy():
                            stats.spearmanr(similar[row, 1:row], head[row, 1:row])
            del out, weights
    finally:
        ckpt.model.set_attn_implementation(own)


WAYS = {"bare": bare, "default": default, "every": every, "maps": maps, "naive": naive}
LABELS = {
    "bare": "bare forward (sdpa)",
    "default": "rope-probe similarity, 64 rows",
    "every": "rope-probe similarity, all rows",
    "naive": "naive, 64 rows",
    "naive every": "naive, all rows (scaled)",
}
RIVALS = {"default": "naive", "every": "naive every"}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--segments", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--only", choices=list(WAYS))
    args = parser.parse_args()
    ckpt = rp.open("demo:smollm2")
    tokens = segments_for(ckpt, segments=args.segments, length=args.length).ids
    ckpt.geometry(args.length)
    bare(ckpt, tokens[:1], 1)
    if args.only:
        harness.reset_peak()
        before = harness.own_peak()
        WAYS[args.only](ckpt, tokens, args.batch)
        print(harness.own_peak() - before)
        return
    seconds = harness.alternate(
        {name: lambda run=run: run(ckpt, tokens, args.batch) for name, run in WAYS.items()}, args.rounds
    )
    times = (args.length - 1 - FEWEST_KEYS) / QUERIES
    seconds["naive every"] = [
        kept + (both - kept) * times for both, kept in zip(seconds["naive"], seconds["maps"], strict=True)
    ]
    sizes = ["--segments", str(args.segments), "--length", str(args.length), "--batch", str(args.batch)]
    memory = {name: 1000 * harness.peak_memory(__file__, name, sizes) for name in ("bare", "default", "every", "maps")}
    memory["naive"] = memory["naive every"] = memory["maps"]
    rows = []
    for name, label in LABELS.items():
        rival = RIVALS.get(name)
        rows.append(
            [
                label,
                f"{np.median(seconds[name]):.1f} s",
                f"{harness.ratio(seconds[name], seconds['bare']):.2f}",
                f"{harness.ratio(seconds[rival], seconds[name]):.1f}" if rival else "",
                f"{memory[name]:.0f} MB",
                f"{memory[rival] / memory[name]:.0f}" if rival else "",
            ]
        )
    print(f"SmolLM2-135M, float32, {args.segments} × {args.length} tokens, {torch.get_num_threads()} threads\n")
    print(harness.table(["", "time", "× bare", "naive / ours", "added memory", "naive / ours"], rows))


if __name__ == "__main__":
    main()
