"""rope-probe: how pretrained language models use rotary position embeddings.

>>> import rope_probe as rp
>>> ckpt = rp.open("demo:smollm2")
>>> ds = rp.bands(ckpt, segments=8)
>>> rp.plot.bands_profile(ds)
"""

from importlib import import_module

# public name -> where it lives; imported on first use, so that `import rope_probe` costs nothing
_PUBLIC = {
    "open": ("rope_probe.checkpoints", "open_checkpoint"),
    "Checkpoint": ("rope_probe.checkpoints", "Checkpoint"),
    "bands": ("rope_probe.probes.bands", "bands"),
    "spectrum": ("rope_probe.probes.spectrum", "spectrum"),
    "similarity": ("rope_probe.probes.similarity", "similarity"),
    "check": ("rope_probe.probes.check", "check"),
    "compare": ("rope_probe.probes.compare", "compare"),
    "heads": ("rope_probe.probes.heads", "heads"),
    "trajectory": ("rope_probe.probes.trajectory", "trajectory"),
    "truncate": ("rope_probe.probes.truncate", "truncate"),
    "scan": ("rope_probe.probes.scan", "scan"),
    "extend": ("rope_probe.probes.extend", "extend"),
    "interventions": ("rope_probe.interventions", None),
    "report": ("rope_probe.reporting.run", "report"),
    "resumable": ("rope_probe.resume", "resumable"),
    "capture": ("rope_probe.access", "capture"),
    "attention_map": ("rope_probe.access", "attention_map"),
    "load": ("rope_probe.results", "load"),
    "save": ("rope_probe.results", "save"),
    "summary": ("rope_probe.probes", "summary"),
    "show": ("rope_probe.display", "show"),
    "ProbeError": ("rope_probe.errors", "ProbeError"),
    "ProbeWarning": ("rope_probe.errors", "ProbeWarning"),
    "plot": ("rope_probe.plots", None),
    "theory": ("rope_probe.theory", None),
}

__all__ = sorted(_PUBLIC)


def __getattr__(name):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'rope_probe' has no attribute {name!r}")
    module, attribute = _PUBLIC[name]
    found = import_module(module)
    return getattr(found, attribute) if attribute else found


def __dir__():
    return __all__


def load_ipython_extension(ipython) -> None:
    """`%load_ext rope_probe` in a notebook: results that are displayed show their table first."""
    from .display import load_ipython_extension

    load_ipython_extension(ipython)


def unload_ipython_extension(ipython) -> None:
    from .display import unload_ipython_extension

    unload_ipython_extension(ipython)
