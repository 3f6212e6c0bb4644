"""PlainEnvelope: bodies as `to_json` has them, made from columns."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.replication.changelog.layout import letters
from airflow_provider_pgrepl.replication.events.change import LETTERS, OPERATIONS, Change
from airflow_provider_pgrepl.replication.events.changes import Row, TypedShape
from airflow_provider_pgrepl.replication.events.formats.json_format import (
    json_string,
    on_one_line,
    to_json,
    to_json_object,
)
from airflow_provider_pgrepl.replication.events.formats.json_text import TEXT, JsonRows, joined, json_texts
from airflow_provider_pgrepl.replication.events.formats.relation_rows import RelationRows
from airflow_provider_pgrepl.replication.values import TypedColumn

_OLD, _ID = (pa.scalar(text, TEXT) for text in (',"old":', ',"id":"'))


class PlainEnvelope:
    """Of one relation."""

    def __init__(self, changes: TypedShape) -> None:
        self._json_columns = changes.json_columns
        self._after, self._before = (
            JsonRows(column.name for column in columns.values())
            for columns in (changes.columns, changes.identity)
        )
        table = on_one_line(json_string(str(changes.table)))
        heads = [f'{{"table":{table},"op":"{op}","data":' for op in OPERATIONS.values()]
        self._heads = pa.array(heads, TEXT)

    def texts(self, column: TypedColumn, typed: pa.Array) -> pa.Array:
        return json_texts(typed, is_json=column.name in self._json_columns)

    def bodies(self, rows: RelationRows) -> pa.Array:
        of = rows.transactions
        moments = json_texts(of.microseconds.view(pa.timestamp("us", "UTC")), is_json=False).to_pylist()
        ends = [
            f'","commit_lsn":"{lsn}","commit_ts":{moment},"xid":{xid}}}'
            for (_, lsn), moment, xid in zip(of.places, moments, of.xids, strict=True)
        ]
        return joined(
            self._heads.take(pc.index_in(rows.ops, value_set=letters(LETTERS))),
            rows.objects(self._after, rows.after),
            _OLD,
            rows.objects(self._before, rows.before),
            _ID,
            rows.ids,
            of.spread(ends),
        )

    def body(self, change: Change) -> bytes:
        return to_json(change).encode()

    def key_frame(self, names: Sequence[str]) -> tuple[str, str]:  # noqa: ARG002 - of others
        return "", ""

    def key(self, change: Change, values: Row) -> str:
        return to_json_object(values, change.json_columns)
