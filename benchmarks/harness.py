"""Alternating runs in one process, medians of ratios; peak memory of each way in a process of its own."""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable


def alternate(ways: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each way, run in turn A B C A B C …, after one round that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for counted in range(-1, rounds):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            elapsed = time.perf_counter() - started
            if counted >= 0:
                seconds[name].append(elapsed)
            print(f"  {name}: {elapsed:.2f} s", file=sys.stderr)
    return seconds


def ratio(over: list[float], under: list[float]) -> float:
    """Median of the ratios, round by round, so that a machine whose speed drifts does not matter."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def in_process(script: str, arguments: list[str]) -> list[float]:
    """The numbers in the last line that a script prints, in a fresh process."""
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, check=True)
    return [float(number) for number in done.stdout.splitlines()[-1].split()]


def peak_memory(script: str, way: str, arguments: list[str] = ()) -> float:
    """Peak resident memory in GB that `script --only way` prints, in a fresh process."""
    return in_process(script, ["--only", way, *arguments])[-1]


def reset_peak() -> None:
    """Forget the peak so far (loading weights); Linux only, elsewhere the peak includes it."""
    try:
        with open("/proc/self/clear_refs", "w") as stream:
            stream.write("5")
    except OSError:
        pass


def own_peak() -> float:
    """Peak resident memory of this process in GB, since `reset_peak`."""
    try:
        with open("/proc/self/status") as stream:
            for line in stream:
                if line.startswith("VmHWM"):
                    return int(line.split()[1]) / 1e6
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform != "darwin" else peak / 1e9


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])
