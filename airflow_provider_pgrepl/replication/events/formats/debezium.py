"""The Debezium envelope: before, after, source and op of a change, as in Debezium's PostgreSQL connector."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import version
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.errors import TransformError, one_line
from airflow_provider_pgrepl.replication.changelog.layout import letters
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.events.changes import (
    LETTERS,
    OPERATIONS,
    Change,
    ChangeSide,
    Row,
    TypedShape,
)
from airflow_provider_pgrepl.replication.events.columns import PublishedColumn
from airflow_provider_pgrepl.replication.settings.tables import TableOptions
from airflow_provider_pgrepl.replication.values import TypedColumn

from .debezium_types import DebeziumParser, debezium_column
from .json import BodyFormat, RelationRows
from .json_text import TEXT, JsonRows, joined, json_string, on_one_line

Schema = dict[str, Any]

_SNAPSHOT = "true,first,first_in_data_collection,last_in_data_collection,last,false,incremental"
_CODES = {"insert": '"c"', "update": '"u"', "delete": '"d"', "truncate": '"t"'}
_CODE_OF_EACH = tuple(_CODES[op] for op in OPERATIONS.values())
_UNSENT_HINT = (
    "have the server send it (ALTER TABLE … REPLICA IDENTITY FULL, or STORAGE MAIN of the column), or skip"
    " the event (on_error: skip_and_record)"
)


def _field(field: str, kind: str, *, optional: bool = False, **more: Any) -> Schema:
    return {"type": kind, "optional": optional, **more, "field": field}


_SOURCE = [
    _field("version", "string"),
    _field("connector", "string"),
    _field("name", "string"),
    _field("ts_ms", "int64"),
    _field(
        "snapshot",
        "string",
        optional=True,
        name="io.debezium.data.Enum",
        version=1,
        parameters={"allowed": _SNAPSHOT},
        default="false",
    ),
    _field("db", "string"),
    _field("sequence", "string", optional=True),
    _field("ts_us", "int64", optional=True),
    _field("ts_ns", "int64", optional=True),
    _field("schema", "string"),
    _field("table", "string"),
    _field("txId", "int64", optional=True),
    _field("lsn", "int64", optional=True),
    _field("xmin", "int64", optional=True),
]
_TRANSACTION = [
    _field("id", "string"),
    _field("total_order", "int64"),
    _field("data_collection_order", "int64"),
]


def envelope_schema(table: str, columns: Sequence[Schema]) -> Schema:
    """Return the schema of a message. `table`: `source.schema.table`."""
    row = {"type": "struct", "fields": list(columns), "optional": True, "name": f"{table}.Value"}
    source = {"type": "struct", "fields": _SOURCE, "optional": False, "version": 1, "field": "source"}
    fields = [
        {**row, "field": "before"},
        {**row, "field": "after"},
        {**source, "name": "io.debezium.connector.postgresql.Source"},
        _field("transaction", "struct", optional=True, fields=_TRANSACTION, name="event.block", version=1),
        _field("op", "string"),
        *(_field(name, "int64", optional=True) for name in ("ts_ms", "ts_us", "ts_ns")),
    ]
    return {"type": "struct", "fields": fields, "optional": False, "name": f"{table}.Envelope", "version": 2}


def key_schema(table: str, columns: Sequence[Schema]) -> Schema:
    """Return the schema of a message's key."""
    return {"type": "struct", "fields": list(columns), "optional": False, "name": f"{table}.Key"}


class DebeziumFormat:
    """Makes the typed shape and the envelope of relations.

    `source`: the name of the source for consumers (`topic.prefix`). `database`: its database. `with_schemas`:
    each message contains its schema.
    """

    def __init__(self, source: str, database: str, *, with_schemas: bool) -> None:
        self._source, self._database, self._with_schemas = source, database, with_schemas

    def __call__(
        self, record: RelationRecord, columns: Mapping[int, PublishedColumn], options: TableOptions
    ) -> tuple[TypedShape, BodyFormat]:
        made = {index: debezium_column(one, record.name, options, index) for index, one in columns.items()}
        changes = TypedShape(record, made)
        return changes, DebeziumEnvelope(self._source, self._database, changes, self._with_schemas)


