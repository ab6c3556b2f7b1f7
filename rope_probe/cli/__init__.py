"""`rope-probe COMMAND MODEL [options]`: one thin file per command, nothing heavy imported before it runs."""

import os
import sys
import warnings

import typer

from ..errors import ProbeError, ProbeWarning
from .bands import bands
from .show import show

app = typer.Typer(
    name="rope-probe",
    help="Mechanistic analysis of rotary position embeddings (RoPE) in pretrained checkpoints.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (bands, show):
    app.command()(command)


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
    if issubclass(category, ProbeWarning):
        print(f"warning: {message}", file=sys.stderr)


def main() -> None:
    """Entry point: every foreseen failure is one sentence on standard error and exit code 1."""
    warnings.showwarning = _show_warning
    try:
        app()
    except ProbeError as error:
        _fail(error, str(error))
    except KeyboardInterrupt:
        print("interrupted before anything was measured.", file=sys.stderr)
        sys.exit(1)
    except MemoryError as error:
        _fail(error, "out of memory: use a smaller --batch or --length, or --dtype bfloat16.")
    except BrokenPipeError:  # `rope-probe … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        if "out of memory" in str(error):
            _fail(error, "out of device memory: use a smaller --batch or --length, or --dtype bfloat16.")
        _fail(
            error,
            f"unexpected {type(error).__name__}: {str(error).strip()[:300]} (run again with `rope-probe --debug …`).",
        )


def _fail(error: BaseException, sentence: str) -> None:
    if os.environ.get("ROPE_PROBE_DEBUG"):
        raise error
    print(f"rope-probe: {sentence}", file=sys.stderr)
    sys.exit(1)
