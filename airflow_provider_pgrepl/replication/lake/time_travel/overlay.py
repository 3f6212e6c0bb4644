"""Overlay: what some changes do to a version of a lake table, without writing it. No Spark in here."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.replication.changelog import reader
from airflow_provider_pgrepl.replication.changelog.layout import CHANGES, letters
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.lake.merge.keyless import NetRows, net_rows
from airflow_provider_pgrepl.replication.lake.schema_evolution.timeline import relation_timeline
from airflow_provider_pgrepl.replication.lake.schema_evolution.translation import evolved, is_same_layout
from airflow_provider_pgrepl.replication.lake.time_travel.entries import entries_of
from airflow_provider_pgrepl.replication.lake.time_travel.replaced import Replaced
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.partition_by import PARTITION
from airflow_provider_pgrepl.replication.settings.tables import TableChoices
from airflow_provider_pgrepl.replication.storage import open_storage
from airflow_provider_pgrepl.replication.values import Partitioning, lake_schema, partitioning


@dataclass(frozen=True)
class Overlay:
    """The changes of a table above one LSN up to another, while one relation is effective, and all that it
    takes to read them.

    `before`: the relation of the version that they are laid over. Where DDL came in the midst of their first
    transaction: `first`, the relation in which it begins in the changelog, and what is `received` since.
    `count`: how many changes there are; `truncated`: whether a TRUNCATE is among them.
    """

    changelog: str
    paths: tuple[str, ...]
    relation: Relation
    choices: TableChoices
    above: LSN
    upto: LSN
    before: Relation
    first: Relation | None = None
    received: tuple[RelationRecord, ...] = ()
    count: int = 0
    truncated: bool = False

    @property
    def schema(self) -> pa.Schema:
        """The lake table's columns, with the changes."""
        return lake_schema(self.relation, self.choices)

    @property
    def key_names(self) -> list[str]:
        """The columns by which rows are found; none: a row is known by all of its values only."""
        return [column.name for column in self.relation.key_columns]

    @property
    def _partitions(self) -> Partitioning | None:
        return partitioning(self.relation, self.choices)

    def fits(self, names: Collection[str]) -> bool:
        """Whether a version with these columns is as the effective relation has it. One from before a
        resnapshot with another choice may have no partitions."""
        return not self.evolves and set(self.schema.names) <= set(names)

    @property
    def evolves(self) -> bool:
        """Whether the version must become that of another relation before the changes are laid over it."""
        return not (
            is_same_layout(self.before, self.relation)
            and lake_schema(self.before, self.choices) == self.schema
        )

    def evolved(self, version: pa.Table) -> pa.Table:
        """Rows of the version as the effective relation has them. Raises DriftError, ValueRangeError."""
        if self.evolves:
            version = evolved(version, self.before, self.relation, self.choices)
        if self._partitions is not None and PARTITION not in version.column_names:
            values = version[self._partitions.typed.name]
            version = version.append_column(PARTITION, self._partitions.texts(values))
        # A column that came later stands last in the lake table.
        return version.select(self.schema.names).cast(self.schema)

    def changes(self) -> pa.Table:
        """The changes in order, ops I U D T, all as the effective relation has them.

        Raises ChangelogError when a file is gone, DriftError.
        """
        filesystem, root = open_storage(self.changelog)
        rows = reader.read_rows(filesystem, root, self.paths, self.relation.oid, self.above)
        rows = rows.filter(pc.less_equal(rows["commit_lsn"], int(self.upto)))
        if self.first is not None:
            records = {record.version: record for record in self.received}
            rows = relation_timeline(self.first, rows, records.get, self.choices).spans[-1].rows
        return rows.filter(pc.is_in(rows["op"], letters(CHANGES))).combine_chunks()

    def net_rows(self) -> NetRows:
        """What the changes do to a table without key. Raises LakeTableError, ValueRangeError."""
        return net_rows(self.changes(), self.relation, self.choices)

    def entries(self) -> pa.Table:
        """What the changes do to a table with a key. Raises LakeTableError, ValueRangeError."""
        return entries_of(self.changes(), self.relation, self.choices)

    def lay_over(self, version: pa.Table) -> pa.Table:
        """The version with the changes. Raises LakeTableError when it is not what they were made to."""
        version = self.evolved(version)
        if not self.count:
            return version
        if self.key_names:
            return Replaced(self.entries(), self.key_names).lay_over(version)
        net = self.net_rows()
        gained = net.gained.select(version.column_names).cast(version.schema)
        return pa.concat_tables([net.remaining(version), gained])