class DebeziumEnvelope:
    """The envelope of one relation, whose values are typed as their JSON.

    Debezium sends the WAL position of each change. The changelog does not record it: `lsn` is the LSN of the
    commit, and `sequence` holds the commit LSN and the ordinal of the change, which order changes.
    """

    def __init__(self, source: str, database: str, changes: TypedShape, with_schemas: bool) -> None:
        self._columns, self._identity, self._table = changes.columns, changes.identity, changes.table
        self._rows = JsonRows(column.name for column in changes.columns.values())
        name = changes.table
        self._full_name = f"{source}.{name.schema}.{name.name}"
        self._schemas = {one.name: _parser(one).schema for one in changes.columns.values()}
        schema = _json(envelope_schema(self._full_name, list(self._schemas.values())))
        self._start, self._end = (f'{{"schema":{schema},"payload":{{', "}}") if with_schemas else ("{", "}")
        self._with_schemas = with_schemas
        self._unsent_before = {one.name: _parser(one).unsent for one in changes.columns.values()}
        constant = {"version": _version(), "connector": "postgresql", "name": source, "snapshot": "false"}
        place = {"db": database, "schema": name.schema, "table": name.name, "xmin": None}
        self._source = _json({**constant, **place})[:-1]

    def texts(self, _: TypedColumn, typed: pa.Array) -> pa.Array:
        return typed

    def bodies(self, rows: RelationRows) -> pa.Array:
        of = rows.transactions
        moments = of.microseconds.to_pylist()
        places = zip(of.places, of.xids, moments, strict=True)
        sources = of.spread([self._source_of(int(lsn), xid, moment) for (_, lsn), xid, moment in places])
        return joined(
            pa.scalar(f'{self._start}"before":', TEXT),
            rows.objects(self._rows, self._whole(rows.before)),
            pa.scalar(',"after":', TEXT),
            rows.objects(self._rows, rows.after),
            sources,
            rows.ordinals.cast(TEXT),
            pa.scalar('\\"]"},"transaction":null,"op":', TEXT),
            pa.array(_CODE_OF_EACH, TEXT).take(pc.index_in(rows.ops, value_set=letters(LETTERS))),
            pa.scalar(self._tail(), TEXT),
        )

    def body(self, change: Change) -> bytes:
        before = None if change.old is None else self._object(self._unsent_before | change.old, ())
        after = None if change.data is None else self._object(change.data, change.unchanged)
        source = self._source_of(int(change.commit_lsn), change.xid, _microseconds(change))
        return (
            f'{self._start}"before":{before or "null"},"after":{after or "null"}{source}'
            f'{change.position.ordinal}\\"]"}},"transaction":null,"op":{_CODES[change.op]}{self._tail()}'
        ).encode()

    def key_frame(self, names: Sequence[str]) -> tuple[str, str]:
        if not self._with_schemas:
            return "", ""
        schema = key_schema(self._full_name, [self._schemas[name] for name in names])
        return f'{{"schema":{_json(schema)},"payload":', "}"

    def key(self, change: Change, values: Row) -> str:  # noqa: ARG002 - of others
        return _members(values)

    # --- parts ---

    def _source_of(self, lsn: int, xid: int, microseconds: int) -> str:
        """Return the source object up to, and without, the ordinal of the change."""
        at = f'"ts_ms":{microseconds // 1_000},"ts_us":{microseconds},"ts_ns":{microseconds * 1_000}'
        return f',"source":{self._source},{at},"txId":{xid},"lsn":{lsn},"sequence":"[\\"{lsn}\\",\\"'

    def _tail(self) -> str:
        """Return the end of a message with the current time, which does not order changes."""
        now = time.time_ns()
        return f',"ts_ms":{now // 1_000_000},"ts_us":{now // 1_000},"ts_ns":{now}{self._end}'

    def _whole(self, before: ChangeSide[pa.Array]) -> ChangeSide[pa.Array]:
        """Return the old rows with the columns that the server did not send."""
        if not len(before.numbers):
            return before
        values = dict(zip(self._identity, before.values, strict=True))
        count = len(before.numbers)
        for index, column in self._columns.items():
            if index not in values:
                values[index] = pa.repeat(pa.scalar(_parser(column).unsent, TEXT), count)
        return ChangeSide(before.numbers, [values[index] for index in self._columns])

    def _object(self, row: Row, unsent: Collection[str]) -> str:
        found = {}
        for column in self._columns.values():
            found[column.name] = self._unavailable(column) if column.name in unsent else row.get(column.name)
        return _members(found)

    def _unavailable(self, column: TypedColumn) -> str:
        unavailable = _parser(column).unavailable
        if unavailable is None:
            raise TransformError(
                f'column "{one_line(column.name)}" of {self._table} holds a large value that an update left'
                " as it was: the server did not send it, and Debezium's format has no sign for that",
                _UNSENT_HINT,
            )
        return unavailable


def _parser(column: TypedColumn) -> DebeziumParser:
    return cast("DebeziumParser", column.parser)


def _members(values: Mapping[str, Any]) -> str:
    return (
        "{"
        + ",".join(f"{_json(name)}:{'null' if one is None else one}" for name, one in values.items())
        + "}"
    )


def _microseconds(change: Change) -> int:
    return int(pa.scalar(change.commit_ts, pa.timestamp("us", "UTC")).value)


def _json(value: object) -> str:
    if isinstance(value, str):
        return on_one_line(json_string(value))
    return on_one_line(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def _version() -> str:
    return version("airflow-provider-pgrepl")
