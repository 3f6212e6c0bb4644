"""The index over op `R`: every relation version ever announced, so that none is lost with its changelog hour,
and those by which tables were copied.

One entry too many does no harm.
"""

from __future__ import annotations

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from deltalake.exceptions import DeltaError, TableNotFoundError

from airflow_provider_pgrepl.errors import LakeUnavailableError
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.lsn import Epoch

SCHEMA = pa.schema(
    [
        ("epoch", pa.int64()),
        ("relation_id", pa.int64()),
        ("relation_version", pa.int64()),
        ("record", pa.string()),
    ]
)


def relations_uri(lake_root: str) -> str:
    return f"{lake_root}/_pgrepl/relations"


class RelationIndex:
    """Adds and finds relation versions. Entries are few: one for each change of a table's shape."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._known: dict[tuple[int, int], str] | None = None

    def add(self, epoch: Epoch, record: RelationRecord) -> None:
        """Have the version there before the changelog refers to it. Raises LakeUnavailableError."""
        if (record.message.oid, record.version) in self._entries():
            return
        entry = pa.table([[epoch], [record.message.oid], [record.version], [record.to_json()]], schema=SCHEMA)
        try:
            write_deltalake(self._uri, entry, mode="append")
        except (DeltaError, OSError) as error:
            raise LakeUnavailableError(
                f"the relation index cannot be written: {type(error).__name__}"
            ) from error
        self._entries()[record.message.oid, record.version] = record.to_json()

    def find(self, relation_id: int, version: int) -> RelationRecord | None:
        """The relation as announced under this version; None when it never was."""
        text = self._entries().get((relation_id, version))
        return None if text is None else RelationRecord.from_json(text)

    def find_version(self, version: int) -> RelationRecord | None:
        """The relation of this version, whatever its oid; None when it never was announced or copied."""
        texts = (text for (_, known), text in self._entries().items() if known == version)
        return next(map(RelationRecord.from_json, texts), None)

    def all(self) -> list[RelationRecord]:
        """Every relation version of every epoch, in no order."""
        return [RelationRecord.from_json(text) for text in self._entries().values()]

    def _entries(self) -> dict[tuple[int, int], str]:
        if self._known is None:
            self._known = self._read()
        return self._known

    def _read(self) -> dict[tuple[int, int], str]:
        try:
            table = DeltaTable(self._uri)
        except TableNotFoundError:
            return {}
        rows = pa.table(QueryBuilder().register("t", table).execute("select * from t").read_all())
        return {(row["relation_id"], row["relation_version"]): row["record"] for row in rows.to_pylist()}
