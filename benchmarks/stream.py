"""--stream-layers against the whole model in memory, and on a checkpoint of the shape of Llama-2-7B.

    python benchmarks/stream.py [--segments 8] [--length 1024] [--large FOLDER [--keep]]

Prints a Markdown table: seconds of opening and bands together, and peak memory, each in a process of its own.
--large makes a checkpoint with random bfloat16 weights in FOLDER (13.5 GB), and removes it afterwards; it is only
streamed (2 segments of 256 tokens), beside the bare reading of its files and the arithmetic alone.
"""

import argparse
import shutil
import sys
import time
from pathlib import Path

import harness
import numpy as np
import torch

import rope_probe as rp

LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def make(folder: Path) -> None:
    """Random weights in the shape of Llama-2-7B, one shard for every two layers."""
    import json

    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, LlamaConfig

    folder.mkdir(parents=True)
    config = LlamaConfig(**LLAMA, architectures=["LlamaForCausalLM"], dtype="bfloat16")
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config).state_dict()
    shards: dict[str, list[str]] = {}
    for name in shapes:
        part = int(name.split(".")[2]) // 2 if ".layers." in name else 16
        shards.setdefault(f"model-{part:05d}.safetensors", []).append(name)
    generator = torch.Generator().manual_seed(0)
    noise = torch.empty(2**22, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
    for file, names in shards.items():
        tensors = {}
        for name in names:
            shape = shapes[name].shape
            count = shape.numel()
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
            if len(shape) > 1:  # the same noise from another place on: fresh noise for 13 GB takes minutes
                flat, start = tensors[name].view(-1), hash(name) % 2**21
                for begin in range(0, count, 2**21):
                    piece = flat[begin : begin + 2**21]
                    piece.copy_(noise[start : start + len(piece)])
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index = {name: file for file, names in shards.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def bands(model: str, segments: int, length: int, streamed: bool) -> float:
    """Seconds of opening and bands."""
    harness.reset_peak()
    started = time.perf_counter()
    ckpt = rp.open(model, stream_layers=streamed)
    tokens = np.random.default_rng(0).integers(0, min(32000, ckpt.vocabulary), (segments, length))
    rp.bands(ckpt, tokens=tokens)
    return time.perf_counter() - started


def reading(folder: str) -> float:
    """Seconds to read the weight files, as they come."""
    started, buffer = time.perf_counter(), bytearray(2**24)
    for file in sorted(Path(folder).glob("*.safetensors")):
        with open(file, "rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass
    return time.perf_counter() - started


def arithmetic(segments: int, length: int) -> float:
    """Seconds of the matrix products of one layer in bfloat16, times 32."""
    size, inner = LLAMA["hidden_size"], LLAMA["intermediate_size"]
    x = torch.randn(segments * length, size).bfloat16()
    weights = [torch.randn(size, size).bfloat16() for _ in range(4)] + [torch.randn(inner, size).bfloat16()] * 2
    y, down = torch.randn(segments * length, inner).bfloat16(), torch.randn(size, inner).bfloat16()
    started = time.perf_counter()
    for weight in weights:
        x @ weight.T
    y @ down.T
    return 32 * (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo:smollm2")
    parser.add_argument("--segments", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--large", type=Path)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--only", choices=["whole", "streamed"])
    given = parser.parse_args()
    if given.only:
        seconds = bands(given.model, given.segments, given.length, given.only == "streamed")
        print(seconds, harness.own_peak())
        return
    print("| | seconds, opening and bands | peak memory, GB |\n|---|---|---|")

    def row(label: str, model: str, segments: int, length: int, way: str) -> None:
        options = ["--model", model, "--segments", str(segments), "--length", str(length), "--only", way]
        seconds, peak = harness.in_process(__file__, options)
        print(f"| {label} | {seconds:.1f} | {peak:.2f} |", flush=True)

    shape = f"{given.segments} × {given.length}"
    for way in ("whole", "streamed"):
        row(f"{given.model}, {shape}, {way}", given.model, given.segments, given.length, way)
    if given.large:
        if not given.large.exists():
            make(given.large)
        try:
            row("7B, 2 × 256, streamed", str(given.large), 2, 256, "streamed")
            print(f"| 7B, its files read and thrown away | {reading(str(given.large)):.1f} | |")
            print(f"| 7B, its matrix products | {arithmetic(2, 256):.1f} | |")
        finally:
            if not given.keep:
                shutil.rmtree(given.large)


if __name__ == "__main__":
    sys.exit(main())
