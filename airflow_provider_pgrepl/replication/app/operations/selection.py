"""Selection of the tables that a command names, and waits for locks and running batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import TypeVar

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import BusyError, ConfigError, PgReplError, StateError
from airflow_provider_pgrepl.replication.app.access import Access, not_recorded
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.locks import Purpose
from airflow_provider_pgrepl.replication.state.tables import TableRecord

Refusal = Callable[[TableRecord], PgReplError | None]
"""Returns the error that keeps a table from being changed as it is now, or None."""

_ATTEMPTS = 5
_SHOWN = 20
_SIMILAR = 0.9
"""The least ratio of `difflib`: names have their schema in common."""
_POLL_S = 0.1
_LOOK_S = 2.0
_SAY_EVERY_S = 60.0
Result = TypeVar("Result")


def choose(state_db: StateDatabase, pipeline: str, tables: Iterable[TableName | str]) -> list[TableRecord]:
    """Return the records of these tables, each once.

    Raises ConfigError, which lists all names that are not among the pipeline's tables, and StateError if the
    pipeline is not recorded.
    """
    known = recorded(state_db, pipeline)
    chosen = list(dict.fromkeys(_parse(table) for table in tables))
    if not chosen:
        raise ConfigError("no table was named", "name at least one, as public.orders")
    unknown = [str(table) for table in chosen if table not in known]
    if unknown:
        raise ConfigError(
            f"not among the tables of pipeline {pipeline}: {', '.join(unknown)}",
            _known_tables(unknown, [str(table) for table in known]),
        )
    return [known[table] for table in chosen]


def _known_tables(unknown: Sequence[str], known: Sequence[str]) -> str:
    """Return the hint for unknown names: similar ones, then the pipeline's tables, up to twenty."""
    near = errors.similar(unknown, known, _SIMILAR)
    meant = f"did you mean {', '.join(dict.fromkeys(near))}? " if near else ""
    others = len(known) - _SHOWN
    more = f" and {others} more, which pgrepl status FILE.json lists" if others > 0 else ""
    return f"{meant}its tables: {', '.join(known[:_SHOWN]) or 'none yet'}{more}"


def recorded(state_db: StateDatabase, pipeline: str) -> dict[TableName, TableRecord]:
    """Return all tables of a pipeline. Raises StateError if the pipeline is not recorded."""
    if state_db.read_pipeline(pipeline) is None:
        raise not_recorded(pipeline)
    return state_db.read_tables(pipeline)


def _parse(table: TableName | str) -> TableName:
    if isinstance(table, TableName):
        return table
    try:
        return TableName.parse(table)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def raise_all(problems: Sequence[PgReplError]) -> None:
    """Raise one error with all problems, of the first problem's class. Do nothing if there are none."""
    if not problems:
        return
    if len(problems) == 1:
        raise problems[0]
    hints = dict.fromkeys(problem.hint for problem in problems if problem.hint)
    raise type(problems[0])("\n".join(problem.message for problem in problems), "\n  hint: ".join(hints))


def change(
    state_db: StateDatabase,
    pipeline: str,
    records: Sequence[TableRecord],
    refusal: Refusal,
    make: Callable[[TableRecord], bool],
) -> None:
    """Check all tables, then change each by `make`, which returns False if another process changed it first.

    That table is then read and checked again. Raises the errors that `refusal` returns, StateError if a
    record was deleted, and BusyError if a table changes again and again.
    """
    raise_all([problem for record in records if (problem := refusal(record)) is not None])
    for seen in records:
        record: TableRecord | None = seen
        for _ in range(_ATTEMPTS):
            if record is None:
                raise StateError(
                    f"{seen.table}: its record was deleted during the command, by a teardown or a snapshot",
                    "list the tables with pgrepl status FILE.json, and run the command again for those that"
                    " remain",
                )
            raise_all([problem] if (problem := refusal(record)) is not None else [])
            if make(record):
                break
            record = state_db.read_tables(pipeline).get(seen.table)
        else:
            raise BusyError(
                f"{seen.table}: its state is being changed by another process", "run the command again"
            )


class Deadline:
    """A point in time until which an operation is retried while another process holds a lock."""

    def __init__(self, timeout_s: float) -> None:
        self._end = time.monotonic() + timeout_s

    def retry(self, attempt: Callable[[], Result]) -> Result:
        """Call `attempt` until it raises no BusyError, and return its result.

        After the deadline raise the error.
        """
        while True:
            try:
                return attempt()
            except BusyError:
                if time.monotonic() >= self._end:
                    raise
            time.sleep(_POLL_S)


def lock(state_db: StateDatabase, pipeline: str, purpose: Purpose, deadline: Deadline) -> None:
    """Take the pipeline's lock for this purpose.

    Raises BusyError, which names the holder, after the deadline.
    """
    deadline.retry(lambda: state_db.lock(pipeline, purpose))


def wait_until_unlocked(
    access: Access,
    purpose: Purpose,
    timeout_s: float,
    say: Callable[[str], None],
    pause: Callable[[float], None],
) -> None:
    """Wait until no process holds the pipeline's lock for this purpose, and name the holder once a minute.

    Takes no lock and writes nothing. Raises BusyError after `timeout_s` seconds, SourceConnectionError, and
    what `pause` raises.
    """
    deadline, next_say = time.monotonic() + timeout_s, time.monotonic()
    while True:
        try:
            with StateDatabase(access.state_dsn, f"preflight {access.pipeline.name}") as state_db:
                state_db.check_unlocked(access.pipeline.name, purpose)
            return
        except StateError:
            return  # a schema of another version, which the app migrates or rejects
        except BusyError as error:
            now = time.monotonic()
            if now >= deadline:
                raise
            if now >= next_say:
                next_say = now + _SAY_EVERY_S
                say(f"Waiting: {error.message}")
        pause(_LOOK_S)


def lock_all(state_db: StateDatabase, pipeline: str, deadline: Deadline) -> None:
    """Take the pipeline's locks for every purpose: those of its apps, of maintenance, and of each publisher
    that runs.

    Raises BusyError, which names a holder, after the deadline.
    """
    for purpose in ("replicate", "snapshot", "verify", "maintain"):
        lock(state_db, pipeline, purpose, deadline)
    # A publisher that starts at the same time finds its pipeline gone, or holds a lock when this looks again.
    while held := state_db.held_by_others(pipeline):
        for purpose in held:
            lock(state_db, pipeline, purpose, deadline)


def wait_until_released(state_db: StateDatabase, pipeline: str, since: datetime, deadline: Deadline) -> None:
    """Wait until the replication app works with the states that were set before `since`, or no app runs.

    `since` is a time of the state database's clock. The app works with these states once a batch has begun
    after `since`. If no app runs, takes the replication lock. Raises BusyError after the deadline.
    """

    def attempt() -> None:
        progress = state_db.read_progress(pipeline)
        if progress is None or progress.idle_at is None or progress.idle_at <= since:
            state_db.lock(pipeline, "replicate")

    deadline.retry(attempt)
