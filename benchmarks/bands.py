"""bands against the bare forward pass, and against the same norms through TransformerLens' hooks.

    python benchmarks/bands.py [--rounds 3] [--segments 8] [--length 1024]

SmolLM2, float32.  Prints a Markdown table; time and peak memory as ratios to the bare forward pass.
"""

import argparse
import sys

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
    """(b) rope_probe.bands."""
    rp.bands(ckpt, tokens=tokens, batch=batch)


def bridge_of(ckpt):
    """The checkpoint as a TransformerLens bridge (it wraps the model, so it gets one of its own)."""
    from transformer_lens.model_bridge import TransformerBridge

    folder = ckpt.model.config._name_or_path
    return TransformerBridge.boot_transformers(
        folder, hf_model=ckpt.model, tokenizer=ckpt.tokenizer, device="cpu", dtype=torch.float32
    )


def transformer_lens(bridge, tokens, batch):
    """(c) hook_rot_q and hook_rot_k cached, nothing else, and the same statistics from them."""
    wanted = ("hook_rot_q", "hook_rot_k")
    with torch.inference_mode():
        for start in range(0, len(tokens), batch):
            block = torch.as_tensor(tokens[start : start + batch])
            _, cache = bridge.run_with_cache(block, names_filter=lambda name: name.endswith(wanted))
            for value in cache.values():
                norm = torch.hypot(value[..., :32], value[..., 32:])[:, 1:].flatten(0, 1)
                norm.mean(0), norm.std(0)
                top = torch.nn.functional.one_hot(norm.argmax(-1), 32).sum(0)
                assert int(top.sum()) == norm.shape[0] * norm.shape[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--segments", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--only", choices=["bare", "ours", "transformer_lens"])
    args = parser.parse_args()
    tokens = np.random.default_rng(0).integers(0, 49152, (args.segments, args.length))
    ckpt = rp.open("demo:smollm2")
    ckpt.geometry(args.length)
    _ = rp.bands  # imported by every way, so that memory compares the runs and not the libraries

    def way(name):
        if name == "transformer_lens":
            bridge = bridge_of(rp.open("demo:smollm2"))
            return lambda: transformer_lens(bridge, tokens, args.batch)
        return lambda: {"bare": bare, "ours": ours}[name](ckpt, tokens, args.batch)

    if args.only:
        run = way(args.only)
        harness.reset_peak()
        run()
        print(harness.own_peak())
        return
    names = ["bare", "ours", "transformer_lens"]
    seconds = harness.alternate({name: way(name) for name in names}, args.rounds)
    sizes = ["--segments", str(args.segments), "--length", str(args.length), "--batch", str(args.batch)]
    memory = {name: harness.peak_memory(__file__, name, sizes) for name in names}
    labels = ["bare forward (sdpa)", "rope-probe bands", "TransformerLens, hook_rot_q/k"]
    rows = [
        [
            label,
            f"{np.median(seconds[name]):.1f} s",
            f"{harness.ratio(seconds[name], seconds['bare']):.2f}",
            f"{memory[name]:.2f} GB",
            f"{memory[name] / memory['bare']:.2f}",
        ]
        for label, name in zip(labels, names, strict=True)
    ]
    print(f"SmolLM2-135M, float32, {args.segments} × {args.length} tokens, {torch.get_num_threads()} threads\n")
    print(harness.table(["", "time", "ratio", "peak memory", "ratio"], rows))
    print(
        f"\nTransformerLens / ours: {harness.ratio(seconds['transformer_lens'], seconds['ours']):.2f}", file=sys.stdout
    )


if __name__ == "__main__":
    main()
