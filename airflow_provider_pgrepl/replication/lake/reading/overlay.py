"""Overlay: what some changes do to a version of a lake table, without writing it. No Spark in here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs

from airflow_provider_pgrepl.replication.changelog import reader
from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.lake.merging.multiset import NetRows, net_rows
from airflow_provider_pgrepl.replication.lake.reading.overlay_rows import Replaced, replaced_rows
from airflow_provider_pgrepl.replication.lsn import LSN
from airflow_provider_pgrepl.replication.relation import Relation
from airflow_provider_pgrepl.replication.values import lake_schema

_CHANGES = pa.array(["I", "U", "D", "T"])


@dataclass(frozen=True)
class OverlayJob:
    """The changes of a relation above one LSN up to another, and all that it takes to read them."""

    changelog: str
    paths: tuple[str, ...]
    relation: Relation
    pipeline: Pipeline
    above: LSN
    upto: LSN

    @property
    def schema(self) -> pa.Schema:
        """The lake table's columns."""
        return lake_schema(self.relation, self.pipeline)

    @property
    def key_names(self) -> list[str]:
        """The columns by which rows are found; none: a row is known by all of its values only."""
        return [column.name for column in self.relation.key_columns]

    def read(self, columns: Sequence[str] | None = None) -> pa.Table:
        """The changelog's rows, op R among them, in order. Raises ChangelogError when a file is gone."""
        filesystem, root = pafs.FileSystem.from_uri(self.changelog)
        rows = reader.read_rows(filesystem, root, self.paths, self.relation.oid, self.above, columns)
        return rows.filter(pc.less_equal(rows["commit_lsn"], int(self.upto)))

    def changes(self) -> pa.Table:
        """The changes in order: ops I U D T."""
        rows = self.read()
        return rows.filter(pc.is_in(rows["op"], _CHANGES)).combine_chunks()

    def net_rows(self) -> NetRows:
        """What the changes do to a table without key. Raises LakeTableError, ValueRangeError."""
        return net_rows(self.changes(), self.relation, self.pipeline)

    def replaced_rows(self) -> Replaced:
        """What the changes do to a table with a key. Raises LakeTableError, ValueRangeError."""
        return replaced_rows(self.changes(), self.relation, self.pipeline)

    def lay_over(self, version: pa.Table) -> pa.Table:
        """The version with the changes. Raises LakeTableError when it is not what they were made to."""
        if self.key_names:
            return self.replaced_rows().lay_over(version)
        net = self.net_rows()
        gained = net.gained.select(version.column_names).cast(version.schema)
        return pa.concat_tables([net.remaining(version), gained])
