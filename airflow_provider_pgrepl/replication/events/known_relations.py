"""KnownRelations: what a reader of changes knows of the tables that they are of."""

from __future__ import annotations

from dataclasses import replace

from airflow_provider_pgrepl.errors import ChangelogError
from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex, relations_uri
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.names import TableName
from airflow_provider_pgrepl.replication.relation import Column
from airflow_provider_pgrepl.replication.wire.logical_messages import WireColumn


class KnownRelations:
    """The relation index, read again when a version comes that it did not have."""

    def __init__(self, lake_root: str) -> None:
        self._uri = relations_uri(lake_root)
        self._records: dict[int, RelationRecord] = {}
        self._names: dict[int, set[TableName]] = {}
        self._types: dict[tuple[int, int], Column] = {}
        self._read()

    def find(self, version: int) -> RelationRecord:
        """The relation of a version. Raises ChangelogError when it is not in the index."""
        if version not in self._records:
            self._read()
        if version not in self._records:
            raise ChangelogError(
                f"the relation {version} of a change is not in the relation index",
                "look at the lake's folder _pgrepl/relations: it may have been deleted or put back",
            )
        return self._records[version]

    def names(self, oid: int) -> set[TableName]:
        """All that a table was ever called."""
        return self._names.get(oid, set())

    @property
    def all_names(self) -> set[TableName]:
        """Of all tables."""
        return set[TableName]().union(*self._names.values())

    def column(self, sent: WireColumn, index: int) -> Column:
        """A column as the stream has it, of which the catalog said nothing when it came: its type is what any
        column of that type is known to be."""
        column = self._types.get((sent.type_oid, sent.typmod))
        if column is None:
            return Column(sent.name, index + 1, sent.type_oid, sent.typmod, f"oid {sent.type_oid}")
        return replace(column, name=sent.name, attnum=index + 1, is_key=sent.is_identity)

    def _read(self) -> None:
        for record in RelationIndex(self._uri).all():
            if record.standing is not None:
                continue
            self._records[record.version] = record
            self._names.setdefault(record.message.oid, set()).add(record.name)
            columns = record.catalog.columns if record.catalog else ()
            self._types |= {(column.type_oid, column.typmod): column for column in columns}
