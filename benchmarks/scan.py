"""scan of a 70B-shaped checkpoint: time and peak memory.

    python benchmarks/scan.py [--layers 3] [--folder /tmp]

Writes a sharded bfloat16 checkpoint with the shape of Llama-3.1-70B and few layers: random embeddings, norms, queries
and keys; the other weights are holes in the files, as a scan does not touch them.  Scans it in a process of its own,
once with layer 0 alone and once with all layers, so that the time of one more layer is known and that of 80 follows.
The files (about 2.6 GB) are removed at the end.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from harness import own_peak, table

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 5e5,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
ALL_LAYERS = 80
HIDDEN, WIDE, KEYS = CONFIG["hidden_size"], CONFIG["intermediate_size"], 1024


def shapes(layer: int) -> dict[str, tuple]:
    """Tensors of a decoder layer."""
    own = {
        "input_layernorm.weight": (HIDDEN,),
        "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        "self_attn.k_proj.weight": (KEYS, HIDDEN),
        "self_attn.v_proj.weight": (KEYS, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        "post_attention_layernorm.weight": (HIDDEN,),
        "mlp.gate_proj.weight": (WIDE, HIDDEN),
        "mlp.up_proj.weight": (WIDE, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, WIDE),
    }
    return {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}


def write(path: Path, tensors: dict[str, tuple], rng) -> None:
    """A safetensors file in which what a scan reads is random and the rest is a hole."""
    header, place = {}, 0
    for name, shape in tensors.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(header).encode()
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, shape in tensors.items():
            if not any(part in name for part in ("q_proj", "k_proj", "input_layernorm", "embed")):
                continue
            stream.seek(8 + len(text) + header[name]["data_offsets"][0])
            for rows in range(0, shape[0], 4096):
                part = min(4096, shape[0] - rows)
                values = rng.standard_normal((part, *shape[1:]), dtype=np.float32) * (0.02 if len(shape) > 1 else 1)
                stream.write((values.view(np.uint32) >> 16).astype("<u2").tobytes())  # bfloat16, cut off
        stream.truncate(8 + len(text) + place)


def make(folder: Path, layers: int) -> int:
    """The checkpoint; its size in bytes."""
    rng = np.random.default_rng(0)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    parts = [{"model.embed_tokens.weight": (CONFIG["vocab_size"], HIDDEN)}]
    parts += [shapes(layer) for layer in range(layers)]
    parts += [{"model.norm.weight": (HIDDEN,), "lm_head.weight": (CONFIG["vocab_size"], HIDDEN)}]
    where = {}
    for number, tensors in enumerate(parts):
        file = f"model-{number + 1:05d}-of-{len(parts):05d}.safetensors"
        write(folder / file, tensors, rng)
        where |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    # words of a text follow a power law: frequent ones come first in a vocabulary
    ids = np.minimum(rng.zipf(1.2, (16, 1024)), CONFIG["vocab_size"]) - 1
    np.save(folder / "ids.npy", ids)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def measure(folder: Path, layers: int) -> dict:
    """Seconds, processor seconds, peak memory and bytes read of a scan, in a process of its own."""
    command = [sys.executable, __file__, "--only", str(folder), "--layers", str(layers)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def only(folder: str, layers: int) -> None:
    from rope_probe.probes.scan import scan

    wall, processor = time.perf_counter(), time.process_time()
    ds = scan(folder, tokens=f"{folder}/ids.npy", layers=range(layers))
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    read = ds.attrs["weight_bytes_read"]
    print(json.dumps({"wall": wall, "processor": processor, "peak": own_peak(), "read": read}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--folder")
    parser.add_argument("--only")
    arguments = parser.parse_args()
    if arguments.only:
        only(arguments.only, arguments.layers)
        return
    folder = Path(tempfile.mkdtemp(prefix="scan-70b-", dir=arguments.folder))
    try:
        size = make(folder, arguments.layers)
        runs = {layers: measure(folder, layers) for layers in (1, arguments.layers)}
    finally:
        shutil.rmtree(folder)
    first, last = runs.values()
    more = ALL_LAYERS - 1
    step = {name: (last[name] - first[name]) / (arguments.layers - 1) for name in ("wall", "processor", "read")}
    whole = {name: first[name] + more * step[name] for name in step} | {"peak": last["peak"]}
    labels = {"layer 0": first, f"layers 0–{arguments.layers - 1}": last, "80 layers, extrapolated": whole}
    rows = [
        [
            name,
            f"{run['wall']:.0f} s",
            f"{run['processor']:.0f} s",
            f"{run['read'] / 1e9:.2f} GB",
            f"{run['peak']:.2f} GB",
        ]
        for name, run in labels.items()
    ]
    print(f"70B-shaped, {arguments.layers} layers, {size / 1e9:.1f} GB of files")
    print(table(["", "time", "processor time", "weights read", "peak memory"], rows))


if __name__ == "__main__":
    main()
