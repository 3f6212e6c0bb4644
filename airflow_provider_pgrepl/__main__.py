"""The command `pgrepl COMMAND FILE.json …`, which runs, inspects and changes a pipeline without Airflow.

`python -m airflow_provider_pgrepl` is the same command.

PGREPL_DSN is the DSN of the source, and PGREPL_STATE_DSN that of the state (default: the source).
PGREPL_PRIMARY_DSN is that of the primary, for a source that is a standby (optional).
docs/reference/exit-codes.md describes the exit codes.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from airflow_provider_pgrepl import __version__
from airflow_provider_pgrepl.cli.apps import split
from airflow_provider_pgrepl.cli.command import Command, add_commands
from airflow_provider_pgrepl.cli.commands import COMMANDS, GROUPS
from airflow_provider_pgrepl.errors import PgReplError
from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.runtime import process_io
from airflow_provider_pgrepl.replication.runtime.host import check_libraries
from airflow_provider_pgrepl.trace import trace_of

_CRASHED = 1
"""The exit code of Python for an unhandled exception."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv`, by default the process's arguments, and return its exit code."""
    own, spark = split(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    arguments, more = parser.parse_known_args(own, argparse.Namespace(spark=spark))
    # Tables may also follow options. argparse returns those as unknown arguments.
    if isinstance(getattr(arguments, "tables", None), list) and not any(one.startswith("-") for one in more):
        arguments.tables += more
    elif more:
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    command: Command = arguments.command
    if spark and not command.is_app:
        parser.error(
            f"{command.name} takes no options of spark-submit\n  hint: remove -- and everything after it"
        )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(process_io.SafeFormatter("%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    try:
        with process.traces_of_threads():
            check_libraries()
            return command.run(arguments)
    except PgReplError as error:
        sys.stderr.write(f"{error}\n")
        return process.exit_code(error)
    except Exception as error:  # noqa: BLE001 - its text may hold values of rows
        sys.stderr.write(f"pgrepl failed, {process.BUG}: unexpected {trace_of(error)}\n")
        return _CRASHED


_EPILOG = (
    "PGREPL_DSN is the connection string of the source, PGREPL_STATE_DSN that of the state database (default:"
    " PGREPL_DSN). Options after `--` are passed to spark-submit: pgrepl snapshot FILE.json -- --master spark://…"
)


def _parser() -> argparse.ArgumentParser:
    parser = process.CommandParser(prog="pgrepl", epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"pgrepl {__version__}")
    add_commands(parser, COMMANDS, GROUPS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
