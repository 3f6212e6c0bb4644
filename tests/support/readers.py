"""Every way in which people read a lake table with a condition, in one process that serves all tests.

Not in the tests' process: deltalake's own file system, which `pl.scan_delta(use_pyarrow=True)` cannot do
without, now and then aborts the process as it ends. Importing the readers takes seconds, so it is done once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import DeltaTable, QueryBuilder
from pyarrow import fs

Condition = tuple[str, str, str]
"""Column, operator (`is null` and `is not null` too), and the value's text; a binary value's in hex."""
Found = dict[str, list[list[int] | str]]
"""The ids of the rows for each condition, or the error, by reader."""

_ARROW_OPERATORS = {"=": "__eq__", "<": "__lt__", ">=": "__ge__"}


def sql_of(condition: Condition, literal: Callable[[str, str], str]) -> str:
    """Return a condition as SQL. `literal` makes SQL of a column's value from its text."""
    column, operator, text = condition
    if operator.startswith("is"):
        return f"{column} {operator}"
    return f"{column} {operator} {literal(column, text)}"


def read_all_ways(tables: Mapping[str, list[Condition]]) -> dict[str, Found]:
    """Return the rows that every reader finds in each table, by the table's path."""
    answer = _reading_process().ask(json.dumps(tables))
    found: dict[str, Found] = json.loads(answer)
    return found


class _ReadingProcess:
    """This module as a program. It ends with the tests' process, which closes its input."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def ask(self, question: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{question}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            self._process.wait()
            self._errors.seek(0)
            raise AssertionError(f"the readers' process ended: {self._errors.read()[-4000:]}")
        return answer


_processes: list[_ReadingProcess] = []


def _reading_process() -> _ReadingProcess:
    if not _processes or not _processes[-1].is_running:
        _processes.append(_ReadingProcess())
    return _processes[-1]


def _arrow_condition(schema: pa.Schema, condition: Condition) -> ds.Expression:
    column, operator, text = condition
    field = ds.field(column)
    if operator == "is null":
        return field.is_null()
    if operator == "is not null":
        return field.is_valid()
    return getattr(field, _ARROW_OPERATORS[operator])(_arrow_value(schema.field(column).type, text))


def _arrow_value(lake_type: pa.DataType, text: str) -> pa.Scalar:
    if pa.types.is_binary(lake_type):
        return pa.scalar(bytes.fromhex(text), lake_type)
    if pa.types.is_timestamp(lake_type) and lake_type.tz:
        text += "Z"
    return pa.scalar(text).cast(lake_type)


class _Ways:
    """The readers, over one table."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._table = DeltaTable(uri)
        self._schema = pa.schema(self._table.schema().to_arrow())
        self._files = fs.SubTreeFileSystem(uri, fs.LocalFileSystem())

    def dataset(self, condition: Condition) -> Iterable[int]:
        wanted = _arrow_condition(self._schema, condition)
        found: list[int] = self._dataset.to_table(columns=["id"], filter=wanted)["id"].to_pylist()
        return found

    @cached_property
    def _dataset(self) -> ds.Dataset:
        return self._table.to_pyarrow_dataset(filesystem=self._files)

    def arrow_table(self, condition: Condition) -> Iterable[int]:
        wanted = _arrow_condition(self._schema, condition)
        found = self._table.to_pyarrow_table(filesystem=self._files, filters=wanted, columns=["id"])
        ids: list[int] = found["id"].to_pylist()
        return ids

    def datafusion(self, condition: Condition) -> Iterable[int]:
        sql = f"select id from t where {sql_of(condition, self._datafusion_literal)}"
        ids: list[int] = pa.table(self._builder.execute(sql).read_all())["id"].to_pylist()
        return ids

    @cached_property
    def _builder(self) -> QueryBuilder:
        return QueryBuilder().register("t", self._table)

    def _datafusion_literal(self, column: str, text: str) -> str:
        if pa.types.is_binary(self._schema.field(column).type):
            return f"decode('{text}', 'hex')"
        return f"arrow_cast('{text}', '{self._datafusion_types[column]}')"

    @cached_property
    def _datafusion_types(self) -> dict[str, str]:
        told = ", ".join(f"arrow_typeof({name}) as {name}" for name in self._schema.names)
        found = pa.table(self._builder.execute(f"select {told} from t limit 1").read_all())
        types: dict[str, str] = found.to_pylist()[0]
        return types

    def duckdb(self, condition: Condition) -> Iterable[int]:
        sql = f"select id from t where {sql_of(condition, self._duckdb_literal)}"
        return [row[0] for row in self._duckdb.execute(sql).fetchall()]

    @cached_property
    def _duckdb(self) -> Any:
        import duckdb

        connection = duckdb.connect()
        connection.execute("set timezone = 'UTC'")
        return connection.register("t", self._dataset)

    def _duckdb_literal(self, column: str, text: str) -> str:
        types = {row[0]: row[1] for row in self._duckdb.execute("describe t").fetchall()}
        return f"unhex('{text}')" if types[column] == "BLOB" else f"cast('{text}' as {types[column]})"

    def polars(self, condition: Condition) -> Iterable[int]:
        return self._by_polars(self._scanned, condition)

    def polars_by_arrow(self, condition: Condition) -> Iterable[int]:
        return self._by_polars(self._scanned_by_arrow, condition)

    @cached_property
    def _scanned(self) -> Any:
        import polars

        return polars.scan_delta(self._uri)

    @cached_property
    def _scanned_by_arrow(self) -> Any:
        import polars

        return polars.scan_delta(self._uri, use_pyarrow=True)

    def _by_polars(self, rows: Any, condition: Condition) -> Iterable[int]:
        import polars

        column, operator, text = condition
        field = polars.col(column)
        if operator == "is null":
            wanted = field.is_null()
        elif operator == "is not null":
            wanted = field.is_not_null()
        else:
            of = rows.collect_schema()[column]
            value = polars.Series(pa.array([_arrow_value(self._schema.field(column).type, text)])).cast(of)
            wanted = getattr(field, _ARROW_OPERATORS[operator])(polars.lit(value[0], of))
        return rows.filter(wanted).select("id").collect()["id"].to_list()


READERS = ("dataset", "arrow_table", "datafusion", "duckdb", "polars", "polars_by_arrow")


def _found(way: Callable[[Condition], Iterable[int]], condition: Condition) -> list[int] | str:
    try:
        return sorted(way(condition))
    except BaseException as error:  # panics of Rust are no Exceptions
        return f"{type(error).__name__}: {str(error)[:300]}"


def _main(tables: Mapping[str, list[Any]]) -> dict[str, Found]:
    found: dict[str, Found] = {}
    for uri, conditions in tables.items():
        ways = _Ways(uri)
        found[uri] = {
            name: [_found(getattr(ways, name), tuple(condition)) for condition in conditions]
            for name in READERS
        }
    return found


if __name__ == "__main__":
    for line in sys.stdin:
        sys.stdout.write(json.dumps(_main(json.loads(line))) + "\n")
        sys.stdout.flush()
    os._exit(0)
