"""The commands of `pgrepl` that read the lake, with their options."""

from __future__ import annotations

import sys
from datetime import UTC, datetime

from airflow_provider_pgrepl.errors import ConfigError, escaped
from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline

from .command import Arguments, Command, Option, flag
from .output import JSON, say, until_reader_ends

SOME_TABLES = Option("tables", {"nargs": "*", "metavar": "TABLE", "help": "default: all tables"})
AFTER = Option(
    "--after",
    {
        "metavar": "POSITION",
        "help": "begin after this change ID, LSN or timestamp; default: with the oldest retained change",
    },
)
FOLLOW = flag("--follow", "keep printing new changes until Ctrl-C")
QUERY = Option(
    "query", {"metavar": "SQL", "help": "in DataFusion's SQL, as 'select count(*) from public.orders'"}
)
AS_OF = Option(
    "--as-of", {"metavar": "POSITION", "help": "an LSN or a timestamp; default: the newest consistent point"}
)
FORMAT = Option(
    "--format",
    {"choices": ("table", "csv", "json", "parquet"), "default": "table", "help": "the output format"},
)

SQL = flag("--sql", "print SQL for psql that sets the sequences of a server, none of them back")


def _changes(pipeline: Pipeline, arguments: Arguments) -> int:
    from airflow_provider_pgrepl.replication.events.stream import json_lines

    after = _place(arguments.after, "--after", "ID of a change, LSN, timestamp", "1:0/16B3748:4, ")
    with until_reader_ends(by_interrupt=True):
        for lines in json_lines(pipeline, arguments.tables or None, after, follow=arguments.follow):
            # Write JSON as UTF-8, independent of the terminal's encoding.
            sys.stdout.buffer.write(lines.encode())
            sys.stdout.buffer.flush()
    return process.DONE


def _sql(pipeline: Pipeline, arguments: Arguments) -> int:
    from airflow_provider_pgrepl.lake import open_lake
    from airflow_provider_pgrepl.replication.app.epoch import refuse_without_lake
    from airflow_provider_pgrepl.replication.app.query import writer_of

    refuse_without_lake(pipeline, "sql", "there is nothing to read")
    write = writer_of(arguments.format)
    place = _place(arguments.as_of, "--as-of", "LSN, timestamp", "")
    lake = open_lake(pipeline)
    if place is not None:
        lake = lake.at(place)
    with until_reader_ends(), lake.sql_reader(arguments.query) as rows:
        write(rows, sys.stdout.buffer)
        sys.stdout.buffer.flush()
    return process.DONE


def _sequences(pipeline: Pipeline, arguments: Arguments) -> int:
    from airflow_provider_pgrepl.replication.app import sequences

    found = sequences.read_recorded_sequences(pipeline)
    if arguments.sql:
        sys.stderr.writelines(f"{escaped(problem)}\n" for problem in found.problems)
        return say(sequences.to_sql(found))
    return say(sequences.to_json(found) if arguments.json else sequences.to_text(found, datetime.now(UTC)))


def _place(given: str | None, option: str, kinds: str, example: str) -> str | datetime | None:
    """Return the value of an option as text if it is an ID or an LSN, else as a timestamp.

    Any text with a slash is an ID or an LSN; who uses it checks it. `kinds`: what the option accepts, and
    `example`: an example of the first kind, for the ConfigError that other text raises.
    """
    if given is None or "/" in given:
        return given
    try:
        return datetime.fromisoformat(given)
    except ValueError:
        raise ConfigError(
            f"{option}: {given!r} is not one of: {kinds}",
            f"give it as {example}0/16B3748 or 2026-01-31T12:00:00Z",
        ) from None


READING: tuple[Command, ...] = (
    Command("changes", "print changes as lines of JSON", _changes, (SOME_TABLES, AFTER, FOLLOW)),
    Command(
        "sql",
        "run a query on the lake's tables, all of them as of one point in time",
        _sql,
        (QUERY, AS_OF, FORMAT),
    ),
    Command(
        "sequences",
        "print the recorded values of the source's sequences, from the lake alone",
        _sequences,
        (SQL, JSON),
    ),
)
