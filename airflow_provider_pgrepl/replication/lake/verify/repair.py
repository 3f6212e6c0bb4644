"""The repair of a lake table: replaces the rows that differ from the source at one LSN, in one commit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from deltalake import DeltaTable

from airflow_provider_pgrepl.errors import LakeTableError
from airflow_provider_pgrepl.replication.delta.log import can_commit
from airflow_provider_pgrepl.replication.lake.delta.snapshot_commit import RESYNC
from airflow_provider_pgrepl.replication.lake.delta.table import RELATION_APP
from airflow_provider_pgrepl.replication.lake.files.row_search import FileRows, RowLocations
from airflow_provider_pgrepl.replication.lake.merge.slice_commit import SliceCommit
from airflow_provider_pgrepl.replication.lake.schema_evolution.timeline import read_relations
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.tables import PARTITION, TableOptions
from airflow_provider_pgrepl.replication.values import (
    COMMIT_LSN,
    COMMIT_TS,
    lake_schema,
    partitioning,
    typed_columns,
)

from .buckets import R1, R2, RowPicking, RowShape

if TYPE_CHECKING:
    from .comparison import LakeSide, SourceSide

KIND = "repair"
"""The kind of the commit in this package's commit metadata."""
Ints = np.ndarray[Any, np.dtype[np.int64]]
_NONE = np.empty(0, np.int64)
_NOWHERE = RowLocations(_NONE, _NONE, _NONE)


def refusal_of(relation: Relation, options: TableOptions) -> str:
    """Return why rows of the table cannot be repaired exactly, as a sentence; empty if they can."""
    policy = options.policy
    if policy.history:
        return "it has a history, whose versions of these rows the source does not have"
    if policy.deletes == "soft":
        return "its deletes are soft, and the source does not have the deleted rows"
    if policy.truncate == "ignore":
        return "truncate is ignore, and the source does not have the truncated rows"
    if relation.dropped or any(typed.index is None for typed in typed_columns(relation, options)):
        return "it has a column that the source dropped, whose values the source does not have"
    return ""


@dataclass(frozen=True)
class PickedRows:
    """Different rows, in the columns that are compared, and the number of copies of each."""

    rows: pa.Table
    times: Ints

    @property
    def all(self) -> pa.Table:
        return self.rows.take(pa.array(np.repeat(np.arange(len(self.rows)), self.times)))


def pick(side: SourceSide | LakeSide, shape: RowShape, hashes: pa.Table | None) -> PickedRows | None:
    """Read the rows with these hashes from one side. Raises LakeTableError if one is not there, and what the
    side raises."""
    if hashes is None or not len(hashes):
        return None
    wanted, times = np.unique(_pairs(hashes), axis=0, return_counts=True)
    found = side.collect(RowPicking(shape, wanted))
    if found is None:
        raise _not_found()
    held, first = np.unique(_pairs(found), axis=0, return_index=True)
    if not np.array_equal(held, wanted):
        raise _not_found()
    rows = found.take(pa.array(first)).drop_columns([R1, R2]).rename_columns(list(shape.columns))
    return PickedRows(rows, times.astype(np.int64))


def _not_found() -> LakeTableError:
    return LakeTableError(
        "a row that differed was not found when it was read for the repair", "run the verification again"
    )


def _pairs(rows: pa.Table) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.stack([rows[R1].to_numpy(), rows[R2].to_numpy()], axis=1)


def check_supported(table: DeltaTable) -> None:
    """Raise LakeTableError if the table requires more of writers than this package supports."""
    if not can_commit(table):
        protocol = table.protocol()
        features = (
            ", ".join(sorted(protocol.writer_features or ())) or f"version {protocol.min_writer_version}"
        )
        raise LakeTableError(
            f"{table.table_uri}: the table requires features of writers that a repair does not support"
            f" ({features})"
        )


