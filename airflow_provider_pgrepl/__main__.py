"""`pgrepl COMMAND FILE.json …`: a pipeline run, looked at and mended, without Airflow.

The same as `python -m airflow_provider_pgrepl`.

The DSN of the source is taken from PGREPL_DSN, that of the state from PGREPL_STATE_DSN (else the source).
Exit codes: 0 done, 75 trying again may help, 78 it will not (or `--yes` is missing).
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from airflow_provider_pgrepl import __version__
from airflow_provider_pgrepl.cli.applications import add_commands, split
from airflow_provider_pgrepl.cli.commands import COMMANDS, Arguments, Work
from airflow_provider_pgrepl.errors import PgReplError
from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app import process as app_arguments
from airflow_provider_pgrepl.replication.runtime import process_io
from airflow_provider_pgrepl.replication.runtime.host import check_libraries
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.trace import trace_of

_CRASHED = 1
"""As Python itself ends a program."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    own, spark = split(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    arguments, more = parser.parse_known_args(own, argparse.Namespace(spark=spark))
    # Tables may stand after options, too, which argparse takes for more than it knows.
    if isinstance(getattr(arguments, "tables", None), list) and not any(one.startswith("-") for one in more):
        arguments.tables += more
    elif more:
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    if spark and not hasattr(arguments, "application"):
        parser.error("nothing of this command is for spark-submit: leave -- out, and what follows it")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(process_io.Printable("%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    try:
        with process.traces_of_threads():
            check_libraries()
            if arguments.pipeline is None:
                return int(arguments.work(arguments))
            work: Work = arguments.work
            return work(Pipeline.read(arguments.pipeline), arguments)
    except PgReplError as error:
        sys.stderr.write(f"{error}\n")
        return process.exit_code(error)
    except Exception as error:  # noqa: BLE001 - its text may hold values of rows
        sys.stderr.write(f"pgrepl ended by an error of its own: unexpected {trace_of(error)}\n")
        return _CRASHED


def _try_events(pipeline: Pipeline, arguments: Arguments) -> int:
    from airflow_provider_pgrepl.replication.app import try_events

    return try_events.run(pipeline, arguments)


def _publish_snapshot(pipeline: Pipeline, arguments: Arguments) -> int:
    from airflow_provider_pgrepl.replication.app.creek import publish_snapshot

    return publish_snapshot.run(pipeline, arguments)


def _consume(arguments: Arguments) -> int:
    from airflow_provider_pgrepl.replication.app.creek import consume

    return consume.run(arguments)


def _creek(arguments: Arguments) -> int:
    from airflow_provider_pgrepl.replication.app.creek import service

    return service.run(arguments)


def _warm_up(_: Arguments) -> int:
    from airflow_provider_pgrepl.replication.runtime import compiled_loops

    logging.getLogger(compiled_loops.__name__).setLevel(logging.INFO)
    compiled_loops.ensure_compiled()
    sys.stdout.write(f"all loops are compiled, in {compiled_loops.folder()}\n")
    return process.DONE


_EPILOG = (
    "The connection string of the source is taken from PGREPL_DSN, that of the state from PGREPL_STATE_DSN,"
    " else the source. What follows `--` is for spark-submit: pgrepl snapshot FILE.json -- --master spark://…"
)


def _parser() -> argparse.ArgumentParser:
    parser = process.Parser(prog="pgrepl", epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"pgrepl {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=process.Parser)
    add_commands(commands)
    for name, purpose, work, options in COMMANDS:
        command = commands.add_parser(name, help=purpose, description=purpose)
        command.add_argument("pipeline", metavar="FILE.json", help="the pipeline file")
        for option in options:
            option.add_to(command)
        command.set_defaults(work=work)
    purpose = "what a publisher makes of changes"
    events = commands.add_parser("events", help=purpose, description=purpose)
    tried = events.add_subparsers(required=True, metavar="COMMAND", parser_class=process.Parser)
    purpose = "print the events that a publisher would send, from recorded changes, without its target"
    command = tried.add_parser("try", help=purpose, description=purpose)
    command.add_argument("pipeline", metavar="FILE.json", help="the pipeline file")
    app_arguments.of_try_events(command)
    command.set_defaults(work=_try_events)
    purpose = "send a table's rows to NATS, as a snapshot on creek's wire"
    command = commands.add_parser("publish-snapshot", help=purpose, description=purpose)
    command.add_argument("pipeline", metavar="FILE.json", help="the pipeline file")
    app_arguments.of_publish_snapshot(command)
    command.set_defaults(work=_publish_snapshot)
    purpose = "keep tables of other databases in PostgreSQL, by what comes over NATS"
    command = commands.add_parser("consume", help=purpose, description=purpose)
    app_arguments.of_consume(command)
    command.set_defaults(pipeline=None, work=_consume)
    purpose = "stand in for creek: all that its environment variables ask for, in one process"
    command = commands.add_parser("creek", help=purpose, description=purpose)
    command.set_defaults(pipeline=None, work=_creek)
    warm_up = "compile what this host will run, before the first start waits for it"
    command = commands.add_parser("warm-up", help=warm_up, description=warm_up)
    command.set_defaults(pipeline=None, work=_warm_up)
    return parser


if __name__ == "__main__":
    sys.exit(main())
