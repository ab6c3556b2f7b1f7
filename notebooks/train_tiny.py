"""Train tiny byte-level Llamas and keep checkpoints: does a frequency band form, and where theory puts it?

    python notebooks/train_tiny.py OUT [--base 1e4] [--length 256] [--steps 600] [--minutes 4]

One run for one base and one length; text is the built-in one (English prose that comes with Python), read as bytes.
The checkpoints are OUT/step0, OUT/step50, …, folders that rope-probe opens:

    rope-probe trajectory OUT/step* --tokens OUT/tokens.npy -o trajectory.nc --figure trajectory.png

(shells sort step* by name: ``$(ls -d OUT/step* | sort -V)`` keeps the order of training.)
"""

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from rope_probe.texts import built_in

PARTS = 12  # the last of so many parts of the text is never trained on


def model_of(base: float, length: int) -> LlamaForCausalLM:
    """A Llama of three layers with heads of 64 channels: 32 rotary pairs."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=length,
            rope_parameters={"rope_type": "default", "rope_theta": base},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def schedule(step: int, steps: int, warm: int = 40) -> float:
    """Share of the learning rate: a linear rise, then half a cosine down to a tenth."""
    if step < warm:
        return (step + 1) / warm
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def checkpoints(steps: int) -> set[int]:
    """0, 25, 50, 100, 200, 400, … and the last step."""
    return {0, 25, steps, *(50 * 2**n for n in range(20) if 50 * 2**n < steps)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--base", type=float, default=1e4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this time, at the next checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable_progress_bar()

    data = np.frombuffer(built_in().encode(), dtype=np.uint8).astype(np.int64)
    held_out = len(data) - len(data) // PARTS
    train, rest = torch.from_numpy(data[:held_out]), data[held_out:]
    args.out.mkdir(parents=True, exist_ok=True)
    count = min(16, len(rest) // args.length)
    np.save(args.out / "tokens.npy", rest[: count * args.length].reshape(count, args.length))

    torch.manual_seed(args.seed)
    model = model_of(args.base, args.length)
    decays = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=args.rate,
        betas=(0.9, 0.95),
    )
    kept, started = checkpoints(args.steps), time.perf_counter()
    batch, loss = args.tokens // args.length, torch.tensor(math.log(256))
    for step in range(args.steps + 1):
        if step in kept:
            minutes = (time.perf_counter() - started) / 60
            model.save_pretrained(args.out / f"step{step}")
            print(f"step {step}: loss {loss.item():.3f} nats per byte, {minutes:.1f} min", flush=True)
            if step == args.steps or minutes > args.minutes:
                break
        at = torch.randint(len(train) - args.length, (batch,))
        ids = torch.stack([train[i : i + args.length] for i in at])
        for group in optimizer.param_groups:
            group["lr"] = args.rate * schedule(step, args.steps)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


if __name__ == "__main__":
    main()
