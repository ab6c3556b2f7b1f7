"""Keep other libraries off the user's screen."""

from __future__ import annotations

import contextlib
import logging
import warnings


@contextlib.contextmanager
def quiet():
    """Keep the libraries' own progress bars and advice off the user's screen while opening."""
    from huggingface_hub.utils import disable_progress_bars
    from transformers.utils import logging as hf_logging

    level = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    others = [logging.getLogger(name) for name in ("huggingface_hub", "accelerate")]
    levels = [logger.level for logger in others]
    for logger in others:
        logger.setLevel(logging.ERROR)
    disable_progress_bars("huggingface_hub.snapshot_download")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hf_logging.set_verbosity(level)
        for logger, before in zip(others, levels, strict=True):
            logger.setLevel(before)
