"""ChangeSchema: the Avro record in which a change of a table is sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from airflow_provider_pgrepl.replication.avro.columns import CreekColumn, avro_name, avro_names, fields_of
from airflow_provider_pgrepl.replication.avro.fingerprint import to_text
from airflow_provider_pgrepl.replication.postgres.names import TableName

_TIMESTAMP = {"type": "long", "logicalType": "timestamp-micros"}


@dataclass(frozen=True)
class ChangeSchema:
    """Of one version of a relation, whose columns are these, by place in the stream. `source`: what consumers
    call the source."""

    source: str
    table: TableName
    columns: Mapping[int, CreekColumn]

    @property
    def namespace(self) -> str:
        return ".".join(map(avro_name, (self.source, self.table.schema, self.table.name)))

    @property
    def name(self) -> str:
        """The record's full name."""
        return f"{self.namespace}.Change"

    @cached_property
    def names(self) -> dict[int, str]:
        """Of each column the name of its field."""
        return dict(zip(self.columns, avro_names(self.columns.values()), strict=True))

    @cached_property
    def text(self) -> str:
        """As a registry gets it."""
        row = [(self.names[index], column) for index, column in self.columns.items()]
        old = [(name, column) for name, column in row if column.is_key]
        fields = [
            *({"name": name, "type": "string"} for name in ("id", "table", "op", "commit_lsn")),
            {"name": "commit_ts", "type": _TIMESTAMP},
            {"name": "xid", "type": "long"},
            {"name": "data", "type": ["null", self._record("Row", row)], "default": None},
            {"name": "old", "type": ["null", self._record("Old", old)], "default": None},
            {"name": "unchanged", "type": {"type": "array", "items": "string"}, "default": []},
        ]
        whole = {"type": "record", "name": "Change", "namespace": self.namespace, "fields": fields}
        return to_text(whole)

    def _record(self, name: str, named: list[tuple[str, CreekColumn]]) -> dict[str, Any]:
        # Of their own namespaces: both may define the enum of infinities.
        namespace = f"{self.namespace}.{name}"
        fields = [_with_default(field) for field in fields_of(named, namespace)]
        return {"type": "record", "name": name, "namespace": namespace, "fields": fields}


def _with_default(field: dict[str, Any]) -> dict[str, Any]:
    """A column that may be NULL can come and go: readers of other versions have NULL for it."""
    kind = field["type"]
    return {**field, "default": None} if isinstance(kind, list) and kind[0] == "null" else field
