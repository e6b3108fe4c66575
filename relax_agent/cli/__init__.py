"""The command line: ``relax-agent``.

Each group of commands lives in a module of its own and is loaded when it is used. An error of the
project's own tree ends the program with one line, the last on stderr, and the error's exit status;
anything else is a fault in the program and shows its traceback.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit with its status."""
    sys.exit(_run())


def _run() -> int:
    import click

    from relax_agent.cli.app import app
    from relax_agent.errors import RelaxError

    try:
        return int(app(standalone_mode=False) or 0)
    except RelaxError as error:
        return _fail(str(error), error.exit_code)
    except click.exceptions.Abort:
        return _fail("interrupted", 130)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except BrokenPipeError:
        return 1


def _fail(message: str, status: int) -> int:
    sys.stdout.flush()
    print(f"error: {message}", file=sys.stderr, flush=True)
    return status
