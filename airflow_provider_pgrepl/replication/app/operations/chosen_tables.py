"""The tables that an operation was asked for: found by name, all of them looked at before any is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from airflow_provider_pgrepl.errors import ConfigError, PgReplError, StateError
from airflow_provider_pgrepl.replication.app.access import not_recorded
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.state.store import Store
from airflow_provider_pgrepl.replication.state.tables import TableRecord

Refusal = Callable[[TableRecord], PgReplError | None]
"""Why a table cannot be had as it is now; None when it can."""

_ATTEMPTS = 5


def choose(store: Store, pipeline: str, tables: Iterable[TableName | str]) -> list[TableRecord]:
    """The records of these tables, each once.

    Raises ConfigError, which lists all names that are none of the pipeline's tables; StateError when the
    pipeline is not recorded.
    """
    known = recorded(store, pipeline)
    chosen = list(dict.fromkeys(_parse(table) for table in tables))
    if not chosen:
        raise ConfigError("no table was named", "name at least one, as public.orders")
    unknown = [str(table) for table in chosen if table not in known]
    if unknown:
        raise ConfigError(
            f"not among the tables of pipeline {pipeline}: {', '.join(unknown)}",
            f"its tables: {', '.join(map(str, known)) or 'none yet'}",
        )
    return [known[table] for table in chosen]


def recorded(store: Store, pipeline: str) -> dict[TableName, TableRecord]:
    """All tables of a pipeline. Raises StateError when it is not recorded."""
    if store.read_pipeline(pipeline) is None:
        raise not_recorded(pipeline)
    return store.read_tables(pipeline)


def _parse(table: TableName | str) -> TableName:
    if isinstance(table, TableName):
        return table
    try:
        return TableName.parse(table)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def raise_all(problems: Sequence[PgReplError]) -> None:
    """Raise one error of the first problem's kind that says them all; nothing when there is none."""
    if not problems:
        return
    if len(problems) == 1:
        raise problems[0]
    hints = dict.fromkeys(problem.hint for problem in problems if problem.hint)
    raise type(problems[0])("\n".join(problem.message for problem in problems), "\n  hint: ".join(hints))


def change(
    store: Store,
    pipeline: str,
    records: Sequence[TableRecord],
    refusal: Refusal,
    make: Callable[[TableRecord], bool],
) -> None:
    """Check all, then change each by `make`, which says False when somebody else was quicker.

    Then that table is read and checked anew. Raises what `refusal` gives; StateError when a table changes
    again and again.
    """
    raise_all([problem for record in records if (problem := refusal(record)) is not None])
    for seen in records:
        record: TableRecord | None = seen
        for _ in range(_ATTEMPTS):
            if record is None:
                raise StateError(f"{seen.table}: was forgotten by another process at the same time")
            raise_all([problem] if (problem := refusal(record)) is not None else [])
            if make(record):
                break
            record = store.read_tables(pipeline).get(seen.table)
        else:
            raise StateError(f"{seen.table}: is being changed by another process", "try again")
