"""A snapshot of a table in creek's form: a header, each row in Avro, and an end."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import TargetError, one_line
from airflow_provider_pgrepl.replication.avro.codec import Schema, fingerprint, fingerprint_text, to_text
from airflow_provider_pgrepl.replication.avro.columns import CreekColumn, avro_name, avro_names, fields_of
from airflow_provider_pgrepl.replication.events.columns import PublishedColumn, PublishedColumns
from airflow_provider_pgrepl.replication.events.formats.avro import avro_column
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.postgres import oids
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.tables import TableOptions
from airflow_provider_pgrepl.replication.values import DELETED, typed_column
from airflow_provider_pgrepl.replication.values.text_output import texts_of

END = b"EOF"
_LIKE_END = b"\xc5\x00OF"
"""The bytes of a row that would otherwise equal those of the end: -35, -40 and 35. A number may be written in
more bytes than necessary (Avro 1.12, "Binary Encoding": a variable length)."""
_NOTHING = "n"
"""The replica identity NOTHING."""


@dataclass(frozen=True)
class SnapshotRows:
    """The encoder of a relation's rows. `published`: how columns are published, as in the stream of changes.
    `of_source`: the rows are the source's text values, and not those of a lake table.

    Raises TargetError if the lake table lacks a column that the stream of changes has, or if the snapshot's
    keys or hashes would differ from the stream's. Raises DriftError if the publisher's settings do not fit
    the table.
    """

    relation: Relation
    options: TableOptions
    published: PublishedColumns
    of_source: bool = False

    def __post_init__(self) -> None:
        if self.of_source:
            return
        ignored, columns = self.relation.ignored, [one.source for one, _ in self._columns]
        missing = [column.name for column in columns if column.attnum in ignored]
        if missing:
            raise TargetError(
                f"the lake table {self.relation.table} lacks {', '.join(map(one_line, missing))}, which its"
                " events have",
                errors.resnapshot(self.relation.table),
            )
        other = [of.source.name for of, column in self._columns if self._needs_text(of, column)]
        if other:
            kind = "is a decimal" if len(other) == 1 else "are decimals"
            raise TargetError(
                f"{', '.join(map(one_line, other))} of {self.relation.table} {kind} in the lake, and"
                " its changes have a key or hash of the number as it was written",
                "keep it as a string in the lake (types), or publish no snapshots of the table",
            )

    def _needs_text(self, of: PublishedColumn, column: CreekColumn) -> bool:
        """Return True if the key or hash needs the number's text, such as 1.50, which the lake does not
        have."""
        source = of.source
        is_free = source.type_oid == oids.NUMERIC and source.typmod < 0
        if not is_free or not (column.is_key or of.hide is not None):
            return False
        typed = typed_column(source, self.relation.table, self.options)
        return bool(pa.types.is_decimal(typed.lake_type))

    @cached_property
    def _columns(self) -> list[tuple[PublishedColumn, CreekColumn]]:
        relation, options = self.relation, self.options
        kept = {one.attnum: one for one in relation.columns if not options.column(one.name).excluded}
        return [
            (
                published,
                avro_column(
                    published,
                    relation.table,
                    options,
                    relation.replica_identity,
                    is_of_identity=published.is_key and relation.replica_identity != _NOTHING,
                ),
            )
            for published in self.published.of_catalog(relation, kept).values()
        ]

    @cached_property
    def schema(self) -> Schema:
        """Return the schema of a row: a record without a namespace."""
        columns = [column for _, column in self._columns]
        fields = fields_of(zip(avro_names(columns), columns, strict=True), "")
        return {"name": avro_name(self.relation.table.name), "type": "record", "fields": fields}

    def header(self, position: EventPosition, stamp: LSN, at: datetime, rows: int) -> bytes:
        """Return the header. `position`: the rows have every change that committed at or before it. `stamp`:
        later changes have higher stamps, and the changes in the rows do not. `at`: later changes arrived in
        the stream at that time or after it."""
        name, kind, fields = self.schema.values()  # type: ignore[union-attr]
        return json.dumps(
            {
                "topic": "",
                "fingerprint": fingerprint_text(fingerprint(self.schema)),
                "schema": to_text(
                    {"type": kind, "name": name, "fields": [_as_creeks(one) for one in fields]}
                ),
                "tx_id": 0,
                "lsn": str(stamp),
                "at": at.isoformat().replace("+00:00", "Z"),
                "approx_rows": rows,
                # creek has no such field: the id of the last change that can be in the rows.
                "position": str(position),
            },
            separators=(",", ":"),
            ensure_ascii=False,
        ).encode()

    def encode(self, rows: pa.Table) -> list[bytes]:
        """Encode rows of the lake table, or text values of the source. Raises ValueRangeError."""
        encoded = [column.encode(self._texts(rows, of)) for of, column in self._columns]
        if not encoded:
            return [b""] * rows.num_rows
        return [_LIKE_END if row == END else row for row in map(b"".join, zip(*encoded, strict=True))]

    def _texts(self, rows: pa.Table, of: PublishedColumn) -> pa.Array:
        values = rows[of.source.name].combine_chunks()
        return values if self.of_source else texts_of(values, of.source.pg_type)


def current(rows: pa.Table) -> pa.Table:
    """Return the rows without those that are deleted and only marked in the lake."""
    return (
        rows.filter(pc.invert(pc.fill_null(rows[DELETED], False))) if DELETED in rows.column_names else rows
    )


def _as_creeks(field: dict[str, Any]) -> dict[str, Any]:
    """Return the field with its properties in the order in which creek writes those of a row."""
    order = ("name", "type", "pgType", "pgKey", "pgName")
    return {name: field[name] for name in order if name in field}