@dataclass(frozen=True)
class TableRepair:
    """The repair of one lake table, which has every transaction up to `position` and no later one.

    `exported_at`: when the source's snapshot was exported. The repaired rows have it, and the position, in
    the columns that are the pipeline's own, as rows of a snapshot have.
    """

    relation: Relation
    options: TableOptions
    app: str
    position: LSN
    exported_at: datetime

    def commit(self, table: DeltaTable, missing: PickedRows | None, extra: PickedRows | None) -> None:
        """Remove the extra rows and add the missing ones, in one commit that sets the position.

        Raises FencedError if another process of the pipeline has written the table since the handle was
        opened, OvertakenError, LakeUnavailableError. Raises LakeTableError if a row to be removed is not
        there, or if the table requires more of writers than this package supports.
        """
        relations = read_relations(table)
        version = self.relation.version if relations is None else relations[1]
        commit = SliceCommit(
            table, self.app, self.position, None, version, self.options.policy.merge, kind=KIND
        )
        check_supported(table)
        commit.make(lambda: self._replace(commit, missing, extra))

    def commit_as_copy(
        self,
        table: DeltaTable,
        missing: PickedRows | None,
        extra: PickedRows | None,
        marks: Mapping[str, int],
        kind: str = RESYNC,
    ) -> None:
        """Do the same as a snapshot's commit would, even without rows, as exactly the version after that of
        the handle.

        Raises VersionTakenError or OvertakenError if another process has committed since the handle was
        opened, and otherwise as `commit`.

        :param marks: the other app IDs that the commit sets, from `snapshot_marks`
        :param kind: one of SNAPSHOT_KINDS
        """
        commit = SliceCommit(
            table,
            self.app,
            self.position,
            self.exported_at,
            marks[RELATION_APP],
            self.options.policy.merge,
            kind,
            marks,
        )
        self._replace(commit, missing, extra)

    def _replace(self, commit: SliceCommit, missing: PickedRows | None, extra: PickedRows | None) -> None:
        added, rows = self._rows(missing), FileRows(commit.table)
        if extra is None:
            commit.replace_at(rows, _NOWHERE, added, commit.way(0, added.nbytes))
            return
        places = commit.read(lambda: rows.find(extra.rows))
        way = commit.way(rows.bytes_that_may_hold(extra.rows), extra.rows.nbytes + added.nbytes)
        commit.replace_at(rows, _last_copies(places, extra), added, way)

    def _rows(self, picked: PickedRows | None) -> pa.Table:
        """Return the rows to add, with all columns of the lake table."""
        schema = lake_schema(self.relation, self.options)
        if picked is None:
            return schema.empty_table()
        rows = picked.all
        return pa.table(list(self._columns(rows, schema)), schema=schema)

    def _columns(self, rows: pa.Table, schema: pa.Schema) -> Iterator[pa.Array | pa.ChunkedArray]:
        partitions = partitioning(self.relation, self.options)
        for name, lake_type in zip(schema.names, schema.types, strict=True):
            if name in rows.column_names:
                yield rows[name].cast(lake_type)
            elif name == COMMIT_LSN:
                yield pa.repeat(pa.scalar(int(self.position), lake_type), len(rows))
            elif name == COMMIT_TS:
                yield pa.repeat(pa.scalar(self.exported_at, lake_type), len(rows))
            else:
                assert name == PARTITION
                assert partitions is not None
                yield partitions.texts(rows[partitions.typed.name])


def _last_copies(places: RowLocations, extra: PickedRows) -> RowLocations:
    """Return the locations of the copies to remove: of equal rows, the last ones. Raises LakeTableError."""
    order = np.argsort(places.which, kind="stable")
    which = places.which[order]
    copies = np.bincount(which, minlength=len(extra.times))
    if (copies < extra.times).any():
        raise LakeTableError("a row to be removed by a repair is not in the lake table any more")
    left = np.cumsum(copies)[which] - np.arange(len(which))
    return places.where(np.sort(order[left <= extra.times[which]]))
