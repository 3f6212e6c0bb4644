"""Tables replicated together: what makes them, what happens to them, and what the lake must then hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.source.connection import connect
from tests.support.in_process import InProcess
from tests.support.replicated import OWN_COLUMNS, execute, plain, quoted


@dataclass(frozen=True)
class Case:
    """One table. `source`: what stands after FROM where the lake is to equal it, by default the table itself;
    `options`: what the pipeline says of it; `least` and `below`: the server versions that it is for."""

    table: str
    setup: tuple[str, ...]
    changes: tuple[str, ...] = ()
    source: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    least: int = 0
    below: int = 999999
    snapshot_rows: int = 1

    @property
    def reference(self) -> str:
        return self.source or TableName.parse(self.table).sql


def cases_for(version: int, cases: Sequence[Case]) -> list[Case]:
    """Return the cases that a server of this version supports."""
    return [case for case in cases if case.least <= version < case.below]


def options_of(cases: Sequence[Case]) -> dict[str, Any]:
    """Return the options of all cases in one dictionary."""
    joined: dict[str, Any] = {}
    for case in cases:
        for name, value in case.options.items():
            if isinstance(value, tuple):
                joined[name] = (*joined.get(name, ()), *value)
            else:
                joined[name] = {**joined.get(name, {}), **value}
    return joined


class Replay:
    """Every case set up, copied, changed and streamed, in one pipeline; what the lake held after each."""

    def __init__(self, replicated: InProcess, cases: Sequence[Case]) -> None:
        self.replicated = replicated
        self.cases = {case.table: case for case in cases}
        self.copied: dict[str, Counter[tuple[str, ...]]] = {}
        self.rows_copied: dict[str, int] = {}

    def copy(self) -> None:
        self.replicated.snapshot()
        for table in self.cases:
            self.copied[table] = self.difference(table, self.cases[table].reference)
            self.rows_copied[table] = self.replicated.lake_rows(table).num_rows

    def stream(self) -> None:
        for case in self.cases.values():
            execute(self.replicated.dsn, *case.changes)
        self.replicated.catch_up()

    def difference(self, table: str, reference: str) -> Counter[tuple[str, ...]]:
        """Rows of the lake less rows of the source, counted."""
        lake = self.replicated.lake_rows(table)
        lake = lake.drop_columns([name for name in OWN_COLUMNS if name in lake.column_names])
        rows = zip(*(column.to_pylist() for column in lake.columns), strict=True)
        found = Counter(shown(rows) if lake.num_columns else [()] * self.replicated.lake_rows(table).num_rows)
        found.subtract(shown(self._source_rows(reference, lake.column_names)))
        return Counter({row: count for row, count in found.items() if count})

    def _source_rows(self, reference: str, names: Sequence[str]) -> list[tuple[Any, ...]]:
        connection = connect(self.replicated.dsn, "compare")
        try:
            with connection.cursor() as cursor:
                cursor.execute("set search_path = public")
                cursor.execute(f"select {', '.join(map(quoted, names)) or '1'} from {reference}")
                return cursor.fetchall() if names else [()] * cursor.rowcount
        finally:
            connection.close()

    def assert_equal(self, table: str) -> None:
        """The lake equalled the source after the copy, and does after the stream."""
        record = self.replicated.states()[table]
        assert (str(record.state), record.reason) == ("streaming", "")
        assert self.rows_copied[table] >= self.cases[table].snapshot_rows
        assert not self.copied[table], f"copied: {str(self.copied[table])[:1000]}"
        streamed = self.difference(table, self.cases[table].reference)
        assert not streamed, f"streamed: {str(streamed)[:1000]}"


def shown(rows: Any) -> Iterator[tuple[str, ...]]:
    """Rows as texts, so that NaN equals itself and 0 is not -0."""
    return (tuple(_shown(plain(value)) for value in row) for row in rows)


def _shown(value: Any) -> str:
    return repr(value.astimezone(UTC) if isinstance(value, datetime) and value.tzinfo else value)
