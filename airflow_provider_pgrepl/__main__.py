"""`python -m airflow_provider_pgrepl status FILE.json [--json]`: how a pipeline stands, without Airflow.

The DSN of the source is taken from PGREPL_DSN, that of the state from PGREPL_STATE_DSN (else the source).
Exit codes: 0 said, 75 trying again may help, 78 it will not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from airflow_provider_pgrepl.errors import PgReplError
from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app.status import read_status
from airflow_provider_pgrepl.replication.app.status_text import to_json, to_text
from airflow_provider_pgrepl.replication.config import Pipeline


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(process.WILL_NOT_HELP, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        status = read_status(Pipeline.read(arguments.pipeline))
    except PgReplError as error:
        sys.stderr.write(f"{error}\n")
        return process.exit_code(error)
    sys.stdout.write((to_json(status) if arguments.json else to_text(status)) + "\n")
    return process.DONE


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m airflow_provider_pgrepl")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    status = commands.add_parser("status", help="tables, states, positions and lag of a pipeline")
    status.add_argument("pipeline", metavar="FILE.json", help="the pipeline file")
    status.add_argument("--json", action="store_true", help="for programs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
