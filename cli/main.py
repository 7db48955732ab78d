"""`batchkv`: the verbs, and what users see when something is wrong."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from batchkv import __version__
from batchkv.cli import plan, run
from batchkv.cli.interruption import watch_for_signals
from batchkv.errors import UserError

USER_ERROR = 2

# What typer raises for options it does not know or cannot read. Its releases differ in where that class is.
_CommandLineError: Any = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="batchkv",
    help="Offline batch inference for language models: plans the shared prefixes of a whole job.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"batchkv {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


app.command("run")(run.run)
app.command("plan")(plan.plan)


def main() -> None:
    """The console script. A user's mistake is one line and exit code 2, never a traceback."""
    watch_for_signals()
    try:
        sys.exit(app(standalone_mode=False))
    except UserError as error:
        _fail(str(error))
    except _CommandLineError as error:
        _fail(f"{error.format_message() or 'name a verb: run or plan'} (see batchkv --help)")


def _fail(message: str) -> None:
    print(f"batchkv: {message}", file=sys.stderr)
    sys.exit(USER_ERROR)


if __name__ == "__main__":
    main()
