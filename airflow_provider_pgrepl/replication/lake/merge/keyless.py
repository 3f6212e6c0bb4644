"""Net changes of a table without a key (REPLICA IDENTITY FULL): the rows that it loses, and those it gains.

A row is identified only by all of its values, and can exist many times. Of equal rows, the newest is deleted
first, so the result does not depend on how the changes are cut into batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import IdentityError, LakeTableError
from airflow_provider_pgrepl.replication.lake.files.row_equality import row_codes
from airflow_provider_pgrepl.replication.lake.files.row_search import FileRows
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import quote_identifier
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.tables import PARTITION, TableOptions, Truncate
from airflow_provider_pgrepl.replication.values import (
    COMMIT_LSN,
    COMMIT_TS,
    TypedColumn,
    lake_schema,
    partitioning,
    typed_columns,
)

from . import kernels
from .changes import Bools, ChangedRows, Ints, contradiction, read_changes, take
from .slice_commit import MISSING, SliceCommit


@dataclass(frozen=True)
class NetRows:
    """The net effect of changes on a table without a key.

    `overwrite`: the table was truncated, so all earlier rows are gone and `lost` is empty.
    `lost`: the different rows that the lake loses, typed, with the columns that changes have.
    `times`: for each of `lost`, the number of copies that the lake loses.
    `gained`: the new rows, with all columns of the lake table, one for each copy.
    `lost_from`: the partitions that have the lost rows; None: any.
    """

    overwrite: bool
    lost: pa.Table
    times: Ints
    gained: pa.Table
    lost_from: set[str | None] | None = None

    def remaining(self, lake: pa.Table) -> pa.Table:
        """Return the rows of the lake that remain, without those of `gained`.

        `lake` has at least the columns of `lost`. Of equal rows, those with the greatest commit LSN are
        deleted first. Raises LakeTableError if the lake has too few copies of a row.
        """
        if self.overwrite:
            return lake.slice(0, 0)
        if len(self.lost) == 0:
            return lake
        return lake.filter(pa.array(~self.leaving(lake)))

    def leaving(self, lake: pa.Table) -> Bools:
        """Return True for each of these rows of the lake that is deleted. Raises what `remaining` does."""
        columns = (
            pa.chunked_array(
                [*lake[field.name].cast(field.type).chunks, *self.lost[field.name].chunks], field.type
            ).combine_chunks()
            for field in self.lost.schema
        )
        codes = row_codes(columns, len(lake) + len(self.lost))
        there, wanted = codes[: len(lake)], codes[len(lake) :]
        times = np.zeros(int(codes.max(initial=-1)) + 1, np.int64)
        times[wanted] = self.times
        leaving = np.zeros(len(lake), np.bool_)
        candidates = np.flatnonzero(times[there] > 0)
        if COMMIT_LSN in lake.schema.names:
            # Null in rows that were there when the table was adopted.
            age = pc.fill_null(lake[COMMIT_LSN], 0).to_numpy()[candidates]
        else:
            age = candidates
        candidates = candidates[np.lexsort((-age, there[candidates]))]
        code = there[candidates]
        starts = np.flatnonzero(np.diff(code, prepend=-1))
        rank = np.arange(len(code)) - np.repeat(starts, np.diff(starts, append=len(code)))
        leaving[candidates[rank < times[code]]] = True
        if int(leaving.sum()) != int(self.times.sum()):
            raise LakeTableError(MISSING)
        return leaving


def net_rows(
    changes: pa.Table, relation: Relation, options: TableOptions, truncate: Truncate | None = None
) -> NetRows:
    """Return the net effect of changelog rows (ops I U D T, in order) of one relation without a key.

    `truncate`: the policy for TRUNCATE; None: that of the table's settings. An ignored TRUNCATE keeps the
    rows. Raises DriftError, LakeTableError (the changes contradict each other), ValueRangeError, and
    IdentityError if rows were updated or deleted and no column of the relation is in the lake.
    """
    ignoring = (truncate or options.policy.truncate) == "ignore"
    read = read_changes(changes, relation, whole=ignoring)
    overwrite = read.truncated and not ignoring
    columns = typed_columns(relation, options)
    indexes = [typed.index for typed in columns if typed.index is not None]
    if not indexes and bool((read.op != kernels.INSERT).any()):
        raise IdentityError(
            f"{relation.table}: rows were updated or deleted, but the table has no key, and the lake has no"
            " column of it that identifies them",
            "add a column to the table, or remove one of its columns from exclude_columns; then"
            f" {errors.resnapshot(relation.table)}",
        )
    old, new, count = _codes(read, indexes)
    status, at, lost, stays = kernels.follow_copies(read.op, old, new, count, overwrite)
    if status != kernels.OK:
        lsn = LSN(changes["commit_lsn"][int(read.places[at])].as_py())
        raise contradiction(relation, f"a change committed at {lsn} changes a row that is not there")
    made = np.flatnonzero(stays)
    gained = {typed.name: _after(typed, read, made) for typed in columns}
    for name, source in ((COMMIT_LSN, "commit_lsn"), (COMMIT_TS, "commit_ts")):
        gained[name] = changes[source].take(pa.array(read.places[made]))
    rows, times = _lost(columns, read, old, lost)
    partitions = partitioning(relation, options)
    if partitions is not None:
        gained[PARTITION] = partitions.texts(gained[partitions.typed.name])
    may_be_in = None if partitions is None else partitions.of_rows(rows)
    names = lake_schema(relation, options).names
    return NetRows(overwrite, rows, times, pa.table({name: gained[name] for name in names}), may_be_in)


def _codes(read: ChangedRows, indexes: list[int]) -> tuple[Ints, Ints, int]:
    """Return the codes of each change's old and new row (-1: none), and the number of codes.

    Rows with equal text values, in the columns that the lake has, have the same code.
    """
    texts = (pa.concat_arrays([read.after(index), read.old.column(index)]) for index in indexes)
    codes = row_codes(texts, read.new.count + read.old.count)
    new, old = np.full(len(read.op), -1, np.int64), np.full(len(read.op), -1, np.int64)
    new[read.new.present] = codes[: read.new.count]
    old[read.old.present] = codes[read.new.count :]
    return old, new, int(codes.max(initial=-1)) + 1


def _after(typed: TypedColumn, read: ChangedRows, made: Ints) -> pa.Array:
    if typed.index is None:
        return pa.nulls(len(made), typed.lake_type)
    return typed.parse(take(read.after(typed.index), read.new.place[made]))


def _lost(
    columns: tuple[TypedColumn, ...], read: ChangedRows, old: Ints, lost: Ints
) -> tuple[pa.Table, Ints]:
    """Return the different rows that the lake loses, typed, and the number of copies of each.

    Different text values can be the same value in the lake, such as an infinity that is stored as NULL.
    Dropped columns are left out: their values in the lake do not identify a row.
    """
    taker = np.full(len(lost), -1, np.int64)
    taker[old[old >= 0]] = np.flatnonzero(old >= 0)
    going = np.flatnonzero(lost)
    sent = [(typed, typed.index) for typed in columns if typed.index is not None]
    rows = [typed.parse(read.old.column(index, taker[going])) for typed, index in sent]
    _, first, own = np.unique(row_codes(rows, len(going)), return_index=True, return_inverse=True)
    times = np.bincount(own, weights=lost[going], minlength=len(first)).astype(np.int64)
    return pa.table(rows, [typed.name for typed, _ in sent]).take(pa.array(first)), times


def commit_net_rows(net: NetRows, commit: SliceCommit) -> None:
    """Commit the net changes in one commit.

    A MERGE deletes all copies of each lost row, and adds the remaining copies again unchanged. Raises
    LakeTableError if the lake has fewer copies of a row than it loses; FencedError.
    """
    if net.overwrite:
        commit.write(net.gained, "overwrite")
    elif len(net.lost):
        _merge(net, commit)
    elif len(net.gained):
        commit.write(net.gained, "append")
    else:
        commit.nothing()


def _merge(net: NetRows, commit: SliceCommit) -> None:
    names = [field.name for field in commit.table.schema().fields]
    rows = FileRows(commit.table)
    places = commit.read(lambda: rows.find(net.lost, net.lost_from))
    found = rows.rows(places, names)
    way = commit.way(rows.bytes_that_may_hold(net.lost, net.lost_from), net.lost.nbytes + net.gained.nbytes)
    if way != "merge":
        commit.replace(rows, places.where(net.leaving(found)), net.gained, way)
        return
    staying = net.remaining(found)
    inserted = pa.concat_tables([staying.select(names), net.gained.select(names).cast(_of(staying, names))])
    lost = [f"l{index}" for index in range(net.lost.num_columns)]
    columns = {
        f"c{index}": pa.chunked_array([*inserted[name].chunks, pa.nulls(len(net.lost), inserted[name].type)])
        for index, name in enumerate(names)
    }
    for name, values in zip(lost, net.lost.columns, strict=True):
        columns[name] = pa.chunked_array([pa.nulls(len(inserted), values.type), *values.chunks])
    columns["lost"] = pa.array(np.repeat([False, True], [len(inserted), len(net.lost)]))
    conditions = [
        _same(f"t.{quote_identifier(field.name)}", f"s.{name}", field.type)
        for name, field in zip(lost, net.lost.schema, strict=True)
    ]
    merger = commit.merge(pa.table(columns), [*conditions, "s.lost"], names)
    merger.when_matched_delete("s.lost")
    values = {quote_identifier(name): f"s.c{index}" for index, name in enumerate(names)}
    merger.when_not_matched_insert(values, "not s.lost")
    metrics = commit.run(merger)
    if metrics["num_target_rows_deleted"] != len(found):
        raise LakeTableError(
            f"{commit.table.table_uri}: the merge deleted another number of rows than it counted before"
        )


def _of(table: pa.Table, names: list[str]) -> pa.Schema:
    return table.select(names).schema


def _same(target: str, source: str, kind: pa.DataType) -> str:
    """Return the SQL condition that two values are equal, with NULL equal to NULL. It allows a hash join.

    Floats are compared as lists: only in a list does DataFusion distinguish -0.0 from 0.0.
    """
    if pa.types.is_floating(kind):
        target, source = f"make_array({target})", f"make_array({source})"
    return f"({target} is not distinct from {source})"
