"""The command line: ``relax-agent``.

Each group of commands lives in a module of its own and is loaded when it is used. An error of the
project's own tree ends the program with one line, the last on stderr, and the error's exit status;
anything else is a fault in the program and shows its traceback.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any


def main() -> None:
    """Run the command line and exit with its status."""
    status = _run()
    sys.stdout.flush()
    sys.stderr.flush()
    if status > 128:  # ended by a signal: threads that nobody can stop may still compute
        os._exit(status)
    sys.exit(status)


def _run() -> int:
    try:
        with _sigterm_like_ctrl_c():
            return _command()
    except KeyboardInterrupt:
        return _fail("interrupted by Ctrl-C", 128 + signal.SIGINT)
    except _Terminated:
        return _fail("ended by SIGTERM", 128 + signal.SIGTERM)
    except BrokenPipeError:  # whoever read our output has gone, as in `… | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _command() -> int:
    import typer

    from relax_agent.cli.app import app
    from relax_agent.errors import RelaxError

    try:
        return int(app(standalone_mode=False) or 0)
    except RelaxError as error:
        return _fail(str(error), error.exit_code)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except Exception as error:
        if not isinstance(error, _usage_error()):
            raise
        error.show()
        return int(error.exit_code)


def _usage_error() -> Any:
    """Return the base of all errors in the use of a command.

    Typer brings a copy of click from some version on, so ``click.ClickException`` may be another.
    """
    import typer

    return next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


class _Terminated(BaseException):
    """SIGTERM came while nothing had a handler of its own."""


@contextlib.contextmanager
def _sigterm_like_ctrl_c() -> Iterator[None]:
    def stop(signum: int, frame: FrameType | None) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _fail(message: str, status: int) -> int:
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    print(f"error: {message}", file=sys.stderr, flush=True)
    return status
