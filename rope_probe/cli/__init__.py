"""`rope-probe COMMAND MODEL [options]`: one thin file per command, nothing heavy imported before it runs."""

import functools
import os
import shlex
import signal
import sys
import warnings

import typer

from ..errors import ProbeError, ProbeWarning, SharedError, UsageError, first_words
from ..processes import rank
from . import common
from .bands import bands
from .bound import bound
from .check import check
from .compare import compare
from .extend import extend
from .figures import figures
from .heads import heads
from .inspect import inspect
from .report import report
from .scan import scan
from .show import show
from .similarity import similarity
from .spectrum import spectrum
from .trajectory import trajectory
from .truncate import truncate


def _guarded(command):
    """The command, with every foreseen failure one sentence on standard error: exit code 1, or 2 for wrong arguments."""

    @functools.wraps(command)
    def run(*args, **kwargs):
        try:
            if command not in SHARED and rank():
                return None
            return command(*args, **kwargs)
        except (typer.Exit, typer.Abort):
            raise
        except typer.BadParameter as error:
            _fail(error, error.format_message(), code=2)
        except ProbeError as error:
            _fail(error, str(error), code=2 if isinstance(error, UsageError) else 1)
        except KeyboardInterrupt as error:
            _fail(error, "interrupted before the end; nothing more was written.")
        except MemoryError as error:
            _fail(error, "out of memory: use a smaller --batch or --length, or --dtype bfloat16.")
        except BrokenPipeError:  # `rope-probe … | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)
        except Exception as error:
            if isinstance(error, OSError) and error.filename:
                _fail(error, f"cannot use {error.filename} ({error.strerror}): check the path and its permissions.")
            if "out of memory" in str(error):
                _fail(error, "out of device memory: use a smaller --batch or --length, or --dtype bfloat16.")
            _fail(
                error,
                f"unexpected {type(error).__name__}: {first_words(error, 300)} (run again with `rope-probe --debug …`).",
            )

    return run


def _fail(error: BaseException, sentence: str, code: int = 1) -> None:
    if os.environ.get("ROPE_PROBE_DEBUG"):
        raise error
    if not (isinstance(error, SharedError) and rank()):  # of several processes with the same error, one says it
        print(f"rope-probe: {sentence}", file=sys.stderr)
    sys.exit(code)


app = typer.Typer(
    name="rope-probe",
    help="Mechanistic analysis of rotary position embeddings (RoPE) in pretrained checkpoints.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
SHARED = (bands, spectrum, similarity, heads, trajectory, truncate, extend)  # several processes read a text together …
ALONE = (
    scan,
    inspect,
    bound,
    check,
    compare,
    show,
    figures,
    report,
)  # … and of those that run these, the first does it all
for command in SHARED + ALONE:
    app.command()(_guarded(command))


@app.callback(epilog="Start here:  rope-probe bands demo:smollm2 --figure band.png")
def _common(
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks."),
    version: bool = typer.Option(False, "--version", help="Print the version and exit.", is_eager=True),
) -> None:
    if debug:
        os.environ["ROPE_PROBE_DEBUG"] = "1"
    if version:
        from importlib.metadata import version as installed

        print(installed("rope-probe"))
        raise typer.Exit()


def _show_warning(message, category, *_args, **_kwargs) -> None:
    if issubclass(category, ProbeWarning) and rank() == 0:
        print(f"warning: {message}", file=sys.stderr)


def _end(*_) -> None:
    """A scheduler ends the run: keep what it has measured, unless that is just being stored."""
    resume = sys.modules.get("rope_probe.resume")  # not imported for it: --help shall be quick
    keeper = resume.current() if resume else None
    if keeper is None or not keeper.over:
        raise KeyboardInterrupt


def main() -> None:
    """Entry point."""
    words = shlex.join(["rope-probe", *sys.argv[1:]])
    common.COMMAND = words.encode("utf-8", "replace").decode()  # a path need not be UTF-8
    warnings.showwarning = _show_warning
    signal.signal(signal.SIGTERM, _end)
    app()
