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
    hub = logging.getLogger("huggingface_hub")
    hub_level = hub.level
    hub.setLevel(logging.ERROR)
    disable_progress_bars("huggingface_hub.snapshot_download")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hf_logging.set_verbosity(level)
        hub.setLevel(hub_level)
