"""`batchkv`: the verbs, and what users see when something is wrong."""

from __future__ import annotations

import os
import sys

import typer
from batchkv.cli import plan, run

from batchkv.errors import UserError

USER_ERROR, ROW_ERRORS, INTERRUPTED = 2, 3, 130

app = typer.Typer(
    name="batchkv",
    help="Offline batch inference for language models: plans the shared prefixes of a whole job.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("run")(run.run)
app.command("plan")(plan.plan)


def main() -> None:
    """The console script. A user's mistake is one line and exit code 2, never a traceback."""
    # the tokenizers library warns about forks, which nothing here does
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        app()
    except UserError as error:
        print(f"batchkv: {error}", file=sys.stderr)
        sys.exit(USER_ERROR)
    except KeyboardInterrupt:
        print("batchkv: interrupted; nothing was written", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # `batchkv plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


if __name__ == "__main__":
    main()
