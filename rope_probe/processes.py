"""Several processes that share one reading (torchrun): who we are, and how results get to all of them."""

from __future__ import annotations

import os
from functools import cache

from .errors import ProbeError, UsageError, first_words


def rank() -> int:
    """Number of this process; 0 where it is alone."""
    return _number("RANK", 0)


def size() -> int:
    """How many processes there are."""
    return _number("WORLD_SIZE", 1)


def device() -> str | None:
    """The GPU of this process, where several share the GPUs of a machine."""
    import torch

    if size() == 1 or not torch.cuda.is_available():
        return None
    return f"cuda:{_number('LOCAL_RANK', 0) % torch.cuda.device_count()}"


def gather(mine) -> list:
    """What every process has brought, in the order of their ranks; all must call it.

    Raises
    ------
    ProbeError
        A process has ended, or cannot be reached.
    """
    if size() == 1:
        return [mine]
    import torch.distributed

    found: list = [None] * size()
    try:
        _join()
        torch.distributed.all_gather_object(found, mine)
    except RuntimeError as error:
        raise ProbeError(f"a process of this run is gone ({first_words(error, 120)}): start the run again.") from error
    return found


@cache
def _join() -> None:
    import torch.distributed

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")  # what is gathered lies on the host


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise UsageError(f"{name} is {text!r} in the environment: start several processes with torchrun.")
    return int(text)
