"""Every analysis in memory, with its layers streamed from disk, and in two processes.

    python benchmarks/machines.py [--model demo:smollm2] [--segments 8] [--length 1024] [--analyses bands,heads]

Prints a Markdown table: seconds of the whole command (its imports and the opening of the model included), and the peak
memory of the largest process.  Two processes have one thread each, and half of the segments.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import harness

ANALYSES = {
    "bands": [],
    "spectrum": [],
    "similarity": [],
    "heads": [],
    "truncate": ["--keep", "0.5"],
    "extend": ["--base", "1e4", "--lengths", "1024", "--samples", "0"],
}
ALONE = [sys.executable, "-m", "rope_probe"]
TOGETHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "rope_probe"]
WAYS = {"in memory": (ALONE, []), "streamed": (ALONE, ["--stream-layers"]), "two processes": (TOGETHER, [])}


def measured(command: list[str], folder: str) -> tuple[float, float] | None:
    """Seconds, and peak memory in GB of the largest process; None where the command refuses."""
    environment = os.environ | ({"OMP_NUM_THREADS": "1"} if "torch.distributed.run" in command else {})
    started = time.perf_counter()
    with open(Path(folder) / "said", "w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        print((Path(folder) / "said").read_text()[-300:], file=sys.stderr)
        return None
    return time.perf_counter() - started, usage.ru_maxrss / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo:smollm2")
    parser.add_argument("--segments", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--analyses", default=",".join(ANALYSES))
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for analysis in given.analyses.split(","):
            cells = []
            for way, (start, more) in WAYS.items():
                lengths = [] if analysis == "extend" else ["--length", str(given.length)]
                words = [analysis, given.model, "--segments", str(given.segments), *lengths, *ANALYSES[analysis]]
                found = measured([*start, *words, *more, "-o", str(Path(folder) / "r.nc")], folder)
                cells.append("–" if found is None else f"{found[0]:.0f} s, {found[1]:.2f} GB")
                print(f"  {analysis}, {way}: {cells[-1]}", file=sys.stderr, flush=True)
            rows.append([f"`{analysis}`", *cells])
    print(f"{given.model}, {given.segments} × {given.length} tokens\n")
    print(harness.table(["", *WAYS], rows))


if __name__ == "__main__":
    main()
