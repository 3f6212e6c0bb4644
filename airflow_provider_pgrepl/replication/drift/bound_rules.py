"""Settings that name a table or a column, compared with what was recorded under that name. No side effects.

A snapshot selects tables and columns by name. Therefore, before a table is copied, each setting is compared
with the oid and the attnum that had its name in the stream or the catalog. A rename must neither copy what
was excluded nor change a policy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cached_property

from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.postgres.names import ColumnName, TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.tables import COLUMN_FIELDS

from .matching import HiddenColumns, Records

TABLE_FIELDS = ("per_table", "insert_only")
_EXCLUDE = "exclude_columns"


@dataclass(frozen=True)
class BoundRules:
    """The settings of a pipeline file for tables and columns, and the recorded names of these.

    `records` returns the records of an oid; `relation_ids` returns every recorded oid.
    """

    pipeline: Pipeline
    records: Records
    relation_ids: Callable[[], Set[int]]

    def names(self, oid: int) -> set[TableName]:
        """Return every name under which a table was recorded."""
        return set[TableName]().union(*(record.names for record in self._recorded(oid)))

    def oids(self, table: TableName) -> Set[int]:
        """Return the oids of the tables that were recorded under a name."""
        return self._oids.get(table, frozenset())

    @cached_property
    def _oids(self) -> Mapping[TableName, set[int]]:
        found: dict[TableName, set[int]] = defaultdict(set)
        for oid in self.relation_ids():
            for name in self.names(oid):
                found[name].add(oid)
        return found

    def problems(self, relation: Relation) -> Iterator[str]:
        """Yield a sentence for each setting that named this table, or a column of it, by an earlier name, and
        that does not name it by its present one."""
        if not any((*self._columns.values(), *self._tables.values())):
            return
        yield from self._kin_problems(relation)
        if not self._recorded(relation.oid):
            return
        named = {field: self._renamed(relation, field) for field in COLUMN_FIELDS}
        for column in (*relation.columns, *relation.unpublished):
            now = ColumnName(relation.table, column.name)
            for field in COLUMN_FIELDS:
                # Another field that names the column today decides its policy, but only exclude_columns can
                # exclude it.
                fields = (_EXCLUDE,) if field == _EXCLUDE else COLUMN_FIELDS
                if column.attnum in named[field] and not any(now in self._columns[one] for one in fields):
                    earlier = " or ".join(sorted(map(str, self._earlier(relation, column.attnum, field))))
                    was = earlier or "a column that it names"
                    yield f"column {now} is, or may be, {was} of {field} under another name: name {now} there"
        for field in TABLE_FIELDS:
            known = self._tables[field]
            if relation.table not in known:
                for table in sorted(self.names(relation.oid) & known):
                    yield f"{field} names {table}, an earlier name of this table: name {relation.table} there"

    def _kin_problems(self, relation: Relation) -> Iterator[str]:
        """Yield a sentence for each excluded column of a partitioned table that had this table as a
        partition, or of a partition of this table, that is not excluded from this table.

        While the two are attached, the column has the same name in both, but seldom the same attnum.
        """
        excluded = self._columns[_EXCLUDE]
        names = {column.name for column in (*relation.columns, *relation.unpublished)}
        chosen = {name for name in names if ColumnName(relation.table, name) in excluded}
        for named in sorted(excluded):
            if named.table == relation.table or not self._is_kin(named.table, relation):
                continue
            is_there = named.name in names
            if named.name not in chosen if is_there else not chosen:
                what = (
                    ColumnName(relation.table, named.name) if is_there else "the column that has its values"
                )
                yield (
                    f"exclude_columns names {named}, and {named.table} and this table were, or are,"
                    f" partitioned table and partition: name {what} there"
                )

    def _is_kin(self, table: TableName, relation: Relation) -> bool:
        parts = {relation.oid, *(part.oid for part in relation.partitions)}
        return any(
            oid != relation.oid and (oid in parts or not parts.isdisjoint(self._parts[oid]))
            for oid in self.oids(table)
        )

    @cached_property
    def _parts(self) -> dict[int, set[int]]:
        """Return the oids of the partitions that each table with excluded columns had, by the table's oid."""
        tables = {column.table for column in self._columns[_EXCLUDE]}
        return {
            oid: {part.oid for one in self._recorded(oid) if one.catalog for part in one.catalog.partitions}
            for table in tables
            for oid in self.oids(table)
        }

    def _renamed(self, relation: Relation, field: str) -> Set[int]:
        """Return the attnums that had, or may have had, a name that the field lists."""
        names = frozenset(self._columns[field])
        if not names:
            return frozenset()
        return HiddenColumns(names, self.records).bound(relation)

    def _earlier(self, relation: Relation, attnum: int, field: str) -> set[ColumnName]:
        found = set()
        for record in self._recorded(relation.oid):
            both = (*record.catalog.columns, *record.catalog.unpublished) if record.catalog else ()
            found |= {ColumnName(record.name, column.name) for column in both if column.attnum == attnum}
        return found & self._columns[field]

    def _recorded(self, oid: int) -> list[RelationRecord]:
        return [record for record in self.records(oid) if record.publication_status is None]

    @cached_property
    def _columns(self) -> dict[str, set[ColumnName]]:
        return {field: set(map(ColumnName.parse, getattr(self.pipeline, field))) for field in COLUMN_FIELDS}

    @cached_property
    def _tables(self) -> dict[str, set[TableName]]:
        return {field: set(map(TableName.parse, getattr(self.pipeline, field))) for field in TABLE_FIELDS}
