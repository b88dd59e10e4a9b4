"""What both command lines share: how an error of ours leaves the program. Owns no command and no option."""

from __future__ import annotations

import errno
import importlib.util
import os
import sys
from pathlib import Path

import typer

from predictor.errors import PredictorError
from runtime.errors import StrawError


def run_cli(app: typer.Typer, arguments: list[str] | None = None) -> None:
    """Runs `app` on `arguments` (default: the program's) and ends the program by SystemExit.

    Exit codes: 0; 1 after an error of ours, one line on stderr, or when the reader of our output has gone; 2 after a usage
    error. Any other exception is a fault of the program and keeps its traceback.
    """
    try:
        if sys.stdout is None:
            raise StrawError("stdout: it is closed, expected a place to print to; redirect it to a file or /dev/null")
        try:
            require_own_kernels()
            app(arguments)
        finally:
            sys.stdout.flush()  # here, where a pipe that has closed is still ours to handle
    except (StrawError, PredictorError) as error:
        print("error:", " ".join(str(error).splitlines()), file=sys.stderr)
        raise SystemExit(1) from None
    except BrokenPipeError:
        _forget_stdout()
        raise SystemExit(1) from None
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        _forget_stdout()
        print(f"error: stdout: {error.strerror}, expected room for the output; redirect it elsewhere", file=sys.stderr)
        raise SystemExit(1) from None


def _forget_stdout() -> None:
    """Python flushes stdout once more at exit; with nowhere to write that would print a complaint."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def require_own_kernels() -> None:
    """Raises StrawError if `import kernels` would find another distribution's package instead of the one beside this.

    A package of that name on the Hugging Face side is probed for by transformers and may be installed next to us.
    """
    spec = importlib.util.find_spec("kernels")
    found = Path(spec.origin).parent if spec is not None and spec.origin else None
    expected = Path(__file__).parents[1] / "kernels"
    if found is None or found.resolve() != expected.resolve():
        raise StrawError(
            f"package kernels: found at {found}, expected {expected}; another distribution owns the name here, run: pip uninstall kernels, or use a fresh environment"
        )
